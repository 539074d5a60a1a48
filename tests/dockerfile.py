"""A reader of the instructions of a Dockerfile; one that it does not know is an error."""

import re
from dataclasses import dataclass
from pathlib import Path

KNOWN = ("ARG", "FROM", "RUN", "COPY", "ENV", "LABEL", "USER", "WORKDIR", "SHELL")


@dataclass(frozen=True)
class Instruction:
    """One instruction, its continuation lines joined."""

    name: str
    text: str
    stage: int
    """Number of the build stage; 0 before the first FROM."""


def read_dockerfile(path: Path) -> list[Instruction]:
    """The instructions in order."""
    text = re.sub(r"^#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    found, stage = [], 0
    for line in filter(None, re.sub(r"\s*\\\n\s*", " ", text).splitlines()):
        name, _, rest = line.partition(" ")
        assert name in KNOWN and "<<" not in rest, f"{path}: {line!r}; expected {', '.join(KNOWN)}"
        stage += name == "FROM"
        found.append(Instruction(name, rest.strip(), stage))
    return found
