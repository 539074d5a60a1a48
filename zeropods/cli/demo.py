"""`zeropods demo`: a page that asks trained models."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Result = dict[str, Any]


def add_verbs(verbs: Any, add: Callable[..., Any]) -> None:
    """The verb and its flags; `add(verbs, name, help, run)` makes it."""
    verb = add(verbs, "demo", "a page in the browser that asks trained text-to-SQL models, until Ctrl-C", run)
    verb.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run or model folder, or a folder that holds runs"
    )
    verb.add_argument(
        "--data", type=Path, metavar="DIR", help="tables and questions, in WikiSQL's layout; as trained if not given"
    )
    verb.add_argument("--port", help="on 127.0.0.1; 7860 if not given, another one where that is taken")


def run(arguments: argparse.Namespace) -> Result:
    """Serve the page."""
    from zeropods.demo.serving import serve
    from zeropods.train.signals import terminable

    with contextlib.suppress(KeyboardInterrupt), terminable():
        serve(arguments.runs, arguments.data, arguments.port, _announce)
    return {"runs": [str(folder) for folder in arguments.runs], "ended": "on request"}


def _announce(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
