"""``./nox -s engines``: does each pinned version of vLLM and SGLang still match what flashmoe's plug-ins expect?

    ./nox -s engines                     # the pinned versions (wheels.toml): about 2 GB downloaded once, a few files kept
    ./nox -s engines -- --newest         # and the newest releases, if they are newer
    ./nox -s engines -- --record         # rewrite recorded.json, after a pin was added

A difference fails with the engine, its version, the class and the parameter.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence

from flashmoe_build.engines.clauses import ENGINES
from flashmoe_build.engines.contract import changes, differences
from flashmoe_build.engines.record import OURS, RECORD, Version, load, save
from flashmoe_build.engines.wheels import Wheel, newest, pinned, read, sources, torch_of
from flashmoe_build.program import REPORTS, Stopwatch, ending, finish
from flashmoe_tools.report import Check, Verdict


def reading(wheel: Wheel) -> Version:
    clauses = ENGINES[wheel.engine]
    folder = sources(wheel, clauses)
    return Version(wheel.engine, wheel.version, torch_of(folder), read(folder, clauses))


def check_version(found: Version, recorded: Sequence[Version]) -> Iterator[Check]:
    """One check per difference, or a single one if there is none."""
    label = f"{found.engine} {found.version}"
    clauses = ENGINES[found.engine]
    wrong = [
        (f"{label} {clause.part}", str(one)) for clause, one in differences(clauses, found.version, found.found, OURS)
    ]
    known = next((one for one in recorded if (one.engine, one.version) == (found.engine, found.version)), None)
    if known is not None:
        wrong += [(f"{label} record", f"{one}; repeat with --record") for one in changes(known.found, found.found)]
    for name, text in wrong:
        yield Check(name, Verdict.FAIL, text, "what flashmoe/integrations/ expects")
    if not wrong:
        yield Check(
            label, Verdict.PASS, f"{sum(c.applies(found.version) for c in clauses)} clauses hold; torch {found.torch}"
        )


def work(options: argparse.Namespace) -> int:
    clock = Stopwatch()
    wheels = [wheel for wheel in pinned() if options.only in ("", wheel.engine)]
    found = [reading(wheel) for wheel in wheels]
    if options.record:
        save(found)
        print(f"{RECORD.name}: {len(found)} versions written; ./nox -s docs rewrites the table")
    recorded = load()
    checks = [check for one in found for check in check_version(one, recorded)]
    checks += [
        Check(wheel.label, Verdict.FAIL, "is pinned, but not recorded", next_step="./nox -s engines -- --record")
        for wheel in wheels
        if all((one.engine, one.version) != (wheel.engine, wheel.version) for one in recorded)
    ]
    if options.newest:
        for engine in ENGINES if not options.only else (options.only,):
            pins = [wheel for wheel in wheels if wheel.engine == engine]
            later = newest(engine, pins)
            if later is None:
                print(f"{engine}: nothing newer than {pins[-1].version} on the index")
                continue
            fresh = reading(later)
            for change in changes(recorded_of(recorded, pins[-1]).found, fresh.found):
                print(f"{later.label}, since {pins[-1].version}: {change}")
            checks += check_version(fresh, recorded)
    for check in checks:
        print(f"{check.verdict} {check.name}: {check.found}")
    return finish(clock.report("engines", checks, {"versions": [f"{one.engine} {one.version}" for one in found]}))


def recorded_of(recorded: Sequence[Version], wheel: Wheel) -> Version:
    return next(one for one in recorded if (one.engine, one.version) == (wheel.engine, wheel.version))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="nox -s engines --", description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=sorted(ENGINES), default="", help="only this engine")
    parser.add_argument("--newest", action="store_true", help="also the newest releases on the index")
    parser.add_argument("--record", action="store_true", help="write what was read to recorded.json")
    options = parser.parse_args(arguments)
    if options.record and options.only:
        parser.error("--record writes every engine; leave --only out")
    REPORTS.mkdir(parents=True, exist_ok=True)
    return ending(lambda: work(options))


if __name__ == "__main__":
    sys.exit(main())
