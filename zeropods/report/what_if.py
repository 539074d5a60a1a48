"""What-if questions about a plan, each answered by another plan; and the whole life of the run that
it recommends."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from zeropods.errors import UserError
from zeropods.measure.record import read_record
from zeropods.plan.estimate import Estimate, Plan, Request, largest, plan, request_for
from zeropods.plan.gpus import GIGA, TERA, cards, memory_bytes
from zeropods.plan.machines import Machines
from zeropods.plan.memory import LOADING
from zeropods.plan.terms import PARTS, Term, total
from zeropods.plan.workload import MASTER, Workload
from zeropods.report.advice import described
from zeropods.report.plan import TIMES, gib
from zeropods.tables import GIB, SECONDS_PER_HOUR, Table, counted, digits
from zeropods.techniques import TECHNIQUES

MOST_PODS = 1 << 14
"""Pods up to which the fewest are looked for. A choice."""
UNITS = {"gpu_memory_bytes": GIB, "host_memory_bytes": GIB, "flops": TERA} | dict.fromkeys(
    ("bandwidth", "pcie_bandwidth", "peer_bandwidth", "nvme_bandwidth"), GIGA
)
"""Factors by which a flag's number is multiplied, for flags whose number is not used as it
stands."""
Ask = Callable[[Request], Plan]
"""A function that plans a request."""
Binds = Callable[[Estimate], str]
"""A function that says what limits an estimate, such as `fullest`."""


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
        values: dict[str, object] = {
            "question": self.question,
            "answer": self.answer,
            "binds": self.binds,
            "command": self.command,
        }
        if self.estimate is not None:
            values["technique"] = self.estimate.technique.name
            values["fits"] = self.estimate.fits
            values["device_bytes"] = self.estimate.memory.device_bytes
            values["host_bytes"] = self.estimate.host_bytes
            values["step_seconds"] = self.estimate.time.seconds
            values["samples_per_second"] = self.estimate.samples_per_second
        return values


def what_ifs(first_plan: Plan, ask: Ask = plan, machine: Path | None = None) -> tuple[WhatIf, ...]:
    """The answers to the questions that people have about a plan and the technique that it
    recommends.

    Args:
        ask: function that plans a request in the same way as the plan itself was made.
        machine: file of the probe that the plan was made with, where one was named.
    """
    answers = _Questions(first_plan, ask).answered()
    if machine is None:
        return tuple(answers)
    flag = f" --machine {shlex.quote(str(machine))}"
    return tuple(replace(answer, command=answer.command + flag) for answer in answers)


def subject(first_plan: Plan) -> str:
    """Which way of a plan the questions and the life of the run are about, in a sentence."""
    which = "the fastest of --all that fits"
    if first_plan.best is None:
        which = "the one of --all with the least memory, since none fits"
    way = described(recommended(first_plan))
    return f"The tables below are about {way}: {which}."


def what_if_table(answers: tuple[WhatIf, ...]) -> Table:
    """A table with a line for each question."""
    lines = []
    for answer in answers:
        line = {
            "what if": answer.question,
            "answer": answer.answer,
            "binds": answer.binds,
            "command": answer.command,
        }
        lines.append(line)
    return Table.of(lines, "What if")


def what_if_text(answers: tuple[WhatIf, ...]) -> str:
    """The table for a terminal, and below it the commands, which no cell could hold in one piece;
    none for a question that could not be planned."""
    table = what_if_table(answers)
    # The command is the last column.
    rows = tuple(row[:-1] for row in table.rows)
    table_without_commands = replace(table, header=table.header[:-1], rows=rows)
    commands = []
    for answer in answers:
        if answer.estimate is not None:
            commands.append(f"# {answer.question}\n{answer.command}\n")
    return f"{table_without_commands}\n{''.join(commands)}"


def command_of(request: Request) -> str:
    """The command line that plans a request; fields that have no flag are left out."""
    if request.techniques == ("none",):
        # It trains in one process whatever the machines: the command says so.
        request = _of_one_process(request)
    gpu = request.machines.gpu
    usual = request_for(
        request.model,
        machines=Machines(gpu=gpu),
        gpu_memory_bytes=memory_bytes(gpu) or GIB,
        trust_remote_code=request.trust_remote_code,
    )
    argv = ["zeropods", "plan", "--model", request.model]
    if gpu != Machines().gpu:
        argv += ["--gpu", gpu]
    argv += _flags_that_differ(request.machines, usual.machines)
    argv += _flags_that_differ(request, usual)
    if request.trust_remote_code:
        argv.append("--trust-remote-code")
    if request.zero.reduce_elements != usual.zero.reduce_elements:
        argv += ["--bucket-size", str(request.zero.reduce_elements)]
    for technique in request.techniques:
        argv += ["--technique", technique]
    return shlex.join(argv)


def _of_one_process(request: Request) -> Request:
    """The same training by one process: on as many rows, so it takes the steps of all
    processes."""
    machines = request.machines
    steps = request.steps
    if steps is not None:
        steps *= machines.pods * machines.slots
    return replace(request, machines=replace(machines, pods=1, slots=1), steps=steps)


def _flags_that_differ(values: Request | Machines, usual: Request | Machines) -> list[str]:
    """The flags for the fields that differ from the usual ones, each followed by its value in the
    unit of the flag."""
    argv = []
    for name, value in vars(values).items():
        # Other types, such as the techniques, are no flags of one value; no flag sets `dropout`.
        has_flag = name != "dropout" and isinstance(value, str | int | float)
        if not has_flag or value == getattr(usual, name):
            continue
        flag = name.removesuffix("_bytes").removesuffix("_seconds").replace("_", "-")
        text = str(value)
        # A truth value is a number to Python.
        if not isinstance(value, str | bool):
            text = f"{value / UNITS.get(name, 1):.12g}"
        argv += [f"--{flag}", text]
    return argv


def recommended(first_plan: Plan) -> Estimate:
    """The best estimate of a plan; if none fits, the one that needs the least memory."""
    if first_plan.best is not None:
        return first_plan.best
    return min(first_plan.estimates, key=lambda estimate: estimate.memory.device_bytes)


def changes(old: Estimate, new: Estimate) -> str:
    """What differs by more than half a percent, from the old value to the new one; and whether the
    new estimate does not fit."""
    figures = (
        ("memory", "GiB", old.memory.device_bytes / GIB, new.memory.device_bytes / GIB),
        ("host", "GiB", old.host_bytes / GIB, new.host_bytes / GIB),
        ("step", "s", old.time.seconds, new.time.seconds),
        ("speed", "samples/s", old.samples_per_second, new.samples_per_second),
    )
    parts = []
    if new.technique != old.technique:
        parts.append(new.technique.name)
    for what, unit, before, after in figures:
        if not math.isclose(before, after, rel_tol=0.005):
            parts.append(f"{what} {digits(before)} to {digits(after)} {unit}")
    if not parts:
        parts.append("no change")
    if not new.fits:
        parts.append("does not fit")
    return "; ".join(parts)


def fullest(estimate: Estimate) -> str:
    """The largest part of the memory, and its share."""
    parts = estimate.memory.parts()
    part = max(PARTS, key=parts.__getitem__)
    return f"memory: {part}, {parts[part] / parts['total']:.0%}"


def slowest(estimate: Estimate) -> str:
    """The part that takes most of a step's time, and its share."""
    longest_part = max(TIMES, key=lambda part: getattr(estimate.time, part))
    share_of_step = getattr(estimate.time, longest_part) / estimate.time.seconds
    return f"time: {TIMES[longest_part]}, {share_of_step:.0%}"


