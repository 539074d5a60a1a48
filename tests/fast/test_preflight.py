"""Preflight where no sshd is needed: this machine, the judgement of facts, what people read."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zeropods.errors import UserError
from zeropods.pods import checks
from zeropods.pods.checks import Check, CheckContext, Expectation, PodChecks, Preflight, judge
from zeropods.pods.hostfile import Host
from zeropods.pods.preflight import (
    ProbeEnd,
    check_table,
    preflight,
    preflight_self,
    remedies,
    require,
    run_bounded,
    ssh_check,
)
from zeropods.pods.probe import Facts, cml_variables, gather, operation_state
from zeropods.programs import Turn, free_port
from zeropods.tables import GIB, MIB

DEADLINE_SECONDS = 20.0
GPU = {"free_bytes": 40 * GIB, "total_bytes": 40 * GIB}
USED_GPU = {"free_bytes": 10 * GIB, "total_bytes": 40 * GIB}
ROOM = {"project": 50 * GIB, "/tmp": GIB, "/dev/shm": GIB}
CML = {"CDSW_ENGINE_ID": "a", "CDSW_MASTER_IP": "10.0.0.1", "CDSW_IP_ADDRESS": "10.0.0.2"}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "my project"
    folder.mkdir()
    (folder / "train.py").write_text("print('train')\n")
    return folder


@pytest.fixture
def expected(project: Path) -> Expectation:
    return Expectation.of_this_machine(project, ("train.py",))


@pytest.fixture
def facts(project: Path) -> Facts:
    return gather(project, ["train.py"])


def test_probe_prints_its_facts_as_one_line_and_loads_no_torch(project: Path) -> None:
    code = f"""
import sys
from zeropods.pods.probe import main
main(["--project", {str(project)!r}, "--file", "train.py"])
sys.exit(any(name in sys.modules for name in ("torch", "transformers", "deepspeed")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=DEADLINE_SECONDS, check=True)
    found = Facts.from_json(json.loads(done.stdout))
    assert found.project and found.versions["python"] and found.digests["train.py"]


@pytest.mark.parametrize("answer", [[], {"hostname": "a"}, None])
def test_facts_of_another_version_are_refused(answer: object) -> None:
    with pytest.raises(ValueError, match="not the facts"):
        Facts.from_json(answer)


def test_this_machine_passes_its_own_check(expected: Expectation) -> None:
    found = preflight_self(expected)
    verdicts = {check.check: check.verdict for check in found.pods[0].checks}
    assert found.ok, remedies(found)
    assert verdicts["project"] == verdicts["torch"] == verdicts["clock"] == verdicts["programs"] == "ok"


def test_another_file_and_a_taken_port_are_noticed(project: Path, expected: Expectation) -> None:
    (project / "train.py").write_text("print('another')\n")
    # Not one that the kernel may give to another process meanwhile.
    port = free_port("127.0.1.1")
    with socket.create_server(("127.0.1.1", port)):
        found = preflight_self(replace(expected, master_port=port))
    with pytest.raises(UserError, match=r"^self: project failed: another train.py; .* is not the master's folder"):
        require(found)
    assert any(f"port failed: {port} taken" in line for line in remedies(found))


def test_missing_ssh_and_no_host_are_one_line(
    expected: Expectation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="no host to check"):
        preflight([], expected)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"^ssh: not found; install it"):
        preflight([Host("127.0.1.1", 1)], expected)


def test_a_command_gives_status_and_both_outputs() -> None:
    ended = run_bounded(["sh", "-c", "echo out; echo Authenticated to me >&2; exit 3"], threading.Event())
    assert (ended.status, ended.output, ended.errors) == (3, "out\n", "Authenticated to me\n")
    assert ended.login_seconds is not None


@pytest.mark.parametrize("stopped", [True, False])
def test_a_command_that_does_not_log_in_or_is_stopped_is_killed(stopped: bool) -> None:
    stop, started = threading.Event(), time.monotonic()
    if stopped:
        stop.set()
    ended = run_bounded(["sleep", "60"], stop)
    assert (ended.status, ended.login_seconds) == (None, None)
    assert time.monotonic() - started < (2.5 if stopped else DEADLINE_SECONDS)


