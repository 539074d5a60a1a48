"""The keys of a DeepSpeed configuration against what the installed DeepSpeed itself knows and refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime import config as runtime

from zeropods.errors import UserError
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
