"""The optimizer and scheduler blocks of a DeepSpeed configuration, against the flags that say the same.

transformers fills some values that are `auto`, from the flags; what it does not fill, and what is left out,
DeepSpeed would take from its own defaults without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zeropods.train.deepspeed_keys import lookup

OPTIMIZER, SCHEDULER = "optimizer.params", "scheduler.params"
EPSILON = 1e-8
"""AdamW's, in every run."""
DEFAULTS: dict[str, Any] = {
    f"{OPTIMIZER}.lr": 1e-3,
    f"{OPTIMIZER}.betas": [0.9, 0.999],
    f"{OPTIMIZER}.eps": EPSILON,
    f"{OPTIMIZER}.weight_decay": 0.0,
    f"{SCHEDULER}.warmup_max_lr": 1e-3,
    f"{SCHEDULER}.warmup_num_steps": 1_000,
    f"{SCHEDULER}.total_num_steps": None,
}
"""What DeepSpeed 0.19 takes where a value is absent; None: it must be there."""
WARMUP = frozenset({"warmup_num_steps", "warmup_type"})
RATES = WARMUP | {"warmup_min_lr", "warmup_max_lr"}
SCHEDULES = {
    "WarmupLR": ("constant_with_warmup", RATES),
    "WarmupDecayLR": ("linear", RATES | {"total_num_steps"}),
    "WarmupCosineLR": ("cosine", WARMUP | {"total_num_steps", "warmup_min_ratio", "cos_min_ratio"}),
}
"""By type: what `--lr_scheduler_type` calls it, and its parameters."""
OPTIMIZERS = ("Adam", "AdamW", "Adagrad", "Lamb", "Lion", "Muon", "MuAdam", "MuAdamW", "MuSGD")
"""Types that DeepSpeed 0.19 builds itself, in whatever case."""
OF_TORCH = ("Adadelta", "Adafactor", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
"""Others that it takes from `torch.optim`, by their exact names."""
WARMUP_TYPES = ("linear", "log")
SHARES = ("warmup_min_ratio", "cos_min_ratio")
"""Parts of the highest rate."""
FILLED = frozenset({*DEFAULTS, f"{SCHEDULER}.warmup_min_lr"})
"""Where transformers puts a number in the place of `auto`."""


def optimizer_faults(config: dict[str, Any], arguments: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the two blocks, where they are there.

    Args:
        arguments: as `deepspeed_config.check_config` has them.
    """
    yield from _unfilled(config)
    yield from _optimizer(config)
    yield from _schedule(config, arguments)
    kind = lookup(config, "scheduler.type")
    for key, (expected, said) in _expected(arguments).items():
        block, name = key.rsplit(".", 1)
        known = kind in SCHEDULES and name in SCHEDULES[kind][1]
        if block.split(".")[0] not in config or (block == SCHEDULER and not known):
            continue
        value = lookup(config, key)
        if value is None and DEFAULTS[key] != expected:
            taken = "which it needs" if DEFAULTS[key] is None else f"DeepSpeed would take {DEFAULTS[key]}"
            yield f'{key} absent, {taken}; {said}: write "auto"'
        elif value not in (None, "auto") and value != expected:
            yield f'{key} {value!r}, {said}; write "auto", or give both the same'


def _unfilled(config: dict[str, Any]) -> Iterator[str]:
    for block in (OPTIMIZER, SCHEDULER):
        for name, value in (lookup(config, block) or {}).items():
            if value == "auto" and f"{block}.{name}" not in FILLED:
                yield f'{block}.{name} "auto": nothing fills it in; give a value, or leave it out'


def _optimizer(config: dict[str, Any]) -> Iterator[str]:
    kind = lookup(config, "optimizer.type")
    known = {name.lower() for name in OPTIMIZERS}
    if "optimizer" in config and str(kind).lower() not in known and kind not in OF_TORCH:
        yield f"optimizer.type {kind!r}; expected {', '.join([*OPTIMIZERS, *OF_TORCH])}"


def _schedule(config: dict[str, Any], arguments: Mapping[str, Any]) -> Iterator[str]:
    kind = lookup(config, "scheduler.type")
    if "scheduler" not in config:
        return
    if kind not in SCHEDULES:
        yield f"scheduler.type {kind!r}; expected {', '.join(SCHEDULES)}; without it --lr_scheduler_type decides"
        return
    yield from _parameter_faults(lookup(config, SCHEDULER) or {})
    ours, known = SCHEDULES[kind]
    for name in lookup(config, SCHEDULER) or {}:
        if name not in known:
            yield f"{SCHEDULER}.{name}: unknown to {kind}; expected {', '.join(sorted(known))}"
    asked = arguments.get("lr_scheduler_type", ours)
    if asked != ours:
        yield f"scheduler.type {kind!r}, --lr_scheduler_type {asked}; give --lr_scheduler_type {ours}"


def _parameter_faults(parameters: Mapping[str, Any]) -> Iterator[str]:
    kind = parameters.get("warmup_type", "log")
    if kind not in WARMUP_TYPES:
        yield f"{SCHEDULER}.warmup_type {kind!r}; expected {' or '.join(WARMUP_TYPES)}"
    for name in SHARES:
        value = parameters.get(name, 0.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            yield f"{SCHEDULER}.{name} {value!r}; expected 0 to 1"


def _expected(arguments: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """What each key must be, and by which flag, of those that are known."""
    rate, decay = _said(arguments, "learning_rate"), _said(arguments, "weight_decay")
    warmup = _said(arguments, "warmup_steps", "num_warmup_steps")
    expected: dict[str, tuple[Any, str] | None] = {
        f"{OPTIMIZER}.lr": rate,
        f"{OPTIMIZER}.betas": _betas(arguments),
        f"{OPTIMIZER}.eps": (EPSILON, f"AdamW's here is {EPSILON}"),
        f"{OPTIMIZER}.weight_decay": decay,
        f"{SCHEDULER}.warmup_max_lr": rate,
        # DeepSpeed takes no 0.
        f"{SCHEDULER}.warmup_num_steps": None if warmup is None else (max(1, warmup[0]), warmup[1]),
        f"{SCHEDULER}.total_num_steps": _total_steps(arguments),
    }
    return {key: value for key, value in expected.items() if value is not None}


def _said(arguments: Mapping[str, Any], *names: str) -> tuple[Any, str] | None:
    """The value of the flag that a script has under one of these names."""
    return next(((arguments[name], f"--{name} {arguments[name]}") for name in names if name in arguments), None)


def _betas(arguments: Mapping[str, Any]) -> tuple[Any, str] | None:
    if "adam_beta2" not in arguments:
        return None
    betas = [arguments.get("adam_beta1", 0.9), arguments["adam_beta2"]]
    return betas, f"the flags say {betas} (--adam_beta2 {betas[1]})"


def _total_steps(arguments: Mapping[str, Any]) -> tuple[Any, str] | None:
    if "optimizer_steps" in arguments:
        return arguments["optimizer_steps"], f"the run has {arguments['optimizer_steps']} optimizer steps"
    asked = _said(arguments, "max_steps", "max_train_steps")
    return asked if asked is not None and asked[0] > 0 else None
