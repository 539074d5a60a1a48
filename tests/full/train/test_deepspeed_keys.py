"""The names and types that are kept of DeepSpeed's configuration are those of the installed version."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
from accelerate import DeepSpeedPlugin
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime import config as runtime
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch.optim import AdamW

from zeropods.errors import UserError
from zeropods.train import deepspeed_config_check as config_check
from zeropods.train.deepspeed_config import read_config
from zeropods.train.deepspeed_config_check import BLOCKS, check_config
from zeropods.train.deepspeed_keys import KEYS, OBJECT, OLD_NAME, REMOVED

ROOT = Path(__file__).resolve().parents[3]
MODELS: dict[str, type[DeepSpeedConfigModel]] = {
    "zero_optimization": DeepSpeedZeroConfig,
    "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
    "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
    "zero_optimization.leaf_module": DeepSpeedZeroLeafModuleConfig,
    "bf16": DeepSpeedBF16Config,
    "fp16": DeepSpeedFP16Config,
    "tensorboard": TensorBoardConfig,
    "csv_monitor": CSVConfig,
    "wandb": WandbConfig,
    "comet": CometConfig,
    "comms_logger": CommsLoggerConfig,
    "timers.throughput": DeepSpeedThroughputTimerConfig,
    "hybrid_engine": runtime.HybridEngineConfig,
}
"""DeepSpeed's models of the blocks of which the keys are kept."""
READ = (
    "flops_profiler", "torch_autocast", "data_types", "activation_checkpointing", "aio", "checkpoint",
    "checkpoint.parallel_write",
)  # fmt: skip
"""Blocks that DeepSpeed reads key by key."""
OTHER = {"", "optimizer", "optimizer.params", "scheduler", "scheduler.params", "timers"}
STRICTER = {
    "fp16.hysteresis": "negative numbers",
    "fp16.initial_scale_power": "negative numbers",
    "fp16.loss_scale_window": "what is unused where the scale is fixed",
    "fp16.min_loss_scale": "what is unused where the scale is fixed",
    "comms_logger.prof_ops": "lists of anything",
}
"""Keys for which DeepSpeed takes more than is sensible, and what."""
PROBES: list[Any] = [
    True, False, None, -2, -1, 0, 1, 2, 3, 4, 0.0, 0.5, 1.0, 1.5, 2.0, -0.5, 5e8, "", "x", "cpu", "nvme", "none",
    "fp32", "linear", "info", "warn", [], ["x"], [1], [0.9, 0.999], {}, {"enabled": False}, {"enabled": True},
    {"autotp_size": 1},
]  # fmt: skip


def kept(block: str) -> set[str]:
    """The names that are kept of a block."""
    return {place.rpartition(".")[2] for place in KEYS if place.rpartition(".")[0] == block}


def test_every_block_is_compared() -> None:
    assert BLOCKS | {""} == {*MODELS, *READ, *OTHER}


@pytest.mark.parametrize("block", MODELS)
def test_the_names_of_a_block_are_those_of_deepspeed_s_model(block: str) -> None:
    fields = MODELS[block].model_fields
    known = {name for key, field in fields.items() for name in (key, field.alias) if name is not None}
    known |= set(runtime._REMOVED_ZERO_CONFIG_KEYS) if block == "zero_optimization" else set()
    assert kept(block) == known


class Asked(dict[str, Any]):
    """A configuration that notes the keys that it is asked for."""

    def __init__(self, values: dict[str, Any] | None = None, asked: set[str] | None = None) -> None:
        super().__init__(values or {})
        self.asked = set[str]() if asked is None else asked

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:
        return self

    def __copy__(self) -> Asked:
        return Asked(self, self.asked)


BATCH = {"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1}


def test_the_names_at_the_top_are_those_that_deepspeed_asks_for() -> None:
    config = Asked(dict(BATCH))
    runtime.DeepSpeedConfig(config)
    # It asks for this one only once the processes have connected.
    assert kept("") == config.asked | {"sequence_parallel_size"}
    assert set(REMOVED) == set(runtime._REMOVED_TOP_LEVEL_CONFIG_KEYS)


@pytest.mark.parametrize("block", READ)
def test_the_names_of_a_block_without_a_model_are_those_that_deepspeed_asks_for(block: str) -> None:
    inner = Asked()
    outer: dict[str, Any] = {**BATCH}
    if block == "checkpoint.parallel_write":
        outer["checkpoint"] = {"parallel_write": inner}
    else:
        outer[block] = inner
    runtime.DeepSpeedConfig(Asked(outer))
    assert kept(block) == inner.asked


REFUSED = object()
"""What DeepSpeed makes of a value that it refuses."""
BESIDE: dict[str, dict[str, Any]] = {
    "fp16": {"enabled": True},
    "zero_optimization": {"stage": 1},
}
"""Keys with which DeepSpeed looks at others of the block."""


def made_of(place: str, value: object) -> object:
    """What DeepSpeed's model of a block makes of a key's value."""
    block, _, name = place.rpartition(".")
    model = MODELS[block]
    try:
        made = model(**{**BESIDE.get(block, {}), name: value})
    except (ValidationError, TypeError):
        return REFUSED
    field = next((field for field, about in model.model_fields.items() if about.alias == name), name)
    return getattr(made, field, REFUSED)


OF_MODELS = [
    place
    for place in KEYS
    if place.rpartition(".")[0] in MODELS
    and KEYS[place].kind is not OBJECT
    and place.rpartition(".")[2] not in runtime._REMOVED_ZERO_CONFIG_KEYS
]


@pytest.mark.parametrize("place", OF_MODELS)
def test_the_values_of_a_key_are_those_that_deepspeed_s_model_takes_as_they_are(place: str) -> None:
    for value in PROBES:
        made = made_of(place, value)
        if KEYS[place].kind.holds(value):
            assert made is not REFUSED or KEYS[place].because == OLD_NAME, value
        elif place not in STRICTER:
            # A value that it converts, such as 1 for true, was meant to be something else.
            assert type(made) is not type(value) or made != value, value


def with_keys(keys: dict[str, Any]) -> dict[str, Any]:
    """A configuration of stage 1 that has these keys, by their places, or keeps its own where they do not fit."""
    config: dict[str, Any] = {"train_batch_size": 1, "zero_optimization": {"stage": 1}}
    for place, value in sorted(keys.items()):
        *blocks, name = place.split(".")
        block: Any = config
        for outer in blocks:
            block = block.setdefault(outer, {}) if isinstance(block, dict) else block
        if isinstance(block, dict):
            # A copy: a block that is chosen may get keys of its own, itself among them.
            block[name] = copy.deepcopy(value)
    return config


ALONE = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "world_size": 1}
"""Flags of a run with the batch of these configurations."""


