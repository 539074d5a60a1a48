"""`zeropods export`: a run's weights as a model folder."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zeropods.cli.progress import progress
from zeropods.export import DTYPES

Result = dict[str, Any]


def add_verbs(verbs: Any, add: Callable[..., Any]) -> None:
    """The verb and its flags; `add(verbs, name, help, run)` makes it."""
    verb = add(verbs, "export", "a run's weights, whole, as a model folder: safetensors, checked", run)
    verb.add_argument("run_folder", type=Path, metavar="RUN", help="run folder")
    verb.add_argument("--out", type=Path, required=True, metavar="DIR", help="the model folder to make")
    verb.add_argument("--checkpoint", type=int, metavar="N", help="of this step; the last one if not given")
    verb.add_argument("--dtype", choices=DTYPES, default="float32")


def run(arguments: argparse.Namespace) -> Result:
    """Export."""
    from zeropods.export import export

    with progress("export", "tensors") as tick:
        done = export(
            arguments.run_folder, arguments.out,
            checkpoint=arguments.checkpoint, dtype=arguments.dtype, progress=tick,
        )  # fmt: skip
    return asdict(done)
