"""What the lines of a profiler report mean, and how its figures are written for people."""

from __future__ import annotations

MEANING = {
    "step": "number of the profiled step, counted from 1",
    "world_size": "processes of the run, one a GPU",
    "data_parallel_size": "processes that each work on rows of their own",
    "model_parallel_size": "processes that one copy of the model is cut over; ZeRO cuts none, it shards",
    "batch_size_per_gpu": "rows of one forward pass of one process",
    "expert_tensor_parallelism": "whether the experts of a mixture are cut over processes as well",
    "parameters_per_gpu": "parameters that this process holds, tied ones once",
    "model_parameters": "the line above x model parallel size; under ZeRO-3 as wrong as that",
    "non_expert_parameters": "parameters outside a mixture's experts",
    "expert_parameters": "parameters of all experts of a mixture",
    "forward_macs": "multiply-adds of one forward pass; attention, layers and output, padding included",
    "forward_flops": "a multiply-add is two, and the work that is no product (activations, sums, norms) comes on top",
    "model_forward_flops": "the line above x model parallel size",
    "forward_seconds": "wall time of one forward pass, with the profiler's own stops at each module",
    "forward_flops_per_second": "forward FLOPs / forward time",
    "backward_factor": "a backward pass is taken for so many forward ones",
    "backward_seconds": "wall time of the backward pass, the exchange of gradients included",
    "backward_flops_per_second": "twice the forward FLOPs / backward time: an assumption, nothing is counted here",
    "forward_backward_flops_per_second": "three times the forward FLOPs / both times",
    "step_seconds": "wall time of the optimizer's step; with ZeRO the exchange of parameters is in it",
    "iteration_seconds": "forward + backward + step; loading data and logging are not in it",
    "flops_per_second": "three times the forward FLOPs / the line above",
    "samples_per_second": "rows of all processes / the line above",
}
"""Of each figure of the summary."""
PREFIXED = ("s", "FLOP/s", "FLOPs", "MACs", "parameters")
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "u"))
_UNITS = {
    "parameters_per_gpu": "parameters",
    "model_parameters": "parameters",
    "non_expert_parameters": "parameters",
    "expert_parameters": "parameters",
    "forward_macs": "MACs",
    "forward_flops": "FLOPs",
    "model_forward_flops": "FLOPs",
    "samples_per_second": "samples/s",
}


def unit_of(name: str) -> str:
    """The unit of a figure by its name in `Summary`; empty for a count."""
    if name.endswith("flops_per_second"):
        return "FLOP/s"
    return "s" if name.endswith("_seconds") else _UNITS.get(name, "")


def written(value: float | bool | None, unit: str) -> str:
    """A figure for people: `602.3 MMACs`, `55.98 ms`, `3`; empty where there is none."""
    return " ".join(scaled(value, value, unit)).rstrip()


def scaled(value: float | bool | None, like: float | bool | None, unit: str) -> tuple[str, str]:
    """A figure and its unit with the prefix that fits `like`, so that two figures can be read beside one another."""
    if value is None or isinstance(value, bool):
        return "" if value is None else str(value), ""
    if unit not in PREFIXED or like is None:
        return f"{value:.5g}", unit
    factor, prefix = next(((f, p) for f, p in _PREFIXES if abs(like) >= f), (1.0, ""))
    # A word is not written together with a prefix.
    return f"{value / factor:.5g}", f"{prefix} {unit}".strip() if unit == "parameters" else prefix + unit


def is_same(said: float | None, right: float | None) -> bool:
    """Whether a correction changes nothing that rounding had not."""
    if said is None or right is None:
        return said is right
    return abs(said - right) <= 0.005 * abs(said)


def told_apart(names: list[str]) -> list[str]:
    """Names without what they all begin with, cut at a word: `zero1-3-pods`, `zero3_offload-3-pods`."""
    apart = next((at for at, letters in enumerate(zip(*names, strict=False)) if len(set(letters)) > 1), 0)
    cut = max(names[0].rfind(mark, 0, apart) for mark in "-/. ") + 1
    return [name[cut:] or name for name in names]
