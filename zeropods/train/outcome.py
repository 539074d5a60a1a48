"""How an attempt ended: a rank's status, its measurement on disk, and the record."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import torch

from zeropods.measure.rank import RankMeasurement
from zeropods.measure.records import compose_record, write_record
from zeropods.train import processes
from zeropods.train.meter import Meter
from zeropods.train.save_signal import SavedOnSignalError

GIB = 2**30


def outcome(error: BaseException, meter: Meter) -> tuple[str, str]:
    """Status and reason of an attempt that ended with an exception; out of memory, with the phase and the peak."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, SavedOnSignalError):
        return "interrupted", str(error)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", str(error) or "SIGINT"
    # The CPU's allocator has no exception of its own.
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator: can't allocate" in text:
        return "oom", f"{text.split(chr(10))[0]}; {_when_it_was_full(meter)}"
    return "failed", text.split("\n")[0]


def _when_it_was_full(meter: Meter) -> str:
    _, most = meter.phases.measured()
    peak, where = (most.resident, "resident") if most.allocated is None else (most.allocated, "allocated")
    sized = "" if peak is None else f", peak {where} {peak / GIB:.2f} GiB"
    return f"phase {meter.failed_in or meter.phases.phase}, {meter.beating.step} steps done{sized}"


def conclude(folder: Path, measured: RankMeasurement, meter: Meter, *, together: bool) -> None:
    """Write this rank's measurement; rank 0 composes.

    Args:
        together: whether all ranks have come here, so that rank 0 can wait for what they write.
    """
    _measure_end(measured, meter)
    measured.write(folder)
    if together and processes.world_size() > 1:
        torch.distributed.barrier()
    if processes.rank() == 0 and not os.environ.get("ZEROPODS_RUN"):
        write_record(folder, compose_record(folder))


def write_interrupted(folder: Path, measured: RankMeasurement, meter: Meter, signal_name: str) -> None:
    """Write what was measured so far, for a main thread that cannot."""
    waiting = replace(measured, status="interrupted", reason=f"{signal_name} while waiting for other ranks")
    _measure_end(waiting, meter)
    waiting.write(folder)


def _measure_end(measured: RankMeasurement, meter: Meter) -> None:
    meter.fill(measured)
    measured.ended_unix_seconds = time.time()
