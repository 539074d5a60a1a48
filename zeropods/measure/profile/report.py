"""What a report says, as numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The figures of `Profile Summary`; None where this report has no such line.

    Seconds are of rank 0, one forward pass, one backward pass and one step of the optimizer.
    """

    step: int
    """Number of the profiled step, the first being 1."""
    world_size: int | None = None
    data_parallel_size: int | None = None
    model_parallel_size: int | None = None
    batch_size_per_gpu: int | None = None
    """Rows of one forward pass."""
    expert_tensor_parallelism: bool | None = None
    parameters_per_gpu: float
    model_parameters: float | None = None
    non_expert_parameters: float | None = None
    expert_parameters: float | None = None
    forward_macs: float
    """Multiply-adds of a forward pass on one GPU."""
    forward_flops: float
    model_forward_flops: float | None = None
    forward_seconds: float
    forward_flops_per_second: float
    backward_factor: float | None = None
    """A backward pass is counted as so many forward ones: 2, and more with recomputation."""
    backward_seconds: float | None = None
    backward_flops_per_second: float | None = None
    forward_backward_flops_per_second: float | None = None
    step_seconds: float | None = None
    iteration_seconds: float | None = None
    """Forward, backward and step."""
    flops_per_second: float | None = None
    samples_per_second: float | None = None


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of the summary as it was printed."""

    number: int
    """In its file, the first being 1."""
    label: str
    text: str
    keys: tuple[str, ...]
    """What it gives of `Summary`."""


@dataclass(frozen=True, kw_only=True)
class Depth:
    """The top classes of modules at one depth of the tree, the root being 0."""

    number: int
    """Line of its first figures."""
    depth: int
    parameters: dict[str, float]
    macs: dict[str, float]
    seconds: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Module:
    """One module of the tree with everything below it; figures are None for one that runs nothing (`ModuleList`)."""

    number: int
    """Its line in the file."""
    name: str
    """As its parent calls it; empty for the root."""
    class_name: str
    parameters: float | None = None
    parameters_percent: float | None = None
    macs: float | None = None
    macs_percent: float | None = None
    latency_seconds: float | None = None
    latency_percent: float | None = None
    flops_per_second: float | None = None
    details: dict[str, str | int | float | bool | tuple[int, ...]]
    """What the class says of itself: `in_features`, `out_features`; of an embedding `rows` and `dimension`."""
    children: tuple[Module, ...] = ()

    def walk(self, path: str = "") -> Iterator[tuple[str, Module]]:
        """Itself and all modules below it with their dotted paths, a parent before its children."""
        yield path, self
        for child in self.children:
            yield from child.walk(f"{path}.{child.name}" if path else child.name)


def total(module: Module, figure: str) -> float:
    """`parameters`, `macs` or `latency_seconds` of a module; the sum of its children where it has none of its own."""
    own = getattr(module, figure)
    return own if own is not None else sum(total(child, figure) for child in module.children)


@dataclass(frozen=True, kw_only=True)
class Report:
    """One report of a file."""

    path: Path
    number: int
    """Line of its heading."""
    reports: int
    """How many the file holds; this is the last."""
    text: str
    """This report alone, as it was printed."""
    summary: Summary
    lines: tuple[Line, ...]
    """Of the summary."""
    depths: tuple[Depth, ...]
    root: Module | None
    """None where the report has no detailed part (`"detailed": false`)."""

    def line_of(self, key: str) -> int:
        """Number of the line that gives a figure of the summary; the heading's for the step."""
        return next((line.number for line in self.lines if key in line.keys), self.number + 1)
