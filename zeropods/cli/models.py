"""The verbs of trained models: `zeropods predict`, `score`, `perplexity`, `export` and `demo`.

`score` reads a prediction file and loads no model; perplexity has no predictions to keep and needs
the model itself, its precision and a batch size, so it is a verb of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropods.data.manifest import SPLITS
from zeropods.errors import UserError
from zeropods.export import DTYPES
from zeropods.files import given_path, is_path, no_file
from zeropods.outputs import out_file, out_folder
from zeropods.tables import Table, counted, progress, whole
from zeropods.tasks import TASKS, answering_tasks, task_or_unknown, task_with_prompt

if TYPE_CHECKING:
    from zeropods.cli import Result


def add_verbs(verbs: Any, add: Callable[..., Any]) -> None:
    """Add the verbs and their flags; `add(verbs, name, help, run)` makes one verb."""
    _add_predict(verbs, add)
    _add_score(verbs, add)
    _add_perplexity(verbs, add)
    _add_export(verbs, add)
    _add_demo(verbs, add)


def _add_predict(verbs: Any, add: Callable[..., Any]) -> None:
    verb = add(verbs, "predict", "let a trained model answer a split", _predict)
    verb.set_defaults(readable=predict_text)
    flag = verb.add_argument
    flag("--model", type=given_path, required=True, help="run folder or model folder")
    out_help = "what to write (default: predictions.SPLIT.jsonl of the run)"
    flag("--out", type=out_file, metavar="FILE", help=out_help)
    flag("--score", action="store_true", help="score the answers too, into score.SPLIT.json")
    task_help = "for a model that records none (default: text2sql)"
    flag("--task", choices=[task.name for task in answering_tasks()], help=task_help)
    tokens_help = "per answer (default: 96 for queries, 32 for SQuAD)"
    flag("--max-new-tokens", type=whole, metavar="N", help=tokens_help)
    beams_help = "beams of a search; 1 is greedy"
    flag("--num-beams", type=whole, default=1, metavar="N", help=beams_help)
    prompt_help = "for a T5 that records none (default: its own)"
    flag("--prompt", choices=["question", "schema"], help=prompt_help)
    force_help = "use --prompt even if the T5 records another"
    flag("--force-prompt", action="store_true", default=None, help=force_help)
    unconstrained_help = "let a T5 write any text, not only queries"
    flag("--unconstrained", action="store_true", help=unconstrained_help)
    link_help = "let a T5 compare only with cells that the question quotes from the rows"
    flag("--link-cells", action="store_true", help=link_help)
    _split_flags(flag, "WikiSQL's layout, or SQuAD's (default: its own)", required=False)
    batch = "questions (default: 64 for queries, 16 for answers)"
    _model_flags(flag, batch=batch, limited="examples", usual_precision="auto")


def _add_score(verbs: Any, add: Callable[..., Any]) -> None:
    score_help = "score a prediction file; writes score.SPLIT.json beside it"
    verb = add(verbs, "score", score_help, _score)
    verb.set_defaults(readable=score_text)
    flag = verb.add_argument
    file_help = "from zeropods predict, or as WikiSQL's or LLMSQL's own evaluator reads it"
    flag("predictions", type=given_path, metavar="FILE", help=file_help)
    flag("--rouge", action="store_true", help="text2sql: ROUGE of the texts as well")
    metric_help = "a metric of your own, function(prediction, answers) -> float; repeatable"
    flag("--metric", action="append", default=[], metavar="MODULE:FUNCTION", help=metric_help)
    _split_flags(flag, "the data that the file was made from")


def _add_perplexity(verbs: Any, add: Callable[..., Any]) -> None:
    verb = add(verbs, "perplexity", "perplexity of a causal model on a text", _perplexity)
    verb.set_defaults(readable=score_text)
    flag = verb.add_argument
    flag("model", metavar="MODEL", help="run folder, model folder or hub id")
    config_help = "configuration of a data set at the hub (default: none)"
    flag("--dataset-config", metavar="NAME", help=config_help)
    field_help = "field of JSON lines, Parquet or a hub data set"
    flag("--text-field", default="text", metavar="NAME", help=field_help)
    out_help = "write score.SPLIT.json there too (default: nowhere)"
    flag("--out", type=out_folder, metavar="DIR", help=out_help)
    _split_flags(flag, "prepared set, or raw text, as `prepare --task lm` takes it")
    _model_flags(
        flag,
        batch="blocks (default: 4)",
        limited="blocks, or documents of raw text",
        usual_precision="fp32",
    )


def _add_export(verbs: Any, add: Callable[..., Any]) -> None:
    export_help = "a run's full weights as a model folder: safetensors, checked"
    verb = add(verbs, "export", export_help, _export)
    verb.set_defaults(readable=export_text)
    flag = verb.add_argument
    flag("run_folder", type=given_path, metavar="RUN", help="run folder")
    out_help = "the model folder to make"
    flag("--out", type=out_folder, required=True, metavar="DIR", help=out_help)
    checkpoint_help = "the one of step N (default: the last one)"
    flag("--checkpoint", type=int, metavar="N", help=checkpoint_help)
    flag("--dtype", choices=DTYPES, default="float32", help="number format of the weights")


def _add_demo(verbs: Any, add: Callable[..., Any]) -> None:
    demo_help = "a web page for asking trained text-to-SQL models, until Ctrl-C"
    verb = add(verbs, "demo", demo_help, _demo)
    verb.set_defaults(readable=demo_text)
    flag = verb.add_argument
    runs_help = "run or model folder, or a folder with runs"
    flag("runs", nargs="+", type=given_path, metavar="RUN", help=runs_help)
    data_help = "tables and questions, in WikiSQL's layout (default: as trained)"
    flag("--data", type=given_path, metavar="DIR", help=data_help)
    flag("--port", metavar="P", help="on 127.0.0.1 (default: 7860, or a free one)")


def _split_flags(flag: Callable[..., Any], data: str, *, required: bool = True) -> None:
    """Add the flags of every verb that reads a split."""
    flag("--data", required=required, metavar="DIR", help=data)
    split_help = "such as test" if required else "of the data (default: test, else dev)"
    flag("--split", required=required, choices=SPLITS, help=split_help)


def _model_flags(
    flag: Callable[..., Any], *, batch: str, limited: str, usual_precision: str
) -> None:
    """Add the flags of every verb that runs a model on a split.

    Args:
        batch: what a batch holds, and how many by default, for the help of `--batch-size`.
        limited: what `--limit` limits, for its help.
        usual_precision: default of `--precision`.
    """
    flag("--max-seq-length", type=whole, metavar="N", help="causal: tokens (default: as trained)")
    flag("--batch-size", type=whole, metavar="N", help=f"per batch: {batch}")
    precisions = ["auto", "fp32", "bf16", "fp16"]
    precision_help = "of the arithmetic; auto: bf16 where it is fast"
    flag("--precision", choices=precisions, default=usual_precision, help=precision_help)
    flag("--limit", type=whole, metavar="N", help=f"only the first N {limited} (default: all)")


def _predict(arguments: argparse.Namespace) -> Result:
    if arguments.force_prompt and arguments.out is None:
        reason = "the answers are not the run's own"
        raise UserError(f"--force-prompt: {reason}; choose a file with --out")
    from zeropods.train.saved_models import raw_data

    model = arguments.model
    if arguments.data is None and model.is_dir():
        arguments.data, usual_split = raw_data(model)
        arguments.split = arguments.split or usual_split
    split = arguments.split or "test"
    out = arguments.out or out_file(str(model / f"predictions.{split}.jsonl"))
    task = _checked_task(arguments)
    _check_split(task, arguments.data, split)

    # Only now, since torch and transformers take seconds.
    from zeropods.evaluate.generate import ANSWERERS, predict

    decoding = _given(arguments, "max_new_tokens", "batch_size", "num_beams")
    decoding["constrained"] = not arguments.unconstrained
    decoding["linked"] = arguments.link_cells
    options = _given(arguments, "precision", "limit", "prompt", "force_prompt", "max_seq_length")
    with progress("predict", "questions") as bar:
        speed = predict(
            model,
            arguments.data,
            split,
            out,
            replace(ANSWERERS[task].usual, **decoding),
            task=task,
            progress=bar.update,
            **options,
        )
    result: Result = {"out": str(out), **speed.to_json()}
    if arguments.score:
        from zeropods.evaluate.score import score
        from zeropods.measure.score_json import near_zero_text, record_beside

        scored = score(out, arguments.data, split)
        # The remark is for people alone: it is no part of the result.
        remark = near_zero_text(scored, record_beside(model))
        arguments.readable = partial(predict_text, remark=remark)
        result["score"] = asdict(scored)
    return result


def _checked_task(arguments: argparse.Namespace) -> str:
    """The task that the model answers; `UserError` if there is no such model, or if `--prompt` is
    not the model's own."""
    from zeropods.train.saved_models import answer_task, check_source, chosen_prompt, model_folder

    task = arguments.task
    if task is None and arguments.prompt:
        task = task_with_prompt(arguments.prompt).name
    if task is not None and TASKS[task].is_one_text:
        check_source(arguments.model)
    else:
        model_folder(arguments.model)
    task = answer_task(arguments.model, task)
    if TASKS[task].chooses_prompt:
        chosen_prompt(arguments.model, arguments.prompt, bool(arguments.force_prompt))
    return task


