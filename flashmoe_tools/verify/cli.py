"""``python -m flashmoe verify FILE.whl``: one line per thing that was checked, and one per thing that was not."""

import argparse
import hashlib
import sys
import tempfile
import time
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from flashmoe.errors import ExitCode
from flashmoe_tools.audit.errors import AuditError
from flashmoe_tools.report import Check, Report, Verdict, host_environment, utc_now, write_report
from flashmoe_tools.verify import metadata, signature
from flashmoe_tools.verify.content import PINNED, Content, check_content, guarded, read_wheel
from flashmoe_tools.verify.errors import VerifyError
from flashmoe_tools.verify.files import compare_files, expected_content, printable
from flashmoe_tools.verify.rebuild import compare, rebuild
from flashmoe_tools.verify.repository import FULL_HASH, Clone, Commit, Objects, find_clone
from flashmoe_tools.versions import release_tag

BUILD_LOCK = "build.txt"
NEEDS_CLONE = "run it in a clone of flashmoe, or with --root CLONE"


@dataclass(frozen=True)
class Request:
    """What to compare the wheel with."""

    clone: Clone | None = None
    again: bool = False
    keep: Path | None = None
    bundle: Path | None = None
    identity: str = ""
    issuer: str = ""
    offline: bool = False


def relevant_tags(content: Content, clone: Clone) -> frozenset[str]:
    """The release's tag, if it points to the wheel's commit in the clone and the wheel claims to be that release."""
    released = content.stated.version.removesuffix(f"+{content.stated.partial}")
    return clone.tags_at(content.stated.commit) & {release_tag(released)}


def check_commit(content: Content, objects: Objects | None) -> tuple[Check, Commit | None]:
    """Checks that the commit is stated in full, was clean and is in the clone; returns it if it can be compared."""
    stated = content.stated
    if not FULL_HASH.fullmatch(stated.commit):
        found, why = printable(stated.commit[:80]), "A name or a part of a hash can be made to lead anywhere."
        step = "do not install this file" if stated.commit != "unknown" else "build from a clone"
        return Check("commit", Verdict.FAIL, found, "the full hash of a commit", why, step), None
    shown = stated.commit[:12]
    if stated.dirty:
        why = "No commit holds these sources, so nothing in the wheel can be compared."
        found = f"{shown}, with uncommitted changes"
        return Check("commit", Verdict.UNPROVED, found, "a clean commit", why, "build from a clean clone"), None
    if objects is None:
        return Check("commit", Verdict.SKIP, f"{shown}: not compared", next_step=NEEDS_CLONE), None
    commit = objects.commit(stated.commit)
    if commit is None:
        why, step = (
            "Either the clone is shallow or old, or the wheel came from elsewhere.",
            "git fetch --unshallow --all, then again",
        )
        return Check(
            "commit", Verdict.FAIL, f"{shown} is not in this clone", "a commit of the project", why, step
        ), None
    if commit.epoch != stated.epoch:
        found, expected = f"time {stated.epoch}", f"time {commit.epoch} of {shown}"
        return Check("commit", Verdict.FAIL, found, expected, "", "the record was edited"), commit
    return Check("commit", Verdict.PASS, f"{shown}, clean, in this clone"), commit


def check_locks(content: Content, objects: Objects, commit: Commit) -> Check:
    """Checks that the lock files are the commit's, and compilers and headers are the ones pinned in its build lock."""
    paths = {
        path.split("/")[1]: path
        for path in commit.tree
        if fnmatchcase(path, "lockfiles/*.txt") and path.count("/") == 1
    }
    if BUILD_LOCK not in paths:
        msg = f"commit {commit.digest[:12]} has no lockfiles/{BUILD_LOCK}, so it is not a commit of flashmoe"
        raise VerifyError(msg)
    texts = objects.read([commit.tree[path] for path in paths.values()])
    held = {name: texts[commit.tree[path]] for name, path in paths.items()}
    pins = metadata.pinned(held[BUILD_LOCK].decode("utf-8", "replace"))
    expected = {f"lockfiles/{name}": hashlib.sha256(text).hexdigest() for name, text in held.items()}
    expected |= {name: pins.get(package, "") for name, package in PINNED.items()}
    stated = {f"lockfiles/{name}": digest for name, digest in content.stated.locks.items()}
    stated |= {name: version for name, version in content.stated.compilers.items() if name in PINNED}
    wrong = [name for name in sorted({*expected, *stated}) if expected.get(name) != stated.get(name)]
    if not wrong:
        return Check("lock files", Verdict.PASS, f"{len(held)} are the commit's, compilers and headers as pinned there")
    why = "The compilers came from another lock than the commit's."
    found = ", ".join(f"{printable(name)} {printable(str(stated.get(name))[:16])}" for name in wrong[:4])
    wanted = ", ".join(f"{printable(name)} {str(expected.get(name))[:16]}" for name in wrong[:4])
    return Check("lock files", Verdict.FAIL, found, wanted, why, "do not install this file")


