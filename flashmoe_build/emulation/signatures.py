"""Reads the function signatures of the wrapper headers, real and emulated, as comparable text."""

import re
from pathlib import Path

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_DIRECTIVE = re.compile(r"^\s*#(?:[^\n]*\\\n)*[^\n]*$", re.MULTILINE)
_SITE = re.compile(r",?\s*Site site(?: = Site::here\(\))?(?=\))")
_FUNCTION = re.compile(
    r"(template\s*<[^<>]*>\s*)?(static\s+)?__device__\s+__forceinline__\s+([^{};]*?\))\s*(const)?\s*[{;:]"
)


def _plain(text: str) -> str:
    return _DIRECTIVE.sub("", _COMMENT.sub("", text))


def _normal(signature: str) -> str:
    """One line, without the call site. The emulation takes some registers by reference to check that they do not change; these
    become values, as in the real wrapper."""
    signature = _SITE.sub("", signature)
    signature = re.sub(r"const uint32_t& |uint32_t&& ", "uint32_t ", signature)
    signature = re.sub(r"\s+", " ", signature)
    return re.sub(r"\(\s+", "(", signature).strip()


def functions(path: Path) -> set[str]:
    """Every device function of a header: template parameters, result, name and parameters."""
    found = set()
    for match in _FUNCTION.finditer(_plain(path.read_text(encoding="utf-8"))):
        template, _static, signature, constant = match.groups()
        if template is not None and re.match(r"template\s*<\s*>", template):
            continue  # a specialisation; the primary template is listed
        found.add(_normal(" ".join(part for part in (template, signature, constant) if part)))
    return found
