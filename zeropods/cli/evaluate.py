"""`zeropods predict`, `zeropods score` and `zeropods perplexity`: what a trained model is worth.

A score is of a prediction file and loads no model; perplexity has no predictions to keep, it needs the model itself,
its precision and a batch size. So it is a verb of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from zeropods.cli.progress import progress

Result = dict[str, Any]


def add_verbs(verbs: Any, add: Callable[..., Any]) -> None:
    """The verbs and their flags; `add(verbs, name, help, run)` makes one."""
    _predict(verbs, add)
    _score(verbs, add)
    _perplexity(verbs, add)


def _predict(verbs: Any, add: Callable[..., Any]) -> None:
    verb = add(verbs, "predict", "let a trained model answer a split", _run_predict)
    verb.add_argument("--model", type=Path, required=True, help="run folder or model folder")
    verb.add_argument("--data", type=Path, required=True)
    verb.add_argument("--split", required=True)
    verb.add_argument("--out", type=Path, required=True, help="prediction file")
    verb.add_argument("--task", choices=["text2sql", "squad"], help="for a model that does not say its own")
    verb.add_argument("--max-new-tokens", type=int, help="96 for a query, 32 for an answer if not given")
    verb.add_argument("--max-seq-length", type=int, help="squad: tokens of prompt and answer; as trained if not given")
    verb.add_argument("--num-beams", type=int, default=1)
    verb.add_argument("--batch-size", type=int, help="questions at once; 64 queries or 16 answers if not given")
    verb.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    verb.add_argument("--prompt", choices=["question", "schema"], help="for a T5 that does not say its own")
    verb.add_argument("--unconstrained", action="store_true", help="let a T5 write what it likes")
    verb.add_argument("--limit", type=int, help="only the first N examples")


def _run_predict(arguments: argparse.Namespace) -> Result:
    from zeropods.evaluate.tasks import ANSWER_TASKS, answer_task, predict

    task = answer_task(arguments.model, arguments.task or ("text2sql" if arguments.prompt else None))
    how = ANSWER_TASKS[task].generation(
        arguments.max_new_tokens, arguments.batch_size,
        num_beams=arguments.num_beams, constrained=not arguments.unconstrained,
    )  # fmt: skip
    names = ("precision", "limit", "prompt", "max_seq_length")
    options = {name: getattr(arguments, name) for name in names}
    with progress("predict", "questions") as tick:
        speed = predict(
            arguments.model, arguments.data, arguments.split, arguments.out, how, task=task, progress=tick, **options
        )
    return {"out": str(arguments.out), **speed.to_json()}


def _score(verbs: Any, add: Callable[..., Any]) -> None:
    verb = add(verbs, "score", "score a prediction file; writes score.SPLIT.json beside it", _run_score)
    verb.add_argument("predictions", type=Path, metavar="FILE")
    verb.add_argument("--data", type=Path, required=True)
    verb.add_argument("--split", required=True)
    verb.add_argument("--rouge", action="store_true", help="text2sql: ROUGE of the texts as well")
    verb.add_argument(
        "--metric", action="append", default=[], metavar="MODULE:FUNCTION",
        help="a metric of your own, function(prediction, answers) -> float; may be given several times",
    )  # fmt: skip


def _run_score(arguments: argparse.Namespace) -> Result:
    from zeropods.evaluate.score import custom_metric, score

    metrics = [custom_metric(name) for name in arguments.metric]
    call = (arguments.predictions, arguments.data, arguments.split)
    return score(*call, rouge=arguments.rouge, metrics=metrics).to_json()


def _perplexity(verbs: Any, add: Callable[..., Any]) -> None:
    verb = add(verbs, "perplexity", "perplexity of a causal model on a text", _run_perplexity)
    verb.add_argument("model", metavar="MODEL", help="run folder, model folder or hub id")
    verb.add_argument("--data", required=True, help="prepared set, or raw text, as `prepare --task lm` takes it")
    verb.add_argument("--split", required=True)
    verb.add_argument("--max-seq-length", type=int, help="tokens of a block of raw text; as trained if not given")
    verb.add_argument("--dataset-config", help="configuration of a data set at the hub")
    verb.add_argument("--text-field", default="text", help="field of JSON lines, Parquet or a hub data set; text")
    verb.add_argument("--batch-size", type=int, default=4)
    verb.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    verb.add_argument("--limit", type=int, help="only the first N blocks, or documents of raw text")
    verb.add_argument("--out", type=Path, metavar="DIR", help="also write score.SPLIT.json there")


def _run_perplexity(arguments: argparse.Namespace) -> Result:
    from zeropods.evaluate.perplexity import TextToScore, text_perplexity

    text = TextToScore(**{field.name: getattr(arguments, field.name) for field in fields(TextToScore)})
    how = {"batch_size": arguments.batch_size, "precision": arguments.precision}
    with progress("perplexity", "blocks") as tick:
        score = text_perplexity(arguments.model, text, progress=tick, **how)
    if arguments.out is not None:
        score.write(arguments.out, arguments.split)
    return score.to_json()
