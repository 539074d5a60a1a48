"""What both backends promise: CML's four calls, by the local one and by a double of CML's module."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.full.cml_double import CmlDouble
from zeropods.pods.backends.cml import CmlWorkers
from zeropods.pods.backends.local import LocalWorkers, Loopback
from zeropods.pods.backends.workers import Workers, has_ended, is_pending, status_of

SIZE = {"cpu": 0.5, "memory": 1}
SLEEP = "import time; time.sleep(60)"
SECONDS = 20.0


@pytest.fixture(params=["local", "cml"])
def workers(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    """A backend with no worker; whatever a test leaves is stopped."""
    monkeypatch.setattr("zeropods.pods.backends.local.STOP_SECONDS", 1.0)
    monkeypatch.setattr("tests.full.cml_double.STOP_SECONDS", 1.0)
    backend: Workers
    if request.param == "local":
        backend = LocalWorkers(tmp_path, Loopback(set))
    else:
        CmlDouble().install(monkeypatch)
        backend = CmlWorkers()
    yield backend
    backend.stop_workers(*(worker["id"] for worker in backend.list_workers()))
    assert all(has_ended(worker) for worker in backend.list_workers())


def listed(workers: Workers, launched: list[dict[str, Any]]) -> list[dict[str, Any]]:
    ids = [worker["id"] for worker in launched]
    found = {worker["id"]: worker for worker in workers.list_workers()}
    return [found[worker] for worker in ids]


class TestWorkers:
    def test_each_launched_worker_has_its_own_id_and_an_app_url(self, workers: Workers) -> None:
        launched = workers.launch_workers(n=3, **SIZE, code=SLEEP)
        assert len({worker["id"] for worker in launched}) == 3 and all("app_url" in worker for worker in launched)

    def test_a_listed_worker_has_all_that_is_documented(self, workers: Workers) -> None:
        launched = workers.launch_workers(n=1, **SIZE, code=SLEEP)
        keys = {"id", "status", "ip_address", "created_at", "running_at", "finished_at", "exit_code"}
        assert keys <= listed(workers, launched)[0].keys()

    def test_awaited_workers_run_at_different_addresses(self, workers: Workers) -> None:
        launched = workers.launch_workers(n=2, **SIZE, code=SLEEP)
        found = workers.await_workers(launched, wait_for_completion=False, timeout_seconds=SECONDS)
        assert [status_of(worker) for worker in found["workers"]] == ["running"] * 2 and not found["failures"]
        assert len({worker["ip_address"] for worker in found["workers"]}) == 2

    def test_a_worker_knows_itself_its_master_and_what_it_was_told(self, workers: Workers, tmp_path: Path) -> None:
        code = f"import json, os; open({str(tmp_path / 'seen')!r}, 'w').write(json.dumps(dict(os.environ)))"
        launched = workers.launch_workers(n=1, **SIZE, code=code, env={"TOLD": "so be it"})
        workers.await_workers(launched, timeout_seconds=SECONDS)
        seen = json.loads((tmp_path / "seen").read_text())
        (worker,) = listed(workers, launched)
        expected = {"CDSW_ENGINE_ID": worker["id"], "CDSW_IP_ADDRESS": worker["ip_address"], "TOLD": "so be it"}
        assert expected.items() <= seen.items() and seen["CDSW_MASTER_IP"].startswith("127.0.")

    def test_code_after_an_exclamation_mark_is_a_command(self, workers: Workers, tmp_path: Path) -> None:
        command = shlex.join([sys.executable, "-c", f"open({str(tmp_path / 'out')!r}, 'w').write('a b')"])
        launched = workers.launch_workers(n=1, **SIZE, code=f"!{command}")
        assert workers.await_workers(launched, timeout_seconds=SECONDS)["workers"]
        assert (tmp_path / "out").read_text() == "a b"

    def test_a_script_is_run_and_code_then_ignored(self, workers: Workers, tmp_path: Path) -> None:
        script = tmp_path / "script.py"
        script.write_text(f"open({str(tmp_path / 'out')!r}, 'w').write('script')")
        launched = workers.launch_workers(n=1, **SIZE, script=str(script), code="raise SystemExit(1)")
        assert workers.await_workers(launched, timeout_seconds=SECONDS)["workers"]
        assert (tmp_path / "out").read_text() == "script"

    def test_a_worker_that_fails_is_a_failure_with_its_exit_code(self, workers: Workers) -> None:
        launched = workers.launch_workers(n=1, **SIZE, code="raise SystemExit(3)")
        found = workers.await_workers(launched, timeout_seconds=SECONDS)
        assert not found["workers"] and found["failures"][0]["exit_code"] == 3

    def test_a_worker_that_is_not_done_in_time_is_a_failure(self, workers: Workers) -> None:
        launched = workers.launch_workers(n=1, **SIZE, code=SLEEP)
        began = time.monotonic()
        found = workers.await_workers(launched, timeout_seconds=0.5)
        assert len(found["failures"]) == 1 and time.monotonic() - began < SECONDS

    def test_a_stopped_worker_has_ended_and_others_run_on(self, workers: Workers) -> None:
        launched = workers.launch_workers(n=2, **SIZE, code=SLEEP)
        workers.await_workers(launched, wait_for_completion=False, timeout_seconds=SECONDS)
        workers.stop_workers(launched[0]["id"])
        first, second = listed(workers, launched)
        assert has_ended(first) and status_of(second) == "running"

    def test_a_worker_that_ignores_sigterm_is_ended_all_the_same(self, workers: Workers, tmp_path: Path) -> None:
        code = f"import signal; signal.signal(15, signal.SIG_IGN); open({str(tmp_path / 'deaf')!r}, 'w'); {SLEEP}"
        launched = workers.launch_workers(n=1, **SIZE, code=code)
        deadline = time.monotonic() + SECONDS
        while not (tmp_path / "deaf").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        workers.stop_workers(launched[0]["id"])
        assert has_ended(listed(workers, launched)[0])


def test_a_worker_over_the_double_s_quota_is_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    double = CmlDouble(quota=0)
    double.install(monkeypatch)
    launched = CmlWorkers().launch_workers(n=1, **SIZE, code=SLEEP)
    assert is_pending(double.list_workers()[0])
    double.stop_workers(launched[0]["id"])


def test_another_process_lists_and_stops_local_workers(tmp_path: Path) -> None:
    launched = LocalWorkers(tmp_path, Loopback(set)).launch_workers(n=1, **SIZE, code=SLEEP)
    stranger = LocalWorkers(tmp_path, Loopback(set))
    assert status_of(listed(stranger, launched)[0]) == "running"
    stranger.stop_workers()
    stopped = listed(stranger, launched)[0]
    assert has_ended(stopped) and stopped["exit_code"] is None


def test_the_log_of_a_local_worker_is_its_owner_s_alone(tmp_path: Path) -> None:
    local = LocalWorkers(tmp_path, Loopback(set))
    launched = local.launch_workers(n=1, **SIZE, code="print('one'); print('two')")
    local.await_workers(launched, timeout_seconds=SECONDS)
    (log,) = (tmp_path / "logs").iterdir()
    assert log.stat().st_mode & 0o777 == 0o600 and local.last_line(launched[0]["id"]) == "two"
