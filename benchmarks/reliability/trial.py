"""A trial: a training run is broken once, and the consequences are observed from outside."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.reliability.chain import INTERVAL, Chain, Setting
from benchmarks.reliability.faults import (
    DAMAGED,
    FAULTS,
    POD,
    RANK,
    SUPERVISOR,
    Fault,
    Named,
    Scene,
)
from benchmarks.reliability.seen import (
    Losses,
    changed,
    difference,
    ended,
    first_word,
    processes_of,
    ranks_of,
    until,
)
from zeropods.errors import UserError
from zeropods.launch.notebook import warden_of
from zeropods.measure.record import read_json
from zeropods.pods.processes import Process, descendants
from zeropods.report.entry import read_entry
from zeropods.report.formulas import figures

VERIFIED_STEPS = 5
"""Number of steps after each restart that are compared before the next fault."""
WAIT_SECONDS = 300.0
"""Most seconds to wait for a fault to be found, and for the steps after it."""
LEFT_SECONDS = 20.0
"""Seconds after which a process of a broken attempt counts as left over."""
SAME = 1e-5
"""Largest relative difference between losses that count as the same; the log has six digits of a
loss."""
SAME_BUT_FOR_ROUNDING = 1e-3
"""The same where each restart brings other rounding: what the first one brought grows from step to
step until the next fault."""
FEWEST_PODS_THAT_ROUND = 3
"""Fewest pods on which DDP, which lays out gradients anew after its first step, adds them up in
another order after a restart."""
SAID = ("status", "pod", "rank", "reason")
"""Keys of what is said of an attempt's end, in `record.json` and in `restarts.json`."""
MEASURED = (
    "what",
    "said",
    "named",
    "unix_seconds",
    "steps_done",
    "steps_lost",
    "seconds_to_find",
    "seconds_to_resume",
    "left_over",
    "largest_difference",
    "goodput",
)
"""Keys of what a trial tells besides its fault and whether it was survived; all are None where the
trial failed."""


@dataclass(frozen=True)
class Broken:
    """A fault that was injected into a run."""

    name: str
    unix_seconds: float
    what: str | None
    """The rank, pod or file that was chosen."""
    victims: list[Process]
    """Processes of the broken attempt, and of a pod that was killed."""
    used: tuple[str, ...]
    """Names of the pods of the broken attempt, in the order of ranks."""


@dataclass(frozen=True)
class Called:
    """How the run continued after a fault."""

    by_itself: bool
    found_unix_seconds: float
    unix_seconds: float
    """When the next attempt began: when the fault was found, or when the same command was called
    again."""
    steps_done: int
    """Last step of the attempt that was broken."""
    ending: dict[str, Any] | None
    """What was said of its end: `status`, `pod`, `rank` and `reason`; None where nothing was."""
    left: int | None = None
    """Number of processes left over; None where they have not been counted yet."""


def trial(chain: Chain, name: str, undisturbed: Losses) -> dict[str, Any] | None:
    """Break the run at a random moment, and wait until it trains again; None where it ended before
    that."""
    # At any step between two checkpoints, and at any moment within the step.
    steps = VERIFIED_STEPS + chain.random.randrange(INTERVAL + 3)
    if not comes_to(chain, steps):
        return None
    time.sleep(chain.random.random() / 2)

    fault = FAULTS[name]
    scene = chain.scene()
    has_restarted = changed(chain.folder / "restarts.json")
    broken = _break(name, fault, scene)
    if broken is None:
        return None
    is_noticed = until(lambda: has_restarted() or chain.is_over(), WAIT_SECONDS)
    if not is_noticed:
        raise UserError(
            f"{chain.folder}: {name}: not found within {WAIT_SECONDS:.0f} s; see {chain.area}/said"
        )
    if fault.costs_a_pod and broken.what is not None:
        chain.lost.add(broken.what)

    called: Called | None
    if has_restarted():
        called = _went_on(chain)
    else:
        called = _called_again(chain, broken, lambda: fault.heal(scene))
    if called is None:
        return None
    trains_again = comes_to(chain, VERIFIED_STEPS) or chain.is_finished()
    left_over = called.left
    if left_over is None:
        left_over = len(ended(broken.victims, LEFT_SECONDS))
    if called.by_itself:
        # Where the command was called again, that had to be done before.
        fault.heal(scene)
    return _outcome(
        chain, broken, called, undisturbed, trains_again=trains_again, left_over=left_over
    )


def comes_to(chain: Chain, steps: int, seconds: float = WAIT_SECONDS) -> bool:
    """Wait until an attempt has done `steps` steps; False where its launch ends first, `UserError`
    after `seconds`."""
    if not until(lambda: len(chain.log.read()) >= steps or chain.is_over(), seconds):
        raise UserError(
            f"{chain.folder}: no {steps} steps within {seconds:.0f} s; see {chain.area}/said"
        )
    return not chain.is_over()


def _break(name: str, fault: Fault, scene: Scene) -> Broken | None:
    """Inject the fault; None where the ranks are already ending."""
    ranks = ranks_of(scene.folder)
    if len(ranks) < len(scene.used):
        return None
    processes = [*ranks, *processes_of(ranks, scene.launch)]
    # Looked up before, since the fault itself chooses the pod, and ends them.
    processes_by_pod = {}
    if fault.ends_a_pod:
        processes_by_pod = {pod: _pod_processes(scene, pod) for pod in scene.used}
    broken_at = time.time()
    what = fault.act(scene)
    if what is not None:
        processes += processes_by_pod.get(what, [])
    # A process may have been found in several ways.
    victims = {process.pid: process for process in processes}
    return Broken(
        name=name,
        unix_seconds=broken_at,
        what=what,
        victims=list(victims.values()),
        used=scene.used,
    )


