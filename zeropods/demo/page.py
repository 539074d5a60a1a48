"""The page: HTML of tables, queries and answers, what happens on a click, and the server.

The server listens on 127.0.0.1 only.
"""

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
from zeropods.data.wikisql import Example
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
from zeropods.sql.table import SQLTable
from zeropods.tables import counted

if TYPE_CHECKING:
    from gradio import HTML, Blocks, Button, Dataset, Dropdown, File, State, Textbox
    from starlette.requests import Request
    from starlette.responses import Response


PAGE_TITLE = "Ask a table"
INTRODUCTION = (
    "# Ask a table\n"
    "Ask in plain English. A model that was fine-tuned here writes the SQL query, and the query is "
    "run on the table."
)
UPLOAD = (
    f"Or upload a table of your own: CSV, at most {MAX_BYTES >> 20} MiB, {MAX_ROWS:,} rows, "
    f"{MAX_COLUMNS} columns"
)
OFTEN_WRONG = "<p>A model that was not trained on tables like yours is often wrong.</p>"
NONE = "no other model"
KEPT_SECONDS = 3_600
"""Seconds for which a visitor's file is kept."""
MOST_IN_QUEUE = 16
"""Maximum number of questions in the queue; one is answered at a time."""
EXAMPLES = 5
"""Maximum number of questions that are offered for a table."""


# Tables, queries and answers as HTML: `page.html`, where all text from outside is escaped.

PREVIEW_ROWS = 6
MOST_RESULT_ROWS = 20
MOST_RESULT_CELLS = 12
"""Number of cells that are shown of a long answer."""

Span = tuple[str, str | None]
"""A text and its kind, which is None for the words in between."""


@cache
def _macros() -> Any:
    """The macros of `page.html`; they can call the functions of this module that are named here."""
    from jinja2 import Environment

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    names = {
        "spans": spans,
        "answer_text": answer_text,
        "counted": counted,
        "columns_of": _columns_of,
        "most": MOST_RESULT_ROWS,
        "previewed": PREVIEW_ROWS,
    }
    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return environment.from_string(text, globals=names).module


def html(part: str, *values: Any) -> str:
    """A part of the page, made by the macro of this name in `page.html`.

    Args:
        part: `message`, `preview` or `answers`.
        values: for `message` a line; for `preview` a name and a table; for `answers` a question,
            pairs of a model's label and its answer (or a line that says why there is none), and the
            table's header.
    """
    macro = getattr(_macros(), part)
    return str(macro(*values))


def spans(query: Query, header: Sequence[str]) -> list[Span]:
    """A query's readable text in parts; joined with spaces they are the text of `format_query`."""
    parts: list[Span] = [
        ("SELECT", None),
        (AGGREGATES[query.agg], "aggregate"),
        (header[query.sel], "column"),
        ("FROM table", None),
    ]
    joining = "WHERE"
    for condition in query.conds:
        name = header[condition.column]
        operator = OPERATORS[condition.operator]
        parts.append((joining, None))
        parts.append((f"{name} {operator} {condition.value}", "condition"))
        joining = "AND"
    return [(text, kind) for text, kind in parts if text]


def _columns_of(query: Query) -> dict[int, str]:
    """The kind of each column that a query names; one that is selected and compared is `column`."""
    kinds = {condition.column: "condition" for condition in query.conds}
    kinds[query.sel] = "column"
    return kinds


def answer_text(result: QueryResult) -> str:
    """The result of a query, in one line."""
    cells = result.cells
    if cells is None or len(cells) <= MOST_RESULT_CELLS:
        return cells_text(cells)
    more = len(cells) - MOST_RESULT_CELLS
    return f"{cells_text(cells[:MOST_RESULT_CELLS])} and {more:,} more"


# What happens on a click. Models and tables are shared; nothing of a visitor's is kept here.