def _check_split(task: str, data: Path, split: str) -> None:
    """Refuse a split whose files are missing."""
    from zeropods.data.prepare import TASK_DATA

    check = TASK_DATA[task].check
    if check is not None:
        check(data, split)


def _given(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The values of those flags that were given or have a default."""
    values = {}
    for name in names:
        value = getattr(arguments, name)
        if value is not None:
            values[name] = value
    return values


def _score(arguments: argparse.Namespace) -> Result:
    from zeropods.evaluate.score import score

    predictions = arguments.predictions
    split = arguments.split
    # The path is only checked, so that nothing is scored for nothing.
    out_file(str(predictions.parent / f"score.{split}.json"))
    if not predictions.is_file():
        reason = no_file(predictions)
        raise UserError(f"{predictions}: {reason}; give one that zeropods predict has written")
    with progress("score", "predictions") as bar:
        result = score(
            predictions,
            arguments.data,
            split,
            rouge=arguments.rouge,
            metrics=arguments.metric,
        )
        bar.update(result.examples)
    from zeropods.measure.score_json import near_zero_text, record_beside

    # The remark is for people alone: it is no part of the result.
    remark = near_zero_text(result, record_beside(predictions.parent))
    arguments.readable = partial(score_text, remark=remark)
    return asdict(result)


def predict_text(result: Result, remark: str = "") -> str:
    """What was answered and how fast, in sentences, and its score with a remark about it."""
    speed = f"{result['seconds']:,.1f} s, {result['questions_per_second']:,.1f} questions/s"
    answers = counted(result["examples"], "answer")
    text = f"{result['out']}: {answers} in {speed}"
    if "score" in result:
        text += f"\n{score_text(result['score'], remark)}"
    return text


def score_text(score: Result, remark: str = "") -> str:
    """A score in a sentence, a remark about it where there is one, and a table of the groups of
    tables and kinds of query."""
    measures = _measured(score)
    if "tokens" in score:
        number = f"{score['tokens']:,} tokens"
    else:
        number = counted(score["examples"], "answer")
    if score.get("linked"):
        number += " linked to the rows"
    facts = [f"{name} {text}" for name, text in measures.items()]
    sentence = f"{number}: {', '.join(facts)}"
    if score.get("llmsql"):
        sentence = f"{sentence}\n{_llmsql_text(score['llmsql'])}"
    if remark:
        sentence = f"{sentence}\n{remark}"
    parts = {**(score.get("groups") or {}), **(score.get("kinds") or {})}
    lines = []
    for name, part in parts.items():
        if not part:
            continue
        measures_of_part = _measured(part)
        line = {"of": name.replace("_", " "), "answers": f"{part['examples']:,}"}
        for heading in measures:
            line[heading] = measures_of_part.get(heading, "-")
        lines.append(line)
    if not lines:
        return sentence
    return f"{sentence}\n\n{Table.of(lines)}".rstrip()


def _llmsql_text(counts: Result) -> str:
    """What LLMSQL's evaluator counts, in a sentence."""
    statements = counted(counts["sql_errors"], "statement")
    text = (
        f"as {counts['evaluator']} counts: {counts['matches']:,} of {counts['total']:,} right; "
        f"{statements} failed, {counts['pred_none']:,} found a lone NULL, "
        f"as did {counts['gold_none']:,} of the gold ones"
    )
    if counts["beyond_form"]:
        questions = counted(counts["beyond_form"], "question")
        text += f"; {questions} not of WikiSQL's form: counted as wrong"
    return text


def _measured(score: Result) -> dict[str, str]:
    """The measures of a score as text, each with its 95 % interval where it has one, by names for
    people."""
    measures = {}
    for measure in task_or_unknown(score["task"]).printed_measures:
        value = score.get(measure.field)
        if value is not None:
            measures[measure.field] = value
    measures |= score.get("rouge") or {}
    measures |= score.get("own_metrics", {})
    intervals = score.get("intervals", {})
    texts = {}
    for name, value in measures.items():
        text = f"{value:,.3f}"
        if intervals.get(name):
            low, high = intervals[name]
            text += f" [{low:.3f}, {high:.3f}]"
        texts[name.removesuffix("_accuracy").replace("_", " ")] = text
    if score.get("unparseable"):
        texts["no query in"] = f"{score['unparseable']:,}"
    return texts


def _perplexity(arguments: argparse.Namespace) -> Result:
    from zeropods.train.saved_models import check_source

    check_source(arguments.model)
    if is_path(arguments.data) and not Path(arguments.data).exists():
        remedy = "give a prepared set, a folder of text or a hub id"
        raise UserError(f"--data {arguments.data}: no such folder; {remedy}")

    # Only now, since torch and transformers take seconds.
    from zeropods.evaluate.generate import text_perplexity

    options = _given(
        arguments,
        "limit",
        "batch_size",
        "precision",
        "max_seq_length",
        "dataset_config",
        "text_field",
    )
    with progress("perplexity", "blocks") as bar:
        score = text_perplexity(
            arguments.model, arguments.data, arguments.split, progress=bar.update, **options
        )
    if arguments.out is not None:
        score.write(arguments.out, arguments.split)
    return asdict(score)


def _export(arguments: argparse.Namespace) -> Result:
    from zeropods.export import PARTS, export

    with progress("export", "parts", PARTS) as bar:
        options = _given(arguments, "checkpoint", "dtype")
        exported = export(arguments.run_folder, arguments.out, progress=bar.update, **options)
        return asdict(exported)


def export_text(result: Result) -> str:
    """What was exported, and from where."""
    parameters = counted(result["parameters"], "parameter")
    source = f"{result['source']}, step {result['checkpoint']:,}"
    size = f"{result['bytes']:,} bytes"
    return f"{result['out']}: {parameters} of {source}, as {result['dtype']}, {size}"


def _demo(arguments: argparse.Namespace) -> Result:
    from zeropods.demo.page import serve
    from zeropods.pods.processes import ending_in_order

    announce = partial(print, file=sys.stderr, flush=True)
    # Ctrl-C or a signal is the way to end the page, and no error.
    with contextlib.suppress(KeyboardInterrupt, SystemExit), ending_in_order():
        serve(arguments.runs, arguments.data, arguments.port, announce)
    return {"runs": [str(folder) for folder in arguments.runs], "ended": "on request"}


def demo_text(result: Result) -> str:
    """Why the page has ended."""
    return "The page has ended, as requested."
