"""`make lab`: notebooks 00 to 06 as a person runs them, in a browser; then again without one, as `make demo` does."""

import json
import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbstripout import strip_output
from playwright.sync_api import Browser, Page

from tests.browser.notebook import (
    KERNEL_SECONDS,
    RUN_SECONDS,
    Seen,
    await_end,
    close,
    is_done,
    lab,
    menu,
    open_lab,
    open_notebook,
    restart_and_run_all,
    run_all,
)
from tests.full.clusters import processes_naming, processes_of
from tests.full.demo_page import ROOT
from tests.full.executed_demo import executed, outputs, train_states
from tests.full.launches import until
from tests.noise import noise
from zeropods.data.prepare import prepare
from zeropods.measure.record import read_record
from zeropods.report.formulas import figures
from zeropods.workshop import Workshop

SMALL = {
    "ZEROPODS_STEPS": "4", "ZEROPODS_LIMIT": "96", "ZEROPODS_QUESTIONS": "12", "ZEROPODS_REPEATS": "1",
    "ZEROPODS_PODS": "2", "ZEROPODS_STATES_MODEL": "t5-tiny",
}  # fmt: skip
pytestmark = pytest.mark.timeout(4 * RUN_SECONDS)

NOTEBOOKS = {
    "00_plan": ({"largest batch (rows)", "published (GiB)", "formula"}, 2),
    "01_prepare_dataset": ({"query", "truncated rows", "times", "parameters"}, 1),
    "02_train_single_pod": ({"value"}, 1),
    "03_train_pods": ({"address", "value", "began (UTC)", "states (MiB)", "speed-up"}, 2),
    "04_read_profiler": ({"value"}, 3),
    "05_inference": ({"question", "execution", "p"}, 0),
    "06_summary": ({"duration (s)", "throughput (samples/s)", "executable"}, 7),
}
"""What each shows: some headings of its tables, and how many plots."""
BAR = re.compile(r"\w+: +(\d+%\||\d+ \w+ \[)")
"""The line of a progress bar, with and without a total."""
MODELS = ("t5-tiny", "t5-large-tiny")
"""The one that was trained, and one beside it."""
PODS = "two_of_them"
CELL = "from zeropods import pods\ncluster = pods.up(2, name='menu')"


@dataclass(frozen=True)
class Sequence:
    """The sequence, run in the browser."""

    folder: Path
    seen: dict[str, Seen]
    again: Seen
    """The first notebook, run once more on a fresh kernel."""
    greetings: int
    """Dialogs and notices on the page that was opened first."""
    kernel: list[str]
    """The command line of the first kernel."""
    changed: list[str]
    """Notebooks whose files were changed by opening them."""
    server: tuple[int, str]
    """Exit status of the server after Ctrl-C, and what it had said."""
    requests: set[str]
    """Hosts that the page asked for anything."""
    summary: dict[str, Any]
    """What it held when the last notebook had run."""

    @property
    def runs(self) -> Path:
        return self.folder / "runs"


@pytest.fixture(scope="module")
def browsed(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Sequence:
    """The notebooks opened and run one after the other, each closed with its kernel; pods of one that is shut down."""
    folder = tmp_path_factory.mktemp("lab")
    seen: dict[str, Seen] = {}
    requests: set[str] = set()
    changed, kernels = [], []
    with lab(folder, ZEROPODS_RUNS=str(folder / "runs"), **SMALL) as server:
        metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}}
        with_pods = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)], metadata=metadata)
        nbformat.write(with_pods, folder / "notebooks" / f"{PODS}.ipynb")
        page = chromium.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(KERNEL_SECONDS * 1000)
        page.on("request", lambda request: requests.add(request.url))
        open_lab(page, server.address)
        page.wait_for_timeout(1000)
        greetings = page.locator(".jp-Dialog, .Toastify__toast").count()
        for name in NOTEBOOKS:
            if name == "03_train_pods":
                train_states(folder, SMALL["ZEROPODS_STATES_MODEL"])
            file = folder / "notebooks" / f"{name}.ipynb"
            before = file.read_bytes()
            open_notebook(page, name)
            changed += [name] * (file.read_bytes() != before)
            kernels += [command for command in commands(folder) if "ipykernel_launcher" in command]
            seen[name] = run_all(page, file)
            if name == "00_plan":
                again = restart_and_run_all(page, file)
            close(page)
        summary = json.loads((folder / "runs" / "summary" / "summary.json").read_text())
        await_end_of_pods(page, folder)
        page.close()
        server.process.send_signal(signal.SIGINT)
        ended = server.process.wait(timeout=KERNEL_SECONDS), server.log.read_text()
        # A kernel may take a moment to see that its server has gone.
        until(lambda: not processes_of(folder / "home"))
    hosts = {url.split("/")[2] for url in requests if url.startswith(("http", "ws"))}
    return Sequence(folder, seen, again, greetings, kernels[0], changed, ended, hosts, summary)


