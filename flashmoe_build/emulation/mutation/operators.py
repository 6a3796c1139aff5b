"""Mutation operators: mistakes that a rule can make in a kernel. Each yields edits of one function.

In the literature: statement deletion, operand deletion, relational and arithmetic operator replacement, condition forcing.
"""

import re
from collections.abc import Callable, Iterator
from itertools import pairwise

from flashmoe_build.emulation.mutation.site import (
    ASSIGNMENTS,
    LEVEL,
    Edit,
    Site,
    arguments_of,
    colon_of,
    end_of_choice,
    is_constant,
    top,
    until,
)
from flashmoe_build.emulation.mutation.source import Function, Source

# Calls that synchronise, including the kernels' own helpers: release_key, sync_consumer, wait_value.
_SYNCHRONISES = re.compile(
    r"barrier|sync|fence|wait|commit|arrive|release|turn|semaphore|setmaxnreg|cp_async|tma_|bulk_|advance|skip|clear|finish|pass_"
)
# Not an instruction, or one that the emulated machine ignores: removing them cannot be noticed there.
_WITHOUT_EFFECT = (
    "wgmma_fence_operands",
    "grid_launch_dependents",
    "prefetch_tensor_map",
    "static_assert",
    "static_cast",
)
_PAIRS = frozenset(("minimum", "maximum", "min", "max", "max_ftz", "min_nan", "fmaxf", "fminf"))
_OTHER = {"minimum": "maximum", "maximum": "minimum", "min": "max", "max": "min"}
_WAITS = ("wgmma_wait", "cp_async_wait", "tma_store_wait_read", "tma_store_wait")
_COUNTS = ("mbarrier_init", "mbarrier_arrive_expect_tx", "named_barrier_sync", "named_barrier_arrive")
_BOUNDARY = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}


def remove_call(site: Site) -> Iterator[Edit]:
    """Removes a call whose result is unused."""
    for begin, end in site.statements():
        name = site.callee(begin, end)
        if name and name not in _WITHOUT_EFFECT and not any(word in ASSIGNMENTS for word in top(site, begin, end)):
            start, rest = site.with_heads(begin, end)
            yield site.edit("remove-call", start, end, rest, 0 if _SYNCHRONISES.search(name) else 1)


def remove_assignment(site: Site) -> Iterator[Edit]:
    for begin, end in site.statements():
        words = top(site, begin, end)
        if any(word in ASSIGNMENTS or word in ("++", "--") for word in words):
            start, rest = site.with_heads(begin, end)
            yield site.edit("remove-assignment", start, end, rest, 1)


def remove_exit(site: Site) -> Iterator[Edit]:
    """Removes ``if (a row is past the end) return;`` and similar exits."""
    for index in site.indices():
        if site.words[index] == "if" and site.words[index + 1] == "(":
            body = site.partners[index + 1] + 1
            if site.words[body] in ("return", "continue", "break"):
                end = site.words.index(";", body) + 1
                if site.words[end] != "else" and site.words[index - 1] != "else":
                    yield site.edit("remove-exit", index, end, "", 1)


def force_condition(site: Site) -> Iterator[Edit]:
    for index in site.indices():
        is_constexpr = site.words[index + 1] == "constexpr"
        if site.words[index] == "if" and site.words[index + 1 + is_constexpr] == "(":
            begin = index + 2 + is_constexpr
            end = site.partners[begin - 1]
            if ";" in site.words[begin:end] or (is_constexpr and site.words[end + 1] == "{"):
                continue
            yield site.edit("condition-true", begin, end, "true", 1)
            if site.words[end + 1] == "{":
                yield site.edit("condition-false", begin, end, "false", 1)
        elif site.words[index] == "bool" and site.words[index + 2] == "=" and site.words[index - 1] != "constexpr":
            end = until(site, index + 3, ";")
            if end > index + 4:
                yield site.edit("flag-true", index + 3, end, "true", 1)
                yield site.edit("flag-false", index + 3, end, "false", 1)
        elif site.words[index] == "return":
            end = until(site, index + 1, ";")
            if (
                any(word in ("<", ">", "<=", ">=", "==", "!=", "&&", "||") for word in top(site, index + 1, end))
                and "?" not in site.words[index:end]
            ):
                yield site.edit("flag-true", index + 1, end, "true", 1)
                yield site.edit("flag-false", index + 1, end, "false", 1)


