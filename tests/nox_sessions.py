"""The names of noxfile.py's sessions, those of its table of programs among them, without running nox."""

import re
from pathlib import Path

SOURCE = (Path(__file__).resolve().parents[1] / "noxfile.py").read_text(encoding="utf-8")
SESSIONS = re.findall(r"(?:^@nox\.session.*\ndef |^    \")(\w+)(?=\(session|\": \(\")", SOURCE, re.MULTILINE)
