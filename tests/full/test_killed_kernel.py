"""A notebook with pods whose kernel is killed in mid-run: what is left of it, and what happens when it is run again."""

import os
import signal
import threading
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError

from tests.full.clusters import processes_of
from tests.full.conftest import ROOT
from tests.full.launches import RANK, of_processes, processes, record, until
from zeropods.pods.cluster import names, take_down

CELLS = (
    "from zeropods import pods\ncluster = pods.up(2, name='notebook', lease_seconds=5)",
    """from tests.full.over_pdsh import pdsh_argv
from zeropods.launch.command import plan_launch
from zeropods.launch.supervisor import Supervision, run_launch
planned = plan_launch(cluster, {script!r}, ['--outputdir', {folder!r}, '--seconds', {seconds!r}])
run_launch(planned, cluster, supervision=Supervision(argv=pdsh_argv))""",
    "cluster.down()",
)


def execute(folder: Path, seconds: float) -> None:
    texts = [cell.format(script=str(RANK), folder=str(folder), seconds=str(seconds)) for cell in CELLS]
    document = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in texts])
    resources = {"metadata": {"path": str(ROOT)}}
    NotebookClient(document, timeout=180, kernel_name="python3", resources=resources).execute()


def test_ranks_and_pods_of_a_killed_kernel_end_and_its_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, folder = tmp_path / "home", tmp_path / "run"
    monkeypatch.setenv("ZEROPODS_HOME", str(home))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    forking: list[str] = []

    def kill_kernel() -> None:
        until(lambda: all((folder / f"pid.{rank}").is_file() for rank in range(2)), 150)
        ours, lines = processes_of(home), of_processes("cmdline")
        commands = {pid: lines.get(pid, b"").decode() for pid in ours}
        forking.extend(words for words in commands.values() if "zeropods.launch.forks" in words)
        (kernel,) = [pid for pid, words in commands.items() if "ipykernel_launcher" in words]
        os.kill(kernel, signal.SIGKILL)

    killer = threading.Thread(target=kill_kernel)
    killer.start()
    with pytest.raises(DeadKernelError):
        execute(folder, 600)
    killer.join()
    # The script is none of ours: no pod has imported torch for it.
    assert not forking
    # The pods' lease runs out, and takes the run along.
    until(lambda: not processes(RANK, folder))
    until(lambda: not processes_of(home))
    try:
        # Long enough that no rank ends before the first has opened the run.
        execute(folder, 5)
    finally:
        for name in names():
            take_down(name)
    found = record(folder)
    assert (found["status"], found["attempt"]) == ("ok", 1), found["reason"]
    assert [path.name for path in (folder / "attempts").iterdir()] == ["0.json"]
