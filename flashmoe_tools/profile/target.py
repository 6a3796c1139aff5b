"""What the profiler runs: warm-up calls of one case, then one more. ``python -m flashmoe_tools.profile.target KEY``."""

import argparse

from flashmoe.errors import DeviceError
from flashmoe_tools.operations import problem_from_key

WARM_UP_CALLS = 3


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("key")
    arguments = parser.parse_args()
    case = problem_from_key(arguments.key)
    import torch

    from flashmoe_tools.bench.contenders import default_registry

    if not torch.cuda.is_available():
        msg = "a kernel is profiled on a CUDA GPU; there is none here"
        raise DeviceError(msg)
    ours = next(one for one in default_registry(case.operation).values() if one.ours)
    call = ours.prepare(case.make_inputs("cuda", seed=0)).call
    for _ in range(WARM_UP_CALLS + 1):
        call()
    torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
