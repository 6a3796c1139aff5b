"""Whole models: the order of contenders, when rounds end, what is checked before, and what is printed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashmoe.errors import ArgumentError, ExitCode
from flashmoe_tools.bench import models
from flashmoe_tools.bench.models import ATTENTION_LIMIT, BASELINE, CONTENDERS, OURS, SIZES, SLOW, Contender
from flashmoe_tools.report import Check, Verdict

ABC = [Contender("a"), Contender("b"), Contender("c")]


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the contenders in the order in which they ran; a call takes a second."""
    names: list[str] = []
    monkeypatch.setattr(Contender, "use", lambda self, _: names.append(self.name))
    monkeypatch.setattr(models, "prepare", lambda *_: (lambda: names.append("call"), 10))
    monkeypatch.setattr(models, "seconds_of", lambda call, _: call() or 1.0)
    return names


def clock(monkeypatch: pytest.MonkeyPatch, step: float) -> None:
    now = [0.0]

    def tick() -> float:
        now[0] += step
        return now[0]

    monkeypatch.setattr(models, "time", SimpleNamespace(perf_counter=tick))


def test_each_round_begins_with_another_contender(monkeypatch: pytest.MonkeyPatch, turns: list[str]) -> None:
    clock(monkeypatch, 0.0)
    rows = models.measure(None, "train", ABC, SIZES["tiny"], "cpu", 4, 1.0)
    rounds = ["abc", "abc", "bca", "cab", "abc"]  # the first warms up
    assert turns == [word for names in rounds for name in names for word in (name, "call")]
    assert [(row["contender"], row["tokens_per_s"], len(row["ms"])) for row in rows] == [(x, 10.0, 4) for x in "abc"]


@pytest.mark.parametrize(("step", "rounds"), [(0.0, 7), (1.0, 7), (1.1, 6), (3.0, 4), (100.0, 3)])
def test_rounds_end_when_their_time_is_up_but_there_are_three(
    monkeypatch: pytest.MonkeyPatch, turns: list[str], step: float, rounds: int
) -> None:
    """The clock is read once after the first round and once before each round after the third."""
    clock(monkeypatch, step)
    rows = models.measure(None, "train", ABC, SIZES["tiny"], "cpu", 7, 4.0)
    assert {len(row["ms"]) for row in rows} == {rounds}


@pytest.mark.parametrize(("seconds", "samples"), [(SLOW, 3), (SLOW + 0.1, 1)])
def test_who_is_too_slow_is_timed_once(
    monkeypatch: pytest.MonkeyPatch, turns: list[str], seconds: float, samples: int
) -> None:
    clock(monkeypatch, 0.0)
    monkeypatch.setattr(models, "seconds_of", lambda *_: seconds if turns[-1] == "b" else 1.0)
    rows = models.measure(None, "train", ABC, SIZES["tiny"], "cpu", 3, 1.0)
    assert [len(row["ms"]) for row in rows] == [3, samples, 3]


def test_recorded_graphs_of_two_contenders_do_not_meet(monkeypatch: pytest.MonkeyPatch, turns: list[str]) -> None:
    monkeypatch.setattr(torch.compiler, "reset", lambda: turns.append("reset"))
    model = SimpleNamespace(_compiled_call="of the one before")
    rows = models.measure(model, "static", ABC[:2], SIZES["tiny"], "cpu", 2, 0.0)
    assert turns == [word for name in "ab" for word in ("reset", name, *["call"] * 5)]
    assert not hasattr(model, "_compiled_call")
    assert [len(row["ms"]) for row in rows] == [2, 2]


def test_who_is_timed_in_which_task() -> None:
    dense, baseline = CONTENDERS["dense"], BASELINE["dense"]
    assert models._able(dense, "generate", baseline) == list(dense)
    assert models._able(dense, "train", baseline) == [one for one in dense if one.attention != "eager"]
    assert models._able(dense, "static", baseline) == [Contender(OURS), Contender("sdpa")]
    assert models._able(CONTENDERS["moe"], "static", BASELINE["moe"]) == [
        Contender(OURS, OURS),
        Contender("sdpa", "grouped_mm"),
    ]


