"""What another machine's loader would refuse."""

from pathlib import Path

from audit_builders import EMBED, HOST, ROOT, Row, Workshop, audit, named, only_failure

from flashmoe_tools.audit.policy import load_policy, version_key
from flashmoe_tools.report import Verdict
from flashmoe_tools.tables import Tables


def test_glibc_above_the_floor(workshop: Workshop, rows: tuple[Row, ...], tables: Tables) -> None:
    """A version above the floor, bound explicitly so that it does not depend on this machine's glibc."""
    host = (
        HOST
        + 'extern "C" int sigaltstack_new();\n__asm__(".symver sigaltstack_new, stat@GLIBC_2.33");\nint keep = sigaltstack_new();\n'
    )
    report = audit(workshop.library(rows, host=host), tables=tables)
    check = only_failure(report, "version floor: GLIBC_2.33")
    assert check.found == "GLIBC_2.33 of libc.so.6, for stat"
    assert check.expected == "at most GLIBC_2.28 (manylinux_2_28)"


def test_packed_relocations_need_a_loader_above_the_floor(
    workshop: Workshop, rows: tuple[Row, ...], tables: Tables
) -> None:
    """GLIBC_ABI_DT_RELR has no number to compare; a loader below glibc 2.36 does not know it and refuses the file.

    Without the version it would load the file and leave the pointers unrelocated.
    """
    host = HOST + "static int value; int* pointers[4] = {&value, &value, &value, &value};\n"
    packed = ["-Wl,-z,pack-relative-relocs"]
    assert only_failure(audit(workshop.library(rows, host=host, link=packed), tables=tables), "version floor: DT_RELR")
    host += 'extern "C" int puts(const char*); extern "C" int use() { return puts("x"); } int used = use();\n'
    report = audit(workshop.library(rows, host=host, link=packed), tables=tables)
    assert only_failure(report, "version floor: GLIBC_ABI_DT_RELR").expected == "at most GLIBC_2.28 (manylinux_2_28)"


def test_library_outside_the_allow_list(workshop: Workshop, rows: tuple[Row, ...], tables: Tables) -> None:
    stub = workshop.fresh("stub")
    (stub / "cudart.cpp").write_text('extern "C" int cudaMalloc(void**, unsigned long) { return 0; }')
    import subprocess

    subprocess.run(
        ["g++", "-shared", "-fPIC", "-Wl,-soname,libcudart.so.12", "cudart.cpp", "-o", "libcudart.so"],
        cwd=stub,
        check=True,
    )
    host = HOST + 'extern "C" int cudaMalloc(void**, unsigned long);\nint keep = cudaMalloc(nullptr, 1);\n'
    path = workshop.library(rows, host=host, link=[f"-L{stub}", "-lcudart"])
    assert "one CUDA major version" in named(audit(path, tables=tables), "needed libraries: libcudart.so.12").why


def test_run_path(workshop: Workshop, rows: tuple[Row, ...], tables: Tables) -> None:
    path = workshop.library(rows, link=["-Wl,-rpath,/opt/somewhere/lib"])
    assert only_failure(audit(path, tables=tables), "run path").found == "/opt/somewhere/lib"


def test_relative_run_path_of_a_foreign_extension_passes(workshop: Workshop) -> None:
    path = workshop.extension(
        {"bind.cpp": 'extern "C" int PyInit__C() { return 1; }'}, link=["-Wl,-rpath,$ORIGIN/lib", "-nostdlib"]
    )
    report = audit(path)
    assert report.verdict is Verdict.PASS
    assert [check.found for check in report.checks if check.name.endswith("needed libraries")] == ["none"]


def test_fixed_run_path_of_a_foreign_extension_is_a_warning(workshop: Workshop) -> None:
    path = workshop.extension(
        {"bind.cpp": 'extern "C" int PyInit__C() { return 1; }'}, link=["-Wl,-rpath,/opt/conda/lib"]
    )
    assert [(c.name, c.found) for c in audit(path).checks if c.verdict is Verdict.WARN] == [
        ("run path", "/opt/conda/lib")
    ]


def test_executable_stack(workshop: Workshop, rows: tuple[Row, ...], tables: Tables) -> None:
    path = workshop.library(rows, embed=EMBED.replace('.section .note.GNU-stack,"",@progbits', ""))
    assert ".note.GNU-stack" in only_failure(audit(path, tables=tables), "executable stack").why


def test_text_relocations(workshop: Workshop, rows: tuple[Row, ...], tables: Tables) -> None:
    embed = EMBED + ".text\n.quad flashmoe_last_kernel\n"
    path = workshop.library(rows, embed=embed, link=["-Wl,-z,notext"])
    assert "-fPIC" in only_failure(audit(path, tables=tables), "text relocations").why


def test_policy_is_auditwheels(tables: Tables) -> None:
    """The version floor in policy.toml is the highest version in auditwheel's policy of that name."""
    from auditwheel.architecture import Architecture
    from auditwheel.libc import Libc
    from auditwheel.policy import WheelPolicies

    policy = load_policy()
    floor = WheelPolicies(libc=Libc.GLIBC, arch=Architecture.x86_64).get_policy_by_name(f"{policy.floor}_x86_64")
    for family, highest in policy.versions.items():
        numbers = [v for v in floor.symbol_versions[family] if v[:1].isdigit()]
        assert max(numbers, key=version_key) == highest, family


def test_policy_exports_are_the_version_scripts() -> None:
    """The allow-list of exports is what csrc/host/exports.map makes global."""
    text = (ROOT / "csrc" / "host" / "exports.map").read_text()
    script = {
        line.strip().rstrip(";") for line in text.split("global:")[1].split("local:")[0].splitlines() if line.strip()
    }
    assert set(load_policy().exports) == script


def test_every_rule_has_a_reason(sound: Path) -> None:
    policy = load_policy()
    for table in (policy.needed, policy.refused, policy.exports, policy.weak):
        assert all(len(reason) > 15 for reason in table.values())
    assert not set(policy.needed) & set(policy.refused)
