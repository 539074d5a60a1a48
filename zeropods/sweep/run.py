"""A sweep: every run of a matrix in its own processes, one after the other, until each has a result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from zeropods import files, pods
from zeropods.data.manifest import read_manifest
from zeropods.data.prepare import Preparation, prepare
from zeropods.data.sample import write_sample
from zeropods.data.tokenizers import GPT_TINY
from zeropods.errors import UserError, told_differences
from zeropods.evaluate.score_json import TEXT2SQL
from zeropods.files import folder_locked, is_path
from zeropods.launch import command
from zeropods.launch.command import Launch, find_script, flag_values, runner_argv, train_arguments
from zeropods.launch.local import run_planned
from zeropods.launch.outcome import UnopenedError
from zeropods.launch.supervisor import Supervision, run_launch
from zeropods.measure.record import CONFIG, LAUNCH_LOCK, RECORD, read_record
from zeropods.measure.run_folder import locked
from zeropods.plan.known_models import CAUSAL_TINY
from zeropods.pods.backends.cml import is_session
from zeropods.pods.cluster import Cluster
from zeropods.pods.gpus import HIDDEN, VISIBLE, shared_gpus
from zeropods.pods.hostfile import Host, read_hostfile
from zeropods.pods.machine import name_of_process
from zeropods.pods.processes import ending_in_order
from zeropods.programs import variable_set
from zeropods.sweep.matrix import EACH, EFFECTIVE, ROWS, SAMPLE, Cell, Matrix, write_matrix
from zeropods.sweep.results import FILE, RESULTS, Sweep, Trial, answer_runs
from zeropods.tables import digits, progress, said_above
from zeropods.techniques import technique_named
from zeropods.train.arguments import MAX_SEQ_LENGTH, CausalArguments, TextToSQLArguments, arguments_of

LOCK = "sweep.lock"
MATRIX = "matrix.yaml"
"""File beside the runs that holds the matrix as it was read."""


def run_sweep(
    matrix: Matrix,
    out: str | Path,
    cluster: Cluster | None = None,
    *,
    hostfile: Path | None = None,
    again: bool = False,
    argv: Callable[[Launch, Path], list[str]] = runner_argv,
) -> Sweep:
    """Run what a matrix asks for and return all of its results; runs that already have a result are not repeated.

    `OUT/sweep.json` is written after each run, so that after an interrupt or a kill the next call goes on where
    the last one was. Ctrl-C ends the current run, which still writes its record, and then the sweep.

    Args:
        cluster: the cluster to run on; if not given, the sweep starts pods of its own, which end with it.
        hostfile: hosts for the sweep's own pods.
        again: run once more whatever ran out of memory or time, failed, or lost a pod.
        argv: makes the launcher's command, see `Supervision`.

    Raises:
        UserError: nothing was started: the folder has another sweep, a data set is missing, or there are too few pods.
    """
    out = Path(out).resolve()
    # A second sweep in the folder is refused, and so is a folder that holds something else.
    held = folder_locked(out, LOCK, signs=(FILE, LOCK), kind="sweep", flag="--out")
    with ending_in_order(), held, sweep_pods(matrix, cluster, hostfile) as ready:
        planned = trials(matrix, out)
        check_trials(planned)
        provide_datasets(matrix, out)
        check_trials(planned, are_prepared=True)
        refuse_other_runs(planned)
        kept = files.read_object(out / FILE, "move the file away").get("cells", []) if (out / FILE).is_file() else []
        seconds = {row.get("folder"): row.get("seconds") for row in kept}
        write_matrix(matrix, out / MATRIX)
        for trial in planned:
            take_up(trial, seconds.get(trial.name), again=again)
        sweep = Sweep(out=out, matrix=matrix, trials=planned)
        sweep.write()
        waiting = [trial for trial in planned if not trial.is_measured]
        if len(waiting) < len(planned):
            said_above(f"{len(planned) - len(waiting)} of {len(planned)} runs have a result already")
        # Repeats with the same seed end with the same model, which answers once.
        asked = [trial for trial in planned if matrix.seeds or trial.repeat == 1]
        answer_runs([trial.launch.folder for trial in asked if trial.status == "ok"], matrix.questions)
        supervision = Supervision(argv=argv, timeout_seconds=matrix.timeout_seconds)
        without_gpus = pods_have_no_gpu(matrix, cluster, hostfile)
        if without_gpus and any(trial.cell.is_one_process for trial in waiting):
            said_above("runs of one process train without GPUs too, like the pods with which they are compared")
        with progress("sweep", "runs", len(waiting)) as bar:
            for number, trial in enumerate(waiting, 1):
                place = f"run {number} of {len(waiting)}: {trial.name}"
                said_above(f"{place} begins")
                try:
                    _run(trial, ready, supervision, without_gpus=without_gpus)
                except (KeyboardInterrupt, SystemExit):
                    trial.status, trial.reason = "interrupted", "ended with the sweep"
                    raise
                finally:
                    # Each result is on disk before the next run begins.
                    sweep.write()
                per_second = trial.samples_per_second
                rate = "" if per_second is None else f", {digits(per_second)} samples/s"
                reason = "" if trial.reason is None else f": {trial.reason}"
                said_above(f"{place} {trial.status} after {trial.seconds or 0.0:.0f} s{rate}{reason}")
                answer_runs([trial.launch.folder] if trial.status == "ok" and trial in asked else [], matrix.questions)
                bar.update(1)
        return sweep


def _run(trial: Trial, ready: Callable[[], Cluster], supervision: Supervision, *, without_gpus: bool) -> None:
    """Run one trial and store its result in it, whatever it is.

    Args:
        without_gpus: whether a run of one process, which has no pod, is to train without GPUs.
    """
    began, asked = time.monotonic(), trial.launch
    try:
        if trial.cell.is_one_process:
            hidden = variable_set(VISIBLE, HIDDEN) if without_gpus else nullcontext()
            with locked(asked.folder, LAUNCH_LOCK), hidden:
                command.remember(asked)
                trial.take(run_planned(asked, supervision.timeout_seconds), time.monotonic() - began)
            return
        cluster = ready()
        planned = command.plan_launch(cluster, asked.script, asked.arguments, pods=trial.cell.pods)
        record = run_launch(planned, cluster, supervision)
    except (UserError, OSError) as error:
        trial.status, trial.reason = "refused", " ".join(str(error).split())
        if isinstance(error, UnopenedError):
            # A run that failed before it began has measured nothing: the next call tries again.
            trial.status, trial.reason = "refused" if error.status == "failed" else error.status, error.reason
        if trial.status == "interrupted":
            raise KeyboardInterrupt(trial.reason) from None
        trial.seconds = time.monotonic() - began
        return
    if record.status == "interrupted":
        # The supervisor has caught the signal, which was meant for the whole sweep.
        raise KeyboardInterrupt(record.reason)
    trial.take(record, time.monotonic() - began)


# What earlier calls have left, and which parts of it are kept.


def check_trials(trials: Sequence[Trial], *, are_prepared: bool = False) -> None:
    """Refuse what a run would refuse before its first step; the sweep's own data are checked only if `are_prepared`."""
    for trial in {each.cell: each for each in trials}.values():
        try:
            command.check_arguments(trial.launch)
            # The data that lie there may have been prepared by an earlier matrix.
            data = are_prepared or not trial.is_prepared
            command.check_inputs(trial.launch.script, trial.launch.arguments, data=data)
        except UserError as error:
            raise UserError(f"{trial.cell.name}: {error}") from None