def commands(folder: Path) -> list[list[str]]:
    """What runs for the clusters and kernels of the sequence."""
    found = (Path(f"/proc/{pid}/cmdline") for pid in processes_of(folder / "home"))
    return [path.read_text(errors="replace").split("\0") for path in found]


def await_end_of_pods(page: Page, folder: Path) -> None:
    """Start pods in a notebook, shut its kernel down from the menu, and wait until they have ended."""
    open_notebook(page, PODS)
    menu(page, "Run", "Run All Cells")
    await_end(page)
    assert sum("worker_p.py" in " ".join(command) for command in commands(folder)) >= 2
    menu(page, "Kernel", "Shut Down Kernel")
    until(lambda: not any("worker_p.py" in " ".join(command) for command in commands(folder)))


@pytest.fixture(scope="module")
def again(browsed: Sequence) -> str:
    """What `make demo` prints of two models where it finds those runs, of the notebooks that train and sum up."""
    other = Workshop(runs=browsed.runs, limit=int(SMALL["ZEROPODS_LIMIT"]), model=MODELS[1])
    prepare(other.preparation, other.prepared)
    return executed(browsed.folder, "02_train_single_pod", "06_summary", ZEROPODS_MODELS=",".join(MODELS), **SMALL)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_and_is_readable(browsed: Sequence, name: str) -> None:
    seen, (headings, plots) = browsed.seen[name], NOTEBOOKS[name]
    assert all(map(is_done, seen.prompts)) and not seen.errors
    assert headings <= {heading for table in seen.tables for heading in table}
    assert len(seen.plots) == plots and all(size > 0 for plot in seen.plots for size in plot)
    assert seen.cut == []
    assert noise(seen.outputs) == []
    assert seen.streams.count("\n") < 190 and "\x1b" not in seen.streams and "\r" not in seen.streams
    ours, theirs = (
        nbformat.read(folder / "notebooks" / f"{name}.ipynb", as_version=4) for folder in (ROOT, browsed.folder)
    )
    assert strip_output(theirs, keep_output=False, keep_count=False, keep_id=True).cells == ours.cells


def test_a_first_visit_meets_no_dialog_and_ctrl_c_ends_kernels_and_server(browsed: Sequence) -> None:
    assert browsed.greetings == 0 and browsed.changed == []
    assert browsed.kernel[0] == sys.executable
    prompts = browsed.again.prompts
    assert prompts == [f"[{number + 1}]:" for number in range(len(prompts))] and not browsed.again.errors
    status, said = browsed.server
    assert status == 0 and "Traceback" not in said


def test_bars_end_at_100_percent_commands_are_shown_and_the_page_asks_no_other_host(browsed: Sequence) -> None:
    lines = [line for seen in browsed.seen.values() for line in seen.streams.splitlines() if BAR.match(line)]
    assert lines and all(" 100%|" in line for line in lines), lines
    assert {host.partition(":")[0] for host in browsed.requests} == {"127.0.0.1"}
    alone, over_pods = (browsed.seen[name].streams for name in ("02_train_single_pod", "03_train_pods"))
    assert all("textsql_train.py \\\n    --save_steps 0" in said for said in (alone, over_pods))
    assert "--launcher pdsh" in over_pods


