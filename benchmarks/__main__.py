"""Measure the figures that the README states, print them beside what was asked, keep them in results/.

make bench
python -m benchmarks training prediction
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from pathlib import Path

from zeropods import atomic
from zeropods.errors import guarded
from zeropods.measure import environment
from zeropods.threads import wait_passively

NAMES = ("preparing", "training", "prediction", "embedded")


def main() -> None:
    """Run the benchmarks that are named, all if none is."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__, allow_abbrev=False)
    parser.add_argument("names", nargs="*", choices=[*NAMES, []], metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--out", type=Path, default=Path("results/bench.json"))
    arguments = parser.parse_args()
    wait_passively()
    measured = {name: _measured(name) for name in arguments.names or NAMES}
    document = {
        "hardware": environment.hardware(),
        "versions": environment.versions(),
        "git_revision": environment.git_revision(Path(__file__).parent),
        "figures": measured,
    }
    atomic.write_json(arguments.out, document)
    print(f"written to {arguments.out}")


def _measured(name: str) -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory(prefix="zeropods-bench-") as work:
        figures = importlib.import_module(f"benchmarks.{name}").measure(Path(work))
    for figure in figures:
        print(figure.line(), flush=True)
    return [figure.to_json() for figure in figures]


if __name__ == "__main__":
    sys.exit(guarded(main))
