"""The contract with vLLM and SGLang: what was recorded for their pinned versions holds, and each kind of change is found and named."""

import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from flashmoe.errors import BuildError
from flashmoe_build.engines import record, wheels
from flashmoe_build.engines.__main__ import check_version
from flashmoe_build.engines.clauses import ENGINES
from flashmoe_build.engines.contract import Calls, Has, changes, number_of
from flashmoe_build.engines.signatures import Parameter, Signature, abstract_methods, names, parse, signature
from flashmoe_tools.report import Verdict

BACKEND = "vllm.v1.attention.backend"
SOURCE = """
from typing import NamedTuple
if True:
    from a import B as C
class Config(NamedTuple):
    size: int
    name: "str | None" = None
class Base:
    field: int = 3
    def __init__(self, a, b=1, *, c: int, **more) -> None:
        self.kept, other = a, b
    @abc.abstractmethod
    def forward(self, x, y=None) -> "Tensor": ...
    @staticmethod
    @abstractmethod
    def name() -> str: ...
    again = forward
def make():
    class Inner:
        def run(self, q): ...
    return Inner
"""


def recorded(engine: str, version: str) -> record.Version:
    return next(one for one in record.load() if (one.engine, one.version) == (engine, version))


@pytest.mark.parametrize("found", record.load(), ids=lambda one: f"{one.engine}-{one.version}")
def test_what_was_recorded_is_what_the_plug_ins_take_it_for(found: record.Version) -> None:
    assert [str(check.found) for check in check_version(found, [found]) if check.verdict is not Verdict.PASS] == []


def test_every_pin_is_recorded() -> None:
    assert [(one.engine, one.version) for one in record.load()] == [
        (one.engine, one.version) for one in wheels.pinned()
    ]
    assert all(len(one.sha256) == 64 and one.platform.startswith("manylinux_2_") for one in wheels.pinned())


# (engine, version, what changes, its new signature, what the check must say)
CHANGED = [
    ("vllm", "0.33.0", f"{BACKEND}:AttentionImpl.forward", lambda old: f"{old[: old.index(')')]}, sink_bias=None){old[old.index(')') + 1 :]}",
     "AttentionImpl.forward: sink_bias: is new"),
    ("vllm", "0.33.0", f"{BACKEND}:AttentionImpl.forward", lambda old: old.replace("query, key", "key, query"),
     "AttentionImpl.forward: key: is argument 2"),
    ("vllm", "0.31.0", f"{BACKEND}:AttentionImpl.forward", lambda old: old.replace("attn_metadata, output,", "attn_metadata=None, output=None,"),
     "attn_metadata: may be left out (None)"),
    ("vllm", "0.31.0", f"{BACKEND}:AttentionImpl.forward", lambda old: old.replace("torch.Tensor", "None"), "return: is None"),
    ("vllm", "0.29.0", "vllm._custom_ops:reshape_and_cache_flash", lambda old: old.replace("v_scale", "v_scale, layout"),
     "layout: has no default, and flashmoe does not pass it"),
    ("vllm", "0.29.0", "vllm._custom_ops:reshape_and_cache_flash", lambda old: old.replace("key, value", "value, key"),
     "key: flashmoe passes it as argument 1"),
    ("vllm", "0.29.0", f"{BACKEND}:MultipleOf", lambda old: "(factor)", "base: flashmoe passes it, but it is not a parameter"),
    ("vllm", "0.24.0", f"{BACKEND}:AttentionMetadataBuilder.build", lambda old: "(common_attn_metadata)", "needs it, but the engine has no such"),
    ("sglang", "0.5.23", "sglang.srt.mem_cache.memory_pool:KVWriteLoc", lambda old: old.replace("swa_loc", "window_loc"), "KVWriteLoc: swa_loc"),
]  # fmt: skip


@pytest.mark.parametrize(("engine", "version", "theirs", "change", "said"), CHANGED)
def test_a_changed_signature_fails_by_engine_version_class_and_parameter(engine, version, theirs, change, said) -> None:  # type: ignore[no-untyped-def]
    before = recorded(engine, version)
    changed = parse(change(str(before.found[theirs])))
    assert changed != before.found[theirs]
    checks = list(check_version(replace(before, found={**before.found, theirs: changed}), [before]))
    assert {check.verdict for check in checks} == {Verdict.FAIL}
    assert all(check.name.startswith(f"{engine} {version}") for check in checks)
    assert any(said in check.found for check in checks if "record" not in check.name)
    assert any("--record" in check.found and theirs in check.found for check in checks)


