"""The verbs of trained models: `zeropods predict`, `score`, `perplexity`, `export` and `demo`.

`score` reads a prediction file and loads no model; perplexity has no predictions to keep and needs the model itself,
its precision and a batch size, so it is a verb of its own.
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

if TYPE_CHECKING:
    from zeropods.cli import Result

MEASURES = ("execution_accuracy", "logical_form_accuracy", "exact_match", "f1", "perplexity", "loss")
"""Measures of scores, in the order in which they are shown."""
JUDGED_BY = ("execution_accuracy", "logical_form_accuracy", "f1")
"""Measures by the first of which that there is a score of answers is judged."""


def add_verbs(verbs: Any, add: Callable[..., Any]) -> None:
    """Add the verbs and their flags; `add(verbs, name, help, run)` makes one verb."""
    verb = add(verbs, "predict", "let a trained model answer a split", _predict)
    verb.set_defaults(readable=predict_text)
    flag = verb.add_argument
    flag("--model", type=given_path, required=True, help="run folder or model folder")
    flag("--out", type=out_file, metavar="FILE", help="what to write (default: predictions.SPLIT.jsonl of the run)")
    flag("--score", action="store_true", help="score the answers too, into score.SPLIT.json")
    flag("--task", choices=["text2sql", "squad"], help="for a model that records none (default: text2sql)")
    flag("--max-new-tokens", type=whole, metavar="N", help="per answer (default: 96 for queries, 32 for SQuAD)")
    flag("--num-beams", type=whole, default=1, metavar="N", help="beams of a search; 1 is greedy")
    flag("--prompt", choices=["question", "schema"], help="for a T5 that records none (default: its own)")
    flag("--force-prompt", action="store_true", default=None, help="use --prompt even if the T5 records another")
    flag("--unconstrained", action="store_true", help="let a T5 write any text, not only queries")
    _split_flags(flag, "WikiSQL's layout, or SQuAD's (default: its own)", required=False)
    _model_flags(flag, "questions (default: 64 for queries, 16 for answers)", "examples", "auto")

    verb = add(verbs, "score", "score a prediction file; writes score.SPLIT.json beside it", _score)
    verb.set_defaults(readable=score_text)
    flag = verb.add_argument
    flag("predictions", type=given_path, metavar="FILE", help="from zeropods predict, or in WikiSQL's official form")
    flag("--rouge", action="store_true", help="text2sql: ROUGE of the texts as well")
    own = "a metric of your own, function(prediction, answers) -> float; repeatable"
    flag("--metric", action="append", default=[], metavar="MODULE:FUNCTION", help=own)
    _split_flags(flag, "the data that the file was made from")

    verb = add(verbs, "perplexity", "perplexity of a causal model on a text", _perplexity)
    verb.set_defaults(readable=score_text)
    flag = verb.add_argument
    flag("model", metavar="MODEL", help="run folder, model folder or hub id")
    flag("--dataset-config", metavar="NAME", help="configuration of a data set at the hub (default: none)")
    flag("--text-field", default="text", metavar="NAME", help="field of JSON lines, Parquet or a hub data set")
    flag("--out", type=out_folder, metavar="DIR", help="write score.SPLIT.json there too (default: nowhere)")
    _split_flags(flag, "prepared set, or raw text, as `prepare --task lm` takes it")
    _model_flags(flag, "blocks (default: 4)", "blocks, or documents of raw text", "fp32")

    verb = add(verbs, "export", "a run's full weights as a model folder: safetensors, checked", _export)
    verb.set_defaults(readable=export_text)
    flag = verb.add_argument
    flag("run_folder", type=given_path, metavar="RUN", help="run folder")
    flag("--out", type=out_folder, required=True, metavar="DIR", help="the model folder to make")
    flag("--checkpoint", type=int, metavar="N", help="the one of step N (default: the last one)")
    flag("--dtype", choices=DTYPES, default="float32", help="number format of the weights")

    verb = add(verbs, "demo", "a web page for asking trained text-to-SQL models, until Ctrl-C", _demo)
    verb.set_defaults(readable=lambda result: "The page has ended, as requested.")
    flag = verb.add_argument
    flag("runs", nargs="+", type=given_path, metavar="RUN", help="run or model folder, or a folder with runs")
    of_data = "tables and questions, in WikiSQL's layout (default: as trained)"
    flag("--data", type=given_path, metavar="DIR", help=of_data)
    flag("--port", metavar="P", help="on 127.0.0.1 (default: 7860, or a free one)")


def _split_flags(flag: Callable[..., Any], data: str, *, required: bool = True) -> None:
    """Add the flags of every verb that reads a split."""
    flag("--data", required=required, metavar="DIR", help=data)
    of_split = "such as test" if required else "of the data (default: test, else dev)"
    flag("--split", required=required, choices=SPLITS, help=of_split)


def _model_flags(flag: Callable[..., Any], batch: str, unit: str, precision: str) -> None:
    """Add the flags of every verb that runs a model on a split."""
    flag("--max-seq-length", type=whole, metavar="N", help="causal: tokens (default: as trained)")
    flag("--batch-size", type=whole, metavar="N", help=f"per batch: {batch}")
    known = ["auto", "fp32", "bf16", "fp16"]
    flag("--precision", choices=known, default=precision, help="of the arithmetic; auto: bf16 where it is fast")
    flag("--limit", type=whole, metavar="N", help=f"only the first N {unit} (default: all)")


def _predict(arguments: argparse.Namespace) -> Result:
    if arguments.force_prompt and arguments.out is None:
        raise UserError("--force-prompt: the answers are not the run's own; choose a file with --out")
    from zeropods.evaluate.models import answer_task, check_source, chosen_prompt, model_folder, raw_data

    if arguments.data is None and arguments.model.is_dir():
        arguments.data, usual = raw_data(arguments.model)
        arguments.split = arguments.split or usual
    split = arguments.split or "test"
    out = arguments.out or out_file(str(arguments.model / f"predictions.{split}.jsonl"))
    asked = arguments.task or ("text2sql" if arguments.prompt else None)
    if asked == "squad":
        check_source(arguments.model)
    else:
        model_folder(arguments.model)
    task = answer_task(arguments.model, asked)
    if task == "text2sql":
        chosen_prompt(arguments.model, arguments.prompt, bool(arguments.force_prompt))
    _check_split(task, arguments.data, split)

    # Only now, since torch and transformers take seconds.
    from zeropods.evaluate.generate import TASKS, predict

    how = _given(arguments, "max_new_tokens", "batch_size", "num_beams") | {"constrained": not arguments.unconstrained}
    options = _given(arguments, "precision", "limit", "prompt", "force_prompt", "max_seq_length")
    call = (arguments.model, arguments.data, split, out, replace(TASKS[task].usual, **how))
    with progress("predict", "questions") as bar:
        speed = predict(*call, task=task, progress=bar.update, **options)
    result: Result = {"out": str(out), **speed.to_json()}
    if arguments.score:
        from zeropods.evaluate.score import score

        result["score"] = asdict(score(out, arguments.data, split))
    return result


def _check_split(task: str, data: Path, split: str) -> None:
    """Refuse questions that are not there."""
    from zeropods.data.squad import squad_file
    from zeropods.data.wikisql import source_files

    if task == "squad":
        squad_file(data, split)
    else:
        source_files(data, split)


def _given(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The values of those flags that were given or have a default."""
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


