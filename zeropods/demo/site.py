"""What stands behind the page: models by name, the tables of each, an answer of one or two. Nothing of a visitor's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zeropods.data.wikisql import Example, Table
from zeropods.demo.answering import Answer, ask, checked, run_query
from zeropods.demo.markup import answer_text, answers_html, message_html
from zeropods.demo.models import TrainedModel, trained_models
from zeropods.demo.tables import Tables, tables_in, tables_of
from zeropods.errors import UserError

EXAMPLES = 5
"""Questions that are offered for a table."""


@dataclass
class Site:
    """The folders that were named, and the data set if one was."""

    folders: tuple[Path, ...]
    data: Path | None = None
    passed_over: set[Path] = field(default_factory=set)
    """Models that could not be loaded when the page was opened."""
    _listed: dict[str, TrainedModel] = field(default_factory=dict)
    """As last looked up, for any visitor: reading all records takes longer than an answer."""

    def models(self) -> dict[str, TrainedModel]:
        """Models by their line in the list, the best first; looked up anew, as runs come while the page is open."""
        found = [model for model in trained_models(self.folders) if model.folder not in self.passed_over]
        if not found:
            raise UserError("no model that can be loaded is there any more; train one, and open the page again")
        self._listed = {model.label: model for model in found}
        return self._listed

    def model(self, label: str | None) -> TrainedModel:
        """The model of a line; `UserError` where it has gone."""
        model = self._listed.get(label or "") or self.models().get(label or "")
        if model is None:
            raise UserError("this model is not there any more; load the page again and choose another")
        return model

    def tables(self, label: str | None) -> Tables:
        """The tables that stand beside a model: of `--data`, of its own data set, or of the embedded one."""
        return tables_in(self.data) if self.data else tables_of(self.model(label).prepared)

    def examples(self, label: str | None, id_: str | None) -> list[tuple[str, str]]:
        """Questions about a table, each with the answer that the data set's query finds."""
        chosen = self.tables(label).examples.get(id_ or "", ())[:EXAMPLES]
        return [(one.question, answer_text(run_query(one.query, one.table))) for one in chosen]

    def answer(self, labels: Sequence[str | None], id_: str | None, own: Table | None, question: str | None) -> str:
        """The answer of each model to a question, side by side, as HTML.

        Args:
            labels: one model, or two; the data set is that of the first.
            own: the visitor's table, which goes before the one chosen.
        """
        try:
            line, (table, example) = checked(question), self._asked(labels[0], id_, own, question or "")
        except UserError as error:
            return message_html(str(error))
        answers = [(label, self._answer(label, table, line, example)) for label in dict.fromkeys(labels) if label]
        return answers_html(line, answers, table.header)

    def _asked(
        self, label: str | None, id_: str | None, own: Table | None, question: str
    ) -> tuple[Table, Example | None]:
        if own is not None:
            return own, None
        tables = self.tables(label)
        table = tables.table(id_)
        return table, tables.expected(table, question)

    def _answer(self, label: str, table: Table, question: str, example: Example | None) -> Answer | str:
        try:
            return ask(self.model(label), table, question, example)
        except UserError as error:
            return str(error)
