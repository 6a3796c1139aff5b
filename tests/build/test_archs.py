"""FLASHMOE_ARCHS: every spelling, and errors that list the known targets."""

import pytest

from flashmoe.errors import BuildError
from flashmoe_build.compile import archs
from flashmoe_tools.tables import load_tables


def names(request: str) -> list[str]:
    return [target.name for target in archs.resolve(request, load_tables())]


def test_all_is_the_table() -> None:
    assert names("all") == [target.name for target in load_tables().targets]


def test_none_is_cpu_only() -> None:
    assert names("none") == []


@pytest.mark.parametrize("word", ["90a", "sm_90a", "sm90a", "90", "9.0"])
def test_spellings_of_one_target(word: str) -> None:
    assert names(word) == ["sm_90a"]


@pytest.mark.parametrize("word", ["89", "sm_89", "8.9"])
def test_a_gpu_without_a_target_of_its_own_gets_what_serves_it(word: str) -> None:
    assert names(word) == ["sm_80", "sm_86"]


@pytest.mark.parametrize(
    ("word", "targets"),
    [
        ("75", ["sm_75"]),
        ("80", ["sm_80"]),
        ("86", ["sm_80", "sm_86"]),
        ("sm_86", ["sm_80", "sm_86"]),
        ("120", ["sm_120a", "compute_80"]),
        ("120a", ["sm_120a"]),
    ],
)
def test_a_gpu_gets_every_kernel(word: str, targets: list[str]) -> None:
    """A GPU without a kernel for its own target gets the code of an older GPU or PTX; a target given by name is only that target."""
    assert names(word) == targets


def test_list_is_in_table_order_without_repeats() -> None:
    assert names("90a,80;80 compute_80") == ["sm_80", "sm_90a", "compute_80"]


@pytest.mark.parametrize("word", ["70", "sm_compute_80"])
def test_unknown_target_lists_the_known(word: str) -> None:
    with pytest.raises(BuildError, match=rf"unknown target '{word}'; known: sm_75, .*compute_80"):
        names(word)


@pytest.mark.parametrize("request_", ["all,80", "80 native", "ALL", "none,90a"])
def test_a_word_for_several_stands_alone(request_: str) -> None:
    with pytest.raises(BuildError, match=r"write .* in lower case and as the only value"):
        names(request_)


def test_nothing_named() -> None:
    with pytest.raises(BuildError, match="names no target"):
        names(",")


def test_native_serves_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archs, "native_capabilities", lambda: [(8, 6), (9, 0)])
    assert names("native") == ["sm_80", "sm_86", "sm_90a"]


@pytest.mark.parametrize(
    ("capability", "targets"), [((8, 7), ["sm_80", "sm_86"]), ((10, 3), ["compute_80"]), ((13, 0), ["compute_80"])]
)
def test_native_on_a_gpu_that_the_table_lacks(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], targets: list[str]
) -> None:
    monkeypatch.setattr(archs, "native_capabilities", lambda: [capability])
    assert names("native") == targets


def test_native_below_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archs, "native_capabilities", lambda: [(7, 0)])
    with pytest.raises(BuildError, match=r"compute capability 7\.0"):
        names("native")


def test_argument_beats_environment() -> None:
    assert archs.requested({"FLASHMOE_ARCHS": "80", "FA_ARCHS": "75"}, "90a") == "90a"
    assert archs.requested({"FLASHMOE_ARCHS": "80", "FA_ARCHS": "75"}, None) == "80"
    assert archs.requested({"FA_ARCHS": "75"}, None) == "75"
    assert archs.requested({}, None) == "all"
