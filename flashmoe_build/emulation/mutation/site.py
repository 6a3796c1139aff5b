"""A function of a kernel source as mutation operators see it: statements, binary operations, calls, conditional expressions."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from flashmoe_build.emulation.mutation.source import Function, Source

_KEYWORDS = frozenset(
    (
        "if",
        "for",
        "while",
        "do",
        "else",
        "return",
        "break",
        "continue",
        "switch",
        "case",
        "using",
        "static",
        "constexpr",
        "const",
    )
)
ASSIGNMENTS = frozenset(("=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>="))
# Lowest precedence first. Any other token ends every operand.
_LEVELS = ("||", "&&", "|", "^", "&", "== !=", "< > <= >=", "<< >>", "+ -", "* / %")
LEVEL = {word: level for level, words in enumerate(_LEVELS) for word in words.split()}
_ENDS = frozenset((",", ";", "?", ":", "return", *ASSIGNMENTS))


@dataclass(frozen=True)
class Edit:
    """The text between two offsets of the file becomes ``replacement``."""

    operator: str
    start: int
    end: int
    replacement: str
    what: str
    rank: int  # 0: synchronisation, 1: bounds and conditions, 2: arithmetic


class Site:
    """A function of a source, with the queries that operators need."""

    def __init__(self, source: Source, function: Function) -> None:
        self.source = source
        self.function = function
        self.words = source.words
        self.partners = source.partners

    def wide_names(self) -> list[str]:
        """Names that the function declares as int64_t, including its parameters."""
        first = self.function.begin
        head = self.source.text[
            max(0, self.source.tokens[first].start - 1500) : self.source.tokens[self.function.end - 1].end
        ]
        head = head[max(0, head.rfind("\n}", 0, 1500)) :]
        return [*re.findall(r"\bint64_t&? (\w+)", head), "int64_t"]

    def edit(self, operator: str, begin: int, end: int, replacement: str, rank: int) -> Edit:
        tokens = self.source.tokens
        start, stop = tokens[begin].start, tokens[end - 1].end
        shown = " ".join(self.source.text[start:stop].split())
        what = f"{operator}: {_short(shown)}" + (
            f" becomes {_short(' '.join(replacement.split()))}" if replacement else ""
        )
        return Edit(operator, start, stop, replacement, what, rank)

    def indices(self) -> range:
        return range(self.function.begin, self.function.end)

    def is_binary(self, index: int) -> bool:
        return self.words[index] in LEVEL and self.source.is_spaced(index) and index not in self.partners

    def left_of(self, index: int) -> int:
        """The index where the binary operator's left operand begins."""
        level, at = LEVEL[self.words[index]], index - 1
        while at > self.function.begin:
            if at in self.partners and self.words[at] in ")]}>":
                at = self.partners[at] - 1
            elif self.ends_operand(at) or (self.is_binary(at) and LEVEL[self.words[at]] < level):
                break
            else:
                at -= 1
        return at + 1

    def right_of(self, index: int) -> int:
        """The index where the right operand ends."""
        level, at = LEVEL[self.words[index]], index + 1
        while at < self.function.end:
            if at in self.partners and self.words[at] in "([{<":
                at = self.partners[at] + 1
            elif self.ends_operand(at) or (self.is_binary(at) and LEVEL[self.words[at]] <= level):
                break
            else:
                at += 1
        return at

    def ends_operand(self, at: int) -> bool:
        return self.words[at] in _ENDS or self.words[at] in ("(", ")", "[", "]", "{", "}") or at in self.partners

    def with_operator(self, index: int, word: str) -> str:
        """The operation at the index with its operator replaced."""
        begin, end = self.left_of(index), self.right_of(index)
        return f"{self.source.between(begin, index)} {word} {self.source.between(index + 1, end)}"

    def statements(self) -> Iterator[tuple[int, int]]:
        """(begin, end) of each simple statement that is not a declaration; its semicolon is the last token."""
        for index in self.indices():
            if self._begins_statement(index):
                end = self._end_of_statement(index)
                if end is not None and not self._is_declaration(index, end):
                    yield index, end

    def _begins_statement(self, index: int) -> bool:
        before = self.words[index - 1]
        if self.words[index] in _KEYWORDS | {"{", "}", ";", ")"}:
            return False
        if before in ("{", "}", ";", "else"):
            return not (before == "{" and self._is_initialiser(index - 1)) and not self._in_for(index)
        return before == ")" and self._heads_control(self.partners.get(index - 1, 0))

    def _is_initialiser(self, brace: int) -> bool:
        before = self.words[brace - 1]
        return before not in (")", "else", "const", "{", "}", ";", "mutable", "noexcept") and not (
            brace < self.function.begin + 3
        )

    def _in_for(self, index: int) -> bool:
        at = index - 1
        while at > self.function.begin and self.words[at] not in "{}":
            if self.words[at] == "(" and self.partners.get(at, 0) > index:
                return True
            at = self.partners[at] - 1 if self.words[at] == ")" and at in self.partners else at - 1
        return False

    def _heads_control(self, opening: int) -> bool:
        before = self.words[opening - 1]
        return before in ("if", "for", "while") or (before == "constexpr" and self.words[opening - 2] == "if")

    def _end_of_statement(self, index: int) -> int | None:
        at = index
        while at < self.function.end:
            word = self.words[at]
            if word == ";":
                return at + 1
            if word in ("}", ")", "]"):
                return None
            at = self.partners[at] + 1 if at in self.partners else at + 1
        return None

    def _is_declaration(self, begin: int, end: int) -> bool:
        """Two adjacent names outside brackets, or a type and a pointer: ``int x = 0;``, ``T* p = q;``, ``Spec::Map<8> map(a);``."""
        at = begin
        while at < end:
            token = self.source.tokens[at]
            follows = self.words[at + 1] if at + 1 < end else ""
            if self.words[at] in ASSIGNMENTS or self.words[at] in ("(", "[", ".", "->", "++", "--"):
                return False
            ends_type = token.is_name or (self.words[at] in (">", "*", "&") and at > begin)
            if ends_type and follows and self.source.tokens[at + 1].is_name:
                return not (token.is_name and self.words[at] == "template") and follows != "template"
            at = self.partners[at] if self.words[at] == "<" and at in self.partners else at + 1
        return False

    def with_heads(self, begin: int, end: int) -> tuple[int, str]:
        """Where the statement begins, including ifs and loops whose only body it is, and what must replace it."""
        while True:
            before = self.words[begin - 1]
            if before == ")" and self._heads_control(self.partners.get(begin - 1, 0)):
                begin = self.partners[begin - 1] - 1
                begin -= self.words[begin] == "constexpr"
            else:
                return begin, "{}" if before == "else" or self.words[end] == "else" else ""

    def callee(self, begin: int, end: int) -> str:
        """The name of the function that the statement calls last, outside brackets; empty if there is none."""
        opening = self.partners.get(end - 2)
        if self.words[end - 2] != ")" or opening is None:
            return ""
        at = opening - 1
        if self.words[at] == ">" and at in self.partners:
            at = self.partners[at] - 1
        return self.words[at] if self.source.tokens[at].is_name else ""


