"""Inject real faults into real runs: which are survived, how soon each is found, and what it costs.

    python -m benchmarks.reliability --trials 56 --seconds 3000
    python -m benchmarks.reliability --trials 40 --busy 6
    python -m benchmarks.reliability --trials 14 --alone
    python -m benchmarks.reliability --trials 56 --settings "zero2 x3" "ddp x2"

Trains a tiny model on local pods, breaks the run four times at random moments, and lets it train to its end. Each trial
is of a fault, a technique and a number of pods, those that were tried least so far. It is kept in
`results/reliability.json` as soon as it has ended, and `docs/reliability.md` is made from them; a later call adds the
missing ones. A trial takes about 10 s on two quiet cores, and a minute beside six busy processes. Faults of network
and disk need root. With `--alone` each run is broken once and then trains to its end, so that its record tells its
goodput. With `--busy 6` six processes compute beside it all the time; trials with and without them are counted apart,
and make two tables.
"""

from __future__ import annotations

import argparse
import json
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.reliability.chain import BUSY_STEP_TIMEOUT, LAUNCHERS, SETTINGS, STEPS, WORK, Chain, Setting, chain
from benchmarks.reliability.faults import FAULTS, ON_A_DISK, may_mount
from benchmarks.reliability.page import PAGE, RESULTS, page
from benchmarks.reliability.seen import Losses, difference, until
from benchmarks.reliability.trial import MEASURED, comes_to, goodput, trial
from tests.namespaces import are_possible
from zeropods import files
from zeropods.data.prepare import Preparation, prepare
from zeropods.data.sample import write_sample
from zeropods.errors import UserError, guarded
from zeropods.measure import environment
from zeropods.measure.record import read_json
from zeropods.pods.processes import ending_in_order
from zeropods.programs import bound_argv

WHOLE_RUN_SECONDS = 3_600.0
"""Seconds after which a run without faults is given up."""
FAULTS_OF_A_RUN = 4
"""Number of faults after which a run is left to train to its end, and the next one begins in another setting."""
DEEPSPEED_SHARE = 0.25
"""Share of runs that DeepSpeed's launcher starts: they take twice as long to start."""


