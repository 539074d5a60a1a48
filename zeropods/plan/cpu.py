"""Memory and time without a GPU, in parts; a calibration has a factor for each part
(`measure.calibration`).

Parts are bytes of resident memory above the bare process, or seconds at the machine's own rates.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from zeropods.plan.activations import Activations
from zeropods.plan.machines import ADAM_BYTES, Machines, traffic
from zeropods.plan.memory import LOADING, plan_memory
from zeropods.plan.terms import Term, total
from zeropods.plan.workload import MASTER, Workload, share
from zeropods.tables import MIB

if TYPE_CHECKING:
    from zeropods.measure.calibration import MachineProbe

CPU = "cpu"
STATES = ("parameters", "gradients", "optimizer")
UNIT = 100 * MIB
"""Bytes of a constant part, before its factor."""
STEPPED = 6
"""Index of the optimizer's part of a step; before it: arithmetic, activations, Python; after: new
memory, network."""
TOUCHED = 15
"""How often a step reads or writes each byte that its layers keep, in operations other than matrix
products, forward and backward. Two processors took equally long for it, although one multiplies
twice as fast. A larger number would fit the grid's small batches better, but those of 16 and 48
rows, whose tensors stay in caches, worse."""
TENSOR_OPERATIONS, HOOKS = 50, 3
"""Number of small operations that make one unit of what a tensor costs in a step; number of units
that ZeRO-3's hooks take. Its gathering takes as many again, but a single process gathers nothing
(DeepSpeed 0.19.8, partition_parameters.py, `_no_gather_coalesced`). Units are near what runs show,
since a factor is held near 1."""
CLIPPING_BYTES = 12
"""Bytes per parameter that clipping moves: gradients are read, then read and written, in FP32."""
KEPT_BLOCK = 32 << 20
"""Bytes of the largest block kept when freed; larger ones are new memory each time (glibc 2.36,
`DEFAULT_MMAP_THRESHOLD_MAX`)."""
HEAP = 1.25
"""Bytes of heap per byte that layers keep, found with batches of 24 rows, whose layers take up to a
third of memory. With 1.1 for a T5, t5-tiny's 48 rows are planned within 5 %, not 9 %, but
t5-small's 24 rows run out of memory."""
NEW_COPIES = 3
"""FP32 copies of all gradients that ZeRO makes in new memory: in buckets, for a rank's share, as
one flat tensor. By page faults (`ru_minflt` of ranks from step to step) there are 2.5 to 4.2 in
most of 14 runs, and at least 1.7."""