class _Questions:
    """The questions, and the estimate that they are about: the recommended one, or the smallest if
    none fits.

    `all_techniques` is its request with all techniques of the plan, `request` that of its technique
    alone.
    """

    def __init__(self, first_plan: Plan, ask: Ask) -> None:
        self.ask = ask
        self.base = recommended(first_plan)
        # Of the ways of training that were compared, keep the recommended one.
        self.all_techniques = replace(first_plan.request, **self.base.labels)
        self.request = self.all_techniques.with_techniques((self.base.technique.name,))

    def answered(self) -> Iterator[WhatIf]:
        """Each question with its answer, in the order of the table."""
        request = self.request
        yield self.largest_batch()
        yield self.longest_row()
        yield self.fewest_pods()
        yield self.other_technique()
        checkpointing = not request.gradient_checkpointing
        question = f"checkpointing {'on' if checkpointing else 'off'}"
        yield self.compared(
            question, lambda: replace(request, gradient_checkpointing=checkpointing)
        )
        precision = "bf16" if request.precision == "fp32" else "fp32"
        question = f"{precision.upper()}, not {request.precision.upper()}"
        yield self.compared(question, lambda: replace(request, precision=precision))
        pods = request.machines.pods + 1
        yield self.compared("one more pod", lambda: self.on(pods=pods))
        bandwidth = 2 * request.machines.bandwidth
        yield self.compared("twice the bandwidth", lambda: self.on(bandwidth=bandwidth))
        yield self.cheaper_gpu()

    def on(self, **changed: Any) -> Request:
        """A request for all techniques on changed machines."""
        machines = replace(self.all_techniques.machines, **changed)
        return replace(self.all_techniques, machines=machines)

    def fitting(self, make_request: Callable[[], Request]) -> Estimate | None:
        """The best estimate of a request; None where nothing fits, or the request cannot be
        planned.

        Args:
            make_request: makes the request. A function, since a request refuses wrong values as
                soon as it is made.
        """
        try:
            return self.ask(make_request()).best
        except UserError:
            # What cannot be planned does not fit.
            return None

    def compared(
        self,
        question: str,
        make_request: Callable[[], Request],
        beginning: str = "",
        binds: Binds = slowest,
    ) -> WhatIf:
        """Compare a changed request with the plan; where it cannot be planned, the answer says why.

        Args:
            make_request: makes the request, as for `fitting`.
            beginning: text before what differs; left out where the request cannot be planned.
            binds: function that says what limits the answer.
        """
        try:
            request = make_request()
            new = recommended(self.ask(request))
        except UserError as error:
            # After "; " comes a remedy, which the table has no room for.
            reason, *_ = str(error).split("; ")
            answer = f"not possible: {reason}"
            # There is no command for it, so the plan's own stands there.
            return WhatIf(question, answer, "", command_of(self.request), None)
        command = command_of(request.with_techniques((new.technique.name,)))
        answer = beginning + changes(self.base, new)
        return WhatIf(question, answer, binds(new), command, new)

    def nothing(self, question: str, answer: str) -> WhatIf:
        """The answer where nothing fits; its estimate is that of the plan itself."""
        return WhatIf(question, answer, fullest(self.base), command_of(self.request), self.base)

    def largest_batch(self) -> WhatIf:
        """The answer with the most rows per process that fit."""
        question = "largest batch"
        rows = self.base.largest_batch_size
        if rows is None:
            return self.nothing(question, "not even 1 row fits")
        beginning = f"{counted(rows, 'row')} per process; "
        request = self.request
        return self.compared(
            question, lambda: replace(request, batch_size=rows), beginning, fullest
        )

    def longest_row(self) -> WhatIf:
        """The answer with the most tokens per row, of the source for a T5, that fit."""
        question = "longest row"
        request = self.request

        def with_length(length: int) -> Request:
            # Only a causal model has one length for its rows.
            if request.seq_length is None:
                return replace(request, source_length=length)
            return replace(request, seq_length=length)

        # A causal model's row holds the tokens that carry a loss, so it cannot be shorter.
        shortest = request.label_length or 1

        def fits(number_of_lengths: int) -> bool:
            length = shortest + number_of_lengths - 1
            return self.fitting(lambda: with_length(length)) is not None

        # `largest` counts from 1, which stands for the shortest row.
        number_of_lengths = largest(fits)
        if number_of_lengths is None:
            return self.nothing(question, "no length fits")
        longest = shortest + number_of_lengths - 1
        beginning = f"{longest:,} tokens; "
        answer = self.compared(question, lambda: with_length(longest), beginning, fullest)
        try:
            with_length(longest + 1)
        except UserError as error:
            # The model has no more positions: it is not memory that ends the row.
            return replace(answer, binds=str(error))
        return answer

    def fewest_pods(self) -> WhatIf:
        """The answer with the fewest pods on which a technique fits."""
        question = "fewest pods"
        # Else the search below would not end.
        if self.fitting(lambda: self.on(pods=MOST_PODS)) is None:
            return self.nothing(question, "no number of pods is enough")

        def too_few(number: int) -> bool:
            return self.fitting(lambda: self.on(pods=number)) is None

        most_too_few = largest(too_few) or 0
        pods = most_too_few + 1
        beginning = f"{counted(pods, 'pod')}; "
        return self.compared(question, lambda: self.on(pods=pods), beginning, fullest)

    def other_technique(self) -> WhatIf:
        """The answer with the technique of the same stage that offloads where this one does not, or
        the other way round."""
        technique = self.base.technique
        # Without ZeRO nothing can be offloaded; stage 2 is the usual one that can.
        stage = technique.stage or 2
        others = []
        for candidate in TECHNIQUES:
            is_opposite = candidate.offloads != technique.offloads
            if candidate.stage == stage and is_opposite and candidate.is_planned:
                others.append(candidate)
        other = others[0]
        return self.compared(
            f"{other.name}, not {technique.name}",
            lambda: self.request.with_techniques((other.name,)),
        )

    def cheaper_gpu(self) -> WhatIf:
        """The answer with the smallest known GPU that is slower and still enough, among those that
        run CUDA. Prices are not known here: the answer says below which one it would be worth
        it."""
        question = "a cheaper GPU"
        precision = self.all_techniques.precision
        flops = self.all_techniques.machines.achieved_flops(precision)

        def request_on(gpu: str) -> Request:
            # `flops` are those of the plan's own GPU, where they were given.
            memory = memory_bytes(gpu) or 0
            return replace(self.on(gpu=gpu, flops=None), gpu_memory_bytes=memory)

        with_cuda = [card for card in cards() if card.capability is not None]
        smallest_first = sorted(with_cuda, key=lambda card: (card.memory_bytes, card.flops["fp16"]))
        for card in smallest_first:
            request_on_card = partial(request_on, card.name)
            new = self.fitting(request_on_card)
            if new is None:
                continue
            is_slower = request_on_card().machines.achieved_flops(precision) < flops
            if not is_slower:
                continue
            # A pod that trains half as fast is worth half the price.
            rate_of_a_pod = self.base.samples_per_second / self.base.pods
            share_of_price = new.samples_per_second / new.pods / rate_of_a_pod
            beginning = f"{card.name}: worth it below {share_of_price:.0%} of a pod's price; "
            return self.compared(question, request_on_card, beginning)
        return self.nothing(question, "the plan fits on no slower known GPU")


