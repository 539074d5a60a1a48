"""Processor time and memory of a pod that waits for work: of its warden and its agent.

Its lease is renewed every 5 s, as a notebook does, so the cost of waiting includes answering these requests.
"""

from __future__ import annotations

import time
from pathlib import Path

import psutil

from benchmarks.figure import Figure
from zeropods import pods
from zeropods.pods.cluster import workers_of
from zeropods.pods.wire import ask_all
from zeropods.programs import variable_set
from zeropods.tables import MIB

SECONDS, RENEWAL_SECONDS = 20, 5


def measure(work: Path) -> list[Figure]:
    """Share of a core used over 20 s, and memory in use after them."""
    with variable_set("ZEROPODS_HOME", str(work / "home")):
        cluster = pods.up(1, name="idle", backend="local", lease="idle")
        try:
            (worker,) = workers_of(cluster).processes()
            warden = worker.find()
            assert warden is not None
            pids = (warden.pid, *(agent.pid for agent in warden.children()))
            began, before = time.perf_counter(), _processor_seconds(pids)
            for _ in range(SECONDS // RENEWAL_SECONDS):
                time.sleep(RENEWAL_SECONDS)
                ask_all(cluster.agents, cluster.secret, {"do": "renew"}, RENEWAL_SECONDS)
            share = 100 * (_processor_seconds(pids) - before) / (time.perf_counter() - began)
            resident, proportional = (_mebibytes(pids, key) for key in ("rss", "pss"))
        finally:
            cluster.down()
    note = f"proportional (shared pages divided): {proportional:.1f} MiB"
    return [
        Figure(name="idle agent and warden, processor time", value=share, unit="% of a core", asked="under 0.1"),
        Figure(name="idle agent and warden, resident", value=resident, unit="MiB", asked="under 40", note=note),
    ]


def _processor_seconds(pids: tuple[int, ...]) -> float:
    """Seconds spent on a processor (proc(5), `schedstat`: nanoseconds); ticks of 10 ms would be too coarse."""
    return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in pids) / 1e9


def _mebibytes(pids: tuple[int, ...], key: str) -> float:
    return sum(getattr(psutil.Process(pid).memory_full_info(), key) for pid in pids) / MIB