@dataclass
class Site:
    """What the components of the page show, of the folders and the data set that were named.

    Gradio calls the methods from `start` to `ask`. Each takes the values of some components and
    returns the new values of others, in the order in which `_connect` lists them.
    """

    folders: tuple[Path, ...]
    data: Path | None = None
    passed_over: set[Path] = field(default_factory=set)
    """Models that could not be loaded when the page was opened."""
    _listed: dict[str, TrainedModel] = field(default_factory=dict)
    """Models as last looked up for any visitor: reading all records takes longer than an answer."""

    def models(self) -> dict[str, TrainedModel]:
        """Models by their line in the list, the best first; `UserError` if there is none.

        They are looked up anew at each call, since runs may appear while the page is open.
        """
        models = trained_models(self.folders)
        usable = [model for model in models if model.folder not in self.passed_over]
        if not usable:
            raise UserError("no model can be loaded; train one and open the page again")
        self._listed = {model.label: model for model in usable}
        return self._listed

    def model(self, label: str | None) -> TrainedModel:
        """The model of a line in the list; `UserError` if it is gone."""
        model = self._listed.get(label or "") or self.models().get(label or "")
        if model is None:
            raise UserError("this model is gone; load the page again and choose another")
        return model

    def tables(self, label: str | None) -> Tables:
        """The tables that are offered with a model.

        They are those of `--data`, of the model's own data set, or of the embedded one.
        """
        if self.data:
            return tables_in(self.data)
        return tables_of(self.model(label))

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
        _, first_id = choices[0]
        return gr.Dropdown(choices=choices, value=first_id, label=f"Table ({tables.description})")

    def choose_table(self, label: str, id_: str) -> list[Any]:
        """A table's first rows and its questions, the first of which is filled in; where something
        is wrong, a line that says so.

        The first two values drop an uploaded table, and the last one an earlier answer.
        """
        import gradio as gr

        try:
            tables = self.tables(label)
            table = tables.table(id_)
            samples = []
            for example in tables.examples[id_][:EXAMPLES]:
                expected = answer_text(run_query(example.query, example.table))
                samples.append([example.question, expected])
        except UserError as error:
            return [None, None, html("message", str(error)), gr.skip(), "", ""]
        first_question, _ = samples[0]
        escaped = [[escape(question), escape(expected)] for question, expected in samples]
        offered = gr.Dataset(samples=escaped, visible=True)
        return [None, None, html("preview", "Preview", table), offered, first_question, ""]

    def choose_example(self, label: str, id_: str, index: int) -> str:
        """The question of an example."""
        return self.tables(label).examples[id_][index].question

    def upload(self, name: str) -> list[Any]:
        """The first rows of a visitor's table, or what is wrong with it.

        The file stays chosen even if something is wrong: `ask` then answers every question with the
        same line.
        """
        import gradio as gr

        no_examples = gr.Dataset(samples=[], visible=False)
        uploaded_file = str(name)
        try:
            table = uploaded(Path(uploaded_file))
        except UserError as error:
            return [uploaded_file, html("message", str(error)), no_examples, "", ""]
        preview = html("preview", f"Your table {Path(uploaded_file).name}", table)
        return [uploaded_file, preview + OFTEN_WRONG, no_examples, "", ""]

    def ask(
        self, label: str, other: str, id_: str, uploaded_file: str | None, question: str
    ) -> str:
        """The answers to a question side by side as HTML, or a line that says what is wrong.

        Args:
            label: the line of the first model, whose data set is offered.
            other: the line of a second model, or an empty text.
            id_: the id of the chosen table.
            uploaded_file: the file of the visitor's table, which takes precedence over the chosen
                one.
        """
        example = None
        try:
            line = checked(question)
            if uploaded_file:
                table = uploaded(Path(uploaded_file))
                line = decimal_points(line)
            else:
                tables = self.tables(label)
                table = tables.table(id_)
                example = tables.expected(table, line)
                if example is None:
                    # The data set writes numbers with a point, a visitor perhaps with a comma.
                    example = tables.expected(table, decimal_points(line))
                if example is not None:
                    line = example.question
        except UserError as error:
            return html("message", str(error))
        answers: dict[str, ModelAnswer | str] = {}
        for model_label in (label, other):
            if model_label and model_label not in answers:
                answers[model_label] = self._answer(model_label, table, line, example)
        return html("answers", line, answers.items(), table.header)

    def _answer(
        self, label: str, table: SQLTable, question: str, example: Example | None
    ) -> ModelAnswer | str:
        """The answer of one model, or a line that says why there is none."""
        try:
            return ask(self.model(label), table, question, example)
        except UserError as error:
            return str(error)