def refuse_other_runs(trials: Sequence[Trial]) -> None:
    """Refuse run folders that hold a run with settings that differ from those of the matrix now."""

    def by_flag(identity: Mapping[str, Any]) -> dict[str, object]:
        flags = flag_values(identity["arguments"])
        return {**identity, "arguments": None, **{f"--{name}": value for name, value in flags.items()}}

    for launch in (trial.launch for trial in trials):
        before = command.remembered(launch.folder)
        if before is not None:
            old, new = by_flag(before), by_flag(command.identity(launch))
            changed = [key for key in {**new, **old} if old.get(key) != new.get(key)]
            if changed:
                said = told_differences(old, new, changed[:1])
                raise UserError(f"{launch.folder}: was run with other settings ({said}); choose another --out")


def take_up(trial: Trial, seconds: float | None, *, again: bool) -> None:
    """Take over the result of an earlier call, if the run needs no further attempt.

    A finished run stays finished. Running out of memory or time, failing and losing a pod are results too; `again` asks
    for another try of those. A run that was killed, interrupted, or refused before it began has no result yet.

    Args:
        seconds: wall time of the run, in seconds, if an earlier call recorded it.
    """
    folder = trial.launch.folder
    # Without a configuration, the record is of a launch that ended before it had begun the run.
    if (folder / RECORD).is_file() and (folder / CONFIG).is_file():
        record = read_record(folder)
        if record.status == "ok" or (record.status in RESULTS and not again):
            trial.take(record, seconds)


