"""The table of keys against what the installed DeepSpeed itself knows and asks for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from deepspeed.monitor.config import TensorBoardConfig
from deepspeed.profiling import constants as profiler
from deepspeed.runtime import config as runtime
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig

from zeropods.train.deepspeed import BLOCKS, TOP_LEVEL

MODELS = {
    "zero_optimization": DeepSpeedZeroConfig,
    "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
    "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
    "bf16": DeepSpeedBF16Config,
    "fp16": DeepSpeedFP16Config,
    "tensorboard": TensorBoardConfig,
}


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

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()

    def __copy__(self) -> Asked:
        return Asked(self.items(), asked=self.asked)


@pytest.mark.parametrize("block", MODELS)
def test_a_block_has_the_fields_of_deepspeeds_model(block: str) -> None:
    fields = MODELS[block].model_fields
    assert BLOCKS[block] == set(fields) | {field.alias for field in fields.values() if field.alias}


def test_the_profilers_block_has_deepspeeds_constants() -> None:
    keys = {
        value
        for name, value in vars(profiler).items()
        if name.startswith("FLOPS_PROFILER_") and not name.endswith(("_DEFAULT", "_FORMAT"))
    }
    assert BLOCKS["flops_profiler"] == keys


def test_the_top_level_has_what_deepspeed_asks_for_and_does_not_refuse() -> None:
    asked: set[str] = set()
    runtime.DeepSpeedConfig(Asked(train_batch_size=1, train_micro_batch_size_per_gpu=1, asked=asked))
    assert asked - set(runtime._REMOVED_TOP_LEVEL_CONFIG_KEYS) == TOP_LEVEL