@dataclass(frozen=True, kw_only=True)
class Components:
    """The components of the page that hold or show something, from top to bottom."""

    uploaded_file: State
    """The file of the visitor's table; None where there is none."""
    model: Dropdown
    other: Dropdown
    table: Dropdown
    file: File
    preview: HTML
    question: Textbox
    button: Button
    answer: HTML
    examples: Dataset


def build_page(site: Site) -> Blocks:
    """The page as Gradio's blocks; each visitor has their own state, the models are shared."""
    blocks_class = _blocks_with_own_files_only()
    with blocks_class(
        title=PAGE_TITLE, analytics_enabled=False, delete_cache=(600, KEPT_SECONDS)
    ) as page:
        components = _components()
        _connect(page, components, site)
    return page.queue(max_size=MOST_IN_QUEUE, api_open=False)


def _blocks_with_own_files_only() -> type[Blocks]:
    """A class of Gradio's blocks that refuses inputs that name a file which was not uploaded.

    Gradio by itself copies every input in the form of a file, even that of a text box, to where it
    can be fetched, and downloads it if it names an address.
    """
    import gradio as gr
    from gradio.utils import get_upload_folder
    from gradio_client.utils import is_file_obj_with_meta, traverse

    def check(file: dict[str, Any]) -> None:
        folder = Path(get_upload_folder()).resolve()
        if not Path(file["path"]).resolve().is_relative_to(folder):
            fault = "a file that was not uploaded here; upload it"
            raise gr.Error(fault, print_exception=False)

    class OwnFilesOnly(gr.Blocks):
        async def preprocess_data(
            self, block_fn: Any, inputs: list[Any], *others: Any, **more: Any
        ) -> list[Any]:
            traverse(inputs, check, is_file_obj_with_meta)
            return await super().preprocess_data(block_fn, inputs, *others, **more)

    return OwnFilesOnly


def _components() -> Components:
    """The components, which stand on the page in the order in which they are made."""
    import gradio as gr

    gr.Markdown(INTRODUCTION)
    uploaded_file = gr.State(None)
    with gr.Row():
        model = gr.Dropdown(label="Model", elem_id="zp-model", filterable=False, min_width=300)
        other = gr.Dropdown(
            label="Compare with", elem_id="zp-other", filterable=False, min_width=300
        )
    table = gr.Dropdown(label="Table", elem_id="zp-table")
    with gr.Accordion(UPLOAD, open=False, elem_id="zp-upload"):
        file = gr.File(file_types=[".csv", ".tsv", ".txt"], show_label=False, height=120)
    preview = gr.HTML(elem_id="zp-preview", elem_classes="zp")
    with gr.Row(equal_height=True):
        question = gr.Textbox(
            label="Question", elem_id="zp-question", scale=5, lines=1, max_lines=4
        )
        button = gr.Button("Ask", variant="primary", elem_id="zp-ask", scale=1, min_width=100)
    answer = gr.HTML(elem_id="zp-answer", elem_classes="zp", min_height=40)
    examples = gr.Dataset(
        type="index",
        components=[gr.HTML(visible=False), gr.HTML(visible=False)],
        headers=["Question", "Expected answer"],
        samples=[],
        label="Questions about this table: click one to ask it",
        layout="table",
        elem_id="zp-examples",
    )
    return Components(
        uploaded_file=uploaded_file,
        model=model,
        other=other,
        table=table,
        file=file,
        preview=preview,
        question=question,
        button=button,
        answer=answer,
        examples=examples,
    )


