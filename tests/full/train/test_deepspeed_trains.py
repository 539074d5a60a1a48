"""Each key that is said to work does: a run with it ends with the right losses and weights, and can be resumed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from tests.full.conftest import ROOT, TINY, run_several
from tests.full.train.test_checkpoint_training import assert_same_losses
from tests.full.train.test_train import losses
from zeropods.measure.record import read_record
from zeropods.train.deepspeed_keys import KEYS

ROWS, SAVED, STEPS = 12, 2, 4
RATE = 3e-4
COMMON: list[object] = [
    *TINY, "--save_steps", SAVED, "--eval_steps", 0, "--max_steps", STEPS, "--threads", 1, "--memory_interval", 0,
    "--learning_rate", RATE,
]  # fmt: skip
BATCH = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
ADAMW = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
SCALES = {
    "loss_scale": 0, "initial_scale_power": 15, "loss_scale_window": 1000, "hysteresis": 2,
    "consecutive_hysteresis": False, "min_loss_scale": 1,
}  # fmt: skip
MAIN_MEMORY = {"device": "cpu", "pin_memory": False}


@dataclass(frozen=True)
class Trained:
    """A configuration that combines keys, and how it is trained."""

    config: dict[str, Any]
    ranks: int
    resumed_on: int
    """Number of ranks that go on after a kill; a configuration that is no technique needs as many as before."""
    technique: str
    flags: tuple[object, ...] = ()
    slots: int | None = None
    """Number of ranks of a pod; all of them if not given."""
    is_plain: bool = True
    """Whether a run without DeepSpeed has the same losses; DeepSpeed's schedules begin with two steps at rate 0."""