def shift_boundary(site: Site) -> Iterator[Edit]:
    for index in site.indices():
        other = _BOUNDARY.get(site.words[index])
        if other and site.is_binary(index):
            begin, end = site.left_of(index), site.right_of(index)
            is_loop = site.words[end] == ";" and site.words[index - 2] == ";"
            over_registers = (is_loop and site.words[index + 1].isdigit()) or is_constant(site, index + 1, end)
            is_counted = is_loop and over_registers and site.words[index - 6] == "int"
            if is_counted or is_constant(site, begin, end) or _is_of_extremes(site, begin, index, end):
                continue
            yield site.edit("boundary", begin, end, site.with_operator(index, other), 1)


def _is_of_extremes(site: Site, begin: int, index: int, end: int) -> bool:
    """``a > b ? a : b``: whether choosing the other side for equal numbers changes nothing."""
    sides = [list(site.words[begin:index]), list(site.words[index + 1 : end])]
    rest = list(site.words[end : end + sum(map(len, sides)) + 2])
    return any(rest == ["?", *one, ":", *other] for one, other in (sides, sides[::-1]))


def drop_operand(site: Site) -> Iterator[Edit]:
    """Drops one side of ``a && b``, ``a + b``, ``a * b``, ``a % b``: predicates, tails, offsets, factors."""
    for index in site.indices():
        word = site.words[index]
        if not site.is_binary(index) or word in ("==", "!=", "<", ">", "<=", ">="):
            continue
        begin, end = site.left_of(index), site.right_of(index)
        if begin >= index or is_constant(site, begin, end):
            continue
        is_logical = word in ("&&", "||")
        operator = "drop-predicate" if is_logical else "drop-operand"
        rank = 1 if is_logical else 2
        left, right = site.source.between(begin, index), site.source.between(index + 1, end)
        yield site.edit(operator, begin, end, left, rank)
        is_first = not (site.is_binary(begin - 1) and LEVEL[site.words[begin - 1]] == LEVEL[word])
        if word in ("&&", "||", "+", "*", "^") and is_first:
            yield site.edit(operator, begin, end, right, rank)


def choose_side(site: Site) -> Iterator[Edit]:
    """Keeps one side of ``a ? b : c``."""
    for index in site.indices():
        if site.words[index] != "?":
            continue
        begin = index - 1
        while begin >= site.function.begin:
            if begin in site.partners and site.words[begin] in ")]}>":
                begin = site.partners[begin] - 1
            elif site.ends_operand(begin):
                break
            else:
                begin -= 1
        colon = colon_of(site, index + 1)
        if colon is None:
            continue
        end = end_of_choice(site, colon + 1)
        yield site.edit("choose-first", begin + 1, end, site.source.between(index + 1, colon), 1)
        yield site.edit("choose-second", begin + 1, end, site.source.between(colon + 1, end), 1)
        if not is_constant(site, index + 1, end):
            first, second = site.source.between(index + 1, colon), site.source.between(colon + 1, end)
            yield site.edit("swap-sides", index + 1, end, f"{second} : {first}", 2)


def change_bound(site: Site) -> Iterator[Edit]:
    """minimum(a, b) becomes a, b, or the maximum; ceil_div rounds down."""
    for index in site.indices():
        if site.words[index + 1] != "(" or site.words[index] not in (*_PAIRS, "ceil_div"):
            continue
        begin = index - 2 if site.words[index - 1] == "::" else index
        close = site.partners[index + 1]
        sides = arguments_of(site, index + 1)
        if len(sides) != 2:
            continue
        first, second = (site.source.between(*side) for side in sides)
        if site.words[index] == "ceil_div":
            yield site.edit("round-down", begin, close + 1, f"({first}) / ({second})", 1)
            continue
        yield site.edit("unbounded", begin, close + 1, f"({first})", 1)
        yield site.edit("unbounded", begin, close + 1, f"({second})", 1)
        if site.words[index] in _OTHER:
            yield site.edit("other-bound", index, index + 1, _OTHER[site.words[index]], 1)


