"""Runs of both scripts on any number of ranks, by forks of one process, and copies of them that were killed midway."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from tests.full.conftest import ROOT, TINY, cut_text
from tests.full.forks import fork_server
from zeropods.data.prepare import Preparation, prepare

EFFECTIVE_BATCH = 12
SAVED, STEPS = (10, 20) if os.environ.get("ZEROPODS_SOAK") == "1" else (5, 10)
TEXT_TO_SQL, CAUSAL = "textsql_train.py", "causal_train.py"
EACH = ["--save_steps", SAVED, "--eval_steps", 0, "--threads", 1, "--logging_steps", 1, "--precision", "fp32"]
FLAGS: dict[str, list[object]] = {
    TEXT_TO_SQL: [*TINY, *EACH, "--max_steps", STEPS],
    CAUSAL: [
        "--model_name_or_path", "gpt-tiny", "--init", "random", "--dropout", 0, "--task", "lm", "--max_seq_length", 32,
        "--gradient_accumulation_steps", 1, "--max_train_steps", STEPS, "--memory_interval", 0, *EACH,
    ],
}  # fmt: skip


def flags(name: str, ranks: int) -> list[object]:
    """Of one technique on so many ranks."""
    config = [] if name == "none" else ["--deepspeed", ROOT / "dsconfig" / f"{name}.json"]
    return ["--per_device_train_batch_size", EFFECTIVE_BATCH // ranks, *config]


@dataclass(frozen=True)
class Runs:
    """Runs in a folder."""

    sources: dict[str, Path]
    """The prepared data of each script."""
    folder: Path
    made: dict[str, Path] = field(default_factory=dict)

    def train(
        self, name: str, ranks: int, run: Path, *given: object, script: str = TEXT_TO_SQL, status: int = 0
    ) -> str:
        """Train on so many ranks; returns what rank 0 said."""
        data = "--dataset_path" if script == TEXT_TO_SQL else "--data"
        argv = [*FLAGS[script], data, self.sources[script], "--outputdir", run, *flags(name, ranks), *given]
        return fork_server().train(argv, ranks, self.folder / run.name, script=script, status=status)

    def undisturbed(self, name: str, ranks: int, script: str = TEXT_TO_SQL) -> Path:
        """A run of all steps; made once."""
        run = self.folder / f"{Path(script).stem}-{name}-{ranks}"
        if run.name not in self.made:
            self.train(name, ranks, run, script=script)
            self.made[run.name] = run
        return run

    def killed(self, name: str, ranks: int, copy: str, script: str = TEXT_TO_SQL) -> Path:
        """A copy of such a run, as if it had been killed after its first checkpoint."""
        run = Path(shutil.copytree(self.undisturbed(name, ranks, script), self.folder / copy))
        (run / "record.json").unlink()
        shutil.rmtree(run / "checkpoints" / f"checkpoint-{STEPS}")
        return run


def prepare_text(text_sample: Path, folder: Path) -> Path:
    """Blocks of a few lines of the sample's text, prepared."""
    cut = cut_text(text_sample, folder)
    prepare(Preparation(task="lm", data=cut, tokenizer="gpt-tiny", max_seq_length=32), folder / "prepared")
    return folder / "prepared"
