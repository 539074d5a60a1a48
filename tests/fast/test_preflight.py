"""Preflight where no sshd is needed: this machine, bounded commands, the judgement of facts."""

from __future__ import annotations

import dataclasses
import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from zeropods.errors import UserError
from zeropods.pods import preflight_checks, probe
from zeropods.pods.hostfile import Host
from zeropods.pods.preflight import (
    Ended,
    mending_lines,
    pods_check_table,
    preflight,
    preflight_self,
    require,
    run_bounded,
    ssh_check,
)
from zeropods.pods.preflight_checks import GIB, Check, Expectation, PodChecks, Preflight
from zeropods.pods.probe import Facts, cml_variables, find_program, gather
from zeropods.programs import Turn, free_port, is_free

DEADLINE_SECONDS = 20.0


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


def bounded(*argv: str, alive_seconds: float = DEADLINE_SECONDS, seconds: float = DEADLINE_SECONDS) -> Ended:
    return run_bounded(
        list(argv),
        alive=lambda output, errors: bool(output),
        alive_seconds=alive_seconds,
        seconds=seconds,
        stop=threading.Event(),
    )


def test_probe_prints_its_facts_as_one_line(project: Path) -> None:
    argv = [sys.executable, "-m", "zeropods.pods.probe", "--project", str(project), "--file", "train.py"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=True)
    assert done.stdout.count("\n") == 1
    found = Facts.from_json(json.loads(done.stdout))
    assert found.project and found.versions["python"] and found.digests["train.py"]


def test_probe_loads_no_torch(project: Path) -> None:
    code = f"""
import sys
from zeropods.pods.probe import main
main(["--project", {str(project)!r}])
sys.exit(any(name in sys.modules for name in ("torch", "transformers", "deepspeed")))
"""
    argv = [sys.executable, "-c", code]
    assert subprocess.run(argv, stdout=subprocess.DEVNULL, timeout=DEADLINE_SECONDS, check=False).returncode == 0


@pytest.mark.parametrize("answer", [[], {}, {"hostname": "a"}, None, 3])
def test_facts_of_another_version_are_refused(answer: object) -> None:
    with pytest.raises(ValueError, match="not the facts"):
        Facts.from_json(answer)


def test_this_machine_passes_its_own_check(expected: Expectation) -> None:
    found = preflight_self(expected)
    verdicts = {check.check: check.verdict for check in found.pods[0].checks}
    assert found.ok, mending_lines(found)
    assert verdicts["project"] == verdicts["torch"] == verdicts["clock"] == "ok"


def test_another_file_of_the_same_name_is_noticed(project: Path, expected: Expectation) -> None:
    (project / "train.py").write_text("print('another')\n")
    found = preflight_self(expected)
    with pytest.raises(UserError, match=r"^self: project failed: another train.py; .* is not the master's folder"):
        require(found)


def test_taken_port_is_noticed_and_a_free_one_is_free(project: Path) -> None:
    # Not one that the kernel may give to another process meanwhile.
    port = free_port("127.0.1.1")
    with socket.socket() as server:
        server.bind(("127.0.1.1", port))
        server.listen()
        found = preflight_self(Expectation.of_this_machine(project, master_port=port))
        assert any(f"port failed: {port} taken" in line for line in mending_lines(found))
    assert is_free("", port)


def test_missing_ssh_is_one_line(expected: Expectation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"^ssh: not found; install it"):
        preflight([Host("127.0.1.1", 1)], expected)


def test_no_host_is_one_line(expected: Expectation) -> None:
    with pytest.raises(UserError, match="no host to check"):
        preflight([], expected)


def test_programs_of_daemons_are_found_without_their_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert find_program("sshd") is not None


def test_bounded_command_gives_status_and_both_outputs() -> None:
    ended = bounded("sh", "-c", "echo out; echo err >&2; exit 3")
    assert (ended.status, ended.output, ended.errors) == (3, "out\n", "err\n")
    assert ended.alive_seconds is not None


def test_command_without_a_sign_of_life_is_killed() -> None:
    started = time.monotonic()
    ended = bounded("sh", "-c", "sleep 60", alive_seconds=0.3)
    assert ended.status is None and ended.alive_seconds is None
    assert time.monotonic() - started < DEADLINE_SECONDS / 2


def test_command_that_lives_too_long_is_killed_with_its_children(tmp_path: Path) -> None:
    ended = bounded("sh", "-c", "sleep 60 & echo $!; wait", seconds=1.0)
    assert ended.status is None and ended.alive_seconds is not None
    assert_ends(int(ended.output))


def test_command_ends_though_a_child_keeps_its_output_open() -> None:
    started = time.monotonic()
    ended = bounded("sh", "-c", "sleep 60 & echo $!")
    assert ended.status == 0 and time.monotonic() - started < DEADLINE_SECONDS / 2
    assert_ends(int(ended.output))


