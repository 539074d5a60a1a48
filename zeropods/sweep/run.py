"""A sweep: every run of a matrix in its own processes, one after the other, until each has a
result."""

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
from zeropods.files import folder_locked, is_path
from zeropods.launch import command
from zeropods.launch.command import Launch, runner_argv
from zeropods.launch.local import run_planned
from zeropods.launch.outcome import UnopenedError
from zeropods.launch.script_call import ScriptCall, find_script, flag_values, train_arguments
from zeropods.launch.supervisor import Supervision, run_launch
from zeropods.measure.record import CONFIG, LAUNCH_LOCK, RECORD, Record, read_record
from zeropods.measure.run_folder import locked
from zeropods.plan.known_models import CAUSAL_TINY
from zeropods.pods.cluster import BACKENDS, Cluster, usual_backend
from zeropods.pods.gpus import HIDDEN, VISIBLE
from zeropods.pods.hostfile import Host, read_hostfile
from zeropods.pods.machine import name_of_process
from zeropods.pods.processes import ending_in_order
from zeropods.programs import variable_set
from zeropods.sweep.matrix import (
    ALL_OTHERS,
    EFFECTIVE_BATCH_SIZE,
    GENERATED_DATA,
    Cell,
    Matrix,
    write_matrix,
)
from zeropods.sweep.results import RESULT_STATUSES, SWEEP_FILE, Sweep, Trial, answer_runs
from zeropods.tables import digits, progress, said_above
from zeropods.tasks import task_with_prompt
from zeropods.techniques import technique_named
from zeropods.train.flags import (
    MAX_SEQ_LENGTH,
    ROWS,
    CausalArguments,
    TextToSQLArguments,
    arguments_of,
)

SWEEP_LOCK = "sweep.lock"
MATRIX_FILE = "matrix.yaml"
"""File beside the runs that holds the matrix as it was read."""
RAW_DATA_FLAGS = ("dataset_config", "text_field")
"""Flags that say how raw data are read; runs do not get them if the sweep itself has read the
data."""
PREPARED_FOLDER = "prepared"
"""Folder of the data sets that a sweep prepares, beside its cells."""


def run_sweep(
    matrix: Matrix,
    out: str | Path,
    cluster: Cluster | None = None,
    *,
    hostfile: Path | None = None,
    again: bool = False,
    argv: Callable[[Launch, Path], list[str]] = runner_argv,
) -> Sweep:
    """Run what a matrix asks for and return all of its results; runs that already have a result are
    not repeated.

    `OUT/sweep.json` is written after each run, so that after an interrupt or a kill the next call
    goes on where the last one was. Ctrl-C ends the current run, which still writes its record, and
    then the sweep.

    Args:
        out: folder of the runs and of `sweep.json`; it is created if it is missing.
        cluster: the cluster to run on; if not given, the sweep starts pods of its own, which end
            with it.
        hostfile: hosts for the sweep's own pods.
        again: whether runs that ran out of memory or time, failed, or lost a pod are run once more.
        argv: makes the launcher's command, see `Supervision`.

    Raises:
        UserError: nothing was started: the folder has another sweep, a data set is missing, or
            there are too few pods.
    """
    out = Path(out).resolve()
    # `folder_locked` refuses a second sweep in the folder, and a folder without one of these files
    # that is not empty.
    signs = (SWEEP_FILE, SWEEP_LOCK)
    lock = folder_locked(out, SWEEP_LOCK, signs=signs, kind="sweep", flag="--out")
    with ending_in_order(), lock, sweep_pods(matrix, cluster, hostfile) as next_cluster:
        sweep = _begin_sweep(matrix, out, again=again)
        # An earlier call may have ended between a run and its answers.
        _let_models_answer(sweep.trials, matrix)
        supervision = Supervision(argv=argv, timeout_seconds=matrix.timeout_seconds)
        without_gpus = pods_have_no_gpu(matrix, cluster, hostfile)
        _run_waiting(sweep, next_cluster, supervision, without_gpus=without_gpus)
        return sweep


