"""``nox -s site``: builds the documentation as a searchable site in build/site. A broken link is an error.

The pages are those of the repository. Their links are resolved here: to a page of the site, to a file of the repository, or to
nothing, which is an error. Sphinx then checks every linked page and heading. Links to other sites are not followed.
"""

import argparse
import posixpath
import re
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from flashmoe.__main__ import all_commands, make_parser
from flashmoe._version import __version__
from flashmoe.errors import BuildError, ExitCode
from flashmoe_build.docs import kernel_page
from flashmoe_build.links import ROOT, absolute, repository, rewrite
from flashmoe_tools.tables import load_tables

OUT = ROOT / "build" / "site"
SOURCES = ROOT / "build" / "site-sources"
PACKAGE = ROOT / "build" / "site-package"
REF = "main"
PICTURES = (".svg", ".png")
ROOT_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples.md",
}
# The navigation: a caption, then its pages. Sphinx reports a page that is missing here or that exists only here.
NAVIGATION: Mapping[str, Sequence[str]] = {
    "Use": (
        "install",
        "api",
        "reference",
        "integrations",
        "distributed",
        "same-bits",
        "examples",
        "commands",
        "command",
    ),
    "Guides": tuple(
        f"guides/{name}"
        for name in ("serving", "training", "loading-weights", "models", "from-flash-attn", "tuning", "troubleshooting")
    ),
    "Check and measure": ("doctor", "benchmarks", "audit", "emulation"),
    "Kernels": (
        *("architecture", "performance", "kernels/table"),
        *(f"kernels/{path.stem}" for path in sorted((ROOT / "docs" / "kernels").glob("*.md"))),
    ),
    "Build and trust": ("build", "containers", "release", "security", "contributing", "changelog"),
    "Notebook": tuple(f"notebook/{path.stem}" for path in sorted((ROOT / "docs" / "notebook").glob("*.md"))),
}
FUNCTIONS = {
    "Attention": (
        "flashmoe.attn.api.attention",
        "flashmoe.attn.sdpa.scaled_dot_product_attention",
        "flashmoe.attn.varlen.attention_varlen",
        "flashmoe.attn.kvcache.attention_with_kvcache",
        "flashmoe.attn.merge.merge_attention",
        "flashmoe.attn.smoothing.smooth_keys",
        "flashmoe.attn.dropout.dropout_mask",
        "flashmoe.mla.api.mla_decode",
        "flashmoe.mla.append.mla_append",
        "flashmoe.mla.module.MLA",
        "flashmoe.attn.sdpa_dispatch.explain",
        "flashmoe.attn.module.Attention",
    ),
    "Ways in": (
        "flashmoe.integrations.torch_attention.activate",
        "flashmoe.integrations.torch_attention.deactivate",
        "flashmoe.integrations.torch_attention.activated",
        "flashmoe.integrations.torch_attention.is_active",
        "flashmoe.integrations.transformers.register",
        "flashmoe.integrations.transformers.packed.packed_config",
        "flashmoe.integrations.transformers.cache.E4m3Cache",
        "flashmoe.integrations.transformers.latents.decode_by_latents",
        "flashmoe.compat.install.install_as_flash_attn",
        "flashmoe.compat.install.install_as_flash_attn_3",
        "flashmoe.compat.install.uninstall_flash_attn",
        "flashmoe.compat.flash_attn.flash_attn_func",
        "flashmoe.compat.flash_attn.flash_attn_qkvpacked_func",
        "flashmoe.compat.flash_attn.flash_attn_kvpacked_func",
        "flashmoe.compat.flash_attn.flash_attn_varlen_func",
        "flashmoe.compat.flash_attn.flash_attn_varlen_qkvpacked_func",
        "flashmoe.compat.flash_attn.flash_attn_varlen_kvpacked_func",
        "flashmoe.compat.flash_attn.flash_attn_with_kvcache",
    ),
    "Several GPUs": (
        "flashmoe.distributed.context_parallel.shard_sequence",
        "flashmoe.distributed.context_parallel.unshard_sequence",
        "flashmoe.distributed.context_parallel.context_parallel_attention",
        "flashmoe.distributed.ragged.shard_ragged",
        "flashmoe.distributed.ragged.unshard_ragged",
        "flashmoe.distributed.ragged.context_parallel_attention_varlen",
        "flashmoe.distributed.expert_parallel.ExpertParallel",
        "flashmoe.distributed.dtensor.register_dtensor_rules",
        "flashmoe.distributed.dtensor.AttentionParallel",
        "flashmoe.distributed.dtensor.MoEParallel",
    ),
    "Mixture of experts": (
        "flashmoe.moe.api.fused_moe",
        "flashmoe.moe.api.topk_route",
        "flashmoe.moe.packed.pack_mxfp4",
        "flashmoe.moe.training.quantize_weights",
        "flashmoe.moe.api.grouped_mm",
        "flashmoe.moe.module.MoE",
    ),
    "Linear layers": ("flashmoe.layers.api.linear", "flashmoe.layers.api.patch_linear"),
    "Errors": ("flashmoe.errors",),
}
MODULES = ("flashmoe.errors",)
# Parameters that exist only for error messages or type checkers.
_FOR_MESSAGES = re.compile(r"    \*\*?(?:misspelt|misplaced): NoReturn,\n")
_CELL = re.compile(r"<t[dh]\b.*?</t[dh]>", re.DOTALL)
_CODE = re.compile(r'(?<=<span class="pre">)[^<]{13,}')  # shorter names fit any column
_BREAK = re.compile(r"(?<=\w)[_./,=-]+(?=\w)")
_OVERLOAD = re.compile(r"@overload\ndef .*?(?=\n(?:@overload\n|def |class |# ))", re.DOTALL)


