"""Preflight where no sshd is needed: this machine, the judgement of facts, what people read."""

import json
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from zeropods.errors import UserError
from zeropods.pods import preflight as checks
from zeropods.pods.preflight import (
    Check,
    Expectation,
    PodChecks,
    Preflight,
    agent_check,
    preflight_self,
    ssh_check,
)
from zeropods.programs import free_port
from zeropods.tables import GIB
from zeropods.train.deepspeed_config import CPU_ADAM, QUANTIZER

DEADLINE_SECONDS = 240.0


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "my project"
    folder.mkdir()
    (folder / "train.py").write_text("print('train')\n")
    return folder


@pytest.fixture
def expected(project: Path) -> Expectation:
    return Expectation.of_this_machine(project, ("train.py",))


def test_the_probe_prints_one_line_and_loads_no_torch(expected: Expectation) -> None:
    code = """
import sys
from zeropods.pods.preflight import main
main()
sys.exit(any(name in sys.modules for name in ("torch", "transformers", "deepspeed")))
"""
    argv = [sys.executable, "-c", code, json.dumps(asdict(expected))]
    done = subprocess.run(argv, capture_output=True, timeout=DEADLINE_SECONDS, check=True)
    assert "project" in [check["check"] for check in json.loads(done.stdout)["checks"]]


def test_this_machine_passes_its_own_check(expected: Expectation) -> None:
    found = preflight_self(expected)
    verdicts = {check.check: check.verdict for check in found.pods[0].checks}
    assert found.ok, found.remedies()
    assert verdicts["project"] == verdicts["torch"] == verdicts["clock"] == verdicts["programs"] == "ok"


def test_another_file_and_a_taken_port_are_noticed(project: Path, expected: Expectation) -> None:
    (project / "train.py").write_text("print('another')\n")
    # Not one that the kernel may give to another process meanwhile.
    port = free_port("127.0.1.1")
    with socket.create_server(("127.0.1.1", port)):
        found = preflight_self(replace(expected, master_port=port))
    with pytest.raises(UserError, match=r"^self: project failed: different train.py; .* is not the master's folder"):
        found.require()
    assert any(f"port failed: {port} taken" in line for line in found.remedies())


