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
    joined = re.sub(r"\s*\\\n\s*", " ", text)
    instructions = []
    stage = 0
    for line in joined.splitlines():
        if not line:
            continue
        name, _, rest = line.partition(" ")
        is_known = name in KNOWN and "<<" not in rest
        assert is_known, f"{path}: {line!r}; expected {', '.join(KNOWN)}"
        if name == "FROM":
            stage += 1
        instructions.append(Instruction(name, rest.strip(), stage))
    return instructions