def _begin_sweep(matrix: Matrix, out: Path, *, again: bool) -> Sweep:
    """Check everything that can be checked, prepare the data, and return the sweep with the results
    of earlier calls.

    Writes `matrix.yaml` and `sweep.json`. Nothing is written before the first check, which takes
    seconds; preparing the data may take minutes.
    """
    planned = trials(matrix, out)
    check_trials(planned)
    provide_datasets(matrix, out)
    check_trials(planned, are_prepared=True)
    refuse_other_runs(planned)
    seconds = _recorded_seconds(out)
    write_matrix(matrix, out / MATRIX_FILE)
    for trial in planned:
        take_up(trial, seconds.get(trial.name), again=again)
    sweep = Sweep(out=out, matrix=matrix, trials=planned)
    sweep.write()
    measured = [trial for trial in planned if trial.is_measured]
    if measured:
        said_above(f"{len(measured)} of {len(planned)} runs have a result already")
    return sweep


def _let_models_answer(planned: Sequence[Trial], matrix: Matrix) -> None:
    """Let the model of each trial that has ended well answer the questions, as `answer_runs` does.

    Repeats with the same seed end with the same model, of which the first one answers.
    """
    folders = []
    for trial in planned:
        has_model_of_its_own = bool(matrix.seeds) or trial.repeat == 1
        if trial.status == "ok" and has_model_of_its_own:
            folders.append(trial.launch.folder)
    answer_runs(folders, matrix.questions, linked=matrix.link_cells)


def _run_waiting(
    sweep: Sweep,
    next_cluster: Callable[[], Cluster],
    supervision: Supervision,
    *,
    without_gpus: bool,
) -> None:
    """Run the trials of a sweep that have no result yet, one after the other, and let their models
    answer.

    Args:
        next_cluster: gives the pods for the next run.
        without_gpus: whether runs of one process, which have no pod, are to train without GPUs.
    """
    waiting = [trial for trial in sweep.trials if not trial.is_measured]
    if without_gpus and any(trial.cell.is_one_process for trial in waiting):
        said_above(
            "runs of one process train without GPUs too, like the pods with which they are compared"
        )
    with progress("sweep", "runs", len(waiting)) as bar:
        for number, trial in enumerate(waiting, 1):
            place = f"run {number} of {len(waiting)}: {trial.name}"
            said_above(f"{place} begins")
            _run_and_write(sweep, trial, next_cluster, supervision, without_gpus=without_gpus)
            said_above(f"{place} {_outcome(trial)}")
            _let_models_answer([trial], sweep.matrix)
            bar.update(1)


def _run_and_write(
    sweep: Sweep,
    trial: Trial,
    next_cluster: Callable[[], Cluster],
    supervision: Supervision,
    *,
    without_gpus: bool,
) -> None:
    """Run one trial of a sweep and write what came of it, also where the whole sweep is ended."""
    try:
        _run(trial, next_cluster, supervision, without_gpus=without_gpus)
    except (KeyboardInterrupt, SystemExit):
        trial.status = "interrupted"
        trial.reason = "ended with the sweep"
        raise
    finally:
        # Each result is on disk before the next run begins.
        sweep.write()


def _outcome(trial: Trial) -> str:
    """How a run has ended, after how long, how fast it was, and why it ended so."""
    outcome = f"{trial.status} after {trial.seconds or 0.0:.0f} s"
    if trial.samples_per_second is not None:
        outcome += f", {digits(trial.samples_per_second)} samples/s"
    if trial.reason is not None:
        outcome += f": {trial.reason}"
    return outcome


