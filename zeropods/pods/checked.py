"""The preflight of a cluster as a table that people read."""

from __future__ import annotations

import html
import os
from dataclasses import dataclass, replace
from pathlib import Path

from zeropods.pods.cluster import Cluster
from zeropods.pods.preflight.check import Preflight
from zeropods.pods.preflight.expectation import Expectation
from zeropods.pods.preflight.preflight import mending_lines, pods_check_table, preflight
from zeropods.report.table import Table

SCRIPT = "textsql_train.py"


@dataclass(frozen=True, repr=False)
class CheckTable(Table):
    """Pods x checks, and below them a line for each check that is not ok."""

    mend: tuple[str, ...] = ()

    def to_html(self) -> str:
        """The table, then what is to be done."""
        lines = "".join(f"<li>{html.escape(line)}</li>" for line in self.mend)
        return super().to_html() + (f"<ul>{lines}</ul>" if lines else "")

    def to_markdown(self) -> str:
        """The table, then what is to be done."""
        return "\n".join([super().to_markdown(), *self.mend])


def expected_here() -> Expectation:
    """That pods be like this machine: its versions, and the training script where the working folder has it."""
    here = Path.cwd()
    files = (SCRIPT,) if (here / SCRIPT).is_file() else ()
    return Expectation.of_this_machine(here, files, cml="CDSW_ENGINE_ID" in os.environ)


def checked(cluster: Cluster) -> Preflight:
    """What is found on the pods of a cluster."""
    return preflight(
        cluster.hosts,
        replace(expected_here(), cml=cluster.backend == "cml"),
        names=[pod.name for pod in cluster.pods],
        ssh_config=cluster.ssh_config,
        port=cluster.ssh_port,
    )


def check_table(found: Preflight, title: str = "") -> CheckTable:
    """A preflight to be shown."""
    table = Table.of(pods_check_table(found), title)
    return CheckTable(table.header, table.rows, table.title, tuple(mending_lines(found)))
