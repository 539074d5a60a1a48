"""The techniques that are compared, each one value here, and the keys of a DeepSpeed configuration
behind them.

A new technique needs a value in `TECHNIQUES`, its file in `dsconfig/`, and its terms in `plan/`
where they are new; until it has them, `is_planned` says no. One with keys of its own, as ZeRO++
has, names them in `keys`: they stay in `PLAIN`, so that they make any other technique `custom`, and
`train/deepspeed_keys.py` lets them pass. An engine that is new has a module in `train/engines/`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeropods.errors import UserError

DSCONFIG = Path(__file__).resolve().parents[1] / "dsconfig"
CUSTOM = "custom"
"""Name for a configuration that is none of the techniques."""
ALONE, DDP, DEEPSPEED = "none", "ddp", "deepspeed"
"""Engines, which hold the model and its optimizer and step them: one process by itself; PyTorch's
DistributedDataParallel; or DeepSpeed. `train/engines/` has what each of them does."""
HPZ = "zero_optimization.zero_hpz_partition_size"
"""Key of ZeRO++ for a second division of the parameters (hpZ): among how many processes, which are
those of a pod. Source: Wang et al. 2023, "ZeRO++", arXiv:2306.10209, section 3.2."""
QUANTIZED_WEIGHTS = "zero_optimization.zero_quantized_weights"
QUANTIZED_GRADIENTS = "zero_optimization.zero_quantized_gradients"
QUANTIZED = (QUANTIZED_WEIGHTS, QUANTIZED_GRADIENTS)
"""Keys of ZeRO++ by which weights are sent as INT8 (qwZ), and gradients as INT4 (qgZ)."""
OPTIMIZER, GRADIENTS, PARAMETERS = "optimizer", "gradients", "parameters"
"""The states of training, in the order in which the stages of ZeRO divide them."""
CUSTOM_COLOR = "0.6"
"""Colour of what is none of the techniques: grey."""


@dataclass(frozen=True, kw_only=True)
class Technique:
    """How the memory of training is divided among processes."""

    name: str
    engine: str = DEEPSPEED
    """`ALONE`, `DDP` or `DEEPSPEED`."""
    divides: tuple[str, ...] = ()
    """The states of which each process holds only a share: some of `optimizer`, `gradients` and
    `parameters`."""
    offloaded: tuple[str, ...] = ()
    """The states that lie in host memory; where the optimizer's do, the processor runs Adam."""
    profiled: str | None = None
    """Name of the file in `dsconfig/` that is the same with DeepSpeed's flops profiler switched
    on."""
    color: str = CUSTOM_COLOR
    """Its colour in every plot, as matplotlib names it; no two techniques share one."""
    keys: tuple[str, ...] = ()
    """Keys of `PLAIN` that are its own: a configuration is of it where one of them or more is
    switched on."""
    least_slots: int = 1
    """Fewest processes per pod with which its file divides anything otherwise than another
    technique's."""
    is_planned: bool = True
    """Whether `zeropods plan` knows its memory and its time."""

    @property
    def is_alone(self) -> bool:
        """Whether it runs as one process, however many pods there are."""
        return self.engine == ALONE

    @property
    def uses_deepspeed(self) -> bool:
        """Whether DeepSpeed trains, so that there is a configuration of it."""
        return self.engine == DEEPSPEED

    @property
    def divides_optimizer(self) -> bool:
        """Whether each process holds only its share of the optimizer's states, as from ZeRO's stage
        1 on."""
        return OPTIMIZER in self.divides

    @property
    def divides_gradients(self) -> bool:
        """Whether each process keeps only its share of the gradients, as from ZeRO's stage 2 on."""
        return GRADIENTS in self.divides

    @property
    def divides_parameters(self) -> bool:
        """Whether each process holds only its share of the parameters, as in ZeRO's stage 3."""
        return PARAMETERS in self.divides

    @property
    def offloads(self) -> bool:
        """Whether any states lie in host memory."""
        return bool(self.offloaded)

    @property
    def stage(self) -> int:
        """ZeRO's stage, the number of kinds of states that are divided; 0 without DeepSpeed."""
        return len(self.divides)

    @property
    def file(self) -> Path | None:
        """The file in `dsconfig/`; None for training without DeepSpeed."""
        return DSCONFIG / f"{self.name}.json" if self.uses_deepspeed else None

    @property
    def flags(self) -> dict[str, object]:
        """The flags of a training script that ask for it; None leaves a flag out.

        `RunArguments.technique` goes the other way. One process and DDP have the same flags: they
        differ in the number of processes.
        """
        return {"deepspeed": self.file}

    @property
    def profiled_file(self) -> Path:
        """The file in `dsconfig/` with DeepSpeed's flops profiler; `UserError` without one."""
        if self.profiled is None:
            names = [technique.name for technique in TECHNIQUES if technique.profiled is not None]
            raise UserError(
                f"technique {self.name!r}: has no file with DeepSpeed's flops profiler; "
                f"expected one of {', '.join(names)}"
            )
        return DSCONFIG / f"{self.profiled}.json"

    def is_of(self, config: Mapping[str, Any]) -> bool:
        """Whether a DeepSpeed configuration is of this technique and has nothing beyond it; raises
        what `block` raises."""
        stage = block(config, "zero_optimization").get("stage", 0)
        if not self.uses_deepspeed or stage != self.stage:
            return False
        if is_offloaded(config, "offload_optimizer") != (OPTIMIZER in self.offloaded):
            return False
        if is_offloaded(config, "offload_param") != (PARAMETERS in self.offloaded):
            return False
        beyond = keys_beyond(config)
        if not self.keys:
            return not beyond
        # With none of its keys switched on, the configuration is of the technique without them.
        return bool(beyond) and beyond.keys() <= set(self.keys)


