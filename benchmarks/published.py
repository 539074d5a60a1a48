"""Hold the plan against runs that others published: each figure planned, and errors by class.

make bench-plan-published
python -m benchmarks.published FOLDER
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.data import ROOT, SHARED
from zeropods.cli import parser
from zeropods.errors import UserError, guarded
from zeropods.files import write_text
from zeropods.tables import GIB, Table, digits

RUNS = "runs.jsonl"
"""File with the published runs: the plan's flags, the technique, and what was published."""
MEMORY = "memory.csv"
"""File beside it with published peaks of memory, whose rows `MEMORY_FLAGS` describes."""
HERE = Path(__file__).parent
MEMORY_FLAGS = HERE / "published_memory.jsonl"
"""Lines of that file, counted from 1, with the plan's flags; and those that are left out, with the
reason. FSDP is planned as FSDP2."""
TENSORS = "max_memory_allocated"
SHOWN = "nvidia-smi"
PAGE = ROOT / "docs" / "plan.md"
BEGIN = "<!-- published: make bench-plan-published -->\n"
END = "<!-- /published -->"
MANY_TOKENS = 4_096
"""Tokens of a process's pass from which on its GPU is taken for busy."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One published figure beside what is planned for it."""

    run: str
    kind: str
    """The class of the figure, by which errors are summed up."""
    published: float | bool
    planned: float | bool | None
    """None where not even one row fits."""

    @property
    def error(self) -> float | None:
        """Planned / published - 1; None for a verdict, which is right or wrong."""
        if isinstance(self.published, bool):
            return None
        return (self.planned or 0) / self.published - 1

    @property
    def is_wrong(self) -> bool:
        """Whether this is a verdict, and the plan's is another one."""
        return isinstance(self.published, bool) and self.planned != self.published

    def line(self) -> dict[str, object]:
        """The figure as a line of the table."""
        if self.error is not None:
            error = f"{100 * self.error:+.0f} %"
        elif self.is_wrong:
            error = "WRONG"
        else:
            error = "right"
        return {
            "run": self.run,
            "figure": self.kind,
            "published": _text(self.published),
            "planned": _text(self.planned),
            "error": error,
        }


def _text(value: float | bool | None) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return digits(value)


def comparisons(folder: Path) -> list[Comparison]:
    """Every figure of the published runs in a folder, beside what `zeropods plan` says of it.

    Raises:
        UserError: the folder has no runs, or a line is none.
    """
    path = folder / RUNS
    if not path.is_file():
        raise UserError(f"{folder}: has no {RUNS}; name the folder with the published runs")
    compared = list[Comparison]()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            run = json.loads(line)
            compared += _figures(run, _planned(run, folder))
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path}: line {number}: {error!r}; expected a published run") from None
    if (folder / MEMORY).is_file():
        compared += _peaks(folder)
    return compared


def _peaks(folder: Path) -> Iterator[Comparison]:
    """The published peaks of memory that the plan can describe, each beside the planned one."""
    with (folder / MEMORY).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for line in MEMORY_FLAGS.read_text(encoding="utf-8").splitlines():
        run = json.loads(line)
        if "left_out" in run:
            continue
        # The first line of the file has the names of its columns.
        row = rows[run["row"] - 2]
        planned = _planned(run, folder)
        way = _way(planned["request"], run["technique"])
        if row["peak_kind"].startswith(TENSORS):
            kind = f"peak of tensors, {way} (GiB)"
            planned_bytes = planned["peak_allocated_bytes"]
        elif row["peak_kind"].startswith(SHOWN):
            kind = f"total by nvidia-smi, {way} (GiB)"
            planned_bytes = planned["bytes"]["total"]
        else:
            kind = f"total, kind not stated, {way} (GiB)"
            planned_bytes = planned["bytes"]["total"]
        gpus = f"{row['n_gpus']} x {row['gpu']}"
        rows_of_a_pass = f"{row['micro_batch']} x {row['seq_len']}"
        has_step = run.get("has_step", False)
        technique = row["technique"]
        if has_step:
            technique = f"{technique}, {row['precision']}"
        name = f"{row['model']}, {gpus}, {technique}, {rows_of_a_pass}"
        yield Comparison(
            run=name,
            kind=kind,
            published=float(row["peak_gib"]),
            planned=planned_bytes / GIB,
        )
        if has_step:
            yield Comparison(
                run=name,
                kind="step, an encoder-only model (s)",
                published=float(row["step_s"]),
                planned=planned["step_seconds"],
            )


def _way(request: dict[str, Any], technique: str) -> str:
    """How weights are trained, in a word or two."""
    ways = {"lora": "LoRA", "qlora": "QLoRA"}
    masters = {"fp32": "all weights", "bf16": "BF16 masters", "none": "pure BF16"}
    way = ways.get(request["adapter"], masters[request["masters"]])
    return f"{way} by FSDP" if technique == "fsdp2" else way


