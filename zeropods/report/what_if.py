"""What-if questions about a plan, each answered by another plan; and the whole life of the run that it recommends."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from zeropods.errors import UserError
from zeropods.plan.estimate import Estimate, Plan, Request, largest, plan, request_for
from zeropods.plan.gpus import GIGA, TERA, cards, memory_bytes
from zeropods.plan.machines import Machines
from zeropods.plan.memory import LOADING
from zeropods.plan.terms import PARTS, Term, total
from zeropods.plan.workload import MASTER, MOMENTS
from zeropods.report.plan import TIMES, gib
from zeropods.tables import GIB, Table, counted, digits
from zeropods.techniques import TECHNIQUES

MOST_PODS = 1 << 14
UNITS = {"gpu_memory_bytes": GIB, "host_memory_bytes": GIB, "flops": TERA} | dict.fromkeys(
    ("bandwidth", "pcie_bandwidth", "peer_bandwidth"), GIGA
)
"""Factors by which a flag's number is multiplied, for flags whose number is not used as it stands."""
Ask = Callable[[Request], Plan]
Binds = Callable[[Estimate], str]


@dataclass(frozen=True)
class WhatIf:
    """A question about a plan, and its answer."""

    question: str
    answer: str
    binds: str
    """What limits the answer: the largest part of memory or time, or why no more is possible."""
    command: str
    """Command line that plans what was asked."""
    estimate: Estimate | None
    """The estimate behind the answer; None where nothing could be planned."""

    def to_json(self) -> dict[str, object]:
        """The answer as plain values, with the main figures of what was planned."""
        own = {name: value for name, value in vars(self).items() if name != "estimate"}
        found = self.estimate
        return own if found is None else own | {
            "technique": found.technique.name, "fits": found.fits, "device_bytes": found.memory.device_bytes,
            "host_bytes": found.host_bytes, "step_seconds": found.time.seconds,
            "samples_per_second": found.samples_per_second,
        }  # fmt: skip


def what_ifs(made: Plan, ask: Ask = plan, machine: Path | None = None) -> tuple[WhatIf, ...]:
    """The answers to the questions that people have about a plan and the technique that it recommends.

    Args:
        ask: function that plans a request in the same way as the plan itself was made.
        machine: file of the probe that the plan was made with, where one was named.
    """
    named = "" if machine is None else f" --machine {shlex.quote(str(machine))}"
    return tuple(replace(each, command=each.command + named) for each in _Questions(made, ask).answered())


def what_if_table(found: tuple[WhatIf, ...]) -> Table:
    """A table with a line for each question."""
    lines = ({"what if": e.question, "answer": e.answer, "binds": e.binds, "command": e.command} for e in found)
    return Table.of(lines, "What if")


def what_if_text(found: tuple[WhatIf, ...]) -> str:
    """The table for a terminal, and below it the commands, which no cell could hold in one piece."""
    table = what_if_table(found)
    narrow = replace(table, header=table.header[:-1], rows=tuple(row[:-1] for row in table.rows))
    commands = (f"# {each.question}\n{each.command}\n" for each in found if each.estimate is not None)
    return f"{narrow}\n{''.join(commands)}"


def command_of(request: Request) -> str:
    """The command line that plans a request; fields that have no flag are left out."""
    argv = ["zeropods", "plan", "--model", request.model]
    if request.techniques == ("none",):
        # A single process takes the steps of all processes.
        machines = replace(request.machines, pods=1, slots=1)
        steps = request.steps and request.steps * request.machines.pods * request.machines.slots
        request = replace(request, machines=machines, steps=steps)
    gpu, trusted = request.machines.gpu, request.trust_remote_code
    memory = memory_bytes(gpu) or GIB
    usual = request_for(request.model, machines=Machines(gpu=gpu), gpu_memory_bytes=memory, trust_remote_code=trusted)
    if gpu != Machines().gpu:
        argv += ["--gpu", gpu]
    for asked, other in ((request.machines, usual.machines), (request, usual)):
        for name, value in vars(asked).items():
            if value == getattr(other, name) or not isinstance(value, str | int | float) or name == "dropout":
                continue
            flag = name.removesuffix("_bytes").removesuffix("_seconds").replace("_", "-")
            shown = str(value) if isinstance(value, str | bool) else f"{value / UNITS.get(name, 1):.12g}"
            argv += [f"--{flag}", shown]
    argv += ["--trust-remote-code"] * trusted
    if request.zero.reduce_elements != usual.zero.reduce_elements:
        argv += ["--bucket-size", str(request.zero.reduce_elements)]
    return shlex.join(argv + [word for each in request.techniques for word in ("--technique", each)])


