"""Put the measured figures of results/ into README.md and docs/benchmarks.md, between their markers.

tools/readme.py            # after `make bench` or a new results/demo
"""

from __future__ import annotations

import html
import json
import re
import sys
from pathlib import Path
from typing import Any

from zeropods.errors import UserError, guarded
from zeropods.files import write_text
from zeropods.tables import Table

ROOT = Path(__file__).resolve().parents[1]
SECTION = "Results"
"""Section of the demo's summary that the README shows."""
COLUMNS = ("row", "throughput (samples/s)", "speed-up", "states of each pod (MiB)", "inference result", "duration (s)")
"""Columns of that section in the README, few enough to fit a page; `results/demo/summary.md` has all of them."""


def pages() -> dict[Path, str]:
    """The text of each page that shows measured figures, with those that are in results/ now."""
    blocks = {ROOT / "README.md": ("demo", _demo()), ROOT / "docs" / "benchmarks.md": ("bench", _bench())}
    return {path: filled(path, name, block) for path, (name, block) in blocks.items()}


def filled(path: Path, name: str, block: str) -> str:
    """The text of a page with a new block between its markers."""
    parts = re.split(rf"(<!-- {name}: [^>]* -->\n|<!-- /{name} -->)", path.read_text(encoding="utf-8"))
    if len(parts) != 5:
        raise UserError(
            f"{path.name}: {len(parts) // 2} markers of {name!r}; expected <!-- {name}: FILE --> and its end"
        )
    before, opening, _, closing, after = parts
    return "".join((before, opening, block, closing, after))


def _demo() -> str:
    """The demo's answers, and its table of results, narrowed to fit a page."""
    path = ROOT / "results" / "demo" / "summary.md"
    answers, *sections = re.split(r"^## ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    found = next((section for section in sections if section.startswith(f"{SECTION}\n")), None)
    if found is None:
        raise UserError(f"{path}: no section {SECTION!r}; make it with `make demo` and copy it")
    begin = f"\n{answers.strip()}\n" if answers.strip() else ""
    return f"{begin}\n{narrowed(found, COLUMNS)}\n"


def narrowed(section: str, columns: tuple[str, ...]) -> str:
    """The Markdown table of a section with only the given columns, in their order."""
    lines = [line for line in section.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    missing = [column for column in columns if not rows or column not in rows[0]]
    if missing:
        raise UserError(f"results/demo/summary.md: no column {missing[0]!r}; see COLUMNS in tools/readme.py")
    chosen = [[row[rows[0].index(column)] for column in columns] for row in rows if set("".join(row)) != {"-"}]
    header, *rest = (tuple(map(html.unescape, row)) for row in chosen)
    return Table(header, tuple(rest)).to_markdown()


def _bench() -> str:
    """The measured figures as two tables: ratios, which other machines show too, and figures of this machine alone."""
    document = json.loads((ROOT / "results" / "bench.json").read_text(encoding="utf-8"))
    found = [(figure, _place(group)) for group in document.values() for figure in group["figures"]]
    return (
        "".join(
            f"\n| {kind} | value | asked for | on |\n|---|---|---|---|\n"
            + "".join(
                f"| {f['name']} | {_value(f)} | {f['asked']} | {on} |\n" for f, on in found if is_ratio(f) == ratio
            )
            for kind, ratio in (("ratio or share", True), ("absolute", False))
        )
        + "\n"
    )


def is_ratio(figure: dict[str, Any]) -> bool:
    """Whether a figure has no unit of its own."""
    return figure["unit"] in ("x", "") or figure["unit"].startswith("%")


def _place(group: dict[str, Any]) -> str:
    """Processor and revision; `+` where files had been changed since."""
    processor = next(name for name in ("EPYC", "Xeon", group["hardware"]["cpu"]) if name in group["hardware"]["cpu"])
    revision, _, changed = group["git_revision"].partition("-")
    return f"{processor}:{revision[:7]}{'+' if changed else ''}"


def _value(figure: dict[str, Any]) -> str:
    if figure["value"] is None:
        return f"not measured: {figure['note']}"
    span = "" if figure["interval"] is None else " [{:.3g}, {:.3g}]".format(*figure["interval"])
    return f"{figure['value']:.3g} {figure['unit']}".strip() + span


def main() -> None:
    """Rewrite the pages in place."""
    for path, text in pages().items():
        write_text(path, text)


if __name__ == "__main__":
    sys.exit(guarded(main))
