"""What the profiler launches: warm-up calls of one case, then one more. ``python -m flashmoe.tools.profile.target KEY``."""

from __future__ import annotations

import argparse
import re

from flashmoe.errors import ArgumentError, DeviceError
from flashmoe.tools.bench.case import DTYPE_BYTES, Case

WARM_UP_CALLS = 3
KEY = re.compile(
    r"(?P<dtype>\w+)-d(?P<d>\d+)-(?P<mask>causal|full)-b(?P<b>\d+)-h(?P<h>\d+)(kv(?P<kv>\d+))?-"
    r"(s(?P<s>\d+)|q(?P<q>\d+)k(?P<k>\d+))(?P<layout>-bshd)?"
)


def parse_key(key: str) -> Case:
    """The case that a report calls ``key``, such as bf16-d128-causal-b4-h16-s4096."""
    match = KEY.fullmatch(key)
    if match is None or match["dtype"] not in DTYPE_BYTES:
        msg = f"{key!r} is not a case key; write it as bf16-d128-causal-b4-h16-s4096, or ending in -h32kv8-q1k8192"
        raise ArgumentError(msg)
    heads = int(match["h"])
    seq_q, seq_k = (int(match["s"]),) * 2 if match["s"] else (int(match["q"]), int(match["k"]))
    return Case(
        dtype=match["dtype"],
        batch=int(match["b"]),
        heads_q=heads,
        heads_kv=int(match["kv"] or heads),
        seq_q=seq_q,
        seq_k=seq_k,
        head_dim=int(match["d"]),
        causal=match["mask"] == "causal",
        layout="bshd" if match["layout"] else "bhsd",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("key")
    arguments = parser.parse_args()
    case = parse_key(arguments.key)
    import torch

    from flashmoe.tools.bench.contenders import default_registry
    from flashmoe.tools.bench.inputs import make_inputs

    if not torch.cuda.is_available():
        msg = "a kernel is profiled on a CUDA GPU; there is none here"
        raise DeviceError(msg)
    call = default_registry()["flashmoe"].prepare(make_inputs(case, "cuda", seed=0)).call
    for _ in range(WARM_UP_CALLS + 1):
        call()
    torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
