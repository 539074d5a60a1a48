"""Runs and summaries at a real MLflow server, asked by its REST API.

`make soak` runs this, since it downloads some 200 MB: the server and its packages into an environment of its own, and
what mlflow-skinny needs besides our packages into another. `ZEROPODS_MLFLOW_SERVER` (the program `mlflow`) and
`ZEROPODS_MLFLOW_CLIENT` (a folder of packages) name such environments that are there already.
"""

import json
import os
import signal
import stat
import subprocess
import sys
import sysconfig
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.full.conftest import TINY
from tests.full.launches import ROOT, until
from zeropods.measure.mlflow_runs import DEFAULT_EXPERIMENT, MLFLOW_FILE, PACKAGE, MlflowRun
from zeropods.measure.record import read_record
from zeropods.pods.cluster import Cluster
from zeropods.programs import free_port

SERVER = PACKAGE.replace("-skinny", "")
SECRET = "t0ken-that-nobody-may-see"
SECONDS = 600.0

pytestmark = [
    pytest.mark.skipif(os.environ.get("ZEROPODS_SOAK") != "1", reason="downloads packages; see make soak"),
    pytest.mark.timeout(3_600),
]


def environment_with(folder: Path, package: str, *, ours: bool) -> Path:
    """A Python of its own with a package, and with our packages if asked for; returns its folder of packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=SECONDS)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet", "install", package]
    if ours:
        # pip sees our packages, and adds what is missing.
        (packages / "ours.pth").write_text(sysconfig.get_path("purelib"))
    else:
        pip = [sys.executable, "-m", "pip", "--python", pip[0], *pip[3:]]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=1_800, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return packages


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of mlflow-skinny and of what it needs besides our packages."""
    ready = os.environ.get("ZEROPODS_MLFLOW_CLIENT")
    if ready is not None:
        return Path(ready)
    return environment_with(tmp_path_factory.mktemp("client") / "venv", PACKAGE, ours=True)


@pytest.fixture(scope="module")
def server_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `mlflow` program with its server."""
    ready = os.environ.get("ZEROPODS_MLFLOW_SERVER")
    if ready is not None:
        return Path(ready)
    folder = tmp_path_factory.mktemp("server") / "venv"
    environment_with(folder, SERVER, ours=False)
    return folder / "bin" / "mlflow"


@dataclass
class Server:
    """An MLflow server on this machine, which can be stopped and started again."""

    program: Path
    folder: Path
    address: str
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.folder.mkdir(exist_ok=True)
        port = self.address.rpartition(":")[2]
        argv = [
            *(str(self.program), "server", "--host", "127.0.0.1", "--port", port, "--workers", "1"),
            *("--backend-store-uri", f"sqlite:///{self.folder / 'runs.db'}"),
            *("--artifacts-destination", str(self.folder / "artifacts")),
        ]
        hidden = ("PYTHONPATH", "MLFLOW_TRACKING_URI")
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        # The server starts programs of its own.
        environment["PATH"] = f"{self.program.parent}:{environment['PATH']}"
        environment["MLFLOW_DISABLE_TELEMETRY"] = "true"
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(argv, env=environment, stdout=log, stderr=log, start_new_session=True)
        until(self.answers, SECONDS)

    def answers(self) -> bool:
        assert self.process is not None and self.process.poll() is None, (self.folder / "log").read_text()[-3000:]
        try:
            with urllib.request.urlopen(f"{self.address}/health", timeout=10) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def stop(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(SECONDS)
            self.process = None

    def ask(self, place: str, **values: object) -> dict[str, Any]:
        """The answer to a GET of the REST API."""
        query = urllib.parse.urlencode(values)
        with urllib.request.urlopen(f"{self.address}/api/2.0/mlflow/{place}?{query}", timeout=60) as answer:
            return dict(json.load(answer))

    def runs(self, experiment: str = DEFAULT_EXPERIMENT) -> list[dict[str, Any]]:
        """The runs of an experiment."""
        known = self.ask("experiments/get-by-name", experiment_name=experiment)["experiment"]["experiment_id"]
        body = json.dumps({"experiment_ids": [known]}).encode()
        request = urllib.request.Request(
            f"{self.address}/api/2.0/mlflow/runs/search", data=body, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return list(json.load(answer).get("runs", []))

    def curve(self, run: str, name: str) -> list[tuple[int, float]]:
        """The points of a curve by step."""
        history = self.ask("metrics/get-history", run_id=run, metric_key=name).get("metrics", [])
        return sorted((int(point["step"]), float(point["value"])) for point in history)

    def files(self, run: str, folder: str = "") -> set[str]:
        """Paths of the files of a run in a folder."""
        listed = self.ask("artifacts/list", run_id=run, path=folder).get("files", [])
        return {file["path"] for file in listed}


@pytest.fixture
def reporting(client: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a server that is not there yet, in an environment that names it and a file with a token."""
    token = tmp_path / "token"
    token.write_text(f"{SECRET}\n")
    token.chmod(0o600)
    address = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    searched = [str(client)]
    if os.environ.get("PYTHONPATH"):
        searched.append(os.environ["PYTHONPATH"])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(searched))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN_PATH", str(token))
    for name in ("MLFLOW_EXPERIMENT_NAME", "MLFLOW_TRACKING_TOKEN", "RANK", "ZEROPODS_RUN"):
        monkeypatch.delenv(name, raising=False)
    return address


