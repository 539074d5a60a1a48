"""A cell from its start to its record: the program that is run, what it measured, what was planned and predicted."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.cells import NEW_TOKENS, PREDICTED_QUESTIONS, Cell
from benchmarks.gpu.data import Data
from benchmarks.gpu.jobs import LAST_CHARACTERS, call, train
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.predicted import Duration, best_batch, duration, predicted_rate
from benchmarks.gpu.summary import rate, steady_steps
from zeropods.errors import UserError
from zeropods.launch.outcome import UnopenedError
from zeropods.measure import environment
from zeropods.measure.record import CONFIG, RankMeasurement, Record, read_json
from zeropods.techniques import technique_named
from zeropods.train.arguments import PROJECT

SLACK_SECONDS = 300.0
"""Seconds for start, evaluation and saving, beyond those asked for."""
MODEL_OF_PREDICTION = "t5-small-none-32"


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What all cells of a call share, and how each is measured."""

    out: Path
    data: Data
    machine: Machine
    seconds: float
    """Seconds of steady steps."""
    warm: int | None = None
    """Number of steps before those that count, in place of each cell's own."""
    limit_seconds: float = 1_800.0
    """Time limit of a cell's program; one that takes longer is ended."""

    def measure(self, cell: Cell) -> dict[str, Any]:
        """Measure a cell and return its record, which says how it ended."""
        measure = {"control": self._control, "train": self._train, "predict": self._predict}[cell.kind]
        return {
            "cell": asdict(cell),
            "device": self.machine.device,
            "gpu": self.machine.gpu,
            "git_revision": environment.git_revision(PROJECT),
            "versions": environment.versions(),
            **measure(cell),
        }

    def _duration(self, cell: Cell, batch: int, shapes: np.ndarray) -> Duration:
        return duration(cell, batch, shapes, self.machine, seconds=self.seconds, warm=self.warm)

    def _control(self, cell: Cell) -> dict[str, Any]:
        assert cell.batch is not None
        path = self.out / "runs" / cell.name / "control.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        shapes = self.data.padded(cell, cell.batch)
        lasts = self._duration(cell, cell.batch, shapes)
        words = ["--model", cell.model, "--set", str(self.data.sets[cell.prompt]), "--out", str(path)]
        words += ["--batch", str(cell.batch), "--steps", str(lasts.steps), "--seconds", str(lasts.seconds)]
        path.unlink(missing_ok=True)
        status, said = call("benchmarks.gpu.control", words, self.limit_seconds)
        if not path.is_file():
            return {"status": "failed", "reason": f"status {status}: {said[-LAST_CHARACTERS:]}", "batch": cell.batch}
        measured = read_json(path)
        steps = steady_steps(measured["step_seconds"], lasts.warm)
        return {
            "status": measured["status"],
            "reason": measured.get("reason"),
            "batch": cell.batch,
            "step_seconds": steps,
            "samples_per_second": rate(steps, cell.batch),
            "predicted_samples_per_second": predicted_rate(cell, cell.batch, shapes, self.machine),
            "tokens_per_sample": measured["tokens_per_sample"],
            "peak_allocated_bytes": measured["peak_allocated_bytes"],
            "tf32": measured["tf32"],
        }

    def _train(self, cell: Cell) -> dict[str, Any]:
        if cell.batch is not None:
            return self._run(cell, cell.batch)
        rows = len(self.data.shapes(cell.prompt, 1, 1))
        batch, most = best_batch(cell, lambda count: self.data.padded(cell, count), rows, self.machine)
        tries = [self._run(cell, batch)]
        if tries[0]["status"] == "ok" and 2 * batch <= most:
            tries.append(self._run(cell, 2 * batch))
        elif tries[0]["status"] == "oom" and batch > 1:
            tries.append(self._run(cell, batch // 2))
        best = max(tries, key=lambda each: each["samples_per_second"] or 0.0)
        return {**best, "planned_largest_batch": most, "tries": [_said_of(each) for each in tries]}

    def _run(self, cell: Cell, batch: int) -> dict[str, Any]:
        folder = self.out / "runs" / (cell.name if cell.batch else f"{cell.name}-{batch}")
        shapes = self.data.padded(cell, batch)
        if (folder / CONFIG).is_file():
            # Left by a call that was killed within this cell, or by an earlier try: other flags would make another run.
            shutil.rmtree(folder)
        lasts = self._duration(cell, batch, shapes)
        measured: dict[str, Any] = {"batch": batch, "samples_per_second": None, "step_seconds": []}
        measured["predicted_samples_per_second"] = predicted_rate(cell, batch, shapes, self.machine)
        try:
            record = train(self._flags(cell, batch, folder, lasts), folder, self.limit_seconds, cell.without)
        except UnopenedError as error:
            return {**measured, "status": "failed", "reason": str(error)[-LAST_CHARACTERS:]}
        if cell.name != MODEL_OF_PREDICTION:
            # Gigabytes of random weights for each cell; nothing reads them again.
            shutil.rmtree(folder / "model", ignore_errors=True)
        return {**measured, **_of_record(record, folder, batch, lasts.warm)}

    def _flags(self, cell: Cell, batch: int, folder: Path, lasts: Duration) -> list[str]:
        flags: dict[str, Any] = {
            "model_id": cell.model,
            "init": "random",
            "dataset_path": self.data.sets[cell.prompt],
            "outputdir": folder,
            "per_device_train_batch_size": batch,
            "per_device_eval_batch_size": 256,
            "precision": cell.precision,
            "pad_to_multiple_of": cell.multiple,
            "compile": cell.compile,
            "eval_steps": 0,
            "save_steps": 0,
            "seed": cell.seed,
            "logging_steps": 50 if cell.steps is None else 10,
            "max_steps": lasts.steps,
        }
        if math.isfinite(lasts.seconds):
            flags["max_train_seconds"] = lasts.seconds
        if cell.dropout is not None:
            flags["dropout"] = cell.dropout
        if cell.technique != "none":
            flags["deepspeed"] = technique_named(cell.technique).file
        return [word for name, value in flags.items() for word in (f"--{name}", str(value))]

    def _predict(self, cell: Cell) -> dict[str, Any]:
        model, out = self.out / "runs" / MODEL_OF_PREDICTION, self.out / "runs" / cell.name
        if not (model / "model" / "config.json").is_file():
            raise UserError(f"{cell.name}: needs the model of {MODEL_OF_PREDICTION}; run that cell first")
        if self.data.raw is None:
            raise UserError(f"{cell.name}: --data holds no raw WikiSQL to ask questions from; put wikisql/ into it")
        out.mkdir(parents=True, exist_ok=True)
        precision = "bf16" if self.machine.device == "cuda" else "fp32"
        words = ["predict", "--model", str(model), "--data", str(self.data.raw), "--split", "dev", "--json"]
        words += ["--limit", str(PREDICTED_QUESTIONS), "--out", str(out / "predictions.dev.jsonl")]
        words += ["--max-new-tokens", str(NEW_TOKENS), "--batch-size", str(cell.batch), "--precision", precision]
        status, said = call("zeropods", words, self.limit_seconds)
        if status != 0:
            return {"status": "failed", "reason": f"status {status}: {said}"}
        speed, _ = json.JSONDecoder().raw_decode(said[said.rindex("{") :])
        return {"status": "ok", "reason": None, "batch": cell.batch, "precision": precision, **speed}


def _of_record(record: Record, folder: Path, batch: int, warm: int) -> dict[str, Any]:
    from zeropods.measure.calibration import planned

    rank = record.ranks[0] if record.ranks else RankMeasurement(rank=0, host="")
    each = folder / "steps" / "0.npy"
    steps = steady_steps(np.load(each).tolist() if each.is_file() else [], warm)
    samples = batch * rank.steps
    plan = planned(record)
    used = rank.sampled.get("device_used_bytes")
    return {
        "status": record.status,
        "reason": record.reason,
        "run_precision": record.precision,
        "step_seconds": steps,
        "samples_per_second": rate(steps, batch),
        "tokens_per_sample": [rank.source_tokens / samples, rank.target_tokens / samples] if samples else None,
        "planned_peak_allocated_bytes": plan.peak_allocated_bytes if plan else None,
        "planned_device_bytes": plan.device_bytes if plan else None,
        "peak_allocated_bytes": _training_peak(rank),
        "device_used_bytes": used.peak if used else None,
        "largest_batch": None if rank.largest_batch is None else asdict(rank.largest_batch),
        "losses": [asdict(loss) for loss in record.losses],
    }


def _training_peak(rank: RankMeasurement) -> int | None:
    """Peak bytes of steps alone, as in the plan: an evaluation at 256 rows may need more than a step at 32."""
    peaks = [rank.phases[name].peak_allocated_bytes for name in ("first_step", "steady") if name in rank.phases]
    return max((peak for peak in peaks if peak is not None), default=None)


def _said_of(measured: dict[str, Any]) -> dict[str, Any]:
    return {key: measured.get(key) for key in ("batch", "status", "reason", "samples_per_second")}
