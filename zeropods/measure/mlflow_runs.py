"""Runs in MLflow: whether its server can be used, and which of its runs belongs to a run folder.

mlflow is an optional package, and is imported only where a run is reported. A server that does not
answer never ends a run, nor does it keep one waiting for long: what a run folder has can be sent
later (`report/to_mlflow.py`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from zeropods import files
from zeropods.errors import UserError
from zeropods.measure.record import RunConfig, read_config

if TYPE_CHECKING:
    from mlflow import MlflowClient

MLFLOW = "mlflow"
"""What `--report_to` names."""
PACKAGE = "mlflow-skinny==3.17.2"
"""The package with which reporting is tested; mlflow itself wants an older pyarrow than ours."""
MLFLOW_FILE = "mlflow.json"
"""File in a folder that says which run of which server is that of the folder."""
DEFAULT_EXPERIMENT = "zeropods"
ADDRESS_VARIABLE = "MLFLOW_TRACKING_URI"
EXPERIMENT_VARIABLE = "MLFLOW_EXPERIMENT_NAME"
TOKEN_VARIABLE = "MLFLOW_TRACKING_TOKEN"
TOKEN_PATH_VARIABLE = "MLFLOW_TRACKING_TOKEN_PATH"
"""Names a file with the token, as `HF_TOKEN_PATH` does for a hub's: a path may be passed on to
pods, a token may not. mlflow itself does not know it."""
CREDENTIALS = "~/.mlflow/credentials"
"""File in which mlflow itself looks for a user and a password."""
CLIENT_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Variables of mlflow's client that have these values unless they are set.

By its own defaults it would try for minutes, and tell its makers how it is used.
"""
NOISY_LOGGERS = ("mlflow", "urllib3.connectionpool")
"""Loggers that repeat at each attempt what is said here once."""
BEGIN_SECONDS = 180.0
"""Most seconds to wait for the server before a run.

mlflow's import is among them, which takes a minute on a busy machine; a server that does not answer
is given up by mlflow's client long before.
"""
CLOSE_SECONDS = 30.0
"""Most seconds to wait for the last points; longer than the client tries."""
PAUSE_SECONDS = 30.0
"""Seconds without an attempt after one that failed."""
POINTS_AT_ONCE = 500
"""Points in a request; MLflow takes 1,000."""
PARAMETERS_AT_ONCE = 100
"""Most parameters that MLflow takes in a request."""
MOST_PENDING = 100_000
"""Most points that are kept while the server does not answer; of more, the oldest are dropped."""
LONGEST_PARAMETER = 500
"""Characters of a parameter's value that older servers take."""
ERRNO = re.compile(r"\[Errno -?\d+\] ([\w ]+)")
"""Matches the system's own words, which end mlflow's long account of a failed request."""


# Whether a server can be used.


def check_server(flag: str) -> None:
    """Refuse to report where mlflow is not installed, or its server cannot be used; asks the
    server, and waits for it no longer than `BEGIN_SECONDS`.

    Args:
        flag: the flag that asks for it, for the message.

    Raises:
        UserError: MLflow cannot be used; the message never holds a secret.
    """
    if find_spec("mlflow") is None:
        raise UserError(f"{flag}: mlflow is not installed; pip install {PACKAGE}")
    address = server_address(flag)
    fault = fault_of(_ask_server, BEGIN_SECONDS)
    if fault is not None:
        raise UserError(
            f"{flag}: MLflow at {address} cannot be used ({fault}); start it, or correct "
            f"{ADDRESS_VARIABLE} or the credentials in {CREDENTIALS}"
        )


def _ask_server() -> None:
    """Ask the server for something small; raises whatever mlflow does where that fails."""
    with connection() as client:
        client.search_experiments(max_results=1)


