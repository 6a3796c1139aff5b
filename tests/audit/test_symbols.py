"""Undefined, duplicate and mismatched symbols and another torch's names: each compiled here, each with its own message."""

import ctypes
from pathlib import Path

import pytest
from audit_builders import EXPORTS, HOST, Options, Row, Workshop, audit, failures, named, only_failure, run

from flashmoe_tools.report import Verdict
from flashmoe_tools.tables import Tables

INSTANTIATED = """
struct __half { unsigned short x; };
namespace flashmoe {
template <class T> void flash_attention_forward(T* out, int n) { for (int i = 0; i < n; ++i) out[i] = out[0]; }
template void flash_attention_forward<__half>(__half*, int);
}
"""
CALLER = """
%s
namespace flashmoe { template <class T> void flash_attention_forward(T* out, int n); }
extern "C" void* PyInit__C() { flashmoe::flash_attention_forward<%s>(nullptr, 1); return nullptr; }
"""
C10_HALF = "namespace c10 { struct Half { unsigned short x; }; }"
C10_BFLOAT = "namespace c10 { struct BFloat16 { unsigned short x; }; }"


def test_f1_declared_and_called_but_never_defined(workshop: Workshop) -> None:
    path = workshop.extension({"bind.cpp": CALLER % ("struct __half { unsigned short x; };", "__half")})
    sources = workshop.fresh("tree") / "csrc"
    (sources / "host").mkdir(parents=True)
    (sources / "host" / "launch.h").write_text(
        "// flash_attention_forward(a comment is no declaration);\nnamespace flashmoe {\ntemplate <class T>\nvoid flash_attention_forward(T* out, int n);\n}\n"
    )
    (sources / "host" / "call.cpp").write_text("void f() { return flashmoe::flash_attention_forward(nullptr, 1); }\n")
    check = only_failure(
        audit(path, Options(source=sources)),
        "undefined symbol: void flashmoe::flash_attention_forward<__half>(__half*, int)",
    )
    assert "declared in csrc/host/launch.h:4 and called, but no source defines it" in check.why
    assert "_ZN8flashmoe23flash_attention_forward" in check.found
    assert "csrc/host/launch.h:4" in check.next_step


def test_f1_a_definition_that_was_not_linked_is_named(workshop: Workshop) -> None:
    path = workshop.extension({"bind.cpp": CALLER % (C10_HALF, "c10::Half")})
    sources = workshop.fresh("tree") / "csrc"
    sources.mkdir()
    (sources / "forward.cu").write_text("template <class T> void flash_attention_forward(T* out, int n) { }\n")
    check = only_failure(
        audit(path, Options(source=sources)),
        "undefined symbol: void flashmoe::flash_attention_forward<c10::Half>(c10::Half*, int)",
    )
    assert "is defined in csrc/forward.cu:1, but that file was not compiled or linked" in check.why


def test_f1_without_sources_says_how_to_find_it(workshop: Workshop) -> None:
    path = workshop.extension({"bind.cpp": 'extern "C" void launch(); extern "C" void PyInit__C() { launch(); }'})
    check = only_failure(audit(path), "undefined symbol: launch")
    assert "--source DIR" in check.next_step


def test_f2_defined_but_never_instantiated_for_this_type(workshop: Workshop) -> None:
    path = workshop.extension({"kernel.cpp": INSTANTIATED, "bind.cpp": CALLER % ("", "float")})
    check = only_failure(audit(path), "undefined symbol: void flashmoe::flash_attention_forward<float>(float*, int)")
    assert "is instantiated for <__half> but not for <float>" in check.why


def test_f3_same_bits_other_type(workshop: Workshop) -> None:
    path = workshop.extension({"kernel.cpp": INSTANTIATED, "bind.cpp": CALLER % (C10_HALF, "c10::Half")})
    check = only_failure(
        audit(path), "undefined symbol: void flashmoe::flash_attention_forward<c10::Half>(c10::Half*, int)"
    )
    assert "`void flashmoe::flash_attention_forward<__half>(__half*, int)` is defined" in check.why
    assert "different C++ types" in check.why


def test_f5_bf16_bound_but_only_fp16_built(workshop: Workshop) -> None:
    path = workshop.extension({"kernel.cpp": INSTANTIATED, "bind.cpp": CALLER % (C10_BFLOAT, "c10::BFloat16")})
    check = only_failure(
        audit(path), "undefined symbol: void flashmoe::flash_attention_forward<c10::BFloat16>(c10::BFloat16*, int)"
    )
    assert "is instantiated for <__half> but not for <c10::BFloat16>" in check.why


