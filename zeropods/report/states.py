"""The planned states of a model as people see them: a table, and every term with its formula."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zeropods.plan.estimate import Request
from zeropods.plan.states import PlannedStates
from zeropods.plan.terms import STATES
from zeropods.report.plan import gib
from zeropods.tables import Table, wrapped
from zeropods.techniques import not_planned_yet

NO_TIMES = (
    "Without a GPU a plan says the states alone, which are exact and do not depend on batch or "
    "length; other memory and times are planned for GPUs only."
)


@dataclass(frozen=True)
class StatesReport:
    """What `zeropods plan --device cpu` shows."""

    request: Request
    states: tuple[PlannedStates, ...]
    """Those of one process, for each technique."""

    def to_json(self) -> dict[str, Any]:
        """What `zeropods plan --device cpu --json` prints; bytes are of one process."""
        return {
            "request": {
                "model": self.request.model,
                "precision": self.request.precision,
                "gradient_accumulation": self.request.gradient_accumulation,
                "pods": self.request.machines.pods,
                "slots": self.request.machines.slots,
            },
            "techniques": [states.to_json() for states in self.states],
            "remark": NO_TIMES,
        }

    def to_text(self, formulas: bool) -> str:
        """The table, and why it has no times.

        Args:
            formulas: whether to add every term with its formula.
        """
        parts = [str(self.table()), f"{wrapped(NO_TIMES)}\n"]
        if not self.request.techniques:
            parts.append(not_planned_yet())
        if formulas:
            parts.append(str(self.formulas()))
        return "\n".join(parts).rstrip()

    def table(self) -> Table:
        """A table with a line for each technique: its states by part, in GiB."""
        lines = []
        for states in self.states:
            parts = states.parts()
            line = {"technique": states.technique.name, "total (GiB)": gib(parts["total"])}
            for part in STATES:
                line[f"{part} (GiB)"] = gib(parts[part])
            lines.append(line)
        request = self.request
        return Table.of(lines, f"{request.model}: states of one process, {request.precision}")

    def formulas(self) -> Table:
        """A table of every term with its formula, for one process."""
        lines = []
        for states in self.states:
            for term in states.terms:
                line = {
                    "technique": states.technique.name,
                    "part": term.part,
                    "what": term.name,
                    "GiB": gib(term.bytes),
                    "formula": term.formula,
                }
                lines.append(line)
        return Table.of(lines, "Every term, of one process")
