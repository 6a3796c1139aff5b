"""Whether the package loads the files that the wheel holds, by name, before anything is imported."""

import ast
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from email.parser import Parser
from pathlib import PurePosixPath

from flashmoe_tools.audit.context import failed, limited, listing, passed, warned
from flashmoe_tools.audit.elf import ElfFacts
from flashmoe_tools.audit.inputs import OUR_LIBRARY, Wheel
from flashmoe_tools.report import Check

_DEFINED = re.compile(r"\b(?:def|class) (_[A-Za-z]\w*)|\b(_[A-Za-z]\w*)\s*(?::[^=\n]+)?=")
NAME = "the package loads this file"
# Matches an import of a private top-level module of the package, or a shared object passed to a loader.
_ASKED = re.compile(
    r"""^(?:from\s+\.\s+import\s+|from\s+\.|import\s+(?:\w+\.)*|from\s+\w+\s+import\s+)(_[A-Za-z]\w*)\b"""
    r"""|(?:load_library|CDLL|dlopen)\([^\n]*["'](?:[^"'\n]*/)?([\w.+-]+\.so[\w.]*)["']""",
    re.MULTILINE,
)


def check_loads(wheel: Wheel, facts: Mapping[str, ElfFacts]) -> list[Check]:
    """Checks that every extension is loaded under its own file name, and that no missing one is loaded."""
    used = _mentioned(wheel) | {n for f in facts.values() for n in f.needed}
    idle = [e for e in wheel.extensions if e not in used and PurePosixPath(e).name not in used]
    checks = [
        *limited([_lost_check(source, line, what, idle) for source, line, what in _lost(wheel, idle)]),
        *_init_checks(wheel, facts),
        *_our_checks(wheel),
    ]
    if checks:
        return checks
    unnamed = [e for e in idle if not _is_module_of_users(e)]
    if unnamed:
        return [
            warned(
                NAME,
                f"no import and no load_library names {listing(unnamed, 4)}",
                "each extension loaded by name",
                "The name may be built at run time, which cannot be followed in the sources.",
                "import the package once to be sure",
            )
        ]
    how = (
        "modules that are imported by their own names" if idle else "named in the sources, or needed by another library"
    )
    return [passed(NAME, f"{listing(wheel.extensions, 4)}: {how}")]


def _is_module_of_users(extension: str) -> bool:
    """Whether the extension is a public top-level module that users of the wheel import directly."""
    path = PurePosixPath(extension)
    return len(path.parts) == 1 and not path.name.startswith(("_", "lib"))


def _mentioned(wheel: Wheel) -> set[str]:
    """Extensions whose module or file name appears anywhere in some source."""
    names = {member: PurePosixPath(member).name for member in wheel.extensions}
    words = {member: (name, name.split(".", 1)[0]) for member, name in names.items()}
    return {m for m in words if any(word in text for word in words[m] for text in wheel.sources.values())}


def _lost(wheel: Wheel, idle: Sequence[str]) -> list[tuple[str, int, str]]:
    """(source, line, name) of every private module or file that a source loads but the wheel lacks.

    Only looked for if some extension is loaded by no source.
    """
    if not idle:
        return []
    held = {
        part
        for name in wheel.names
        for path in [PurePosixPath(name)]
        for part in (*path.parts, path.name.split(".", 1)[0])
    }
    stated = Parser().parsestr(wheel.metadata["METADATA"]).get_all("Requires-Dist", [])
    required = {re.split(r"[^A-Za-z0-9_.]", str(line).strip())[0].replace(".", "_").lower() for line in stated} - {""}
    defined = {next(filter(None, found)) for text in wheel.sources.values() for found in _DEFINED.findall(text)}
    lost: dict[str, tuple[str, int, str]] = {}
    for source, text in wheel.sources.items():
        for match in _ASKED.finditer(text):
            what = next(filter(None, match.groups()))
            origin = re.match(r"from\s+(\w+)", match[0])
            lent = any(what.lstrip("_").lower().startswith(name) for name in required)  # cffi provides _cffi_backend
            standard = {what, origin[1] if origin else what} & sys.stdlib_module_names
            sought = ".so." in what  # searched for by the loader, such as libcuda.so.1
            is_there = what in held or what in defined or standard or lent or sought
            if not is_there and not _is_prose(text, match.start()):
                lost.setdefault(what, (source, text.count("\n", 0, match.start()) + 1, what))
    return list(lost.values())


def _is_prose(text: str, offset: int) -> bool:
    """Whether the position is inside a comment or a string used as a statement, such as a docstring."""
    if "#" in text[text.rfind("\n", 0, offset) + 1 : offset]:
        return True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False  # the check of sources reports Python that cannot be parsed
    line = text.count("\n", 0, offset) + 1
    strings = (node for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    return any(node.lineno <= line <= node.end_lineno for node in strings)  # type: ignore[operator]


def _lost_check(source: str, line: int, what: str, idle: Sequence[str]) -> Check:
    """``idle``: extensions that nothing loads; if there is only one, it is most likely the one that was meant."""
    kind = "file" if ".so" in what else "module"
    if len(idle) == 1:
        cause = f"built as `{PurePosixPath(idle[0]).name}`, loaded as `{what}`"
    else:
        cause = f"nothing in the wheel is called `{what}`; it was left out, or is a generated file that was not written"
    return failed(
        f"{NAME}: {what}",
        found=f"{source}:{line} loads {kind} `{what}`; the wheel holds {listing(idle, 4)}",
        expected=f"a {kind} named `{what}`",
        why="It runs at `import`, which fails although the build succeeded.",
        cause=cause,
        next_step="use one name in the build and in the import",
    )


def _init_checks(wheel: Wheel, facts: Mapping[str, ElfFacts]) -> list[Check]:
    """A Python extension module must export PyInit_ with its file's name."""
    checks = []
    for member, elf in facts.items():
        stem = PurePosixPath(member).name.split(".", 1)[0]
        inits = sorted(s.name for s in elf.exported if s.name.startswith("PyInit_"))
        named = {init.removeprefix("PyInit_") for init in inits}
        quoted = any(
            f"{quote}{word}{quote}" in text for text in wheel.sources.values() for word in named for quote in "'\""
        )
        if (
            inits and stem not in named and not quoted
        ):  # a loader may pass the name: spec_from_file_location(name, path)
            checks.append(
                failed(
                    f"module name: {PurePosixPath(member).name}",
                    found=f"it exports {listing(inits, 3)}",
                    expected=f"PyInit_{stem}",
                    why="`import` fails: dynamic module does not define module export function.",
                    cause="compiled under another module name (TORCH_EXTENSION_NAME) than its file has",
                    next_step=f"compile it as `{stem}`, or rename the file to {inits[0].removeprefix('PyInit_')}.so",
                )
            )
    return checks


def _our_checks(wheel: Wheel) -> list[Check]:
    """Our package loads exactly one file, with a fixed name."""
    if OUR_LIBRARY not in {PurePosixPath(e).name for e in wheel.extensions} and not wheel.is_ours:
        return []
    if not [e for e in wheel.extensions if e != f"flashmoe/{OUR_LIBRARY}"]:
        return []
    return [
        failed(
            NAME,
            found=listing(wheel.extensions),
            expected=f"flashmoe/{OUR_LIBRARY} and no other",
            why="The package loads that one file.",
            cause="the build named or placed the library differently",
            next_step=f"name it {OUR_LIBRARY} and put it into flashmoe/",
        )
    ]
