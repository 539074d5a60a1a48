"""Inject real faults into real runs: which are survived, how soon each is found, and what it costs.

    python -m benchmarks.reliability --trials 56 --seconds 3000
    python -m benchmarks.reliability --trials 40 --busy 6
    python -m benchmarks.reliability --trials 14 --alone
    python -m benchmarks.reliability --trials 56 --settings "zero2 x3" "ddp x2"

Trains a tiny model on local pods, breaks the run four times at random moments, and lets it train to
its end. Each trial is of a fault, a technique and a number of pods, those that were tried least so
far. It is kept in `results/reliability.json` as soon as it has ended, and `docs/reliability.md` is
made from them; a later call adds the missing ones. A trial takes about 10 s on two quiet cores, and
a minute beside six busy processes. Faults of network and disk need root. With `--alone` each run is
broken once and then trains to its end, so that its record tells its goodput. With `--busy 6` six
processes compute beside it all the time; trials with and without them are counted apart, and make
two tables.
"""

from __future__ import annotations

import argparse
import json
import secrets
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.reliability.chain import (
    BUSY_STEP_TIMEOUT,
    LAUNCHERS,
    OVER_SSH,
    SETTINGS,
    STEPS,
    WORK,
    Chain,
    Setting,
    chain,
)
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
"""Number of faults after which a run is left to train to its end, and the next one begins in
another setting."""
DEEPSPEED_SHARE = 0.25
"""Share of runs that DeepSpeed's launcher starts: they take twice as long to start."""


def main() -> None:
    """Run the missing trials as long as there is time, then render the page."""
    flags = _parser().parse_args()
    results: dict[str, Any] = {"trials": [], "runs": [], "environment": _environment()}
    if RESULTS.is_file():
        results = read_json(RESULTS)
    if not flags.page:
        with ending_in_order():
            _add(results, flags)
    files.write_text(PAGE, page(results))
    died = sum(not outcome["survived"] for outcome in results["trials"])
    if died:
        raise UserError(f"{RESULTS}: {died} trials were not survived; see {WORK}")
    misnamed = sum(outcome.get("named") is False for outcome in results["trials"])
    if misnamed:
        raise UserError(
            f"{RESULTS}: in {misnamed} trials another pod, rank or reason was named; see said there"
        )