@pytest.fixture
def server(server_program: Path, reporting: str, tmp_path: Path) -> Iterator[Server]:
    """A server without runs."""
    started = Server(server_program, tmp_path / "server", reporting)
    started.start()
    yield started
    started.stop()


def training(folder: Path, prepared: Path, *flags: object) -> list[str]:
    """A script with its flags, whose run is reported."""
    words = [*TINY, "--dataset_path", prepared, "--outputdir", folder, "--report_to", "mlflow", *flags]
    return [str(ROOT / "textsql_train.py"), *map(str, words)]


def called(*words: object, status: int = 0) -> str:
    """What a Python program says on stderr."""
    argv = [sys.executable, *map(str, words)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == status, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stderr


def by_key(entries: list[dict[str, Any]]) -> dict[str, Any]:
    return {entry["key"]: entry["value"] for entry in entries}


def holds_secret(folder: Path) -> list[Path]:
    """Files below a folder that hold the token."""
    files = [path for path in folder.rglob("*") if stat.S_ISREG(path.lstat().st_mode)]
    return [path for path in files if SECRET.encode() in path.read_bytes()]


def test_a_run_sends_parameters_losses_figures_and_its_page_and_no_secret(
    server: Server, prepared: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "one"
    errors = called(*training(folder, prepared, "--max_steps", 4, "--eval_steps", 2))
    assert "MLflow" not in errors
    record = read_record(folder)
    (run,) = server.runs()
    run_id = run["info"]["run_id"]
    assert MlflowRun.of(folder) == MlflowRun(server.address, record.run_id, run_id)
    assert (run["info"]["run_name"], run["info"]["status"]) == ("one", "FINISHED")
    parameters = by_key(run["data"]["params"])
    expected = {"model_id": "t5-tiny", "technique": "none", "max_steps": "4", "world_size": "1", "precision": "fp32"}
    assert parameters.items() >= expected.items()
    assert server.curve(run_id, "train/loss") == [
        (point.step, pytest.approx(point.loss, rel=1e-6)) for point in record.losses
    ]
    assert server.curve(run_id, "validation/loss") == [
        (point.step, pytest.approx(point.loss, rel=1e-6)) for point in record.eval_losses
    ]
    assert [step for step, _ in server.curve(run_id, "train/learning_rate")] == [1, 2, 3, 4]
    figures = by_key(run["data"]["metrics"])
    assert float(figures["samples_per_second"]) == pytest.approx(record.samples_per_second)
    assert float(figures["eval_loss"]) == pytest.approx(record.eval_losses[-1].loss)
    assert float(figures["peak_memory_bytes"]) > 0
    assert server.files(run_id) == {"config.json", "record.json", "summary"}
    assert server.files(run_id, "summary") >= {"summary/index.html", "summary/losses.svg", "summary/summary.json"}
    assert holds_secret(tmp_path / "runs") == [] and holds_secret(server.folder) == []


def test_a_launch_on_pods_is_one_run_at_the_server_and_leaves_no_secret_in_its_folder(
    server: Server, cluster: Cluster, prepared: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "pods"
    launch = ["-m", "zeropods", "launch", "--name", cluster.name, "--num-pods", 2, "--"]
    called(*launch, *training(folder, prepared, "--max_steps", 3, "--per_device_train_batch_size", 8))
    record = read_record(folder)
    (run,) = server.runs()
    run_id = run["info"]["run_id"]
    assert run["info"]["status"] == "FINISHED"
    assert by_key(run["data"]["params"])["world_size"] == "2"
    assert [step for step, _ in server.curve(run_id, "train/loss")] == [1, 2, 3]
    assert [step for step, _ in server.curve(run_id, "train/learning_rate")] == [1, 2, 3]
    assert float(by_key(run["data"]["metrics"])["samples_per_second"]) == pytest.approx(record.samples_per_second)
    assert "summary/index.html" in server.files(run_id, "summary")
    assert holds_secret(tmp_path / "runs") == []


def test_a_server_that_goes_away_ends_no_run_and_a_summary_sends_what_is_missing(
    server: Server, prepared: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "one"
    argv = [sys.executable, *training(folder, prepared, "--max_steps", 30)]
    with open(tmp_path / "errors", "wb") as errors:
        process = subprocess.Popen(argv, cwd=ROOT, stderr=errors)
    try:
        until(lambda: process.poll() is not None or has_points(server, folder), SECONDS)
        process.send_signal(signal.SIGSTOP)
        server.stop()
        process.send_signal(signal.SIGCONT)
        assert process.wait(SECONDS) == 0
    finally:
        process.kill()
    told = [line for line in (tmp_path / "errors").read_text().splitlines() if "MLflow" in line]
    command = f"zeropods summary {folder} --report-to mlflow"
    assert told == [
        f"{folder}: MLflow cannot be reached (Connection refused); "
        "the run goes on, and what is missing is sent when it ends",
        f"{folder}: MLflow has not all of this run (Connection refused); send it again: {command}",
    ]
    assert read_record(folder).status == "ok"
    server.start()
    (run,) = server.runs()
    run_id = run["info"]["run_id"]
    assert run["info"]["status"] == "RUNNING" and len(server.curve(run_id, "train/loss")) < 30
    called("-m", *command.split())
    runs = {run["info"]["run_name"]: run for run in server.runs()}
    assert runs.keys() == {"one", "summary"} and runs["one"]["info"]["run_id"] == run_id
    assert {run["info"]["status"] for run in runs.values()} == {"FINISHED"}
    assert [step for step, _ in server.curve(run_id, "train/loss")] == list(range(1, 31))
    pages = server.files(runs["summary"]["info"]["run_id"], "summary")
    assert pages >= {"summary/index.html", "summary/losses.svg"} and f"summary/{MLFLOW_FILE}" not in pages
    # Once more changes nothing.
    before = server.curve(run_id, "samples_per_second")
    called("-m", *command.split())
    assert len(server.runs()) == 2 and server.curve(run_id, "samples_per_second") == before
    assert [step for step, _ in server.curve(run_id, "train/loss")] == list(range(1, 31))


def has_points(server: Server, folder: Path) -> bool:
    """Whether the server has a point of a run's loss."""
    named = MlflowRun.of(folder) if folder.is_dir() else None
    if named is None or named.mlflow_run_id is None:
        return False
    return server.curve(named.mlflow_run_id, "train/loss") != []


class Refuses(BaseHTTPRequestHandler):
    """A server to which no credentials are good enough; it keeps them."""

    seen: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        self.seen.append(self.headers.get("Authorization"))
        self.send_response(401)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_a_server_that_refuses_the_token_of_the_file_is_named_and_the_token_is_not(
    reporting: str, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as refusing:
        threading.Thread(target=refusing.serve_forever).start()
        address = f"http://127.0.0.1:{refusing.server_port}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        try:
            errors = called(*training(tmp_path / "run", prepared), status=1)
        finally:
            refusing.shutdown()
    assert Refuses.seen and set(Refuses.seen) == {f"Bearer {SECRET}"}
    assert errors.startswith(f"zeropods: --report_to mlflow: MLflow at {address} cannot be used (")
    assert "401" in errors and errors.count("\n") == 1 and SECRET not in errors
    assert not (tmp_path / "run").exists()


def test_a_server_that_cannot_be_reached_is_refused_before_a_run_begins(
    reporting: str, prepared: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "one"
    line = (
        f"MLflow at {reporting} cannot be used (Connection refused); start it, or correct MLFLOW_TRACKING_URI "
        "or the credentials in ~/.mlflow/credentials\n"
    )
    assert called(*training(folder, prepared), status=1) == f"zeropods: --report_to mlflow: {line}"
    launched = called("-m", "zeropods", "launch", "--", *training(folder, prepared), status=1)
    assert launched == f"zeropods: --report_to mlflow: {line}"
    assert not folder.exists()
