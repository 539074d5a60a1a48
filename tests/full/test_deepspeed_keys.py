"""The keys of a DeepSpeed configuration against what the installed DeepSpeed itself knows and refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime import config as runtime
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
)
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

from zeropods.errors import UserError
from zeropods.report.settings import BUCKETS, PREFIX, deepspeed_settings
from zeropods.train.deepspeed import TOP_LEVEL, check_blocks, read_config

DSCONFIG = Path(__file__).resolve().parents[2] / "dsconfig"


class Asked(dict[str, Any]):
    """A configuration that notes the keys that it is asked for."""

    def __init__(self, *pairs: Any, asked: set[str], **values: Any) -> None:
        super().__init__(*pairs, **values)
        self.asked = asked

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:
        return self

    def __copy__(self) -> Asked:
        return Asked(self.items(), asked=self.asked)


def test_the_top_level_has_what_deepspeed_asks_for_and_does_not_refuse() -> None:
    asked: set[str] = set()
    runtime.DeepSpeedConfig(Asked(train_batch_size=1, train_micro_batch_size_per_gpu=1, asked=asked))
    assert asked - set(runtime._REMOVED_TOP_LEVEL_CONFIG_KEYS) == TOP_LEVEL


@pytest.mark.parametrize("path", sorted(DSCONFIG.glob("*.json")), ids=lambda path: path.stem)
def test_deepspeeds_own_models_take_the_files_of_the_project(path: Path) -> None:
    check_blocks(read_config(path), path)


@pytest.mark.parametrize(
    ("block", "values", "said"),
    [
        ("zero_optimization", {"reduce_bucket_sise": 1}, "did you mean reduce_bucket_size?"),
        ("zero_optimization", {"stage3_max_live_parameter": 1}, "did you mean stage3_max_live_parameters?"),
        ("zero_optimization", {"offload_param": {"device": "gpu"}}, "zero_optimization.offload_param.device: Input"),
        ("zero_optimization", {"offload_optimizer": {"pinned": 1}}, "offload_optimizer.pinned: unknown to DeepSpeed"),
        ("bf16", {"enable": True}, "bf16.enable: unknown to DeepSpeed; did you mean enabled?"),
        ("tensorboard", {"jobname": "x"}, "tensorboard.jobname: unknown to DeepSpeed; did you mean job_name?"),
    ],
)
def test_what_deepspeeds_own_models_refuse_is_said_in_one_line(block: str, values: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as refused:
        check_blocks({block: values}, "some.json")
    assert str(refused.value).startswith(f"--deepspeed some.json: {block}.") and said in str(refused.value)
    assert "\n" not in str(refused.value)


# The defaults with which runs are compared.

MODELS = {
    "bf16": DeepSpeedBF16Config,
    "fp16": DeepSpeedFP16Config,
    "timers.throughput": DeepSpeedThroughputTimerConfig,
    "zero_optimization": DeepSpeedZeroConfig,
    "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
    "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
}
TOP = ("gradient_predivide_factor", "zero_force_ds_cpu_optimizer")
OURS = {
    *("optimizer.type", "scheduler.type", "zero_optimization.overlap_comm"),
    *(f"zero_optimization.{name}" for name in (*BUCKETS, "leaf_module")),
    *(f"zero_optimization.{block}.device" for block in ("offload_optimizer", "offload_param")),
}
"""What flags, the technique or the class of a module decide; buckets are compared by themselves."""


def test_the_defaults_that_runs_are_compared_with_are_deepspeeds_own() -> None:
    whole = runtime.DeepSpeedConfig({"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1})
    known = {name: getattr(whole, name) for name in TOP}
    for block, model in MODELS.items():
        for name, field in model.model_fields.items():
            known[f"{block}.{field.alias or name}"] = field.get_default(call_default_factory=True)
    offloaded = {name: {"device": "cpu"} for name in ("offload_optimizer", "offload_param")}
    stated = deepspeed_settings({"zero_optimization": {"stage": 3, **offloaded}})
    ours = {name.removeprefix(PREFIX): value for name, value in stated.items()}
    assert {name: value for name, value in ours.items() if value and name not in OURS} == {
        name: value for name, value in known.items() if value and name not in OURS
    }


def test_schedules_are_those_of_transformers_without_settings_of_their_own() -> None:
    from transformers import SchedulerType

    from zeropods.train.arguments import SCHEDULES

    with_settings = {"cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay", "greedy"}
    assert set(SCHEDULES) == {kind.value for kind in SchedulerType} - with_settings
