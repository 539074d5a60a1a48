"""The page: HTML of tables, queries and answers, what happens on a click, and the server, on 127.0.0.1 only."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from html import escape
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from zeropods.data.own_data import decimal_points
from zeropods.demo.answering import (
    MAX_BYTES,
    MAX_COLUMNS,
    MAX_ROWS,
    ModelAnswer,
    QueryResult,
    Tables,
    TrainedModel,
    ask,
    checked,
    loaded,
    lost_data,
    run_query,
    tables_in,
    tables_of,
    trained_models,
    uploaded,
)
from zeropods.errors import UserError
from zeropods.pods.processes import DEMO, make_private_folder
from zeropods.programs import free_port, variable_set
from zeropods.sql.query import AGGREGATES, OPERATORS, Query, cells_text
from zeropods.tables import counted

if TYPE_CHECKING:
    from gradio import Blocks
    from starlette.requests import Request
    from starlette.responses import Response


TITLE = "Ask a table"
INTRODUCTION = """# Ask a table
Ask in plain English. A model that was fine-tuned here writes the SQL query, and the query is run on the table."""
UPLOAD = f"Or upload a table of your own: CSV, at most {MAX_BYTES >> 20} MiB, {MAX_ROWS:,} rows, {MAX_COLUMNS} columns"
OFTEN_WRONG = "<p>A model that was not trained on tables like yours is often wrong.</p>"
NONE = "no other model"
KEPT_SECONDS = 3_600
"""Seconds for which a visitor's file is kept."""
WAITING = 16
"""Maximum number of questions in the queue; one is answered at a time."""
EXAMPLES = 5
"""Maximum number of questions that are offered for a table."""


# Tables, queries and answers as HTML: `page.html`, where all text from outside is escaped.

PREVIEW_ROWS = 6
SHOWN_ROWS = 20
SHOWN_CELLS = 12
"""Number of cells that are shown of a long answer."""

Span = tuple[str, str | None]
"""A text and its kind, which is None for the words in between."""


@cache
def _macros() -> Any:
    from jinja2 import Environment

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    named = {"spans": spans, "answer_text": answer_text, "counted": counted, "columns_of": _columns_of}
    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return environment.from_string(text, globals=named | {"most": SHOWN_ROWS, "previewed": PREVIEW_ROWS}).module


def html(part: str, *values: Any) -> str:
    """A part of the page: `message` from a line, `preview` from a name and a table, or `answers`.

    `answers` are cards side by side, from a question, pairs of a model and its answer or why it has none, and a header.
    """
    return str(getattr(_macros(), part)(*values))


def spans(query: Query, header: Sequence[str]) -> list[Span]:
    """A query's readable text in parts; joined with spaces they are the text of `format_query`."""
    column = (header[query.sel], "column")
    parts: list[Span] = [("SELECT", None), (AGGREGATES[query.agg], "aggregate"), column, ("FROM table", None)]
    for number, condition in enumerate(query.conds):
        name, operator = header[condition.column], OPERATORS[condition.operator]
        parts += [("AND" if number else "WHERE", None), (f"{name} {operator} {condition.value}", "condition")]
    return [part for part in parts if part[0]]


def _columns_of(query: Query) -> dict[int, str]:
    """The kind of each column that a query names."""
    return {**{condition.column: "condition" for condition in query.conds}, query.sel: "column"}


def answer_text(found: QueryResult) -> str:
    """The result of a query, in one line."""
    cells = found.cells
    if cells is None or len(cells) <= SHOWN_CELLS:
        return cells_text(cells)
    return f"{cells_text(cells[:SHOWN_CELLS])} and {len(cells) - SHOWN_CELLS:,} more"


# What happens on a click. Models and tables are shared; nothing of a visitor's is kept here.