def top(site: Site, begin: int, end: int) -> list[str]:
    """The words of a statement that are outside brackets."""
    words, at = [], begin
    while at < end:
        if at in site.partners and site.partners[at] > at:
            at = site.partners[at] + 1
        else:
            words.append(site.words[at])
            at += 1
    return words


def until(site: Site, at: int, word: str) -> int:
    while site.words[at] != word:
        at = site.partners[at] + 1 if at in site.partners and site.partners[at] > at else at + 1
    return at


def colon_of(site: Site, at: int) -> int | None:
    depth = 0
    while at < site.function.end:
        word = site.words[at]
        if at in site.partners and site.partners[at] > at:
            at = site.partners[at]
        elif word == "?":
            depth += 1
        elif word == ":":
            if depth == 0:
                return at
            depth -= 1
        elif word in (";", ")", "}", "]"):
            return None
        at += 1
    return None


def end_of_choice(site: Site, at: int) -> int:
    while site.words[at] not in (",", ";", ")", "}", "]", ":") and not (site.words[at] == ">" and at in site.partners):
        at = site.partners[at] + 1 if at in site.partners and site.partners[at] > at else at + 1
    return at


def arguments_of(site: Site, opening: int) -> list[tuple[int, int]]:
    close = site.partners[opening]
    sides, begin, at = [], opening + 1, opening + 1
    while at < close:
        if site.words[at] == ",":
            sides.append((begin, at))
            begin = at + 1
        at = site.partners[at] + 1 if at in site.partners and site.partners[at] > at else at + 1
    return [*sides, (begin, close)]


def is_constant(site: Site, begin: int, end: int) -> bool:
    """Whether there are only template parameters, constants and numbers: a compile-time expression, where an edit seldom compiles."""
    names = [site.words[at] for at in range(begin, end) if site.source.tokens[at].is_name]
    return all(re.fullmatch(r"k[A-Z]\w*|[A-Z]\w*|typename|template|sizeof", name) for name in names)


def _short(text: str, most: int = 90) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