def _connect(page: Blocks, parts: Components, site: Site) -> None:
    """Connect the components to the methods of the site: what happens when the page is opened, and
    on each choice and click."""
    parts_of_table = [parts.preview, parts.examples, parts.question, parts.answer]
    shown = [parts.uploaded_file, parts.file, *parts_of_table]
    lists = [parts.model, parts.other, parts.table]
    chosen = [parts.model, parts.table]
    asking: dict[str, Any] = {
        "fn": site.ask,
        "inputs": [*lists, parts.uploaded_file, parts.question],
        "outputs": parts.answer,
        # Models are shared by all visitors and answer one question at a time.
        "concurrency_limit": 1,
        "concurrency_id": "model",
        "api_visibility": "private",
        "show_progress": "minimal",
    }
    quick: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}

    opened = page.load(site.start, None, lists, **quick)
    opened.then(site.choose_table, chosen, shown, **quick)
    model_chosen = parts.model.input(site.choose_model, parts.model, parts.table, **quick)
    model_chosen.then(site.choose_table, chosen, shown, **quick)
    parts.table.input(site.choose_table, chosen, shown, **quick)
    parts.file.upload(site.upload, parts.file, [parts.uploaded_file, *parts_of_table], **quick)
    parts.file.clear(site.choose_table, chosen, shown, **quick)
    example_chosen = parts.examples.click(
        site.choose_example, [*chosen, parts.examples], parts.question, **quick
    )
    example_chosen.then(**asking)
    parts.button.click(**asking)
    parts.question.submit(**asking)


# The page on a port of this machine, until SIGTERM or Ctrl-C, for those who may use it.
#
# Requests under a foreign host name or from a page of another origin are refused.

HOST = "127.0.0.1"
"""Never any other address: anyone who can reach the page can ask questions, and CML's proxy looks
here."""
USUAL_PORT = 7860
OWN_NAMES = ("127.0.0.1", "localhost")
"""Names of the page's host: pages under a foreign name for this machine (DNS rebinding) would pass
for our own."""
ANY_NAME = ("*",)
"""Any name, for a page behind a proxy that has a name of its own and authenticates users, such as
CML's."""
OWN_SITES = ("same-origin", "none")
"""Values that browsers send in Sec-Fetch-Site for a request that was not made by a foreign page."""
POLICY = (
    "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; connect-src 'self'; "
    "object-src 'none'; base-uri 'self'; form-action 'self'"
)
"""Content security policy, by which a browser loads nothing from another host for this page."""


def serve(
    folders: Sequence[Path],
    data: Path | None,
    port: str | None,
    announce: Callable[[str], object] = lambda line: None,
    names: Sequence[str] = OWN_NAMES,
) -> None:
    """Open the page and keep it open until a signal raises an exception, as Ctrl-C does; the page
    is closed then, and what visitors have uploaded is removed.

    Args:
        folders: run folders, model folders, or folders with runs below them.
        data: folder of the tables and questions; if not given, those that a model was trained on.
        port: where to listen; the usual port, or any free one, if not given.
        announce: called with the line that has the address once the page can be opened, and for
            models passed over.
        names: host names by which a browser may address this machine; requests to others are
            refused.

    Raises:
        UserError: the port cannot be listened on, or the folders or data cannot be shown.
    """
    site = Site(tuple(folders), data)
    number = usable_port(port)
    with ExitStack() as at_end:
        # What visitors upload goes to a folder that is removed when the page ends.
        folder = make_private_folder(DEMO)
        at_end.callback(shutil.rmtree, folder, ignore_errors=True)
        for name, value in _variables(folder).items():
            at_end.enter_context(variable_set(name, value))
        if data:
            tables_in(data)
        _load_best(site, announce)
        models = list(site.models().values())
        # Only the first model is spoken of, with which the page begins. When another one is chosen,
        # the list of tables says what it holds.
        lost = None if data else lost_data(models[0])
        if lost is not None:
            announce(lost)
        page = _launched(site, number, names)
        at_end.callback(page.close, verbose=False)
        announce(
            f"{page.local_url}: {counted(len(models), 'trained model')} to ask; Ctrl-C ends it"
        )
        Event().wait()