def _run(
    trial: Trial,
    next_cluster: Callable[[], Cluster],
    supervision: Supervision,
    *,
    without_gpus: bool,
) -> None:
    """Run one trial and store in it how the run ended, or why it was refused.

    Args:
        without_gpus: whether a run of one process, which has no pod, is to train without GPUs.
    """
    began = time.monotonic()
    try:
        if trial.cell.is_one_process:
            record = run_alone(trial.launch, supervision, without_gpus=without_gpus)
        else:
            record = _run_on_pods(trial, next_cluster(), supervision)
    except (UserError, OSError) as error:
        _store_refusal(trial, error)
        trial.seconds = time.monotonic() - began
        return
    trial.take(record, time.monotonic() - began)


def run_alone(launch: Launch, supervision: Supervision, *, without_gpus: bool) -> Record:
    """Run a launch of one process on this machine and return its record.

    Args:
        without_gpus: whether the process is to see no GPU.

    Raises:
        UserError: the run is refused, or another launch holds its folder.
    """
    visibility = variable_set(VISIBLE, HIDDEN) if without_gpus else nullcontext()
    with locked(launch.folder, LAUNCH_LOCK), visibility:
        command.remember(launch)
        return run_planned(launch, supervision.timeout_seconds)


def _run_on_pods(trial: Trial, cluster: Cluster, supervision: Supervision) -> Record:
    """Run a trial on the pods of a cluster; `KeyboardInterrupt` if a signal has ended the run."""
    planned = command.plan_launch(cluster, trial.launch.call, pods=trial.cell.pods)
    record = run_launch(planned, cluster, supervision)
    if record.status == "interrupted":
        # The supervisor has caught the signal, which was meant for the whole sweep.
        raise KeyboardInterrupt(record.reason)
    return record


def _store_refusal(trial: Trial, error: UserError | OSError) -> None:
    """Store in a trial why its run never began; `KeyboardInterrupt` if a signal ended the launch
    before, since the signal was meant for the whole sweep."""
    if not isinstance(error, UnopenedError):
        trial.status = "refused"
        trial.reason = " ".join(str(error).split())
        return
    if error.status == "interrupted":
        raise KeyboardInterrupt(error.reason) from None
    # A run that failed before it began has measured nothing: the next call tries again.
    trial.status = "refused" if error.status == "failed" else error.status
    trial.reason = error.reason


# What earlier calls have left, and which parts of it are kept.


def check_trials(trials: Sequence[Trial], *, are_prepared: bool = False) -> None:
    """Refuse what a run would refuse before its first step: flags, models and data sets.

    Args:
        are_prepared: whether the sweep has prepared its data sets. Before, data sets that it
            prepares are not looked at. After that, a second call looks at them, and once more at
            models and other data, but not at the flags.
    """
    # Repeats of a cell are refused alike: one of them is enough.
    trial_of_cell = {trial.cell: trial for trial in trials}
    for trial in trial_of_cell.values():
        try:
            if not are_prepared:
                command.check_arguments(trial.launch)
            # As long as the sweep has not prepared a data set, one of an earlier matrix may lie in
            # its place.
            looks_at_data = are_prepared or not trial.is_prepared
            command.check_inputs(trial.launch.call, data=looks_at_data)
        except UserError as error:
            raise UserError(f"{trial.cell.name}: {error}") from None


def refuse_other_runs(trials: Sequence[Trial]) -> None:
    """Refuse run folders that hold a run with settings that differ from those of the matrix now."""
    for trial in trials:
        folder = trial.launch.folder
        identity = command.remembered(folder)
        if identity is None:
            continue
        old = _values_by_flag(identity)
        new = _values_by_flag(command.identity(trial.launch))
        changed = [key for key in {**new, **old} if old.get(key) != new.get(key)]
        if changed:
            # One difference is enough to show that it is another run.
            difference = told_differences(old, new, changed[:1])
            raise UserError(
                f"{folder}: was run with other settings ({difference}); choose another --out"
            )


def _values_by_flag(identity: Mapping[str, Any]) -> dict[str, object]:
    """The identity of a run with each of its flags under a key of its own."""
    values: dict[str, object] = {**identity, "arguments": None}
    for name, value in flag_values(identity["arguments"]).items():
        values[f"--{name}"] = value
    return values


