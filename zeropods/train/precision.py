"""The number formats that a run really computes in, as the first step of an attempt shows them.

The configuration says what was asked for; libraries may do something else. So the formats are read
off the weights, the optimizer's tensors, the gradients that collective operations send, and the
outputs of linear layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.pytorch_utils import Conv1D

from zeropods.measure.record import MeasuredPrecision, RankMeasurement
from zeropods.train.engines.base import Engine, held_tensors

NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
}
"""This project's names of number formats; others keep torch's."""
REDUCE = (
    "reduce_",
    "reduce_scatter_",
    "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced_",
)
ALL_REDUCE = ("allreduce_", "allreduce_coalesced_")
"""torch's collective operations that add tensors up over ranks, as `torch.ops.c10d` names them."""


@dataclass(eq=False)
class PrecisionRecorder(TrainerCallback):
    """Measures the precision of the first step; use it as a context around training.

    Nothing is computed: hooks look at tensors that are there anyway, so losses stay the same to the
    last bit. The hooks are removed when the first step ends, so that nothing is left behind.

    Layers that torch compiles get no hook, since it would become a part of their graph; a model's
    head is never compiled here, so that at least one layer is seen.
    """

    measured: RankMeasurement
    """Receives the precision."""
    world_size: int
    engine: Engine
    """Tells which weights the optimizer updates."""
    sent: CollectiveFormats = field(init=False)
    """Formats of the gradients that this rank sent to others."""
    outputs: set[torch.dtype] = field(default_factory=set, init=False)
    """Formats of what linear layers returned."""
    hooks: ExitStack = field(default_factory=ExitStack, init=False)

    def __post_init__(self) -> None:
        # Not a default of the field, since its class is defined below.
        self.sent = CollectiveFormats()

    def __enter__(self) -> PrecisionRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.hooks.close()

    def on_step_begin(self, args: Any, state: Any, control: Any, **training: Any) -> None:
        if state.global_step != self.measured.first_step:
            return
        for layer in uncompiled_linear_layers(training["model"]):
            hook = layer.register_forward_hook(self._see_output)
            self.hooks.callback(hook.remove)
        if self.world_size > 1:
            self.sent.watch(self.hooks)

    def on_step_end(self, args: Any, state: Any, control: Any, **training: Any) -> None:
        self.hooks.close()
        precision = self.measured.measured_precision
        is_complete = precision is not None and precision.optimizer_states is not None
        if is_complete:
            return
        model = training["model"]
        optimizer = training["optimizer"]
        # Where FP16 gradients overflow, the first step updates nothing, and states come with a
        # later one.
        states = name_of(tensor.dtype for tensor in moments(optimizer))
        if precision is not None:
            precision.optimizer_states = states
            return
        updated = self.engine.updated_weights(optimizer)
        self.measured.measured_precision = MeasuredPrecision(
            weights=name_of(parameter.dtype for parameter in model.parameters()),
            master_weights=name_of(tensor.dtype for tensor in updated),
            optimizer_states=states,
            gradients_sent=name_of(self.sent.formats()),
            linear_output=name_of(self.outputs),
        )

    def _see_output(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            self.outputs.add(output.dtype)


def name_of(formats: Iterable[torch.dtype]) -> str | None:
    """The name of a number format; of several, all names.

    Integers are left out; None where nothing is left.
    """
    names = set()
    for dtype in formats:
        if dtype.is_floating_point:
            torchs_name = str(dtype).removeprefix("torch.")
            names.add(NAMES.get(dtype, torchs_name))
    return " and ".join(sorted(names)) or None


def uncompiled_linear_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Linear layers outside the parts of a model that torch compiles."""
    compiled: set[nn.Module] = set()
    for module in model.modules():
        if module._compiled_call_impl is not None:
            compiled.update(module.modules())
    for module in model.modules():
        # GPT-2 has a class of its own for its linear layers.
        if isinstance(module, nn.Linear | Conv1D) and module not in compiled:
            yield module


def moments(optimizer: Any) -> Iterator[Tensor]:
    """The optimizer's states, without counters of steps, which have no dimension."""
    for tensor in held_tensors(optimizer, ["state"]):
        if tensor.dim() > 0:
            yield tensor


class CollectiveFormats:
    """The number formats of gradients, seen where torch hands tensors to a collective operation.

    DeepSpeed calls the operations from Python, and DDP from C++. Both pass torch's dispatcher, in
    which a kernel above the backend's looks at the tensors and passes them on. Source:
    torch/csrc/distributed/c10d/Ops.cpp.
    """

    def __init__(self) -> None:
        self.reduced: set[torch.dtype] = set()
        """Formats of what the operations of `REDUCE` got."""
        self.all_reduced: set[torch.dtype] = set()
        """Formats of what those of `ALL_REDUCE` got."""

    def watch(self, until: ExitStack) -> None:
        """Watch every collective operation of this process until the stack is closed."""
        library = until.enter_context(torch.library._scoped_library("c10d", "IMPL"))
        for name in REDUCE:
            _watch_operation(library, name, self.reduced)
        for name in ALL_REDUCE:
            _watch_operation(library, name, self.all_reduced)

    def formats(self) -> set[torch.dtype]:
        """Formats of the gradients that were sent.

        Gradients are reduced, or else all-reduced. Where there is a reduction, all-reductions are
        something else: with `stage3_use_all_reduce_for_fetch_params` ZeRO-3 fetches parameters by
        them.
        """
        return self.reduced or self.all_reduced


def _watch_operation(library: torch.library.Library, name: str, formats: set[torch.dtype]) -> None:
    """Let a collective operation add the formats of what it gets to `formats`, on any device.

    Args:
        library: undoes this when it is closed.
    """
    operation = getattr(torch.ops.c10d, name).default
    for key in ("AutogradCPU", "AutogradCUDA"):
        library.impl(name, watching(operation, formats), key, with_keyset=True)


def watching(operation: Any, formats: set[torch.dtype]) -> Callable[..., Any]:
    """A kernel that notes the formats of an operation's tensors, and then calls the operation."""

    def kernel(keys: torch.DispatchKeySet, *arguments: Any, **options: Any) -> Any:
        for tensor in tensors_in(arguments):
            # A single number is a norm of gradients, or a flag for their overflow.
            if tensor.numel() > 1:
                formats.add(tensor.dtype)
        return operation.redispatch(keys & torch._C._after_autograd_keyset, *arguments, **options)

    return kernel


def tensors_in(values: Any) -> Iterator[Tensor]:
    """All tensors in values, and in lists and tuples of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