def _variables(uploads: Path) -> dict[str, str]:
    """The environment that Gradio is to find: nothing is sent to anyone outside."""
    return {
        "GRADIO_TEMP_DIR": str(uploads),
        "GRADIO_ANALYTICS_ENABLED": "False",
        "HF_HUB_OFFLINE": "1",
        # Gradio requests its own page to see whether it can be opened; that request must not go to
        # a proxy.
        "NO_PROXY": HOST,
    }


def _load_best(site: Site, announce: Callable[[str], object]) -> None:
    """Load the best model and read its tables, so that the first answer comes at once.

    Models that cannot be loaded are announced and added to `passed_over` of the site; the fault of
    the last model is raised.
    """
    models = list(site.models().values())
    for model in models:
        try:
            site.tables(model.label)
            loaded(model)
            return
        except UserError as error:
            if model is models[-1]:
                raise
            site.passed_over.add(model.folder)
            announce(f"{error}; passed over")


def _launched(site: Site, port: int, names: Sequence[str]) -> Blocks:
    """The page, which Gradio serves in threads of its own."""
    # These imports come last: Gradio and what it imports read the variables only once.
    import gradio as gr
    from starlette.middleware import Middleware
    from starlette.middleware.base import BaseHTTPMiddleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    guards = [
        Middleware(TrustedHostMiddleware, allowed_hosts=list(names), www_redirect=False),
        Middleware(BaseHTTPMiddleware, dispatch=_own_pages_only),
    ]
    theme = gr.themes.Default(
        font=["system-ui", "sans-serif"],
        font_mono=["ui-monospace", "monospace"],
        primary_hue="blue",
    )
    page = build_page(site)
    page.launch(
        server_name=HOST,
        server_port=port,
        prevent_thread_lock=True,
        quiet=True,
        inbrowser=False,
        share=False,
        footer_links=[],
        run_history=False,
        show_error=False,
        max_file_size=MAX_BYTES,
        ssr_mode=False,
        enable_monitoring=False,
        pwa=False,
        mcp_server=False,
        theme=theme,
        css_paths=Path(__file__).with_name("page.css"),
        app_kwargs={
            "middleware": guards,
            "docs_url": None,
            "redoc_url": None,
            "openapi_url": None,
        },
    )
    return page


def usable_port(port: str | None) -> int:
    """The port to listen on: the one that is given or, if none is, the usual one, or any free one
    where that is taken.

    Raises:
        UserError: the given port is no port, or cannot be listened on.
    """
    if port is not None and not _is_port(port):
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


def _is_port(text: str) -> bool:
    """Whether a text is the number of a port."""
    if not text.isascii() or not text.isdigit():
        return False
    # Six digits are enough to see that a number is too large; `int` refuses a text of thousands.
    return 0 < int(text[:6]) < 65_536


async def _own_pages_only(
    request: Request, answer: Callable[[Request], Awaitable[Response]]
) -> Response:
    """Refuse what a page of another origin sends; to every other answer, add the policy by which
    browsers contact no other host.

    Args:
        answer: passes the request on to the page.
    """
    from starlette.responses import PlainTextResponse

    site = request.headers.get("sec-fetch-site", "none")
    if request.method == "POST" and site not in OWN_SITES:
        return PlainTextResponse("sent by a page of another origin", status_code=403)
    response = await answer(request)
    response.headers["content-security-policy"] = POLICY
    return response