# The whole life of a run: memory of a pod's host, time and disk, phase by phase.

DISK_BYTES_PER_SECOND = 0.5 * GIGA
"""Speed of loading and saving, with their digests: an allowance."""
START_SECONDS = 20.0
"""Seconds for libraries, process group and first kernels: an allowance."""
EVALUATED_SHARE = 0.1
"""Rows of one evaluation as a share of the training set: an allowance. Each epoch ends with an
evaluation and a checkpoint."""


@dataclass(frozen=True)
class LifePhase:
    """A phase of a run."""

    phase: str
    host_bytes: int
    """Bytes of main memory of the fullest pod."""
    seconds: float | None
    """Duration of the phase; None where the plan was not told how many steps or samples there
    are."""
    disk_bytes: int
    """Bytes that the phase leaves on the disk."""
    formula: str
    """What its figures are made of, with the numbers filled in."""


def life(first_plan: Plan, save_seconds: float | None = None) -> tuple[LifePhase, ...]:
    """The phases of the run that a plan recommends, and the whole run after them.

    Args:
        save_seconds: seconds to save one checkpoint, where they are known.
    """
    estimate = recommended(first_plan)
    slots = estimate.slots
    work = estimate.work
    epochs = math.ceil(first_plan.request.epochs)
    weights = _whole_weights(work)

    # What a process needs for the time of loading alone is gone once it trains.
    lasting_terms = [term for term in estimate.memory.host_terms if term.name != LOADING]
    # A process that holds no weights yet.
    bare_bytes = total(lasting_terms, "context")
    start_bytes = slots * (bare_bytes + weights.bytes)
    start_memory = f"{slots} x ({weights.formula} + {gib(bare_bytes)} GiB)"
    if estimate.memory.rank_0_reads:
        start_bytes = slots * bare_bytes + weights.bytes
        start_memory = f"{weights.formula} on rank 0 + {slots} x {gib(bare_bytes)} GiB"
    speed = f"{DISK_BYTES_PER_SECOND / GIGA:g} GB/s"
    start = LifePhase(
        phase="start",
        host_bytes=start_bytes,
        seconds=START_SECONDS + weights.bytes / DISK_BYTES_PER_SECOND,
        disk_bytes=0,
        formula=f"{start_memory}; {START_SECONDS:g} s, {speed}",
    )
    host_bytes = slots * total(lasting_terms)
    terms = " + ".join(f"{term.name} ({gib(term.bytes)} GiB)" for term in lasting_terms)
    steps = LifePhase(
        phase="steps, from the first on",
        host_bytes=host_bytes,
        seconds=estimate.total_seconds,
        disk_bytes=0,
        formula=f"{slots} x ({terms})",
    )
    evaluation = LifePhase(
        phase="evaluation",
        host_bytes=host_bytes,
        seconds=_evaluation_seconds(estimate, first_plan.request.epochs),
        disk_bytes=0,
        formula=f"{epochs} x {EVALUATED_SHARE:.0%} of the rows of an epoch, forward only",
    )
    saving = _saving_phase(work, epochs, save_seconds, host_bytes)
    phases = (start, steps, evaluation, saving)
    return (*phases, _whole_run(phases))