def recommended(made: Plan) -> Estimate:
    """The best estimate of a plan; if none fits, the one that needs the least memory."""
    return made.best or min(made.estimates, key=lambda each: each.memory.device_bytes)


def changes(old: Estimate, new: Estimate) -> str:
    """What differs, from the old value to the new one."""
    figures = (
        ("memory", "GiB", lambda each: each.memory.device_bytes / GIB),
        ("host", "GiB", lambda each: each.host_bytes / GIB),
        ("step", "s", lambda each: each.time.seconds),
        ("speed", "samples/s", lambda each: each.samples_per_second),
    )  # fmt: skip
    said = [] if new.technique == old.technique else [new.technique.name]
    for what, unit, figure in figures:
        if not math.isclose(figure(old), figure(new), rel_tol=0.005):
            said.append(f"{what} {digits(figure(old))} to {digits(figure(new))} {unit}")
    return ("; ".join(said) or "no change") + ("" if new.fits else "; does not fit")


def fullest(found: Estimate) -> str:
    """The largest part of the memory, and its share."""
    parts = found.memory.parts()
    part = max(PARTS, key=parts.__getitem__)
    return f"memory: {part}, {parts[part] / parts['total']:.0%}"


def slowest(found: Estimate) -> str:
    """The part that takes most of a step's time, and its share."""
    part = max(TIMES, key=lambda key: getattr(found.time, key))
    return f"time: {TIMES[part]}, {getattr(found.time, part) / found.time.seconds:.0%}"


