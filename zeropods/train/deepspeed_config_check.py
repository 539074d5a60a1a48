"""The check of a DeepSpeed configuration, before anything starts.

A launch, a sweep and each run ask for it. A configuration passes where a run with it is right to
the end: `deepspeed_keys` says that of each key by itself, this module of keys together and beside
the flags. All faults are reported at once, each with what to do about it. Nothing here imports
torch or DeepSpeed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from zeropods.errors import UserError
from zeropods.techniques import HPZ, QUANTIZED, QUANTIZED_GRADIENTS, is_offloaded, lookup
from zeropods.train.deepspeed_config import Config, slots_of_pod
from zeropods.train.deepspeed_keys import COUNT, KEYS, NAMED_WITHOUT, POSITIVE, REMOVE, Key
from zeropods.train.flags import PASSES, ROWS, RunArguments

OPTIMIZER = "optimizer.params"
SCHEDULER = "scheduler.params"
BY_TYPE = (OPTIMIZER, SCHEDULER)
"""Blocks whose keys depend on the `type` beside them."""
MAX_RATE = f"{SCHEDULER}.warmup_max_lr"
EPSILON = 1e-8
"""AdamW's epsilon in every run."""
CLIPPING = 1.0
"""The norm to which DeepSpeed clips gradients where the key is absent."""
DEFAULTS: dict[str, Any] = {
    "gradient_accumulation_steps": 1,
    "gradient_clipping": CLIPPING,
    f"{OPTIMIZER}.lr": 1e-3,
    f"{OPTIMIZER}.betas": [0.9, 0.999],
    f"{OPTIMIZER}.eps": EPSILON,
    f"{OPTIMIZER}.weight_decay": 0.0,
    MAX_RATE: 1e-3,
    f"{SCHEDULER}.warmup_num_steps": 1_000,
    f"{SCHEDULER}.total_num_steps": None,
}
"""Values that DeepSpeed 0.19 silently uses where a key is absent; None: the key must be there. The
value for `gradient_accumulation_steps` is accelerate's."""
TORCH_WEIGHT_DECAY = 0.01
"""The weight decay where its key is absent beside `torch_adam`, which chooses PyTorch's AdamW."""
SAME = {
    "train_micro_batch_size_per_gpu": [ROWS],
    "gradient_accumulation_steps": [PASSES],
    "gradient_clipping": ["max_grad_norm"],
    f"{OPTIMIZER}.lr": ["learning_rate"],
    f"{OPTIMIZER}.weight_decay": ["weight_decay"],
    MAX_RATE: ["learning_rate"],
    f"{SCHEDULER}.warmup_num_steps": ["warmup_steps", "num_warmup_steps"],
    f"{SCHEDULER}.total_num_steps": ["max_steps", "max_train_steps"],
}
"""Keys that set the same value as a flag, each with the names that scripts have for that flag."""
ADAM = ("adam", "adamw")
"""Types of optimizer that are AdamW in DeepSpeed, in small letters."""
OF_TORCH = frozenset({"lr", "betas", "eps", "weight_decay", "torch_adam", "adam_w_mode", "amsgrad"})
"""Keys of an optimizer with `torch_adam`."""
WARMUP = frozenset({"warmup_num_steps", "warmup_type"})
"""Keys of the warm-up, which each schedule takes."""
RATES = WARMUP | {"warmup_min_lr", "warmup_max_lr"}


class Schedule(NamedTuple):
    """What is known of a schedule of DeepSpeed that `--lr_scheduler_type` has as well."""

    flag: str
    """The schedule's name as a value of `--lr_scheduler_type`."""
    parameters: frozenset[str]
    """Keys that it takes."""


