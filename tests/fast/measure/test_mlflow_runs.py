"""Reports to MLflow where it is not installed, or not told where to send: one line each, and no secret is shown."""

import threading
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.made import a_config, a_record, write_run
from zeropods.cli import main
from zeropods.errors import UserError
from zeropods.measure.mlflow_runs import (
    LONGEST_PARAMETER,
    MLFLOW_FILE,
    PACKAGE,
    MlflowRun,
    Points,
    fault_of,
    has_user_info,
    mlflow_run,
    parameters_of,
    server_address,
)
from zeropods.measure.record import read_config
from zeropods.report.to_mlflow import report_end
from zeropods.train.flags import SCRIPTS, CausalArguments, TextToSQLArguments, parse_flags

ADDRESS = "http://127.0.0.1:5000"
SECRET = "s3cret-of-mine"

without_mlflow = pytest.mark.skipif(find_spec("mlflow") is not None, reason="mlflow is installed here")


def written_run(folder: Path) -> Path:
    """A run that has ended well, with what was asked for."""
    return write_run(folder, a_record(), config=a_config())


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address of a server, and neither a rank nor its supervisor."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", ADDRESS)
    for name in ("RANK", "ZEROPODS_RUN", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)


@without_mlflow
@pytest.mark.parametrize("kind", SCRIPTS.values())
def test_a_script_that_cannot_report_is_refused_before_it_looks_at_data_or_a_model(
    kind: type[TextToSQLArguments | CausalArguments], tmp_path: Path
) -> None:
    arguments = parse_flags(kind, ["--report_to", "mlflow", "--outputdir", str(tmp_path / "run")])
    with pytest.raises(UserError) as refused:
        arguments.check_inputs()
    assert str(refused.value) == f"--report_to mlflow: mlflow is not installed; pip install {PACKAGE}"


@without_mlflow
@pytest.mark.parametrize(("name", "value"), [("RANK", "1"), ("ZEROPODS_RUN", "x")])
def test_a_rank_that_reports_nothing_or_whose_supervisor_has_looked_is_not_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    TextToSQLArguments(report_to="mlflow").check_reporting()


@without_mlflow
def test_a_summary_that_cannot_be_sent_is_refused_before_it_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written_run(tmp_path / "runs" / "one")
    assert main(["summary", str(tmp_path / "runs"), "--report-to", "mlflow"]) == 1
    assert capsys.readouterr().err == f"zeropods: --report-to mlflow: mlflow is not installed; pip install {PACKAGE}\n"
    assert not (tmp_path / "runs" / "summary").exists()


def test_another_place_to_report_to_is_refused() -> None:
    with pytest.raises(UserError, match=r"^--report_to 'wandb'; expected tensorboard, mlflow$"):
        parse_flags(TextToSQLArguments, ["--report_to", "wandb"])


def test_a_server_without_an_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    with pytest.raises(UserError, match=r"^--report_to mlflow: MLFLOW_TRACKING_URI is not set; give the server's add"):
        server_address()


@pytest.mark.parametrize("user", [f"me:{SECRET}", SECRET, f":{SECRET}", f"me:{SECRET}@x"])
def test_an_address_that_holds_a_secret_is_refused_and_the_secret_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, user: str
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"https://{user}@host/mlflow")
    with pytest.raises(UserError, match=r"put them into ~/\.mlflow/credentials, with mode 600$") as refused:
        server_address()
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("address", [ADDRESS, "cml://localhost", "databricks", "http://host/a@b", "a@b"])
def test_an_address_without_a_user_is_none_with_one(address: str) -> None:
    assert not has_user_info(address)


def test_a_folder_s_run_is_kept_unless_another_run_or_another_server_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert mlflow_run(tmp_path, "a") == MlflowRun(ADDRESS, "a", None)
    kept = MlflowRun(ADDRESS, "a", "0123")
    kept.write(tmp_path)
    assert mlflow_run(tmp_path, "a") == kept
    assert mlflow_run(tmp_path, "b") == MlflowRun(ADDRESS, "b", None)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://elsewhere")
    assert mlflow_run(tmp_path, "a") == MlflowRun("http://elsewhere", "a", None)


def test_a_damaged_file_of_the_folder_s_run_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / MLFLOW_FILE).write_text('{"address": 1}')
    with pytest.raises(UserError, match=rf"{MLFLOW_FILE}.*remove it"):
        MlflowRun.of(tmp_path)


def test_parameters_are_the_flags_and_facts_of_a_run_as_text_or_numbers(tmp_path: Path) -> None:
    config = read_config(written_run(tmp_path / "run"))
    parameters = parameters_of(config)
    assert parameters["model_id"] == config.model_id and parameters["world_size"] == config.world_size
    assert not parameters.keys() & {"argv", "hosts", "run_id", "started_at", "deepspeed", "hardware"}
    assert all(isinstance(value, str | int | float) for value in parameters.values())
    assert max(len(str(value)) for value in parameters.values()) < LONGEST_PARAMETER


def test_an_error_of_any_class_is_said_in_a_line_and_a_slow_server_is_not_waited_for() -> None:
    class OfAPluginError(Exception):
        """An error that nobody here has heard of."""

    def fail(error: BaseException) -> None:
        raise error

    assert fault_of(lambda: None, 60.0) is None
    assert fault_of(lambda: fail(OfAPluginError("no\nmore")), 60.0) == "no"
    assert fault_of(lambda: fail(OfAPluginError()), 60.0) == "OfAPluginError"
    long = "failed with HTTPConnectionPool(host='x'): NewConnectionError('[Errno 111] Connection refused'))"
    assert fault_of(lambda: fail(OSError(long)), 60.0) == "Connection refused"
    released = threading.Event()
    assert fault_of(released.wait, 0.0) == "no answer in 0 s"
    released.set()


@without_mlflow
def test_a_run_whose_mlflow_is_gone_goes_on_and_that_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written_run(tmp_path / "run")
    points = Points(folder)
    points.begin()
    for step in range(5):
        points.add({"train": {"loss": 1.0}}, step)
    points.close()
    assert capsys.readouterr().err == (
        f"{folder}: MLflow cannot be reached (No module named 'mlflow'); "
        "the run goes on, and what is missing is sent when it ends\n"
    )
    named = MlflowRun.of(folder)
    assert named == MlflowRun(ADDRESS, read_config(folder).run_id, None)
    report_end(folder)
    assert capsys.readouterr().err == (
        f"{folder}: MLflow has not all of this run (No module named 'mlflow'); "
        f"send it again: zeropods summary {folder} --report-to mlflow\n"
    )


def test_a_run_that_is_reported_nowhere_ends_in_silence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report_end(written_run(tmp_path / "run"))
    assert capsys.readouterr().err == ""
