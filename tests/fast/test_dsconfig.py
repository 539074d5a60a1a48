"""dsconfig/ and the check that stands before every launch."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from zeropods.errors import UserError
from zeropods.train.arguments import CausalArguments, TextToSQLArguments
from zeropods.train.deepspeed import check_config, effective_config, lookup, read_config, technique

FOLDER = Path(__file__).resolve().parents[2] / "dsconfig"
EVERY = {path.stem: read_config(path) for path in sorted(FOLDER.glob("*.json"))}
CAUSAL = {name: config for name, config in EVERY.items() if name.startswith("causal_")}
CONFIGS = {name: config for name, config in EVERY.items() if name not in CAUSAL}
SCHEDULES = {"causal_zero2_offload": "cosine", "causal_zero3_offload": "linear"}
TWINS = {"zero1profiler": "zero1", "zero2profiler": "zero2", "zero3profiler": "zero3_offload"}
TECHNIQUES = {"zero1", "zero1_offload", "zero2", "zero2_offload", "zero3", "zero3_offload"}
ARGUMENTS = {**asdict(TextToSQLArguments(precision="fp32")), "world_size": 3}
CAUSAL_ARGUMENTS = {**asdict(CausalArguments(precision="fp32", max_train_steps=100)), "world_size": 3}
BUCKETS = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")
MODEST = 50_000_000


def edited(name: str, **changes: Any) -> dict[str, Any]:
    """A file's configuration with `block__key=value`; `None` takes a key out."""
    config = copy.deepcopy(EVERY[name])
    for path, value in changes.items():
        *blocks, key = path.split("__")
        place = config
        for block in blocks:
            place = place.setdefault(block, {})
        place[key] = value
        if value is None:
            del place[key]
    return config


def refusal(config: dict[str, Any], **arguments: Any) -> str:
    with pytest.raises(UserError) as refused:
        check_config(config, "some.json", {**ARGUMENTS, **arguments}, TextToSQLArguments.fp16_fault)
    said = str(refused.value)
    assert said.startswith("--deepspeed some.json: ")
    assert "\n" not in said
    return said


def refused_causal(name: str, changes: dict[str, Any], **arguments: Any) -> str:
    """What is said to a causal run with a changed file."""
    flags = {**CAUSAL_ARGUMENTS, "lr_scheduler_type": SCHEDULES.get(name, "linear"), **arguments}
    with pytest.raises(UserError) as refused:
        check_config(edited(name, **changes), "some.json", flags)
    return str(refused.value)


def test_every_technique_and_every_profiled_twin_is_there() -> None:
    assert set(CONFIGS) == TECHNIQUES | set(TWINS)
    assert set(CAUSAL) == set(SCHEDULES)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_file_passes_its_own_check(name: str) -> None:
    for precision in ("fp32", "bf16", "auto"):
        check_config(CONFIGS[name], name, {**ARGUMENTS, "precision": precision}, TextToSQLArguments.fp16_fault)


@pytest.mark.parametrize("name", EVERY)
def test_a_file_passes_the_check_of_a_causal_run_in_every_precision(name: str) -> None:
    flags = {**CAUSAL_ARGUMENTS, "lr_scheduler_type": SCHEDULES.get(name, "linear"), "optimizer_steps": 100}
    for precision in ("fp32", "bf16", "fp16", "auto"):
        check_config(EVERY[name], name, {**flags, "precision": precision}, CausalArguments.fp16_fault)


@pytest.mark.parametrize("name", EVERY)
def test_a_file_is_the_technique_of_its_name(name: str) -> None:
    assert technique(EVERY[name], world_size=3) == TWINS.get(name, name.removeprefix("causal_"))


def test_a_causal_file_is_its_techniques_with_an_optimizer_and_a_schedule() -> None:
    for name, config in CAUSAL.items():
        assert config["optimizer"]["type"] == "AdamW"
        rest = {key: value for key, value in config.items() if key not in ("optimizer", "scheduler", "tensorboard")}
        plain = CONFIGS[name.removeprefix("causal_")]
        assert rest == {key: value for key, value in plain.items() if key != "tensorboard"}
    assert {name: config["scheduler"]["type"] for name, config in CAUSAL.items()} == {
        "causal_zero2_offload": "WarmupCosineLR",
        "causal_zero3_offload": "WarmupDecayLR",
    }


@pytest.mark.parametrize("name", TWINS)
def test_twins_differ_in_the_profiler_block_and_in_nothing_else(name: str) -> None:
    profiled = copy.deepcopy(CONFIGS[name])
    assert profiled.pop("flops_profiler")["enabled"] is True
    assert profiled == CONFIGS[TWINS[name]]


def test_files_differ_in_the_zero_and_profiler_blocks_and_in_nothing_else() -> None:
    rest = [{k: v for k, v in c.items() if k not in ("zero_optimization", "flops_profiler")} for c in CONFIGS.values()]
    assert all(config == rest[0] for config in rest)


