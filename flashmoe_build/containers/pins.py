"""``nox -s image_pins``: writes the current registry digests of the base images into the Dockerfile."""

import argparse
import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flashmoe.errors import BuildError
from flashmoe_build.containers.engine import engine
from flashmoe_build.program import ROOT, OutOfReachError, Stopwatch, ending, finish
from flashmoe_tools.report import Check, Report, Verdict

DOCKERFILE = ROOT / "Dockerfile"
PIN = re.compile(
    r"^ARG (?P<variable>BASE_\w+)=(?P<image>[\w./-]+:[\w.-]+)@(?P<digest>sha256:[0-9a-f]{64})$", re.MULTILINE
)
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class Pin:
    """One base: the build argument, the image with its tag, and the digest."""

    variable: str
    image: str
    digest: str


def read_pins(text: str) -> tuple[Pin, ...]:
    """Every base of a Dockerfile. Raises BuildError if a default base has no digest."""
    pins = tuple(Pin(**match.groupdict()) for match in PIN.finditer(text))
    stated = re.findall(r"^ARG (BASE_\w+)=", text, re.MULTILINE)
    loose = [name for name in stated if name not in {pin.variable for pin in pins}]
    if loose or not pins:
        msg = f"Dockerfile: {', '.join(loose) or 'no BASE_* argument'} is not pinned as image:tag@sha256:..."
        raise BuildError(msg)
    return pins


def rewrite(text: str, digest_of: Callable[[str], str]) -> tuple[str, list[str]]:
    """The Dockerfile with the digests that ``digest_of(image:tag)`` gives, and one line per change."""
    changes = []
    for pin in read_pins(text):
        found = digest_of(pin.image)
        if DIGEST.fullmatch(found) is None:
            msg = f"{pin.image}: the registry answered {found!r}, which is not a sha256 digest"
            raise BuildError(msg)
        if found != pin.digest:
            changes.append(f"{pin.image}: {pin.digest} -> {found}")
            text = text.replace(f"{pin.image}@{pin.digest}", f"{pin.image}@{found}")
    return text, changes


def registry_digest(image: str) -> str:
    """The digest of a tag, queried through the engine. Raises OutOfReachError if the registry cannot be reached."""
    docker = importlib.import_module("docker")  # by name: a type checker would resolve it to the folder docker/
    try:
        return str(docker.from_env(timeout=60).images.get_registry_data(image).id)
    except docker.errors.APIError as error:
        msg = f"{image}: its registry cannot be reached from here ({str(error.explanation or error)[:200]}); run this where it can"
        raise OutOfReachError(msg) from error


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="nox -s image_pins --", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a tag has moved on")
    options = parser.parse_args(arguments)
    return ending(lambda: finish(look_up(check=options.check)), "no digest was looked up")


def look_up(*, check: bool) -> Report:
    """Query the registries; with ``check`` a tag that has moved fails, else its new digest is written."""
    engine()
    text, changes = rewrite(DOCKERFILE.read_text(encoding="utf-8"), registry_digest)
    if changes and not check:
        DOCKERFILE.write_text(text, encoding="utf-8")
    verdict = Verdict.FAIL if changes and check else Verdict.PASS
    found = "; ".join(changes) or "every base is pinned to its tag's current digest"
    print(found)
    return Stopwatch().report("image_pins", [Check("digests of the bases", verdict, found)])


if __name__ == "__main__":
    raise SystemExit(main())
