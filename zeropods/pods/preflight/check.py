"""What was found on a pod: one check, the checks of one pod, those of all pods."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["ok", "warning", "failed"]


@dataclass(frozen=True)
class Check:
    """What was found where one thing was looked at."""

    check: str
    """The thing, as a heading."""
    verdict: Verdict
    value: str
    """What was found, short enough for a cell of a table."""
    remedy: str = ""
    """What to do about it; empty where all is well."""

    def __post_init__(self) -> None:
        if (self.verdict == "ok") == bool(self.remedy):
            raise ValueError(f"{self.check}: a remedy belongs to what is not ok, and to nothing else")


@dataclass(frozen=True, kw_only=True)
class PodChecks:
    """What was found on one pod."""

    pod: str
    address: str
    checks: tuple[Check, ...]

    def not_ok(self) -> list[Check]:
        """Failures, then warnings."""
        return sorted((c for c in self.checks if c.verdict != "ok"), key=lambda c: c.verdict != "failed")


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """What was found on all pods, in the order of the hostfile."""

    pods: tuple[PodChecks, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing failed; warnings are let pass."""
        return all(check.verdict != "failed" for pod in self.pods for check in pod.checks)

    def to_json(self) -> dict[str, Any]:
        """As `zeropods pods check --json` prints it."""
        return {"ok": self.ok, **asdict(self)}
