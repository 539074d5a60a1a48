"""The trained models below the folders that a user names, the best first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zeropods.data.manifest import read_manifest
from zeropods.data.prompts import MAX_SOURCE_TOKENS, PROMPTS
from zeropods.errors import UserError
from zeropods.evaluate.saved_model import model_folder, task_of
from zeropods.measure.records import read_json
from zeropods.report.entry import Entry, read_entry
from zeropods.report.find import find_runs

TASK = "text2sql"
TASK_NAMES = {"squad": "squad", "lm": "text"}


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A text-to-SQL model that can be asked."""

    name: str
    folder: Path
    """Run folder or model folder."""
    model_id: str
    technique: str | None
    """None for a model folder, as the next two where nothing was scored."""
    split: str | None
    accuracy: float | None
    """Execution accuracy as a share of 1; logical-form accuracy where nothing could be executed."""
    eval_loss: float | None
    """The last one."""
    prepared: Path | None
    """The tokenized set that the run was trained on, where the run says it."""
    source_limit: int
    """Tokens of a question with its columns in training."""
    changed: float
    """When the weights were written, in seconds of the epoch."""

    @property
    def label(self) -> str:
        """One line for people."""
        technique = "no ZeRO" if self.technique == "none" else self.technique or ""
        parts = [self.model_id, technique, self.accuracy_text, self.name]
        return " · ".join(dict.fromkeys(filter(None, parts)))

    @property
    def accuracy_text(self) -> str:
        return "not scored" if self.accuracy is None else f"{self.accuracy:.0%} right on {self.split}"


def trained_models(folders: Sequence[Path]) -> list[TrainedModel]:
    """All models to ask, by accuracy, where there is none by validation loss, then the newest first.

    Raises:
        UserError: a folder that is not there; a run or model folder named itself that cannot be asked; no model at all.
    """
    found: dict[Path, TrainedModel] = {}
    for folder in map(Path, folders):
        for model in _below(folder):
            found.setdefault(model.folder, model)
    if not found:
        named = ", ".join(map(str, folders)) or "no folder"
        raise UserError(f"{named}: no trained text-to-SQL model there; textsql_train.py --outputdir makes one")
    return _named_apart(sorted(found.values(), key=_place))


def _place(model: TrainedModel) -> tuple[float, float, float]:
    loss = math.inf if model.eval_loss is None else model.eval_loss
    return -(model.accuracy or 0.0), loss, -model.changed


def _below(folder: Path) -> Iterator[TrainedModel]:
    whole = folder.resolve()
    if not whole.is_dir():
        raise UserError(f"{folder}: no such folder; name run folders, or a folder that holds some")
    runs = {} if _is_model(whole) else find_runs([folder])
    if not runs or whole in runs.values():
        yield _asked(whole, folder)
        return
    for name, run in runs.items():
        try:
            if task_of(run) == TASK:
                yield _model(run, name)
        except (UserError, OSError):
            # Among many, a run that failed or still trains has no model, and is no fault.
            continue


def _asked(folder: Path, said: Path) -> TrainedModel:
    """The model in a folder that was named itself."""
    task = task_of(folder)
    if task != TASK:
        raise UserError(f"{said}: is a {TASK_NAMES[task]} run; the demo asks text-to-SQL models")
    return _model(folder, folder.name)


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def _model(folder: Path, name: str) -> TrainedModel:
    within = model_folder(folder)
    config = read_json(within / "config.json")
    if config.get("prompt") not in PROMPTS:
        raise UserError(f"{folder}: does not say its prompt ({config.get('prompt')!r}); train it with textsql_train.py")
    entry = read_entry(folder, name) if within != folder else None
    prepared = _prepared(entry)
    return TrainedModel(
        name=name,
        folder=folder,
        model_id=str(entry.facts.get("model_id", "model")) if entry else "model",
        technique=entry.facts.get("technique") if entry else None,
        split=entry.split if entry else None,
        accuracy=_accuracy(entry),
        eval_loss=entry.eval_losses[-1]["loss"] if entry and entry.eval_losses else None,
        prepared=prepared,
        source_limit=_source_limit(prepared, config["prompt"]),
        changed=(within / "config.json").stat().st_mtime,
    )


def _accuracy(entry: Entry | None) -> float | None:
    score: dict[str, Any] = (entry and entry.score) or {}
    executed = score.get("execution_accuracy")
    return score.get("logical_form_accuracy") if executed is None else executed


def _prepared(entry: Entry | None) -> Path | None:
    path = (entry.facts.get("dataset") or {}).get("path") if entry else None
    return Path(path) if isinstance(path, str) and (Path(path) / "manifest.json").is_file() else None


def _source_limit(prepared: Path | None, prompt: str) -> int:
    limit = read_manifest(prepared).max_source_tokens if prepared else None
    return limit or MAX_SOURCE_TOKENS[prompt]


def _named_apart(models: list[TrainedModel]) -> list[TrainedModel]:
    """Models of one name get their whole paths."""
    names = [model.name for model in models]
    return [replace(model, name=str(model.folder)) if names.count(model.name) > 1 else model for model in models]
