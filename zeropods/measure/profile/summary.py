"""The summary of a report: one figure a line, each line under a label."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any

from zeropods.errors import UserError
from zeropods.measure.profile.report import Line, Summary
from zeropods.measure.profile.units import amount, whole

HEADING = re.compile(r"Profile Summary at step (.*):")
LABELS: dict[str, tuple[str, str]] = {
    "world size": ("world_size", "count"),
    "data parallel size": ("data_parallel_size", "count"),
    "model parallel size": ("model_parallel_size", "count"),
    "batch size per gpu": ("batch_size_per_gpu", "count"),
    "expert tensor parallelism enabled": ("expert_tensor_parallelism", "truth"),
    "params per gpu": ("parameters_per_gpu", "params"),
    "params of model": ("model_parameters", "params"),
    "non-expert params of model": ("non_expert_parameters", "params"),
    "expert params of model": ("expert_parameters", "params"),
    "fwd macs per gpu": ("forward_macs", "MACs"),
    "fwd flops per gpu": ("forward_flops", "flops"),
    "fwd flops of model": ("model_forward_flops", "flops"),
    "fwd latency": ("forward_seconds", "s"),
    "fwd flops per gpu = fwd flops per gpu / fwd latency": ("forward_flops_per_second", "FLOPS"),
    "bwd latency": ("backward_seconds", "s"),
    "bwd flops per gpu": ("backward_flops_per_second", "FLOPS"),
    "fwd+bwd flops per gpu": ("forward_backward_flops_per_second", "FLOPS"),
    "step latency": ("step_seconds", "s"),
    "iter latency": ("iteration_seconds", "s"),
    "flops per gpu": ("flops_per_second", "FLOPS"),
    "samples/second": ("samples_per_second", ""),
}
"""What a label stands for, without case and without the formula behind it, which differs between versions.
The forward pass's FLOPs and FLOP/s differ only in that formula."""
FACTOR = re.compile(r"= ([\d.]+) \* fwd flops per gpu / bwd latency", re.IGNORECASE)


def read_summary(path: str, numbered: Iterable[tuple[int, str]], step: int, end: int) -> tuple[Summary, list[Line]]:
    """The figures of the summary's lines.

    Args:
        path: the file, for errors.
        numbered: lines with their numbers, from after the notations up to the next part.
        step: as the heading has it.
        end: number of the line after the last.

    Raises:
        UserError: a line that is none of a summary, twice the same, one that must be there is missing.
    """
    values: dict[str, Any] = {"step": step}
    lines = []
    for number, line in numbered:
        if not line.strip():
            continue
        read = _line(f"{path}:{number}", number, line)
        if values.keys() & read[1].keys():
            raise UserError(f"{path}:{number}: a second {read[0].label!r}; give a report as it was written")
        values |= read[1]
        lines.append(read[0])
    needed = [field.name for field in fields(Summary) if field.default is MISSING]
    missing = next((name for name in needed if name not in values), None)
    if missing:
        wanted = next(label for label, (key, _) in LABELS.items() if key == missing)
        raise UserError(f"{path}:{end}: the summary ends without {wanted!r}; give a report as it was written, whole")
    return Summary(**values), lines


def step_of(path: str, number: int, line: str) -> int:
    """The step that the heading names."""
    match = HEADING.fullmatch(line.strip())
    if match is None:
        raise UserError(f"{path}:{number}: {line.strip()!r:.60}; expected 'Profile Summary at step N:'")
    return whole(match[1], f"{path}:{number}")


def _line(place: str, number: int, line: str) -> tuple[Line, dict[str, Any]]:
    label, colon, text = line.rpartition(": ")
    known = _known(label.strip().rstrip(":"))
    if not colon or known is None:
        raise UserError(f"{place}: {line.strip()!r:.60}; expected a line of the summary, as 'fwd latency:  55.98 ms'")
    key, kind = known
    values: dict[str, Any] = {key: _value(text, kind, place)}
    factor = FACTOR.search(label)
    if factor:
        values["backward_factor"] = amount(factor[1], "", place)
    return Line(number=number, label=label.strip().rstrip(":"), text=text.strip(), keys=tuple(values)), values


def _known(label: str) -> tuple[str, str] | None:
    name = label.lower()
    return LABELS.get(name) or LABELS.get(name.split(" = ")[0])


def _value(text: str, kind: str, place: str) -> float | int | bool:
    if kind == "count":
        return whole(text, place)
    if kind == "truth":
        return text.strip() == "True"
    return amount(text, kind, place)
