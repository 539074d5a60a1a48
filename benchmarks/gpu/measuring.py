"""A cell from its start to its record: the program that is run, what it measured, what was planned
and predicted."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.gpu.cells import NEW_TOKENS, Cell
from benchmarks.gpu.data import Data
from benchmarks.gpu.jobs import LAST_CHARACTERS, call, train
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.predicted import Duration, best_batch, duration, largest_plan, predicted_rate
from benchmarks.gpu.summary import rate, steady_steps
from zeropods.errors import UserError
from zeropods.launch.outcome import UnopenedError
from zeropods.measure import environment
from zeropods.measure.record import CONFIG, RankMeasurement, Record, read_json
from zeropods.plan.memory import PlannedMemory
from zeropods.techniques import technique_named
from zeropods.train.flags import PROJECT

if TYPE_CHECKING:
    from zeropods.measure.profile import Module

SLACK_SECONDS = 300.0
"""Seconds for start, evaluation and saving, beyond those asked for."""
CUDNN_ATTENTION = "ZEROPODS_CUDNN_ATTENTION"
"""The variable that lets torch choose cuDNN's attention (`zeropods.train.device`)."""
PROFILE = "profile.txt"
OUTCOME = ("batch", "status", "reason", "samples_per_second")
"""What the record of the best batch has of each batch that was tried."""


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
    tries_other_batches: bool = True
    """Whether the best batch is tried at twice its planned size, or at half of it where it does not
    fit."""

    def measure(self, cell: Cell) -> dict[str, Any]:
        """Measure a cell and return its record, which says how it ended."""
        measure = {
            "control": self._control,
            "train": self._train,
            "causal": self._train,
            "predict": self._predict,
        }[cell.kind]
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
        words = _words(
            {
                "model": cell.model,
                "set": self.data.sets[cell.prompt],
                "out": path,
                "batch": cell.batch,
                "steps": lasts.steps,
                "seconds": lasts.seconds,
            }
        )
        path.unlink(missing_ok=True)
        status, output = call("benchmarks.gpu.control", words, self.limit_seconds)
        if not path.is_file():
            return {
                "status": "failed",
                "reason": f"status {status}: {output[-LAST_CHARACTERS:]}",
                "batch": cell.batch,
            }
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
        batch, most = best_batch(cell, partial(self.data.padded, cell), rows, self.machine)
        tries = [self._run(cell, batch)]
        other_batch = self._other_batch(batch, most, tries[0]["status"])
        if other_batch is not None:
            tries.append(self._run(cell, other_batch))
        best = max(tries, key=lambda measured: measured["samples_per_second"] or 0.0)
        outcomes = []
        for measured in tries:
            outcomes.append({key: measured.get(key) for key in OUTCOME})
        return {**best, "planned_largest_batch": most, "tries": outcomes}

    def _other_batch(self, batch: int, most: int, status: str) -> int | None:
        """The batch that is tried after the planned one, by how that one ended; None for none."""
        if not self.tries_other_batches:
            return None
        if status == "ok" and 2 * batch <= most:
            return 2 * batch
        if status == "oom" and batch > 1:
            return batch // 2
        return None

    def _run(self, cell: Cell, batch: int) -> dict[str, Any]:
        folder = self._folder(cell, batch)
        shapes = self.data.padded(cell, batch)
        if (folder / CONFIG).is_file():
            # Left by a call that was killed within this cell, or by an earlier try: other flags
            # would make another run.
            shutil.rmtree(folder)
        lasts = self._duration(cell, batch, shapes)
        argv = [*self._script(cell), *self._flags(cell, batch, folder, lasts)]
        measured: dict[str, Any] = {
            "batch": batch,
            "samples_per_second": None,
            "step_seconds": [],
            **plans(cell, batch, shapes, self.machine),
        }
        try:
            record = train(argv, folder, self.limit_seconds, _variables(cell))
        except UnopenedError as error:
            reason = str(error)[-LAST_CHARACTERS:]
            return {**measured, "status": "failed", "reason": reason}
        measured |= _of_record(record, folder, batch * cell.passes, lasts.warm)
        if cell.profiled and record.status == "ok":
            measured["profiled_flops"] = profiled_flops(folder / PROFILE, cell.model)
        return measured

    def _folder(self, cell: Cell, batch: int) -> Path:
        name = cell.name
        if not cell.batch:
            name = f"{name}-{batch}"
        return self.out / "runs" / name

    def _script(self, cell: Cell) -> list[str]:
        if cell.without is not None:
            return ["-m", "benchmarks.gpu.without", cell.without]
        script = "causal_train.py" if cell.is_causal else "textsql_train.py"
        return [str(PROJECT / script)]

    def _flags(self, cell: Cell, batch: int, folder: Path, lasts: Duration) -> list[str]:
        flags: dict[str, Any] = {
            "init": "random",
            "outputdir": folder,
            "per_device_train_batch_size": batch,
            "gradient_accumulation_steps": cell.passes,
            "precision": cell.precision,
            "gradient_checkpointing": cell.checkpointing,
            "eval_steps": 0,
            "save_steps": 0,
            # Nothing but a prediction reads the random weights, which are gigabytes.
            "save_model": cell.keeps_model,
            "seed": cell.seed,
            "logging_steps": 50 if cell.steps is None else 10,
        }
        if cell.is_causal:
            flags |= {
                "model_name_or_path": cell.model,
                "data": self.data.sets[cell.prompt],
                "max_train_steps": lasts.steps,
                "max_eval_steps": 2,
                "memory_interval": 0.2,
            }
        else:
            flags |= {
                "model_id": cell.model,
                "dataset_path": self.data.sets[cell.prompt],
                "per_device_eval_batch_size": 256,
                "pad_to_multiple_of": cell.padded_to,
                "compile": cell.compile,
                "max_steps": lasts.steps,
            }
            if math.isfinite(lasts.seconds):
                flags["max_train_seconds"] = lasts.seconds
        if cell.dropout is not None:
            flags["dropout"] = cell.dropout
        technique = technique_named(cell.technique)
        if cell.profiled:
            flags["deepspeed"] = PROJECT / "dsconfig" / f"{technique.profiled}.json"
        elif cell.needs_deepspeed:
            flags["deepspeed"] = technique.file
        return _words(flags)

    def _predict(self, cell: Cell) -> dict[str, Any]:
        model = self._model_to_ask()
        if model is None:
            raise UserError(
                f"{cell.name}: needs the model of t5-small-none-32 or another that was kept; "
                "run that cell first"
            )
        if self.data.raw is None:
            raise UserError(
                f"{cell.name}: --data holds no raw WikiSQL to ask questions from; "
                "put wikisql/ into it"
            )
        out = self.out / "runs" / cell.name
        out.mkdir(parents=True, exist_ok=True)
        precision = "bf16" if self.machine.device == "cuda" else "fp32"
        flags = {
            "model": model,
            "data": self.data.raw,
            "split": "dev",
            "limit": cell.questions,
            "out": out / "predictions.dev.jsonl",
            "max-new-tokens": NEW_TOKENS,
            "batch-size": cell.batch,
            "precision": precision,
        }
        words = ["predict", "--json", *_words(flags)]
        status, answer = call("zeropods", words, self.limit_seconds, _variables(cell))
        if status != 0:
            return {"status": "failed", "reason": f"status {status}: {answer}"}
        # The document stands at the end of the output; it holds no other object.
        speed, _ = json.JSONDecoder().raw_decode(answer[answer.rindex("{") :])
        return {
            "status": "ok",
            "reason": None,
            "batch": cell.batch,
            "precision": precision,
            **speed,
        }

    def _model_to_ask(self) -> Path | None:
        """The run folder of a cell that kept its model; None where there is none yet."""
        configurations = sorted((self.out / "runs").glob("t5-small-*/model/config.json"))
        if not configurations:
            return None
        return configurations[0].parents[1]