def _whole_weights(work: Workload) -> Term:
    """The weights of the whole model, as its file holds them."""
    return Term.of("weights, FP32", MASTER, work.shape.parameters)


def _saving_phase(
    work: Workload, epochs: int, save_seconds: float | None, host_bytes: int
) -> LifePhase:
    """Saving a checkpoint after each epoch, and the model in the end.

    Args:
        save_seconds: seconds to save one checkpoint, where they are known.
        host_bytes: bytes of main memory that each pod holds while it trains; rank 0's pod gathers
            the model besides.
    """
    model = _saved_model(work)
    checkpoint_terms = _terms_of_a_checkpoint(work)
    checkpoint_bytes = total(checkpoint_terms)
    if save_seconds is None:
        save_seconds = checkpoint_bytes / DISK_BYTES_PER_SECOND
    parts = " + ".join(f"{term.name} {term.formula}" for term in checkpoint_terms)
    gathered = f"on rank 0's pod + {model.formula} gathered"
    return LifePhase(
        phase="saving",
        host_bytes=host_bytes + model.bytes,
        seconds=epochs * save_seconds + model.bytes / DISK_BYTES_PER_SECOND,
        disk_bytes=epochs * checkpoint_bytes + model.bytes,
        formula=f"{gathered}; {epochs} x ({parts}) + the model",
    )


