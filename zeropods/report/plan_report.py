"""A plan as a notebook shows it: its table, what to choose, every term, plots."""

from __future__ import annotations

import html
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from zeropods.plan.any_request import request_for
from zeropods.plan.beside import beside
from zeropods.plan.estimate import Plan, plan
from zeropods.report import plan_tables
from zeropods.report.plot import Plot
from zeropods.report.table import Table


@dataclass(frozen=True)
class PlanReport:
    """A plan, shown."""

    plan: Plan

    @cached_property
    def document(self) -> dict[str, Any]:
        """What `zeropods plan --json` prints."""
        return {**self.plan.to_json(), "reference": [row.to_json() for row in beside(self.plan)]}

    @property
    def table(self) -> Table:
        """A line for each technique."""
        return plan_tables.techniques(self.document)

    @property
    def reference(self) -> Table:
        """Published runs beside the plan; without lines where there are none."""
        return plan_tables.reference(self.document)

    def formulas(self, technique: str | None = None) -> Table:
        """Every term with its formula."""
        return plan_tables.terms(self.document, technique)

    @property
    def memory(self) -> Plot:
        """Memory by part and technique against the GPU's size."""
        from zeropods.report.plan_plot import memory_plot

        return memory_plot(self.document)

    @property
    def time(self) -> Plot:
        """A step's time by part and technique."""
        from zeropods.report.plan_plot import time_plot

        return time_plot(self.document)

    def _repr_html_(self) -> str:
        return f"{self.table.to_html()}<p>{html.escape(plan_tables.choice(self.document))}</p>"

    def __repr__(self) -> str:
        return f"{self.table}\n{plan_tables.choice(self.document)}"


def plan_report(model: str, **asked: Any) -> PlanReport:
    """The plan of a `Request`, or of a `CausalRequest`, with these fields; `UserError` where one is wrong."""
    return PlanReport(plan(request_for(model, **asked)))