SCHEDULES = {
    "WarmupLR": Schedule("constant_with_warmup", RATES),
    "WarmupDecayLR": Schedule("linear", RATES | {"total_num_steps"}),
    "WarmupCosineLR": Schedule(
        "cosine", WARMUP | {"total_num_steps", "warmup_min_ratio", "cos_min_ratio"}
    ),
}
"""Schedules by DeepSpeed's name."""
STEPS = ("optimizer_steps", "max_steps", "max_train_steps")
"""Names of the number of optimizer steps: of the run, once its data are known, and of the flags."""
OFFLOADS = (("offload_optimizer", 1, "1, 2 or 3"), ("offload_param", 3, "3"))
"""Blocks that offload; the least stage that each needs, and in words all such stages."""
PROFILE_STEP = 1
"""The step after which DeepSpeed profiles where the key is absent."""
PRECISIONS = ("fp32", "bf16", "fp16")
AUTO = ' "auto": nothing fills it in; give a value, or leave it out'
MOST_SHOWN = 60
"""Most characters of a value in a message."""
LIKE_COMMENTS = ("_", "/", "#", "$")
"""First characters of the keys that people use as comments, which JSON does not have."""
NEAR = 0.8
"""Least similarity of a misspelled key to the one that is offered: `comms_config` is no misspelled
`comms_logger`."""
BLOCKS = frozenset(place.rpartition(".")[0] for place in KEYS) - {""}
"""Objects whose keys are known."""


def check_run(config: Config, flags: RunArguments, ranks: int, **known: object) -> None:
    """Check the configuration of a run of one of this project's scripts, in one of its processes.

    Args:
        ranks: number of processes.
        known: what else is known of the run, see `check_config`.

    Raises:
        UserError: a run would not follow the configuration rightly to its end.
    """
    if flags.deepspeed is None:
        return
    # A script without a flag of that name has the value that holds for it.
    arguments = {
        **asdict(flags),
        "adam_beta1": flags.adam_beta1,
        "world_size": ranks,
        **known,
        "pod_slots": (slots_of_pod(ranks),),
    }
    check_config(config, flags.deepspeed, arguments, flags.fp16_fault)


def check_config(
    config: Config,
    path: str | Path,
    arguments: Mapping[str, Any],
    fp16_fault: str | None = None,
    *,
    ours: bool = True,
) -> None:
    """Refuse a configuration that a run would not follow rightly to its end.

    Args:
        path: where the configuration was read from, for messages.
        arguments: the script's flags by name, typed; where they are known, also `world_size`, the
            number of processes; `pod_slots`, the number of processes of each pod, as a tuple;
            `has_no_gpu`, whether the ranks are known to have none; and `optimizer_steps`. Missing
            ones are not compared.
        fp16_fault: why the model does not train in FP16; None where it does.
        ours: whether the script is one of this project's. Of others it is not known what they can
            do, so that only names, types and contradictions are checked.

    Raises:
        UserError: the message has all faults.
    """
    faults: dict[str, str] = {}
    for place, fault in _faults(config, arguments, fp16_fault, ours=ours):
        # What is wrong with a key in itself comes before what it contradicts.
        faults.setdefault(place, fault)
    lines = []
    for place, fault in faults.items():
        shown_place = place if place.isprintable() else _shown(place)
        lines.append(f"{shown_place}{fault}")
    if len(lines) == 1:
        raise UserError(f"--deepspeed {path}: {lines[0]}")
    if lines:
        numbered = " ".join(f"({number}) {line}" for number, line in enumerate(lines, 1))
        raise UserError(f"--deepspeed {path}: {len(lines)} faults: {numbered}")


Faults = Iterator[tuple[str, str]]
"""Places of keys, with the blocks around them (`zero_optimization.stage`), each with the rest of
the message: the value, what is wrong, and what to do."""


def _faults(
    config: Config, arguments: Mapping[str, Any], fp16_fault: str | None, *, ours: bool
) -> Faults:
    """All faults; of some keys there are several."""
    yield from _faults_of_keys(config, "", ours=ours)
    if ours:
        yield from _missing(config)
        yield from _faults_of_stage_0(config, arguments)
        yield from _faults_of_optimizer(config)
        yield from _faults_of_zeropp(config, arguments)
    yield from _faults_of_zero(config, arguments)
    yield from _faults_of_precision(config, arguments, fp16_fault)
    yield from _faults_of_schedule(config, arguments)
    yield from _faults_of_profiler(config, arguments)
    yield from _contradictions(config, arguments)


# Each key by itself