def _parser() -> argparse.ArgumentParser:
    description, *_ = __doc__.splitlines()
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument(
        "--trials",
        type=int,
        default=56,
        help="of all faults together, earlier calls included; 56",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=14_400.0,
        help="begin no further trial after so long; 14,400",
    )
    parser.add_argument(
        "--faults",
        nargs="+",
        choices=FAULTS,
        default=possible(),
        metavar="FAULT",
        help="only these",
    )
    names = [setting.name for setting in SETTINGS]
    parser.add_argument(
        "--settings",
        nargs="+",
        choices=names,
        default=names,
        metavar="SETTING",
        help="only these",
    )
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of each run; {STEPS}")
    parser.add_argument(
        "--launcher",
        choices=LAUNCHERS,
        help="what starts the ranks; one of the first two at random",
    )
    parser.add_argument(
        "--busy",
        type=int,
        default=0,
        metavar="N",
        help="compute in N processes beside the run",
    )
    parser.add_argument(
        "--alone",
        action="store_true",
        help="break each run once; --trials counts those with goodput",
    )
    parser.add_argument("--page", action="store_true", help="only make the page anew")
    return parser


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Let so many processes compute as long as this block goes on, as on a machine with other
    work."""
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
    has_disks = may_mount()
    has_networks = are_possible()
    names = []
    for name, fault in FAULTS.items():
        lacks_disk = name in ON_A_DISK and not has_disks
        lacks_network = fault.needs_networks and not has_networks
        if not lacks_disk and not lacks_network:
            names.append(name)
    return names


def _add(results: dict[str, Any], flags: argparse.Namespace) -> None:
    """Run the trials that are missing; the runs without faults come first, on cores that are not
    kept busy."""
    deadline = time.monotonic() + flags.seconds
    data = _prepared()
    settings = []
    for setting in SETTINGS:
        if setting.name in flags.settings:
            settings.append(replace(setting, steps=flags.steps))
    if flags.busy:
        settings = [replace(setting, step_timeout=BUSY_STEP_TIMEOUT) for setting in settings]
    undisturbed = {setting.name: _undisturbed(data, setting) for setting in settings}
    trials = Trials(
        results=results,
        flags=flags,
        deadline=deadline,
        data=data,
        settings=settings,
        undisturbed=undisturbed,
    )
    with busy_processes(flags.busy):
        while not trials.are_enough():
            trials.break_a_run()


@dataclass(frozen=True, kw_only=True)
class Trials:
    """The trials of a call, beside those of earlier ones."""

    results: dict[str, Any]
    """What `results/reliability.json` holds; each trial is added as soon as it has ended."""
    flags: argparse.Namespace
    deadline: float
    """When no further trial begins, by `time.monotonic`."""
    data: Path
    settings: list[Setting]
    undisturbed: dict[str, Losses]
    """The losses of a run without faults, by the name of its setting."""

    def done(self) -> list[dict[str, Any]]:
        """The earlier trials that count here: as busy as these, by the launcher that was asked for
        or one of those that are taken otherwise, and with `--alone` those that have a goodput."""
        launchers: tuple[str, ...] = OVER_SSH
        if self.flags.launcher:
            launchers = (self.flags.launcher,)
        counted = []
        for outcome in self.results["trials"]:
            is_as_busy = outcome["busy"] == self.flags.busy
            if not is_as_busy or outcome["launcher"] not in launchers:
                continue
            lacks_goodput = self.flags.alone and outcome["goodput"] is None
            if not lacks_goodput:
                counted.append(outcome)
        return counted

    def are_enough(self) -> bool:
        """Whether there are enough trials, or no time is left."""
        return len(self.done()) >= self.flags.trials or time.monotonic() > self.deadline

    def break_a_run(self) -> None:
        """Begin a run, and break it until it does not survive or has had its faults; what came of
        it is kept."""
        seed = secrets.randbits(32)
        random = Random(seed)
        launcher = "pdsh"
        if random.random() < DEEPSPEED_SHARE:
            launcher = "deepspeed"
        if self.flags.launcher:
            launcher = self.flags.launcher
        setting = _least_tried(self.settings, self.done(), random)
        about: dict[str, Any] = {
            "seed": seed,
            "launcher": launcher,
            "setting": setting.name,
            "busy": self.flags.busy,
        }
        with chain(self.data, setting, launcher, random) as broken:
            has_survived = self._break(broken, about)
            has_had_all_faults = broken.faults == FAULTS_OF_A_RUN
            # Beside busy processes its end takes long, and the losses are the same.
            if has_survived and has_had_all_faults and not self.flags.busy:
                until(broken.is_over, WHOLE_RUN_SECONDS)
                broken.log.read()
            if broken.is_finished():
                expected = self.undisturbed[setting.name]
                of_run = {
                    "faults": broken.faults,
                    "largest_difference": difference(broken.log.all, expected),
                    "goodput": goodput(broken),
                }
                _keep(self.results, "runs", about | of_run)

    def _break(self, broken: Chain, about: dict[str, Any]) -> bool:
        """Break a run again and again; returns whether it has survived all that."""
        most_faults = 1 if self.flags.alone else FAULTS_OF_A_RUN
        expected = self.undisturbed[broken.setting.name]
        while broken.faults < most_faults and not self.are_enough():
            outcome = _try_a_fault(broken, self.done(), self.flags.faults, expected)
            if outcome is None:
                break
            broken.faults += 1
            if self.flags.alone and outcome["survived"]:
                outcome["goodput"] = goodput(broken)
            _keep(self.results, "trials", about | outcome)
            if not outcome["survived"]:
                return False
        return True


def _least_tried(settings: list[Setting], done: list[dict[str, Any]], random: Random) -> Setting:
    """One of the settings that were tried least so far."""
    tried = Counter(outcome.get("setting") for outcome in done)
    least = min(tried[setting.name] for setting in settings)
    return random.choice([setting for setting in settings if tried[setting.name] == least])


def _try_a_fault(
    broken: Chain, done: list[dict[str, Any]], faults: list[str], undisturbed: Losses
) -> dict[str, Any] | None:
    """Try one of the faults that were tried least in this setting, and of these least of all; None
    where the run has ended."""
    affordable = [name for name in faults if broken.has_spare or not FAULTS[name].costs_a_pod]
    if not affordable:
        names = " ".join(faults)
        raise UserError(
            f"--faults {names}: none can be tried, since each costs a pod and none is left"
        )
    tried = Counter(outcome["fault"] for outcome in done)
    tried_here = Counter(
        outcome["fault"] for outcome in done if outcome.get("setting") == broken.setting.name
    )
    # Pairs are compared by their first number, and by the second where the first are equal.
    counts = {name: (tried_here[name], tried[name]) for name in affordable}
    least = min(counts.values())
    name = broken.random.choice([name for name in affordable if counts[name] == least])
    try:
        return trial(broken, name, undisturbed)
    except UserError as error:
        # Nothing was measured; what went wrong is kept in place of what the run said.
        return {
            **dict.fromkeys(MEASURED),
            "fault": name,
            "survived": False,
            "by_itself": False,
            "said": str(error),
        }


def _keep(results: dict[str, Any], kind: str, outcome: dict[str, Any]) -> None:
    print(json.dumps(outcome), file=sys.stderr, flush=True)
    results[kind].append(outcome)
    results["environment"] = _environment()
    files.write_json(RESULTS, results)


def _environment() -> dict[str, Any]:
    return {"hardware": environment.hardware(), "versions": environment.versions()}


def _prepared() -> Path:
    """The first 64 questions of the embedded data set, prepared."""
    raw = WORK / "sample"
    prepared = WORK / "prepared"
    write_sample(raw)
    prepare(Preparation(data=raw, tokenizer="t5-tiny", limit=64), prepared)
    return prepared.resolve()


def _undisturbed(data: Path, setting: Setting) -> Losses:
    """The loss of each step of a run without faults; kept for later calls on the same machine."""
    kept = WORK / f"undisturbed.{setting.technique}.{setting.pods}.json"
    key = {"flags": list(setting.flags), **_environment()}
    if kept.is_file():
        earlier = read_json(kept)
        if earlier["key"] == key:
            return {int(step): loss for step, loss in earlier["losses"].items()}
    with chain(data, setting, "pdsh", Random(0)) as whole:
        comes_to(whole, setting.steps, WHOLE_RUN_SECONDS)
        losses = dict(whole.log.read())
    if len(losses) != setting.steps:
        raise UserError(
            f"{whole.area}: the undisturbed run ended after {len(losses)} steps; see said there"
        )
    files.write_json(kept, {"key": key, "losses": losses})
    return losses


if __name__ == "__main__":
    sys.exit(guarded(main))
