"""Put the measured figures of results/ into README.md, between its markers.

tools/readme.py            # after `make bench` or a new results/demo
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from zeropods.atomic import write_text
from zeropods.errors import UserError, guarded

ROOT = Path(__file__).resolve().parents[1]
SHOWN = ("Results", "Accuracy", "Speed", "Memory")
"""Sections of the demo's summary that the README shows."""


def filled(readme: str) -> str:
    """The text with both blocks as results/ has them."""
    blocks = {"demo": _demo(), "bench": _bench()}
    for name, block in blocks.items():
        readme, found = re.subn(
            rf"(<!-- {name}: [^>]* -->\n).*?(<!-- /{name} -->)",
            lambda match, block=block: f"{match[1]}{block}{match[2]}",
            readme,
            flags=re.DOTALL,
        )
        if found != 1:
            raise UserError(f"README.md: {found} blocks <!-- {name}: ... -->; expected one")
    return readme


def _demo() -> str:
    """The demo's first tables, one heading level deeper."""
    text = (ROOT / "results" / "demo" / "summary.md").read_text(encoding="utf-8")
    sections = {part.split("\n", 1)[0]: part for part in re.split(r"^## ", text, flags=re.MULTILINE)}
    missing = [title for title in SHOWN if title not in sections]
    if missing:
        raise UserError(f"results/demo/summary.md: no section {missing[0]!r}; make it with `make demo` and copy it")
    return "".join(f"### {sections[title].strip()}\n\n" for title in SHOWN)


def _bench() -> str:
    document = json.loads((ROOT / "results" / "bench.json").read_text(encoding="utf-8"))
    figures = [figure for group in document.values() for figure in group["figures"]]
    rows = "".join(f"| {f['name']} | {_value(f)} | {f['asked']} |\n" for f in figures)
    return f"\n| measured | value | asked for |\n|---|---|---|\n{rows}\n"


def _value(figure: dict[str, object]) -> str:
    if figure["value"] is None:
        return f"not measured: {figure['note']}"
    span = "" if figure["interval"] is None else " [{:.3g}, {:.3g}]".format(*figure["interval"])
    return f"{figure['value']:.3g} {figure['unit']}".strip() + span


def main() -> None:
    """Rewrite README.md in place."""
    path = ROOT / "README.md"
    write_text(path, filled(path.read_text(encoding="utf-8")))


if __name__ == "__main__":
    sys.exit(guarded(main))
