"""`zeropods VERB`: read flags, call one function, print its result."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zeropods import __version__, cli_launch, cli_plan, cli_pods, cli_profile, cli_summary, cli_sweep
from zeropods.errors import guarded
from zeropods.threads import wait_passively

Result = dict[str, Any]
"""What a verb answers: printed as JSON with `--json`, else line by line."""


def main(argv: list[str] | None = None) -> int:
    """Run one verb; the exit status is 0 only if what was asked for was done."""
    wait_passively()
    arguments = parser().parse_args(argv)

    def command() -> int:
        result = arguments.run(arguments)
        print(json.dumps(result, ensure_ascii=False) if arguments.json else arguments.readable(result))
        return arguments.status(result)

    return guarded(command)


def parser() -> argparse.ArgumentParser:
    """All verbs and their flags."""
    root = _Parser(prog="zeropods", description="Measure DeepSpeed ZeRO fine-tuning on your own pods.")
    root.add_argument("--version", action="version", version=__version__)
    verbs = root.add_subparsers(required=True, metavar="VERB")
    data = verbs.add_parser("data", help="raw data sets").add_subparsers(required=True, metavar="WHAT")
    _data_get(data)
    _data_sample(data)
    _prepare(verbs)
    _predict(verbs)
    _score(verbs)
    pods = verbs.add_parser("pods", help="worker pods").add_subparsers(required=True, metavar="WHAT")
    cli_pods.add_verbs(pods, _verb)
    for verb in (cli_launch, cli_plan, cli_profile, cli_sweep, cli_summary):
        verb.add_verb(verbs, _verb)
    return root


class _Parser(argparse.ArgumentParser):
    """No abbreviated flags, in verbs either."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "allow_abbrev": False})


def _verb(verbs: Any, name: str, help_: str, run: Callable[[argparse.Namespace], Result]) -> Any:
    verb = verbs.add_parser(name, help=help_, description=help_)
    verb.add_argument("--json", action="store_true", help="print one JSON document, nothing else, on stdout")
    verb.set_defaults(run=run, readable=_readable, status=lambda result: 0)
    return verb


def _data_get(verbs: Any) -> None:
    from zeropods.data.publishers import DATASETS

    verb = _verb(verbs, "get", "fetch a data set from its publisher, verify and unpack it", _run_data_get)
    verb.add_argument("name", choices=sorted(DATASETS))
    verb.add_argument("--out", type=Path, required=True)


def _run_data_get(arguments: argparse.Namespace) -> Result:
    from zeropods.data.download import get

    return _plain(get(arguments.name, arguments.out))


def _data_sample(verbs: Any) -> None:
    verb = _verb(verbs, "sample", "write the embedded data set, in WikiSQL's layout", _run_data_sample)
    verb.add_argument("--out", type=Path, required=True)
    verb.add_argument("--seed", type=int, default=0)


def _run_data_sample(arguments: argparse.Namespace) -> Result:
    from zeropods.data.sample import write_sample

    return _plain(write_sample(arguments.out, arguments.seed))


def _prepare(verbs: Any) -> None:
    verb = _verb(verbs, "prepare", "make a tokenized set with its tokenizer and manifest", _run_prepare)
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
    with _progress("prepare", "rows") as progress:
        manifest, made = prepare(wanted, arguments.out, progress)
    return {"out": str(arguments.out), "made": made, **manifest.to_json()}


def _predict(verbs: Any) -> None:
    verb = _verb(verbs, "predict", "let a trained model answer a split", _run_predict)
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
    with _progress("predict", "questions") as progress:
        speed = predict(
            arguments.model, arguments.data, arguments.split, arguments.out, how,
            precision=arguments.precision, prompt=arguments.prompt, limit=arguments.limit, progress=progress,
        )  # fmt: skip
    return {"out": str(arguments.out), **speed.to_json()}


def _score(verbs: Any) -> None:
    verb = _verb(verbs, "score", "score a prediction file; writes score.SPLIT.json beside it", _run_score)
    verb.add_argument("predictions", type=Path, metavar="FILE")
    verb.add_argument("--data", type=Path, required=True)
    verb.add_argument("--split", required=True)
    verb.add_argument("--rouge", action="store_true", help="ROUGE of the texts as well")


def _run_score(arguments: argparse.Namespace) -> Result:
    from zeropods.evaluate.score import score_predictions

    return score_predictions(arguments.predictions, arguments.data, arguments.split, rouge=arguments.rouge).to_json()


@contextmanager
def _progress(what: str, unit: str) -> Iterator[Callable[[int], object]]:
    from tqdm import tqdm

    with tqdm(desc=what, unit=f" {unit}", file=sys.stderr, mininterval=1.0, disable=None) as bar:
        yield bar.update


def _plain(value: Any) -> Result:
    """A dataclass of plain values as a dictionary."""
    from dataclasses import asdict

    return json.loads(json.dumps(asdict(value), default=str))


def _readable(result: Result) -> str:
    return "\n".join(f"{name:24} {_shown(value)}" for name, value in result.items())


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
