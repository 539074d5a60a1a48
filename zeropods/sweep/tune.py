"""The best plans, tried on the pods at hand for some steps, with fewer rows where memory was not
enough: `zeropods plan --tune`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from zeropods import files
from zeropods.data.manifest import read_manifest
from zeropods.errors import UserError
from zeropods.launch import command
from zeropods.launch.outcome import UnopenedError
from zeropods.launch.script_call import ScriptCall, find_script, train_arguments
from zeropods.launch.supervisor import Supervision, run_launch
from zeropods.measure import tries
from zeropods.measure.planned_runs import measured_step, recorded_work
from zeropods.measure.record import Record
from zeropods.measure.tries import OK, OUT_OF_MEMORY, Try
from zeropods.plan.advice import Way, divisors
from zeropods.plan.estimate import Request, plan
from zeropods.plan.gpus import memory_bytes, words
from zeropods.plan.workload import Workload
from zeropods.pods.cluster import Cluster
from zeropods.pods.gpus import check_gpus_for
from zeropods.pods.processes import ending_in_order
from zeropods.report.advice import described, launch_words, why_no_command
from zeropods.sweep.run import run_alone
from zeropods.tables import GIB, Table, digits, said_above
from zeropods.train.flags import TextToSQLArguments, arguments_of

MOST_WAYS = 3
"""Plans that are tried: the fastest of as many techniques, with checkpointing or without."""
STEPS = 8
"""Optimizer steps of a try, the first of which warm up."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What was tried, in this order, and the file in which it is kept."""

    tries: tuple[Try, ...]
    file: Path

    @property
    def best(self) -> Try | None:
        """The try that trained most rows per second; None where none was measured."""
        measured = [attempt for attempt in self.tries if attempt.samples_per_second]
        return max(measured, key=lambda attempt: attempt.samples_per_second or 0.0, default=None)

    def to_json(self) -> dict[str, object]:
        """What was tried, as plain values; `best` is the place of the best try, from 0."""
        best = self.best
        attempts = []
        for attempt in self.tries:
            attempts.append({**asdict(attempt), "samples_per_second": attempt.samples_per_second})
        return {
            "tries": attempts,
            "best": None if best is None else self.tries.index(best),
            "file": str(self.file),
        }

    def to_text(self) -> str:
        """A table of the tries, and sentences on the best of them and on what is kept of them."""
        table = Table.of([_line(attempt) for attempt in self.tries])
        sentences = []
        best = self.best
        if best is None:
            sentences.append("None of them ran to its end; their folders have the reasons.")
        else:
            rate = digits(best.samples_per_second or 0.0)
            sentences.append(f"Best of those tried: {best.way.technique}, {rate} samples/s.")
        on_gpus = [attempt for attempt in self.tries if attempt.gpu]
        if on_gpus:
            sentences.append(f"{self.file}: later plans for {on_gpus[0].gpu} know what fitted.")
        else:
            sentences.append(f"{self.file}: tried without a GPU, so no plan uses it.")
        return "\n\n".join([str(table).rstrip("\n"), "\n".join(sentences)])


def _line(attempt: Try) -> dict[str, object]:
    """A try as a line of the table."""
    step_seconds = attempt.step_seconds
    rate = attempt.samples_per_second
    return {
        "technique": attempt.way.technique,
        "checkpointing": "yes" if attempt.way.checkpointing else "no",
        "batch size (rows)": f"{attempt.rows}x{attempt.passes}",
        "status": attempt.status,
        "planned (GiB)": digits(attempt.planned_bytes / GIB),
        "planned step (s)": digits(attempt.planned_step_seconds),
        "step (s)": "" if step_seconds is None else digits(step_seconds),
        "samples/s": "" if rate is None else digits(rate),
    }


def tune(
    ways: Sequence[Way], data: str, out: Path, cluster: Cluster | None, steps: int = STEPS
) -> Tuning:
    """Try the first `MOST_WAYS` ways for some steps each, and keep how each try ended, for later
    plans, in a file of `zeropods.files.home`.

    A way that runs out of memory is tried again with half of the rows of a pass or fewer, and with
    more passes for the same rows of a step, until it runs or has one row.

    Args:
        ways: ways to train that this project has commands for, the best first.
        data: the data of the script that trains the model.
        out: folder of the runs; those that are finished there are not repeated.
        cluster: the pods at hand; None where all ways are of this machine.
        steps: optimizer steps of a try.

    Raises:
        UserError: a run was refused, so that nothing of it was measured.
    """
    attempts = list[Try]()
    kept_in = files.home() / tries.TRIES
    with ending_in_order():
        for way in ways[:MOST_WAYS]:
            for smaller in with_fewer_rows(way):
                said_above(f"{described(smaller.estimate)} begins")
                attempt = _try(smaller, _call_of(smaller, data, out, steps), cluster)
                kept_in = tries.keep(attempt, files.home())
                attempts.append(attempt)
                reason = "" if attempt.reason is None else f": {attempt.reason}"
                said_above(f"{described(smaller.estimate)} ended: {attempt.status}{reason}")
                # Fewer rows are of use only where memory was not enough.
                if attempt.status != OUT_OF_MEMORY:
                    break
    return Tuning(tries=tuple(attempts), file=kept_in)


