"""What driver.cpp requests of the CUDA driver, and its errors, with a libcuda.so.1 made for the purpose."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flashmoe_build.compile.cache import Cache
from flashmoe_build.compile.host import compile_source
from flashmoe_build.compile.toolchain import find_toolchain
from tests.host.faked import CSRC, ROOT

RATE = 2 * 2_619_000 * 5120 // 8 // 1_000_000  # bytes per ns: two transfers per clock in kHz, bus width in bits
LIBCUDA = r"""
#include <cstdlib>
#include <cstring>
#include <string>
static std::string g_calls;
static void* g_current = nullptr;
static int called(const char* name) {
  g_calls += std::string(name) + " ";
  const char* fails = std::getenv("FAKE_FAILS");
  return fails != nullptr && std::strcmp(fails, name) == 0 ? 2 : 0;
}
extern "C" {
const char* fake_calls() { return g_calls.c_str(); }
int cuInit(unsigned) { return called("cuInit"); }
int cuDriverGetVersion(int* version) { *version = std::atoi(std::getenv("FAKE_VERSION")); return called("cuDriverGetVersion"); }
int cuGetErrorName(int result, const char** name) { if (result == 2) *name = "OUT_OF_MEMORY"; return 0; }
int cuGetErrorString(int result, const char** text) { if (result == 2) *text = "out of memory"; return 0; }
int cuDeviceGet(int* device, int index) { *device = 40 + index; return called("cuDeviceGet"); }
int cuDeviceGetName(char* name, int length, int device) {
  std::strncpy(name, ("GPU " + std::to_string(device) + std::string(400, 'x')).c_str(), length - 1);
  return called("cuDeviceGetName");
}
int cuDeviceGetAttribute(int* value, int which, int) {
  switch (which) {
    case 75: *value = 9; break;
    case 76: *value = 3; break;
    case 16: *value = 132; break;
    case 97: *value = 232448; break;
    case 36: *value = 2619000; break;
    case 37: *value = 5120; break;
  }
  return called(("attribute" + std::to_string(which)).c_str());
}
int cuDevicePrimaryCtxRetain(void** context, int device) { *context = reinterpret_cast<void*>(device); return called("cuDevicePrimaryCtxRetain"); }
int cuCtxGetCurrent(void** context) { *context = g_current; return called("cuCtxGetCurrent"); }
int cuCtxPushCurrent_v2(void* context) { g_current = context; return called("cuCtxPushCurrent"); }
int cuCtxPopCurrent_v2(void** context) { *context = g_current; g_current = nullptr; return called("cuCtxPopCurrent"); }
void cuModuleLoadDataEx() {} void cuModuleGetFunction() {} void cuFuncSetAttribute() {} void cuLaunchKernel() {}
void cuMemsetD8Async() {} void cuMemsetD32Async() {} void cuMemAlloc_v2() {} void cuStreamIsCapturing() {}
void cuThreadExchangeStreamCaptureMode() {} void cuTensorMapEncodeTiled() {} void cuLaunchKernelEx() {}
}
"""
LIBTORCH = 'extern "C" int aoti_torch_get_current_cuda_stream(int device, void** s) { *s = (void*)(900l + device); return device == 7; }'
HARNESS = r"""
#include <cstdio>
#include <string>
#include "host/driver.h"
using namespace flashmoe::host;
static std::string g_text;
template <class Body> static const char* told(Body body) {
  try { g_text = body(); } catch (const std::exception& error) { g_text = error.what(); }
  return g_text.c_str();
}
extern "C" const char* ask(int index) {
  return told([&] {
    const Device& d = device(index);
    return std::to_string(d.index) + " " + std::to_string(reinterpret_cast<long>(d.context)) + " " + std::to_string(d.capability) +
           " " + std::to_string(d.num_multiprocessors) + " " + std::to_string(d.shared_bytes_optin) + " " +
           std::to_string(d.memory_bandwidth) + " " + std::to_string(d.name.size()) + " " + d.name.substr(0, 6);
  });
}
extern "C" const char* guard(long context) {
  return told([&] {
    const ContextGuard one(reinterpret_cast<CUcontext>(context)), two(reinterpret_cast<CUcontext>(context));
    return std::string("held");
  });
}
extern "C" const char* words(int result) { return told([&] { return describe(static_cast<CUresult>(result)); }); }
extern "C" const char* stream(int index) {
  return told([&] { return std::to_string(reinterpret_cast<long>(current_stream(index))); });
}
extern "C" const char* newer() {
  return told([&] {
    const char* dependent = driver().cuLaunchKernelEx != nullptr ? "dependent" : "";
    return std::string(driver().cuTensorMapEncodeTiled != nullptr ? "maps " : "") + dependent;
  });
}
"""
ASK = """
import ctypes, json, sys
if sys.argv[2] == "torch":
    ctypes.CDLL("libtorch_cuda.so")