def server_address(flag: str = "--report_to mlflow") -> str:
    """The address of MLflow's server, which the environment names; `UserError` where it names none,
    or one with a user or a password in it."""
    address = os.environ.get(ADDRESS_VARIABLE, "")
    if not address:
        raise UserError(
            f"{flag}: {ADDRESS_VARIABLE} is not set; "
            "give the server's address, such as http://127.0.0.1:5000"
        )
    if has_user_info(address):
        raise UserError(
            f"{ADDRESS_VARIABLE}: holds a user or a password, which others could read; "
            f"put them into {CREDENTIALS}, with mode 600"
        )
    return address


def has_user_info(address: str) -> bool:
    """Whether an address holds a user, perhaps with a password: `http://user:password@host`."""
    return re.search(r"://[^/\s]*@", address) is not None


@contextlib.contextmanager
def connection() -> Iterator[MlflowClient]:
    """A client of the server within the block, which waits for seconds, not minutes.

    A token that is in a file is in this process's environment within the block only, where mlflow
    looks for it: no process that is started before or later inherits it. `CLIENT_DEFAULTS` stay in
    the environment, and `NOISY_LOGGERS` stay quiet.
    """
    for name, value in CLIENT_DEFAULTS.items():
        os.environ.setdefault(name, value)
    # Only now, since its import looks at these variables.
    from mlflow import MlflowClient

    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    token_path = os.environ.get(TOKEN_PATH_VARIABLE)
    # A token that the user has set in the environment counts before the file, and stays there.
    is_from_file = token_path is not None and TOKEN_VARIABLE not in os.environ
    if token_path is not None and is_from_file:
        token = Path(token_path).expanduser().read_text(encoding="utf-8")
        os.environ[TOKEN_VARIABLE] = token.strip()
    try:
        yield MlflowClient()
    finally:
        if is_from_file:
            os.environ.pop(TOKEN_VARIABLE, None)


def fault_of(deed: Callable[[], object], seconds: float) -> str | None:
    """Call `deed` in a thread, and return in one line what was wrong with it; None if nothing was.

    CML and others bring plugins to mlflow, which raise errors of any class: as the result of a
    thread each of them is a value, and none ends a run.

    Args:
        deed: does something with the server; what it returns is not looked at.
        seconds: how long to wait. The thread is left alone then; mlflow's client gives up by
            itself a few seconds later.
    """
    executor = ThreadPoolExecutor(1, MLFLOW)
    future = executor.submit(deed)
    executor.shutdown(wait=False)
    wait([future], seconds)
    return _fault(future, seconds)


def _fault(future: Future[object], seconds: float) -> str | None:
    """What was wrong with what a thread did, in one line; None if nothing was.

    Args:
        seconds: how long its end was waited for, for the message where it has not come.
    """
    if not future.done():
        return f"no answer in {seconds:.0f} s"
    error = future.exception()
    if error is None:
        return None
    system_words = ERRNO.search(str(error))
    if system_words is not None:
        return system_words[1].strip()
    first_line = str(error).strip().split("\n")[0][:200]
    return first_line or type(error).__name__


def say(folder: Path, message: str) -> None:
    """Print a message about what a folder reports to stderr: it is no error that ends anything."""
    print(f"{folder}: {message}", file=sys.stderr, flush=True)


# Which run of the server is that of a folder.


@dataclass(frozen=True)
class MlflowRun:
    """`mlflow.json`: the MLflow run of a folder."""

    address: str
    """Address of the server."""
    run_id: str
    """Id of the run by its own record, or another name of what is reported."""
    mlflow_run_id: str | None
    """Its id in MLflow; None where the server has not made it yet."""

    @classmethod
    def of(cls, folder: Path) -> MlflowRun | None:
        """The MLflow run that a folder names; None where it names none."""
        path = folder / MLFLOW_FILE
        if not path.is_file():
            return None
        return files.validated(cls, path, path.read_bytes(), "remove it")

    def write(self, folder: Path) -> None:
        """Name this run in a folder."""
        files.write_json(folder / MLFLOW_FILE, asdict(self))


