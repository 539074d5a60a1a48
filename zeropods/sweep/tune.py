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
        measured = [tried for tried in self.tries if tried.samples_per_second]
        return max(measured, key=lambda tried: tried.samples_per_second or 0.0, default=None)

    def to_json(self) -> dict[str, object]:
        """What was tried, as plain values."""
        best = self.best
        lines = []
        for tried in self.tries:
            lines.append({**asdict(tried), "samples_per_second": tried.samples_per_second})
        return {
            "tries": lines,
            "best": None if best is None else self.tries.index(best),
            "file": str(self.file),
        }

    def to_text(self) -> str:
        """A table of the tries, the best of them, and what becomes of them."""
        table = Table.of([_line(tried) for tried in self.tries])
        sentences = []
        best = self.best
        if best is None:
            sentences.append("None of them ran to its end; their folders have the reasons.")
        else:
            rate = digits(best.samples_per_second or 0.0)
            sentences.append(f"Best of those tried: {best.way.technique}, {rate} samples/s.")
        on_gpus = [tried for tried in self.tries if tried.gpu]
        if on_gpus:
            sentences.append(f"{self.file}: later plans for {on_gpus[0].gpu} know what fitted.")
        else:
            sentences.append(f"{self.file}: tried without a GPU, so no plan uses it.")
        return "\n\n".join([str(table).rstrip("\n"), "\n".join(sentences)])


def _line(tried: Try) -> dict[str, object]:
    """A try as a line of the table."""
    rate = tried.samples_per_second
    return {
        "technique": tried.way.technique,
        "checkpointing": "yes" if tried.way.checkpointing else "no",
        "batch size (rows)": f"{tried.rows}x{tried.passes}",
        "status": tried.status,
        "planned (GiB)": digits(tried.planned_bytes / GIB),
        "planned step (s)": digits(tried.planned_step_seconds),
        "step (s)": "" if tried.step_seconds is None else digits(tried.step_seconds),
        "samples/s": "" if rate is None else digits(rate),
    }


def tune(
    ways: Sequence[Way], data: str, out: Path, cluster: Cluster | None, steps: int = STEPS
) -> Tuning:
    """Try the first few ways for some steps each, and keep how each ended.

    A way that runs out of memory is tried again with half of the rows or fewer and as many more
    passes, until it runs or has one row.

    Args:
        ways: ways of this project, the best first.
        data: the data of the script that trains the model.
        out: folder of the runs; those that are finished there are not repeated.
        cluster: the pods at hand; None where all ways are of this machine.
        steps: optimizer steps of a try.

    Raises:
        UserError: a run was refused, so that nothing of it was measured.
    """
    tried = list[Try]()
    kept = files.home() / tries.TRIES
    with ending_in_order():
        for way in ways[:MOST_WAYS]:
            for smaller in with_fewer_rows(way):
                said_above(f"{described(smaller.estimate)} begins")
                result = _try(smaller, _call_of(smaller, data, out, steps), cluster)
                kept = tries.keep(result, files.home())
                tried.append(result)
                reason = "" if result.reason is None else f": {result.reason}"
                said_above(f"{described(smaller.estimate)} ended: {result.status}{reason}")
                if result.status != OUT_OF_MEMORY:
                    break
    return Tuning(tries=tuple(tried), file=kept)


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
    """The way of a request for one technique with so many rows of a pass and passes of a step."""
    if request.global_batch is not None:
        # The passes follow from it.
        passes = 1
    smaller = replace(request, batch_size=rows, gradient_accumulation=passes)
    (estimate,) = plan(smaller).estimates
    return Way(request=smaller, estimate=estimate)


def _try(way: Way, call: ScriptCall, cluster: Cluster | None) -> Try:
    """Train some steps in this way, and return how that ended."""
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
    words = launch_words(way.request, way, data)
    if words is None:
        raise UserError(why_no_command(way.request.model))
    script, *arguments = words[words.index("--") + 1 :]
    work = way.estimate.work
    # All that a call depends on: a folder holds one run.
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
    """Run a call on as many pods as its way has, or on this machine where that is one."""
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
        # The data may have no rows of the length that was planned: those that ran say what fits.
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
    if gpu is None or words(request.machines.gpu) <= words(gpu):
        return request.gpu_memory_bytes
    return memory_bytes(gpu) or request.gpu_memory_bytes
