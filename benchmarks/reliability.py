"""Faults injected into real runs for real: what survives, how soon it is found, what it costs.

    python -m benchmarks.reliability --data PREPARED --trials 3
    python -m benchmarks.reliability --data PREPARED --trials 30 --seconds 3000

Each trial trains the tiny model on two local pods with a checkpoint every four steps, and breaks something once there
is one. Results are kept in `results/reliability.json`, so that a later call goes on where this one ended;
`docs/reliability.md` is rendered from them.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zeropods import atomic, pods
from zeropods.checkpoints.names import names_of, newest_first
from zeropods.errors import UserError, guarded
from zeropods.launch.fault import left_over, worker_of
from zeropods.measure.records import read_json
from zeropods.pods.agent.descendants import Tree, arguments
from zeropods.pods.cluster import Cluster
from zeropods.report.table import Table

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "results" / "reliability.json", ROOT / "docs" / "reliability.md"
STEPS, INTERVAL = 24, 4
TRAINING = (
    f"--model_id t5-tiny --init random --dropout 0 --precision fp32 --threads 1 --logging_steps 1 --max_steps {STEPS} "
    f"--save_steps {INTERVAL} --per_device_train_batch_size 4 --gradient_accumulation_steps 2"
).split()
WAIT_SECONDS, LEFT_SECONDS = 240, 20
Broken = Callable[[Cluster, Path, int], None]


def main() -> None:
    """Run the trials that are missing, as long as there is time; then render the page."""
    parser = argparse.ArgumentParser(description="Inject faults into real runs.", allow_abbrev=False)
    parser.add_argument("--data", type=Path, required=True, help="a prepared text-to-SQL data set")
    parser.add_argument("--trials", type=int, default=3, help="of each fault, earlier calls included")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no further trial after so long")
    asked = parser.parse_args()
    if not (asked.data / "manifest.json").is_file():
        raise UserError(f"--data {asked.data}: no prepared data set; zeropods prepare makes one")
    began, results = time.monotonic(), read_json(RESULTS)["trials"] if RESULTS.is_file() else []
    for fault in FAULTS:
        while sum(one["fault"] == fault for one in results) < asked.trials:
            if time.monotonic() - began > asked.seconds:
                break
            results.append({"fault": fault, **trial(fault, asked.data.resolve())})
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
            atomic.write_json(RESULTS, {"trials": results})
    atomic.write_text(PAGE, page(results))


def trial(fault: str, data: Path) -> dict[str, Any]:
    """One run that is broken once; what came of it."""
    area = Path(tempfile.mkdtemp(prefix="reliability-"))
    folder = area / "run"
    calls: list[subprocess.Popen[bytes]] = []
    cluster = pods.up(2, name=f"trial-{secrets.token_hex(3)}", backend="local")
    try:
        first = launched(cluster, data, folder)
        calls.append(first)
        until(lambda: (folder / "checkpoints" / "latest.json").is_file() or first.poll() is not None)
        broken = time.time()
        FAULTS[fault](cluster, folder, first.pid)
        first.wait(WAIT_SECONDS)
        found, done = time.time(), (folder / "record.json").is_file()
        if not done or read_json(folder / "record.json")["status"] != "ok":
            until(lambda: not left_over(folder), LEFT_SECONDS)
            calls.append(launched(cluster, data, folder))
            calls[-1].wait(WAIT_SECONDS)
        left = lingering(folder)
        return {**outcome(folder, broken, found), "left_over": left}
    finally:
        for call in calls:
            call.terminate()
            call.wait()
        cluster.down()
        shutil.rmtree(area, ignore_errors=True)


def launched(cluster: Cluster, data: Path, folder: Path) -> subprocess.Popen[bytes]:
    """`zeropods launch` as a process of its own."""
    call = ["launch", "--name", cluster.name, "--restarts", "1", "--", str(ROOT / "textsql_train.py"), *TRAINING]
    command = [sys.executable, "-m", "zeropods", *call, "--dataset_path", str(data), "--outputdir", str(folder)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def outcome(folder: Path, broken: float, found: float) -> dict[str, Any]:
    """What record and journal say; a run that did not go on by itself was found when its launch ended."""
    record = read_json(folder / "record.json")
    first = record["ranks"][0] if record["ranks"] else None
    by_itself = (folder / "restarts.json").is_file()
    if by_itself:
        found = read_json(folder / "restarts.json")["restarts"][0]["found_unix_seconds"]
    survived = record["status"] == "ok" and record["steps"] == STEPS
    before = read_json(folder / "attempts" / "0.json")["steps"] if record["attempt"] else None
    began = first and first["ended_unix_seconds"] - first["wall_seconds"] + first["start_seconds"]
    return {
        "survived": survived,
        "by_itself": by_itself,
        "steps_lost": before - first["first_step"] if first and before is not None else None,
        "seconds_to_find": max(0.0, found - broken),
        "seconds_to_resume": began - found if began and began > found else None,
    }


def lingering(folder: Path) -> int:
    """Processes of the run that are left when there has been time to end."""
    deadline = time.monotonic() + LEFT_SECONDS
    while (left := left_over(folder)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def until(happened: Callable[[], object], seconds: float = WAIT_SECONDS) -> None:
    """Wait for it, no longer than so many seconds."""
    deadline = time.monotonic() + seconds
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.05)


def _rank(cluster: Cluster, folder: Path, launcher: int) -> None:
    """SIGKILL for the rank of the second pod."""
    warden = worker_of(cluster, "pod2")
    below = Tree.read().below(warden.pid) if warden else []
    os.kill(next(process.pid for process in below if _is_rank(arguments(process))), signal.SIGKILL)


def _is_rank(words: list[str]) -> bool:
    return any(word.endswith("textsql_train.py") for word in words[:3])


def _warden(cluster: Cluster, folder: Path, launcher: int) -> None:
    warden = worker_of(cluster, "pod2")
    if warden is not None:
        os.kill(warden.pid, signal.SIGKILL)


def _agent(cluster: Cluster, folder: Path, launcher: int) -> None:
    warden = worker_of(cluster, "pod2")
    if warden is not None:
        os.kill(Tree.read().children(warden.pid)[0].pid, signal.SIGKILL)


def _supervisor(cluster: Cluster, folder: Path, launcher: int) -> None:
    os.kill(launcher, signal.SIGKILL)


def _pdsh(cluster: Cluster, folder: Path, launcher: int) -> None:
    below = Tree.read().below(launcher)
    os.kill(next(process.pid for process in below if process.name == "pdsh"), signal.SIGKILL)


def _damaged(cluster: Cluster, folder: Path, launcher: int) -> None:
    """A byte of the newest checkpoint's weights flips after the supervisor was killed, and the ranks with it."""
    _supervisor(cluster, folder, launcher)
    until(lambda: not left_over(folder), LEFT_SECONDS)
    newest = folder / "checkpoints" / newest_first(names_of(folder / "checkpoints"))[0]
    with open(newest / "model.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))


FAULTS: dict[str, Broken] = {
    "kill -9 of a rank": _rank,
    "kill -9 of an agent": _agent,
    "kill -9 of a warden": _warden,
    "kill -9 of pdsh": _pdsh,
    "kill -9 of the supervisor": _supervisor,
    "a flipped bit in the newest checkpoint": _damaged,
}


def page(results: list[dict[str, Any]]) -> str:
    """The figures as a page; where there are several trials, the worst of them."""
    lines = [line(fault, [one for one in results if one["fault"] == fault]) for fault in FAULTS]
    table = Table.of(one for one in lines if one is not None).to_markdown()
    note = (
        f"Made by `python -m benchmarks.reliability`: {STEPS} steps of t5-tiny on two local pods, a checkpoint every\n"
        f"{INTERVAL} steps; steps and seconds are the worst of all trials. Found: until the supervisor knows; where\n"
        "the supervisor itself was killed, until its command has ended. Resumed: from there to the next step, with\n"
        "the start of all processes; a run that cannot go on by itself is started by the same command again.\n"
    )
    return f"# What was broken, and what came of it\n\n{note}\n{table}"


def line(fault: str, trials: list[dict[str, Any]]) -> dict[str, str] | None:
    """A fault's line; None where it was not tried."""
    if not trials:
        return None
    return {
        "fault": fault,
        "tried": str(len(trials)),
        "survived": str(sum(one["survived"] for one in trials)),
        "went on by itself": str(sum(one["by_itself"] for one in trials)),
        "steps lost": _worst(trials, "steps_lost", "{:d}"),
        "to find (s)": _worst(trials, "seconds_to_find", "{:.1f}"),
        "to resume (s)": _worst(trials, "seconds_to_resume", "{:.1f}"),
        "processes left over": str(sum(one["left_over"] for one in trials)),
    }


def _worst(trials: list[dict[str, Any]], name: str, form: str) -> str:
    values = [one[name] for one in trials if one[name] is not None]
    return form.format(max(values)) if values else "n/a"


if __name__ == "__main__":
    sys.exit(guarded(main))
