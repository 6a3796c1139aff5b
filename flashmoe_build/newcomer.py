"""``./nox -s newcomer``: follows README and the guides to the letter on a clean machine, by running their own code blocks.

Each ```bash block of these pages is run as written, in one folder and one shell's environment, then each ```python block. The address
of the repository is redirected to this checkout (git's ``insteadOf``), HOME is an empty folder, and ``pip`` and ``python`` come from a new
virtual environment. Prints one line per block, and fails if a block failed or the time limit was reached.

    --limit MINUTES   20 by default; downloads depend on the network
    --here            build for the CPU only, with this machine's caches and packages: minutes, to test the pages
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashmoe_build.program import ROOT, Stopwatch, ending, finish
from flashmoe_tools.report import Check, Report, Verdict

PAGES = ("README.md", "docs/guides/serving.md", "docs/guides/training.md", "docs/guides/loading-weights.md",
         "docs/guides/from-flash-attn.md", "docs/guides/tuning.md", "docs/guides/troubleshooting.md")  # fmt: skip
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
KEPT = ("PATH", "LANG", "LC_ALL", "TERM", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "PIP_CERT", "PIP_INDEX_URL", "UV_DEFAULT_INDEX",
        "UV_INDEX_URL", "PIP_CONFIG_FILE", "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "https_proxy", "http_proxy", "no_proxy")  # fmt: skip
TAIL = 400


@dataclass(frozen=True)
class Block:
    """One block of a page; ``folder``: where to run it, after any ``cd`` in earlier blocks."""

    page: str
    number: int
    kind: str
    text: str

    @property
    def title(self) -> str:
        return f"{self.page}, block {self.number}: {self.text.strip().splitlines()[0][:60]}"


def blocks(root: Path, pages: Sequence[str] = PAGES) -> Iterator[Block]:
    for page in pages:
        found = BLOCK.findall((root / page).read_text(encoding="utf-8"))
        yield from (Block(page, number, kind, text) for number, (kind, text) in enumerate(found, 1))


def environment(folder: Path, root: Path, *, here: bool) -> dict[str, str]:
    """The environment of a newcomer's shell. git finds this checkout at the address that the pages name."""
    source = re.search(r'^Source = "(.*)"$', (root / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    address = source[1] if source else ""
    kept = {name: value for name, value in os.environ.items() if name in KEPT}
    git = {"GIT_CONFIG_COUNT": "2", "GIT_CONFIG_KEY_0": f"url.{root.as_uri()}.insteadOf", "GIT_CONFIG_VALUE_0": address}
    git |= {"GIT_CONFIG_KEY_1": "safe.directory", "GIT_CONFIG_VALUE_1": str(root / ".git")}
    made = {**kept, **git, "HOME": str(folder / "home"), "PATH": f"{folder / 'venv' / 'bin'}:{kept['PATH']}"}
    if here:
        caches = {name: os.environ[name] for name in ("UV_CACHE_DIR", "FLASHMOE_CACHE_DIR") if name in os.environ}
        made |= {
            "FLASHMOE_ARCHS": "none",
            "PIP_NO_DEPS": "1",
            "UV_CACHE_DIR": str(Path.home() / ".cache" / "uv"),
            **caches,
        }
    return made


def follow(root: Path, folder: Path, limit: float, *, here: bool) -> list[Check]:
    """Run every block in page order; after a failure the rest is not run."""
    (folder / "home").mkdir()
    venv = [sys.executable, "-m", "venv", *(["--system-site-packages"] if here else []), str(folder / "venv")]
    subprocess.run(venv, check=True, timeout=120)
    if here:  # a venv made from a venv sees only the base's packages
        _see_packages_of_this(folder / "venv")
    variables, where, end = environment(folder, root, here=here), folder, time.monotonic() + limit
    checks: list[Check] = []
    for block in blocks(root):
        if checks and checks[-1].verdict is Verdict.FAIL:
            checks.append(Check(block.title, Verdict.SKIP, "not run"))
            continue
        began = time.monotonic()
        found, where = run_block(block, where, variables, end - began)
        seconds = f"{time.monotonic() - began:.0f} s"
        checks.append(Check(block.title, Verdict.FAIL if found else Verdict.PASS, found or seconds))
        print(f"{checks[-1].verdict} {checks[-1].name}: {checks[-1].found}", flush=True)
    return checks


def _see_packages_of_this(venv: Path) -> None:
    (site,) = venv.glob("lib/python*/site-packages")
    outer = [path for path in sys.path if path.endswith("site-packages")]
    (site / "outer.pth").write_text("".join(f"{path}\n" for path in outer), encoding="utf-8")


def run_block(block: Block, where: Path, variables: Mapping[str, str], limit: float) -> tuple[str, Path]:
    """What went wrong (empty if nothing did), and the shell's last working directory."""
    if limit <= 0:
        return "the time limit was reached before it", where
    script = f"{block.text}\npwd >&3\n" if block.kind == "bash" else ""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as folder:
        words = (
            ["bash", "-euo", "pipefail", "-c", f"exec 3>&{folder.fileno()}\n{script}"] if script else ["python", "-"]
        )
        try:
            done = subprocess.run(
                words,
                cwd=where,
                env=variables,
                input=None if script else block.text,
                stdin=subprocess.DEVNULL if script else None,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=limit,
                check=False,
                pass_fds=[folder.fileno()],
            )
        except subprocess.TimeoutExpired:
            return "the time limit was reached", where
        folder.seek(0)
        ended = folder.read().strip()
    if done.returncode:
        return f"exit {done.returncode}: ...{done.stdout.strip()[-TAIL:]}", where
    return "", Path(ended or where)


def newcomer(limit_minutes: float, *, here: bool) -> Report:
    clock = Stopwatch()
    with tempfile.TemporaryDirectory(prefix="newcomer-") as temporary:
        checks = follow(ROOT, Path(temporary), 60 * limit_minutes, here=here)
    return clock.report("newcomer", checks, {"pages": list(PAGES), "here": here, "limit_minutes": limit_minutes})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=float, default=20.0, metavar="MINUTES", help="fail if it takes longer")
    parser.add_argument("--here", action="store_true", help="only the CPU, with this machine's caches and packages")
    options = parser.parse_args(arguments)
    return ending(lambda: finish(newcomer(options.limit, here=options.here)))


if __name__ == "__main__":
    sys.exit(main())