COMBINED = {
    "zero1": Trained(
        {
            **BATCH,
            "train_batch_size": ROWS,
            "gradient_clipping": "auto",
            "bf16": {"enabled": False, "check_grad_overflow": False},
            "fp16": {"enabled": False, **SCALES},
            "wall_clock_breakdown": True,
            "timers": {"throughput": {"enabled": False, "synchronized": False}},
            "disable_python_gc": True,
            "tensorboard": {"enabled": True, "job_name": "mine"},
            "zero_optimization": {
                "stage": 1,
                "contiguous_gradients": False,
                "reduce_scatter": False,
                "reduce_bucket_size": 1e5,
                "use_multi_rank_bucket_allreduce": False,
                "allgather_partitions": False,
                "allgather_bucket_size": 1e4,
                "overlap_comm": True,
                "ignore_unused_parameters": False,
                "parameter_alignment": True,
            },
        },
        ranks=2,
        resumed_on=1,
        technique="zero1",
    ),
    "zero2_offload": Trained(
        {
            **BATCH,
            "train_batch_size": "auto",
            "gradient_clipping": 1.0,
            "bf16": {"enabled": "auto"},
            "fp16": {"enabled": "auto"},
            "optimizer": {"type": "Adam", "params": ADAMW},
            "scheduler": {
                "type": "WarmupCosineLR",
                "params": {
                    "total_num_steps": STEPS, "warmup_num_steps": 1, "warmup_type": "linear", "warmup_min_ratio": 0.1,
                    "cos_min_ratio": 0.01,
                },
            },
            "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "offload_optimizer": MAIN_MEMORY},
            "flops_profiler": {
                "enabled": True, "profile_step": 1, "module_depth": 1, "top_modules": 2, "detailed": False,
                "recompute_fwd_factor": 0.5,
            },
        },
        ranks=1,
        resumed_on=2,
        technique="zero2_offload",
        flags=("--lr_scheduler_type", "cosine"),
        is_plain=False,
    ),
    "zero3": Trained(
        {
            **BATCH,
            "gradient_clipping": "auto",
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": 1e5,
                "stage3_prefetch_bucket_size": "auto",
                "stage3_param_persistence_threshold": "auto",
                "stage3_model_persistence_threshold": 1_000,
                "stage3_max_live_parameters": 0,
                "stage3_max_reuse_distance": 0,
                "stage3_gather_16bit_weights_on_model_save": "auto",
                "stage3_use_all_reduce_for_fetch_params": True,
                "leaf_module": {
                    "classes": ["transformers.models.t5.modeling_t5.T5LayerSelfAttention"],
                    "names": [],
                    "name_suffixes": ["EncDecAttention"],
                },
                "memory_efficient_linear": False,
                "override_module_apply": False,
                "log_trace_cache_warnings": True,
                "enable_sanity_checks": True,
                "pipeline_loading_checkpoint": True,
            },
        },
        ranks=2,
        resumed_on=1,
        technique="zero3",
    ),
    "zero3_offload": Trained(
        {
            **BATCH,
            "gradient_clipping": "auto",
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": 0,
                "prefetch_bucket_size": 0,
                "param_persistence_threshold": 0,
                "model_persistence_threshold": 0,
                "max_live_parameters": 0,
                "max_reuse_distance": 0,
                "gather_16bit_weights_on_model_save": True,
                "use_all_reduce_for_fetch_params": False,
                "allgather_sequential": True,
                "offload_optimizer": MAIN_MEMORY,
                "offload_param": MAIN_MEMORY,
            },
        },
        ranks=1,
        resumed_on=2,
        technique="zero3_offload",
    ),
    "zero3++": Trained(
        {
            **BATCH,
            "gradient_clipping": "auto",
            "zero_optimization": {
                "stage": 3,
                "stage3_param_persistence_threshold": 1_000,
                "stage3_prefetch_bucket_size": 1e5,
                "zero_hpz_partition_size": "auto",
            },
        },
        ranks=4,
        # Of two pods, one is left.
        resumed_on=2,
        technique="zero3++",
        slots=2,
    ),
    "custom": Trained(
        {
            **BATCH,
            "gradient_clipping": "auto",
            "optimizer": {"type": "AdamW", "params": ADAMW},
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {
                    "total_num_steps": "auto", "warmup_num_steps": "auto", "warmup_type": "linear",
                    "warmup_min_lr": "auto", "warmup_max_lr": "auto",
                },
            },
            "zero_optimization": {
                "stage": 3,
                "reduce_bucket_size": 1e5,
                "stage3_allgather_sequential": True,
                "offload_optimizer": {"device": "cpu", "ratio": 0.5},
            },
        },
        ranks=2,
        resumed_on=2,
        technique="custom",
        is_plain=False,
    ),
    "without_clipping": Trained(
        {
            **BATCH,
            "gradient_clipping": 0,
            "optimizer": {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}},
            "zero_optimization": {"stage": 2, "compute_grad_norm": False},
        },
        ranks=1,
        resumed_on=1,
        technique="zero2",
        flags=("--max_grad_norm", 0),
        is_plain=False,
    ),
}  # fmt: skip


def flat(config: Mapping[str, Any], before: str = "") -> Iterator[str]:
    """The places of the keys of a configuration, blocks included."""
    for name, value in config.items():
        yield f"{before}{name}"
        if isinstance(value, dict):
            yield from flat(value, f"{before}{name}.")


def test_there_is_a_configuration_for_each_key_that_works() -> None:
    trained = {place for combined in COMBINED.values() for place in flat(combined.config)}
    assert {place for place, key in KEYS.items() if key.verdict == "works"} - trained == set()


