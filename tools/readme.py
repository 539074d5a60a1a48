"""Put the measured figures of results/ into README.md and docs/benchmarks.md, between their
markers.

tools/readme.py            # after `make bench` or a new results/demo
"""

from __future__ import annotations

import html
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from zeropods.errors import UserError, guarded
from zeropods.files import write_text
from zeropods.tables import Table

ROOT = Path(__file__).resolve().parents[1]
SECTION = "Results"
"""Section of the demo's summary that the README shows."""
COLUMNS = (
    "row",
    "throughput (samples/s)",
    "speed-up",
    "states of each pod (MiB)",
    "inference result",
    "duration (s)",
)
"""Columns of that section in the README, few enough to fit a page; `results/demo/summary.md` has
all of them."""
PROCESSORS = ("EPYC", "Xeon")
"""Processors that have a short name."""
SHORT_REVISION = 7
"""Characters of a revision that are shown."""


def pages() -> dict[Path, str]:
    """The text of each page that shows measured figures, with those that are in results/ now."""
    readme = ROOT / "README.md"
    benchmarks = ROOT / "docs" / "benchmarks.md"
    demo_block = _demo()
    bench_block = _bench()
    return {
        readme: filled(readme, "demo", demo_block),
        benchmarks: filled(benchmarks, "bench", bench_block),
    }


def filled(path: Path, name: str, block: str) -> str:
    """The text of a page with a new block between its markers."""
    markers = rf"(<!-- {name}: [^>]* -->\n|<!-- /{name} -->)"
    parts = re.split(markers, path.read_text(encoding="utf-8"))
    if len(parts) != 5:
        raise UserError(
            f"{path.name}: {len(parts) // 2} markers of {name!r}; "
            f"expected <!-- {name}: FILE --> and its end"
        )
    before, opening, _, closing, after = parts
    return "".join((before, opening, block, closing, after))


def _demo() -> str:
    """The demo's answers, and its table of results, narrowed to fit a page."""
    path = ROOT / "results" / "demo" / "summary.md"
    answers, *sections = re.split(r"^## ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    results = [section for section in sections if section.startswith(f"{SECTION}\n")]
    if not results:
        raise UserError(f"{path}: no section {SECTION!r}; make it with `make demo` and copy it")
    table = narrowed(results[0], COLUMNS)
    block = f"\n{table}\n"
    if answers.strip():
        block = f"\n{answers.strip()}\n{block}"
    return block


def narrowed(section: str, columns: tuple[str, ...]) -> str:
    """The Markdown table of a section with only the given columns, in their order."""
    rows = []
    for line in section.splitlines():
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
    header: list[str] = []
    if rows:
        header = rows[0]
    missing = [column for column in columns if column not in header]
    if missing:
        raise UserError(
            f"results/demo/summary.md: no column {missing[0]!r}; see COLUMNS in tools/readme.py"
        )
    positions = [header.index(column) for column in columns]
    cells = []
    for row in rows:
        is_rule = set("".join(row)) == {"-"}
        if not is_rule:
            cells.append(tuple(html.unescape(row[position]) for position in positions))
    return Table(cells[0], tuple(cells[1:])).to_markdown()


def _bench() -> str:
    """The measured figures as two tables: ratios, which other machines show too, and figures of
    this machine alone."""
    path = ROOT / "results" / "bench.json"
    groups = json.loads(path.read_text(encoding="utf-8")).values()
    ratios = []
    absolute = []
    for group in groups:
        place = _place(group)
        for figure in group["figures"]:
            line = f"| {figure['name']} | {_value(figure)} | {figure['asked']} | {place} |\n"
            if is_ratio(figure):
                ratios.append(line)
            else:
                absolute.append(line)
    return _table("ratio or share", ratios) + _table("absolute", absolute) + "\n"


def _table(kind: str, lines: Iterable[str]) -> str:
    head = f"\n| {kind} | value | asked for | on |\n|---|---|---|---|\n"
    return head + "".join(lines)


def is_ratio(figure: dict[str, Any]) -> bool:
    """Whether a figure has no unit of its own."""
    return figure["unit"] in ("x", "") or figure["unit"].startswith("%")


def _place(group: dict[str, Any]) -> str:
    """Processor and revision; `+` where files had been changed since."""
    processor = group["hardware"]["cpu"]
    for name in PROCESSORS:
        if name in processor:
            processor = name
            break
    revision, _, changes = group["git_revision"].partition("-")
    mark = "+" if changes else ""
    return f"{processor}:{revision[:SHORT_REVISION]}{mark}"


def _value(figure: dict[str, Any]) -> str:
    if figure["value"] is None:
        return f"not measured: {figure['note']}"
    value = f"{figure['value']:.3g} {figure['unit']}".strip()
    if figure["interval"] is None:
        return value
    low, high = figure["interval"]
    return f"{value} [{low:.3g}, {high:.3g}]"


def main() -> None:
    """Rewrite the pages in place."""
    for path, text in pages().items():
        write_text(path, text)


if __name__ == "__main__":
    sys.exit(guarded(main))
