"""``nox -s gpu_test``: runs the test image, by digest, on this machine's GPU. Without that GPU it fails; it does not skip."""

import argparse
import re
import subprocess
from collections.abc import Sequence

from flashmoe.errors import UnsupportedGpuError
from flashmoe_build.containers.engine import docker_program
from flashmoe_build.program import ROOT, Stopwatch, ending, finish, run
from flashmoe_tools.report import Check, Report, Verdict
from flashmoe_tools.tables import Gpu, load_tables

BY_DIGEST = re.compile(r"[\w./:-]+@sha256:[0-9a-f]{64}")
LIMIT = 3000  # seconds


def find_gpu(name: str, gpus: Sequence[Gpu]) -> Gpu:
    """The row of arch.toml. Raises UnsupportedGpuError for an unknown name."""
    for gpu in gpus:
        if gpu.name == name:
            return gpu
    msg = f"{name!r} is not a GPU of csrc/tables/arch.toml; known: {', '.join(gpu.name for gpu in gpus)}"
    raise UnsupportedGpuError(msg)


def check_capability(gpu: Gpu, answer: str) -> None:
    """Raise UnsupportedGpuError unless nvidia-smi reports a GPU of this architecture."""
    found = [line.strip() for line in answer.splitlines() if line.strip()]
    required = ".".join(map(str, gpu.compute_capability))
    if required not in found:
        msg = f"this runner is labelled {gpu.name} (compute capability {required}), and has {', '.join(found) or 'no GPU'}"
        raise UnsupportedGpuError(msg)


def command_of(docker: str, image: str, arguments: Sequence[str]) -> list[str]:
    """The `docker run` call. Raises UnsupportedGpuError for an image not named by digest: a tag can move between two jobs."""
    if BY_DIGEST.fullmatch(image) is None:
        msg = f"--image {image!r}: name the image by digest (name@sha256:...)"
        raise UnsupportedGpuError(msg)
    return [docker, "run", "--rm", "--gpus", "all", "--env", "FLASHMOE_REQUIRE_GPU=1", image, *arguments]


def gpu_test(name: str, image: str, arguments: Sequence[str]) -> Report:
    clock = Stopwatch()
    gpu = find_gpu(name, load_tables(ROOT / "csrc").gpus)
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=False, timeout=60).stdout
    except OSError:
        answer = ""
    check_capability(gpu, answer)
    output = run(command_of(docker_program(), image, arguments), f"tests on {name}", time_limit=LIMIT)
    ran = re.search(r"GPU: ([1-9]\d*) tests ran", output)
    verdict = Verdict.PASS if ran else Verdict.FAIL
    check = Check(f"tests on {name}", verdict, ran[0] if ran else output[-500:], "GPU tests ran and passed")
    print(f"{check.verdict} {check.name}: {check.found}")
    return clock.report("gpu_test", [check], {"gpu": name, "image": image})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="nox -s gpu_test --", description=__doc__)
    parser.add_argument("--gpu", required=True, help="sm80, sm90, ...: as csrc/tables/arch.toml names it")
    parser.add_argument("--image", required=True, help="the test image by digest")
    options, further = parser.parse_known_args(arguments)
    return ending(lambda: finish(gpu_test(options.gpu, options.image, further)))


if __name__ == "__main__":
    raise SystemExit(main())