def _pod_processes(scene: Scene, pod: str) -> list[Process]:
    """A pod's warden and all processes below it; none where it has ended."""
    warden = warden_of(scene.cluster, pod)
    if warden is None:
        return []
    return [warden, *descendants(warden.pid)]


def _went_on(chain: Chain) -> Called:
    """How the run continued where the launch itself found the fault and began the next attempt."""
    restart = read_json(chain.folder / "restarts.json")["restarts"][-1]
    last_step = max(chain.log.read())
    # From now on the log has the losses of the next attempt.
    chain.log.forget()
    chain.used = tuple(restart["pods"])
    return Called(
        by_itself=True,
        found_unix_seconds=restart["found_unix_seconds"],
        unix_seconds=restart["found_unix_seconds"],
        steps_done=last_step,
        ending=restart,
    )


def _called_again(chain: Chain, broken: Broken, heal: Callable[[], object]) -> Called | None:
    """Call the same command again after the launch and its processes have ended; None where the run
    was finished."""
    noticed_at = time.time()
    left_over = len(ended(broken.victims, LEFT_SECONDS))
    if broken.name == SUPERVISOR:
        # Here the fault ends the launch itself: it is the pods that notice, and end the ranks.
        noticed_at = time.time()
    found_at = first_word(chain.folder, broken.unix_seconds) or noticed_at
    last_step = max(chain.log.read())
    if chain.is_finished():
        return None
    record = chain.folder / "record.json"
    # An older record is that of an earlier attempt.
    is_new = record.is_file() and record.stat().st_mtime >= broken.unix_seconds
    ending = None
    if is_new:
        ending = read_json(record)
    # From now on the log has the losses of the next attempt.
    chain.log.forget()
    heal()
    chain.renew()
    called_at = time.time()
    chain.begin()
    return Called(
        by_itself=False,
        found_unix_seconds=found_at,
        unix_seconds=called_at,
        steps_done=last_step,
        ending=ending,
        left=left_over,
    )


def _outcome(
    chain: Chain,
    broken: Broken,
    called: Called,
    undisturbed: Losses,
    *,
    trains_again: bool,
    left_over: int,
) -> dict[str, Any]:
    """What came of a trial, by its keys in `results/reliability.json`.

    Args:
        undisturbed: the losses of a run that nothing disturbed.
        trains_again: whether the run has done the steps that are compared, or has finished.
        left_over: number of processes left over.
    """
    losses = dict(chain.log.read())
    first_loss_at = chain.log.first_unix_seconds
    largest_difference = difference(losses.items(), undisturbed)
    most = most_difference(chain.setting, chain.faults)
    is_same = largest_difference is None or largest_difference <= most
    survived = trains_again and is_same and _is_passed_over(chain, broken)
    ending = None
    if called.ending is not None:
        ending = {key: called.ending[key] for key in SAID}
    steps_lost = None
    if losses:
        steps_lost = called.steps_done - min(losses) + 1
    seconds_to_resume = None
    if first_loss_at is not None:
        seconds_to_resume = first_loss_at - called.unix_seconds
    return {
        "fault": broken.name,
        "what": broken.what,
        "said": ending,
        "named": is_named(FAULTS[broken.name].named, broken, called.ending),
        "unix_seconds": broken.unix_seconds,
        "survived": survived,
        "by_itself": called.by_itself,
        "steps_done": called.steps_done,
        "steps_lost": steps_lost,
        "seconds_to_find": max(0.0, called.found_unix_seconds - broken.unix_seconds),
        "seconds_to_resume": seconds_to_resume,
        "left_over": left_over,
        "largest_difference": largest_difference,
        "goodput": None,
    }


def most_difference(setting: Setting, earlier_faults: int) -> float:
    """Largest relative difference from the undisturbed run's losses that counts as the same, for a
    run that was restarted after so many faults before."""
    rounds_anew = setting.technique == "ddp" and setting.pods >= FEWEST_PODS_THAT_ROUND
    if rounds_anew and earlier_faults:
        return SAME_BUT_FOR_ROUNDING
    return SAME


def is_named(expected: Named | None, broken: Broken, ending: dict[str, Any] | None) -> bool | None:
    """Whether pod, rank and reason of a broken attempt's end are right; None where nobody was left
    to say anything."""
    if expected is None:
        return None
    if ending is None:
        return False
    has_status = re.fullmatch(expected.status, ending["status"])
    has_words = re.search(expected.words, ending["reason"] or "")
    if not has_status or not has_words:
        return False
    rank = ending["rank"]
    pod = ending["pod"]
    if expected.what == RANK:
        return f"rank {rank}" == broken.what and pod == broken.used[rank]
    if expected.what == POD:
        return bool(pod == broken.what)
    # Any rank may be named, but with its own pod.
    return rank is None or bool(pod == broken.used[rank])


def goodput(chain: Chain) -> float | None:
    """Share of a run's wall time that went into steps that count; None if the run does not finish
    by itself."""
    until(chain.is_over, WAIT_SECONDS)
    if not chain.is_finished():
        return None
    entry = read_entry(chain.folder, chain.folder.name)
    return figures(entry.record, earlier=entry.earlier).goodput


def _is_passed_over(chain: Chain, broken: Broken) -> bool:
    """Whether the log says that a damaged checkpoint was passed over; True for other faults."""
    if broken.name not in DAMAGED or broken.what is None:
        return True
    checkpoint, _, file = broken.what.partition("/")
    log = (chain.folder / "train.log").read_text(encoding="utf-8", errors="replace")
    words = f"{checkpoint}: passed over: "
    return any(words in line and file in line for line in log.splitlines())