def test_a_line_has_a_ratio_where_there_is_one() -> None:
    row = {"model": "dense", "task": "train", "contender": "sdpa", "tokens_per_s": 12.0, "ms": [1.0, 2.0, 3.5]}
    assert models._line(row).endswith("12.0 tokens/s (1.0 to 3.5 ms, 3 samples)")
    assert models._line({**row, "ours_is_faster_by": 1.25}).endswith("samples), ours 1.250x")


@pytest.mark.parametrize(("error", "verdict"), [(ATTENTION_LIMIT, Verdict.PASS), (1.5, Verdict.FAIL)])
@pytest.mark.parametrize("experts", [None, "grouped_mm"])
def test_logits_are_held_against_eager_ones_in_float32(
    monkeypatch: pytest.MonkeyPatch, turns: list[str], error: float, verdict: Verdict, experts: str | None
) -> None:
    """A contender's error may exceed the baseline's by a quarter; parameters get their dtype back."""
    model = torch.nn.Linear(1, 1).half()
    model.dtype = torch.float16  # type: ignore[assignment]
    baseline, seen = Contender("sdpa", experts), []
    off = {"eager": 0.0, "eager+eager": 0.0, baseline.name: 1.0, "ours": error}

    def logits(given: Any, _: Tensor) -> Tensor:
        seen.append((turns[-1], given.weight.dtype))
        return torch.full((2, 2), off[turns[-1]])

    monkeypatch.setattr(models, "_logits", logits)
    (check,) = models.check_logits(model, [Contender("ours")], baseline, torch.zeros(1))
    assert check.verdict is verdict
    reference = "eager" if experts is None else "eager+eager"
    assert seen == [(reference, torch.float32), (baseline.name, torch.float16), ("ours", torch.float16)]


def test_who_cannot_run_says_why() -> None:
    def refuse(*_: object) -> None:
        msg = "no such kernel\nand more"
        raise RuntimeError(msg)

    model = SimpleNamespace(set_attn_implementation=lambda _: None, set_experts_implementation=refuse)
    assert models.usable(model, Contender("a", "b"), "cpu") == "RuntimeError: no such kernel"
    calls: list[Tensor] = []

    class Model:
        def set_attn_implementation(self, name: str) -> None:
            assert name == "a"

        def __call__(self, tokens: Tensor) -> None:
            assert not torch.is_grad_enabled()
            calls.append(tokens)

    assert models.usable(Model(), Contender("a"), "cpu") == ""
    assert [tokens.shape for tokens in calls] == [(1, 8)]


@pytest.mark.parametrize(("task", "rows"), [("generate", 1), ("generate-16", 16), ("static", 1), ("train", 2)])
def test_what_a_task_calls(task: str, rows: int) -> None:
    size, seen = SIZES["tiny"], []
    model = torch.nn.Embedding(size.vocabulary, 4)

    def generate(prompt: Tensor, **options: Any) -> None:
        seen.append(
            (prompt.shape, options.get("cache_implementation"), options["max_new_tokens"], options["min_new_tokens"])
        )

    model.generate = generate  # type: ignore[assignment]
    call, tokens = models.prepare(task, model, size, "cpu")
    assert model.training is (task == "train")
    if task != "train":
        call()
        assert tokens == rows * size.new_tokens
        assert seen == [((rows, size.prompt), "static" if task == "static" else None, size.new_tokens, size.new_tokens)]
    else:
        assert tokens == rows * size.length