def verify(path: Path, request: Request) -> Report:
    """Every check on one wheel. Raises VerifyError or AuditError if there is nothing to check."""
    started, clock = utc_now(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="flashmoe-verify-") as scratch:
        folder = Path(scratch)
        content = read_wheel(path, folder / "given")
        checks = check_content(content)
        objects = Objects(request.clone, folder / "objects.git") if request.clone else None
        judged, commit = check_commit(content, objects)
        checks.append(judged)
        if request.clone and objects and commit:
            tags = relevant_tags(content, request.clone)
            checks.append(check_locks(content, objects, commit))
            checks += guarded(
                "files", lambda: compare_files(content, expected_content(objects, commit, tags, content.stated.partial))
            )
        checks += check_rebuild(content, commit, request, folder)
        checks.append(check_bundle(content, request))
    data = {
        "wheel": path.name,
        "sha256": content.sha256,
        "commit": content.stated.commit,
        "compilers": content.stated.record["compilers"],
        "binaries": content.cubins,
    }
    return Report("verify", tuple(checks), data, host_environment(), (), started, round(time.monotonic() - clock, 1))


def check_rebuild(content: Content, commit: Commit | None, request: Request, folder: Path) -> list[Check]:
    if not request.again:
        found = "not requested: the compiled library was compared with the wheel's own record only"
        return [Check("rebuilt wheel", Verdict.SKIP, found, next_step="--rebuild, in a clone")]
    if request.clone is None or commit is None:
        msg = "--rebuild needs a clone (--root CLONE) that has the wheel's commit, and a wheel of a clean commit"
        raise VerifyError(msg)
    built = rebuild(content, request.clone, relevant_tags(content, request.clone), folder)
    if request.keep is not None:
        request.keep.mkdir(parents=True, exist_ok=True)
        (request.keep / built.name).write_bytes(built.read_bytes())
    return compare(content, read_wheel(built, folder / "rebuilt"))


def check_bundle(content: Content, request: Request) -> Check:
    if request.bundle is None:
        found, step = "no bundle given: who built it is unknown", "--bundle FILE --identity WHO --issuer WHERE"
        return Check("signature", Verdict.SKIP, found, next_step=step)
    return signature.check_signature(content, request.bundle, request.identity, request.issuer, offline=request.offline)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--rebuild", action="store_true", help="rebuild its commit and compare every byte")
    parser.add_argument("--root", type=Path, help="a clone of flashmoe (default: the one around this folder)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the rebuilt wheel there")
    parser.add_argument("--bundle", type=Path, metavar="FILE", help="a sigstore bundle of the wheel")
    parser.add_argument(
        "--identity", default="", metavar="WHO", help="whose signature it must be (a workflow's URI, a mail address)"
    )
    parser.add_argument("--issuer", default="", metavar="URL", help="who vouched for that identity")
    parser.add_argument("--offline", action="store_true", help="use the trust root that sigstore carries")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report")


def run(args: argparse.Namespace) -> int:
    """Prints one line per check; returns the ExitCode."""
    signature.check_options(args)
    try:
        request = Request(
            clone=_clone(args.root), again=args.rebuild, keep=args.keep, bundle=args.bundle, identity=args.identity,
            issuer=args.issuer, offline=args.offline,
        )  # fmt: skip
        report = verify(args.wheel, request)
    except AuditError as error:
        print(f"{type(error).__name__}: {printable(str(error))}; next: {error.next_step}", file=sys.stderr)
        return ExitCode.FAILED
    print("\n".join(render(report)))
    if args.json:
        write_report(args.json, report)
    return int(report.exit_code)


def _clone(given: Path | None) -> Clone | None:
    """The clone that was named, else the one around this folder if it is flashmoe's."""
    found = find_clone(given or Path.cwd())
    if given is None:
        return found if found is not None and (found.root / "lockfiles" / "build.txt").is_file() else None
    if found is None:
        msg = f"{given} is not in a clone that git can read; name a clone of flashmoe"
        raise VerifyError(msg)
    return found


def render(report: Report) -> list[str]:
    lines = []
    for check in report.checks:
        word = "not checked" if check.verdict is Verdict.SKIP else str(check.verdict)
        lines.append(f"{word}  {printable(check.name)}: {printable(check.found)}")
        if check.verdict is not Verdict.PASS:
            shown = {"expected": check.expected, "why": check.why, "next": check.next_step}
            lines += [f"      {word}: {printable(text)}" for word, text in shown.items() if text]
    left = [check.name for check in report.checks if check.verdict is Verdict.SKIP]
    wheel, commit = printable(str(report.data["wheel"])), printable(str(report.data["commit"])[:12])
    lines.append(
        f"verify {report.verdict}: {wheel} of commit {commit}" + (f"; not checked: {', '.join(left)}" if left else "")
    )
    return lines