STAGE_1 = (OPTIMIZER,)
STAGE_2 = (OPTIMIZER, GRADIENTS)
STAGE_3 = (OPTIMIZER, GRADIENTS, PARAMETERS)
TECHNIQUES = (
    Technique(name="none", engine=ALONE, color="C0"),
    Technique(name="ddp", engine=DDP, color="C1"),
    Technique(name="zero1", divides=STAGE_1, profiled="zero1profiler", color="C2"),
    Technique(name="zero1_offload", divides=STAGE_1, offloaded=(OPTIMIZER,), color="C8"),
    Technique(name="zero2", divides=STAGE_2, profiled="zero2profiler", color="C4"),
    Technique(name="zero2_offload", divides=STAGE_2, offloaded=(OPTIMIZER,), color="C5"),
    Technique(name="zero3", divides=STAGE_3, color="C9"),
    Technique(
        name="zero3_offload",
        divides=STAGE_3,
        offloaded=(OPTIMIZER, PARAMETERS),
        profiled="zero3profiler",
        color="C3",
    ),
    Technique(
        name="zero3++",
        divides=STAGE_3,
        keys=(*QUANTIZED, HPZ),
        least_slots=2,
        color="C6",
    ),
)
NAMES = tuple(technique.name for technique in TECHNIQUES)
SAVED_WHOLE = tuple(technique.name for technique in TECHNIQUES if technique.engine in (ALONE, DDP))
"""Names of the techniques whose checkpoints have the same files with any number of processes, so
that each of them goes on from those of the others."""


def technique_named(name: str) -> Technique:
    """The technique of that name; `UserError` where there is none."""
    for technique in TECHNIQUES:
        if technique.name == name:
            return technique
    raise UserError(f"technique {name!r}; expected one of {', '.join(NAMES)}")


def flags_of_techniques() -> list[str]:
    """Names of the flags of a training script that ask for a technique."""
    names = []
    for technique in TECHNIQUES:
        for name in technique.flags:
            if name not in names:
                names.append(name)
    return names


def not_planned_yet() -> str:
    """A line that names the techniques which `zeropods plan` leaves out; empty where there are
    none."""
    names = [technique.name for technique in TECHNIQUES if not technique.is_planned]
    if not names:
        return ""
    return f"{', '.join(names)}: not planned yet.\n"


def color_of(name: str) -> str:
    """The colour of a technique in every plot; grey for one that is the user's."""
    for technique in TECHNIQUES:
        if technique.name == name:
            return technique.color
    return CUSTOM_COLOR


def technique_of(config: Mapping[str, Any] | None, world_size: int) -> str:
    """Name of the technique of a run; `custom` if its configuration is of none.

    Args:
        config: the effective DeepSpeed configuration; None for a run without DeepSpeed.
        world_size: number of processes.
    """
    if config is None:
        return "none" if world_size == 1 else "ddp"
    return next((technique.name for technique in TECHNIQUES if technique.is_of(config)), CUSTOM)


PLAIN: dict[str, tuple[object, ...]] = {
    QUANTIZED_WEIGHTS: (False,),
    "zero_optimization.zero_quantized_nontrainable_weights": (False,),
    QUANTIZED_GRADIENTS: (False,),
    HPZ: (0, 1),
    "zero_optimization.mics_shard_size": (-1,),
    "zero_optimization.zenflow": (),
    "zero_optimization.offload_optimizer.device": ("none", "cpu"),
    "zero_optimization.offload_optimizer.ratio": (1,),
    "zero_optimization.offload_optimizer.super_offload": (False,),
    "zero_optimization.offload_param.device": ("none", "cpu"),
    "tensor_parallel.autotp_size": (0, 1),
}
"""Keys by which DeepSpeed divides or sends states differently from plain ZeRO, and the values,
besides None, with which it does not: ZeRO++, MiCS, ZenFlow, NVMe, partial offload, tensor
parallelism (zero/config.py of 0.19.8)."""


def keys_beyond(config: Mapping[str, Any]) -> dict[str, object]:
    """The keys, with their values, by which a DeepSpeed configuration goes beyond plain ZeRO."""
    beyond = {}
    for path, plain_values in PLAIN.items():
        value = lookup(config, path)
        if value is not None and value not in plain_values:
            beyond[path] = value
    return beyond


def lookup(config: Mapping[str, Any], dotted: str) -> Any:
    """The value at `block.key` of a DeepSpeed configuration; None where there is none."""
    value: Any = config
    for key in dotted.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def technique_text(name: str, config: Mapping[str, Any] | None) -> str:
    """A technique as text, with the keys that are switched on where its name does not tell them:
    `custom (offload_param.device nvme)`, `zero3++ (zero_hpz_partition_size 2)`."""
    with_keys = [technique.name for technique in TECHNIQUES if technique.keys]
    if config is None or name not in (CUSTOM, *with_keys):
        return name
    keys = []
    for path, value in keys_beyond(config).items():
        key = path.removeprefix("zero_optimization.")
        text = value if isinstance(value, str) else json.dumps(value)
        keys.append(f"{key} {text}")
    return f"{name} ({', '.join(keys)})" if keys else name


def is_offloaded(config: Mapping[str, Any], key: str) -> bool:
    """Whether `offload_optimizer` or `offload_param` of a configuration names a device."""
    return lookup(config, f"zero_optimization.{key}.device") not in (None, "none")


def block(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A block of a DeepSpeed configuration, empty where it is absent.

    Raises:
        UserError: it is not an object.
    """
    value = config.get(name) or {}
    if not isinstance(value, Mapping):
        raise UserError(f"{name} {value!r:.60}; expected an object")
    return value
