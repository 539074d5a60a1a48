"""The page: what stands where, and what happens on a click. What happens is the `Site`'s."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropods.demo.csv_table import MAX_BYTES, MAX_COLUMNS, MAX_ROWS, uploaded
from zeropods.demo.guard import blocks_of_own_files
from zeropods.demo.markup import message_html, preview_html
from zeropods.demo.site import Site
from zeropods.errors import UserError

if TYPE_CHECKING:
    from gradio import Blocks

TITLE = "Ask a table"
INTRODUCTION = """# Ask a table
Ask in plain English. A model that was fine-tuned here writes the SQL query, and the query is run on the table."""
UPLOAD = f"Or upload a table of your own: CSV, at most {MAX_BYTES >> 20} MiB, {MAX_ROWS:,} rows, {MAX_COLUMNS} columns"
OFTEN_WRONG = "<p>A model that was not trained on tables like yours is often wrong.</p>"
NONE = "no other model"
KEPT_SECONDS = 3_600
"""How long a visitor's file is kept."""
WAITING = 16
"""Questions in the queue; one is answered at a time."""


def build_page(site: Site) -> Blocks:
    """The page as Gradio's blocks; each visitor has their own state, the models are shared."""
    import gradio as gr

    with blocks_of_own_files()(title=TITLE, analytics_enabled=False, delete_cache=(600, KEPT_SECONDS)) as page:
        gr.Markdown(INTRODUCTION)
        own = gr.State(None)
        with gr.Row():
            model = gr.Dropdown(label="Model", elem_id="zp-model", filterable=False, min_width=300)
            other = gr.Dropdown(label="Compare with", elem_id="zp-other", filterable=False, min_width=300)
        table = gr.Dropdown(label="Table", elem_id="zp-table")
        with gr.Accordion(UPLOAD, open=False, elem_id="zp-upload"):
            file = gr.File(file_types=[".csv", ".tsv", ".txt"], show_label=False, height=120)
        preview = gr.HTML(elem_id="zp-preview", elem_classes="zp")
        with gr.Row(equal_height=True):
            question = gr.Textbox(label="Question", elem_id="zp-question", scale=5, lines=1, max_lines=4)
            button = gr.Button("Ask", variant="primary", elem_id="zp-ask", scale=1, min_width=100)
        answer = gr.HTML(elem_id="zp-answer", elem_classes="zp", min_height=40)
        examples = gr.Dataset(
            type="index", components=[gr.HTML(visible=False), gr.HTML(visible=False)],
            headers=["Question", "Expected answer"],
            samples=[], label="Questions about this table: click one to ask it", layout="table", elem_id="zp-examples",
        )  # fmt: skip
        wire = _Wiring(site, gr)
        shown = [own, file, preview, examples, question, answer]
        asking: dict[str, Any] = {
            "fn": wire.ask, "inputs": [model, other, table, own, question], "outputs": answer,
            "concurrency_limit": 1, "concurrency_id": "model", "api_visibility": "private", "show_progress": "minimal",
        }  # fmt: skip
        quick: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
        page.load(wire.start, None, [model, other, table], **quick).then(
            wire.choose_table, [model, table], shown, **quick
        )
        model.input(wire.choose_model, model, table, **quick).then(wire.choose_table, [model, table], shown, **quick)
        table.input(wire.choose_table, [model, table], shown, **quick)
        file.upload(wire.upload, file, [own, preview, examples, question, answer], **quick)
        file.clear(wire.choose_table, [model, table], shown, **quick)
        examples.click(wire.choose_example, [model, table, examples], question, **quick).then(**asking)
        button.click(**asking)
        question.submit(**asking)
    return page.queue(max_size=WAITING, api_open=False)


class _Wiring:
    """The site's answers as values of the page's components."""

    def __init__(self, site: Site, gr: Any) -> None:
        self.site, self.gr = site, gr

    def start(self) -> list[Any]:
        """The lists of models and tables, for a page that was just opened."""
        try:
            labels = list(self.site.models())
        except UserError as error:
            raise self.gr.Error(str(error)) from None
        model = self.gr.Dropdown(choices=labels, value=labels[0])
        other = self.gr.Dropdown(choices=[(NONE, ""), *labels], value="", visible=len(labels) > 1)
        return [model, other, self.choose_model(labels[0])]

    def choose_model(self, label: str) -> Any:
        """The tables that stand beside a model."""
        try:
            tables = self.site.tables(label)
        except UserError as error:
            raise self.gr.Error(str(error)) from None
        choices = [(line, id_) for id_, line in tables.labels.items()]
        return self.gr.Dropdown(choices=choices, value=choices[0][1], label=f"Table ({tables.what})")

    def choose_table(self, label: str, id_: str) -> list[Any]:
        """A table's first rows and questions, the first of which stands ready; what was uploaded goes."""
        try:
            table = self.site.tables(label).table(id_)
            samples = self.site.examples(label, id_)
        except UserError as error:
            return [None, None, message_html(str(error)), self.gr.skip(), "", ""]
        offered = self.gr.Dataset(samples=[[escape(text) for text in sample] for sample in samples], visible=True)
        return [None, None, preview_html(table, "Preview"), offered, samples[0][0], ""]

    def upload(self, name: str) -> list[Any]:
        """A visitor's table, or what is wrong with it, which is then said to every question about it."""
        hidden, own = self.gr.Dataset(samples=[], visible=False), str(name)
        try:
            table = uploaded(Path(own))
        except UserError as error:
            return [own, message_html(str(error)), hidden, "", ""]
        return [own, preview_html(table, f"Your table {Path(own).name}") + OFTEN_WRONG, hidden, "", ""]

    def choose_example(self, label: str, id_: str, index: int) -> str:
        """The question of an example."""
        return self.site.examples(label, id_)[index][0]

    def ask(self, label: str, other: str, id_: str, own: str | None, question: str) -> str:
        """The answer, or the answers side by side; what is wrong with the visitor's table, if something is."""
        try:
            table = uploaded(Path(own)) if own else None
        except UserError as error:
            return message_html(str(error))
        return self.site.answer([label, other], id_, table, question)
