"""Execute notebooks in sequence; then answer the four questions about the runs, and say where the
pages are.

    tools/demo.py
    tools/demo.py 01_prepare_dataset 02_train_single_pod

Runs go to `runs/demo`, unless ZEROPODS_RUNS names another folder; executed copies, as notebooks and
as HTML, to `build/notebooks`. What an earlier call has finished is used again. With
ZEROPODS_MODELS=t5-small,t5-large all notebooks but the summary are executed for each model, with
copies in a folder named after it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import textwrap
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import nbformat
from jupyter_core.utils import ensure_async
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from nbconvert import HTMLExporter

from zeropods.errors import UserError, guarded
from zeropods.files import write_text
from zeropods.workshop import ROOT, Workshop

NOTEBOOKS = (
    "00_plan",
    "01_prepare_dataset",
    "02_train_single_pod",
    "03_train_pods",
    "04_read_profiler",
    "05_inference",
    "06_summary",
)
"""Notebooks that the demo runs, in this order."""
SUMMARY = NOTEBOOKS[-1]
FOLDER = ROOT / "notebooks"
RUNS = "runs/demo"
SAY_SECONDS = 8.0
"""Seconds between two lines about progress where there is no terminal, which would show progress
bars."""
COLUMNS = 80
"""Width in characters of what is printed at the end."""


def main() -> None:
    """Execute the notebooks; if the summary was among them, print what it concludes."""
    arguments = _arguments()
    os.environ.setdefault("ZEROPODS_RUNS", RUNS)
    workshops = Workshop().each

    for workshop in workshops:
        os.environ["ZEROPODS_MODEL"] = workshop.model
        out = arguments.out
        if len(workshops) > 1:
            out = out / Path(workshop.model).name
        for name in arguments.notebooks:
            if name != SUMMARY:
                _execute(name, out)

    if SUMMARY in arguments.notebooks:
        _execute(SUMMARY, arguments.out)
        _conclude(workshops[0], arguments.out)


def _arguments() -> argparse.Namespace:
    known = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    description = "Execute notebooks in sequence."
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument("notebooks", nargs="*", metavar="NOTEBOOK", help=", ".join(known))
    usual_out = ROOT / "build" / "notebooks"
    parser.add_argument("--out", type=Path, default=usual_out, help="executed copies")
    arguments = parser.parse_args()
    if not arguments.notebooks:
        arguments.notebooks = list(NOTEBOOKS)
    for name in arguments.notebooks:
        if name not in known:
            parser.error(f"notebook {name!r}; expected {', '.join(known)}")
    return arguments


# The execution of a notebook, with its progress.


class _InterruptError(Exception):
    """Ctrl-C came between two cells."""


class _Live(NotebookClient):
    """An execution that shows its progress, and that Ctrl-C ends as it ends a cell."""

    interrupted = False
    name = ""
    cell = 0
    last_words = ""
    """The last line of a progress bar, or of whatever else a cell has written to stderr."""
    saying: asyncio.Task[None] | None = None

    def output(
        self,
        outs: list[Any],
        msg: dict[str, Any],
        display_id: str | None,
        cell_index: int,
    ) -> Any:
        content = msg["content"]
        if msg["msg_type"] == "stream" and content["name"] == "stderr":
            lines = content["text"].strip().splitlines()
            if lines:
                self.last_words = lines[-1]
            if sys.stderr.isatty():
                print(content["text"], end="", file=sys.stderr, flush=True)
        return super().output(outs, msg, display_id, cell_index)

    async def take_interrupts(self, **_: Any) -> None:
        """Make Ctrl-C interrupt the kernel from now on; nbclient's own handler would kill it."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, lambda: loop.create_task(self._interrupt()))
        if not sys.stderr.isatty():
            self.saying = loop.create_task(self._say())

    def begin_cell(self, cell_index: int, **_: Any) -> None:
        """Begin no further cell after Ctrl-C."""
        if self.interrupted:
            raise _InterruptError
        self.cell = cell_index + 1
        self.last_words = ""

    async def _say(self) -> None:
        """Print how far the work has come, until the notebook ends."""
        began = time.monotonic()
        while True:
            await asyncio.sleep(SAY_SECONDS)
            seconds = time.monotonic() - began
            line = f"{self.name}: {seconds:.0f} s, cell {self.cell} of {len(self.nb.cells)}"
            if self.last_words:
                line += f": {self.last_words}"
            print(line, flush=True)

    async def _interrupt(self) -> None:
        self.interrupted = True
        if self.km is not None:
            await ensure_async(self.km.interrupt_kernel())

    async def _async_cleanup_kernel(self) -> None:
        if self.saying is not None:
            self.saying.cancel()
        # nbclient calls this a second time after a signal, and would fail.
        if self.km is not None:
            await super()._async_cleanup_kernel()


