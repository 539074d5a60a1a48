"""GPUs that CUDA shows a process, and their shares for pods of one machine; NVML is a stand-in."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.nvml import environment, folder_with_gpus, uuid
from zeropods.pods.gpus import BY_DEEPSPEED, POD_GPUS, VISIBLE, gpus_of_slots, take_pods_gpus
from zeropods.pods.preflight import PodChecks, other_models, shared_gpu

PRINTED = """
import json, sys
from zeropods.pods.gpus import shared_gpus, visible_gpus
from zeropods.pods.preflight import gpu_states
shares = [shared_gpus(pods, slots) for pods, slots in json.loads(sys.argv[1])]
print(json.dumps({
    "uuids": [gpu.uuid for gpu in visible_gpus()],
    "states": [gpu.uuid for gpu in gpu_states()],
    "models": [gpu.model for gpu in gpu_states()],
    "shares": shares,
}))
"""


def seen(folder: Path, visible: str | None, *asked: tuple[int, int | None]) -> Any:
    """What a new process sees of the GPUs of a folder, and the shares of so many pods with so many slots."""
    variables = environment(folder)
    variables.pop(VISIBLE, None)
    if visible is not None:
        variables[VISIBLE] = visible
    argv = [sys.executable, "-c", PRINTED, json.dumps(asked)]
    done = subprocess.run(argv, env=variables, cwd=folder, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.fixture
def four(tmp_path: Path) -> Path:
    """A folder whose processes see four GPUs."""
    return folder_with_gpus(tmp_path / "four", 4)


@pytest.mark.parametrize(
    ("visible", "numbers"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("2,3", [2, 3]),
        (" 3, 1", [3, 1]),
        ("1,7,2", [1]),
        ("GPU-3,GPU-0a2b", [3, 0]),
        ("GPU-", []),
    ],
)
def test_a_process_sees_the_gpus_that_the_variable_names_up_to_one_that_is_not_there(
    four: Path, visible: str | None, numbers: list[int]
) -> None:
    found = seen(four, visible)
    assert found["uuids"] == found["states"] == [uuid(number) for number in numbers]


@pytest.mark.parametrize(
    ("visible", "pods", "slots", "shares"),
    [
        (None, 2, 2, ["0,1", "2,3"]),
        (None, 2, None, ["0,1", "2,3"]),
        (None, 3, None, ["0", "1", "2"]),
        (None, 3, 1, ["0", "1", "2"]),
        (None, 1, None, ["0,1,2,3"]),
        (None, 5, None, ["-1"] * 5),
        (None, 2, 3, ["-1", "-1"]),
        ("2,3", 2, 1, ["2", "3"]),
        ("2,3", 3, None, ["-1"] * 3),
        ("GPU-3,GPU-1", 2, None, ["GPU-3", "GPU-1"]),
        ("", 2, None, []),
    ],
)
def test_pods_of_one_machine_get_visible_gpus_of_their_own_or_none_of_them_gets_any(
    four: Path, visible: str | None, pods: int, slots: int | None, shares: list[str]
) -> None:
    assert seen(four, visible, (pods, slots))["shares"] == [shares]


def test_without_a_gpu_there_is_nothing_to_share_and_of_a_divided_gpu_a_part_is_told(tmp_path: Path) -> None:
    assert seen(folder_with_gpus(tmp_path / "none", 0), None, (3, None)) == {
        "uuids": [], "states": [], "models": [], "shares": [[]],
    }  # fmt: skip
    divided = folder_with_gpus(tmp_path / "divided", 1, parts=(4,), model="A100 MIG 1g.5gb")
    assert seen(divided, None)["states"] == [f"MIG-{uuid(0)}-4"]
    assert seen(divided, None)["models"] == ["A100 MIG 1g.5gb"]
    assert seen(divided, "MIG-1234")["uuids"] == ["MIG-1234"]


@pytest.mark.parametrize(
    ("visible", "slots", "expected"),
    [(None, [0, 1], "0,1"), ("2,3", [0, 1], "2,3"), ("2,3", [1], "3"), ("3", [0], "3"), ("-1", [0], "-1")],
)
def test_slots_stand_for_the_gpus_that_the_launcher_sees_also_where_that_is_deepspeed_s_own(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, slots: list[int], expected: str
) -> None:
    assert gpus_of_slots(visible, slots) == expected
    if visible is not None:
        # A rank of DeepSpeed's own launcher, which names the slots.
        monkeypatch.setenv(POD_GPUS, visible)
        monkeypatch.setenv(VISIBLE, ",".join(map(str, slots)))
        monkeypatch.setenv(BY_DEEPSPEED, "0")
        take_pods_gpus()
        assert os.environ[VISIBLE] == expected and POD_GPUS not in os.environ


def test_what_a_session_on_a_pod_names_itself_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(POD_GPUS, "2,3")
    monkeypatch.setenv(VISIBLE, "3")
    monkeypatch.delenv(BY_DEEPSPEED, raising=False)
    take_pods_gpus()
    assert os.environ[VISIBLE] == "3"


@pytest.mark.parametrize(
    ("gpus", "hostname", "verdict"),
    [(("GPU-1",), "one", None), (("GPU-1", "GPU-0"), "one", "failed"), (("GPU-0",), "a container", "warning")],
)
def test_two_pods_on_one_gpu_are_refused_unless_they_are_two_hosts_for_nccl(
    gpus: tuple[str, ...], hostname: str, verdict: str | None
) -> None:
    first = PodChecks(pod="pod1", address="a", checks=(), gpus=("GPU-0",), hostname="one")
    second = PodChecks(pod="pod2", address="b", checks=(), gpus=gpus, hostname=hostname)
    check = shared_gpu(second, [first])
    if verdict is None:
        assert check is None
    else:
        assert check is not None
        assert (check.verdict, check.value) == (verdict, "GPU-0 is also pod1's") and check.remedy


@pytest.mark.parametrize(
    ("models", "verdict", "value"),
    [
        (("H100", "H100"), None, ""),
        (("A100",), "warning", "A100; pod2 has H100"),
        (("H100", "A100"), "warning", "A100 and H100; pod2 has H100"),
        ((), "failed", "no GPU; pod2 has H100"),
    ],
)
def test_a_pod_s_gpus_are_compared_by_model_with_those_of_the_first_that_answered(
    models: tuple[str, ...], verdict: str | None, value: str
) -> None:
    silent = PodChecks(pod="pod1", address="a", checks=())
    second = PodChecks(pod="pod2", address="b", checks=(), gpu_models=("H100",), hostname="two")
    third = PodChecks(pod="pod3", address="c", checks=(), gpu_models=models, hostname="three")
    check = other_models(third, [silent, second])
    if verdict is None:
        assert check is None
    else:
        assert check is not None
        assert (check.verdict, check.value) == (verdict, value)
        assert check.remedy
    assert other_models(silent, [second]) is None