own = ctypes.CDLL(sys.argv[1])
found = []
for name, argument in json.loads(sys.argv[3]):
    function = getattr(own, name)
    function.restype = ctypes.c_char_p
    found.append(function(ctypes.c_long(argument)).decode())
try:
    calls = ctypes.CDLL("libcuda.so.1").fake_calls
    calls.restype = ctypes.c_char_p
    found.append(calls().decode().split())
except (AttributeError, OSError):
    found.append([])
print(json.dumps(found))
"""


class Asker:
    def __init__(self, folder: Path) -> None:
        self.folder, toolchain = folder, find_toolchain()
        cache = Cache(Path(os.environ.get("FLASHMOE_CACHE_DIR") or ROOT / "build" / "cache"))
        own, _ = compile_source(CSRC / "host" / "driver.cpp", root=ROOT, out=folder, toolchain=toolchain, cache=cache)
        (folder / "harness.cpp").write_text(HARNESS)
        headers = [f"-I{CSRC}", f"-isystem{toolchain.torch_include}", f"-isystem{toolchain.cuda_include}"]
        shared = [toolchain.cxx, "-std=c++17", "-shared", "-fPIC", "-Wl,--exclude-libs,ALL"]
        subprocess.run(
            [*shared, *headers, str(folder / "harness.cpp"), str(own), "-o", str(folder / "own.so")],
            check=True,
            timeout=120,
        )
        for place, name, text in (
            ("cuda", "libcuda.so.1", LIBCUDA),
            ("old", "libcuda.so.1", "void nothing() {}"),
            ("cuda", "libtorch_cuda.so", LIBTORCH),
        ):
            (folder / place).mkdir(exist_ok=True)
            (folder / "it.cpp").write_text(text)
            target = str(folder / place / name)
            subprocess.run(
                [*shared, str(folder / "it.cpp"), f"-Wl,-soname,{name}", "-o", target], check=True, timeout=60
            )

    def __call__(
        self, *asked: tuple[str, int], fails: str = "", version: int = 12030, place: str = "cuda", torch: str = "torch"
    ) -> list[Any]:
        words = [sys.executable, "-S", "-c", ASK, str(self.folder / "own.so"), torch, json.dumps(asked)]
        given = {"LD_LIBRARY_PATH": str(self.folder / place), "FAKE_FAILS": fails, "FAKE_VERSION": str(version)}
        done = subprocess.run(
            words, env={**os.environ, **given}, capture_output=True, text=True, timeout=60, check=True
        )
        found: list[Any] = json.loads(done.stdout)
        return found


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Asker:
    return Asker(tmp_path_factory.mktemp("driver"))


def test_what_is_known_of_a_gpu_is_read_once(ask: Asker) -> None:
    first, again, other, calls = ask(("ask", 2), ("ask", 2), ("ask", 63))
    assert first == again == f"2 42 93 132 232448 {RATE} 255 GPU 42"
    assert other.startswith("63 103 93 ")
    assert calls.count("cuInit") == calls.count("cuDevicePrimaryCtxRetain") == 2


@pytest.mark.parametrize("index", [-1, 64])
def test_devices_that_there_cannot_be(ask: Asker, index: int) -> None:
    told, calls = ask(("ask", index))
    assert told == f"flashmoe:device: CUDA device index {index}; supported: 0 to 63"
    assert calls == []


@pytest.mark.parametrize(
    ("fails", "told"),
    [
        ("cuInit", "cuInit failed: {}; no GPU can be used"),
        ("cuDeviceGet", "cuDeviceGet failed: {}; device index 3"),
        ("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRetain failed: {}; device 3"),
        ("cuDeviceGetName", "cuDeviceGetName failed: {}; device 3"),
        ("attribute75", "cuDeviceGetAttribute failed: {}; asked for compute capability"),
        ("attribute76", "cuDeviceGetAttribute failed: {}; asked for compute capability"),
        ("attribute16", "cuDeviceGetAttribute failed: {}; asked for multiprocessors"),
        ("attribute97", "cuDeviceGetAttribute failed: {}; asked for shared memory per block"),
    ],
)
def test_what_the_driver_refuses(ask: Asker, fails: str, told: str) -> None:
    assert ask(("ask", 3), fails=fails)[0] == "flashmoe:driver: " + told.format("OUT_OF_MEMORY (2), out of memory")


@pytest.mark.parametrize("fails", ["attribute36", "attribute37"])
def test_the_rate_of_memory_may_be_unknown(ask: Asker, fails: str) -> None:
    assert ask(("ask", 0), fails=fails)[0] == "0 40 93 132 232448 0 255 GPU 40"


def test_errors_that_the_driver_has_no_words_for(ask: Asker) -> None:
    assert ask(("words", 2), ("words", 5))[:2] == ["OUT_OF_MEMORY (2), out of memory", "unknown CUDA error (5)"]


def test_a_context_is_pushed_where_another_is_current_and_popped_once(ask: Asker) -> None:
    held, calls = ask(("guard", 42))
    assert held == "held"
    assert calls[-4:] == ["cuCtxGetCurrent", "cuCtxPushCurrent", "cuCtxGetCurrent", "cuCtxPopCurrent"]
    for name in ("cuCtxGetCurrent", "cuCtxPushCurrent"):
        told, calls = ask(("guard", 42), fails=name)
        assert told == f"flashmoe:driver: {name} failed: OUT_OF_MEMORY (2), out of memory; before a launch"
        assert "cuCtxPopCurrent" not in calls


@pytest.mark.parametrize(
    ("version", "fails", "found"),
    [
        (12030, "", "maps dependent"),
        (12029, "", "maps "),
        (13000, "", "maps dependent"),
        (12030, "cuDriverGetVersion", "maps "),
    ],
)
def test_dependent_launches_need_a_driver_whose_graphs_hold_them(
    ask: Asker, version: int, fails: str, found: str
) -> None:
    assert ask(("newer", 0), version=version, fails=fails)[0] == found


def test_a_driver_that_is_too_old_or_not_there(ask: Asker) -> None:
    told = "libcuda.so.1 has no cuInit; the driver is too old: CUDA 11.0 or newer is needed"
    assert ask(("newer", 0), place="old", torch="")[0] == f"flashmoe:driver: {told}"
    found = ask(("newer", 0), place="none", torch="")[0]
    if found != "maps dependent":  # this machine has no driver
        assert found.startswith(
            "flashmoe:driver: the CUDA driver library libcuda.so.1 cannot be loaded (libcuda.so.1: "
        )
        assert found.endswith("or call with CPU tensors; `python -m flashmoe doctor` says more")


def test_torchs_stream(ask: Asker) -> None:
    assert ask(("stream", 3))[0] == "903"
    assert ask(("stream", 7))[0] == "flashmoe:driver: torch gave no current stream for CUDA device 7"
    assert ask(("stream", 3), torch="")[0].startswith(
        "flashmoe:driver: torch's CUDA library (libtorch_cuda.so) is not loaded"
    )
