"""``python -m tests.fuzz --seconds 60``: damaged inputs for every reader of the audit, for the given time.

The same seed gives the same inputs. A finding ends the run with 1 and prints the smallest input as a line to add
to tests/fuzz/corpus.json, which the ordinary tests then try.
"""

import argparse
import itertools
import json
import sys
import time
import traceback
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.targets import TARGETS, Target


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="./nox -s fuzz --", description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="where the inputs start (default: 0)")
    parser.add_argument("--only", choices=sorted(TARGETS), action="append", help="these readers (default: all)")
    given_words = parser.parse_args(argv)
    names = given_words.only or list(TARGETS)
    until = time.monotonic() + given_words.seconds
    tried = dict.fromkeys(names, 0)
    for turn in itertools.count():
        for name in names:
            if time.monotonic() >= until and turn:
                print(", ".join(f"{name}: {count}" for name, count in tried.items()))
                print(f"fuzz: {sum(tried.values())} inputs, seed {given_words.seed}, no finding")
                return 0
            finding = _turn(TARGETS[name], given_words.seed + turn, tried, name)
            if finding is not None:
                print(json.dumps({"target": name, "value": finding}))
                return 1
    raise AssertionError


def _turn(target: Target, number: int, tried: dict[str, int], name: str) -> Any:
    """Runs one round of examples; returns the smallest input that is a finding, or None."""
    smallest: list[Any] = []

    @seed(number)
    @settings(
        max_examples=target.rounds,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(target.strategy())
    def one(value: Any) -> None:
        tried[name] += 1
        try:
            target.check(value)
        except BaseException:
            smallest[:] = [value]
            raise

    try:
        one()
    except Exception:  # whatever a reader raised; hypothesis has shrunk the input
        traceback.print_exc(file=sys.stdout)
        return smallest[0]
    return None


if __name__ == "__main__":
    raise SystemExit(main())
