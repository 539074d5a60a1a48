"""dsconfig/, the technique of a configuration, and the check that stands before every launch."""

import copy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.fast.plan.test_plan_formulas import recorded
from tests.made import a_record, as_record
from zeropods.errors import UserError
from zeropods.launch.script_call import ScriptCall, train_arguments
from zeropods.measure.planned_runs import planned_memory
from zeropods.techniques import TECHNIQUES, Technique, color_of, is_offloaded, technique_of, technique_text
from zeropods.train.deepspeed_config import read_config
from zeropods.train.deepspeed_config_check import check_config
from zeropods.train.flags import SCRIPTS, CausalArguments, TextToSQLArguments

FOLDER = Path(__file__).resolve().parents[3] / "dsconfig"
EVERY = {path.stem: read_config(path) for path in sorted(FOLDER.glob("*.json"))}
CAUSAL = {name: config for name, config in EVERY.items() if name.startswith("causal_")}
CONFIGS = {name: config for name, config in EVERY.items() if name not in CAUSAL}
SCHEDULES = {"causal_zero2_offload": "cosine", "causal_zero3_offload": "linear"}
TWINS = {technique.profiled: technique.name for technique in TECHNIQUES if technique.profiled}
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


def refusal(name: str, changes: dict[str, Any], **arguments: Any) -> str:
    """The line that is said to a run with a changed file."""
    flags: dict[str, Any] = {**ARGUMENTS, **arguments}
    fp16_fault = TextToSQLArguments.fp16_fault
    if name in CAUSAL:
        flags = {**CAUSAL_ARGUMENTS, "lr_scheduler_type": SCHEDULES[name], **arguments}
        fp16_fault = CausalArguments.fp16_fault
    with pytest.raises(UserError) as refused:
        check_config(edited(name, **changes), "some.json", flags, fp16_fault)
    said = str(refused.value)
    assert said.startswith("--deepspeed some.json: ") and "\n" not in said
    return said


def test_every_technique_has_a_colour_that_no_other_has() -> None:
    colors = [technique.color for technique in TECHNIQUES]
    assert len({*colors, color_of("custom")}) == len(TECHNIQUES) + 1


def test_every_technique_and_every_profiled_twin_is_there() -> None:
    files = {technique.file for technique in TECHNIQUES} - {None}
    assert {FOLDER / f"{name}.json" for name in CONFIGS} == files | {FOLDER / f"{twin}.json" for twin in TWINS}
    assert set(CAUSAL) == set(SCHEDULES)


@pytest.mark.parametrize("name", EVERY)
def test_a_file_is_the_technique_of_its_name_and_passes_its_own_check(name: str) -> None:
    assert technique_of(EVERY[name], world_size=3) == TWINS.get(name, name.removeprefix("causal_"))
    flags = {**CAUSAL_ARGUMENTS, "lr_scheduler_type": SCHEDULES.get(name, "linear"), "optimizer_steps": 100}
    for precision in ("fp32", "bf16", "fp16", "auto"):
        check_config(EVERY[name], name, {**flags, "precision": precision}, CausalArguments.fp16_fault)
        if name in CONFIGS and precision != "fp16":
            check_config(EVERY[name], name, {**ARGUMENTS, "precision": precision}, TextToSQLArguments.fp16_fault)