@pytest.mark.parametrize(
    ("theirs", "now", "said"),
    [
        (f"{BACKEND}:CommonAttentionMetadata", frozenset({"seq_lens"}), "slot_mapping: is not there"),
        (f"{BACKEND}:AttentionImpl.forward", None, "forward: is not there"),
        (f"{BACKEND}:AttentionImpl abstract", frozenset({"forward", "plan"}), "plan: is abstract"),
    ],
)
def test_what_is_gone_or_newly_demanded_is_named(theirs: str, now: frozenset[str] | None, said: str) -> None:
    before = recorded("vllm", "0.33.0")
    found = [check.found for check in check_version(replace(before, found={**before.found, theirs: now}), [])]
    assert any(said in text for text in found)


def test_a_clause_is_for_the_versions_that_have_it() -> None:
    clause = Has("attention", "m:C", since=(0, 29), until=(0, 31), names=("x",))
    assert [clause.applies(version) for version in ("0.28.9", "0.29.0", "0.31.5", "0.32.0")] == [
        False,
        True,
        True,
        False,
    ]
    assert number_of("0.5.23.post1") == (0, 5, 23)
    assert Calls("attention", "m:f").applies("0.1")


def test_sources_are_read_without_being_run() -> None:
    made = signature(SOURCE, "Base")
    assert made == Signature((Parameter("a"), Parameter("b", default="1"), Parameter("c", True)), True, "None")
    assert str(made) == "(a, b=1, *, c, **more) -> None"
    assert parse(str(made)) == made
    assert str(signature(SOURCE, "Base.again")) == "(x, y=None) -> Tensor"
    assert str(signature(SOURCE, "Config")) == "(size, name=None) -> Config"
    assert str(signature(SOURCE, "make.Inner.run")) == "(q)"
    assert signature(SOURCE, "Base.absent") is None
    assert names(SOURCE, "") == {"NamedTuple", "C", "Config", "Base", "make"}
    assert names(SOURCE, "Base") >= {"field", "kept", "forward", "name"}
    assert abstract_methods(SOURCE, "Base") == {"forward", "name"}


def test_two_readings_differ_by_parameter() -> None:
    before = {"m:f": parse("(a, b=1) -> int"), "m:g": parse("(a, b)"), "m:C": frozenset("xy"), "m:h": None}
    after = {"m:f": parse("(a, b=2, *, c) -> str"), "m:g": parse("(b, a)"), "m:C": frozenset("yz"), "m:h": parse("()")}
    assert [f"{one.theirs} {one.what}" for one in changes(before, after)] == [
        *("m:C x", "m:C z", "m:f b", "m:f c", "m:f return", "m:g order", "m:h m:h"),
    ]  # fmt: skip
    assert changes(after, after) == []


def test_of_a_wheel_the_named_modules_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "sglang-1.2.3-py3-none-manylinux_2_34_x86_64.whl"
    with zipfile.ZipFile(archive, "w") as wheel:
        wheel.writestr("sglang/srt/plugins/__init__.py", "GENERAL_PLUGINS_GROUP = 'x'")
        wheel.writestr("sglang/srt/other.py", "never = 'kept'")
        wheel.writestr(
            "sglang-1.2.3.dist-info/METADATA",
            "Name: sglang\nRequires-Dist: torchvision\nRequires-Dist: torch==2.14.1\n",
        )
    brought: list[str] = []
    monkeypatch.setattr(wheels, "download", lambda wheel, folder: brought.append(wheel.version) or archive)
    pin = wheels.Wheel("sglang", archive.name, "0" * 64)
    for _ in range(2):
        folder = wheels.sources(pin, ENGINES["sglang"], tmp_path / "kept")
    assert brought == ["1.2.3"]  # the second call found it
    assert sorted(path.name for path in folder.rglob("*.py")) == ["__init__.py"]
    assert wheels.torch_of(folder) == "2.14.1"
    found = wheels.read(folder, ENGINES["sglang"])
    assert found["sglang.srt.plugins:"] == {"GENERAL_PLUGINS_GROUP"}
    checks = list(check_version(record.Version("sglang", "1.2.3", "2.14.1", found), []))
    assert len(checks) > 10
    assert all(check.verdict is Verdict.FAIL for check in checks)


def test_another_wheel_than_the_pinned_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pin = wheels.Wheel("sglang", "sglang-1.2.3-py3-none-manylinux_2_34_x86_64.whl", "0" * 64)

    def bring(words: list[str], what: str) -> str:
        assert words[-3:] == ["--require-hashes", "-r", str(tmp_path / "wheel.txt")]
        (tmp_path / pin.file).write_bytes(b"another")
        return ""

    monkeypatch.setattr(wheels, "_pip", bring)
    with pytest.raises(BuildError, match="does not have the hash"):
        wheels.download(pin, tmp_path)


def test_the_page_says_what_differs() -> None:
    before = recorded("vllm", "0.33.0")
    broken = replace(before, found={**before.found, "vllm.envs:": frozenset()})
    assert record.table([before, broken])[1] == [
        ("vLLM 0.33.0", "2.14.0", "holds", "holds", "no"),
        ("vLLM 0.33.0", "2.14.0", "differs", "holds", "no"),
    ]