def _faults_of_keys(block: Config, before: str, *, ours: bool) -> Faults:
    """Faults of each key by itself, in a block and those within it.

    They are unknown names, wrong types, `auto` that nothing fills in, and what is refused.

    Args:
        before: place of the block with a dot after it; empty at the top.
        ours: whether one of this project's scripts reads it, which fills in what is `auto`.
    """
    parent = before.removesuffix(".")
    for name, value in block.items():
        place = f"{before}{name}"
        key = KEYS.get(place)
        if key is None:
            # Which keys a block of `BY_TYPE` has is checked with the type beside it.
            if parent not in BY_TYPE:
                yield place, f": {_unknown(name, before)}"
        elif value == "auto":
            # What other scripts fill in is not known, except in a block of `BY_TYPE`.
            is_checked = ours or parent in BY_TYPE
            if is_checked and not key.fills:
                yield place, AUTO
        else:
            # Those of a block within it too.
            yield from _faults_of_value(place, key, value, ours=ours)


def _faults_of_value(place: str, key: Key, value: object, *, ours: bool) -> Faults:
    """Faults of a value that is not `auto`, or those within it where it is an object without any
    fault of its own."""
    fault = _fault_of(key, value, ours=ours)
    if fault is not None:
        yield place, fault
    elif isinstance(value, dict) and place in BLOCKS:
        yield from _faults_of_keys(value, f"{place}.", ours=ours)
    elif isinstance(value, dict) and ours:
        yield from _autos(value, f"{place}.")


def _fault_of(key: Key, value: object, *, ours: bool) -> str | None:
    """What is wrong with a value that is not `auto`; None where nothing is."""
    is_refused = key.verdict == "refused"
    if is_refused and key.unless.holds(value):
        return None
    if not key.kind.holds(value):
        return f" {_shown(value)}; expected {key.kind.words}"
    if not is_refused or not ours:
        return None
    if isinstance(value, dict):
        return f": {key.because}; {key.remedy}"
    return f" {_shown(value)}: {key.because}; {key.remedy}"


def _autos(block: Config, before: str) -> Faults:
    """Each `auto` in a block whose keys are not known: accelerate fails there too."""
    for name, value in block.items():
        if value == "auto":
            yield f"{before}{name}", AUTO
        elif isinstance(value, dict):
            yield from _autos(value, f"{before}{name}.")


def _unknown(name: str, before: str) -> str:
    """What is wrong with a name that DeepSpeed does not know in a block, and what to do."""
    if name.startswith(LIKE_COMMENTS):
        return "taken for a key, since JSON has no comments; remove it"
    right_places = []
    for place, key in KEYS.items():
        if place.endswith(f".{name}") and key.verdict == "works":
            right_places.append(place)
    if len(right_places) == 1:
        return f"unknown to DeepSpeed here; its place is {right_places[0]}"
    known = [place.removeprefix(before) for place in KEYS if place.startswith(before)]
    near = get_close_matches(name, known, 1, NEAR)
    remedy = f"did you mean {near[0]}?" if near else REMOVE
    return f"unknown to DeepSpeed; {remedy}"


# What must be there


def _missing(config: Config) -> Faults:
    """What accelerate or DeepSpeed does not begin without."""
    if "zero_optimization" not in config:
        write = 'write "zero_optimization": {"stage": 1}, or leave out --deepspeed for DDP'
        yield "zero_optimization", f" missing; {write}"
    if not {"train_batch_size", "train_micro_batch_size_per_gpu"} & config.keys():
        yield "train_micro_batch_size_per_gpu", ' missing; write "auto"'


# Keys together


def _faults_of_stage_0(config: Config, arguments: Mapping[str, Any]) -> Faults:
    """DeepSpeed without ZeRO, whose BF16 optimizer gives other losses than all techniques here."""
    precision = arguments.get("precision", "fp32")
    stage = _object(config, "zero_optimization").get("stage", 0)
    if "zero_optimization" in config and stage == 0 and precision != "fp32":
        remedy = "write 1, 2 or 3, or give --precision fp32"
        fault = f" 0, --precision {precision}: is right in FP32 only; {remedy}"
        yield "zero_optimization.stage", fault