@pytest.mark.parametrize(
    ("config", "ranks", "name"),
    [
        (None, 1, "none"),
        (None, 2, "ddp"),
        ({}, 2, "custom"),
        (edited("zero3", zero_optimization__offload_param={"device": "cpu"}), 2, "custom"),
        (edited("zero3++", zero_optimization__zero_hpz_partition_size=8), 16, "zero3++"),
        (edited("zero3++", zero_optimization__zero_hpz_partition_size=1), 4, "zero3"),
        (edited("zero3", zero_optimization__zero_quantized_gradients=True), 4, "zero3++"),
        (edited("zero3++", zero_optimization__offload_param={"device": "cpu"}), 4, "custom"),
        (edited("zero3++", zero_optimization__zero_quantized_nontrainable_weights=True), 4, "custom"),
        (edited("zero2", zero_optimization__zero_quantized_gradients=True), 4, "custom"),
        (edited("zero2", zero_optimization__offload_optimizer={"device": "none"}), 1, "zero2"),
        (
            edited("zero3", zero_optimization__zero_quantized_weights=False, tensor_parallel={"autotp_size": 1}),
            2,
            "zero3",
        ),
    ],
)
def test_a_technique_is_told_from_the_configuration_and_the_ranks(config: Any, ranks: int, name: str) -> None:
    assert technique_of(config, ranks) == name


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda technique: technique.name)
def test_the_flags_of_a_technique_ask_for_it(technique: Technique, script: str) -> None:
    """Otherwise a sweep would train something else in its place, such as DDP."""
    call = ScriptCall.of(script, train_arguments(**technique.flags))
    config = None
    if call.deepspeed is not None:
        config = call.deepspeed.config
    ranks = 1 if technique.is_alone else 2
    assert call.parsed is not None
    assert call.parsed.technique(config, ranks) == technique.name


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("zero3_offload", {"zero_optimization__offload_param__device": "nvme"}, "custom (offload_param.device nvme)"),
        ("zero2_offload", {"zero_optimization__offload_optimizer__ratio": 0.5}, "custom (offload_optimizer.ratio 0.5)"),
        (
            "zero3_offload",
            {"zero_optimization__zero_quantized_weights": True, "zero_optimization__zero_hpz_partition_size": 4},
            "custom (zero_quantized_weights true, zero_hpz_partition_size 4)",
        ),
        ("zero2", {"zero_optimization__zero_quantized_gradients": True}, "custom (zero_quantized_gradients true)"),
        ("zero1", {"tensor_parallel": {"autotp_size": 2}}, "custom (tensor_parallel.autotp_size 2)"),
        ("zero3", {"zero_optimization__mics_shard_size": 2}, "custom (mics_shard_size 2)"),
    ],
)
def test_what_goes_beyond_a_technique_is_custom_and_its_keys_are_said(
    name: str, changes: dict[str, Any], text: str
) -> None:
    config = edited(name, **changes)
    assert technique_of(config, world_size=4) == "custom"
    assert technique_text("custom", config) == text
    assert is_offloaded(config, "offload_optimizer") == name.endswith("_offload")
    # What a run is called is shown by its record, and nothing is planned for it.
    assert as_record(a_record(technique="custom", deepspeed=config)).technique_text == text
    assert planned_memory(recorded(technique=name, deepspeed=EVERY[name])) is not None
    assert planned_memory(recorded(technique="custom", deepspeed=config)) is None


def test_which_keys_of_zeropp_a_run_had_is_said_with_its_technique() -> None:
    config = edited("zero3++", zero_optimization__zero_hpz_partition_size=2)
    assert technique_text("zero3++", config) == "zero3++ (zero_hpz_partition_size 2)"
    config = edited("zero3", zero_optimization__zero_quantized_weights=True)
    assert technique_text("zero3++", config) == "zero3++ (zero_quantized_weights true)"


def test_a_second_partition_within_the_pod_is_planned_where_a_run_had_one() -> None:
    quantized = edited("zero3", zero_optimization__zero_quantized_weights=True)
    divided_twice = edited("zero3++", zero_optimization__zero_hpz_partition_size=2)
    for config, is_planned in ((quantized, False), (divided_twice, True)):
        planned = planned_memory(recorded(technique="zero3++", deepspeed=config))
        assert planned is not None
        second = [term for term in planned.terms if term.name.startswith("second partition")]
        assert bool(second) == is_planned


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_file_is_its_techniques_with_an_optimizer_and_a_schedule(name: str) -> None:
    other = ("optimizer", "scheduler", "tensorboard")
    plain = {key: value for key, value in CONFIGS[name.removeprefix("causal_")].items() if key not in other}
    assert {key: value for key, value in CAUSAL[name].items() if key not in other} == plain
    assert CAUSAL[name]["optimizer"]["type"] == "AdamW"