def test_the_test_split_is_scored_and_profiled_runs_lie_apart(browsed: Sequence) -> None:
    (score,) = browsed.runs.glob("*/score.test.json")
    assert json.loads(score.read_text())["examples"] == int(SMALL["ZEROPODS_QUESTIONS"])
    folders = sorted(browsed.folder.glob("runs-profiled/*-pods"))
    found = [(record.technique, record.pods, record.status) for record in map(read_record, folders)]
    assert sorted(found) == [("zero1", 2, "ok"), ("zero3_offload", 2, "ok")]
    assert all("Flops Profiler" in (folder / "profile.txt").read_text() for folder in folders)
    assert not list(browsed.runs.rglob("profile.txt"))


def test_techniques_that_are_compared_have_the_same_losses(browsed: Sequence) -> None:
    records = [read_record(folder) for folder in sorted(browsed.runs.glob("*-sweep-*/*/1"))]
    curves = [[entry.loss for entry in record.losses] for record in records]
    assert len(curves) == 4 and len(curves[0]) == int(SMALL["ZEROPODS_STEPS"])
    assert all(curve == pytest.approx(curves[0], rel=1e-3) for curve in curves)


def test_every_technique_has_its_ratio_its_memory_and_its_accuracy(browsed: Sequence) -> None:
    summary = browsed.summary
    compared = {(row["technique"], row["pods"]): row for row in summary["groups"] if row["base"] is not None}
    assert set(compared) == {("none", 1), ("ddp", 2), ("zero1", 2), ("zero3_offload", 2)}
    shown = ("speed_up", "pod_state_bytes", "pod_memory_bytes", "inference_result", "inference_result_interval")
    assert all(row[key] is not None for row in compared.values() for key in shown)
    assert all(row["examples"] == int(SMALL["ZEROPODS_QUESTIONS"]) for row in compared.values())
    assert len(summary["runs"]) == 5
    assert all(0.99 < run["measured_bytes"] / run["planned_bytes"] < 1.01 for run in summary["runs"])


def test_each_stage_of_zero_holds_as_many_bytes_as_arithmetic_says(browsed: Sequence) -> None:
    records = [read_record(folder) for folder in browsed.folder.glob("runs-states/*/*/1")]
    held = {record.technique: figures(record) for record in records}
    none, *divided = (held[name].measured_bytes for name in ("none", "zero1", "zero2", "zero3"))
    # Of a model as small as this ZeRO-3 holds more than ZeRO-2: its parameters stay whole beside their shares.
    assert max(divided) < none
    assert all(0.99 < one.measured_to_planned < 1.01 for one in held.values())


def test_a_second_call_trains_only_a_second_model_and_ends_with_one_summary_of_both(
    browsed: Sequence, again: str
) -> None:
    said = ["".join(out.get("text", "")) for out in outputs(browsed.folder, f"{MODELS[0]}/02_train_single_pod")]
    assert "this run is finished; nothing to do" in "".join(said)
    results = (browsed.runs / "summary" / "summary.md").read_text().split("## Results")[1].split("## Settings")[0]
    assert all(f"| {model} " in results for model in MODELS)
    answers, table, pages, _ = again[again.index("Does it fit?") :].split("\n\n")
    assert all(f"\n  {model}: " in answers for model in MODELS)
    assert "throughput" in table and all(len(line) <= 80 for line in f"{answers}\n{table}".splitlines())
    (report,) = re.findall(r"^  report +(\S+)", pages, re.MULTILINE)
    assert Path(report).is_file()
    copies = {str(page.relative_to(browsed.folder / "copies")) for page in browsed.folder.glob("copies/**/*.html")}
    assert copies == {"06_summary.html", *(f"{model}/02_train_single_pod.html" for model in MODELS)}


def test_no_pod_outlives_its_notebook(browsed: Sequence, again: str) -> None:
    assert not processes_naming(browsed.folder)
