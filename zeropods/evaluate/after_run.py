"""What a run is worth: its model answers questions that it never saw, and the answers are scored.

Nothing here loads torch into the process that asks: it may be a notebook's or a sweep's, whose next run needs the GPU.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from zeropods.data.manifest import raw_data_of, read_manifest
from zeropods.errors import UserError
from zeropods.evaluate.score_file import LM, UNSEEN_SPLITS, Score, TextScore, score_of
from zeropods.measure.record import read_record
from zeropods.programs import end_with_parent
from zeropods.tables import progress

IMPORTED = ["zeropods.evaluate.generate", "zeropods.evaluate.score", "evaluate"]
"""What every answer needs; importing it takes longer than a tiny model's answers."""


def is_answered(run: Path, questions: int) -> bool:
    """Whether so many questions are scored already, or all that the split has."""
    split, score = score_of(run) or ("", None)
    if score is None or isinstance(score, TextScore):
        return False
    known = read_manifest(_prepared(run)).splits.get(split)
    return score.examples >= questions or (known is not None and score.examples == known.rows)


def answer_run(run: Path, questions: int) -> Score:
    """Answer the first questions of the test split, of dev where there is no test, and score them.

    Leaves `predictions.SPLIT.jsonl` and `score.SPLIT.json` in the run folder. Queries are constrained.

    Raises:
        UserError: a model of text, which answers nothing; or data that do not lie near the prepared set any more.
    """
    from zeropods.evaluate.generate import predict
    from zeropods.evaluate.score import score

    data, split = raw_data(run)
    out = run / f"predictions.{split}.jsonl"
    predict(run, data, split, out, limit=questions)
    return score(out, data, split)


def answer_runs(runs: Sequence[Path], questions: int) -> None:
    """`answer_run` for each run that has not answered as many questions yet, in a process of its own.

    What keeps a run from being scored is said in a line on stderr, and the next run answers.
    """
    waiting = [run for run in runs if not is_answered(run, questions)]
    if not waiting:
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with progress("answer", "runs", len(waiting)) as bar:
        for run in waiting:
            with ProcessPoolExecutor(1, mp_context=context) as pool:
                try:
                    pool.submit(_answer, run, questions).result()
                except UserError as error:
                    print(f"not scored: {error}", file=sys.stderr)
                except BrokenProcessPool:
                    print(f"not scored: {run}: its answers took too much memory; ask fewer", file=sys.stderr)
            bar.update(1)


def _answer(run: Path, questions: int) -> None:
    end_with_parent(os.getppid(), signal.SIGTERM)
    answer_run(run, questions)


def raw_data(run: Path) -> tuple[Path, str]:
    """The folder of the data that a run was trained on, and the split that its model has not seen.

    Raises:
        UserError: a run of text, which has no questions; or data that do not lie near the prepared set any more.
    """
    record = read_record(run)
    if record.task == LM:
        raise UserError(f"{run}: trained on text, it answers nothing; see zeropods perplexity")
    found = raw_data_of(_prepared(run), UNSEEN_SPLITS)
    if found is None:
        raise UserError(f"{run}: the raw data of {_prepared(run)} are no longer near it; give --data and --split")
    return found


def _prepared(run: Path) -> Path:
    return Path(read_record(run).dataset.get("path", ""))