class _Questions:
    """The questions, and the estimate that they are about: the recommended one, or the smallest if none fits."""

    def __init__(self, made: Plan, ask: Ask) -> None:
        self.ask = ask
        self.base = recommended(made)
        # Of the ways of training that were compared, keep the recommended one.
        self.every = replace(made.request, **self.base.labels)
        self.one = replace(self.every, techniques=(self.base.technique.name,))

    def answered(self) -> Iterator[WhatIf]:
        """Each question with its answer."""
        one, own, rows = self.one, self.base.technique, self.base.largest_batch_size
        if rows is None:
            yield self.nothing("largest batch", "not even 1 row fits")
        else:
            said = f"{counted(rows, 'row')} per process; "
            yield self.compared("largest batch", lambda: replace(one, batch_size=rows), said, fullest)
        yield self.longest_row()
        if self.fitting(lambda: self.on(pods=MOST_PODS)) is None:
            yield self.nothing("fewest pods", "no number of pods is enough")
        else:
            pods = 1 + (largest(lambda number: self.fitting(lambda: self.on(pods=number)) is None) or 0)
            yield self.compared("fewest pods", lambda: self.on(pods=pods), f"{counted(pods, 'pod')}; ", fullest)
        other = next(e for e in TECHNIQUES if (e.stage, e.offloads) == (own.stage or 2, not own.offloads))
        yield self.compared(f"{other.name}, not {own.name}", lambda: replace(one, techniques=(other.name,)))
        again, precision = not one.gradient_checkpointing, "bf16" if one.precision == "fp32" else "fp32"
        question = f"checkpointing {'on' if again else 'off'}"
        yield self.compared(question, lambda: replace(one, gradient_checkpointing=again))
        question = f"{precision.upper()}, not {one.precision.upper()}"
        yield self.compared(question, lambda: replace(one, precision=precision))
        yield self.compared("one more pod", lambda: self.on(pods=one.machines.pods + 1))
        yield self.compared("twice the bandwidth", lambda: self.on(bandwidth=2 * one.machines.bandwidth))
        yield self.cheaper_gpu()

    def on(self, **changed: Any) -> Request:
        """A request for all techniques on changed machines."""
        return replace(self.every, machines=replace(self.every.machines, **changed))

    def fitting(self, made: Callable[[], Request]) -> Estimate | None:
        """The recommended estimate of a request; None where nothing fits, or the request cannot be planned."""
        try:
            return self.ask(made()).best
        except UserError:
            return None

    def compared(self, question: str, made: Callable[[], Request], said: str = "", binds: Binds = slowest) -> WhatIf:
        """Compare a changed request with the plan.

        Args:
            said: beginning of the answer.
            binds: function that says what limits the answer.
        """
        try:
            request = made()
            new = recommended(self.ask(request))
        except UserError as error:
            reason = str(error).split("; ")[0]
            return WhatIf(question, f"not possible: {reason}", "", command_of(self.one), None)
        command = command_of(replace(request, techniques=(new.technique.name,)))
        return WhatIf(question, said + changes(self.base, new), binds(new), command, new)

    def nothing(self, question: str, answer: str) -> WhatIf:
        """The answer where nothing fits; its estimate is that of the plan itself."""
        return WhatIf(question, answer, fullest(self.base), command_of(self.one), self.base)

    def longest_row(self) -> WhatIf:
        one, least = self.one, self.one.label_length or 1

        def of(length: int) -> Request:
            return replace(one, source_length=length) if one.seq_length is None else replace(one, seq_length=length)

        more = largest(lambda number: self.fitting(lambda: of(least + number - 1)) is not None)
        if more is None:
            return self.nothing("longest row", "no length fits")
        longest = least + more - 1
        found = self.compared("longest row", lambda: of(longest), f"{longest:,} tokens; ", fullest)
        try:
            of(longest + 1)
        except UserError as error:
            return replace(found, binds=str(error))
        return found

    def cheaper_gpu(self) -> WhatIf:
        """The answer with the smallest known GPU that is slower and still enough, among those that run CUDA."""
        question, precision = "a cheaper GPU", self.every.precision
        now = self.every.machines.achieved_flops(precision)

        def of(gpu: str) -> Request:
            return replace(self.on(gpu=gpu, flops=None), gpu_memory_bytes=memory_bytes(gpu) or 0)

        with_cuda = [card for card in cards() if card.capability is not None]
        for card in sorted(with_cuda, key=lambda card: (card.memory_bytes, card.flops["fp16"])):
            gpu = card.name
            new = self.fitting(partial(of, gpu))
            if new is not None and of(gpu).machines.achieved_flops(precision) < now:
                part = new.samples_per_second / new.pods / (self.base.samples_per_second / self.base.pods)
                return self.compared(question, partial(of, gpu), f"{gpu}: worth it below {part:.0%} of a pod's price; ")
        return self.nothing(question, "the plan fits on no slower known GPU")


# The whole life of a run: memory of a pod's host, time and disk, phase by phase.

DISK = 0.5 * GIGA
"""Bytes per second of loading and saving, with their digests: an allowance."""
START_SECONDS = 20.0
"""Seconds for libraries, process group and first kernels: an allowance."""
EVALUATED = 0.1
"""Rows of one evaluation as a share of the training set: an allowance. Each epoch ends with one and a checkpoint."""


@dataclass(frozen=True)
class LifePhase:
    """A phase of a run."""

    phase: str
    host_bytes: int
    """Bytes of main memory of the fullest pod."""
    seconds: float | None
    """Duration of the phase; None where the plan was not told how many steps or samples there are."""
    disk_bytes: int
    """Bytes that the phase leaves on the disk."""
    formula: str