def take_up(trial: Trial, seconds: float | None, *, again: bool) -> None:
    """Store in a trial the result of an earlier call, if the run needs no further attempt.

    A finished run stays finished. Running out of memory or time, failing and losing a pod are
    results too; `again` asks for another try of those. A run that was killed, interrupted, or
    refused before it began has no result yet.

    Args:
        seconds: wall time of the run, in seconds, if an earlier call recorded it.
    """
    folder = trial.launch.folder
    # Without a configuration, the record is of a launch that ended before it had begun the run.
    if (folder / RECORD).is_file() and (folder / CONFIG).is_file():
        record = read_record(folder)
        needs_no_attempt = record.status in RESULT_STATUSES and not again
        if record.status == "ok" or needs_no_attempt:
            trial.take(record, seconds)


def _recorded_seconds(out: Path) -> dict[str, float | None]:
    """Wall time of each run that an earlier call recorded, in seconds, by the name of the run."""
    path = out / SWEEP_FILE
    if not path.is_file():
        return {}
    rows = files.read_object(path, "move the file away").get("cells", [])
    return {row.get("folder"): row.get("seconds") for row in rows}


# The prepared data sets, which are made, or checked against the matrix.


def provide_datasets(matrix: Matrix, out: Path, *, dry: bool = False) -> None:
    """Make the data set of each model and prompt if it does not exist yet, or check those that the
    matrix names.

    Args:
        dry: make nothing, but refuse raw data that do not exist.
    """
    cells = {(cell.model, cell.prompt): cell for cell in matrix.cells}
    for cell in cells.values():
        folder = dataset_of(matrix, cell, out)
        if folder is None:
            continue  # A script that is not ours, and needs no data set.
        if matrix.data is None:
            _check_prepared(matrix, cell, folder)
        elif dry:
            _check_raw_data(matrix, matrix.data, cell)
        else:
            data = matrix.data
            if data == GENERATED_DATA:
                data = _generated_data(matrix, cell, out)
            with progress("prepare", "rows") as bar:
                _, made = prepare(_preparation(matrix, data, cell), folder, bar.update)
            if made:
                said_above(f"prepared {folder}")


def _check_prepared(matrix: Matrix, cell: Cell, folder: Path) -> None:
    """Refuse a prepared set that the matrix names, if it was made with another prompt."""
    # What a script that is not ours reads may have no manifest.
    if arguments_of(matrix.script) is None:
        return
    prompt = read_manifest(folder).prompt
    if prompt != cell.prompt:
        raise UserError(
            f"{folder}: was prepared with prompt {prompt}, "
            f"but the matrix has {cell.prompt}; name another set"
        )


def _check_raw_data(matrix: Matrix, data: str, cell: Cell) -> None:
    """Refuse raw data that do not exist; what may be the name of a data set at the hub passes."""
    if data == GENERATED_DATA:
        return
    if Path(data).exists() or is_path(data):
        _preparation(matrix, data, cell).open()


def _generated_data(matrix: Matrix, cell: Cell, out: Path) -> str:
    """Generate raw data for the task of a cell, if they do not exist yet, and return their
    folder."""
    task = task_with_prompt(cell.prompt).name
    folder = out / f"{GENERATED_DATA}-{task}"
    write_sample(folder, task=task)
    return str(folder)