def test_buckets_are_equal_in_every_file_and_modest() -> None:
    sizes = {config["zero_optimization"][key] for config in EVERY.values() for key in BUCKETS[:2]}
    sizes |= {c["zero_optimization"].get(BUCKETS[2]) for c in EVERY.values()} - {None}
    assert len(sizes) == 1
    assert sizes.pop() <= MODEST


@pytest.mark.parametrize("name", CONFIGS)
def test_what_the_flags_decide_is_auto(name: str) -> None:
    config = CONFIGS[name]
    keys = ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"]
    assert {lookup(config, key) for key in [*keys, "bf16.enabled", "fp16.enabled"]} == {"auto"}
    assert not {"optimizer", "scheduler"} & set(config)
    assert (config["wall_clock_breakdown"], config["steps_per_print"]) == (False, 2000)


def test_stage_3_gathers_its_weights_on_saving() -> None:
    third = [c["zero_optimization"] for c in CONFIGS.values() if c["zero_optimization"]["stage"] == 3]
    assert len(third) == 3
    assert all(zero["stage3_gather_16bit_weights_on_model_save"] is True for zero in third)


def test_output_goes_into_the_run_folder_and_the_template_stays(tmp_path: Path) -> None:
    before = copy.deepcopy(CONFIGS["zero1profiler"])
    config = effective_config(CONFIGS["zero1profiler"], tmp_path)
    assert config["flops_profiler"]["output_file"] == str(tmp_path / "profile.txt")
    assert config["tensorboard"]["output_path"] == str(tmp_path / "tensorboard")
    assert CONFIGS["zero1profiler"] == before


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"zero_optimisation": {}}, "zero_optimisation: unknown to DeepSpeed; did you mean zero_optimization?"),
        ({"zero_optimization__reduce_bucket_sise": 1}, "zero_optimization.reduce_bucket_sise: unknown"),
        ({"zero_optimization__stage3_max_live_parameter": 1}, "did you mean stage3_max_live_parameters?"),
        ({"zero_optimization__offload_optimizer": {"devise": "cpu"}}, "offload_optimizer.devise: unknown"),
        ({"zero_optimization__offload_param": {"device": "cpu", "pinned": 1}}, "offload_param.pinned: unknown"),
        ({"flops_profiler": {"profile_stop": 1}}, "flops_profiler.profile_stop: unknown"),
        ({"bf16__enable": True}, "bf16.enable: unknown to DeepSpeed; did you mean enabled?"),
        ({"fp16": {"xyz": 1}}, "expected auto_cast, consecutive"),
        ({"tensorboard__jobname": "x"}, "tensorboard.jobname: unknown to DeepSpeed; did you mean job_name?"),
        ({"zero_optimization": True}, "zero_optimization True; expected an object"),
        ({"bf16": "auto"}, "bf16 'auto'; expected an object"),
    ],
)
def test_unknown_keys_are_named_with_the_nearest_known_one(changes: dict[str, Any], said: str) -> None:
    assert said in refusal(edited("zero3", **changes))


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("zero1", {"zero_optimization__stage": 4}, "zero_optimization.stage 4; expected 0, 1, 2 or 3"),
        ("zero1", {"zero_optimization__stage": "2"}, "zero_optimization.stage '2'; expected"),
        ("zero1", {"zero_optimization__stage": True}, "zero_optimization.stage True; expected"),
        ("zero2", {"zero_optimization__offload_param": {"device": "cpu"}}, "offload_param with stage 2: has no effect"),
        ("zero1_offload", {"zero_optimization__stage": 0}, "offload_optimizer with stage 0: has no effect"),
        (
            "zero1",
            {"zero_optimization__offload_optimizer": {"device": "gpu"}},
            "device 'gpu'; expected none, cpu, nvme",
        ),
    ],
)
def test_offload_without_its_stage_is_refused(name: str, changes: dict[str, Any], said: str) -> None:
    assert said in refusal(edited(name, **changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train_micro_batch_size_per_gpu": 16}, "per_gpu 16, --per_device_train_batch_size 32; write"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps 4, --gradient_accumulation_steps 1; write"),
        ({"gradient_clipping": 0.5}, "gradient_clipping 0.5, --max_grad_norm 1.0; write"),
        ({"gradient_clipping": None}, "gradient_clipping absent: would not clip, --max_grad_norm 1.0"),
        ({"train_batch_size": 64}, "train_batch_size 64, 32 rows x 1 passes x 3 processes = 96; write"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}, "optimizer.params.lr 1e-05, --learning_rate 0.0003"),
        ({"bf16__enabled": True}, "bf16.enabled true, --precision fp32"),
        ({"fp16": {"enabled": True}}, "T5's activations overflow FP16"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": 1e-6}}}, "eps 1e-06, AdamW's here is 1e-08"),
    ],
)
def test_what_contradicts_the_flags_is_refused_with_both_values(changes: dict[str, Any], said: str) -> None:
    assert said in refusal(edited("zero1", **changes))