def _evaluation_seconds(estimate: Estimate, epochs: float) -> float | None:
    """Seconds of all evaluations, one after each epoch; None where the time of the steps is not
    known."""
    if estimate.total_seconds is None:
        return None
    # Evaluation is a forward pass alone, in which stage 3 waits for parameters.
    time = estimate.time
    forward_and_backward, recomputed = estimate.work.flops()
    # A backward pass takes twice the operations of a forward pass.
    forward = forward_and_backward / 3
    pass_seconds = time.compute_seconds
    if estimate.technique.divides_parameters:
        pass_seconds += time.exposed_communication_seconds
    # The share of a whole step's seconds that its forward pass takes.
    forward_share = forward / (forward_and_backward + recomputed) * pass_seconds / time.seconds
    seconds_per_epoch = estimate.total_seconds / epochs
    return math.ceil(epochs) * EVALUATED_SHARE * seconds_per_epoch * forward_share


def _saved_model(work: Workload) -> Term:
    """What is trained, as it is saved: the whole model, or its adapters."""
    return Term.of("model", work.saved_bytes, work.trained)


def _terms_of_a_checkpoint(work: Workload) -> list[Term]:
    """The parts of one checkpoint, of all ranks together.

    With adapters transformers leaves frozen weights out of those of ZeRO too
    (`exclude_frozen_parameters`).
    """
    technique = work.technique
    # Of one parameter.
    optimizer_bytes = work.master_bytes + work.moment_bytes
    terms = [
        _saved_model(work),
        Term.about("optimizer", optimizer_bytes, work.trained),
    ]
    if technique.uses_deepspeed and not technique.divides_parameters:
        terms.append(Term.of("weights of ZeRO", work.element_bytes, work.trained))
    return terms