def _words(flags: Mapping[str, object]) -> list[str]:
    """Flags and their values as the words of a command line."""
    words = []
    for name, value in flags.items():
        words += [f"--{name}", str(value)]
    return words


def _variables(cell: Cell) -> dict[str, str]:
    """Environment variables that a cell's program gets."""
    if cell.cudnn_attention:
        return {CUDNN_ATTENTION: "1"}
    return {}


def plans(cell: Cell, batch: int, shapes: np.ndarray, machine: Machine) -> dict[str, Any]:
    """What is planned of a cell before it runs: its rate, and the memory of its largest batch. The
    plan describes this project's own step; the original's recipe keeps other tensors."""
    memory = largest_plan(cell, batch, shapes, machine)
    return {
        "predicted_samples_per_second": predicted_rate(cell, batch, shapes, machine),
        "planned_peak_allocated_bytes": memory.peak_allocated_bytes,
        "planned_device_bytes": memory.device_bytes,
    }


def profiled_flops(report: Path, model: str) -> dict[str, float | None]:
    """FLOPs of one forward pass by DeepSpeed's profiler, corrected, and by the model's shape, for
    the profiled batch.

    The lengths of the batch are those that the report's linear layers claim to have seen.
    """
    from zeropods.measure.profile_corrections import check
    from zeropods.plan.facts import shape_named
    from zeropods.plan.workload import FORWARD

    checked = check(report)
    rows = checked.figures["batch_size_per_gpu"]
    counted = None
    if checked.root is not None and rows:
        lengths = _profiled_tokens(checked.root)
        if lengths is not None:
            source, target, head = lengths
            shape = shape_named(model)
            layers = shape.layer_products(source / rows, target / rows, whole=True)
            counted = FORWARD * (rows * layers + shape.embedding * head)
    return {"profiler": checked.figures["forward_flops"], "shape": counted}