def _faults_of_zero(config: Config, arguments: Mapping[str, Any]) -> Faults:
    """Keys of ZeRO that do nothing at a stage, that do not go together, or that are given twice."""
    zero = _object(config, "zero_optimization")
    stage = zero.get("stage", 0)
    # A stage that is none is a fault of that key; the others are then seen as without ZeRO.
    known_stage = stage if KEYS["zero_optimization.stage"].kind.holds(stage) else 0
    for name, least, stages in OFFLOADS:
        if is_offloaded(config, name) and known_stage < least:
            fault = f" with stage {stage}: has no effect; needs stage {stages}"
            yield f"zero_optimization.{name}", fault
    offloads_a_part = _object(zero, "offload_optimizer").get("ratio", 1) != 1
    if offloads_a_part and known_stage < 3:
        fault = f" with stage {stage}: needs stage 3; remove it"
        yield "zero_optimization.offload_optimizer.ratio", fault
    wants_no_norm = zero.get("compute_grad_norm") is False
    if wants_no_norm and _needs_norm(config, known_stage, arguments):
        fault = " false: needs stage 1 or 2, --max_grad_norm 0 and no offload; remove it"
        yield "zero_optimization.compute_grad_norm", fault
    for name in NAMED_WITHOUT:
        full_name = f"stage3_{name}"
        if name in zero and full_name in zero:
            yield f"zero_optimization.{name}", f": {full_name} is the same key; remove one of them"


def _needs_norm(config: Config, stage: int, arguments: Mapping[str, Any]) -> bool:
    """Whether DeepSpeed needs the norm of the gradients, so that it must compute the norm."""
    clipping = config.get("gradient_clipping", CLIPPING)
    if clipping == "auto":
        clipping = arguments.get("max_grad_norm", 0)
    return stage not in (1, 2) or bool(clipping) or is_offloaded(config, "offload_optimizer")


def _faults_of_zeropp(config: Config, arguments: Mapping[str, Any]) -> Faults:
    """Keys of ZeRO++ that do not fit other keys, the machine or the pods."""
    quantized = [key for key in QUANTIZED if lookup(config, key) is True]
    switched_on = [*quantized]
    hpz_size = lookup(config, HPZ)
    divides_within_pods = hpz_size == "auto" or (POSITIVE.holds(hpz_size) and hpz_size > 1)
    if divides_within_pods:
        switched_on.append(HPZ)
    for key in switched_on:
        fault = _fault_beside(config, key)
        if fault is not None:
            yield key, f" {_shown(lookup(config, key))} {fault}"
    if arguments.get("has_no_gpu"):
        for key in quantized:
            fault = "DeepSpeed quantizes by operations of CUDA, and there is no GPU here; remove it"
            yield key, f" true: {fault}"
    if divides_within_pods and "pod_slots" in arguments:
        fault = _fault_of_hpz_size(hpz_size, sorted(set(arguments["pod_slots"])))
        if fault is not None:
            yield HPZ, f" {_shown(hpz_size)}: {fault}"


def _fault_beside(config: Config, key: str) -> str | None:
    """What in ZeRO's block does not go together with a key of ZeRO++ that is switched on; None
    where nothing is."""
    stage = lookup(config, "zero_optimization.stage") or 0
    if stage != 3:
        return f"with stage {_shown(stage)}: has no effect; needs stage 3"
    for name in ("offload_optimizer", "offload_param"):
        if is_offloaded(config, name):
            return f"with {name}: nobody has tried them together; remove one of them"
    sends_whole = lookup(config, "zero_optimization.reduce_scatter") is False
    if key == QUANTIZED_GRADIENTS and sends_whole:
        return "with reduce_scatter false: DeepSpeed ends there; remove reduce_scatter"
    return None


def _fault_of_hpz_size(size: float | str, slots: Sequence[int]) -> str | None:
    """What is wrong with the number of processes among which hpZ divides parameters once more;
    None where nothing is.

    Args:
        size: the number, above 1; or `auto`, which is the number of slots of a pod.
        slots: the different numbers of slots that pods have, in ascending order.
    """
    if slots[0] == 1:
        remedy = "use pods of 2 or more slots, or dsconfig/zero3.json"
        return f"a pod of 1 slot has nothing to divide; {remedy}"
    if isinstance(size, str):
        if len(slots) == 1:
            return None
        numbers = " and ".join(map(str, slots))
        return f"pods have {numbers} slots; give a number that divides these"
    for number in slots:
        if number % size:
            remedy = 'write "auto", or a number that does'
            return f"does not divide the {number} slots of a pod; {remedy}"
    return None