@dataclass
class Site:
    """The folders that were named, the data set if one was named, and what the components of the page show."""

    folders: tuple[Path, ...]
    data: Path | None = None
    passed_over: set[Path] = field(default_factory=set)
    """Models that could not be loaded when the page was opened."""
    _listed: dict[str, TrainedModel] = field(default_factory=dict)
    """Models as last looked up for any visitor: reading all records takes longer than an answer."""

    def models(self) -> dict[str, TrainedModel]:
        """Models by their line in the list, the best first; looked up anew, as runs appear while the page is open."""
        found = [model for model in trained_models(self.folders) if model.folder not in self.passed_over]
        if not found:
            raise UserError("no model can be loaded; train one and open the page again")
        self._listed = {model.label: model for model in found}
        return self._listed

    def model(self, label: str | None) -> TrainedModel:
        """The model of a line in the list; `UserError` if it is gone."""
        model = self._listed.get(label or "") or self.models().get(label or "")
        if model is None:
            raise UserError("this model is gone; load the page again and choose another")
        return model

    def tables(self, label: str | None) -> Tables:
        """The tables that are offered with a model: those of `--data`, of its own data set, or of the embedded one."""
        return tables_in(self.data) if self.data else tables_of(self.model(label))

    def start(self) -> list[Any]:
        """The lists of models and tables, for a page that has just been opened."""
        import gradio as gr

        try:
            labels = list(self.models())
        except UserError as error:
            raise gr.Error(str(error)) from None
        model = gr.Dropdown(choices=labels, value=labels[0])
        other = gr.Dropdown(choices=[(NONE, ""), *labels], value="", visible=len(labels) > 1)
        return [model, other, self.choose_model(labels[0])]

    def choose_model(self, label: str) -> Any:
        """The list of the tables that are offered with a model."""
        import gradio as gr

        try:
            tables = self.tables(label)
        except UserError as error:
            raise gr.Error(str(error)) from None
        choices = [(line, id_) for id_, line in tables.labels.items()]
        return gr.Dropdown(choices=choices, value=choices[0][1], label=f"Table ({tables.what})")

    def choose_table(self, label: str, id_: str) -> list[Any]:
        """A table's first rows and its questions, the first of which is filled in; an uploaded table is dropped."""
        import gradio as gr

        try:
            tables = self.tables(label)
            table, examples = tables.table(id_), tables.examples[id_][:EXAMPLES]
            samples = [(e.question, answer_text(run_query(e.query, e.table))) for e in examples]
        except UserError as error:
            return [None, None, html("message", str(error)), gr.skip(), "", ""]
        offered = gr.Dataset(samples=[[escape(text) for text in sample] for sample in samples], visible=True)
        return [None, None, html("preview", "Preview", table), offered, samples[0][0], ""]

    def choose_example(self, label: str, id_: str, index: int) -> str:
        """The question of an example."""
        return self.tables(label).examples[id_][index].question

    def upload(self, name: str) -> list[Any]:
        """A visitor's table, or what is wrong with it, which is then also the answer to every question about it."""
        import gradio as gr

        hidden, own = gr.Dataset(samples=[], visible=False), str(name)
        try:
            table = uploaded(Path(own))
        except UserError as error:
            return [own, html("message", str(error)), hidden, "", ""]
        return [own, html("preview", f"Your table {Path(own).name}", table) + OFTEN_WRONG, hidden, "", ""]

    def ask(self, label: str, other: str, id_: str, own: str | None, question: str) -> str:
        """The answers to a question side by side as HTML, or a line that says what is wrong.

        Args:
            other: a second model, or nothing; the data set is that of the first.
            own: the file of the visitor's table, which takes precedence over the chosen one.
        """
        example = None
        try:
            line = checked(question)
            if own:
                table, line = uploaded(Path(own)), decimal_points(line)
            else:
                tables = self.tables(label)
                table = tables.table(id_)
                example = tables.expected(table, line) or tables.expected(table, decimal_points(line))
                line = example.question if example else line
        except UserError as error:
            return html("message", str(error))
        answers: dict[str, ModelAnswer | str] = {}
        for each in dict.fromkeys(filter(None, (label, other))):
            try:
                answers[each] = ask(self.model(each), table, line, example)
            except UserError as error:
                answers[each] = str(error)
        return html("answers", line, answers.items(), table.header)


def build_page(site: Site) -> Blocks:
    """The page as Gradio's blocks; each visitor has their own state, the models are shared.

    No input may name a file that was not uploaded: Gradio copies every input in the form of a file, even that of a text
    box, to where it can be fetched, and downloads it if it names an address.
    """
    import gradio as gr
    from gradio.utils import get_upload_folder
    from gradio_client.utils import is_file_obj_with_meta, traverse

    def check(file: dict[str, Any]) -> None:
        if not Path(file["path"]).resolve().is_relative_to(Path(get_upload_folder()).resolve()):
            raise gr.Error("a file that was not uploaded here; upload it", print_exception=False)

    class OwnFilesOnly(gr.Blocks):
        async def preprocess_data(self, block_fn: Any, inputs: list[Any], *others: Any, **more: Any) -> list[Any]:
            traverse(inputs, check, is_file_obj_with_meta)
            return await super().preprocess_data(block_fn, inputs, *others, **more)

    with OwnFilesOnly(title=TITLE, analytics_enabled=False, delete_cache=(600, KEPT_SECONDS)) as page:
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
        shown = [own, file, preview, examples, question, answer]
        asking: dict[str, Any] = {
            "fn": site.ask, "inputs": [model, other, table, own, question], "outputs": answer,
            "concurrency_limit": 1, "concurrency_id": "model", "api_visibility": "private", "show_progress": "minimal",
        }  # fmt: skip
        quick: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
        page.load(site.start, None, [model, other, table], **quick).then(
            site.choose_table, [model, table], shown, **quick
        )
        model.input(site.choose_model, model, table, **quick).then(site.choose_table, [model, table], shown, **quick)
        table.input(site.choose_table, [model, table], shown, **quick)
        file.upload(site.upload, file, [own, preview, examples, question, answer], **quick)
        file.clear(site.choose_table, [model, table], shown, **quick)
        examples.click(site.choose_example, [model, table, examples], question, **quick).then(**asking)
        button.click(**asking)
        question.submit(**asking)
    return page.queue(max_size=WAITING, api_open=False)