def test_f3_hidden_definition_is_seen_in_the_object_files(workshop: Workshop) -> None:
    folder, _ = workshop.objects({"kernel.cpp": INSTANTIATED})
    path = workshop.extension({"bind.cpp": CALLER % (C10_HALF, "c10::Half")})
    check = named(
        audit(path, Options(objects=folder)), "undefined symbol: void flashmoe::flash_attention_forward<c10::Half>"
    )
    assert "`void flashmoe::flash_attention_forward<__half>(__half*, int)` is defined" in check.why


def test_f4_two_objects_define_the_same_function(workshop: Workshop, sound: Path, tables: Tables) -> None:
    wrapper = """
    static __attribute__((noinline)) int local_is_fine(int n) { volatile int x = n; return x; }
    template <class T> __attribute__((noinline)) int weak_is_fine(T n) { volatile T x = n; return x; }
    namespace flashmoe { void launch(int n) { volatile int x = n; (void)x; } }
    int use%d() { return local_is_fine(1) + weak_is_fine(2); }
    """
    folder, _ = workshop.objects({"a.cpp": wrapper % 1, "b.cpp": wrapper % 2})
    check = only_failure(
        audit(sound, Options(objects=folder), tables), "object files: duplicate definitions: flashmoe::launch(int)"
    )
    assert check.found == "defined in a.o and in b.o"


def test_objects_folder_without_objects_fails(sound: Path, tables: Tables, tmp_path: Path) -> None:
    assert "contains no object file" in named(audit(sound, Options(objects=tmp_path), tables), "input: empty").found


def test_our_library_judged_as_a_foreign_one(workshop: Workshop, rows: tuple[Row, ...], tables: Tables) -> None:
    """--foreign: only checks that apply to any extension; the kernels inside are ignored."""
    path = workshop.library(rows, exports=EXPORTS.replace("flashmoe_last_kernel; ", ""))
    assert named(audit(path, tables=tables), "export: flashmoe_last_kernel")
    report = audit(path, Options(foreign=True), tables)
    assert report.verdict is Verdict.PASS
    assert not any("kernel" in check.name for check in report.checks)


def test_a_weak_reference_may_stay_open(workshop: Workshop, rows: tuple[Row, ...], tables: Tables) -> None:
    """Like the loader: address 0, which the code tests for. In our library no C++ name is weak on purpose."""
    hook = (
        "namespace trace { __attribute__((weak)) void begin(int); }\nvoid* where() { return (void*)&trace::begin; }\n"
    )
    path = workshop.extension({"bind.cpp": hook + 'extern "C" void* PyInit__C() { return where(); }'})
    ctypes.CDLL(str(path))
    assert audit(path).verdict is Verdict.PASS
    library = workshop.library(rows, host=HOST + hook)
    assert (
        "trace::begin(int)" in only_failure(audit(library, tables=tables), "undefined symbol: trace::begin(int)").found
    )


def test_f12_built_for_another_torch(workshop: Workshop) -> None:
    source = '#include <cstdint>\nnamespace c10::cuda { int8_t ExchangeDevice(char device); }\nextern "C" void PyInit__C() { c10::cuda::ExchangeDevice(0); }'
    report = audit(workshop.extension({"bind.cpp": source}))
    refused, lost = named(report, "torch C++ symbols"), named(report, "not in torch")
    assert refused.found == "1 required: c10::cuda::ExchangeDevice(char)"
    assert "c10::cuda::ExchangeDevice(char)" in lost.name
    assert "built against another torch" in lost.why


def test_torch_type_among_arguments_does_not_make_a_symbol_torchs(workshop: Workshop) -> None:
    report = audit(workshop.extension({"kernel.cpp": INSTANTIATED, "bind.cpp": CALLER % (C10_HALF, "c10::Half")}))
    assert any(c.name == "torch C++ symbols" and c.verdict is Verdict.PASS for c in report.checks)


# The mutations below start from our own valid library.


def test_torch_cxx_symbol_in_ours(workshop: Workshop, rows: tuple[Row, ...], tables: Tables) -> None:
    host = HOST + "namespace at { int get_num_threads(); }\nint keep = at::get_num_threads();\n"
    check = only_failure(audit(workshop.library(rows, host=host), tables=tables), "torch C++ symbols")
    assert "at::get_num_threads()" in check.found
    assert "torch/csrc/stable" in check.next_step


def test_torch_template_that_did_not_stay_local(workshop: Workshop, rows: tuple[Row, ...], tables: Tables) -> None:
    host = HOST + 'namespace torch::stable { __attribute__((visibility("default"))) int helper() { return 1; } }\n'
    path = workshop.library(
        rows, host=host, exports=EXPORTS.replace("local: *", 'extern "C++" { torch::* ; }; local: *')
    )
    report = audit(path, tables=tables)
    assert "torch::stable::helper()" in named(report, "torch C++ symbols exported").found


