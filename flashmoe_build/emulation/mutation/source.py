"""Tokens, brackets and functions of a kernel source, as far as mutation operators need them.

The sources are formatted (clang-format): a binary operator has white space on both sides; a template's angle bracket, a
pointer's star and a sign do not. So they can be told apart without a grammar, and no parser is needed as a dependency.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

_TOKEN = re.compile(
    r"""
    (?P<skip> \s+ | //[^\n]* | /\*.*?\*/ | ^[ ]*\#(?:[^\n\\]|\\.)* )
  | (?P<token> "(?:[^"\\]|\\.)*" | '(?:[^'\\]|\\.)+' | [A-Za-z_]\w* | \d[\w.]*(?:(?<=[eE])[-+]\d+\w*)?
      | <<= | >>= | -> | :: | <= | >= | == | != | && | \|\| | \+\+ | -- | [-+*/%&|^]= | << | . )
    """,
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
_CLOSES = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True)
class Token:
    text: str
    start: int
    end: int

    @property
    def is_name(self) -> bool:
        return self.text[0].isalpha() or self.text[0] == "_"


@dataclass(frozen=True)
class Function:
    """A function's initialisers and body: tokens [begin, end)."""

    name: str  # with its struct: Consumer.release
    begin: int
    end: int


class Source:
    """One file. Tokens are referred to by index."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = [
            Token(match["token"], match.start(), match.end()) for match in _TOKEN.finditer(text) if match["token"]
        ]
        self.words = [token.text for token in self.tokens]

    def between(self, begin: int, end: int) -> str:
        """The text of tokens [begin, end)."""
        return self.text[self.tokens[begin].start : self.tokens[end - 1].end] if begin < end else ""

    def is_spaced(self, index: int) -> bool:
        """Whether there is white space on both sides."""
        token = self.tokens[index]
        return self.text[token.start - 1].isspace() and self.text[token.end : token.end + 1].isspace()

    @cached_property
    def partners(self) -> dict[int, int]:
        """The closing bracket of each opening one and vice versa, including templates' angle brackets."""
        found: dict[int, int] = {}
        open_ones: list[int] = []
        for index, word in enumerate(self.words):
            if word in _CLOSES or (word == "<" and self._opens_template(index)):
                open_ones.append(index)
            elif word == ">":
                if open_ones and self.words[open_ones[-1]] == "<" and not self.is_spaced(index):
                    other = open_ones.pop()
                    found[other], found[index] = index, other
            elif word in _CLOSES.values():
                while open_ones and _CLOSES.get(self.words[open_ones[-1]]) != word:
                    open_ones.pop()
                if open_ones:
                    other = open_ones.pop()
                    found[other], found[index] = index, other
        return found

    def _opens_template(self, index: int) -> bool:
        after_template = self.words[index - 1] == "template"
        return after_template or (self.tokens[index - 1].is_name and not self.is_spaced(index))

    @cached_property
    def functions(self) -> tuple[Function, ...]:
        return tuple(self._functions())

    def _functions(self) -> Iterator[Function]:
        scopes: list[tuple[int, str]] = []  # closing bracket and name of structs and namespaces
        index = head = 0
        while index < len(self.words):
            word = self.words[index]
            if word == "{":
                close = self.partners[index]
                kind, name, begin = self._head(head, index)
                if kind == "scope":
                    scopes.append((close, name))
                else:
                    if kind == "function":
                        yield Function(".".join([*(text for _, text in scopes if text), name]), begin, close)
                    index = close
                head = index + 1
            elif word in (";", "}"):
                head = index + 1
                if scopes and scopes[-1][0] == index:
                    scopes.pop()
            index += 1

    def _head(self, begin: int, brace: int) -> tuple[str, str, int]:
        """The construct that a brace outside functions opens: its kind, its name, and where a function's initialisers begin."""
        index = begin
        while index < brace:
            word = self.words[index]
            if word == "namespace":
                return "scope", "", 0
            if word == "enum":
                return "other", "", 0
            if word in ("struct", "class"):
                return "scope", self.words[index + 1], 0
            if word == "<" and index in self.partners:
                index = self.partners[index]
            elif word == "(":
                name = self.words[index - 1]
                if not name.startswith("__") and self.tokens[index - 1].is_name:
                    return "function", name, self.partners[index] + 1
                index = self.partners[index]
            index += 1
        return "other", "", 0