@dataclass
class Runs:
    """Runs in a folder."""

    data: Path
    folder: Path

    def train(self, run: Path, ranks: int, *flags: object, slots: int | None = None) -> None:
        common = [*COMMON, "--dataset_path", self.data, "--per_device_train_batch_size", ROWS // ranks]
        run_several(common, (ranks, run, list(flags)), slots=slots)

    def plain(self, flags: tuple[object, ...]) -> Path:
        """A run without DeepSpeed in one process; made once."""
        run = self.folder / "-".join(["plain", *map(str, flags)])
        if not run.exists():
            self.train(run, 1, *flags)
        return run


@pytest.fixture(scope="module")
def runs(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(prepared, tmp_path_factory.mktemp("combined"))


@pytest.mark.parametrize("name", COMBINED)
def test_a_run_ends_right_and_goes_on_after_a_kill(name: str, runs: Runs, tmp_path: Path) -> None:
    combined, run, killed = COMBINED[name], tmp_path / "run", tmp_path / "killed"
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(combined.config))
    given = ["--deepspeed", path, *combined.flags]
    runs.train(run, combined.ranks, *given, slots=combined.slots)
    record = read_record(run)
    assert (record.status, record.technique, record.precision) == ("ok", combined.technique, "fp32")
    assert (record.effective_batch_size, record.steps, len(losses(record))) == (ROWS, STEPS, STEPS)
    assert (run / "profile.txt").exists() == ("flops_profiler" in combined.config)
    assert (run / "tensorboard" / "mine").exists() == ("tensorboard" in combined.config)
    if combined.is_plain:
        plain = runs.plain(combined.flags)
        assert losses(record) == pytest.approx(losses(read_record(plain)), rel=1e-4)
        assert_same_weights(run, plain)
    shutil.copytree(run, killed)
    (killed / "record.json").unlink()
    shutil.rmtree(killed / "checkpoints" / f"checkpoint-{STEPS}")
    runs.train(killed, combined.resumed_on, *given, slots=combined.slots)
    assert_same_losses(killed, run, SAVED, STEPS)
    assert_same_weights(killed, run)


def assert_same_weights(run: Path, other: Path) -> None:
    """The same weights in the model folders of two runs, to within what AdamW can have moved them apart."""
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (run, other))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].shape == value.shape and abs(ours[name] - value).max() <= 2 * RATE * STEPS


# What a configuration can no longer do is what another library still may.

ENDED = """
import sys
from deepspeed.runtime.engine import DeepSpeedEngine

step = DeepSpeedEngine.step

def last_step(engine, *arguments):
    step(engine, *arguments)
    if engine.global_steps == 2:
        exit()

DeepSpeedEngine.step = last_step
from zeropods.errors import guarded
from zeropods.train import run_script
del sys.argv[0]
sys.exit(guarded(run_script))
"""
"""DeepSpeed's engine, which ends the process in its second step, as it does while it tunes itself."""


def test_a_run_that_a_library_ends_with_status_0_ends_with_status_1(prepared: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    argv = [*COMMON, "--dataset_path", prepared, "--outputdir", run, "--deepspeed", ROOT / "dsconfig" / "zero1.json"]
    command = [sys.executable, "-c", ENDED, "textsql_train.py", *map(str, argv)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    said = "exit() was called at "
    assert done.returncode == 1 and said in done.stderr.splitlines()[-1], done.stderr
    record = read_record(run)
    assert record.status == "failed" and record.reason.startswith(said) and not (run / "model").exists()


def test_a_script_started_by_hand_names_the_compiler_that_offload_lacks(prepared: Path, tmp_path: Path) -> None:
    path = ROOT / "dsconfig" / "zero3_offload.json"
    argv = [*COMMON, "--dataset_path", prepared, "--outputdir", tmp_path / "run", "--deepspeed", path]
    lacking = {**os.environ, "CXX": "no-such-compiler", "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    command = [sys.executable, str(ROOT / "textsql_train.py"), *map(str, argv)]
    done = subprocess.run(command, cwd=ROOT, env=lacking, capture_output=True, text=True, timeout=240, check=False)
    said = f"--deepspeed {path}: DeepSpeed must compile cpu_adam for its optimizer, and here is no C++ compiler"
    assert done.returncode == 1 and f"zeropods: {said} (apt-get install g++); install it" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "run").exists()
