"""Measure the figures that the README states, print each beside what was asked for, and keep them
in results/.

make bench
python -m benchmarks training prediction
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from zeropods import files
from zeropods.errors import guarded
from zeropods.measure import environment
from zeropods.programs import wait_passively

NAMES = (
    "preparing",
    "training",
    "causal",
    "prediction",
    "embedded",
    "rendezvous",
    "agent",
    "launching",
    "planning",
    "profiling",
    "sampling",
    "summarizing",
    "demo",
)


def main() -> None:
    """Run the named benchmarks, or all of them if none is named."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__, allow_abbrev=False)
    # Without a name, argparse looks for the empty list among the choices.
    choices = [*NAMES, []]
    parser.add_argument("names", nargs="*", choices=choices, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--out", type=Path, default=Path("results/bench.json"))
    arguments = parser.parse_args()
    wait_passively()
    for name in arguments.names or NAMES:
        _keep(name, _measured(name), arguments.out)
    print(f"written to {arguments.out}")


def _keep(name: str, figures: list[dict[str, object]], out: Path) -> None:
    """Write a benchmark's result to the file in place of its earlier one; the results of the others
    stay."""
    document = {}
    if out.is_file():
        document = json.loads(out.read_text(encoding="utf-8"))
    document[name] = {
        "hardware": environment.hardware(),
        "versions": environment.versions(),
        "git_revision": environment.git_revision(Path(__file__).parent),
        "figures": figures,
    }
    # In the order of the names, without what is measured no longer.
    in_order = {known: document[known] for known in NAMES if known in document}
    files.write_json(out, in_order)


def _measured(name: str) -> list[dict[str, object]]:
    """The figures of a benchmark as plain values; they are printed too."""
    with tempfile.TemporaryDirectory(prefix="zeropods-bench-") as work:
        figures = importlib.import_module(f"benchmarks.{name}").measure(Path(work))
    for figure in figures:
        print(figure.line(), flush=True)
    return [asdict(figure) for figure in figures]


if __name__ == "__main__":
    sys.exit(guarded(main))