# The page on a port of this machine, until SIGTERM or Ctrl-C, for those who may use it: requests under a foreign host
# name or from a page of another origin are refused.

HOST = "127.0.0.1"
"""Never any other address: anyone who can reach the page can ask questions, and CML's proxy looks here."""
USUAL_PORT = 7860
OWN_NAMES = ("127.0.0.1", "localhost")
"""Names of the page's host: pages under a foreign name for this machine (DNS rebinding) would pass for our own."""
ANY_NAME = ("*",)
"""Any name, for a page behind a proxy that has a name of its own and authenticates users, such as CML's."""
OWN_SITES = ("same-origin", "none")
"""Values that browsers send in Sec-Fetch-Site for a request that was not made by a foreign page."""
POLICY = (
    "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; connect-src 'self'; object-src 'none'; "
    "base-uri 'self'; form-action 'self'"
)
"""Content security policy, by which a browser loads nothing from another host for this page."""


def serve(
    folders: Sequence[Path],
    data: Path | None,
    port: str | None,
    announce: Callable[[str], object] = lambda line: None,
    names: Sequence[str] = OWN_NAMES,
) -> None:
    """Open the page and keep it open; SIGTERM and SIGINT end it cleanly, as `KeyboardInterrupt`.

    Args:
        port: where to listen; the usual port, or any free one, if not given.
        announce: called with the line that has the address once the page can be opened, and for models passed over.
        names: host names by which a browser may address this machine; requests to others are refused.

    Raises:
        UserError: the port cannot be listened on, or the folders or data cannot be shown.
    """
    site, number = Site(tuple(folders), data), usable_port(port)
    with ExitStack() as at_end:
        # What visitors upload goes to a folder that is removed when the page ends; nothing is sent to anyone outside.
        folder = make_private_folder(DEMO)
        at_end.callback(shutil.rmtree, folder, ignore_errors=True)
        said = {"GRADIO_TEMP_DIR": str(folder), "GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_OFFLINE": "1"}
        # Gradio requests its own page to see whether it can be opened; that request must not go to a proxy.
        for name, value in {**said, "NO_PROXY": HOST}.items():
            at_end.enter_context(variable_set(name, value))
        if data:
            tables_in(data)
        # The best model is loaded and its tables are read, so that the first answer comes at once.
        models = list(site.models().values())
        for model in models:
            try:
                site.tables(model.label)
                loaded(model)
                break
            except UserError as error:
                if model is models[-1]:
                    raise
                site.passed_over.add(model.folder)
                announce(f"{error}; passed over")
        count = len(site.models())
        # The page begins with the first model; with another one, the list of tables says what it holds.
        lost = None if data else lost_data(next(iter(site.models().values())))
        if lost is not None:
            announce(lost)

        # These imports come last: Gradio and what it imports read those variables only once.
        import gradio as gr
        from starlette.middleware import Middleware
        from starlette.middleware.base import BaseHTTPMiddleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware

        guards = [
            Middleware(TrustedHostMiddleware, allowed_hosts=list(names), www_redirect=False),
            Middleware(BaseHTTPMiddleware, dispatch=_own_pages_only),
        ]
        theme = gr.themes.Default(
            font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"], primary_hue="blue"
        )
        page = build_page(site)
        page.launch(
            server_name=HOST, server_port=number, prevent_thread_lock=True, quiet=True, inbrowser=False, share=False,
            footer_links=[], run_history=False, show_error=False, max_file_size=MAX_BYTES, ssr_mode=False,
            enable_monitoring=False, pwa=False, mcp_server=False, theme=theme,
            css_paths=Path(__file__).with_name("page.css"),
            app_kwargs={"middleware": guards, "docs_url": None, "redoc_url": None, "openapi_url": None},
        )  # fmt: skip
        at_end.callback(page.close, verbose=False)
        announce(f"{page.local_url}: {counted(count, 'trained model')} to ask; Ctrl-C ends it")
        Event().wait()


def usable_port(port: str | None) -> int:
    """The port that was asked for, if nothing listens there; if none was, the usual port, or any free one."""
    if port is not None and (not port.isascii() or not port.isdigit() or not 0 < int(port[:6]) < 65_536):
        raise UserError(f"port {port}; expected a number from 1 to 65535")
    number = int(port or USUAL_PORT)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, number))
        except OSError as error:
            if port is None:
                return free_port(HOST)
            raise UserError(f"port {port}: {error.strerror}; give another with --port") from None
        return number


async def _own_pages_only(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
    """Refuse what a page of another origin sends, and tell browsers with every answer to contact no other host."""
    from starlette.responses import PlainTextResponse

    if request.method == "POST" and request.headers.get("sec-fetch-site", "none") not in OWN_SITES:
        return PlainTextResponse("sent by a page of another origin", status_code=403)
    response = await answer(request)
    response.headers["content-security-policy"] = POLICY
    return response
