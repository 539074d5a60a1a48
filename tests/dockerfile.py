"""A strict reader of a Dockerfile: what it does not know is an error."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

KNOWN = ("ARG", "FROM", "RUN", "COPY", "ENV", "LABEL", "USER", "WORKDIR", "SHELL")
ASSIGNMENT = re.compile(r'([\w.-]+)=("(?:[^"\\]|\\.)*"|[^\s"]*)')


@dataclass(frozen=True)
class Instruction:
    """One instruction, its continuation lines joined."""

    name: str
    text: str
    stage: int
    """0 before the first FROM."""

    def assignments(self) -> dict[str, str]:
        """What an ENV or a LABEL assigns, without quotes."""
        rest = ASSIGNMENT.sub("", self.text).strip()
        assert not rest, f"{self.name} {self.text}: {rest!r} is no NAME=VALUE"
        return {name: value.strip('"') for name, value in ASSIGNMENT.findall(self.text)}


def read_dockerfile(path: Path) -> list[Instruction]:
    """The instructions in order."""
    found, stage = [], 0
    for number, line in _logical_lines(path.read_text(encoding="utf-8").splitlines()):
        name, _, text = line.partition(" ")
        assert name in KNOWN, f"{path}:{number}: {name!r}; expected {', '.join(KNOWN)}"
        assert "<<" not in text, f"{path}:{number}: here-documents are not read here"
        stage += name == "FROM"
        found.append(Instruction(name, text.strip(), stage))
    return found


def _logical_lines(lines: Iterable[str]) -> Iterable[tuple[int, str]]:
    parts: list[str] = []
    for number, line in enumerate(lines, 1):
        if line.startswith("#") or (not parts and not line.strip()):
            continue
        assert line.strip(), f"line {number}: empty within an instruction"
        parts.append(line.removesuffix("\\").strip())
        if not line.endswith("\\"):
            yield number, " ".join(parts)
            parts = []
    assert not parts, "the last instruction is not ended"
