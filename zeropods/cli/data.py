"""`zeropods data` and `zeropods prepare`: raw data sets, and the tokenized sets that training
reads."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from zeropods.data.download import DATASETS, get
from zeropods.errors import UserError
from zeropods.files import given_path
from zeropods.outputs import out_folder
from zeropods.tables import counted, progress
from zeropods.tasks import TASKS, TEXT2SQL, task_or_unknown

if TYPE_CHECKING:
    from zeropods.cli import Result


def add_verbs(verbs: Any, add: Callable[..., Any]) -> None:
    """Add the verbs and their flags; `add(verbs, name, help, run)` makes one verb."""
    _add_data_verbs(verbs, add)
    _add_prepare(verbs, add)


def _add_data_verbs(verbs: Any, add: Callable[..., Any]) -> None:
    parser = verbs.add_parser("data", help="raw data sets")
    kinds = parser.add_subparsers(required=True, metavar="WHAT")

    get_help = "fetch a data set from its publisher, verify and unpack it"
    flag = add(kinds, "get", get_help, _run_data_get).add_argument
    flag("name", choices=sorted(DATASETS), help="which one")
    flag("--out", type=out_folder, required=True, metavar="DIR", help="the folder to make")

    sample_help = "write a small data set, generated from a seed"
    flag = add(kinds, "sample", sample_help, _run_data_sample).add_argument
    task_help = "WikiSQL's layout, SQuAD's, or WikiText's"
    with_sample = [task.name for task in TASKS.values() if task.has_sample]
    flag("--task", choices=with_sample, default=TEXT2SQL, help=task_help)
    flag("--out", type=out_folder, required=True, metavar="DIR", help="the folder to make")
    seed_help = "a different seed gives different questions"
    flag("--seed", type=int, default=0, metavar="N", help=seed_help)

    csv_help = "make a text-to-SQL data set from your own tables and questions"
    flag = add(kinds, "from-csv", csv_help, _run_data_from_csv).add_argument
    tables_help = "a CSV file for each table"
    flag("--tables", type=given_path, required=True, metavar="DIR", help=tables_help)
    questions_help = "CSV with the columns question, sql"
    flag("--questions", type=given_path, required=True, metavar="FILE", help=questions_help)
    flag("--out", type=out_folder, required=True, metavar="DIR", help="the data set to make")

    for verb in kinds.choices.values():
        verb.set_defaults(readable=made_text)


def _add_prepare(verbs: Any, add: Callable[..., Any]) -> None:
    prepare_help = "make a tokenized set with its tokenizer and manifest"
    verb = add(verbs, "prepare", prepare_help, _run_prepare)
    verb.set_defaults(readable=readable_prepare)
    flag = verb.add_argument
    task_help = "queries, answers, or plain text"
    flag("--task", choices=list(TASKS), default=TEXT2SQL, help=task_help)
    data_help = "folder as made by data get; lm: or a hub id"
    flag("--data", type=given_path, required=True, metavar="DATA", help=data_help)
    tokenizer_help = "hub id, folder, t5-tiny, gpt-tiny, trained"
    flag("--tokenizer", required=True, metavar="NAME", help=tokenizer_help)
    limit_help = "only the first N rows of each split (default: all)"
    flag("--limit", type=int, metavar="N", help=limit_help)
    flag("--out", type=out_folder, required=True, metavar="DIR", help="the set to make")
    # Flags of some tasks only: they are None if not given.
    prompt_help = "text2sql: the model's input (default: schema)"
    flag("--prompt", choices=["question", "schema"], help=prompt_help)
    source_help = "text2sql: cut longer rows (default: by prompt)"
    flag("--max-source-tokens", type=int, metavar="N", help=source_help)
    copies_help = "text2sql: rows a question, N-1 varied (default: 1)"
    flag("--copies", type=int, metavar="N", help=copies_help)
    plain_help = "text2sql: only T5's own characters"
    flag("--plain-vocabulary", action="store_true", default=None, help=plain_help)
    length_help = "per row (squad) or block (lm) (default: 512)"
    flag("--max-seq-length", type=int, metavar="N", help=length_help)
    loss_help = "squad: what carries the loss (default: answer)"
    flag("--loss-on", choices=["answer", "all"], help=loss_help)
    config_help = "lm: such as en for allenai/c4 (default: none)"
    flag("--dataset-config", metavar="NAME", help=config_help)
    flag("--text-field", metavar="NAME", help="lm: field with the text (default: text)")


def _run_data_get(arguments: argparse.Namespace) -> Result:
    return get(arguments.name, arguments.out)


def _run_data_sample(arguments: argparse.Namespace) -> Result:
    from zeropods.data.sample import write_sample

    return write_sample(arguments.out, arguments.seed, arguments.task)


def _run_data_from_csv(arguments: argparse.Namespace) -> Result:
    from zeropods.data.own_data import from_csv

    made = from_csv(arguments.tables, arguments.questions, arguments.out)
    for question in made["left_out"]:
        print(f"left out: {question}", file=sys.stderr)
    for remark in made["remarks"]:
        print(remark, file=sys.stderr)
    return made


def made_text(result: Result) -> str:
    """The folder that was made, the counts of what it holds, and the numbers of questions left out
    and of remarks."""
    # Each verb has its own keys: `sample` says what was written, `get` what was there already, and
    # `from-csv` neither, since it always writes.
    is_new = result.get("written", True) and not result.get("already_there")
    folder = result.get("out") or result["folder"]
    facts = [f"{folder}: {'written' if is_new else 'was there already'}"]
    for name, counts in result.items():
        if isinstance(counts, dict):
            numbers = [f"{part} {number:,}" for part, number in counts.items()]
            facts.append(f"{name.replace('_', ' ')}: {', '.join(numbers)}")
    if result.get("left_out"):
        facts.append(f"{counted(len(result['left_out']), 'question')} left out")
    if result.get("remarks"):
        facts.append(f"{counted(len(result['remarks']), 'remark')} above")
    return "; ".join(facts)


def _run_prepare(arguments: argparse.Namespace) -> Result:
    from zeropods.data.prepare import Preparation, prepare

    task = TASKS[arguments.task]
    tasks_by_flag = _tasks_by_flag()
    settings = {}
    for name in tasks_by_flag:
        value = getattr(arguments, name)
        if value is not None:
            settings[name] = value
    for name, value in settings.items():
        if name not in task.preparation_flags:
            flag = f"--{name.replace('_', '-')}"
            tasks = " and ".join(tasks_by_flag[name])
            reason = f"a flag of task {tasks}, not of {arguments.task}"
            raise UserError(f"{flag} {value}: {reason}; leave it out")
    # A `Preparation` has a field with the opposite meaning of this flag.
    is_plain = settings.pop("plain_vocabulary", False)
    settings["complete_vocabulary"] = not is_plain
    for name in ("task", "data", "tokenizer", "limit"):
        settings[name] = getattr(arguments, name)
    preparation = Preparation(**settings)
    with progress("prepare", task.unit) as bar:
        manifest, made = prepare(preparation, arguments.out, bar.update, replaces=False)
    return {"out": str(arguments.out), "made": made, **asdict(manifest)}


def _tasks_by_flag() -> dict[str, list[str]]:
    """The flags of `prepare` that not every task has, each with the names of the tasks that have
    it."""
    names_of_tasks: dict[str, list[str]] = {}
    for task in TASKS.values():
        for flag in task.preparation_flags:
            names_of_tasks.setdefault(flag, []).append(task.name)
    return names_of_tasks


def readable_prepare(result: Result) -> str:
    """What was made, then a line for each split with its sizes and with what was cut or cannot be
    read."""
    outcome = "prepared"
    if not result["made"]:
        outcome = "was prepared before, with the same data and settings; nothing was done"
    prompt = ""
    if result["prompt"] != result["task"]:
        prompt = f", prompt {result['prompt']}"
    tokenizer = f"tokenizer {result['tokenizer']} of {result['vocabulary_size']:,} tokens"
    lines = [f"{result['out']}: {outcome}; task {result['task']}{prompt}, {tokenizer}"]
    for name, split in result["splits"].items():
        lines.append(f"{name}: {_split_text(split, result['task'])}")
    return "\n".join(lines)


def _split_text(split: Mapping[str, Any], task: str) -> str:
    """The sizes of a split, and what of it was cut, lost or cannot be read."""
    facts = [counted(split["rows"], "row")]
    sides = ["source"]
    if not task_or_unknown(task).is_one_text:
        sides.append("target")
    for side in sides:
        lengths = split[side]
        sizes = f"{lengths['mean']:.1f} tokens on average, {lengths['max']:,} at most"
        facts.append(f"{side} {sizes}")
        if lengths["truncated_rows"]:
            facts.append(f"{lengths['truncated_rows']:,} were cut")
    if split["source"]["rows_with_unknown"]:
        rows = counted(split["source"]["rows_with_unknown"], "row")
        facts.append(f"{rows} with unknown characters")
    if split["targets_lost"]:
        rows = counted(split["targets_lost"], "row")
        facts.append(f"{rows} whose query the tokenizer cannot write, so that no model learns it")
    if split["targets_unreadable"]:
        rows = counted(split["targets_unreadable"], "row")
        facts.append(
            f"{rows} whose query cannot be read back from its text, so that no answer is right; "
            f"correct or remove them, the first is {split['first_unreadable']}"
        )
    return "; ".join(facts)
