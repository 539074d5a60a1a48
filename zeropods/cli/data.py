"""`zeropods data` and `zeropods prepare`: raw data sets, and what training reads."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zeropods.cli.progress import progress

Result = dict[str, Any]


def add_verbs(verbs: Any, add: Callable[..., Any]) -> None:
    """The verbs and their flags; `add(verbs, name, help, run)` makes one."""
    kinds = verbs.add_parser("data", help="raw data sets").add_subparsers(required=True, metavar="WHAT")
    _data_get(kinds, add)
    _data_sample(kinds, add)
    _prepare(verbs, add)


def _data_get(verbs: Any, add: Callable[..., Any]) -> None:
    from zeropods.data.publishers import DATASETS

    verb = add(verbs, "get", "fetch a data set from its publisher, verify and unpack it", _run_data_get)
    verb.add_argument("name", choices=sorted(DATASETS))
    verb.add_argument("--out", type=Path, required=True)


def _run_data_get(arguments: argparse.Namespace) -> Result:
    from zeropods.data.download import get

    return _plain(get(arguments.name, arguments.out))


def _data_sample(verbs: Any, add: Callable[..., Any]) -> None:
    verb = add(verbs, "sample", "write the embedded data set, in WikiSQL's layout", _run_data_sample)
    verb.add_argument("--out", type=Path, required=True)
    verb.add_argument("--seed", type=int, default=0)


def _run_data_sample(arguments: argparse.Namespace) -> Result:
    from zeropods.data.sample import write_sample

    return _plain(write_sample(arguments.out, arguments.seed))


def _prepare(verbs: Any, add: Callable[..., Any]) -> None:
    verb = add(verbs, "prepare", "make a tokenized set with its tokenizer and manifest", _run_prepare)
    verb.add_argument("--task", choices=["text2sql"], default="text2sql")
    verb.add_argument("--data", type=Path, required=True, help="folder with train.jsonl, train.tables.jsonl ...")
    verb.add_argument(
        "--tokenizer", required=True, help="hub id, folder, spiece.model, or t5-tiny: trained on the data"
    )
    verb.add_argument("--prompt", choices=["question", "schema"], default="schema")
    verb.add_argument("--limit", type=int, help="only the first N examples of each split")
    verb.add_argument("--max-source-tokens", type=int, help="cut sources there; question 96, schema 256")
    verb.add_argument("--plain-vocabulary", action="store_true", help="do not add T5's missing characters")
    verb.add_argument("--out", type=Path, required=True)


def _run_prepare(arguments: argparse.Namespace) -> Result:
    from zeropods.data.prepare import Preparation, prepare

    wanted = Preparation(
        data=arguments.data,
        tokenizer=arguments.tokenizer,
        prompt=arguments.prompt,
        limit=arguments.limit,
        complete_vocabulary=not arguments.plain_vocabulary,
        max_source_tokens=arguments.max_source_tokens,
    )
    with progress("prepare", "rows") as tick:
        manifest, made = prepare(wanted, arguments.out, tick)
    return {"out": str(arguments.out), "made": made, **manifest.to_json()}


def _plain(value: Any) -> Result:
    """A dataclass of plain values as a dictionary."""
    from dataclasses import asdict

    return json.loads(json.dumps(asdict(value), default=str))
