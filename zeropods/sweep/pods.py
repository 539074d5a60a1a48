"""The pods of a sweep: those it is given, or its own, which are renewed when one of them is lost."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from zeropods.errors import UserError
from zeropods.sweep.matrix import Matrix

if TYPE_CHECKING:
    from zeropods.pods.cluster import Cluster


class SweepPods:
    """A context manager: pods of the sweep's own start at the first need, and end with the block."""

    def __init__(self, matrix: Matrix, given: Cluster | None, hostfile: Path | None = None) -> None:
        """`hostfile`: of hosts on which the sweep's own pods are started; this machine if not given."""
        self.count = max((cell.pods for cell in matrix.cells if not cell.is_one_process), default=0)
        self._slots = matrix.slots
        self._hostfile = hostfile
        self._given = given
        self._own: Cluster | None = None
        if given is not None:
            self._check(given)

    def __enter__(self) -> SweepPods:
        return self

    def __exit__(self, *_: object) -> None:
        if self._own is not None:
            self._own.down()

    def ready(self) -> Cluster:
        """The cluster for the next run. Pods that were given are not renewed: they are somebody else's."""
        if self._given is not None:
            return self._given
        if self._own is not None and not self._own.is_ready():
            self._own.down()
            self._own = None
        if self._own is None:
            from zeropods import pods

            name = f"sweep-{os.getpid()}"
            self._own = pods.up(self.count, slots=self._slots, name=name, hostfile=self._hostfile, lease="kernel")
        return self._own

    def _check(self, cluster: Cluster) -> None:
        if len(cluster.hosts) < self.count:
            raise UserError(f"cluster {cluster.name}: {len(cluster.hosts)} pods, the matrix needs {self.count}")
        for host in cluster.hosts[: self.count]:
            if host.slots != self._slots:
                raise UserError(
                    f"cluster {cluster.name}: {host.address} has slots={host.slots}, the matrix slots: {self._slots}; "
                    f"write slots: {host.slots} into the matrix, or bring up pods with --slots {self._slots}"
                )
