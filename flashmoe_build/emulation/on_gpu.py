"""Replays launches that ``flashmoe_build.emulation.hardware`` recorded on this machine's GPU, and compares bit by bit.

Needs only torch and the driver, so that it can be copied to a machine without this repository:

    python on_gpu.py FOLDER [--json PATH]
"""

import argparse
import ctypes
import json
import struct
import sys
from pathlib import Path
from typing import Any

import torch

DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Driver:
    """The few calls of libcuda that a launch needs."""

    def __init__(self) -> None:
        torch.zeros(1, device="cuda")  # creates the primary context
        self.cuda = ctypes.CDLL("libcuda.so.1")

    def check(self, status: int, call: str) -> None:
        if status != 0:
            text = ctypes.c_char_p()
            self.cuda.cuGetErrorName(status, ctypes.byref(text))
            msg = f"{call}: {text.value.decode() if text.value else status}"
            raise RuntimeError(msg)

    def function(self, cubin: bytes, symbol: str, shared: int) -> ctypes.c_void_p:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.check(self.cuda.cuModuleLoadData(ctypes.byref(module), cubin), "cuModuleLoadData")
        self.check(self.cuda.cuModuleGetFunction(ctypes.byref(function), module, symbol.encode()), symbol)
        self.check(self.cuda.cuFuncSetAttribute(function, DYNAMIC_SHARED, shared), "cuFuncSetAttribute")
        return function

    def launch(self, function: ctypes.c_void_p, record: dict[str, Any], arguments: list[Any]) -> None:
        pointers = (ctypes.c_void_p * len(arguments))(*[ctypes.addressof(item) for item in arguments])
        status = self.cuda.cuLaunchKernel(
            function, record["grid"], 1, 1, record["threads"], 1, 1, record["shared"], None, pointers, None
        )
        self.check(status, "cuLaunchKernel")
        torch.cuda.synchronize()

    def tensor_map(self, address: int, content: dict[str, Any], is_bf16: bool) -> Any:
        memory = ctypes.create_string_buffer(128 + 64)
        offset = -ctypes.addressof(memory) % 64
        aligned = (ctypes.c_char * 128).from_buffer(memory, offset)
        dims = (ctypes.c_uint64 * 4)(*content["dims"])
        strides = (ctypes.c_uint64 * 3)(*content["strides"])
        box, ones = (ctypes.c_uint32 * 4)(*content["box"]), (ctypes.c_uint32 * 4)(1, 1, 1, 1)
        status = self.cuda.cuTensorMapEncodeTiled(
            *(ctypes.byref(aligned), 9 if is_bf16 else 6, 4, ctypes.c_void_p(address)),
            *(
                dims,
                strides,
                box,
                ones,
                0,
                3,
                3,
                0,
            ),  # no interleave, 128-byte swizzle, 256-byte L2 promotion, zero fill
        )
        self.check(status, "cuTensorMapEncodeTiled")
        return aligned


def ulps(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Distance in representable values; NaN equals NaN."""

    def ordered(tensor: torch.Tensor) -> torch.Tensor:
        bits = tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16).long()
        lowest = -(2 ** (8 * tensor.element_size() - 1))
        return torch.where(bits < 0, lowest - bits, bits)

    distance = (ordered(left) - ordered(right)).abs()
    return torch.where(torch.isnan(left) & torch.isnan(right), 0, distance)


def replay(driver: Driver, record: dict[str, Any], cubin: bytes) -> dict[str, Any]:
    """One recorded launch on the GPU, compared with the emulation's result."""
    tensors = {name: tensor.contiguous().cuda() for name, tensor in record["tensors"].items()}
    blob = bytearray(record["params"])
    for offset, name in record["pointers"]:
        struct.pack_into("<Q", blob, offset, tensors[name].data_ptr())
    arguments: list[Any] = [(ctypes.c_char * len(blob)).from_buffer(blob)]
    for name, content in record["maps"]:
        arguments.append(driver.tensor_map(tensors[name].data_ptr(), content, tensors[name].dtype is torch.bfloat16))
    driver.launch(driver.function(cubin, record["symbol"], record["shared"]), record, arguments)
    result: dict[str, Any] = {"name": record["name"], "symbol": record["symbol"]}
    for name, emulated in record["expected"].items():
        distance = ulps(tensors[name].cpu(), emulated)
        result[name] = {
            "values": distance.numel(),
            "bitwise_equal": int((distance == 0).sum()),
            "within_1_ulp": int((distance <= 1).sum()),
            "max_ulp": int(distance.max()),
            "max_abs": float((tensors[name].cpu().double() - emulated.double()).nan_to_num(0, 0, 0).abs().max()),
        }
        if name == "out_partial":  # a split's fp32: comparable with the other outputs once rounded to their type
            rounded = (side.to(getattr(torch, record["element"])) for side in (tensors[name].cpu(), emulated))
            result[name]["bitwise_equal_rounded"] = int((ulps(*rounded) == 0).sum())
    return result


def totals(results: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The sums over all launches of attention kernels, by result; probes are listed individually."""
    sums: dict[str, dict[str, Any]] = {}
    for result in results:
        if result["name"].startswith("probe"):
            continue
        for name, row in result.items():
            if not isinstance(row, dict):
                continue
            total = sums.setdefault(name, {"launches": 0, "max_abs": 0.0})
            total["launches"] += 1
            total["max_abs"] = max(total["max_abs"], row["max_abs"])
            for key in ("values", "bitwise_equal", "within_1_ulp", "bitwise_equal_rounded"):
                if key in row:
                    total[key] = total.get(key, 0) + row[key]
    return sums


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    driver = Driver()
    files = sorted(arguments.folder.glob("*.pt"))
    if not files:
        print(f"{arguments.folder} contains no recorded launch", file=sys.stderr)
        return 3
    results = []
    for path in files:
        record = torch.load(path, weights_only=False)
        result = replay(driver, record, (arguments.folder / record["cubin"]).read_bytes())
        results.append(result)
        for name, row in result.items():
            if isinstance(row, dict):
                share = row["bitwise_equal"] / row["values"]
                print(
                    f"{result['name']} {name}: {share:.4%} equal bits, max {row['max_ulp']} ulp, {row['max_abs']:.2e}"
                )
    sums = totals(results)
    report = {"device": torch.cuda.get_device_name(), "totals": sums, "results": results}
    for name, row in sums.items():
        equal = row.get("bitwise_equal_rounded", row["bitwise_equal"])
        words = "equal bits once rounded to 16" if "bitwise_equal_rounded" in row else "equal bits"
        print(f"all {row['launches']} launches, {name}: {equal} of {row['values']} {words}, max {row['max_abs']:.2e}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
