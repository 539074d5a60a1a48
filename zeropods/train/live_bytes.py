"""Bytes of a model's tensors while it trains: what ZeRO divides, as it lies in memory.

Memory is counted by storage, each once: tied weights, views into a flat buffer and a partition that is its own master
are one piece of memory. Padding of flat buffers counts. Buckets through which gradients and parameters travel do not:
they are no state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from zeropods.measure.rank import LiveBytes

MASTERS = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups_flat_partition")
"""Where DeepSpeed 0.19's optimizers keep a rank's master partition: stages 1 and 2, stage 3, `BF16_Optimizer`."""
PARTITIONS = (
    "averaged_gradients",
    "all_grad_tensors",
    "grads_in_partition",
    "grad_partitions_flat_buffer",
    "fp32_groups_gradients_flat",
)
"""Where they keep gradients that are reduced."""


def parameter_storages(model: nn.Module) -> dict[int, int]:
    """Bytes by address of the memory that holds the model's parameters, on this rank."""
    return _storages(_parameters(model))


def gradient_storages(model: nn.Module, optimizer: Any) -> dict[int, int]:
    """Bytes by address of the memory that holds gradients; `optimizer` is the outermost."""
    return _storages(_gradients(model, optimizer))


def optimizer_storages(optimizer: Any) -> dict[int, int]:
    """Bytes by address of the memory that holds states and master weights; `optimizer` is the outermost."""
    return _storages(_states(optimizer))


class LiveBytesCount:
    """Counts at one step: parameters and gradients before the optimizer's step, its states after it.

    The states are there from the first step on and stay; so a run of a single step is counted as well.
    """

    def __init__(self) -> None:
        self._before: tuple[int, int] | None = None

    def before_step(self, model: nn.Module, optimizer: Any) -> None:
        """Count parameters and gradients."""
        parameters = parameter_storages(model)
        gradients = _without(gradient_storages(model, optimizer), parameters)
        self._before = sum(parameters.values()), sum(gradients.values())

    def after_step(self, model: nn.Module, optimizer: Any) -> LiveBytes | None:
        """Count the states; None where nothing was counted before."""
        if self._before is None:
            return None
        states = _without(optimizer_storages(optimizer), parameter_storages(model))
        parameters, gradients = self._before
        return LiveBytes(parameters=parameters, gradients=gradients, optimizer=sum(states.values()))


def _parameters(model: nn.Module) -> Iterator[Any]:
    for parameter in model.parameters():
        yield parameter.data
        # ZeRO-3's share of it; the parameter itself is empty unless gathered.
        yield getattr(parameter, "ds_tensor", None)


def _gradients(model: nn.Module, optimizer: Any) -> Iterator[Any]:
    for parameter in model.parameters():
        yield parameter.grad
        yield getattr(parameter, "grad_accum", None)
    for layer in _layers(optimizer):
        for name in PARTITIONS:
            yield from _flat(getattr(layer, name, None))
        for name in MASTERS:
            yield from (master.grad for master in _flat(getattr(layer, name, None)))


def _states(optimizer: Any) -> Iterator[Any]:
    for layer in _layers(optimizer):
        for name in MASTERS:
            yield from _flat(getattr(layer, name, None))
        for group in getattr(layer, "param_groups", ()):
            yield from group["params"]
        for state in getattr(layer, "state", {}).values():
            yield from _flat(state)


def _layers(optimizer: Any) -> Iterator[Any]:
    """The optimizer and those that it wraps: accelerate's, DeepSpeed's, torch's."""
    seen: list[Any] = []
    while optimizer is not None and not any(optimizer is known for known in seen):
        seen.append(optimizer)
        optimizer = getattr(optimizer, "optimizer", None)
    yield from seen


def _flat(found: Any) -> Iterator[Any]:
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, dict):
        for value in found.values():
            yield from _flat(value)
    elif isinstance(found, list | tuple):
        for value in found:
            yield from _flat(value)


def _storages(tensors: Iterable[Any]) -> dict[int, int]:
    storages = {}
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return storages


def _without(storages: dict[int, int], others: dict[int, int]) -> dict[int, int]:
    return {address: size for address, size in storages.items() if address not in others}