def left_out() -> Table:
    """Why rows of `memory.csv` are left out, and how many."""
    reasons = []
    for line in MEMORY_FLAGS.read_text(encoding="utf-8").splitlines():
        run = json.loads(line)
        if "left_out" in run:
            reasons.append({f"left out of {MEMORY}": run["left_out"], "rows": len(run["rows"])})
    return Table.of(reasons)


def _planned(run: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What `zeropods plan --json` says of a run: its request, and the plan of its technique."""
    words = []
    for word in run["argv"]:
        files = [path / word for path in (folder, HERE) if (path / word).is_file()]
        words.append(str(files[0]) if files else word)
    arguments = parser().parse_args(["plan", *words, "--technique", run["technique"], "--json"])
    document = arguments.run(arguments)
    (of_technique,) = document["techniques"]
    return {"request": document["request"], **of_technique}


def _figures(run: dict[str, Any], planned: dict[str, Any]) -> Iterator[Comparison]:
    """The figures that were published of a run, each with the planned one."""
    name = run["id"]
    if "peak_allocated_gib" in run:
        yield Comparison(
            run=name,
            kind="peak of tensors (GiB)",
            published=run["peak_allocated_gib"],
            planned=planned["peak_allocated_bytes"] / GIB,
        )
    if "total_gib" in run:
        yield Comparison(
            run=name,
            kind="total, kind not stated (GiB)",
            published=run["total_gib"],
            planned=planned["bytes"]["total"] / GIB,
        )
    if "largest_batch" in run:
        yield Comparison(
            run=name,
            kind="largest batch (rows)",
            published=run["largest_batch"],
            planned=planned["largest_batch_size"],
        )
    if "fits" in run:
        yield Comparison(run=name, kind="fits", published=run["fits"], planned=planned["fits"])
    if "step_s" in run:
        yield Comparison(
            run=name,
            kind=_kind_of_step(run, planned["request"]),
            published=run["step_s"],
            planned=planned["step_seconds"],
        )


def _kind_of_step(run: dict[str, Any], request: dict[str, Any]) -> str:
    """The class of a published step: weak, or by offload, or by the tokens of a pass."""
    if run["quality"].startswith("weak"):
        return "step, weakly known (s)"
    if run["technique"].endswith("_offload"):
        if request["gradient_accumulation"] > 1:
            return "step, offload with accumulation (s)"
        return "step, offload (s)"
    tokens = request.get("seq_length")
    if tokens is None:
        tokens = request["source_length"] + request["target_length"]
    if tokens * request["batch_size"] >= MANY_TOKENS:
        return "step, 4,096 tokens a pass or more (s)"
    return "step, fewer tokens a pass (s)"


def tables(compared: list[Comparison]) -> str:
    """Errors by class, and every figure, as Markdown."""
    by_kind: dict[str, list[Comparison]] = {}
    for comparison in compared:
        by_kind.setdefault(comparison.kind, []).append(comparison)
    classes = [_line_of_class(kind, members) for kind, members in sorted(by_kind.items())]
    every = [comparison.line() for comparison in compared]
    by_class = Table.of(classes).to_markdown()
    return f"\n{by_class}\n{Table.of(every).to_markdown()}\n{left_out().to_markdown()}\n"


def _line_of_class(kind: str, members: list[Comparison]) -> dict[str, object]:
    """A class as a line: its size, the median size of its errors, and their range."""
    errors = [member.error for member in members if member.error is not None]
    if errors:
        median = f"{100 * statistics.median(map(abs, errors)):.0f} %"
        spread = f"{100 * min(errors):+.0f} to {100 * max(errors):+.0f} %"
    else:
        wrong = sum(member.is_wrong for member in members)
        median = ""
        spread = f"{wrong} wrong"
    return {"class": kind, "figures": len(members), "median error": median, "range": spread}


def page_with(block: str) -> str:
    """The manual's page on the plan with these tables between its markers.

    Raises:
        UserError: the page has no such markers.
    """
    text = PAGE.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UserError(f"{PAGE}: lacks {BEGIN.strip()} or {END}; put both back")
    return f"{before}{begin}{block}{end}{after}"


def main() -> int:
    """Compare all runs, print the tables, put them into the manual; 1 where a verdict is wrong."""
    flags = argparse.ArgumentParser(prog="benchmarks.published", allow_abbrev=False)
    flags.add_argument(
        "folder",
        type=Path,
        nargs="?",
        default=SHARED / "published",
        help=f"with {RUNS} and configs/ (default: ZEROPODS_TEST_DATA/published)",
    )
    flags.add_argument("--print-only", action="store_true", help="leave the manual as it is")
    arguments = flags.parse_args()
    compared = comparisons(arguments.folder)
    block = tables(compared)
    print(block)
    if not arguments.print_only:
        write_text(PAGE, page_with(block))
    wrong = [comparison.run for comparison in compared if comparison.is_wrong]
    for run in wrong:
        print(f"wrong verdict: {run}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(guarded(main))