def mlflow_run(folder: Path, run_id: str) -> MlflowRun:
    """The MLflow run of a folder at the server that the environment names; without an id where the
    folder's `mlflow.json` has none for it. Nothing is sent or written.

    Args:
        run_id: see `MlflowRun`; one that has begun anew in the folder is another run.
    """
    address = server_address()
    earlier = MlflowRun.of(folder)
    if earlier is None or earlier.address != address or earlier.run_id != run_id:
        return MlflowRun(address, run_id, None)
    return earlier


def opened(
    client: MlflowClient, folder: Path, run_id: str, parameters: Mapping[str, object]
) -> str:
    """The id in MLflow of the run of a folder. Where the server has no such run, or it was deleted
    there, one is made and its id written into the folder.

    Args:
        run_id: see `MlflowRun`.
        parameters: sent once, when the run is made: MLflow lets nobody change them later.
    """
    from mlflow.entities import Param

    run = mlflow_run(folder, run_id)
    if run.mlflow_run_id is not None and _is_active(client, run.mlflow_run_id):
        return run.mlflow_run_id
    experiment_id = _experiment_id(client)
    name = folder.resolve().name
    created = client.create_run(experiment_id, run_name=name, tags={"zeropods.run": run_id})
    mlflow_run_id: str = created.info.run_id
    MlflowRun(run.address, run_id, mlflow_run_id).write(folder)
    all_parameters = []
    for key, value in parameters.items():
        all_parameters.append(Param(key, str(value)[:LONGEST_PARAMETER]))
    for start in range(0, len(all_parameters), PARAMETERS_AT_ONCE):
        batch = all_parameters[start : start + PARAMETERS_AT_ONCE]
        client.log_batch(mlflow_run_id, params=batch)
    return mlflow_run_id


def _is_active(client: MlflowClient, mlflow_run_id: str) -> bool:
    """Whether the server still has a run, and it was not deleted."""
    from mlflow.exceptions import MlflowException

    try:
        stage = client.get_run(mlflow_run_id).info.lifecycle_stage
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return False
    return bool(stage == "active")


def experiment_name() -> str:
    """Name of the experiment that holds the runs."""
    return os.environ.get(EXPERIMENT_VARIABLE) or DEFAULT_EXPERIMENT


def _experiment_id(client: MlflowClient) -> str:
    """Id of the experiment, which is made where the server has none of its name."""
    name = experiment_name()
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        return str(client.create_experiment(name))
    return str(experiment.experiment_id)


def parameters_of(config: RunConfig) -> dict[str, object]:
    """Texts and numbers of a configuration, by name: the flags that make the run what it is, and
    facts of the run.

    What has parts is left out, such as DeepSpeed's configuration; `config.json` has it.
    """
    parameters: dict[str, object] = {}
    for source in (config.identity, vars(config)):
        for name, value in source.items():
            if isinstance(value, str | int | float):
                parameters[name] = value
    # The run's tag has its id; the others differ between attempts, or say nothing of the run.
    for name in ("schema_version", "run_id", "attempt", "started_at"):
        parameters.pop(name)
    return parameters


# The points of curves, which are sent while a run trains.


@dataclass(frozen=True)
class Point:
    """One point of a curve."""

    curve: str
    """Its name, such as `train/loss`."""
    value: float
    unix_milliseconds: int
    step: int


