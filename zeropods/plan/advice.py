"""Advice: the fastest way to train that fits, the cheapest that ends in time, and what would make
possible what is not.

A way is a technique with its batch size, accumulation, checkpointing and precision. `ways_of` says
which ones there are; the search here finds what trying each of them would find
(tests/fast/plan/test_plan_advice.py tries them).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from zeropods.errors import UserError
from zeropods.plan.estimate import (
    BOTH,
    FITS,
    NO,
    TIGHT,
    Estimate,
    Request,
    SpanOfRuns,
    is_planned_to_fit,
    largest_batch_size,
    plan,
    requested_techniques,
    rows_per_step,
    total_seconds,
    verdict_of,
    workload_of,
)
from zeropods.plan.gpus import cards, is_before_ampere
from zeropods.plan.machines import step_time
from zeropods.plan.methods import ADAPTERS, LORA, QLORA
from zeropods.plan.workload import Workload
from zeropods.tables import GIB, counted

MOST_STEP_ROWS = 256
"""Rows of all processes in an optimizer step up to which passes are added to it where nobody says
how many rows a step should have. More passes always take less time a row, but a step of more rows
learns less from each. The number is a choice."""
MOST_PODS_OF_A_CHANGE = 1_024
"""Pods up to which as many are looked for as would be enough. A choice too."""
EVERY_NUMBER_OF_PODS = 8
"""Pods up to which the cheapest way is looked for on every number of them. A choice: each number is
a search of its own."""
ADAPTER_NAMES = {LORA: "LoRA", QLORA: "QLoRA"}
SURE, LIKELY, MAYBE = "sure", "likely", "maybe"
LEVELS = (SURE, LIKELY, MAYBE)
"""How well a way must fit: with regard to the plan's error, as planned, or within that error. A
level is only looked at where nothing fits as well as the one before it asks."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What advice may choose, which is what nobody has said; machines, lengths and techniques are
    those of the request."""

    batch: bool = True
    """Whether it may choose rows of a pass and passes of a step; where the request has a
    `global_batch`, only how that is divided into passes."""
    checkpointing: bool = True
    precision: bool = True


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to train: the request that plans it alone, and what is planned."""

    request: Request
    estimate: Estimate

    @property
    def step_rows(self) -> int:
        """Rows of all processes in an optimizer step."""
        return rows_per_step(self.estimate.work)

    def to_json(self) -> dict[str, object]:
        """The way as plain values."""
        estimate = self.estimate
        work = estimate.work
        return {
            "technique": estimate.technique.name,
            "file": None if estimate.technique.file is None else str(estimate.technique.file),
            "precision": work.precision,
            "adapter": self.request.adapter,
            "planned_only": self.request.planned_only,
            "attention": work.attention,
            "gradient_checkpointing": work.checkpointing,
            "batch_size": work.batch_size,
            "gradient_accumulation": work.gradient_accumulation,
            "pods": estimate.pods,
            "slots": estimate.slots,
            "verdict": estimate.verdict,
            "device_bytes": estimate.memory.device_bytes,
            "host_bytes": estimate.host_bytes,
            "step_seconds": estimate.time.seconds,
            "samples_per_second": estimate.samples_per_second,
            "total_seconds": estimate.total_seconds,
            "cost": estimate.cost,
        }


