"""`zeropods data` and `zeropods prepare`: raw data sets, and the tokenized sets that training reads."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from zeropods.data.download import DATASETS, get
from zeropods.errors import UserError
from zeropods.files import given_path
from zeropods.outputs import out_folder
from zeropods.tables import counted, progress

if TYPE_CHECKING:
    from zeropods.cli import Result

TASKS = ("text2sql", "squad", "lm")
FLAG_TASKS = {
    "prompt": ("text2sql",),
    "max_source_tokens": ("text2sql",),
    "plain_vocabulary": ("text2sql",),
    "max_seq_length": ("squad", "lm"),
    "loss_on": ("squad", "lm"),
    "dataset_config": ("lm",),
    "text_field": ("lm",),
}
"""Flags of `prepare` that not every task has, and the tasks that have them."""


def add_verbs(verbs: Any, add: Callable[..., Any]) -> None:
    """Add the verbs and their flags; `add(verbs, name, help, run)` makes one verb."""
    kinds = verbs.add_parser("data", help="raw data sets").add_subparsers(required=True, metavar="WHAT")
    what = "fetch a data set from its publisher, verify and unpack it"
    flag = add(kinds, "get", what, lambda given: get(given.name, given.out)).add_argument
    flag("name", choices=sorted(DATASETS), help="which one")
    flag("--out", type=out_folder, required=True, metavar="DIR", help="the folder to make")

    flag = add(kinds, "sample", "write a small data set, generated from a seed", _run_data_sample).add_argument
    flag("--task", choices=TASKS, default=TASKS[0], help="WikiSQL's layout, SQuAD's, or WikiText's")
    flag("--out", type=out_folder, required=True, metavar="DIR", help="the folder to make")
    flag("--seed", type=int, default=0, metavar="N", help="a different seed gives different questions")

    what = "make a text-to-SQL data set from your own tables and questions"
    flag = add(kinds, "from-csv", what, _run_data_from_csv).add_argument
    flag("--tables", type=given_path, required=True, metavar="DIR", help="a CSV file for each table")
    flag("--questions", type=given_path, required=True, metavar="FILE", help="CSV with the columns question, sql")
    flag("--out", type=out_folder, required=True, metavar="DIR", help="the data set to make")
    for verb in kinds.choices.values():
        verb.set_defaults(readable=made_text)

    verb = add(verbs, "prepare", "make a tokenized set with its tokenizer and manifest", _run_prepare)
    verb.set_defaults(readable=readable_prepare)
    flag = verb.add_argument
    flag("--task", choices=TASKS, default=TASKS[0], help="queries, answers, or plain text")
    flag("--data", type=given_path, required=True, metavar="DATA", help="folder as made by data get; lm: or a hub id")
    flag("--tokenizer", required=True, metavar="NAME", help="hub id, folder, spiece.model, t5-tiny, gpt-tiny")
    flag("--limit", type=int, metavar="N", help="only the first N rows of each split (default: all)")
    flag("--out", type=out_folder, required=True, metavar="DIR", help="the set to make")
    # Flags of some tasks only: they are None if not given.
    flag("--prompt", choices=["question", "schema"], help="text2sql: the model's input (default: schema)")
    flag("--max-source-tokens", type=int, metavar="N", help="text2sql: cut longer rows (default: by prompt)")
    flag("--plain-vocabulary", action="store_true", default=None, help="text2sql: only T5's own characters")
    flag("--max-seq-length", type=int, metavar="N", help="per row (squad) or block (lm) (default: 512)")
    flag("--loss-on", choices=["answer", "all"], help="squad: what carries the loss (default: answer)")
    flag("--dataset-config", metavar="NAME", help="lm: such as en for allenai/c4 (default: none)")
    flag("--text-field", metavar="NAME", help="lm: field with the text (default: text)")


def _run_data_sample(arguments: argparse.Namespace) -> Result:
    from zeropods.data.sample import write_sample

    return write_sample(arguments.out, arguments.seed, arguments.task)


def _run_data_from_csv(arguments: argparse.Namespace) -> Result:
    from zeropods.data.own_data import from_csv

    made = from_csv(arguments.tables, arguments.questions, arguments.out)
    for line in [*(f"left out: {line}" for line in made["left_out"]), *made["remarks"]]:
        print(line, file=sys.stderr)
    return made


def made_text(result: Result) -> str:
    """The folder that was made, the counts of what it holds, and the numbers of questions left out and of remarks."""
    is_new = result.get("written", True) and not result.get("already_there")
    said = [f"{result.get('out') or result['folder']}: {'written' if is_new else 'was there already'}"]
    for name, counts in ((name, each) for name, each in result.items() if isinstance(each, dict)):
        said.append(f"{name.replace('_', ' ')}: {', '.join(f'{of} {number:,}' for of, number in counts.items())}")
    lists = (("left_out", "question", "left out"), ("remarks", "remark", "above"))
    said += [f"{counted(len(result[key]), word)} {what}" for key, word, what in lists if result.get(key)]
    return "; ".join(said)


def _run_prepare(arguments: argparse.Namespace) -> Result:
    from zeropods.data.prepare import Preparation, prepare

    given = {name: value for name in FLAG_TASKS if (value := getattr(arguments, name)) is not None}
    for name, value in given.items():
        if arguments.task not in FLAG_TASKS[name]:
            flag, tasks = f"--{name.replace('_', '-')}", " and ".join(FLAG_TASKS[name])
            raise UserError(f"{flag} {value}: a flag of task {tasks}, not of {arguments.task}; leave it out")
    given["complete_vocabulary"] = not given.pop("plain_vocabulary", False)
    for name in ("task", "data", "tokenizer", "limit"):
        given[name] = getattr(arguments, name)
    wanted = Preparation(**given)
    with progress("prepare", "documents" if arguments.task == "lm" else "rows") as bar:
        manifest, made = prepare(wanted, arguments.out, bar.update, replaces=False)
    return {"out": str(arguments.out), "made": made, **asdict(manifest)}


def readable_prepare(result: Result) -> str:
    """What was made, then a line for each split with its sizes and with what was cut or cannot be read."""
    done = "prepared" if result["made"] else "was prepared before, with the same data and settings; nothing was done"
    prompt = "" if result["prompt"] == result["task"] else f", prompt {result['prompt']}"
    lines = [
        f"{result['out']}: {done}; task {result['task']}{prompt}, "
        f"tokenizer {result['tokenizer']} of {result['vocabulary_size']:,} tokens"
    ]
    for name, split in result["splits"].items():
        said = [f"{name}: {counted(split['rows'], 'row')}"]
        for side in ("source", "target")[: 2 if result["task"] == "text2sql" else 1]:
            found, cut = split[side], split[side]["truncated_rows"]
            said.append(f"{side} {found['mean']:.1f} tokens on average, {found['max']:,} at most")
            said += [f"{cut:,} were cut"] if cut else []
        lost = {
            "with unknown characters": split["source"]["rows_with_unknown"],
            "whose query the tokenizer cannot write, so that no model learns it": split["targets_lost"],
        }
        said += [f"{counted(number, 'row')} {what}" for what, number in lost.items() if number]
        if split["targets_unreadable"]:
            rows = counted(split["targets_unreadable"], "row")
            said.append(
                f"{rows} whose query cannot be read back from its text, so that no answer is right; correct or remove "
                f"them, the first is {split['first_unreadable']}"
            )
        lines.append("; ".join(said))
    return "\n".join(lines)