def test_of_endless_output_the_last_is_kept() -> None:
    ended = bounded("sh", "-c", "head -c 3000000 /dev/zero; echo end")
    assert ended.status == 0 and len(ended.output) == 1_048_576 and ended.output.endswith("end\n")


def test_stopped_command_is_killed_at_once() -> None:
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    started = time.monotonic()
    ended = run_bounded(["sleep", "60"], alive=lambda o, e: False, alive_seconds=30, seconds=30, stop=stop)
    assert ended.status is None and time.monotonic() - started < DEADLINE_SECONDS / 2


def assert_ends(process: int) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while Path(f"/proc/{process}").exists() and "Z" not in _state(process):
        assert time.monotonic() < deadline, f"process {process} still runs"
        time.sleep(0.05)


def _state(process: int) -> str:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


@pytest.mark.parametrize(
    ("found", "verdict"), [("3.11.7", "ok"), ("3.11.2", "warning"), ("3.12.7", "failed"), ("3.1.7", "failed")]
)
def test_pythons_release_must_be_the_masters(facts: Facts, expected: Expectation, found: str, verdict: str) -> None:
    master = dataclasses.replace(expected, versions={**expected.versions, "python": "3.11.7"})
    pod = dataclasses.replace(facts, versions={**facts.versions, "python": found})
    assert preflight_checks.python(pod, master).verdict == verdict


def test_other_version_of_a_package_is_mended_by_pip(facts: Facts, expected: Expectation) -> None:
    master = dataclasses.replace(expected, versions={**expected.versions, "torch": "2.13.0+cpu"})
    pod = dataclasses.replace(facts, versions={**facts.versions, "torch": "9.9.9"})
    check = preflight_checks.package("torch", pod, master)
    assert (check.verdict, check.value) == ("failed", "9.9.9")
    assert check.remedy == "the master has 2.13.0+cpu; on the pod: pip install torch==2.13.0"


def test_missing_package_is_said_to_be_missing(facts: Facts, expected: Expectation) -> None:
    pod = dataclasses.replace(facts, versions={**facts.versions, "deepspeed": None})
    assert preflight_checks.package("deepspeed", pod, expected).value == "missing"


@pytest.mark.parametrize(
    ("state", "offload", "gpus", "verdict"),
    [
        ("compiled", True, 0, "ok"),
        ("compilable", True, 0, "warning"),
        ("compiling", None, 0, "warning"),
        ("impossible: no ninja", True, 1, "failed"),
        ("impossible: no ninja", None, 1, "warning"),
        ("impossible: no ninja", False, 1, "ok"),
        ("impossible: no ninja", False, 0, "ok"),
    ],
)
def test_operations_are_judged_by_what_the_run_needs(
    facts: Facts, expected: Expectation, state: str, offload: bool | None, gpus: int, verdict: str
) -> None:
    pod = dataclasses.replace(
        facts,
        operations=dict.fromkeys(probe.OPERATIONS, state),
        gpus=[{"free_bytes": GIB, "total_bytes": GIB}] * gpus or None,
    )
    assert preflight_checks.operations(pod, dataclasses.replace(expected, offload=offload)).verdict == verdict


@pytest.mark.parametrize(("files", "state"), [(["cpu_adam.so"], "compiled"), (["cpu_adam.o"], "compiling")])
def test_cache_of_compiled_operations_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str], state: str
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "cpu_adam").mkdir()
    for name in files:
        (tmp_path / "cpu_adam" / name).touch()
    turn = Turn(str(tmp_path / "cpu_adam" / "lock"))
    turn.try_acquire()
    assert probe.operation_states()["cpu_adam"] == state
    turn.release()
    assert probe.operation_states()["cpu_adam"] != "compiling"


def test_without_a_compiler_nothing_can_be_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert probe.operation_states()["cpu_adam"].startswith("impossible: no C++ compiler")


@pytest.mark.parametrize(
    ("offset", "verdict", "value"),
    [
        (0.5, "ok", "same"),
        (-4.0, "ok", "same"),
        (-6.0, "warning", "6 s behind"),
        (7.0, "warning", "6 s ahead"),
        (100.0, "failed", "99 s ahead"),
        (-61.0, "failed", "61 s behind"),
    ],
)
def test_clock_is_judged_apart_from_the_round_trip(facts: Facts, offset: float, verdict: str, value: str) -> None:
    pod = dataclasses.replace(facts, time_seconds=1000.0 + offset)
    check = preflight_checks.clock(pod, 1000.0, 1001.0)
    assert (check.verdict, check.value) == (verdict, value)


@pytest.mark.parametrize(
    ("gpus", "cores", "slots", "verdict"), [(0, 2, 2, "ok"), (0, 2, 3, "warning"), (2, 8, 2, "ok"), (2, 8, 3, "failed")]
)
def test_slots_are_gpus_or_else_cores(facts: Facts, gpus: int, cores: int, slots: int, verdict: str) -> None:
    pod = dataclasses.replace(facts, gpus=[{"free_bytes": 1, "total_bytes": 1}] * gpus or None, cores=cores)
    assert preflight_checks.slots(pod, slots).verdict == verdict