def _preparation(matrix: Matrix, data: str, cell: Cell) -> Preparation:
    """How the raw data are prepared for a cell; for a causal script, as its run would prepare them
    itself."""
    named = matrix.tokenizer
    tokenizer = named.get(cell.model, named.get(ALL_OTHERS, cell.model))
    if arguments_of(matrix.script) is not CausalArguments:
        return Preparation(
            task=task_with_prompt(cell.prompt).name,
            data=Path(data),
            tokenizer=tokenizer,
            prompt=cell.prompt,
            limit=matrix.limit,
            copies=matrix.copies or 1,
        )
    flags = matrix.flags_of(cell)
    settings = {}
    for name in ("loss_on", *RAW_DATA_FLAGS):
        if name in flags:
            settings[name] = flags[name]
    is_tiny = flags.get("init") == "random" and tokenizer in CAUSAL_TINY
    return Preparation(
        task=cell.prompt,
        data=Path(data),
        tokenizer=GPT_TINY if is_tiny else tokenizer,
        max_seq_length=int(flags.get("max_seq_length", MAX_SEQ_LENGTH)),
        limit=matrix.limit or flags.get("subset"),
        **settings,
    )


# The pods: those that a sweep is given, or its own, which are replaced when one of them is lost.


@contextmanager
def sweep_pods(
    matrix: Matrix, given: Cluster | None, hostfile: Path | None
) -> Iterator[Callable[[], Cluster]]:
    """Yield a function that gives the cluster for the next run.

    The sweep's own pods are started by its first call, replaced by a later call if one of them is
    lost, and ended on exit. Pods that were given are not replaced: they are somebody else's.

    Args:
        given: the cluster to run on; None for pods of the sweep's own.
        hostfile: names the hosts on which the sweep's own pods are started; this machine if not
            given.

    Raises:
        UserError: there are too few pods or hosts, or their slots are not those of the matrix.
    """
    count = most_pods(matrix)
    _check_hosts(matrix, given, hostfile)
    sweep_cluster: Cluster | None = None

    def next_cluster() -> Cluster:
        nonlocal sweep_cluster
        if given is not None:
            return given.now()
        if sweep_cluster is None or not sweep_cluster.is_ready():
            if sweep_cluster is not None:
                sweep_cluster.down()
            sweep_cluster = pods.up(
                count,
                # A hostfile says itself how many slots each host has.
                slots=None if hostfile else matrix.slots,
                name=name_of_process("sweep"),
                hostfile=hostfile,
                lease="kernel",
            )
        return sweep_cluster

    try:
        yield next_cluster
    finally:
        if sweep_cluster is not None:
            sweep_cluster.down()


def _check_hosts(matrix: Matrix, given: Cluster | None, hostfile: Path | None) -> None:
    """Refuse too few pods, and pods whose slots are not those of the matrix."""
    count = most_pods(matrix)
    hosts: tuple[Host, ...] = ()
    if given is not None:
        hosts = given.hosts
        if len(hosts) < count:
            raise UserError(
                f"cluster {given.name}: has {len(hosts)} pods, but the matrix needs {count}"
            )
    elif hostfile is not None:
        hosts = read_hostfile(hostfile)
    for host in hosts[:count]:
        if host.slots != matrix.slots:
            raise UserError(
                f"{host.address} has slots={host.slots}, but the matrix has slots: {matrix.slots}; "
                f"set slots: {host.slots} in the matrix, or use pods whose slots match"
            )


def pods_have_no_gpu(matrix: Matrix, given: Cluster | None, hostfile: Path | None) -> bool:
    """Whether the pods of a sweep train without the GPUs of this machine, because there are too few
    for all of them; False for pods of a hostfile, which have GPUs of their own or none."""
    if given is not None:
        return given.hides_gpus
    count = most_pods(matrix)
    if count == 0 or hostfile is not None:
        return False
    backend = BACKENDS[usual_backend()]
    return HIDDEN in backend.gpus_of_pods(count, matrix.slots)


def most_pods(matrix: Matrix) -> int:
    """Number of pods of the cell with most of them; 0 where every run is one process of this
    machine."""
    return max((cell.pods for cell in matrix.cells if not cell.is_one_process), default=0)


# The runs of a sweep as data, and their order.