def narrow(site: Site) -> Iterator[Edit]:
    """Computes a 64-bit product, or one with a stride, in 32 bits: it wraps."""
    wide = re.compile(r"int64_t|stride|\b(?:" + "|".join(site.wide_names()) + r")\b")
    for index in site.indices():
        if site.words[index] == "*" and site.is_binary(index):
            begin, end = site.left_of(index), site.right_of(index)
            sides = site.source.between(begin, index), site.source.between(index + 1, end)
            if begin < index and any(wide.search(side) for side in sides):
                left, right = (f"static_cast<unsigned>({_unwrapped(side)})" for side in sides)
                yield site.edit("narrow", begin, end, f"static_cast<int>({left} * {right})", 1)


def change_count(site: Site) -> Iterator[Edit]:
    """Waits leave one more group in flight; barriers expect another number of arrivals, threads or bytes."""
    for index in site.indices():
        word = site.words[index]
        if word in _WAITS and site.words[index + 1] == "<":
            close = site.partners[index + 1]
            yield site.edit("wait-late", index + 2, close, _incremented(site.source.between(index + 2, close)), 0)
        elif word in _COUNTS:
            begin, end = arguments_of(site, index + 1)[1]
            text = site.source.between(begin, end)
            for changed in _other_counts(word, text):
                yield site.edit("wrong-count", begin, end, changed, 0)
            for at in range(begin, end):
                if site.words[at] in ("*", "+") and site.is_binary(at):
                    yield site.edit("wrong-count", at, site.right_of(at), "", 0)
                    yield site.edit("wrong-count", site.left_of(at), at + 1, "", 0)


def shift_by_one(site: Site) -> Iterator[Edit]:
    """``- 1`` becomes ``- 2``, ``> 0`` becomes ``> 1``."""
    for index in site.indices():
        if site.words[index] not in ("-", "+", "<", ">", "<=", ">=") or not site.is_binary(index):
            continue
        begin, end = site.left_of(index), site.right_of(index)
        number = site.source.between(index + 1, end)
        if begin < index and number in ("0", "1", "2"):
            changed = "1" if number == "2" else str(int(number) + 1)
            yield site.edit("one-more", begin, end, f"{site.source.between(begin, index + 1)} {changed}", 1)


def drop_tail(site: Site) -> Iterator[Edit]:
    """Keeps only a of ``a + b - 1``."""
    for index in site.indices():
        if site.words[index] in ("+", "-") and site.is_binary(index):
            begin, end = site.left_of(index), site.right_of(index)
            is_first = begin < index and not (site.is_binary(begin - 1) and site.words[begin - 1] in "+-")
            if is_first and site.words[end] in ("+", "-") and site.is_binary(end):
                while site.words[end] in ("+", "-") and site.is_binary(end):
                    end = site.right_of(end)
                yield site.edit("drop-tail", begin, end, site.source.between(begin, index), 2)


def round_up(site: Site) -> Iterator[Edit]:
    """Rounds a division by a tile size up."""
    for index in site.indices():
        if site.words[index] == "/" and site.is_binary(index):
            begin, end = site.left_of(index), site.right_of(index)
            if re.search(r"kBlock|Rows$|Tiles$", site.words[end - 1]) and not is_constant(site, begin, index):
                left, right = site.source.between(begin, index), site.source.between(index + 1, end)
                yield site.edit("round-up", begin, end, f"ceil_div({left}, {right})", 1)


def flip_literal(site: Site) -> Iterator[Edit]:
    for index in site.indices():
        if site.words[index] in ("true", "false") and site.words[index - 1] in ("=", ",", "(", "<"):
            yield site.edit("flip", index, index + 1, "false" if site.words[index] == "true" else "true", 1)


def first_element(site: Site) -> Iterator[Edit]:
    for index in site.indices():
        if (
            site.words[index] == "["
            and index in site.partners
            and (site.source.tokens[index - 1].is_name or site.words[index - 1] == "]")
        ):
            close = site.partners[index]
            if close > index + 1 and not site.words[index + 1].isdigit() and not is_constant(site, index + 1, close):
                yield site.edit("first-element", index + 1, close, "0", 2)


def swap_operators(site: Site) -> Iterator[Edit]:
    """Swaps quotient and remainder; -= becomes +=."""
    for index in site.indices():
        word = site.words[index]
        if word == "-=":
            yield site.edit("swap", index - 1, index + 1, f"{site.words[index - 1]} +=", 2)
        elif word in ("/", "%") and site.is_binary(index):
            begin, end = site.left_of(index), site.right_of(index)
            is_float = word == "/" and re.search(r"sum|float|scale|\d\.\d", site.source.between(begin, end))
            if not is_float and not is_constant(site, begin, end):
                yield site.edit("swap", begin, end, site.with_operator(index, "%" if word == "/" else "/"), 2)