JUDGED: list[tuple[str, dict[str, Any], dict[str, Any], str, str]] = [
    ("python", {"versions": {"python": "3.11.7"}}, {"versions": {"python": "3.11.7"}}, "ok", "3.11.7"),
    ("python", {"versions": {"python": "3.11.2"}}, {"versions": {"python": "3.11.7"}}, "warning", "3.11.2"),
    ("python", {"versions": {"python": "3.1.7"}}, {"versions": {"python": "3.11.7"}}, "failed", "3.1.7"),
    ("torch", {"versions": {"python": "3", "torch": "9.9"}}, {}, "failed", "9.9"),
    ("deepspeed", {"versions": {"python": "3"}}, {}, "failed", "missing"),
    ("ops", {"cpu_adam": "compiled"}, {"offload": True}, "ok", "compiled"),
    ("ops", {"cpu_adam": "compilable"}, {"offload": True}, "warning", "cpu_adam not compiled"),
    ("ops", {"cpu_adam": "compiling"}, {}, "warning", "cpu_adam being compiled"),
    ("ops", {"cpu_adam": "impossible: no ninja"}, {"offload": True}, "failed", "cpu_adam: no ninja"),
    ("ops", {"cpu_adam": "impossible: no ninja"}, {}, "warning", "cpu_adam: no ninja"),
    ("ops", {"cpu_adam": "impossible: no ninja"}, {"offload": False}, "ok", "none needed"),
    ("project", {"project": False}, {}, "failed", "missing"),
    ("disk", {"free_bytes": ROOM}, {}, "ok", "50.0 GiB"),
    ("disk", {"free_bytes": {**ROOM, "project": 5 * GIB}}, {}, "warning", "5.0 GiB"),
    ("disk", {"free_bytes": {**ROOM, "/tmp": 0}}, {}, "warning", "/tmp 0.0 GiB"),
    ("disk", {"free_bytes": {**ROOM, "/dev/shm": 64 * MIB}}, {}, "warning", "/dev/shm 0.1 GiB"),
    ("disk", {"free_bytes": {**ROOM, "project": GIB // 2}}, {}, "failed", "0.5 GiB"),
    ("disk", {"free_bytes": {**ROOM, "project": None}}, {}, "failed", "unknown"),
    ("memory", {"memory_available_bytes": GIB}, {}, "warning", "1.0 GiB"),
    ("GPU memory", {"gpus": None}, {}, "ok", "no GPU"),
    ("GPU memory", {"gpus": [GPU, USED_GPU]}, {}, "warning", "10.0 GiB of 40.0 GiB"),
    ("slots", {"gpus": None, "cores": 2}, {}, "ok", "2 on 2 cores"),
    ("slots", {"gpus": None, "cores": 1}, {}, "warning", "2 on 1 cores"),
    ("slots", {"gpus": [GPU, GPU]}, {}, "ok", "2 of 2 GPU"),
    ("slots", {"gpus": [GPU]}, {}, "failed", "2 of 1 GPU"),
    ("clock", {"time_seconds": 1000.5}, {}, "ok", "same"),
    ("clock", {"time_seconds": 994.0}, {}, "warning", "6 s behind"),
    ("clock", {"time_seconds": 1007.0}, {}, "warning", "6 s ahead"),
    ("clock", {"time_seconds": 1100.0}, {}, "failed", "99 s ahead"),
    ("CML", {"cml": {}}, {"cml": True}, "warning", "no CDSW_ENGINE_ID, no CDSW_IP_ADDRESS, no CDSW_MASTER_IP"),
    ("CML", {"cml": CML}, {"cml": True}, "ok", "a"),
    ("CML", {"cml": {**CML, "CDSW_IP_ADDRESS": "10.0.0.3"}}, {"cml": True}, "failed", "is 10.0.0.3"),
]


@pytest.mark.parametrize(("check", "found", "wanted", "verdict", "value"), JUDGED)
def test_facts_are_judged_by_what_the_run_needs(
    facts: Facts,
    expected: Expectation,
    check: str,
    found: dict[str, Any],
    wanted: dict[str, Any],
    verdict: str,
    value: str,
) -> None:
    asked = CheckContext(
        expected=replace(expected, **wanted), slots=2, address="10.0.0.2", asked_seconds=1000.0, answered_seconds=1001.0
    )
    judged = {each.check: each for each in judge(replace(facts, **found), asked)}
    assert (judged[check].verdict, judged[check].value) == (verdict, value)
    assert bool(judged[check].remedy) == (verdict != "ok")


def test_other_version_of_a_package_is_mended_by_pip(facts: Facts, expected: Expectation) -> None:
    master = replace(expected, versions={**expected.versions, "torch": "2.13.0+cpu"})
    asked = CheckContext(expected=master, slots=1, asked_seconds=0, answered_seconds=0)
    check = checks.check_package("torch", replace(facts, versions={"torch": "9.9.9"}), asked)
    assert check.remedy == "the master has 2.13.0+cpu; on the pod: pip install torch==2.13.0"


def test_cache_of_compiled_operations_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "cpu_adam").mkdir()
    turn = Turn(str(tmp_path / "cpu_adam" / "lock"))
    turn.try_acquire()
    assert operation_state() == "compiling"
    turn.release()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert operation_state().startswith("impossible: no C++ compiler")
    (tmp_path / "cpu_adam" / "cpu_adam.so").touch()
    assert operation_state() == "compiled"


def test_cml_variables_are_taken_under_either_name_and_no_other_is() -> None:
    environ = {"CML_MASTER_IP": "10.0.0.1", "CDSW_IP_ADDRESS": "10.0.0.2", "CDSW_API_KEY": "secret"}
    assert cml_variables(environ) == {"CDSW_MASTER_IP": "10.0.0.1", "CDSW_IP_ADDRESS": "10.0.0.2"}


@pytest.mark.parametrize(
    ("errors", "value"),
    [
        ("ssh: connect to host 127.0.1.1 port 2222: Connection refused", "nothing listens"),
        ("ssh: connect to host 10.9.9.9 port 22: Connection timed out", "no answer"),
        ("Connection timed out during banner exchange", "no answer"),
        ("me@127.0.1.1: Permission denied (publickey).", "key refused"),
        ("ssh: Could not resolve hostname nowhere: Name or service not known", "unknown name"),
        ("kex_exchange_identification: Connection closed by remote host", "connection closed"),
        ("No ED25519 host key is known for x\nHost key verification failed.", "host key unknown"),
        ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", "host key changed"),
        ("strange\x1b[31m words\n\n", "strange[31m words"),
        ("", "ssh failed"),
    ],
)
def test_what_ssh_says_is_said_in_few_words(errors: str, value: str) -> None:
    ended = ProbeEnd(status=255, login_seconds=None, output="", errors=errors)
    check = ssh_check(ended, "127.0.1.1", 2222)
    assert (check.verdict, check.value) == ("failed", value) and check.remedy


def test_a_preflight_is_shown_required_and_printed_as_json() -> None:
    good = PodChecks(pod="pod1", address="10.0.0.1", checks=(Check("ssh", "ok", "0.1 s"), Check("torch", "ok", "2.0")))
    dead = PodChecks(pod="pod2", address="10.0.0.2", checks=(Check("ssh", "failed", "no answer", "mend it"),))
    warned = replace(good, pod="pod3", checks=(Check("ssh", "ok", "0.1 s"), Check("torch", "warning", "1.9", "look")))
    mixed, table = Preflight(pods=(good, dead, warned)), check_table(Preflight(pods=(good, dead, warned)))
    assert [table.header, *table.rows] == [
        ("pod", "ssh", "torch"),
        ("pod1", "0.1 s", "2.0"),
        ("pod2", "FAILED: no answer", "-"),
        ("pod3", "0.1 s", "WARNING: 1.9"),
    ]
    lines = ["pod2 (10.0.0.2): ssh failed: no answer; mend it", "pod3 (10.0.0.1): torch warning: 1.9; look"]
    assert remedies(mixed) == lines and str(table).endswith("\n".join(lines)) and "<li>pod2 (" in table.to_html()
    with pytest.raises(UserError, match=r"^pod2 \(10.0.0.2\): ssh failed: no answer; mend it$"):
        require(mixed)
    require(Preflight(pods=(good, warned)))
    document = json.loads(json.dumps(mixed.to_json()))
    assert document["ok"] is False
    assert document["pods"][1] == {
        "pod": "pod2",
        "address": "10.0.0.2",
        "checks": [{"check": "ssh", "verdict": "failed", "value": "no answer", "remedy": "mend it"}],
    }