class Points:
    """Sends the points of a run's curves to MLflow while it trains, in a thread.

    Those that the server does not take are kept, and sent with later ones; that is said once.
    """

    def __init__(self, folder: Path) -> None:
        """`folder`: the run folder, which has its `config.json`."""
        self.folder = folder
        self._mlflow_run_id = ""
        self._pending: deque[Point] = deque(maxlen=MOST_PENDING)
        self._batch: list[Point] = []
        """Points that are being sent."""
        self._executor = ThreadPoolExecutor(1, MLFLOW)
        self._sending: Future[object] | None = None
        """The last call of `_send`, which may have ended; None where nothing can be sent."""
        self._next_attempt = 0.0
        """When to try again, by the monotonic clock."""
        self._has_said_fault = False

    def begin(self) -> None:
        """Open the run at the server, and wait for that at most `BEGIN_SECONDS`, so that its first
        points do not have to.

        The address is written into the folder before the server is asked: what cannot be sent now
        is sent when the run ends.
        """
        run_id = read_config(self.folder).run_id
        try:
            mlflow_run(self.folder, run_id).write(self.folder)
        except UserError as error:
            # A rank may have been started without the variables of who launched it.
            self._say_once(str(error))
            return
        self._sending = self._executor.submit(self._send)
        self._wait(BEGIN_SECONDS)

    def add(self, curves: Mapping[str, Mapping[str, float]], step: int) -> None:
        """Keep the points of a step, and have all that are kept sent unless the thread is still
        sending or has failed a short while ago; never waits.

        Args:
            curves: values by group and tag: that of group `train` and tag `loss` is a point of the
                curve `train/loss`.
        """
        now = int(time.time() * 1_000)
        for group, values in curves.items():
            for tag, value in values.items():
                self._pending.append(Point(f"{group}/{tag}", value, now, step))
        if self._sending is not None and self._sending.done():
            self._note_end(self._sending)
            if time.monotonic() >= self._next_attempt:
                self._sending = self._executor.submit(self._send)

    def close(self) -> None:
        """Send the last points, and wait for that at most `CLOSE_SECONDS` twice."""
        if self._sending is not None:
            self._wait(CLOSE_SECONDS)
            # Points that came while it was sending, or that the server did not take.
            if self._sending.done() and self._has_more():
                self._sending = self._executor.submit(self._send)
                self._wait(CLOSE_SECONDS)
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _has_more(self) -> bool:
        """Whether there are points that the server has not got."""
        return bool(self._pending or self._batch)

    def _wait(self, seconds: float) -> None:
        """Wait for what is being sent, and say what is wrong with it, if anything is."""
        if self._sending is None:
            return
        wait([self._sending], seconds)
        if self._sending.done():
            self._note_end(self._sending)
        else:
            self._say_once(_fault(self._sending, seconds) or "")

    def _note_end(self, sending: Future[object]) -> None:
        """Where sending has failed, say why, and do not try again for `PAUSE_SECONDS`.

        Args:
            sending: a call of `_send` that has ended.
        """
        fault = _fault(sending, 0.0)
        if fault is not None:
            self._next_attempt = time.monotonic() + PAUSE_SECONDS
            self._say_once(fault)

    def _say_once(self, fault: str) -> None:
        """Say that MLflow cannot be reached, unless that was said before."""
        if not self._has_said_fault:
            self._has_said_fault = True
            later = "the run goes on, and what is missing is sent when it ends"
            say(self.folder, f"MLflow cannot be reached ({fault}); {later}")

    def _send(self) -> None:
        """Open the run unless that was done, and send all points; runs in the thread."""
        with connection() as client:
            self._send_all(client)

    def _send_all(self, client: MlflowClient) -> None:
        """What `_send` does, through a client that is connected; points that were sent leave
        `_pending`."""
        from mlflow.entities import Metric

        if not self._mlflow_run_id:
            config = read_config(self.folder)
            mlflow_run_id = opened(client, self.folder, config.run_id, parameters_of(config))
            # An earlier attempt of this run may have ended there.
            client.update_run(mlflow_run_id, status="RUNNING")
            self._mlflow_run_id = mlflow_run_id
        while self._has_more():
            while self._pending and len(self._batch) < POINTS_AT_ONCE:
                self._batch.append(self._pending.popleft())
            metrics = []
            for point in self._batch:
                metrics.append(
                    Metric(point.curve, point.value, point.unix_milliseconds, point.step)
                )
            # Where it fails, the batch is still there for the next attempt.
            client.log_batch(self._mlflow_run_id, metrics=metrics)
            self._batch.clear()


@contextlib.contextmanager
def points_sent(folder: Path, *, is_reported: bool) -> Iterator[Points | None]:
    """Send to MLflow the points that are added within the block; yields None, and sends nothing,
    unless `is_reported`."""
    if not is_reported:
        yield None
        return
    points = Points(folder)
    points.begin()
    try:
        yield points
    finally:
        points.close()