def passes(config: dict[str, Any]) -> bool:
    try:
        check_config(config, "some.json", ALONE)
    except UserError:
        return False
    return True


PASSING = [(place, value) for place in KEYS for value in PROBES if passes(with_keys({place: value}))]
"""Keys with values that the check lets pass by themselves."""


@given(st.lists(st.sampled_from(PASSING), max_size=8))
def test_deepspeed_takes_what_the_check_lets_pass(chosen: list[tuple[str, Any]]) -> None:
    config = with_keys(dict(chosen))
    assume(passes(config))
    runtime.DeepSpeedConfig(config)


@pytest.mark.parametrize("path", sorted((ROOT / "dsconfig").glob("*.json")), ids=lambda path: path.stem)
def test_deepspeed_takes_the_files_of_the_project(path: Path) -> None:
    def without_auto(block: dict[str, Any]) -> dict[str, Any]:
        pairs = {name: without_auto(value) if isinstance(value, dict) else value for name, value in block.items()}
        return {name: value for name, value in pairs.items() if value != "auto"}

    runtime.DeepSpeedConfig({**without_auto(read_config(path)), **BATCH})


# What is used where a key is absent, and what fills in `auto`


def default(function: Any, name: str) -> Any:
    return inspect.signature(function).parameters[name].default


def test_the_values_of_absent_keys_are_deepspeed_s_own() -> None:
    absent = runtime.DeepSpeedConfig({"train_batch_size": 1})
    assert absent.gradient_clipping == config_check.CLIPPING
    for optimizer in (DeepSpeedCPUAdam, FusedAdam):
        for name in ("lr", "betas", "eps", "weight_decay"):
            expected = config_check.DEFAULTS[f"optimizer.params.{name}"]
            assert list_of(default(optimizer, name)) == list_of(expected), name
    assert default(AdamW, "weight_decay") == config_check.TORCH_WEIGHT_DECAY
    for name in ("lr", "betas", "eps"):
        assert list_of(default(AdamW, name)) == list_of(config_check.DEFAULTS[f"optimizer.params.{name}"])
    assert default(lr_schedules.WarmupDecayLR, "warmup_max_lr") == config_check.DEFAULTS[config_check.MAX_RATE]
    assert default(lr_schedules.WarmupLR, "warmup_max_lr") is None
    assert default(lr_schedules.WarmupDecayLR, "warmup_num_steps") == 1_000
    assert default(lr_schedules.WarmupDecayLR, "total_num_steps") is inspect.Parameter.empty


def list_of(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def test_the_keys_of_a_schedule_are_those_that_deepspeed_s_class_has() -> None:
    for name, (_, keys) in config_check.SCHEDULES.items():
        parameters = inspect.signature(getattr(lr_schedules, name)).parameters
        assert keys == parameters.keys() - {"self", "optimizer", "last_batch_iteration"}


def test_an_optimizer_has_the_keys_that_are_kept() -> None:
    # DeepSpeed takes these three out before it makes the optimizer.
    own = {"torch_adam", "adam_w_mode", "fp32_optimizer_states", "max_grad_norm"}
    for optimizer in (DeepSpeedCPUAdam, FusedAdam):
        assert kept("optimizer.params") - own <= inspect.signature(optimizer).parameters.keys()
    assert config_check.OF_TORCH - own <= inspect.signature(AdamW).parameters.keys()


def test_accelerate_refuses_an_auto_that_nothing_fills_in() -> None:
    plugin = DeepSpeedPlugin({**BATCH, "zero_optimization": {"stage": 3, "sub_group_size": "auto"}})
    with pytest.raises(ValueError, match=r"`zero_optimization\.sub_group_size` not found in kwargs"):
        plugin.deepspeed_config_process(must_match=False)
    with pytest.raises(ValueError, match="Please specify the ZeRO optimization config"):
        DeepSpeedPlugin({**BATCH})
