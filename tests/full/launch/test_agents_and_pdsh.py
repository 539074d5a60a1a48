"""The same run by the pods' agents and over pdsh; apart from launches without ssh, whose PATH has no pdsh."""

from pathlib import Path

from tests.full.conftest import TINY
from tests.full.launches import ROOT
from zeropods.launch.command import AGENTS, PDSH, plan_launch
from zeropods.launch.outcome import failure
from zeropods.launch.script_call import ScriptCall
from zeropods.launch.supervisor import run_launch
from zeropods.measure.record import read_record
from zeropods.pods.cluster import Cluster


def test_losses_by_agents_are_those_over_pdsh(cluster: Cluster, prepared: Path, tmp_path: Path) -> None:
    losses = {}
    for launcher in (PDSH, AGENTS):
        folder = tmp_path / launcher
        given = [*TINY, "--max_steps", 3, "--eval_steps", 3, "--threads", 1, "--dataset_path", prepared]
        config = ["--deepspeed", ROOT / "dsconfig" / "zero1.json", "--outputdir", folder]
        call = ScriptCall.of("textsql_train.py", [str(word) for word in (*given, *config)])
        run = run_launch(plan_launch(cluster, call, pods=2, launcher=launcher), cluster)
        assert (run.status, run.pods) == ("ok", 2), failure(folder, run)
        found = read_record(folder)
        losses[launcher] = (found.losses, found.eval_losses)
    assert losses[PDSH] == losses[AGENTS] and losses[PDSH][0]
