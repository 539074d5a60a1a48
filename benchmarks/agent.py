"""Processor time and memory of a pod that waits for work: of its warden and its agent.

Its lease is renewed every 5 s, as a notebook does, so the cost of waiting includes answering these
requests.
"""

from __future__ import annotations

import time
from pathlib import Path

import psutil

from benchmarks.figure import Figure
from zeropods import pods
from zeropods.pods.cluster import Cluster, workers_of
from zeropods.pods.wire import ask_all
from zeropods.programs import variable_set
from zeropods.tables import MIB

SECONDS = 20
RENEWAL_SECONDS = 5


def measure(work: Path) -> list[Figure]:
    """Share of a core used over 20 s, and memory in use after them."""
    with variable_set("ZEROPODS_HOME", str(work / "home")):
        cluster = pods.up(1, name="idle", backend="local", lease="idle")
        try:
            (worker,) = workers_of(cluster).processes()
            warden = worker.find()
            assert warden is not None
            agents = warden.children()
            pids = [warden.pid, *(agent.pid for agent in agents)]
            share = _percent_of_a_core(pids, cluster)
            resident = _mebibytes(pids, "rss")
            proportional = _mebibytes(pids, "pss")
        finally:
            cluster.down()
    return [
        Figure(
            name="idle agent and warden, processor time",
            value=share,
            unit="% of a core",
            asked="under 0.1",
        ),
        Figure(
            name="idle agent and warden, resident",
            value=resident,
            unit="MiB",
            asked="under 40",
            note=f"proportional (shared pages divided): {proportional:.1f} MiB",
        ),
    ]


def _percent_of_a_core(pids: list[int], cluster: Cluster) -> float:
    """What processes use of a core while the lease of their pod is renewed for 20 s."""
    began = time.perf_counter()
    used_before = _processor_seconds(pids)
    for _ in range(SECONDS // RENEWAL_SECONDS):
        time.sleep(RENEWAL_SECONDS)
        ask_all(cluster.agents, cluster.secret, {"do": "renew"}, RENEWAL_SECONDS)
    used = _processor_seconds(pids) - used_before
    return 100 * used / (time.perf_counter() - began)


def _processor_seconds(pids: list[int]) -> float:
    """Seconds spent on a processor (proc(5), `schedstat`: nanoseconds); ticks of 10 ms would be too
    coarse."""
    nanoseconds = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/schedstat").read_text().split()
        nanoseconds += int(fields[0])
    return nanoseconds / 1e9


def _mebibytes(pids: list[int], key: str) -> float:
    """Memory of processes together, by a key of psutil's `memory_full_info`."""
    counts = [getattr(psutil.Process(pid).memory_full_info(), key) for pid in pids]
    return sum(counts) / MIB