def _faults_of_precision(
    config: Config, arguments: Mapping[str, Any], fp16_fault: str | None
) -> Faults:
    """Precisions that contradict `--precision`.

    The flag decides where a block is absent or has `auto`.
    """
    bf16 = lookup(config, "bf16.enabled")
    fp16 = lookup(config, "fp16.enabled")
    precision = arguments.get("precision")
    if fp16 is True and fp16_fault is not None:
        remedy = 'use bf16, and write "auto" here, or leave fp16 out'
        yield "fp16.enabled", f" true: {fp16_fault}; {remedy}"
    if precision == "auto":
        yield from _faults_beside_auto(bf16, fp16)
    elif precision in PRECISIONS:
        for name, enabled in (("bf16", bf16), ("fp16", fp16)):
            is_wanted = precision == name
            if isinstance(enabled, bool) and enabled != is_wanted:
                remedy = 'write "auto", or give both the same'
                yield f"{name}.enabled", f" {_shown(enabled)}, --precision {precision}; {remedy}"
    if bf16 is True and fp16 is True:
        yield "fp16.enabled", " true, bf16.enabled true; leave one of them out"


def _faults_beside_auto(bf16: object, fp16: object) -> Faults:
    """Precisions that are given beside `--precision auto`.

    What it comes to depends on the machine; it is never FP16.
    """
    if isinstance(bf16, bool):
        precision = "bf16" if bf16 else "fp32"
        remedy = f'write "auto", or give --precision {precision}'
        yield "bf16.enabled", f" {_shown(bf16)}, --precision auto; {remedy}"
    if fp16 is True:
        yield "fp16.enabled", ' true, --precision auto; write "auto", or give --precision fp16'


def _faults_of_optimizer(config: Config) -> Faults:
    """An optimizer that is not the AdamW of other runs."""
    if "optimizer" not in config:
        return
    kind = lookup(config, "optimizer.type")
    if kind is None:
        yield "optimizer.type", ' missing; write "AdamW", or leave optimizer out'
        return
    if str(kind).lower() not in ADAM:
        remedy = 'write "AdamW", or leave optimizer out'
        yield "optimizer.type", f" {_shown(kind)}: other runs have AdamW; {remedy}"
        return
    uses_torch = lookup(config, f"{OPTIMIZER}.torch_adam") is True
    for name in _object(config, OPTIMIZER):
        place = f"{OPTIMIZER}.{name}"
        if place not in KEYS:
            fault = _unknown(name, before=f"{OPTIMIZER}.")
            yield place, f": {fault}"
        elif uses_torch and name not in OF_TORCH:
            yield place, ": unknown to PyTorch's AdamW, which torch_adam chooses; remove it"


def _faults_of_schedule(config: Config, arguments: Mapping[str, Any]) -> Faults:
    """What is wrong with the schedule of learning rates.

    An optimizer or a schedule may override flags; a schedule may be none of `SCHEDULES`, have a key
    that it does not take, or be another one than `--lr_scheduler_type` names.
    """
    if "optimizer" in config and arguments.get("scaled_rates"):
        yield "optimizer", ": overrides --scaled_rates True; remove one of them"
    if "scheduler" not in config:
        return
    seconds = arguments.get("max_train_seconds")
    if seconds:
        yield "scheduler", f": overrides --max_train_seconds {seconds}; remove one of them"
    kind = lookup(config, "scheduler.type")
    if not isinstance(kind, str) or kind not in SCHEDULES:
        kinds = ", ".join(SCHEDULES)
        fault = f" {kind!r}; expected {kinds}; without it --lr_scheduler_type decides"
        yield "scheduler.type", fault
        return
    schedule = SCHEDULES[kind]
    for name in _object(config, SCHEDULER):
        if name not in schedule.parameters:
            expected = ", ".join(sorted(schedule.parameters))
            yield f"{SCHEDULER}.{name}", f": unknown to {kind}; expected {expected}"
    flag_value = arguments.get("lr_scheduler_type", schedule.flag)
    if flag_value != schedule.flag:
        remedy = f"give --lr_scheduler_type {schedule.flag}"
        yield "scheduler.type", f" {kind!r}, --lr_scheduler_type {flag_value}; {remedy}"


def _faults_of_profiler(config: Config, arguments: Mapping[str, Any]) -> Faults:
    """A profile of a step that the run does not have: the step after `profile_step` is profiled."""
    if lookup(config, "flops_profiler.enabled") is not True:
        return
    profile_step = lookup(config, "flops_profiler.profile_step")
    if profile_step is None:
        profile_step = PROFILE_STEP
    # The number of the run comes first in `STEPS`, since the flags may leave it to the epochs.
    steps: Any = next((arguments[name] for name in STEPS if name in arguments), None)
    are_counts = COUNT.holds(profile_step) and POSITIVE.holds(steps)
    if are_counts and steps <= profile_step:
        # The remedy leaves a step after the profiled one, for samples/s, unless the run is shorter.
        most = max(0, steps - 2)
        remedy = f"there would be no profile: give {most} or less"
        fault = f" {profile_step}, the run has {steps} optimizer steps; {remedy}"
        yield "flops_profiler.profile_step", fault