def with_fewer_rows(way: Way) -> Iterator[Way]:
    """A way, and the same with fewer and fewer rows of a pass, down to one; the rows of a step stay
    the same."""
    work = way.estimate.work
    rows_of_step = work.batch_size * work.gradient_accumulation
    yield way
    rows = work.batch_size
    while rows > 1:
        rows = max(number for number in divisors(rows_of_step) if number <= rows // 2)
        yield _with_rows(way.request, rows, rows_of_step // rows)


def _with_rows(request: Request, rows: int, passes: int) -> Way:
    """The way of a request with these rows of a pass and passes of a step.

    Args:
        request: asks for a single technique, so that its plan has one estimate.
    """
    if request.global_batch is not None:
        # The passes follow from the global batch, and are not given.
        passes = 1
    smaller = replace(request, batch_size=rows, gradient_accumulation=passes)
    (estimate,) = plan(smaller).estimates
    return Way(request=smaller, estimate=estimate)


def _try(way: Way, call: ScriptCall, cluster: Cluster | None) -> Try:
    """Train some steps in this way, and return how the run ended.

    Raises:
        UnopenedError: the run never began, for another reason than too little memory.
        KeyboardInterrupt: a signal has ended the run; the whole of `tune` is to end.
    """
    try:
        record = _run(way, call, cluster)
    except UnopenedError as error:
        if error.status == "interrupted":
            raise KeyboardInterrupt(error.reason) from None
        if error.status != OUT_OF_MEMORY:
            raise
        return outcome_of(way, call, error.status, error.reason, None)
    if record.status == "interrupted":
        raise KeyboardInterrupt(record.reason)
    return outcome_of(way, call, record.status, record.reason, record)


def _call_of(way: Way, data: str, out: Path, steps: int) -> ScriptCall:
    """The script and its flags that train some steps in this way, into a folder of its own."""
    launch_command = launch_words(way.request, way, data)
    if launch_command is None:
        raise UserError(why_no_command(way.request.model))
    script, *arguments = launch_command[launch_command.index("--") + 1 :]
    work = way.estimate.work
    # A folder holds one run, so its name has all that a call depends on.
    parts = [
        Path(way.request.model).name,
        Path(data).name,
        work.technique.name,
        work.precision,
        f"{work.batch_size}x{work.gradient_accumulation}",
        f"{way.estimate.pods}-pods",
        f"{way.estimate.slots}-slots",
    ]
    if work.shape.is_decoder_only:
        parts += [f"{work.tokens}-tokens", work.attention]
    if work.checkpointing:
        parts.append("checkpointing")
    names = (arguments_of(script) or TextToSQLArguments).names_here
    of_a_try = {
        names["max_steps"]: steps,
        "eval_steps": 0,
        "save_steps": 0,
        "save_model": False,
        "outputdir": out.resolve() / "-".join(parts),
    }
    return ScriptCall(find_script(script), (*arguments, *train_arguments(**of_a_try)))


def _run(way: Way, call: ScriptCall, cluster: Cluster | None) -> Record:
    """Run a call on as many pods as its way has, or on this machine if there is no cluster or the
    technique runs in one process; a run that is finished already is not repeated."""
    command.check_inputs(call)
    supervision = Supervision()
    estimate = way.estimate
    if cluster is not None and not estimate.technique.is_alone:
        launch = command.plan_launch(cluster, call, pods=estimate.pods)
        return run_launch(launch, cluster, supervision)
    launch = command.plan_alone(call, estimate.slots)
    check_gpus_for(launch.world_size)
    earlier = command.finished_record(launch)
    if earlier is not None:
        return earlier
    without_gpus = cluster is not None and cluster.hides_gpus
    return run_alone(launch, supervision, without_gpus=without_gpus)


def outcome_of(
    way: Way, call: ScriptCall, status: str, reason: str | None, record: Record | None
) -> Try:
    """How a way ended, and what was measured of it.

    Args:
        record: None where the run ended before it had one.
    """
    estimate = way.estimate
    work = estimate.work
    tokens, labels = work.tokens, work.labels
    gpu = None
    step_seconds = None
    if record is not None:
        gpu = next((rank.gpu for rank in record.ranks if rank.gpu), None)
    if record is not None and status == OK:
        step_seconds = measured_step(record)
        # The data may have no rows as long as planned. Only the longest that ran is known to fit.
        largest = recorded_work(record)
        if largest is not None:
            tokens, labels = largest.tokens, largest.labels
    if status == OUT_OF_MEMORY:
        tokens, labels = _longest_row(work, call)
    return Try(
        way=tries.TriedWay.of(work),
        rows=work.batch_size,
        passes=work.gradient_accumulation,
        tokens=tokens,
        labels=labels,
        gpu=gpu,
        gpu_memory_bytes=_memory_bytes(way.request, gpu),
        status=status,
        reason=reason,
        step_seconds=step_seconds,
        planned_step_seconds=estimate.time.seconds,
        planned_bytes=estimate.memory.device_bytes,
        folder=str(call.folder),
    )


def _longest_row(work: Workload, call: ScriptCall) -> tuple[int, int]:
    """The most tokens and labels that a row may have had which was too much: rows of a T5's data
    are not cut to the lengths of a plan, and any token of another model may have a label."""
    if work.shape.is_decoder_only:
        return work.tokens, max(work.labels, work.tokens - 1)
    manifest = read_manifest(Path(str(call.values["dataset_path"])))
    tokens = max(work.tokens, manifest.max_source_tokens or 0)
    labels = max(work.labels, manifest.max_target_tokens or 0)
    return tokens, labels


def _memory_bytes(request: Request, gpu: str | None) -> int:
    """Bytes of the memory of the GPU that was used: as planned, unless the plan was for another GPU
    and this one's memory is known."""
    # The planned name may have fewer words: `A100` for `NVIDIA A100-SXM4-40GB`.
    is_planned_gpu = gpu is not None and words(request.machines.gpu) <= words(gpu)
    if gpu is None or is_planned_gpu:
        return request.gpu_memory_bytes
    return memory_bytes(gpu) or request.gpu_memory_bytes