IDLE = checks.GpuState("0", "GPU-0", 40 * GIB, 40 * GIB)
BUSY = checks.GpuState("3", "GPU-3", 10 * GIB, 40 * GIB)
JUDGED = [
    (checks.check_version("python", "3.11.7", "3.11.7"), "ok", "3.11.7"),
    (checks.check_version("python", "3.11.2", "3.11.7"), "warning", "3.11.2"),
    (checks.check_version("python", "3.12.2", "3.11.7"), "failed", "3.12.2"),
    (checks.check_version("torch", "9.9", "2.13.0+cpu"), "failed", "9.9"),
    (checks.check_version("torch", None, "2.13.0+cpu"), "failed", "missing"),
    (checks.check_version("torch", "9.9", None), "failed", "9.9"),
    (checks.check_operations({"cpu_adam": None, "quantizer": None}), "ok", "compiled"),
    (checks.check_operations({"cpu_adam": []}), "warning", "cpu_adam not compiled"),
    (checks.check_operations({"cpu_adam": ["ninja"]}), "failed", "cpu_adam: no ninja"),
    (checks.check_operations({"cpu_adam": ["ninja"]}, are_needed=False), "warning", "cpu_adam: no ninja"),
    (checks.check_operations({"cpu_adam": [], "quantizer": ["nvcc"]}), "failed", "quantizer: no nvcc"),
    (checks.check_operations({"cpu_adam": None, "quantizer": []}), "warning", "quantizer not compiled"),
    (checks.check_operations({}), "ok", "none needed"),
    (checks.check_disk(50 * GIB, GIB, GIB), "ok", "50.0 GiB"),
    (checks.check_disk(50 * GIB, 0, GIB), "warning", "/tmp 0.0 GiB"),
    (checks.check_disk(5 * GIB, GIB, GIB), "warning", "5.0 GiB"),
    (checks.check_disk(GIB // 2, GIB, GIB), "failed", "0.5 GiB"),
    (checks.check_gpus([IDLE, BUSY], 2, 8)[0], "warning", "10.0 GiB of 40.0 GiB"),
    (checks.check_gpus([], 2, 1)[1], "warning", "2 on 1 cores"),
    (checks.check_gpus([IDLE, IDLE], 2, 8)[1], "ok", "2 of 2 GPU"),
    (checks.check_gpus([IDLE], 2, 8)[1], "failed", "2 of 1 GPU"),
    (checks.check_clock(1000.5, 1000, 1001), "ok", "same"),
    (checks.check_clock(994.0, 1000, 1001), "warning", "6 s behind"),
    (checks.check_clock(1100.0, 1000, 1001), "failed", "99 s ahead"),
]


@pytest.mark.parametrize(("check", "verdict", "value"), JUDGED)
def test_what_is_found_is_judged_by_what_the_run_needs(check: Check, verdict: str, value: str) -> None:
    assert (check.verdict, check.value) == (verdict, value) and bool(check.remedy) == (verdict != "ok")


def test_what_is_compiled_for_gpus_is_looked_for_on_a_pod_with_some(expected: Expectation) -> None:
    assert {*checks.OPERATIONS} == {CPU_ADAM, QUANTIZER}
    quantized = replace(expected, operations=[QUANTIZER])
    for gpus, value in (([IDLE], QUANTIZER), ([], "none needed")):
        (check,) = [check for check in checks.checks_here(quantized, gpus) if check.check == "ops"]
        assert value in check.value or check.value == "compiled"


def test_pods_that_only_do_not_answer_in_time_may_be_asked_again() -> None:
    answers, silent, refused = (
        PodChecks(pod=name, address=name, checks=(ssh_check(subprocess.CompletedProcess([], *end), name),))
        for name, end in (
            ("pod1", (0, "{}", "")),
            ("pod2", (checks.TIMED_OUT, "", "")),
            ("pod3", (255, "", "Permission denied (publickey)")),
        )
    )
    assert Preflight(pods=(answers, silent)).silent_pods() == ["pod2"]
    assert Preflight(pods=(answers,)).silent_pods() == Preflight(pods=(silent, refused)).silent_pods() == []


@pytest.mark.parametrize(
    ("status", "errors", "value", "remedy"),
    [
        (255, "10.0.0.1:9: closed: Connection refused", "no answer", "10.0.0.1:9: closed: Connection refused; see "),
        (254, "10.0.0.1:9: not a known request", "refused", "10.0.0.1:9: not a known request"),
        (-14, "", "no answer: its check was killed, or took more than 20 s", "end other programs on 10.0.0.1, or"),
    ],
)
def test_what_an_agent_says_is_said_in_few_words(status: int, errors: str, value: str, remedy: str) -> None:
    check = agent_check(subprocess.CompletedProcess([], status, "", errors), "10.0.0.1")
    assert (check.check, check.verdict, check.value) == ("agent", "failed", value) and check.remedy.startswith(remedy)
    silent = Preflight(pods=(PodChecks(pod="pod1", address="10.0.0.1", checks=(check,)),)).silent_pods()
    assert silent == ([] if value == "refused" else ["pod1"])


def test_a_machine_without_pdsh_is_a_pod_all_the_same(expected: Expectation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/nowhere")
    check = checks.check_programs()
    assert check.verdict == "warning" and "no ssh, " in check.value and "no pdsh" in check.value
    assert check.remedy.startswith("launches go through the pods' agents; for pdsh: apt-get install ")


@pytest.mark.parametrize(
    ("errors", "value"),
    [
        ("ssh: connect to host 10.9.9.9 port 22: Connection timed out", "no answer"),
        ("Connection timed out during banner exchange", "no answer"),
        ("ssh: Could not resolve hostname nowhere: Name or service not known", "unknown name"),
        ("strange\x1b[31m words\n\n", "strange[31m words"),
        ("", "no answer: its check was killed, or took more than 20 s"),
    ],
)
def test_what_ssh_says_is_said_in_few_words(errors: str, value: str) -> None:
    check = ssh_check(subprocess.CompletedProcess([], 255, "", errors), "127.0.1.1")
    assert (check.verdict, check.value) == ("failed", value) and check.remedy
