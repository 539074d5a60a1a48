"""How much of the hardware's arithmetic a run has used. Operations are of the model: real tokens, no recomputation."""

from __future__ import annotations

from zeropods.plan.known_shape import known_shape, sample_flops
from zeropods.plan.peaks import published_flops
from zeropods.report.figures.ranks import Record, of_ranks
from zeropods.report.figures.speed import tokens_per_sample

PUBLISHED, MEASURED = "published", "measured matmul"


def model_flops_per_second(record: Record) -> float | None:
    """FLOP/s that the model needs: FLOPs of a sample of mean real tokens x samples/s.

    `plan.flops` has those of a T5; `plan.causal_flops` those of a causal model, half a square of attention included.
    """
    rate, tokens = record["samples_per_second"], tokens_per_sample(record)
    shape = next((rank["shape"] for rank in record["ranks"] if rank["shape"]), None)
    if rate is None or tokens is None or shape is None:
        return None
    return sample_flops(known_shape(shape), *tokens) * rate


def peak_flops_per_second(record: Record) -> float | None:
    """FLOP/s of all that the run ran on, at its precision.

    The published peak of each rank's GPU, summed; where one is not published, or on CPUs, the best matrix
    multiplication that rank 0 measured x GPUs, or x machines: pods of one machine share its cores.
    """
    published, measured = _published(record), _measured(record)
    return measured if published is None else published


def peak_kind(record: Record) -> str | None:
    """`published` or `measured matmul`: where the peak is from; None where there is none."""
    if _published(record) is not None:
        return PUBLISHED
    return None if _measured(record) is None else MEASURED


def model_flops_utilization(used: float | None, peak: float | None) -> float | None:
    """MFU, share of 1: model FLOP/s / peak FLOP/s."""
    return None if used is None or not peak else used / peak


def machines(record: Record) -> int | None:
    """Distinct machines that the ranks ran on; pods of one machine are one."""
    found = of_ranks(record, "machine")
    return None if found is None else len(set(found))


def _published(record: Record) -> float | None:
    names = of_ranks(record, "gpu")
    peaks = [published_flops(name, record["precision"]) for name in names or ()]
    known = [peak for peak in peaks if peak is not None]
    return sum(known) if known and len(known) == len(peaks) else None


def _measured(record: Record) -> float | None:
    one = next((rank["matmul_flops_per_second"] for rank in record["ranks"] if rank["rank"] == 0), None)
    devices = len(record["ranks"]) if of_ranks(record, "gpu") else machines(record)
    return None if one is None or devices is None else one * devices