@dataclass(frozen=True, kw_only=True)
class Change:
    """What would make possible what does not fit, and the fastest way with it."""

    what: str
    """The change in a few words, such as `BF16`."""
    way: Way


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What to do on the machines of a request."""

    verdict: str
    """`FITS`, `TIGHT` or `NO`, of what was asked for: the best verdict that any way of it has."""
    ways: tuple[Way, ...]
    """The fastest way of what was asked for by each technique, with checkpointing and without; the
    fastest first. Those that are tight are there where no other of their kind fits."""
    best: Way | None
    """The fastest way that fits; the batch and checkpointing are chosen here whatever was asked.
    Where none fits, the fastest that is tight."""
    cheapest: Way | None
    """The way on the fewest pods' hours that ends in time, on as many pods as the request has or
    fewer; None where the length of the training is not known, or none ends in time."""
    changes: tuple[Change, ...]
    """Where there are no ways: what would fit."""

    def to_json(self) -> dict[str, object]:
        """The advice as plain values."""
        return {
            "best": None if self.best is None else self.best.to_json(),
            "cheapest": None if self.cheapest is None else self.cheapest.to_json(),
            "ways": [way.to_json() for way in self.ways],
            "changes": [{"what": change.what, **change.way.to_json()} for change in self.changes],
        }


def advise(
    request: Request,
    choice: Choice,
    span_of_runs: SpanOfRuns | None = None,
    within_seconds: float | None = None,
) -> Advice:
    """The ways to train on the machines of a request that `choice` leaves open, and what would fit
    where none does; the best and the cheapest way have any batch, with checkpointing or without.

    Args:
        choice: what may be chosen, because no flag says it.
        span_of_runs: as for `plan`.
        within_seconds: the longest that the whole training may take in the cheapest way; None for
            any time.
    """
    search = _Search(_with_samples_for_steps(request), span_of_runs)
    ways = search.ways(choice)
    free_choice = replace(choice, batch=True, checkpointing=True)
    free_ways = ways
    if free_choice != choice:
        free_ways = search.ways(free_choice)
    changes: tuple[Change, ...] = ()
    if not ways:
        changes = tuple(search.changes(choice))
    return Advice(
        verdict=_best_verdict(ways),
        ways=ways,
        # The fastest come first.
        best=_first_that_fits(free_ways),
        cheapest=search.cheapest(free_choice, within_seconds),
        changes=changes,
    )


def _best_verdict(ways: Sequence[Way]) -> str:
    """The best verdict of some ways; `NO` without any."""
    if not ways:
        return NO
    fits = any(way.estimate.verdict == FITS for way in ways)
    return FITS if fits else TIGHT


def _first_that_fits(ways: Sequence[Way]) -> Way | None:
    """The first way that fits; where none does, the first that is planned to, else the first of
    all."""
    for way in ways:
        if way.estimate.verdict == FITS:
            return way
    for way in ways:
        if way.estimate.fits:
            return way
    return ways[0] if ways else None


def _with_samples_for_steps(request: Request) -> Request:
    """The same training by the rows of the training set, which no batch changes."""
    if request.steps is None:
        return request
    machines = request.machines
    step_rows = request.global_batch
    if step_rows is None:
        processes = machines.pods * machines.slots
        step_rows = request.batch_size * request.gradient_accumulation * processes
    return replace(request, steps=None, samples=request.steps * step_rows)


# The space that is searched.


def ways_of(request: Request, choice: Choice) -> Iterator[Request]:
    """A request for each technique, attention, checkpointing and precision that may be chosen.

    BF16 comes before FP32, and FP16 only on GPUs without BF16: where both exist they take the same
    memory and time, and BF16 needs no scaling of the loss.
    """
    precisions = [request.precision]
    if choice.precision:
        precisions = _precisions(request)
    checkpointings = [request.gradient_checkpointing is True]
    if choice.checkpointing or request.gradient_checkpointing == BOTH:
        checkpointings = [False, True]
    techniques = requested_techniques(request)
    all_ways = product(precisions, request.attentions, checkpointings, techniques)
    for precision, attention, checkpointing, technique in all_ways:
        make_request = partial(
            request.with_techniques,
            (technique.name,),
            precision=precision,
            attention=attention if request.shape.is_decoder_only else request.attention,
            gradient_checkpointing=checkpointing,
        )
        changed = _if_possible(make_request)
        if changed is not None:
            yield changed


def _precisions(request: Request) -> list[str]:
    """The precisions that may be chosen on the GPUs of a request, the first of equal ones first."""
    if not is_before_ampere(request.machines.gpu):
        return ["bf16", "fp32"]
    return ["fp16", "fp32"] if "fp16" in request.shape.precisions else ["fp32"]


def _if_possible(make_request: Callable[[], Request]) -> Request | None:
    """The request that is made; None where it cannot be made or planned: it is only one of several
    to try, so that nobody needs to know why."""
    try:
        request = make_request()
        # Both raise what `plan` would raise.
        request.machines.achieved_flops(request.precision)
        requested_techniques(request)
    except UserError:
        return None
    return request


def passes_to_try(request: Request, processes: int) -> list[int]:
    """Passes of an optimizer step that may be chosen: those of the request, and powers of two as
    long as the step has at most `MOST_STEP_ROWS` rows with one row a pass."""
    passes = {1, request.gradient_accumulation}
    doubled = 2
    while doubled * processes <= MOST_STEP_ROWS:
        passes.add(doubled)
        doubled *= 2
    return sorted(passes)


def most_rows_of(request: Request, processes: int, passes: int) -> int | None:
    """Most rows of a pass that may be chosen with so many passes, so that a step has at most
    `MOST_STEP_ROWS`. None, so that memory alone limits them, for a single pass and for as many
    passes as the request has."""
    if passes in (1, request.gradient_accumulation):
        return None
    return MOST_STEP_ROWS // (passes * processes)


def divisors(number: int) -> list[int]:
    """All divisors of a number, in ascending order."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    large = [number // divisor for divisor in reversed(small) if divisor**2 != number]
    return small + large