@pytest.mark.parametrize(
    ("room", "tmp", "shm", "verdict"),
    [
        (50 * GIB, GIB, GIB, "ok"),
        (5 * GIB, GIB, GIB, "warning"),
        (50 * GIB, 0, GIB, "warning"),
        (50 * GIB, GIB, 64 * 2**20, "warning"),
        (GIB // 2, GIB, GIB, "failed"),
        (None, GIB, GIB, "failed"),
    ],
)
def test_full_disk_is_a_failure_and_a_nearly_full_one_a_warning(
    facts: Facts, expected: Expectation, room: int | None, tmp: int, shm: int, verdict: str
) -> None:
    pod = dataclasses.replace(facts, free_bytes={"project": room, "/tmp": tmp, "/dev/shm": shm})
    assert preflight_checks.disk(pod, expected).verdict == verdict


def test_gpu_that_somebody_uses_is_a_warning(facts: Facts, expected: Expectation) -> None:
    gpus = [{"free_bytes": 40 * GIB, "total_bytes": 40 * GIB}, {"free_bytes": 10 * GIB, "total_bytes": 40 * GIB}]
    check = preflight_checks.gpu_memory(dataclasses.replace(facts, gpus=gpus), expected)
    assert (check.verdict, check.value) == ("warning", "10.0 GiB of 40.0 GiB") and "GPU 1" in check.remedy


def test_cml_variables_are_taken_under_either_name_and_no_other_is() -> None:
    environ = {"CML_MASTER_IP": "10.0.0.1", "CDSW_IP_ADDRESS": "10.0.0.2", "CDSW_API_KEY": "secret"}
    assert cml_variables(environ) == {"CDSW_MASTER_IP": "10.0.0.1", "CDSW_IP_ADDRESS": "10.0.0.2"}


@pytest.mark.parametrize(
    ("stated", "verdict"),
    [
        ({}, "warning"),
        ({"CDSW_ENGINE_ID": "a", "CDSW_MASTER_IP": "10.0.0.1", "CDSW_IP_ADDRESS": "10.0.0.2"}, "ok"),
        ({"CDSW_ENGINE_ID": "a", "CDSW_MASTER_IP": "10.0.0.1", "CDSW_IP_ADDRESS": "10.0.0.3"}, "failed"),
    ],
)
def test_cml_pod_says_who_it_is(facts: Facts, stated: dict[str, str], verdict: str) -> None:
    assert preflight_checks.cml(dataclasses.replace(facts, cml=stated), "10.0.0.2").verdict == verdict


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
    ended = Ended(status=255, alive_seconds=None, output="", errors=errors)
    check = ssh_check(ended, "127.0.1.1", 2222, 2.7)
    assert (check.verdict, check.value) == ("failed", value) and check.remedy


@pytest.fixture
def mixed() -> Preflight:
    good = PodChecks(pod="pod1", address="10.0.0.1", checks=(Check("ssh", "ok", "0.1 s"), Check("torch", "ok", "2.0")))
    dead = PodChecks(pod="pod2", address="10.0.0.2", checks=(Check("ssh", "failed", "no answer", "mend it"),))
    warned = PodChecks(
        pod="pod3",
        address="10.0.0.3",
        checks=(Check("ssh", "ok", "0.1 s"), Check("torch", "warning", "1.9", "look at it")),
    )
    return Preflight(pods=(good, dead, warned))


def test_table_has_a_row_for_each_pod_and_a_column_for_each_check(mixed: Preflight) -> None:
    assert pods_check_table(mixed) == [
        {"pod": "pod1", "ssh": "0.1 s", "torch": "2.0"},
        {"pod": "pod2", "ssh": "FAILED: no answer", "torch": "-"},
        {"pod": "pod3", "ssh": "0.1 s", "torch": "WARNING: 1.9"},
    ]


def test_mending_lines_name_pod_check_value_and_remedy(mixed: Preflight) -> None:
    assert mending_lines(mixed) == [
        "pod2 (10.0.0.2): ssh failed: no answer; mend it",
        "pod3 (10.0.0.3): torch warning: 1.9; look at it",
    ]


def test_required_preflight_raises_the_first_failure(mixed: Preflight) -> None:
    with pytest.raises(UserError, match=r"^pod2 \(10.0.0.2\): ssh failed: no answer; mend it$"):
        require(mixed)


def test_warnings_do_not_stop_a_run(mixed: Preflight) -> None:
    require(Preflight(pods=(mixed.pods[0], mixed.pods[2])))


def test_json_form_has_every_check(mixed: Preflight) -> None:
    document = json.loads(json.dumps(mixed.to_json()))
    assert document["ok"] is False
    assert document["pods"][1] == {
        "pod": "pod2",
        "address": "10.0.0.2",
        "checks": [{"check": "ssh", "verdict": "failed", "value": "no answer", "remedy": "mend it"}],
    }