@pytest.mark.parametrize("block", [{}, {"enabled": False}])
def test_bf16_that_the_file_does_not_switch_on_is_refused(block: dict[str, bool]) -> None:
    assert "--precision bf16" in refusal(edited("zero1", bf16=block), precision="bf16")


def test_an_optimizer_block_that_takes_the_place_of_scaled_rates_is_refused() -> None:
    config = edited("zero1", optimizer={"type": "AdamW", "params": {"lr": "auto"}})
    assert "takes the place of --scaled_rates" in refusal(config, scaled_rates=True)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("zero1", {"fp16__enabled": True}, "fp16.enabled true, --precision fp32"),
        ("causal_zero2_offload", {"optimizer__params__lr": 1e-3}, "params.lr 0.001, --learning_rate 5e-05"),
        ("causal_zero2_offload", {"optimizer__params__lr": None}, "lr absent, DeepSpeed would take 0.001"),
        ("causal_zero2_offload", {"optimizer__params__betas": [0.9, 0.95]}, "betas [0.9, 0.95], the flags say"),
        ("causal_zero2_offload", {"optimizer__params__weight_decay": 0.1}, "weight_decay 0.1, --weight_decay 0.01"),
        ("causal_zero2_offload", {"scheduler__params__warmup_num_steps": 10}, "10, --num_warmup_steps 0"),
        ("causal_zero2_offload", {"scheduler__params__total_num_steps": 7}, "7, --max_train_steps 100"),
        ("causal_zero2_offload", {"scheduler__params__total_num_steps": None}, "absent, which it needs"),
        ("causal_zero2_offload", {"scheduler__params__cos_min_ratio": "auto"}, 'cos_min_ratio "auto": nothing fills'),
        ("causal_zero2_offload", {"scheduler__params__warmup_max_lr": "auto"}, "unknown to WarmupCosineLR"),
        ("causal_zero3_offload", {"scheduler__params__warmup_max_lr": 1.0}, "1.0, --learning_rate 5e-05"),
        ("causal_zero3_offload", {"scheduler__params__warmup_num_steps": None}, "DeepSpeed would take 1000"),
        ("causal_zero3_offload", {"gradient_clipping": 0.5}, "0.5, --max_grad_norm 1.0"),
        ("causal_zero3_offload", {"train_batch_size": 64}, "64, 4 rows x 4 passes x 3 processes = 48"),
    ],
)
def test_what_contradicts_a_causal_run_is_refused_with_both_values(
    name: str, changes: dict[str, Any], said: str
) -> None:
    assert said in refused_causal(name, changes)


def test_a_schedule_of_another_name_is_refused_with_both() -> None:
    said = refused_causal("causal_zero2_offload", {}, lr_scheduler_type="linear")
    assert "scheduler.type 'WarmupCosineLR', --lr_scheduler_type linear; give --lr_scheduler_type cosine" in said


def test_the_steps_of_a_run_win_over_what_the_flags_leave_open() -> None:
    changes = {"scheduler__params__total_num_steps": 100}
    said = refused_causal("causal_zero3_offload", changes, max_train_steps=-1, optimizer_steps=36)
    assert "total_num_steps 100, the run has 36 optimizer steps" in said


def test_values_that_agree_with_the_flags_pass() -> None:
    config = edited(
        "zero3_offload",
        train_micro_batch_size_per_gpu=32,
        train_batch_size=96,
        gradient_clipping=1,
        optimizer={"type": "AdamW", "params": {"lr": 3e-4}},
        bf16={"enabled": False},
    )
    check_config(config, "some.json", ARGUMENTS)


def test_flags_that_are_not_known_yet_are_not_compared() -> None:
    check_config(edited("zero1", train_batch_size=5, gradient_clipping=0.1), "some.json", {})


@pytest.mark.parametrize(("text", "said"), [("{", "not JSON"), ("[]", "expected a JSON object")])
def test_a_file_that_is_no_json_object_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(UserError, match=said):
        read_config(tmp_path / "bad.json")


def test_the_effective_configuration_is_plain_json(tmp_path: Path) -> None:
    config = effective_config(CONFIGS["zero3profiler"], tmp_path)
    assert json.loads(json.dumps(config)) == config


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"scheduler": {"type": "OneCycle", "params": {}}}, "scheduler.type 'OneCycle'; expected WarmupLR"),
        ({"optimizer": {"type": "Adamm", "params": {}}}, "optimizer.type 'Adamm'; expected Adam, AdamW"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cubic"}}},
            "warmup_type 'cubic'; expected linear",
        ),
        (
            {"scheduler": {"type": "WarmupCosineLR", "params": {"cos_min_ratio": "x"}}},
            "cos_min_ratio 'x'; expected 0 to 1",
        ),
    ],
)
def test_what_deepspeed_would_end_with_a_traceback_on_is_one_line(block: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        check_config(block, "file.json", {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"gradient_clipping": NaN}', "NaN is no number"),
        ('{"steps_per_print": 1, "steps_per_print": 2}', "'steps_per_print' stands there twice"),
    ],
)
def test_json_that_other_readers_take_is_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(UserError, match=said):
        read_config(path)