def _execute(name: str, out: Path) -> None:
    """Execute one notebook on a kernel of its own, and keep the copy whether or not it failed."""
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    print(f"{name} ...", flush=True)
    began = time.monotonic()
    client = _client(notebook)
    client.name = name
    try:
        client.execute()
    except (_InterruptError, asyncio.CancelledError):
        raise KeyboardInterrupt from None
    except CellExecutionError as error:
        if client.interrupted:
            raise KeyboardInterrupt from None
        raise UserError(f"{name}: {_reason(error)}; see {_shown(out / name)}.html") from None
    except DeadKernelError:
        fault = "its kernel died, perhaps for want of memory"
        raise UserError(f"{name}: {fault}; try a smaller job") from None
    finally:
        _keep(notebook, out / name)
    seconds = time.monotonic() - began
    print(f"{name}: {seconds:.0f} s, {_shown(out / name)}.html", flush=True)


def _client(notebook: nbformat.NotebookNode) -> _Live:
    """The client that executes a notebook on a kernel of its own, from the notebooks' folder."""
    client = _Live(
        notebook,
        # A cell may train for as long as it takes.
        timeout=None,
        kernel_name="python3",
        extra_arguments=["--log-level=ERROR"],
        coalesce_streams=True,
        resources={"metadata": {"path": str(FOLDER)}},
    )
    # nbclient calls these two where they are set.
    client.on_notebook_start = client.take_interrupts
    client.on_cell_start = client.begin_cell
    return client


def _reason(error: CellExecutionError) -> str:
    """The error in one line; the traceback of any error but a user's goes to stderr first."""
    if error.ename != UserError.__name__:
        print(error.traceback, file=sys.stderr)
    return f"{error.ename}: {error.evalue}"


def _keep(notebook: nbformat.NotebookNode, path: Path) -> None:
    """Write a copy of a notebook as it is and as a page, which need nothing from the network."""
    write_text(path.with_suffix(".ipynb"), nbformat.writes(notebook))
    exporter = HTMLExporter(mathjax_url="", require_js_url="")
    page, _resources = exporter.from_notebook_node(notebook)
    write_text(path.with_suffix(".html"), page)


# What is said at the end.


def _conclude(workshop: Workshop, copies: Path) -> None:
    """Print the answers, the first table as far as it fits the width, and where the pages are."""
    # Only now: the notebooks have kernels of their own.
    from zeropods.report.summary import read_runs

    summary = read_runs([workshop.area])
    results = replace(summary.tables[0], title="")
    # A table that is wider goes on below an empty line; the report has all of it.
    first_columns = results.to_text(COLUMNS).split("\n\n")[0].rstrip()
    pages = {
        "report": _shown(workshop.summary_folder / "index.html"),
        "notebooks": _shown(copies / "*.html"),
    }
    parts = [
        _answers_text(summary.answers().by_question),
        first_columns,
        _two_columns("pages, to open in a browser:", pages),
        _next_steps(),
    ]
    print("\n" + "\n\n".join(parts))


def _answers_text(answers: Mapping[str, str]) -> str:
    """Each question with its answer below it, in lines of at most `COLUMNS` characters."""
    lines = []
    for question, answer in answers.items():
        lines.append(question)
        for paragraph in answer.splitlines():
            lines += textwrap.wrap(
                paragraph,
                COLUMNS,
                initial_indent="  ",
                subsequent_indent="  ",
                break_long_words=False,
                break_on_hyphens=False,
            )
    return "\n".join(lines)


def _next_steps() -> str:
    """What a newcomer may do next with the runs, each with its command."""
    runs = os.environ["ZEROPODS_RUNS"]
    ask = "make ask"
    if runs != RUNS:
        ask = f"make ask RUN={runs}"
    steps = {
        ask: "ask the trained model a question, in a browser",
        "make lab": "open the same notebooks in JupyterLab",
        "make gallery": "make pages of the executed notebooks",
    }
    return _two_columns("next:", steps)


def _two_columns(heading: str, facts: Mapping[str, str]) -> str:
    """Names and what belongs to each, below a heading."""
    width = max(len(name) for name in facts)
    lines = [heading]
    for name, fact in facts.items():
        lines.append(f"  {name:{width}}  {fact}")
    return "\n".join(lines)


def _shown(path: Path) -> str:
    """A path as a user at the project's root would write it."""
    if path.is_relative_to(ROOT):
        return os.path.relpath(path, ROOT)
    return str(path)


if __name__ == "__main__":
    sys.exit(guarded(main))