@lru_cache(maxsize=1024)
def resident_parts(work: Workload) -> list[list[Term]]:
    """Terms above the bare process, grouped by the factor that is fitted for them; groups two to
    four are constants.

    Small blocks stay in the C library's heap once they were needed, so that states, gradients and
    layers add up. Large ones are given back, those of the loss before the embedding's gradients and
    the buffers of stages 1 and 2 come.
    """
    plan, shape, stage, together = (
        plan_memory(work, 0),
        work.shape,
        work.technique.stage,
        work.ranks > 1,
    )
    kept = [
        term
        for term in (*plan.terms, *plan.host_terms)
        if term.part in STATES and term.name != LOADING
    ]
    # Only the part of a buffer that is written to is resident: a model's gradients may leave most
    # of it empty.
    whole = MASTER * shape.parameters
    buffers = [
        replace(term, bytes=min(term.bytes, whole)) for term in plan.terms if term.part == "buffers"
    ]
    saved, later = Activations(work), total(buffers) if stage in (1, 2) else 0
    kept_there = round(HEAP * saved.in_layers())
    layers = Term(
        "layers, and gradients of the active one",
        kept_there,
        f"{HEAP} x as on a GPU",
        "activations",
    )
    if stage == 0 and work.passes == 1:
        later = work.element_bytes * shape.embedding
    most = max(3 * saved.head - later, saved.tied_gradients)
    large = Term(
        "the loss, or gradients of the embedding", most, "the larger of the two", "activations"
    )
    group = Term("process group", UNIT // 2, "a constant")
    # Each rank first initialises or loads the whole model; the large blocks of it are given back.
    small, holes = shape.parameters - shape.embedding, list[Term]()
    if stage == 3:
        holes.append(Term.of("left over from loading, FP32", MASTER, small))
    # glibc 2.36 needs more than a block's own size, so a new gradient does not fit where one of its
    # size was.
    if work.technique.is_alone and shape.joint:
        holes.append(Term.of("holes between gradients", work.element_bytes, small))
    # One for each use of the table: as encoder, as decoder and as head. Every T5 shows them, and no
    # causal model does.
    if stage == 3 and not (together or shape.joint or work.technique.offloads):
        holes.append(
            Term.of(
                "gradients of the embedding, once more", 3 * work.element_bytes, shape.embedding
            )
        )
    return [
        [*kept, layers, *buffers, large],
        [Term("libraries used while training", UNIT, "a constant")],
        [group] if together else [],
        [replace(group, name="further groups of DeepSpeed")] if together and stage else [],
        holes,
    ]


def step_parts(work: Workload, machines: Machines, probe: MachineProbe) -> tuple[float, ...]:
    """Seconds of each part of a step, at the machine's own rates, for processes that share its
    cores.

    Returns:
        Arithmetic of a T5; arithmetic of a causal model; reading and writing activations; Python
        for each tensor; what DDP or ZeRO adds to it; what ZeRO-3 adds; the optimizer; new memory;
        the collectives' volume; their messages.
    """
    ranks, cores, passes, technique = work.ranks, probe.cores, work.passes, work.technique
    sharing = math.ceil(ranks / machines.hosts)
    busy, waits = min(cores, sharing * (machines.threads or cores)), max(1.0, sharing / cores)
    arithmetic = passes * sum(work.flops()) * sharing / probe.flops(work.precision, busy)
    once = passes * TENSOR_OPERATIONS * len(work.shape.weights) * probe.python_seconds * waits
    tensors = (1 + work.checkpointing) * once
    own = share(work.shape.parameters, ranks if technique.stage else 1)
    one_each = replace(machines, pods=ranks, slots=1, bandwidth=probe.bandwidth)
    latencies = (0.0, probe.latency_seconds)
    network = [traffic(work, replace(one_each, latency_seconds=each)) for each in latencies]
    reducing = passes if technique.stage in (2, 3) else 1
    volume, both = (
        passes * forward + reducing * backward + after for forward, backward, after in network
    )
    has_encoder, saved = not work.shape.joint, Activations(replace(work, checkpointing=False))
    # Checkpointing repeats the forward pass, which is a third of the whole.
    layers = (1 + work.checkpointing / 3) * sum(stack.layers * stack.kept for stack in saved.stacks)
    return (
        arithmetic * has_encoder,
        arithmetic * (not has_encoder),
        TOUCHED * passes * (layers + saved.ends) * sharing / probe.bandwidth_of(busy),
        tensors,
        once * (technique.stage > 0 or ranks > 1),
        HOOKS * (1 + (ranks > 1)) * tensors * (technique.stage == 3),
        (ADAM_BYTES + CLIPPING_BYTES) * own * sharing / probe.bandwidth_of(busy),
        new_bytes(work) * waits / probe.new_memory_bandwidth,
        volume,
        max(0.0, both - volume),
    )


def new_bytes(work: Workload) -> int:
    """Bytes that a step without a GPU takes anew from the system; each page of them costs a fault.

    They are the gradients of a large embedding, one for each use and their sum, and the loss's
    tensors; under DDP also the other gradients; under ZeRO also its copies of all gradients.
    """
    shape = work.shape
    table, uses = work.element_bytes * shape.embedding, 2 if shape.joint else 3
    # An untied head has a gradient of its own, beside those of the table.
    summed = uses + 1 if shape.tied else uses + (uses > 2)
    head = Activations(work).head
    made = summed * table * (table > KEPT_BLOCK) + 3 * head * (head > KEPT_BLOCK)
    if work.technique.stage:
        return work.passes * made + NEW_COPIES * MASTER * shape.parameters
    others = work.element_bytes * (shape.parameters - shape.embedding)
    return work.passes * made + others * (work.ranks > 1)