def main() -> None:
    """Run the missing trials as long as there is time, then render the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--trials", type=int, default=56, help="of all faults together, earlier calls included; 56")
    parser.add_argument("--seconds", type=float, default=14_400.0, help="begin no further trial after so long; 14,400")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=possible(), metavar="FAULT", help="only these")
    names = [setting.name for setting in SETTINGS]
    parser.add_argument("--settings", nargs="+", choices=names, default=names, metavar="SETTING", help="only these")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of each run; {STEPS}")
    parser.add_argument("--launcher", choices=LAUNCHERS, help="what starts the ranks; both, at random")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="compute in N processes beside the run")
    parser.add_argument("--alone", action="store_true", help="break each run once; --trials counts those with goodput")
    parser.add_argument("--page", action="store_true", help="only make the page anew")
    asked = parser.parse_args()
    results: dict[str, Any] = {"trials": [], "runs": [], "environment": _environment()}
    if RESULTS.is_file():
        results = read_json(RESULTS)
    if not asked.page:
        with ending_in_order():
            _add(results, asked)
    files.write_text(PAGE, page(results))
    died = sum(not one["survived"] for one in results["trials"])
    if died:
        raise UserError(f"{RESULTS}: {died} trials were not survived; see {WORK}")
    misnamed = sum(one.get("named") is False for one in results["trials"])
    if misnamed:
        raise UserError(f"{RESULTS}: in {misnamed} trials another pod, rank or reason was named; see said there")


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Let so many processes compute as long as this block goes on, as on a machine with other work."""
    argv = bound_argv([sys.executable, "-c", "while True: pass"])
    processes = [subprocess.Popen(argv) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def possible() -> list[str]:
    """The faults that can be injected here."""
    disks, networks = may_mount(), are_possible()
    return [
        name
        for name, fault in FAULTS.items()
        if (disks or name not in ON_A_DISK) and (networks or not fault.needs_networks)
    ]


def _add(results: dict[str, Any], asked: argparse.Namespace) -> None:
    """Run the trials that are missing; the runs without faults come first, on cores that are not kept busy."""
    deadline = time.monotonic() + asked.seconds
    data = _prepared()
    settings = [replace(setting, steps=asked.steps) for setting in SETTINGS if setting.name in asked.settings]
    if asked.busy:
        settings = [replace(setting, step_timeout=BUSY_STEP_TIMEOUT) for setting in settings]

    undisturbed = {setting.name: _undisturbed(data, setting) for setting in settings}
    with busy_processes(asked.busy):
        _try_until(deadline, results, asked, data, settings, undisturbed)


def _try_until(
    deadline: float,
    results: dict[str, Any],
    asked: argparse.Namespace,
    data: Path,
    settings: list[Setting],
    undisturbed: dict[str, Losses],
) -> None:
    """Run trials until there are enough of them, or until the deadline of `time.monotonic`.

    Args:
        undisturbed: the losses of a run without faults, by the name of its setting.
    """

    def done() -> list[dict[str, Any]]:
        """The earlier trials that count here: as busy as these."""
        alike = [one for one in results["trials"] if one["busy"] == asked.busy]
        return [one for one in alike if not asked.alone or one["goodput"] is not None]

    def is_enough() -> bool:
        return len(done()) >= asked.trials or time.monotonic() > deadline

    while not is_enough():
        seed = secrets.randbits(32)
        random = Random(seed)
        launcher = "deepspeed" if random.random() < DEEPSPEED_SHARE else "pdsh"
        setting = _least_tried(settings, done(), random)
        about: dict[str, Any] = {
            "seed": seed,
            "launcher": asked.launcher or launcher,
            "setting": setting.name,
            "busy": asked.busy,
        }
        expected = undisturbed[setting.name]
        with chain(data, setting, about["launcher"], random) as broken:
            most_faults = 1 if asked.alone else FAULTS_OF_A_RUN
            has_survived = True
            while has_survived and broken.faults < most_faults and not is_enough():
                one = _one(broken, done(), asked.faults, expected)
                if one is None:
                    break
                broken.faults += 1
                has_survived = one["survived"]
                if asked.alone and has_survived:
                    one["goodput"] = goodput(broken)
                _keep(results, "trials", about | one)
            # Beside busy processes it takes long, and the losses are the same.
            trains_to_its_end = has_survived and broken.faults == FAULTS_OF_A_RUN and not asked.busy
            if trains_to_its_end:
                until(broken.is_over, WHOLE_RUN_SECONDS)
                broken.log.read()
            if broken.is_finished():
                far = difference(broken.log.all, expected)
                of_run = {"faults": broken.faults, "largest_difference": far, "goodput": goodput(broken)}
                _keep(results, "runs", about | of_run)


def _least_tried(settings: list[Setting], done: list[dict[str, Any]], random: Random) -> Setting:
    """One of the settings that were tried least so far."""
    counts = {setting: sum(one.get("setting") == setting.name for one in done) for setting in settings}
    least = min(counts.values())
    return random.choice([setting for setting in settings if counts[setting] == least])


def _one(broken: Chain, done: list[dict[str, Any]], faults: list[str], undisturbed: Losses) -> dict[str, Any] | None:
    """Try one of the faults that were tried least in this setting, and of these least of all; None where the run has
    ended."""
    able = [name for name in faults if broken.has_spare or not FAULTS[name].costs_a_pod]
    if not able:
        raise UserError(f"--faults {' '.join(faults)}: none can be tried, since each costs a pod and none is left")
    tried = [one["fault"] for one in done]
    tried_here = [one["fault"] for one in done if one.get("setting") == broken.setting.name]
    counts = {name: (tried_here.count(name), tried.count(name)) for name in able}
    least = min(counts.values())
    name = broken.random.choice([name for name in able if counts[name] == least])
    try:
        return trial(broken, name, undisturbed)
    except UserError as error:
        return {**dict.fromkeys(MEASURED), "fault": name, "survived": False, "by_itself": False, "said": str(error)}


def _keep(results: dict[str, Any], kind: str, one: dict[str, Any]) -> None:
    print(json.dumps(one), file=sys.stderr, flush=True)
    results[kind].append(one)
    results["environment"] = _environment()
    files.write_json(RESULTS, results)


def _environment() -> dict[str, Any]:
    return {"hardware": environment.hardware(), "versions": environment.versions()}


def _prepared() -> Path:
    """The first 64 questions of the embedded data set, prepared."""
    raw, prepared = WORK / "sample", WORK / "prepared"
    write_sample(raw)
    prepare(Preparation(data=raw, tokenizer="t5-tiny", limit=64), prepared)
    return prepared.resolve()


def _undisturbed(data: Path, setting: Setting) -> Losses:
    """The loss of each step of a run without faults; kept for later calls on the same machine."""
    kept = WORK / f"undisturbed.{setting.technique}.{setting.pods}.json"
    key = {"flags": list(setting.flags), **_environment()}
    if kept.is_file() and read_json(kept)["key"] == key:
        return {int(step): loss for step, loss in read_json(kept)["losses"].items()}
    with chain(data, setting, "pdsh", Random(0)) as whole:
        comes_to(whole, setting.steps, WHOLE_RUN_SECONDS)
        losses = dict(whole.log.read())
    if len(losses) != setting.steps:
        raise UserError(f"{whole.area}: the undisturbed run ended after {len(losses)} steps; see said there")
    files.write_json(kept, {"key": key, "losses": losses})
    return losses


if __name__ == "__main__":
    sys.exit(guarded(main))
