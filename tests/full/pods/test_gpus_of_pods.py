"""Pods of one machine with fewer GPUs, with enough, and with some that a session hides; NVML is a stand-in.

torch sees none of these GPUs, so the ranks train on the CPU in any case: what counts is which GPUs they are shown.
"""

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.full.clusters import command, processes_of
from tests.full.conftest import TINY
from tests.full.launches import RANK, train, until
from tests.full.pods.test_own_hosts import NAMES, Own, own
from tests.nvml import environment, folder_with_gpus, uuid
from zeropods.errors import INTERRUPTED
from zeropods.measure.record import read_record
from zeropods.pods.gpus import POD_GPUS, VISIBLE
from zeropods.pods.hostfile import Host, write_hostfile
from zeropods.techniques import DSCONFIG
from zeropods.train.flags import NO_FP16

HIDDEN_LINE = "3 pods with 3 processes for 1 visible GPU: they train without GPUs; to use GPUs, start 1 pod"


class Session:
    """A user's shell in a folder whose processes see GPUs."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self.folder = folder
        self.environment = environment(folder, **variables)

    def zeropods(self, *words: object) -> subprocess.CompletedProcess[str]:
        """What a call of the command line came to."""
        return subprocess.run(
            command(*words), cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )

    def started(self, *words: object) -> subprocess.Popen[bytes]:
        """Such a call, which goes on."""
        return subprocess.Popen(command(*words), cwd=self.folder, env=self.environment)

    def shown_to_ranks(self, folder: Path, ranks: int, *launch: object) -> list[str]:
        """The GPUs that each rank of a launch is shown; the launch ends with the ranks."""
        process = self.started("launch", *launch, "--", RANK, "--outputdir", folder, "--seconds", 600)
        try:
            environs = [psutil.Process(pid).environ() for pid in train(folder, ranks)]
        finally:
            folder.mkdir(exist_ok=True)
            (folder / "enough").touch()
            assert process.wait(600) == 0
        assert not any(POD_GPUS in environ for environ in environs)
        return [environ[VISIBLE] for environ in environs]


@pytest.fixture
def one_gpu(home: Path, tmp_path: Path) -> Session:
    """A session on a machine with one GPU."""
    return Session(folder_with_gpus(tmp_path / "one", 1))


@pytest.fixture
def four_gpus(home: Path, tmp_path: Path) -> Session:
    """A session on a machine with four GPUs."""
    return Session(folder_with_gpus(tmp_path / "four", 4))


def test_three_pods_on_one_gpu_train_without_it_as_one_line_says_and_the_record_too(
    one_gpu: Session, home: Path, prepared: Path, squad_sample: Path, tmp_path: Path
) -> None:
    up = one_gpu.zeropods("pods", "up", "--count", 3)
    assert up.returncode == 0 and up.stderr == f"cluster pods: {HIDDEN_LINE}\n"
    checked = one_gpu.zeropods("pods", "check", "--json")
    slots = [check["value"] for pod in json.loads(checked.stdout)["pods"] for check in pod["checks"]]
    assert checked.returncode == 0 and slots.count("no GPU") == 3

    folder = tmp_path / "run"
    flags = [*TINY, "--dataset_path", prepared, "--outputdir", folder, "--eval_steps", 0, "--max_steps", 3]
    words = ["textsql_train.py", *flags, "--deepspeed", DSCONFIG / "zero1.json"]
    launched = one_gpu.zeropods("launch", "--num-pods", 3, "--", *words)
    assert launched.returncode == 0, launched.stderr
    assert launched.stderr.count("train without GPUs") == 1
    record = read_record(folder)
    assert (record.status, record.pods, record.world_size, record.device) == ("ok", 3, 3, "cpu")
    assert "device                   cpu\n" in launched.stdout
    assert (folder / "launch.log").read_text().count(f"Setting {VISIBLE}=-1") == 3
    # With a GPU, a server of forks would have ended at once.
    running = [Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in processes_of(home)]
    assert sum("zeropods.launch.forks" in words and words[2] == "zeropods.launch.forks" for words in running) == 3

    causal = ["causal_train.py", "--precision", "fp16", "--init", "random", "--data", squad_sample]
    refused = one_gpu.zeropods("launch", "--dry-run", "--", *causal, "--outputdir", tmp_path / "other")
    assert refused.returncode == 1 and refused.stderr == f"zeropods: {NO_FP16}\n"


def test_pods_of_several_slots_get_their_share_in_sessions_and_ranks(four_gpus: Session, tmp_path: Path) -> None:
    up = four_gpus.zeropods("pods", "up", "--count", 2, "--json")
    assert up.returncode == 0 and up.stderr == ""
    assert [pod["slots"] for pod in json.loads(up.stdout)["pods"]] == [2, 2]
    checked = json.loads(four_gpus.zeropods("pods", "check", "--json").stdout)
    assert checked["ok"]
    assert [pod["gpus"] for pod in checked["pods"]] == [[uuid(0), uuid(1)], [uuid(2), uuid(3)]]
    assert four_gpus.shown_to_ranks(tmp_path / "run", 4) == ["0,1", "0,1", "2,3", "2,3"]


def test_what_a_session_hides_stays_hidden_and_pods_share_the_rest(four_gpus: Session, tmp_path: Path) -> None:
    four_gpus.environment[VISIBLE] = "2,3"
    up = four_gpus.zeropods("pods", "up", "--count", 2, "--slots", 1)
    assert up.returncode == 0 and up.stderr == ""
    assert four_gpus.shown_to_ranks(tmp_path / "two", 2) == ["2", "3"]
    assert four_gpus.shown_to_ranks(tmp_path / "here", 2, "--launcher", "none", "--slots", 2) == ["2,3", "2,3"]
    more = four_gpus.zeropods("launch", "--launcher", "none", "--slots", 3, "--", RANK, "--outputdir", tmp_path / "no")
    assert more.returncode == 1 and "--slots 3: there are 3 processes for 2 visible GPUs;" in more.stderr
    exported = four_gpus.zeropods("launch", "--export", VISIBLE, "--", RANK, "--outputdir", tmp_path / "no")
    assert exported.returncode == 1 and f"--export {VISIBLE}: every pod has GPUs of its own" in exported.stderr

    four_gpus.environment[VISIBLE] = ""
    up = four_gpus.zeropods("pods", "up", "--count", 2, "--name", "none")
    assert up.returncode == 0 and up.stderr == ""
    assert four_gpus.shown_to_ranks(tmp_path / "none", 2, "--name", "none") == ["-1", "-1"]


# Hosts of the user's own that are one machine.


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Own]:
    """Two addresses of this machine, each with an sshd."""
    made = own(tmp_path / "user")
    with ExitStack() as stack:
        for name in NAMES:
            stack.enter_context(made.serving(name))
        yield made


def test_two_slots_on_one_gpu_and_two_addresses_of_one_machine_are_refused_with_a_way_out(
    one_gpu: Session, hosts: Own, tmp_path: Path
) -> None:
    place = ["--hostfile", hosts.hostfile, "--ssh-config", hosts.ssh_config]
    remedy = "train without GPUs, on pods of 'zeropods pods up --nvidia-gpu 0'"
    checked = one_gpu.zeropods("pods", "check", *place)
    assert checked.returncode == 1
    said = " ".join(checked.stdout.split())
    assert f"first: slots failed: 2 of 1 GPU; set slots=1 or fewer in the hostfile, or {remedy}" in said

    write_hostfile(hosts.hostfile, [Host("first", 1), Host("second", 1)])
    shared = f"GPUs failed: {uuid(0)} is also {{}}'s; both are one machine: name it once in the hostfile, with a slot"
    checked = one_gpu.zeropods("pods", "check", *place)
    assert checked.returncode == 1 and f"second: {shared.format('first')}" in " ".join(checked.stdout.split())
    script = [RANK, "--outputdir", tmp_path / "run"]
    launched = one_gpu.zeropods("launch", *place, "--", *script)
    line = f"zeropods: pod2 (127.0.7.1): {shared.format('pod1')} for each of its GPUs, or {remedy}\n"
    assert launched.returncode == 1 and launched.stderr.endswith(line)
    assert not (tmp_path / "run" / "record.json").exists()

    assert one_gpu.zeropods("pods", "up", *place, "--nvidia-gpu", 0).returncode == 0
    assert one_gpu.zeropods("pods", "check").returncode == 0
    assert one_gpu.shown_to_ranks(tmp_path / "run", 2, *place) == ["-1", "-1"]


# A probe measures on the pods' own GPUs.


def test_a_probe_takes_the_gpus_of_the_pods(four_gpus: Session, tmp_path: Path) -> None:
    four_gpus.environment[VISIBLE] = "3,1,2"
    assert four_gpus.zeropods("pods", "up", "--count", 3).returncode == 0
    probing = four_gpus.started("probe", "--pods", "pods", "--out", tmp_path / "machine.json")
    seen: dict[str, str] = {}

    def look() -> bool:
        for process in psutil.process_iter(["cmdline", "environ"]):
            variables = process.info["environ"] or {}
            is_rank = "zeropods.launch.probe" in (process.info["cmdline"] or []) and "RANK" in variables
            if is_rank and variables.get("ZEROPODS_POD", "").startswith("127."):
                seen[variables["RANK"]] = variables[VISIBLE]
        return len(seen) == 3

    until(look)
    assert seen == {"0": "3", "1": "1", "2": "2"}
    # On a busy machine a probe may take longer than it is given.
    probing.send_signal(signal.SIGINT)
    assert probing.wait(600) == INTERRUPTED