def swap_coordinates(site: Site) -> Iterator[Edit]:
    """Swaps neighbouring coordinates of a tensor map copy."""
    for index in site.indices():
        if re.fullmatch(r"tma_(load|store)_\dd", site.words[index]) and site.words[index + 1] == "(":
            sides = arguments_of(site, index + 1)
            first = 3 if site.words[index].startswith("tma_load") else 2
            number = int(site.words[index].rpartition("_")[2][0])
            for (begin, middle), (other, end) in pairwise(sides[first : first + number]):
                one, two = site.source.between(begin, middle), site.source.between(other, end)
                if one != two:
                    yield site.edit("swap-coordinates", begin, end, f"{two}, {one}", 1)


def halve_literal(site: Site) -> Iterator[Edit]:
    """Halves a stride or step that is a power of two."""
    for index in site.indices():
        word = site.words[index]
        if word.isdigit() and int(word) >= 8 and int(word) & (int(word) - 1) == 0 and int(word) <= 4096:
            before, after = site.words[index - 1], site.words[index + 1]
            if (
                (before == "*" and site.is_binary(index - 1))
                or (before == "," and after in (",", ")"))
                or (after == "*" and site.is_binary(index + 1))
            ):
                yield site.edit("halve", index, index + 1, str(int(word) // 2), 2)


Operator = Callable[[Site], Iterator[Edit]]
OPERATORS: tuple[Operator, ...] = (
    remove_call,
    change_count,
    remove_exit,
    remove_assignment,
    force_condition,
    shift_boundary,
    shift_by_one,
    choose_side,
    change_bound,
    round_up,
    narrow,
    flip_literal,
    swap_coordinates,
    drop_operand,
    drop_tail,
    swap_operators,
    halve_literal,
    first_element,
)


def edits(source: Source, function: Function) -> Iterator[Edit]:
    """Every distinct edit of the function, operator by operator."""
    site = Site(source, function)
    compile_time = list(_compile_time(site))
    seen: set[tuple[int, int, str]] = set()
    for operator in OPERATORS:
        for edit in operator(site):
            key = (edit.start, edit.end, edit.replacement)
            is_kept = not any(start < edit.start and edit.end <= end for start, end in compile_time)
            if key not in seen and (is_kept or edit.replacement == "true"):
                seen.add(key)
                yield edit


def _compile_time(site: Site) -> Iterator[tuple[int, int]]:
    """The text of static assertions, constants and ``if constexpr`` conditions: an edit there seldom compiles."""
    for index in site.indices():
        word, tokens = site.words[index], site.source.tokens
        if word == "static_assert" or (word == "constexpr" and site.words[index - 1] == "if"):
            yield tokens[index].start, tokens[site.partners[index + 1]].end
        elif word == "constexpr":
            yield tokens[index].start, tokens[until(site, index, ";")].end


def _incremented(text: str) -> str:
    if text.isdigit():
        return str(int(text) + 1)
    choice = re.fullmatch(r"(\w+ \? )(\d+)( : )(\d+)", text)
    if choice:
        return f"{choice[1]}{int(choice[2]) + 1}{choice[3]}{int(choice[4]) + 1}"
    match = re.fullmatch(r"(.* - )(\d+)", text)
    if match:
        return match[1] + str(int(match[2]) - 1)
    return f"({text}) + 1"


def _other_counts(word: str, text: str) -> tuple[str, ...]:
    if word == "mbarrier_arrive_expect_tx":
        return f"{text} / 2", f"{text} + 128"
    if word == "mbarrier_init":
        return (_incremented(text) if text.isdigit() else f"{text} + 1",)
    return (str(int(text) * 2),) if text.isdigit() else (f"{text} * 2",)


def _unwrapped(text: str) -> str:
    """Without a cast to 64 bits and without brackets around the whole expression."""
    match = re.fullmatch(r"(?:static_cast<int64_t>)?(\((?:[^()]|\([^()]*\))*\))", text)
    return match[1][1:-1] if match else text
