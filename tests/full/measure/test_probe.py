"""A probe of this machine, and of the pods of a cluster."""

import json
import threading
from pathlib import Path

import psutil
import pytest

from tests.full.launches import until
from zeropods.cli import main
from zeropods.launch import probe
from zeropods.measure.machine_probe import read_probe
from zeropods.pods.cluster import Cluster


def test_a_probe_of_this_machine_is_printed_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "machine.json"
    assert main(["probe", "--alone", "--out", str(path), "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {**json.loads(path.read_text()), "file": str(path)}
    found = read_probe(path)
    assert (f"{path}: was measured without a GPU, so no plan uses it" in captured.err) != bool(found.gpus)
    assert found.processes == 2 and found.machines == 1 and found.hardware["cores"] >= 1
    assert max(found.matmul_flops_per_second["fp32"].values()) > 1e9
    assert 0 < found.latency_seconds < 1 and found.bandwidth > 1e6
    assert (found.launch_seconds is None) != bool(found.gpus)


def test_launches_are_timed_by_a_pass_that_has_hardly_any_arithmetic() -> None:
    # 2,433 of them; on a GPU all that takes time is to launch them.
    assert 1e-7 < probe.launch_seconds() < 1e-2


def test_a_rank_that_was_killed_is_named_and_the_others_end_on_their_pods(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probe, "MOST_SECONDS", 6.0)
    # Over ssh too it arrives as it is.
    home = tmp_path / """it's "50%" $HOME `id`"""
    monkeypatch.setenv("HF_HOME", str(home))
    seen: dict[str, psutil.Process] = {}
    variables: list[dict[str, str]] = []

    def look() -> None:
        until(lambda: seen.update(ranks(home)) or len(seen) == 3)
        variables.extend(seen[number].environ() for number in "012")
        seen["1"].kill()

    looking = threading.Thread(target=look)
    looking.start()
    assert main(["probe", "--pods", cluster.name]) == 1
    looking.join()
    assert f"probe: process 1 on {cluster.pods[1].address}: ended with status " in capsys.readouterr().err
    assert {each["GLOO_SOCKET_IFNAME"] for each in variables} == {"lo"}
    until(lambda: not ranks(home))


def ranks(home: Path) -> dict[str, psutil.Process]:
    """Processes that probe with this home of transformers, by rank; without the programs that began them."""
    found = psutil.process_iter(["name", "cmdline", "environ"])
    probing = [each for each in found if "zeropods.launch.probe" in (each.info["cmdline"] or [])]
    own = [each for each in probing if (each.info["environ"] or {}).get("HF_HOME") == str(home)]
    return {each.info["environ"]["RANK"]: each for each in own if each.info["name"].startswith("python")}