def _profiled_tokens(root: Module) -> tuple[float, float, float] | None:
    """Tokens that the encoder, the decoder and the output layer saw; None where one of them is not
    in the report."""
    source = []
    target = []
    head = []
    for path, module in root.walk():
        tokens = module.tokens
        if tokens is None:
            continue
        if path.startswith("encoder."):
            source.append(tokens)
        if path.startswith("decoder.") and ".SelfAttention." in path:
            target.append(tokens)
        if path.endswith("lm_head"):
            head.append(tokens)
    if not source or not target or not head:
        return None
    return source[0], target[0], head[0]


def _of_record(record: Record, folder: Path, batch: int, warm: int) -> dict[str, Any]:
    """What a run measured; `batch` is the number of rows of an optimizer step.

    Its memory is planned once more, for the largest batch that it really met.
    """
    from zeropods.measure.planned_runs import planned_memory

    # Of a run that left no measurement, every figure is that of an empty one: not measured.
    rank = RankMeasurement(rank=0, host="")
    if record.ranks:
        rank = record.ranks[0]
    steps = steady_steps(_step_seconds(folder), warm)
    evaluations = rank.evaluate_seconds
    largest = rank.largest_batch
    used = rank.sampled.get("device_used_bytes")
    return {
        "status": record.status,
        "reason": record.reason,
        "run_precision": record.precision,
        "step_seconds": steps,
        "samples_per_second": rate(steps, batch),
        "tokens_per_sample": _tokens_per_sample(rank, batch),
        "planned_for_its_batch": asdict_of_plan(planned_memory(record)),
        "peak_allocated_bytes": _training_peak(rank),
        "peak_reserved_bytes": rank.peak_reserved_bytes,
        "peak_resident_bytes": rank.peak_resident_bytes,
        "device_used_bytes": used.peak if used else None,
        "matmul_flops_per_second": rank.matmul_flops_per_second,
        "start_seconds": rank.start_seconds,
        "wall_seconds": rank.wall_seconds,
        "evaluate_seconds": evaluations.total if evaluations else None,
        "largest_batch": asdict(largest) if largest is not None else None,
        "losses": [asdict(loss) for loss in record.losses],
    }


def _step_seconds(folder: Path) -> list[float]:
    """Seconds of each step of rank 0; none where the run has not written them."""
    path = folder / "steps" / "0.npy"
    if not path.is_file():
        return []
    seconds: list[float] = np.load(path).tolist()
    return seconds


def _tokens_per_sample(rank: RankMeasurement, batch: int) -> list[float] | None:
    """Source and target tokens of a mean sample; None without steps."""
    samples = batch * rank.steps
    if not samples:
        return None
    return [rank.source_tokens / samples, rank.target_tokens / samples]


def asdict_of_plan(plan: PlannedMemory | None) -> dict[str, int] | None:
    """The figures of a plan that a run's are compared with."""
    if plan is None:
        return None
    return {
        "peak_allocated_bytes": plan.peak_allocated_bytes,
        "device_bytes": plan.device_bytes,
        "host_bytes": plan.host_bytes,
    }


def _training_peak(rank: RankMeasurement) -> int | None:
    """Peak bytes of steps alone, as in the plan: an evaluation at 256 rows may need more than a
    step at 32."""
    peaks = []
    for name in ("first_step", "steady"):
        if name in rank.phases:
            peak = rank.phases[name].peak_allocated_bytes
            if peak is not None:
                peaks.append(peak)
    return max(peaks, default=None)