# The search.


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """A batch of one way that fits, and the seconds of its step."""

    way_request: Request
    """The request for this way, with the batch that was asked for."""
    work: Workload
    """The way's workload, with the batch that was chosen."""
    step_seconds: float

    @property
    def request(self) -> Request:
        """The request that plans the way with the batch that was chosen."""
        passes = self.work.gradient_accumulation
        if self.way_request.global_batch is not None:
            # A request has either; the passes follow from the rows of the step.
            passes = 1
        return replace(
            self.way_request, batch_size=self.work.batch_size, gradient_accumulation=passes
        )

    @property
    def rate(self) -> float:
        """Rows per second of all processes."""
        return rows_per_step(self.work) / self.step_seconds

    @property
    def rounded_rate(self) -> float:
        """The rate by which ways are compared: only the digits that survive rounding count, since
        recomputation that hides behind the network costs nothing."""
        return float(f"{self.rate:.9g}")


class _Search:
    """The search for ways of one request."""

    def __init__(self, request: Request, span_of_runs: SpanOfRuns | None) -> None:
        self.request = request
        self.span_of_runs = span_of_runs

    def ways(self, choice: Choice) -> tuple[Way, ...]:
        """The fastest way by each technique, with checkpointing and without, the fastest first."""
        by_kind: dict[tuple[object, ...], list[Request]] = {}
        for request in ways_of(self.request, choice):
            kind = (*request.techniques, request.gradient_checkpointing)
            by_kind.setdefault(kind, []).append(request)
        candidates = []
        for requests in by_kind.values():
            candidate = self._fastest_at_any_level(requests, choice)
            if candidate is not None:
                candidates.append(candidate)
        candidates.sort(key=lambda candidate: candidate.rounded_rate, reverse=True)
        return tuple(self.way(candidate.request) for candidate in candidates)

    def fastest(self, choice: Choice) -> Way | None:
        """The fastest way that fits, the first of equal ones; where none fits, the fastest that is
        tight; None where none is even that."""
        candidate = self._fastest_at_any_level(list(ways_of(self.request, choice)), choice)
        return None if candidate is None else self.way(candidate.request)

    def _fastest_at_any_level(
        self, requests: Sequence[Request], choice: Choice
    ) -> _Candidate | None:
        """The fastest batch of these requests at the first level at which any fits; None for no
        level."""
        for level in LEVELS:
            candidate = self.fastest_of(requests, choice, level)
            if candidate is not None:
                return candidate
        return None

    def way(self, request: Request) -> Way:
        """A request for one technique with what is planned for it."""
        (estimate,) = plan(request, self.span_of_runs).estimates
        return Way(request=request, estimate=estimate)

    def any_fits(self, choice: Choice) -> bool:
        """Whether any way fits for sure, with any batch that may be chosen."""
        for request in ways_of(self.request, choice):
            if choice.batch and request.global_batch is None:
                # No batch needs less than one row and one pass.
                work = replace(_work_of(request), batch_size=1, gradient_accumulation=1)
                is_enough = self._fits(request, work, SURE)
            else:
                batches = self._batches(request, choice, SURE, best=None)
                is_enough = next(batches, None) is not None
            if is_enough:
                return True
        return False

    def fastest_of(
        self, requests: Iterator[Request] | Sequence[Request], choice: Choice, level: str
    ) -> _Candidate | None:
        """The fastest batch of these requests, each for one technique in one way, and the first of
        equal ones; None where no batch fits as well as the level asks."""
        best = None
        for request in requests:
            for candidate in self._batches(request, choice, level, best):
                if best is None or candidate.rounded_rate > best.rounded_rate:
                    best = candidate
        return best

    def _batches(
        self,
        request: Request,
        choice: Choice,
        level: str,
        best: _Candidate | None,
    ) -> Iterator[_Candidate]:
        """The batches of one way that fit, or some of them: the fastest is there, unless it is no
        faster than `best`, the best of other ways."""
        work = _work_of(request)
        if not choice.batch:
            if self._fits(request, work, level):
                yield _candidate(request, work)
        elif request.global_batch is not None:
            yield from self._divided_batches(request, work, level)
        else:
            yield from self._free_batches(request, work, level, best)

    def _free_batches(
        self, request: Request, work: Workload, level: str, best: _Candidate | None
    ) -> Iterator[_Candidate]:
        """The largest batch that fits for each number of passes, without those that are no faster
        than `best`.

        With the same passes no smaller batch is faster, since what a pass takes beside its rows
        does not grow with them.
        """
        most = self._most_rows(request, replace(work, gradient_accumulation=1), level)
        if most == 0:
            return
        for passes in passes_to_try(request, work.ranks):
            limit = most_rows_of(request, work.ranks, passes)
            # More passes never need less memory.
            rows = most if limit is None else min(most, limit)
            if rows == 0:
                continue
            batch = replace(work, batch_size=rows, gradient_accumulation=passes)
            candidate = _candidate(request, batch)
            # It is not yet known to fit, but finding out would take longer.
            if best is not None and candidate.rounded_rate <= best.rounded_rate:
                continue
            if passes > 1 and not self._fits(request, batch, level):
                rows = self._fewer_rows(request, batch, level)
                if rows == 0:
                    continue
                candidate = _candidate(request, replace(batch, batch_size=rows))
            yield candidate

    def _divided_batches(
        self, request: Request, work: Workload, level: str
    ) -> Iterator[_Candidate]:
        """All batches that come to the request's `global_batch` and fit."""
        step_rows = request.global_batch
        assert step_rows is not None, "`_batches` calls this for a request with a global batch"
        if step_rows % work.ranks != 0:
            return
        rows_of_a_process = step_rows // work.ranks
        for rows in divisors(rows_of_a_process):
            passes = rows_of_a_process // rows
            divided = replace(work, batch_size=rows, gradient_accumulation=passes)
            if self._fits(request, divided, level):
                yield _candidate(request, divided)

    def _most_rows(self, request: Request, work: Workload, level: str) -> int:
        """The most rows of a pass that fit; 0 for none."""

        def fits(rows: int) -> bool:
            return self._fits(request, replace(work, batch_size=rows), level)

        return largest_batch_size(request, work, fits) or 0

    def _fewer_rows(self, request: Request, work: Workload, level: str) -> int:
        """The most rows of a pass that fit, where those of a workload do not; 0 for none."""

        def fits(rows: int) -> bool:
            return self._fits(request, replace(work, batch_size=rows), level)

        # The index of the first number that does not fit: as the numbers begin with 1, it is the
        # last one that does.
        return bisect_left(range(1, work.batch_size), True, key=lambda rows: not fits(rows))

    def _fits(self, request: Request, work: Workload, level: str) -> bool:
        """Whether a workload fits as well as a level of `LEVELS` asks."""
        if level == LIKELY:
            return is_planned_to_fit(request, work, self.span_of_runs)
        verdict = verdict_of(request, work, self.span_of_runs)
        return verdict == FITS or (level == MAYBE and verdict == TIGHT)

    # On fewer pods, and on what would be enough.

    def cheapest(self, choice: Choice, within_seconds: float | None) -> Way | None:
        """The way that takes the fewest pods' hours among those that end in time, on any number of
        pods up to that of the request; the fastest of equal ones. None where the length of the
        training is not known, or no way ends in time."""
        if self.request.samples is None:
            return None
        candidates = []
        for pods in pods_to_try(self.request.machines.pods):
            request = self._on_pods(pods, choice)
            if request is None:
                continue
            search = _Search(request, self.span_of_runs)
            for way_request in ways_of(request, choice):
                candidate = search.fastest_of([way_request], choice, SURE)
                if candidate is None:
                    continue
                seconds = total_seconds(way_request, candidate.work, candidate.step_seconds)
                assert seconds is not None, "the request has samples"
                if within_seconds is None or seconds <= within_seconds:
                    candidates.append(candidate)

        def price_and_rate(candidate: _Candidate) -> tuple[float, float]:
            is_alone = candidate.work.technique.is_alone
            pods = 1 if is_alone else candidate.way_request.machines.pods
            pod_seconds_of_a_row = pods / candidate.rate
            # Rounded like the rate; the faster of equally cheap ones comes first.
            return float(f"{pod_seconds_of_a_row:.9g}"), -candidate.rounded_rate

        cheapest = min(candidates, key=price_and_rate, default=None)
        return None if cheapest is None else self.way(cheapest.request)

    def _on_pods(self, pods: int, choice: Choice) -> Request | None:
        """The request on so many pods, where need be with one row a pass if the batch may be
        chosen; None where the pods cannot share the rows of its step."""
        machines = replace(self.request.machines, pods=pods)
        changed = _if_possible(partial(replace, self.request, machines=machines))
        if changed is None and choice.batch:
            # Another number of rows a pass may reach the rows of the step.
            one_row = partial(replace, self.request, machines=machines, batch_size=1)
            changed = _if_possible(one_row)
        return changed

    def changes(self, choice: Choice) -> Iterator[Change]:
        """What would fit in place of what was asked for, one thing changed at a time; if that is
        not enough, all of it."""
        is_one_change_enough = False
        for what, request, choice_with_change in self._alternatives(choice):
            way = _Search(request, self.span_of_runs).fastest(choice_with_change)
            if way is not None:
                is_one_change_enough = True
                yield Change(what=what, way=way)
        if not is_one_change_enough:
            request = self.request.with_techniques(())
            way = _Search(request, self.span_of_runs).fastest(Choice())
            if way is not None:
                yield Change(what="another technique, batch and precision together", way=way)
        yield from self._other_machines(choice)

    def _alternatives(self, choice: Choice) -> Iterator[tuple[str, Request, Choice]]:
        """Changes on the same machines: each in words, its request, and what may be chosen in
        it."""
        request = self.request
        if not choice.batch:
            yield "fewer rows a pass", request, replace(choice, batch=True)
        if not choice.checkpointing and request.gradient_checkpointing is False:
            checkpointed = replace(request, gradient_checkpointing=True)
            yield "checkpointing", checkpointed, choice
        if request.techniques:
            yield "another technique", request.with_techniques(()), choice
        if not choice.precision:
            for precision in _precisions(request):
                other = _if_possible(partial(replace, request, precision=precision))
                if other is not None and precision != request.precision:
                    yield precision.upper(), other, choice
        if request.adapter is None and request.shape.is_decoder_only:
            yield from self._with_adapters(choice)

    def _with_adapters(self, choice: Choice) -> Iterator[tuple[str, Request, Choice]]:
        """The same for each kind of adapter: with the techniques that were asked for or, where
        these cannot train adapters, with any."""
        request = self.request
        for adapter in ADAPTERS:
            for techniques in (request.techniques, ()):
                make_request = partial(
                    request.with_techniques, techniques, adapter=adapter, precision="bf16"
                )
                adapted = _if_possible(make_request)
                if adapted is not None:
                    yield ADAPTER_NAMES[adapter], adapted, replace(choice, precision=False)
                    break

    def _other_machines(self, choice: Choice) -> Iterator[Change]:
        """The fewest pods, the smallest GPU and the memory of the host that would be enough, each
        by itself; nothing for one that would not."""
        change = self._more_pods(choice)
        if change is not None:
            yield change
        change = self._larger_gpu(choice)
        if change is not None:
            yield change
        if self.request.host_memory_bytes is not None:
            unlimited = replace(self.request, host_memory_bytes=None)
            way = _Search(unlimited, self.span_of_runs).fastest(choice)
            if way is not None:
                what = f"{math.ceil(way.estimate.host_bytes / GIB):,} GiB of host memory a pod"
                yield Change(what=what, way=way)

    def _more_pods(self, choice: Choice) -> Change | None:
        """The fewest pods on which something fits; None where no number of them is enough."""
        pods = self._fewest_pods(choice)
        if pods is None:
            return None
        request = self._on_pods(pods, choice)
        if request is None:
            return None
        way = _Search(request, self.span_of_runs).fastest(choice)
        return None if way is None else Change(what=counted(pods, "pod"), way=way)

    def _fewest_pods(self, choice: Choice) -> int | None:
        """The fewest pods, more than there are, on which something fits; None where no number up to
        `MOST_PODS_OF_A_CHANGE` is enough."""

        def is_enough(pods: int) -> bool:
            request = self._on_pods(pods, choice)
            return request is not None and _Search(request, self.span_of_runs).any_fits(choice)

        more_pods = range(self.request.machines.pods + 1, MOST_PODS_OF_A_CHANGE + 1)
        step_rows = self.request.global_batch
        if step_rows is not None:
            # Other numbers of pods cannot share the rows of a step. So a number that is enough may
            # be followed by one that is not, and bisection would not find the first.
            for pods in divisors(step_rows):
                if pods in more_pods and is_enough(pods):
                    return pods
            return None
        if not more_pods or not is_enough(more_pods[-1]):
            return None
        return more_pods[bisect_left(more_pods, True, key=is_enough)]

    def _larger_gpu(self, choice: Choice) -> Change | None:
        """The known GPU with the least memory on which something fits, of those with more than the
        request's; None where there is none. GPUs of AMD are left out."""
        with_cuda = [card for card in cards() if card.capability is not None]
        for card in sorted(with_cuda, key=lambda card: card.memory_bytes):
            if card.memory_bytes <= self.request.gpu_memory_bytes:
                continue
            # FLOP/s that were given are those of the request's GPU.
            machines = replace(self.request.machines, gpu=card.name, flops=None)
            memory = card.memory_bytes
            request = _if_possible(
                partial(replace, self.request, machines=machines, gpu_memory_bytes=memory)
            )
            if request is None:
                continue
            search = _Search(request, self.span_of_runs)
            if not search.any_fits(choice):
                continue
            way = search.fastest(choice)
            if way is not None:
                return Change(what=f"GPUs of {memory / GIB:.4g} GiB ({card.name})", way=way)
        return None


def pods_to_try(most: int) -> list[int]:
    """Numbers of pods on which the cheapest way is looked for: all up to `EVERY_NUMBER_OF_PODS`,
    then those that double, and the most."""
    pods = set(range(1, min(most, EVERY_NUMBER_OF_PODS) + 1))
    doubled = 2 * EVERY_NUMBER_OF_PODS
    while doubled < most:
        pods.add(doubled)
        doubled *= 2
    return sorted(pods | {most})


def _work_of(request: Request) -> Workload:
    """The workload of a request for one technique in one way."""
    (technique,) = requested_techniques(request)
    (attention,) = request.attentions
    is_checkpointing = request.gradient_checkpointing is True
    return workload_of(request, technique, attention, checkpointing=is_checkpointing)


def _candidate(request: Request, work: Workload) -> _Candidate:
    """The candidate of a way, with the time that its step is planned to take."""
    seconds = step_time(work, request.machines).seconds
    return _Candidate(way_request=request, work=work, step_seconds=seconds)
