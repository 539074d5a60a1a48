"""`zeropods predict` and `zeropods score`: a trained model's answers."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zeropods.cli.progress import progress

Result = dict[str, Any]


def add_verbs(verbs: Any, add: Callable[..., Any]) -> None:
    """The verbs and their flags; `add(verbs, name, help, run)` makes one."""
    _predict(verbs, add)
    _score(verbs, add)


def _predict(verbs: Any, add: Callable[..., Any]) -> None:
    verb = add(verbs, "predict", "let a trained model answer a split", _run_predict)
    verb.add_argument("--model", type=Path, required=True, help="run folder or model folder")
    verb.add_argument("--data", type=Path, required=True)
    verb.add_argument("--split", required=True)
    verb.add_argument("--out", type=Path, required=True, help="prediction file")
    verb.add_argument("--max-new-tokens", type=int, default=96)
    verb.add_argument("--num-beams", type=int, default=1)
    verb.add_argument("--batch-size", type=int, default=64)
    verb.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    verb.add_argument("--prompt", choices=["question", "schema"], help="for a model that does not say its own")
    verb.add_argument("--unconstrained", action="store_true", help="let the model write what it likes")
    verb.add_argument("--limit", type=int, help="only the first N examples")


def _run_predict(arguments: argparse.Namespace) -> Result:
    from zeropods.evaluate.generate import Generation
    from zeropods.evaluate.predict import predict

    how = Generation(
        max_new_tokens=arguments.max_new_tokens,
        num_beams=arguments.num_beams,
        batch_size=arguments.batch_size,
        constrained=not arguments.unconstrained,
    )
    with progress("predict", "questions") as tick:
        speed = predict(
            arguments.model, arguments.data, arguments.split, arguments.out, how,
            precision=arguments.precision, prompt=arguments.prompt, limit=arguments.limit, progress=tick,
        )  # fmt: skip
    return {"out": str(arguments.out), **speed.to_json()}


def _score(verbs: Any, add: Callable[..., Any]) -> None:
    verb = add(verbs, "score", "score a prediction file; writes score.SPLIT.json beside it", _run_score)
    verb.add_argument("predictions", type=Path, metavar="FILE")
    verb.add_argument("--data", type=Path, required=True)
    verb.add_argument("--split", required=True)
    verb.add_argument("--rouge", action="store_true", help="ROUGE of the texts as well")


def _run_score(arguments: argparse.Namespace) -> Result:
    from zeropods.evaluate.score import score_predictions

    return score_predictions(arguments.predictions, arguments.data, arguments.split, rouge=arguments.rouge).to_json()