# The prepared data sets, which are made, or checked against the matrix.


def provide_datasets(matrix: Matrix, out: Path, *, dry: bool = False) -> None:
    """Make the data set of each model and prompt if it does not exist yet, or check those that the matrix names.

    Args:
        dry: make nothing, but refuse raw data that do not exist.
    """
    kind, raw = arguments_of(matrix.script), matrix.data
    for cell in {(cell.model, cell.prompt): cell for cell in matrix.cells}.values():
        folder = dataset_of(matrix, cell, out)
        if folder is None:
            continue
        if raw is not None and dry:
            if raw != SAMPLE and (Path(raw).exists() or is_path(raw)):
                _preparation(matrix, raw, cell).open()
        elif raw is not None:
            if matrix.data == SAMPLE:
                task = cell.prompt if kind is CausalArguments else TEXT2SQL
                raw = str(out / f"{SAMPLE}-{task}")
                write_sample(Path(raw), task=task)
            with progress("prepare", "rows") as bar:
                _, made = prepare(_preparation(matrix, raw, cell), folder, bar.update)
            if made:
                said_above(f"prepared {folder}")
        elif kind is not None and read_manifest(folder).prompt != cell.prompt:
            prepared = read_manifest(folder).prompt
            raise UserError(
                f"{folder}: was prepared with prompt {prepared}, but the matrix has {cell.prompt}; name another set"
            )


def _preparation(matrix: Matrix, data: str, cell: Cell) -> Preparation:
    """How the raw data are prepared for a cell; for a causal script, as its run would prepare them itself."""
    tokenizer = matrix.tokenizer.get(cell.model, matrix.tokenizer.get(EACH, cell.model))
    if arguments_of(matrix.script) is not CausalArguments:
        return Preparation(data=Path(data), tokenizer=tokenizer, prompt=cell.prompt, limit=matrix.limit)
    flags = matrix.flags_of(cell)
    given = {name: flags[name] for name in ("loss_on", "dataset_config", "text_field") if name in flags}
    tiny = flags.get("init") == "random" and tokenizer in CAUSAL_TINY
    return Preparation(
        task=cell.prompt,
        data=Path(data),
        tokenizer=GPT_TINY if tiny else tokenizer,
        max_seq_length=int(flags.get("max_seq_length", MAX_SEQ_LENGTH)),
        limit=matrix.limit or flags.get("subset"),
        **given,
    )


# The pods: those that a sweep is given, or its own, which are replaced when one of them is lost.


@contextmanager
def sweep_pods(matrix: Matrix, given: Cluster | None, hostfile: Path | None) -> Iterator[Callable[[], Cluster]]:
    """Yield a function that gives the cluster for the next run; the sweep's own pods start when needed and end on exit.

    Pods that were given are not replaced: they are somebody else's.

    Args:
        hostfile: names the hosts on which the sweep's own pods are started; this machine if not given.
    """
    count = most_pods(matrix)
    hosts = (given.hosts if given else read_hostfile(hostfile) if hostfile else ())[:count]
    if given is not None and len(hosts) < count:
        raise UserError(f"cluster {given.name}: has {len(hosts)} pods, but the matrix needs {count}")
    for host in hosts:
        if host.slots != matrix.slots:
            raise UserError(
                f"{host.address} has slots={host.slots}, but the matrix has slots: {matrix.slots}; "
                f"set slots: {host.slots} in the matrix, or use pods whose slots match"
            )
    own: Cluster | None = None

    def ready() -> Cluster:
        nonlocal own
        if given is not None:
            return given
        if own is None or not own.is_ready():
            if own is not None:
                own.down()
            name = name_of_process("sweep")
            own = pods.up(count, slots=None if hostfile else matrix.slots, name=name, hostfile=hostfile, lease="kernel")
        return own

    try:
        yield ready
    finally:
        if own is not None:
            own.down()


