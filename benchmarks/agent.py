"""A pod that waits for work: processor time and memory of its warden and its agent.

Its lease is renewed each 5 s, as a notebook does: what it costs to wait includes answering that.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from benchmarks.figure import Figure
from tests.full.one_pod import OnePod
from zeropods.pods.wire import ask_agents

SECONDS, RENEWAL_SECONDS = 20, 5


def measure(work: Path) -> list[Figure]:
    """Share of a core over 20 s, and memory after them."""
    pod = OnePod(work, lease="kernel", lease_seconds=30.0)
    try:
        pids = (pod.warden.pid, pod.agent.pid)
        began, before = time.perf_counter(), _processor_seconds(pids)
        asyncio.run(_renew(pod))
        share = 100 * (_processor_seconds(pids) - before) / (time.perf_counter() - began)
        resident, proportional = (_mebibytes(pids, key) for key in ("Rss", "Pss"))
    finally:
        pod.clean_up()
    note = f"proportional (shared pages divided): {proportional:.1f} MiB"
    return [
        Figure(name="idle agent and warden, processor time", value=share, unit="% of a core", asked="under 0.1"),
        Figure(name="idle agent and warden, resident", value=resident, unit="MiB", asked="under 40", note=note),
    ]


async def _renew(pod: OnePod) -> None:
    agent = (pod.address, pod.registration.control_port)
    for _ in range(SECONDS // RENEWAL_SECONDS):
        await asyncio.sleep(RENEWAL_SECONDS)
        await ask_agents([agent], pod.secret, {"do": "renew"}, RENEWAL_SECONDS)


def _processor_seconds(pids: tuple[int, ...]) -> float:
    """Time on a processor (proc(5), `schedstat`: nanoseconds), which ticks of 10 ms are too coarse for."""
    return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in pids) / 1e9


def _mebibytes(pids: tuple[int, ...], key: str) -> float:
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) / 1024
