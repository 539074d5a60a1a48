"""Memory and time without a GPU, in parts that a calibration has a factor for each (`measure.calibration`).

Parts are bytes of resident memory above the bare process, and seconds at the machine's own rates.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from zeropods.plan.machines import ADAM_BYTES, Machines, traffic
from zeropods.plan.memory import LOADING, Activations, Term, plan_memory, total
from zeropods.plan.workload import MASTER, Workload, share
from zeropods.tables import MIB

if TYPE_CHECKING:
    from zeropods.measure.calibration import MachineProbe

CPU = "cpu"
STATES = ("parameters", "gradients", "optimizer")
UNIT = 100 * MIB
"""Of parts that are constant."""
STEPPED = 6
"""Place of the optimizer's part of a step; before it are those of arithmetic and Python, after it memory's and the
network's."""
TOUCHED = 15
"""How often a step reads or writes a byte that its layers keep: in operations that multiply no matrices, forward and
backward. Two processors of which one multiplies twice as fast as the other took equally long for it. More would fit
the grid's small batches better, and those of 16 and 48 rows worse, whose tensors stay in caches."""
TENSOR_OPERATIONS, HOOKS = 50, 3
"""Small operations that are one unit of what a tensor costs in a step; how many units ZeRO-3's hooks take, and its
gathering as many more: one process alone gathers nothing (DeepSpeed 0.19.8, partition_parameters.py,
`_no_gather_coalesced`). Units are near what runs show, since a factor is held near 1."""
CLIPPING_BYTES = 12
"""Bytes per parameter to clip gradients: they are read, then read and written, FP32."""
KEPT_BLOCK = 32 << 20
"""Larger blocks are new memory each time (glibc 2.36, `DEFAULT_MMAP_THRESHOLD_MAX`)."""
HEAP = 1.25
"""What the heap takes for a byte that layers keep. Batches of 24 rows tell, whose layers take up to a third of all.
With 1.1 for a T5 t5-tiny's 48 rows are planned within 5 %, not 9 %, but t5-small's 24 rows end for want of memory."""
NEW_COPIES = 3
"""Copies of all gradients that ZeRO makes in new memory, FP32: in buckets, for a rank's share, as one flat tensor.
By page faults (`ru_minflt` of ranks from step to step) it is 2.5 to 4.2 in most of 14 runs, 1.7 at least."""


@lru_cache(maxsize=1024)
def resident_parts(work: Workload) -> list[list[Term]]:
    """Terms above the bare process by what a factor is fitted for; the second to the fourth are constants.

    Small blocks stay in the C library's heap once they were needed, so that states, gradients and layers add up. Large
    ones are given back: the loss comes before the embedding's gradients, and before the buffers of stages 1 and 2.
    """
    plan, shape, stage, together = plan_memory(work, 0), work.shape, work.technique.stage, work.ranks > 1
    kept = [term for term in (*plan.terms, *plan.host_terms) if term.part in STATES and term.name != LOADING]
    # No more of a buffer is resident than is written to: a model's gradients may leave most of it empty.
    whole = MASTER * shape.parameters
    buffers = [replace(term, bytes=min(term.bytes, whole)) for term in plan.terms if term.part == "buffers"]
    saved, later = Activations(work), total(buffers) if stage in (1, 2) else 0
    kept_there = round(HEAP * saved.in_layers())
    layers = Term("layers, and gradients of the one at work", kept_there, f"{HEAP} x as on a GPU", "activations")
    if stage == 0 and work.passes == 1:
        later = work.element_bytes * shape.embedding
    most = max(3 * saved.head - later, saved.tied_gradients)
    large = Term("the loss, or gradients of the embedding", most, "the larger of both", "activations")
    group = Term("process group", UNIT // 2, "a constant")
    # Each rank draws or loads the whole model first; what is large of it is given back.
    small, holes = shape.parameters - shape.embedding, list[Term]()
    if stage == 3:
        holes.append(Term.of("what a load leaves, FP32", MASTER, small))
    # glibc 2.36 asks for more than a block's own size: a new gradient does not fit where one of its size was.
    if work.technique.is_alone and shape.joint:
        holes.append(Term.of("holes between gradients", work.element_bytes, small))
    # Of each use of the table, as encoder, as decoder and as head; seen of every T5, and of no causal model.
    if stage == 3 and not (together or shape.joint or work.technique.offloads):
        holes.append(Term.of("gradients of the embedding, once more", 3 * work.element_bytes, shape.embedding))
    return [
        [*kept, layers, *buffers, large],
        [Term("libraries that work has touched", UNIT, "a constant")],
        [group] if together else [],
        [replace(group, name="further groups of DeepSpeed")] if together and stage else [],
        holes,
    ]


def step_parts(work: Workload, machines: Machines, probe: MachineProbe) -> tuple[float, ...]:
    """Seconds at the machine's own rates, of processes that share its cores.

    Returns:
        Arithmetic of a T5; of a causal model; activations that are read and written; Python for each tensor; what DDP
        or ZeRO adds to it; what ZeRO-3 adds; the optimizer; new memory; the collectives' volume; their messages.
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
    volume, both = (passes * forward + reducing * backward + after for forward, backward, after in network)
    has_encoder, saved = not work.shape.joint, Activations(replace(work, checkpointing=False))
    # Checkpointing makes the forward pass again, a third of all.
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
    """Bytes that a step without a GPU takes from the system anew; each of their pages costs a fault.

    They are the gradients of a large embedding, one for each use and their sum, and the loss's tensors; under DDP the
    other gradients; under ZeRO its copies of all gradients.
    """
    shape, tables = work.shape, 2 - work.shape.tied
    table, uses = work.element_bytes * shape.embedding // tables, 2 if shape.joint else 3
    # A head of its own has its own gradient, beside those of the table.
    summed = uses + 1 if shape.tied else uses + (uses > 2)
    head = Activations(work).head
    made = summed * table * (table > KEPT_BLOCK) + 3 * head * (head > KEPT_BLOCK)
    if work.technique.stage:
        return work.passes * made + NEW_COPIES * MASTER * shape.parameters
    others = work.element_bytes * (shape.parameters - shape.embedding)
    return work.passes * made + others * (work.ranks > 1)