def _score(arguments: argparse.Namespace) -> Result:
    from zeropods.evaluate.score import score

    out_file(str(arguments.predictions.parent / f"score.{arguments.split}.json"))
    if not arguments.predictions.is_file():
        reason = no_file(arguments.predictions)
        raise UserError(f"{arguments.predictions}: {reason}; give one that zeropods predict has written")
    call = (arguments.predictions, arguments.data, arguments.split)
    with progress("score", "predictions") as bar:
        found = score(*call, rouge=arguments.rouge, metrics=arguments.metric)
        bar.update(found.examples)
    return asdict(found)


def predict_text(result: Result) -> str:
    """What was answered and how fast, in sentences, and its score."""
    speed = f"{result['seconds']:,.1f} s, {result['questions_per_second']:,.1f} questions/s"
    said = f"{result['out']}: {counted(result['examples'], 'answer')} in {speed}"
    return f"{said}\n{score_text(result['score'])}" if "score" in result else said


def score_text(score: Result) -> str:
    """A score in a sentence, a word about one near zero, and a table of the groups of tables and kinds of query."""
    from zeropods.evaluate.score_json import NEAR_ZERO, NOT_TRAINED

    whole_score = _measured(score)
    number = f"{score['tokens']:,} tokens" if "tokens" in score else counted(score["examples"], "answer")
    sentence = f"{number}: {', '.join(f'{name} {text}' for name, text in whole_score.items())}"
    judged = [score[name] for name in JUDGED_BY if score.get(name) is not None]
    if judged and judged[0] < NEAR_ZERO:
        sentence = f"{sentence}\n{NOT_TRAINED}"
    parts = {**(score.get("groups") or {}), **(score.get("kinds") or {})}
    lines = [
        {"of": name.replace("_", " "), "answers": f"{part['examples']:,}"}
        | {measure: _measured(part).get(measure, "-") for measure in whole_score}
        for name, part in parts.items()
        if part
    ]
    return f"{sentence}\n\n{Table.of(lines)}".rstrip() if lines else sentence