def _whole_run(phases: Sequence[LifePhase]) -> LifePhase:
    """All phases together: the most memory of any, the sum of their bytes on the disk, and the sum
    of their seconds, None where one is not known."""
    known_seconds = [phase.seconds for phase in phases if phase.seconds is not None]
    seconds = None
    formula = "for its time, give --steps or --samples"
    if len(known_seconds) == len(phases):
        seconds = sum(known_seconds)
        formula = "all phases"
    return LifePhase(
        phase="whole run",
        host_bytes=max(phase.host_bytes for phase in phases),
        seconds=seconds,
        disk_bytes=sum(phase.disk_bytes for phase in phases),
        formula=formula,
    )


def life_table(phases: tuple[LifePhase, ...]) -> Table:
    """A table with a line for each phase."""
    lines = []
    for phase in phases:
        line = {
            "phase": phase.phase,
            "host of a pod (GiB)": gib(phase.host_bytes),
            "seconds": "" if phase.seconds is None else digits(phase.seconds),
            "disk (GiB)": gib(phase.disk_bytes) if phase.disk_bytes else "",
            "from": phase.formula,
        }
        lines.append(line)
    return Table.of(lines, "The whole life of the run")


# How often to save a checkpoint on machines that fail now and then.


@dataclass(frozen=True, kw_only=True)
class SaveTimes:
    """Seconds that saving and starting again take."""

    save_seconds: float
    """Seconds to save one checkpoint."""
    restart_seconds: float
    """Seconds from a failure to the first step after it, without the steps that are done again."""
    source: str
    """Where both are from, in words."""


def planned_saves(estimate: Estimate, save_seconds: float | None = None) -> SaveTimes:
    """The times that the plan allows for the checkpoints of an estimate.

    A restart loads libraries and weights, and reads the checkpoint.

    Args:
        save_seconds: seconds to save one, where they are known.
    """
    checkpoint_bytes = total(_terms_of_a_checkpoint(estimate.work))
    weights_bytes = _whole_weights(estimate.work).bytes
    speed = f"{DISK_BYTES_PER_SECOND / GIGA:g} GB/s"
    checkpoint = f"a checkpoint of {gib(checkpoint_bytes)} GiB at {speed}"
    if save_seconds is None:
        save_seconds = checkpoint_bytes / DISK_BYTES_PER_SECOND
        source = f"times are planned, of {checkpoint}"
    else:
        source = f"the restart is planned, from {checkpoint}"
    read_seconds = (weights_bytes + checkpoint_bytes) / DISK_BYTES_PER_SECOND
    return SaveTimes(
        save_seconds=save_seconds,
        restart_seconds=START_SECONDS + read_seconds,
        source=source,
    )