def life(made: Plan, save_seconds: float | None = None) -> tuple[LifePhase, ...]:
    """The phases of the run that a plan recommends, and the whole run after them.

    Args:
        save_seconds: seconds to save one checkpoint, where they are known.
    """
    found, request = recommended(made), made.request
    work, slots, time, times = found.work, found.slots, found.time, math.ceil(request.epochs)
    parameters, stage = work.shape.parameters, work.technique.stage
    weights = Term.of("weights, FP32", MASTER, parameters)
    kept = [term for term in found.memory.host_terms if term.name != LOADING]
    bare, host = total(kept, "context"), slots * total(kept)
    start = f"{slots} x ({weights.formula} + {gib(bare)} GiB); {START_SECONDS:g} s, {DISK / GIGA:g} GB/s"
    steps = f"{slots} x ({' + '.join(f'{term.name} ({gib(term.bytes)} GiB)' for term in kept)})"
    evaluation = None
    if found.total_seconds is not None:
        # Evaluation is a forward pass alone, in which stage 3 waits for parameters.
        both, again = work.flops()
        waits = time.exposed_communication_seconds if stage == 3 else 0.0
        forward = both / 3 / (both + again) * (time.compute_seconds + waits) / time.seconds
        evaluation = times * EVALUATED * (found.total_seconds / request.epochs) * forward
    # The parts of one checkpoint, of all ranks together.
    optimizer = MOMENTS + MASTER * (stage > 0 or work.is_half)
    saved = [Term.of("model", MASTER, parameters), Term.of("optimizer", optimizer, parameters)]
    if stage in (1, 2):
        saved.append(Term.of("weights of ZeRO", work.element_bytes, parameters))
    saving = times * (total(saved) / DISK if save_seconds is None else save_seconds) + weights.bytes / DISK
    parts = " + ".join(f"{term.name} {term.formula}" for term in saved)
    saves = f"on rank 0's pod + {weights.formula} gathered; {times} x ({parts}) + the model"
    rows = f"{times} x {EVALUATED:.0%} of the rows of an epoch, forward only"
    phases = [
        LifePhase("start", slots * (bare + weights.bytes), START_SECONDS + weights.bytes / DISK, 0, start),
        LifePhase("steps, from the first on", host, found.total_seconds, 0, steps),
        LifePhase("evaluation", host, evaluation, 0, rows),
        LifePhase("saving", host + weights.bytes, saving, times * total(saved) + weights.bytes, saves),
    ]
    seconds = [each.seconds for each in phases if each.seconds is not None]
    whole = LifePhase(
        "whole run",
        max(each.host_bytes for each in phases),
        sum(seconds) if len(seconds) == len(phases) else None,
        sum(each.disk_bytes for each in phases),
        "for its time, give --steps or --samples" if evaluation is None else "all phases",
    )
    return (*phases, whole)


def life_table(phases: tuple[LifePhase, ...]) -> Table:
    """A table with a line for each phase."""
    lines = (
        {
            "phase": each.phase,
            "host of a pod (GiB)": gib(each.host_bytes),
            "seconds": "" if each.seconds is None else digits(each.seconds),
            "disk (GiB)": gib(each.disk_bytes) if each.disk_bytes else "",
            "from": each.formula,
        }
        for each in phases
    )
    return Table.of(lines, "The whole life of the run")


# How often to save a checkpoint on machines that fail now and then.


def saving(mtbf_seconds: float, save_seconds: float, best: Estimate | None) -> tuple[dict[str, object], str]:
    """The time between two checkpoints that leaves the most wall time for steps that count.

    Daly's interval: sqrt(2 S M) x (1 + sqrt(S / 2M) / 3 + S / 18M) - S, for saves of S seconds and failures that are M
    seconds apart on average; M itself where S is at least 2M.

    Daly 2006, doi:10.1016/j.future.2004.11.016, equation 37; its first term is Young's, doi:10.1145/361147.361115. Each
    interval loses its save, each failure half an interval; the time of a restart is not counted.

    Args:
        best: the plan's recommended estimate, in whose steps the interval is counted too.

    Returns:
        Plain values: seconds of training between the end of one save and the start of the next; and the goodput, the
        share of the wall time that is left: without saves, and without what is lost to failures and done again. And the
        same in a sentence.
    """
    part = save_seconds / (2 * mtbf_seconds)
    interval = mtbf_seconds
    if part < 1:
        interval = math.sqrt(2 * save_seconds * mtbf_seconds) * (1 + math.sqrt(part) / 3 + part / 9) - save_seconds
    whole = interval + save_seconds
    goodput = max(0.0, interval / whole * (1 - whole / 2 / mtbf_seconds))
    values: dict[str, object] = {
        "mtbf_seconds": mtbf_seconds,
        "save_seconds": save_seconds,
        "interval_seconds": interval,
        "goodput": goodput,
        "technique": None,
        "steps": None,
    }
    counted_in = ""
    if best is not None:
        values |= {"technique": best.technique.name, "steps": max(1, round(interval / best.time.seconds))}
        counted_in = f", {values['steps']:,} steps of {best.technique.name}"
    return values, (
        f"Save every {interval:,.0f} s{counted_in}: {goodput:.1%} of the time is left for steps that count, with a "
        f"failure every {mtbf_seconds / 3600:,.4g} h (Young 1974, Daly 2006)."
    )