def _measured(score: Result) -> dict[str, str]:
    """The measures of a score by their names, with their 95 % intervals."""
    measures = {name: score[name] for name in MEASURES if score.get(name) is not None}
    measures |= {**(score.get("rouge") or {}), **score.get("own_metrics", {})}
    spans = score.get("intervals", {})
    ends = {name: " [{:.3f}, {:.3f}]".format(*spans[name]) for name in measures if spans.get(name)}
    shown = {
        name.removesuffix("_accuracy").replace("_", " "): f"{value:,.3f}{ends.get(name, '')}"
        for name, value in measures.items()
    }
    return shown | ({"no query in": f"{score['unparseable']:,}"} if score.get("unparseable") else {})


def _perplexity(arguments: argparse.Namespace) -> Result:
    from zeropods.evaluate.models import check_source

    check_source(arguments.model)
    if is_path(arguments.data) and not Path(arguments.data).exists():
        raise UserError(f"--data {arguments.data}: no such folder; give a prepared set, a folder of text or a hub id")

    # Only now, since torch and transformers take seconds.
    from zeropods.evaluate.generate import text_perplexity

    given = _given(arguments, "limit", "batch_size", "precision", "max_seq_length", "dataset_config", "text_field")
    with progress("perplexity", "blocks") as bar:
        score = text_perplexity(arguments.model, arguments.data, arguments.split, progress=bar.update, **given)
    if arguments.out is not None:
        score.write(arguments.out, arguments.split)
    return asdict(score)


def _export(arguments: argparse.Namespace) -> Result:
    from zeropods.export import PARTS, export

    with progress("export", "parts", PARTS) as bar:
        given = _given(arguments, "checkpoint", "dtype")
        return asdict(export(arguments.run_folder, arguments.out, progress=bar.update, **given))


def export_text(result: Result) -> str:
    """What was exported, and from where."""
    return (
        f"{result['out']}: {counted(result['parameters'], 'parameter')} of {result['source']}, step "
        f"{result['checkpoint']:,}, as {result['dtype']}, {result['bytes']:,} bytes"
    )


def _demo(arguments: argparse.Namespace) -> Result:
    from zeropods.demo.page import serve
    from zeropods.pods.processes import ending_in_order

    announce = partial(print, file=sys.stderr, flush=True)
    with contextlib.suppress(KeyboardInterrupt, SystemExit), ending_in_order():
        serve(arguments.runs, arguments.data, arguments.port, announce)
    return {"runs": [str(folder) for folder in arguments.runs], "ended": "on request"}