def test_files_differ_in_the_zero_and_profiler_blocks_and_in_nothing_else() -> None:
    rest = [{k: v for k, v in c.items() if k not in ("zero_optimization", "flops_profiler")} for c in CONFIGS.values()]
    assert all(config == rest[0] for config in rest)
    sizes = {config["zero_optimization"].get(key) for config in EVERY.values() for key in BUCKETS} - {None}
    assert len(sizes) == 1 and sizes.pop() <= MODEST


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        (
            "zero3",
            {"zero_optimisation": {}},
            "zero_optimisation: unknown to DeepSpeed; did you mean zero_optimization?",
        ),
        ("zero3", {"zero_optimization": True}, "zero_optimization true; expected an object"),
        ("zero1", {"zero_optimization__stage": 4}, "zero_optimization.stage 4; expected 0, 1, 2 or 3"),
        ("zero2", {"zero_optimization__offload_param": {"device": "cpu"}}, "offload_param with stage 2: has no effect"),
        ("zero1", {"train_micro_batch_size_per_gpu": 16}, "per_gpu 16, --per_device_train_batch_size 32; write"),
        ("zero1", {"train_batch_size": 64}, "train_batch_size 64, 32 rows x 1 passes x 3 processes = 96; write"),
        ("zero1", {"bf16__enabled": True}, "bf16.enabled true, --precision fp32"),
        ("zero1", {"fp16": {"enabled": True}}, "T5's activations overflow FP16"),
        ("zero1", {"optimizer": {"params": {"lr": 1e-5}}}, "optimizer.params.lr 1e-05, --learning_rate 0.0003"),
        ("zero1", {"optimizer": {"params": {"lr": "auto", "eps": 1e-6}}}, "eps 1e-06, AdamW here uses 1e-08"),
        ("zero1", {"scheduler": {"type": "OneCycle", "params": {}}}, "scheduler.type 'OneCycle'; expected WarmupLR"),
        ("causal_zero2_offload", {"optimizer__params__betas": [0.9, 0.95]}, "betas [0.9, 0.95], the flags give"),
        ("causal_zero2_offload", {"scheduler__params__total_num_steps": None}, "missing, but DeepSpeed needs it"),
        ("causal_zero2_offload", {"scheduler__params__cos_min_ratio": "auto"}, 'cos_min_ratio "auto": nothing fills'),
        ("causal_zero2_offload", {"scheduler__params__warmup_max_lr": 1.0}, "unknown to WarmupCosineLR"),
    ],
)
def test_what_is_wrong_or_contradicts_the_flags_is_refused(name: str, changes: dict[str, Any], said: str) -> None:
    assert said in refusal(name, changes)


@pytest.mark.parametrize(
    ("name", "changes", "flags", "said"),
    [
        ("zero1", {"bf16": {"enabled": False}}, {"precision": "bf16"}, "bf16.enabled false, --precision bf16"),
        ("zero1", {"optimizer": {}}, {"scaled_rates": True}, "overrides --scaled_rates"),
        (
            "zero1",
            {"gradient_clipping": None},
            {"max_grad_norm": 0.5},
            "gradient_clipping missing, so DeepSpeed would use 1.0; --max_grad_norm 0.5",
        ),
        ("causal_zero2_offload", {}, {"lr_scheduler_type": "linear"}, "give --lr_scheduler_type cosine"),
        (
            "causal_zero3_offload",
            {"scheduler__params__total_num_steps": 100},
            {"max_train_steps": -1, "optimizer_steps": 36},
            "total_num_steps 100, the run has 36 optimizer steps",
        ),
    ],
)
def test_other_flags_contradict_a_file(name: str, changes: dict[str, Any], flags: dict[str, Any], said: str) -> None:
    assert said in refusal(name, changes, **flags)


def test_values_that_agree_with_the_flags_pass_and_unknown_flags_are_not_compared() -> None:
    config = edited(
        "zero3_offload",
        train_micro_batch_size_per_gpu=32,
        train_batch_size=96,
        gradient_clipping=1,
        optimizer={"type": "AdamW", "params": {"lr": 3e-4}},
        bf16={"enabled": False},
    )
    check_config(config, "some.json", ARGUMENTS)
    check_config(edited("zero1", train_batch_size=5, gradient_clipping=0.1), "some.json", {})


def test_a_file_that_is_no_json_object_is_refused(tmp_path: Path) -> None:
    for text, said in (("{", "broken JSON"), ("[]", "should be an object")):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(UserError, match=said):
            read_config(tmp_path / "bad.json")