# Keys that set the same as a flag


def _contradictions(config: Config, arguments: Mapping[str, Any]) -> Faults:
    """Keys whose value, or whose absence, is not what their flag says."""
    kind = str(lookup(config, "scheduler.type"))
    names_of_schedule = frozenset[str]()
    if kind in SCHEDULES:
        names_of_schedule = SCHEDULES[kind].parameters
    for key, (expected, because) in _expected(arguments).items():
        block, _, name = key.rpartition(".")
        has_no_block = block != "" and block.split(".")[0] not in config
        is_of_another_schedule = block == SCHEDULER and name not in names_of_schedule
        if has_no_block or is_of_another_schedule:
            continue
        value = lookup(config, key)
        if value is None:
            # WarmupLR takes the optimizer's rate, which is the flag's.
            takes_rate = key == MAX_RATE and kind == "WarmupLR"
            default = _default(config, key)
            if key in DEFAULTS and default != expected and not takes_rate:
                yield key, _fault_of_absence(default, because)
        elif value not in ("auto", expected):
            yield key, f' {value!r}, {because}; write "auto", or give both the same'


def _fault_of_absence(default: object, because: str) -> str:
    """What is wrong where a key is absent and its default is not what its flag says.

    Args:
        default: the value that DeepSpeed would use; None where it needs the key.
        because: the flag and its value, in words.
    """
    consequence = f"so DeepSpeed would use {default}"
    if default is None:
        consequence = "but DeepSpeed needs it"
    return f' missing, {consequence}; {because}: write "auto"'


def _default(config: Config, key: str) -> Any:
    """The value that is used where a key is absent; None where the key must be there."""
    uses_torch = lookup(config, f"{OPTIMIZER}.torch_adam") is True
    if uses_torch and key == f"{OPTIMIZER}.weight_decay":
        return TORCH_WEIGHT_DECAY
    return DEFAULTS.get(key)


def _expected(arguments: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """The value that each key must have, and in words what sets it.

    Only keys whose flag is known are compared.
    """
    expected: dict[str, tuple[Any, str]] = {}
    for key, names in SAME.items():
        for name in names:
            if name in arguments:
                expected[key] = (arguments[name], f"--{name} {arguments[name]}")
    expected[f"{OPTIMIZER}.eps"] = (EPSILON, f"AdamW here uses {EPSILON}")

    warmup = f"{SCHEDULER}.warmup_num_steps"
    if warmup in expected:
        warmup_steps, because = expected[warmup]
        # DeepSpeed does not accept 0.
        expected[warmup] = (max(1, warmup_steps), because)

    total = f"{SCHEDULER}.total_num_steps"
    if total in expected:
        most_steps, _ = expected[total]
        if most_steps <= 0:
            # The flag sets no number of steps.
            del expected[total]
    steps = arguments.get("optimizer_steps")
    if steps is not None:
        expected[total] = (steps, f"the run has {steps} optimizer steps")

    if {ROWS, PASSES, "world_size"} <= arguments.keys():
        rows = arguments[ROWS]
        passes = arguments[PASSES]
        ranks = arguments["world_size"]
        batch = rows * passes * ranks
        because = f"{rows} rows x {passes} passes x {ranks} processes = {batch}"
        expected["train_batch_size"] = (batch, because)

    if "adam_beta2" in arguments:
        betas = [arguments.get("adam_beta1", 0.9), arguments["adam_beta2"]]
        because = f"the flags give {betas} (--adam_beta2 {betas[1]})"
        expected[f"{OPTIMIZER}.betas"] = (betas, because)
    return expected


def _shown(value: object) -> str:
    """A value as it stands in the file, cut where it is long."""
    return json.dumps(value, ensure_ascii=False)[:MOST_SHOWN]


def _object(config: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    """The object at a place; an empty one where there is none."""
    value = lookup(config, place)
    return value if isinstance(value, dict) else {}