def pods_have_no_gpu(matrix: Matrix, given: Cluster | None, hostfile: Path | None) -> bool:
    """Whether the pods of a sweep train without the GPUs of this machine, because there are too few for all of them."""
    if given is not None:
        return given.hides_gpus
    count = most_pods(matrix)
    if count == 0 or hostfile is not None or is_session():
        return False
    return HIDDEN in shared_gpus(count, matrix.slots)


def most_pods(matrix: Matrix) -> int:
    """Number of pods of the cell with most of them; 0 where every run is one process of this machine."""
    return max((cell.pods for cell in matrix.cells if not cell.is_one_process), default=0)


# The runs of a sweep as data, and their order.

OF_RAW_DATA = ("dataset_config", "text_field")
"""Flags that say how raw data are read; runs do not get them if the sweep itself has read the data."""
PREPARED = "prepared"
"""Folder of the data sets that a sweep prepares, beside its cells."""


def trials(matrix: Matrix, out: Path) -> list[Trial]:
    """All runs of a matrix in the order in which they are run; finds the script, but reads and starts nothing."""
    script, cells = find_script(matrix.script), matrix.cells
    kind = arguments_of(script) or TextToSQLArguments
    found = []
    for repeat, place in ((n, each) for n in range(1, matrix.repeats + 1) for each in order_of(len(cells), n)):
        cell = cells[place]
        given = {
            kind.called["model_id"]: cell.model,
            "deepspeed": technique_named(cell.technique).file,
            kind.called["dataset_path"]: dataset_of(matrix, cell, out),
            **matrix.flags_of(cell),
            **dict.fromkeys((EFFECTIVE, *(OF_RAW_DATA if matrix.data is not None else ()))),
        }
        rows, folder = matrix.rows(cell), out / cell.name / str(repeat)
        given |= {} if rows is None else {ROWS: rows}
        given |= {"seed": matrix.seeds[repeat - 1]} if matrix.seeds else {}
        pods, slots = (1, 1) if cell.is_one_process else (cell.pods, matrix.slots)
        launch = Launch(
            script=script,
            arguments=tuple(train_arguments(**given, outputdir=folder)),
            folder=folder,
            hosts=tuple(Host(f"pod{number}", slots) for number in range(1, pods + 1)),
            master_port=0,
            launcher="none" if cell.is_one_process else "pdsh",
        )
        found.append(Trial(cell=cell, repeat=repeat, launch=launch, is_prepared=matrix.data is not None))
    return found


def dataset_of(matrix: Matrix, cell: Cell, out: Path) -> Path | None:
    """Path of the prepared data set of a cell, whether it exists yet or not; None for a script that needs none."""
    if matrix.data is not None:
        return out / PREPARED / f"{Path(matrix.data).name}-{Path(cell.model).name}-{cell.prompt}"
    named = matrix.dataset_path.get(cell.prompt, matrix.dataset_path.get(EACH))
    return None if named is None else Path(named).resolve()


def order_of(cells: int, repeat: int) -> tuple[int, ...]:
    """The order of cells 0 ... cells - 1 in one repeat, counted from 1; a machine that slows down favours no cell.

    Each repeat runs every cell once. Repeats come in pairs: a row of a Williams design (Williams 1949,
    Aust. J. Sci. Res. A 2, 149-168), and the same row backwards. After every pair, the mean place of all cells is
    the same, so that a steady drift cancels out. After as many repeats as there are cells (twice as many where
    their number is odd), each cell has had each place equally often, and has followed each other cell equally often.
    The order of a repeat does not depend on how many follow, so more repeats can be added later.
    """
    shift, backwards = divmod(repeat - 1, 2)
    # 0, 1, n - 1, 2, n - 2 ...: all differences between neighbours are different, modulo n.
    first = ((place + 1) // 2 if place % 2 else -(place // 2) for place in range(cells))
    forwards = tuple((place + shift) % cells for place in first)
    return forwards[::-1] if backwards else forwards