def measured_saves(run: Path) -> SaveTimes:
    """The times that a finished run took: the mean of its saves and its start, each of the slowest
    rank. Its start stands for a restart, though it read no checkpoint unless it was one.

    Raises:
        UserError: the run has no record, or saved nothing.
    """
    record = read_record(run)
    saves = [rank.save_seconds.mean for rank in record.ranks if rank.save_seconds is not None]
    starts = [rank.start_seconds for rank in record.ranks if rank.start_seconds is not None]
    if not saves or not starts:
        raise UserError(
            f"--save-seconds {run}: this run saved nothing; give seconds, or another run"
        )
    return SaveTimes(
        save_seconds=max(saves),
        restart_seconds=max(starts),
        source=f"times are those of {run}",
    )


def saving(
    mtbf_seconds: float, times: SaveTimes, best: Estimate | None
) -> tuple[dict[str, object], str]:
    """How often to save a checkpoint, and what share of the time is then left for training.

    Args:
        mtbf_seconds: mean seconds between two failures that end the run.
        times: what a save and a restart take.
        best: the plan's recommended estimate, in whose steps the interval is counted too.

    Returns:
        Plain values: seconds of training between the end of one save and the start of the next; and
        the goodput, the share of the wall time that is left: without saves, restarts, and what is
        lost to failures and done again. And the same in a sentence.
    """
    interval = interval_between_saves(mtbf_seconds, times.save_seconds)
    goodput = _goodput(mtbf_seconds, times, interval)
    technique = None
    steps = None
    counted_in = ""
    if best is not None:
        technique = best.technique.name
        steps = max(1, round(interval / best.time.seconds))
        counted_in = f", {steps:,} steps of {technique}"
    values: dict[str, object] = {
        "mtbf_seconds": mtbf_seconds,
        "save_seconds": times.save_seconds,
        "restart_seconds": times.restart_seconds,
        "interval_seconds": interval,
        "goodput": goodput,
        "technique": technique,
        "steps": steps,
    }
    every = f"Save every {interval:,.0f} s{counted_in}"
    left = f"{goodput:.1%} of the time is left for steps that count"
    failures = f"with a failure every {mtbf_seconds / SECONDS_PER_HOUR:,.4g} h"
    saves = f"saves of {digits(times.save_seconds)} s"
    restarts = f"restarts of {digits(times.restart_seconds)} s"
    sentence = f"{every}: {left}, {failures}, {saves} and {restarts} (Young 1974, Daly 2006)"
    return values, f"{sentence}; {times.source}."


def interval_between_saves(mtbf_seconds: float, save_seconds: float) -> float:
    """The seconds between two checkpoints that leave the most wall time for steps that count.

    Daly's interval: sqrt(2 S M) x (1 + sqrt(S / 2M) / 3 + S / 18M) - S, for saves of S seconds and
    failures that are M seconds apart on average; M itself where S is at least 2M.

    Daly 2006, doi:10.1016/j.future.2004.11.016, equation 37; its first term is Young's,
    doi:10.1145/361147.361115.
    """
    # S / 2M of the formula; its S / 18M is a ninth of that.
    ratio = save_seconds / (2 * mtbf_seconds)
    if ratio >= 1:
        return mtbf_seconds
    young_seconds = math.sqrt(2 * save_seconds * mtbf_seconds)
    return young_seconds * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_seconds


def _goodput(mtbf_seconds: float, times: SaveTimes, interval: float) -> float:
    """The share of the wall time that is left for steps that count: each interval loses its save,
    each failure half an interval and the time of a restart. 0 where failures leave nothing.

    Args:
        interval: seconds between two saves.
    """
    interval_with_save = interval + times.save_seconds
    left_by_saves = interval / interval_with_save
    lost_to_a_failure = interval_with_save / 2 + times.restart_seconds
    left_by_failures = 1 - lost_to_a_failure / mtbf_seconds
    return max(0.0, left_by_saves * left_by_failures)
