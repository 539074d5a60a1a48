"""Seconds on the network, by the volume of ring collectives.

A ring of R processes passes R - 1 parts of R of a tensor over each link for an all-gather or a reduce, twice that for
an all-reduce (Patarasuk & Yuan 2009, doi:10.1016/j.jpdc.2008.09.002). Neighbours in the ring are neighbours in rank, so
that the ring enters and leaves a pod once: slots share a pod's link, and add no traffic to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from zeropods.plan.machines import Machines
from zeropods.plan.technique import Technique
from zeropods.plan.workload import Workload
from zeropods.plan.zero_settings import ZeroSettings

DDP_BUCKET_BYTES = 25 << 20
"""Of PyTorch's DistributedDataParallel, by default."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Seconds of communication in one step, by what can go on at the same time."""

    forward_seconds: float = 0.0
    """Gathering parameters for the forward pass."""
    backward_seconds: float = 0.0
    """Gathering them for the backward pass, and reducing gradients."""
    step_seconds: float = 0.0
    """Gathering parameters after the optimizer's step: nothing else goes on then."""

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.forward_seconds + self.backward_seconds + self.step_seconds


def traffic(job: Workload, technique: Technique, machines: Machines, zero: ZeroSettings) -> Traffic:
    """Of one optimizer step of one pass; none where there is one process."""
    ring = _Ring(machines, 1 if technique.is_alone else machines.pods * machines.slots)
    size = job.element_bytes * job.parameters
    if technique.stage == 0:
        return Traffic(backward_seconds=2 * ring.pass_seconds(size, math.ceil(size / DDP_BUCKET_BYTES)))
    buckets = math.ceil(job.parameters / zero.reduce_elements)
    reduce = ring.pass_seconds(size, buckets)
    if technique.stage in (1, 2):
        passes = 2 if zero.multi_rank_all_reduce else 1
        return Traffic(backward_seconds=passes * reduce, step_seconds=ring.pass_seconds(size, 1))
    gather = ring.pass_seconds(size, job.matrices)
    # What the forward pass has left gathered need not be fetched again.
    again = max(0.0, 1 - zero.live_elements / job.parameters)
    return Traffic(forward_seconds=gather, backward_seconds=again * gather + reduce)


@dataclass(frozen=True)
class _Ring:
    machines: Machines
    ranks: int

    def pass_seconds(self, size: float, messages: int) -> float:
        """Seconds for all of `size` bytes to pass round once, cut into so many messages."""
        if self.ranks == 1:
            return 0.0
        hops = self.ranks - 1
        return hops / self.ranks * size / self.machines.link + hops * messages * self.machines.latency_seconds
