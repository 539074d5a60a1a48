"""What a folder with a trained model says about itself, read without loading it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zeropods.data.prompts import PROMPTS
from zeropods.errors import UserError
from zeropods.measure.records import read_json
from zeropods.safe_weights import has_weights, refuse_other_weights

TASKS = ("text2sql", "squad", "lm")


def model_folder(folder: Path) -> Path:
    """Where the weights of a run or model folder lie: in safetensors files, as nothing else is read."""
    folder = Path(folder)
    within = folder / "model" if (folder / "model").is_dir() else folder
    if not has_weights(within):
        raise UserError(f"{folder}: no trained model (*.safetensors) there; expected a run or model folder")
    refuse_other_weights(within)
    return within


def task_of(folder: Path, asked: str | None = None) -> str:
    """What a model was trained for: `asked`, else what its run says, else the prompt in its configuration.

    Raises:
        UserError: nobody says it.
    """
    if asked is not None:
        return asked
    within = model_folder(folder)
    said = _run_config(Path(folder)).get("task") or _task_of_prompt(read_json(within / "config.json").get("prompt"))
    if said not in TASKS:
        raise UserError(f"{folder}: does not say its task ({said!r}); give --task {' or '.join(TASKS[:2])}")
    return said


def trained_length(folder: Path) -> int | None:
    """The most tokens of a row that a run was trained on; None where the folder is no run, or says nothing."""
    length = (_run_config(Path(folder)).get("identity") or {}).get("max_seq_length")
    return length if isinstance(length, int) else None


def _run_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a run folder; nothing for a model folder, whose file of that name is the model's."""
    is_run = (folder / "model").is_dir() and (folder / "config.json").is_file()
    return read_json(folder / "config.json") if is_run else {}


def _task_of_prompt(prompt: object) -> object:
    return "text2sql" if prompt in PROMPTS else prompt
