"""What a C++ symbol's name says: which project it belongs to, and which other symbols nearly match it."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

TORCH_ROOTS = frozenset({"at", "c10", "torch", "caffe2", "c10d"})
_PREFIXES = (
    "non-virtual thunk to ",
    "virtual thunk to ",
    "typeinfo name for ",
    "typeinfo for ",
    "vtable for ",
    "VTT for ",
    "guard variable for ",
)
_OPERATORS = (
    ("operator()", "operator_call"),
    ("operator<<", "operator_shl"),
    ("operator>>", "operator_shr"),
    ("operator->", "operator_arrow"),
    ("operator<=", "operator_le"),
    ("operator>=", "operator_ge"),
    ("operator<", "operator_lt"),
    ("operator>", "operator_gt"),
)
HALF_TYPES = ("c10::Half", "at::Half", "__half", "half", "torch::headeronly::Half")
BFLOAT_TYPES = ("c10::BFloat16", "at::BFloat16", "__nv_bfloat16", "nv_bfloat16", "torch::headeronly::BFloat16")
_WORDS = tuple((w, "fp16") for w in HALF_TYPES) + tuple((w, "bf16") for w in BFLOAT_TYPES)


def root(mangled: str) -> str:
    """The outermost namespace (or the plain name) of what a symbol names.

    ``_ZN8flashmoe1fIN3c104HalfEEEvv`` belongs to flashmoe: a torch type among its arguments does not make it torch's.
    The standard library's names give "std"; a C name gives itself.
    """
    if not mangled.startswith("_Z"):
        return mangled
    rest = re.sub(r"^_Z(?:T[VTISH]|GV|GR|Th?n?\d*_|Tv\d*_n?\d*_|Tc\w\d*_?\d*_)?Z*", "", mangled)
    rest = re.sub(r"^N[rVK]*[RO]?", "", rest)
    if rest.startswith(("St", "Sa", "Ss", "Sb", "Si", "So", "Sd")):
        return "std"
    length = re.match(r"L?(\d+)", rest)
    if length is None:
        return mangled
    return rest[length.end() : length.end() + int(length.group(1))]


def is_torch(mangled: str) -> bool:
    """Whether a symbol is a C++ entity of torch."""
    return mangled.startswith("_Z") and root(mangled) in TORCH_ROOTS


def qualified_name(demangled: str) -> str:
    """``void flashmoe::f<__half>(int)`` -> ``flashmoe::f``: no return type, template arguments or parameters."""
    text = demangled.replace("(anonymous namespace)", "{anonymous}")
    for prefix in _PREFIXES:
        text = text.removeprefix(prefix)
    for spelled, word in _OPERATORS:
        text = text.replace(spelled, word)
    kept, depth = [], 0
    for letter in text:
        if letter == "<":
            depth += 1
        elif letter == ">":
            depth -= 1
        elif depth == 0:
            if letter == "(":
                break
            kept.append(letter)
    words = "".join(kept).split()
    return words[-1] if words else demangled


def canonical_types(demangled: str) -> str:
    """The name with every spelling of the 16-bit types replaced by one word, to find names that differ only there."""
    text = demangled
    for spelled, word in _WORDS:
        text = re.sub(rf"(?<![\w:]){re.escape(spelled)}(?!\w)", word, text)
    return text


@dataclass(frozen=True)
class NearMiss:
    """Why a name is missing although a similar one is defined."""

    cause: str
    defined: tuple[str, ...]  # demangled names that nearly match


def explain(missing: str, defined: Iterable[str]) -> NearMiss | None:
    """Compares a missing demangled name with the given ones; None if none of them has the same qualified name."""
    base = qualified_name(missing)
    same = sorted({name for name in defined if name != missing and qualified_name(name) == base})
    if not same:
        return None
    twins = [name for name in same if canonical_types(name) == canonical_types(missing)]
    if twins:
        cause = (
            f"`{twins[0]}` is defined, `{missing}` is required: the types name the same 16 bits, but as different C++ types "
            "they mangle differently, so caller and callee never meet"
        )
        return NearMiss(cause, tuple(twins))
    required, there = template_arguments(missing), [template_arguments(name) for name in same]
    if required and any(there):
        have = ", ".join(sorted({f"<{arguments}>" for arguments in there if arguments}))
        cause = f"`{base}` is instantiated for {have} but not for <{required}>: the caller uses a type that was never instantiated"
        return NearMiss(cause, tuple(same))
    cause = (
        f"`{base}` is defined with another signature ({'; '.join(same[:3])}): the caller was compiled against a "
        "declaration that this definition does not have"
    )
    return NearMiss(cause, tuple(same))


def template_arguments(demangled: str) -> str:
    """The text between the last balanced angle brackets before the parameters; "" if it is not a template."""
    head = qualified_name(demangled).rsplit("::", 1)[-1]
    behind, depth = demangled.partition(f"{head}<")[2], 1
    for index, letter in enumerate(behind):
        depth += {"<": 1, ">": -1}.get(letter, 0)
        if depth == 0:
            return behind[:index]
    return ""
