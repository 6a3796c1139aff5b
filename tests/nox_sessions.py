"""The names of noxfile.py's sessions, including those in its table of programs, without running nox."""

import re
from pathlib import Path

SOURCE = (Path(__file__).resolve().parents[1] / "noxfile.py").read_text(encoding="utf-8")
SESSIONS = re.findall(r"(?:^@nox\.session.*\ndef |^    \")(\w+)(?=\(session|\": \(\")", SOURCE, re.MULTILINE)