def test_a_training_step_moves_against_the_gradient_and_forgets_it() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))
            self.unused = torch.nn.Parameter(torch.ones(3))

        def forward(self, tokens: Tensor, labels: Tensor, use_cache: bool) -> Any:
            assert tokens is labels
            assert not use_cache
            return SimpleNamespace(loss=(1000 * self.weight).sum())

    model: Any = Model()
    step, _ = models._train(model, SIZES["tiny"], "cpu")
    step()
    torch.testing.assert_close(model.weight.data, torch.full((3,), 1 - 1e-3))
    assert model.weight.grad is None
    assert torch.equal(model.unused.data, torch.ones(3))
    loss, norm = models._gradients(model, torch.zeros(1))
    assert loss == pytest.approx(2997.0)
    assert norm == pytest.approx(1000 * 3**0.5)
    assert model.weight.grad is None


@pytest.mark.parametrize(("device", "waits"), [("cpu", 0), ("cuda", 2)])
def test_a_gpu_is_waited_for(monkeypatch: pytest.MonkeyPatch, device: str, waits: int) -> None:
    order: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("wait"))
    models.seconds_of(lambda: order.append("call"), device)
    assert order == ["wait"] * (waits // 2) + ["call"] + ["wait"] * (waits // 2)


@pytest.mark.parametrize("tasks", [("train",), ("generate",)])
def test_who_cannot_run_is_told_and_left_out_of_all(
    monkeypatch: pytest.MonkeyPatch, tasks: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models, "build", lambda *_: "a model")
    monkeypatch.setattr(models, "usable", lambda _, one, __: "" if one.attention in (OURS, "sdpa") else "not here")
    monkeypatch.setattr(
        models, "check_logits", lambda _, given, *__: [Check(f"logits {one.name}", Verdict.PASS, "x") for one in given]
    )
    monkeypatch.setattr(
        models,
        "check_training",
        lambda _, given, *__: [Check(f"training {one.name}", Verdict.PASS, "x") for one in given],
    )
    row = {"contender": "sdpa", "tokens_per_s": 1.0, "ms": [1.0]}
    monkeypatch.setattr(
        models, "measure", lambda _, task, given, *__: [{**row, "task": task, "of": [one.name for one in given]}]
    )
    checks, rows = models.run(SIZES["tiny"], "cpu", ["dense", "moe"], tasks, 3, 1.0)
    skipped = {check.name for check in checks if check.verdict is Verdict.SKIP}
    assert skipped == {f"dense {name}" for name in ("flash_attention_3", "flash_attention_2", "eager")}
    names = {check.name for check in checks} - skipped
    assert {"dense logits fmoe", "dense logits sdpa", "moe logits sdpa+eager"} <= names
    assert any("training" in name for name in names) is ("train" in tasks)
    assert (rows[0]["model"], rows[0]["of"]) == ("dense", [OURS, "sdpa"])
    printed = capsys.readouterr().out
    assert printed.count("SKIP dense eager: not here") == 1  # with its own model
    assert "PASS moe logits fmoe+fmoe: x" in printed


def test_the_program_refuses_without_transformers_and_runs_three_rounds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(models, "run", lambda *words: asked.append(words) or ([Check("one", Verdict.PASS, "x")], []))
    monkeypatch.setattr(models, "register", lambda: None)
    monkeypatch.setattr(models, "version", lambda _: "5")
    assert models.main(["--size", "tiny", "--device", "cpu", "--rounds", "1", "--task", "train"]) == ExitCode.OK
    assert models.main(["--size", "tiny", "--device", "cpu", "--rounds", "5", "--model", "moe"]) == ExitCode.OK
    assert [(words[1], tuple(words[2]), tuple(words[3]), words[4]) for words in asked] == [
        ("cpu", ("dense", "moe"), ("train",), 3),
        ("cpu", ("moe",), models.TASKS, 5),
    ]

    def absent() -> None:
        msg = "no transformers"
        raise ArgumentError(msg)

    monkeypatch.setattr(models, "register", absent)
    assert models.main(["--size", "tiny", "--device", "cpu"]) == ExitCode.FAILED
    assert "ArgumentError: no transformers" in capsys.readouterr().err
    assert len(asked) == 2