def test_header_only_torch_code_that_stays_local_passes(
    workshop: Workshop, rows: tuple[Row, ...], tables: Tables
) -> None:
    host = (
        HOST
        + "namespace c10 { template <class T> __attribute__((noinline)) T twice(T x) { return x + x; } }\nint keep = c10::twice(__builtin_ia32_rdtsc() & 1);\n"
    )
    report = audit(workshop.library(rows, host=host), tables=tables)
    assert report.verdict is Verdict.PASS, [c for c in report.checks if c.verdict is not Verdict.PASS]


def test_fake_shim(workshop: Workshop, rows: tuple[Row, ...], tables: Tables) -> None:
    host = HOST + 'extern "C" int aoti_torch_make_me_faster(int);\nint keep = aoti_torch_make_me_faster(1);\n'
    check = only_failure(
        audit(workshop.library(rows, host=host), tables=tables), "unknown shim: aoti_torch_make_me_faster"
    )
    assert "a misspelt name, or one of a later torch" in check.why


def test_fake_shim_that_is_looked_up_at_run_time(workshop: Workshop, rows: tuple[Row, ...], tables: Tables) -> None:
    host = HOST + 'const char* volatile wanted = "aoti_torch_get_current_cuda_stream_fast";\n'
    report = audit(workshop.library(rows, host=host), tables=tables)
    assert report.verdict is Verdict.WARN
    assert (
        next(c for c in report.checks if c.verdict is Verdict.WARN).found == "aoti_torch_get_current_cuda_stream_fast"
    )


def test_shims_without_their_library(workshop: Workshop, rows: tuple[Row, ...], tables: Tables) -> None:
    report = audit(workshop.library(rows, torch=False), tables=tables)
    assert "libtorch_cpu.so in DT_NEEDED" in named(report, "shim library: libtorch_cpu.so").expected
    assert named(report, "needed libraries: libtorch_cpu.so")


def test_no_shim_at_all(workshop: Workshop, rows: tuple[Row, ...], tables: Tables) -> None:
    host = HOST.replace("return aoti_torch_get_dim(nullptr, &dim);", "return int(dim);")
    path = workshop.library(rows, host=host, link=["-Wl,--no-as-needed", "-ltorch_cpu"])
    assert "no operator can be registered" in only_failure(audit(path, tables=tables), "torch shims").why


def test_torch_older_than_the_shim_data(sound: Path, tables: Tables) -> None:
    check = only_failure(audit(sound, Options(torch_version="2.9.1"), tables), "torch shims")
    assert "no shim data for torch 2.9.1" in check.found
    assert "--write" in check.next_step


def test_export_that_need_not_be(workshop: Workshop, rows: tuple[Row, ...], tables: Tables) -> None:
    host = HOST + "namespace flashmoe { EXPORT_CXX int launch_all(int n) { return n; } }\n".replace(
        "EXPORT_CXX", '__attribute__((visibility("default")))'
    )
    path = workshop.library(
        rows, host=host, exports=EXPORTS.replace("local: *", 'extern "C++" { flashmoe::* ; }; local: *')
    )
    assert "version script" in only_failure(audit(path, tables=tables), "export: flashmoe::launch_all(int)").why


def test_export_that_is_missing(workshop: Workshop, rows: tuple[Row, ...], tables: Tables) -> None:
    path = workshop.library(rows, exports=EXPORTS.replace("flashmoe_last_kernel; ", ""))
    assert only_failure(audit(path, tables=tables), "export: flashmoe_last_kernel").found == "not exported"


def test_undefined_project_symbol_in_ours(workshop: Workshop, rows: tuple[Row, ...], tables: Tables) -> None:
    host = (
        HOST + "namespace flashmoe { void launch(float*); }\nstruct Now { Now() { flashmoe::launch(nullptr); } } now;\n"
    )
    only_failure(audit(workshop.library(rows, host=host), tables=tables), "undefined symbol: flashmoe::launch(float*)")


def test_stripped(workshop: Workshop, rows: tuple[Row, ...], tables: Tables) -> None:
    path = workshop.library(rows)
    run(["strip", path])
    workshop.write_provenance(path, rows)
    check = only_failure(audit(path, tables=tables), "symbol table")
    assert check.found == "stripped: there is no .symtab"
    assert "header-only templates of torch" in check.why


def test_stripped_foreign_says_what_needs_the_table(workshop: Workshop) -> None:
    """Released wheels are stripped and can be imported, so this is a warning."""
    report = audit(workshop.extension({"bind.cpp": 'extern "C" int PyInit__C() { return 1; }'}, link=["-s"]))
    assert not failures(report)
    assert "nearly matches an undefined one" in next(c.why for c in report.checks if c.name == "symbol table")


def test_names_stay_mangled_without_cxxfilt(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = workshop.extension({"bind.cpp": CALLER % (C10_HALF, "c10::Half")})
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "(mangled: c++filt is not installed)" in named(audit(path), "undefined symbol").name