def trials(matrix: Matrix, out: Path) -> list[Trial]:
    """All runs of a matrix in the order in which they are run; finds the script, but reads and
    starts nothing."""
    script = find_script(matrix.script)
    cells = matrix.cells
    is_prepared = matrix.data is not None
    planned = []
    for repeat in range(1, matrix.repeats + 1):
        for number in order_of(len(cells), repeat):
            cell = cells[number]
            launch = _launch_of(matrix, script, cell, repeat, out)
            planned.append(Trial(cell=cell, repeat=repeat, launch=launch, is_prepared=is_prepared))
    return planned


def _launch_of(matrix: Matrix, script: Path, cell: Cell, repeat: int, out: Path) -> Launch:
    """The launch of a cell's repeat, as far as it is known without pods: the names of its hosts and
    the port stand for those that it gets when it is run."""
    folder = out / cell.name / str(repeat)
    flags = _flags_of_run(matrix, script, cell, repeat, out)
    if cell.is_one_process:
        hosts = [Host("pod1", 1)]
        launcher = "none"
    else:
        hosts = [Host(f"pod{number}", matrix.slots) for number in range(1, cell.pods + 1)]
        launcher = "pdsh"
    return Launch(
        call=ScriptCall(script, tuple(train_arguments(**flags, outputdir=folder))),
        folder=folder,
        hosts=tuple(hosts),
        master_port=0,
        launcher=launcher,
    )


def _flags_of_run(
    matrix: Matrix, script: Path, cell: Cell, repeat: int, out: Path
) -> dict[str, object]:
    """The flags that the script gets for a cell's repeat, without that of the run folder."""
    # What a script's flags for model and data are called.
    names = (arguments_of(script) or TextToSQLArguments).names_here
    flags: dict[str, object] = {
        names["model_id"]: cell.model,
        **technique_named(cell.technique).flags,
        names["dataset_path"]: dataset_of(matrix, cell, out),
        **matrix.flags_of(cell),
    }
    # This is a key of matrices. Scripts get the rows of a process instead.
    flags.pop(EFFECTIVE_BATCH_SIZE, None)
    if matrix.data is not None:
        # The sweep has read the raw data, and the script gets prepared ones.
        for name in RAW_DATA_FLAGS:
            flags.pop(name, None)
    rows = matrix.rows(cell)
    if rows is not None:
        flags[ROWS] = rows
    if matrix.seeds:
        flags["seed"] = matrix.seeds[repeat - 1]
    return flags


def dataset_of(matrix: Matrix, cell: Cell, out: Path) -> Path | None:
    """Path of the prepared data set of a cell, whether it exists yet or not; None for a script that
    needs none."""
    if matrix.data is not None:
        name = f"{Path(matrix.data).name}-{Path(cell.model).name}-{cell.prompt}"
        return out / PREPARED_FOLDER / name
    named = matrix.dataset_path
    path = named.get(cell.prompt, named.get(ALL_OTHERS))
    return None if path is None else Path(path).resolve()


def order_of(cells: int, repeat: int) -> tuple[int, ...]:
    """The order of cells 0 ... cells - 1 in one repeat, counted from 1; a machine that slows down
    favours no cell.

    Each repeat runs every cell once. Repeats come in pairs: a row of a Williams design (Williams
    1949, Aust. J. Sci. Res. A 2, 149-168), and the same row backwards. After every pair, the mean
    place of all cells is the same, so that a steady drift cancels out. After as many repeats as
    there are cells (twice as many where their number is odd), each cell has had each place equally
    often, and has followed each other cell equally often. The order of a repeat does not depend on
    how many follow, so more repeats can be added later.
    """
    shift, backwards = divmod(repeat - 1, 2)
    # 0, 1, n - 1, 2, n - 2 ...: all differences between neighbours are different, modulo n.
    first_row = []
    for place in range(cells):
        if place % 2 == 1:
            first_row.append((place + 1) // 2)
        else:
            first_row.append(-(place // 2))
    forwards = tuple((cell + shift) % cells for cell in first_row)
    return forwards[::-1] if backwards else forwards