def pages(root: Path = ROOT) -> dict[str, str]:
    """Maps every page's path in the repository to its path in the site."""
    found = sorted(path.relative_to(root / "docs").as_posix() for path in (root / "docs").rglob("*.md"))
    return {**ROOT_PAGES, **{f"docs/{name}": name for name in found if not name.startswith("results/")}}


def rewrite_links(text: str, page: str, site: Mapping[str, str], home: str, root: Path = ROOT) -> str:
    """The text of ``page`` with its links changed to work in the site. Raises BuildError for a broken link."""
    folder = posixpath.dirname(page)

    def change(target: str) -> str:
        path = posixpath.normpath(posixpath.join(folder, target))
        if path in site:
            return posixpath.relpath(site[path], posixpath.dirname(site[page]) or ".")
        if not (root / path).exists():
            msg = f"{page}: the link to {target!r} leads to {path}, which does not exist; correct it"
            raise BuildError(msg)
        if path.endswith(PICTURES):
            return posixpath.relpath(posixpath.join("images", path), posixpath.dirname(site[page]) or ".")
        return absolute(f"]({target})", folder, REF, home)[2:-1]

    return rewrite(text, change)


def navigation() -> str:
    blocks = (
        f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(names) + "\n```"
        for caption, names in NAVIGATION.items()
    )
    return "\n\n".join(blocks) + "\n"


def reference() -> str:
    """The Python interface, from the docstrings; read from the sources, so that nothing must be built or imported."""
    parts = ["# Python reference", "Each is found as `flashmoe.NAME` as well; [the API](api.md) says how they behave."]
    for title, names in FUNCTIONS.items():
        parts.append(f"## {title}")
        for name in names:
            is_class = name.rpartition(".")[2][0].isupper()
            kind = "module" if name in MODULES else "class" if is_class else "function"
            options = ":members:\n" if kind != "function" else ""
            parts.append(f"```{{eval-rst}}\n.. autoapi{kind}:: {name}\n{textwrap.indent(options, '   ')}```")
    return "\n\n".join(parts) + "\n"


def command_page() -> str:
    """The output of ``--help`` for every command."""
    parts = ["# The command", "`flashmoe COMMAND`, or `python -m flashmoe COMMAND`. What `--help` prints:"]
    for name, (_, summary) in all_commands().items():
        (commands,) = (one for one in make_parser({name})._actions if isinstance(one, argparse._SubParsersAction))
        parts.append(f"## flashmoe {name}\n\n{summary}\n\n```text\n{commands.choices[name].format_help()}```")
    return "\n\n".join(parts) + "\n"


def write_sources(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    home, site = repository(), pages()
    texts = {name: rewrite_links((ROOT / page).read_text("utf-8"), page, site, home) for page, name in site.items()}
    texts["index.md"] += "\n" + navigation()
    tables = kernel_page(load_tables(ROOT / "csrc"))
    texts |= {"reference.md": reference(), "command.md": command_page(), "kernels/table.md": tables}
    for picture in (path for path in (ROOT / "docs").rglob("*.*") if path.suffix in PICTURES):
        copied = folder / "images" / picture.relative_to(ROOT)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(picture, copied)
    for name, text in texts.items():
        path = folder / PurePosixPath(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def write_package(folder: Path) -> None:
    """The package as the reference shows it: one signature per function, with defaults, without parameters that nobody should pass."""
    shutil.rmtree(folder, ignore_errors=True)
    for path in sorted((ROOT / "flashmoe").rglob("*.py")):
        text = _OVERLOAD.sub("", path.read_text(encoding="utf-8"))
        text = _FOR_MESSAGES.sub(lambda found: "    *,\n" if "misplaced" in found[0] else "", text)
        shown = folder / path.relative_to(ROOT)
        shown.parent.mkdir(parents=True, exist_ok=True)
        shown.write_text(text, encoding="utf-8")


class _ThirdParty(set[str]):
    """Modules whose imports astroid does not follow: following torch's took three quarters of the site's time."""

    def __contains__(self, name: object) -> bool:
        return str(name).partition(".")[0] not in ("flashmoe", *sys.stdlib_module_names)


def settings(home: str) -> dict[str, Any]:
    return {
        "project": "flashmoe",
        "version": __version__,
        "release": __version__,
        "html_title": f"flashmoe {__version__}",
        "html_theme": "furo",
        "html_theme_options": {"source_repository": home, "footer_icons": []},
        "html_domain_indices": False,  # an index of modules: there is only one
        "html_copy_source": False,
        "html_show_copyright": False,
        "extensions": ["myst_parser", "sphinx.ext.napoleon", "autoapi.extension"],
        "myst_heading_anchors": 4,
        "autoapi_dirs": [str(PACKAGE / "flashmoe")],
        "autoapi_ignore": ["*/flashmoe/__main__.py"],
        "autoapi_generate_api_docs": False,
        "autoapi_keep_files": False,
        "autoapi_python_class_content": "class",
        "autoapi_options": ["members", "undoc-members", "show-inheritance"],
        "add_module_names": False,
        "autodoc_typehints": "none",
        "napoleon_use_param": False,
        "napoleon_use_rtype": False,
        "suppress_warnings": ["autoapi.python_import_resolution", "autoapi.not_readable"],
        "highlight_language": "text",
        "pygments_style": "friendly",
        "html_static_path": [str(ROOT / "docs" / "static")],
        "html_css_files": ["site.css"],
        "maximum_signature_line_length": 60,
    }


def breakable(page: str) -> str:
    """The page's HTML with line breaks allowed after punctuation in table code: a name broken anywhere is hard to read."""

    def soften(cell: re.Match[str]) -> str:
        return _CODE.sub(lambda code: _BREAK.sub(r"\g<0><wbr>", code[0]), cell[0])

    return _CELL.sub(soften, page)


def build(out: Path = OUT, sources: Path = SOURCES, is_check: bool = False) -> int:
    """Returns 0, or 1 after Sphinx has printed what is wrong. A check skips the search and the navigation on every page, two fifths
    of the time, which no page affects."""
    try:
        from astroid.manager import AstroidManager
        from sphinx.application import Sphinx
    except ImportError as error:
        msg = "Sphinx is not in this environment: lockfiles/lint.in has it from Python 3.11 on; FLASHMOE_PYTHON=3.12 ./nox -s site"
        raise BuildError(msg) from error
    AstroidManager.brain["module_denylist"] = _ThirdParty()
    write_sources(sources)
    write_package(PACKAGE)
    trees = sources.with_name("site-trees")
    for stale in (out, trees):  # removed pages must not stay
        shutil.rmtree(stale, ignore_errors=True)
    options = settings(repository()) | ({"html_theme": "basic", "html_theme_options": {}} if is_check else {})
    app = Sphinx(str(sources), None, str(out), str(trees), "html", options, status=None, warningiserror=True)
    app.builder.search = not is_check  # type: ignore[attr-defined]  # only HTML builders have it
    app.build()
    for page in out.rglob("*.html"):
        page.write_text(breakable(page.read_text(encoding="utf-8")), encoding="utf-8")
    return int(app.statuscode)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="nox -s site --", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only whether it can be built, as lint asks")
    args = parser.parse_args(arguments)
    try:
        status = build(is_check=args.check)
    except BuildError as error:
        print(f"BuildError: {error}", file=sys.stderr)
        return ExitCode.FAILED
    pages_built = len(list(OUT.rglob("*.html")))
    print(f"{OUT.relative_to(ROOT)}/index.html: {'wrong, see above' if status else f'{pages_built} pages'}")
    return ExitCode.FAILED if status else ExitCode.OK


if __name__ == "__main__":
    raise SystemExit(main())
