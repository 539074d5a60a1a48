"""`docs/reliability.md`, made from `results/reliability.json`: the median and the worst of each
fault's trials."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.reliability.chain import INTERVAL, STEP_TIMEOUT, STEPS
from benchmarks.reliability.faults import FAULTS
from benchmarks.reliability.trial import LEFT_SECONDS, SAME, SAME_BUT_FOR_ROUNDING, VERIFIED_STEPS
from zeropods.launch.command import AGENTS
from zeropods.pods.leases import RUN_SECONDS
from zeropods.tables import Table, counted

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results" / "reliability.json"
PAGE = ROOT / "docs" / "reliability.md"
FIND_SECONDS = 10
RESUME_SECONDS = 60
"""Most seconds asked for: to find a fault, and to resume the run."""
ABOUT = f"""\
# What was broken, and what came of it

A tiny T5 trains on local pods, {STEPS} steps with a checkpoint every {INTERVAL}, and is broken at random moments, up to
four times a run. No fault is simulated: processes get signals, network cables are pulled, bits flip on the disk,
libraries end the process. This page is made of `results/reliability.json`:

    python -m benchmarks.reliability --trials 56             # adds the trials that are missing
    python -m benchmarks.reliability --trials 40 --busy 6    # with six processes that compute beside them
    python -m benchmarks.reliability --trials 28 --launcher agents    # by the pods' agents, without ssh
    python -m benchmarks.reliability --page                  # only makes the page
"""
REMARKS = f"""\
* survived: training went on, with the losses of a run that nothing disturbed (FP32, dropout 0: {VERIFIED_STEPS} steps
  after each restart, within {SAME:g} relative; from the second restart of a run by `ddp` on three pods and more on, within
  {SAME_BUT_FOR_ROUNDING:g}, for a reason that the next line gives); a damaged file was named
* losses other than the undisturbed run's: at some step of the whole run, by more than the same. Of these runs only
  `ddp` on three pods and more may have such: torch's DDP lays the gradients out anew after its first step, so in the
  first step after a restart the pods' gradients are added up in another order, and the rounding differs from there on.
  With `ddp_find_unused_parameters=True` in `zeropods/train/job.py`, which keeps the layout, all 300 losses of such a
  run were the undisturbed run's (tried once, by hand)
* named: of the trials in which it was checked, those in which `record.json` or `restarts.json` name the right pod, the
  right rank where one was chosen, and the right reason
* by itself: by `--restarts`, on a spare pod in place of a lost one; else the same command was called again
* steps lost, to find, to resume, goodput: median, and worst
* to find (asked for: {FIND_SECONDS}): until the supervisor, a pod or a rank knew. A killed supervisor is found when the
  run's lease of {RUN_SECONDS:.0f} s has run out, ranks that hang by `--step-timeout {STEP_TIMEOUT}`
* to resume (asked for: {RESUME_SECONDS}): from then, or from the second call, to the end of the first step
* goodput: of a run broken once (`--alone`), share of its wall time in steps that count, starts included
* left over: processes of the broken attempt, and of a killed pod, still there {LEFT_SECONDS:.0f} s later
"""


def page(results: dict[str, Any]) -> str:
    """The page as Markdown: a table of the trials over ssh on quiet cores, one for each number of
    busy processes, and the same of those by the pods' agents."""
    parts = [ABOUT]
    for kind in sorted(set(map(_kind, results["trials"]))):
        trials = [trial for trial in results["trials"] if _kind(trial) == kind]
        runs = [run for run in results["runs"] if _kind(run) == kind]
        parts += [f"## {_heading(*kind)}\n", _summary(trials, runs), _table(trials)]
    hardware = results["environment"]["hardware"]
    cores = f"{hardware['cores']} cores ({hardware['cpu']})"
    parts += [f"Measured on {cores}, shared with other work at the time.\n", REMARKS]
    faults = [f"* {name}: {fault.means}\n" for name, fault in FAULTS.items()]
    parts.append("## The faults\n" + "".join(faults))
    return "\n".join(parts)


def _kind(measured: dict[str, Any]) -> tuple[bool, int]:
    """Whether the agents started a trial or a run, and beside how many busy processes."""
    return measured["launcher"] == AGENTS, measured["busy"]


def _heading(is_by_agents: bool, busy: int) -> str:
    heading = "Without busy processes"
    if busy:
        heading = f"Beside {counted(busy, 'busy process')}"
    if is_by_agents:
        heading += ", by the pods' agents"
    return heading


def _table(trials: Sequence[dict[str, Any]]) -> str:
    """A row for each fault, also for those that were not tried."""
    rows = []
    for name in FAULTS:
        of_fault = [trial for trial in trials if trial["fault"] == name]
        rows.append(_row(name, of_fault))
    return Table.of(rows).to_markdown()


def _summary(trials: Sequence[dict[str, Any]], runs: Sequence[dict[str, Any]]) -> str:
    """What came of some trials, and of the runs that ended among them, in a few sentences."""
    survived = sum(trial["survived"] for trial in trials)
    left_over = sum(trial["left_over"] or 0 for trial in trials)
    # None where nobody was left to say anything, so that there was nothing to check.
    checked = sum(trial["named"] is not None for trial in trials)
    named = sum(trial["named"] is True for trial in trials)
    late_found = _count_over(trials, "seconds_to_find", FIND_SECONDS)
    late_resumed = _count_over(trials, "seconds_to_resume", RESUME_SECONDS)
    launchers = Counter(trial["launcher"] for trial in trials)
    differences = [_difference(measured) for measured in [*trials, *runs]]
    largest_difference = max(differences, default=0.0)
    lines = (
        f"**{counted(len(trials), 'trial')}, {survived} survived, "
        f"{left_over} processes left over.**",
        f"Pod, rank and reason were checked in {checked} of them, and named rightly in {named}.",
        f"Trials by technique and number of pods: {_settings(trials)}.",
        f"{late_found} took more than {FIND_SECONDS} s to find, "
        f"{late_resumed} more than {RESUME_SECONDS} s to resume.",
        f"{_count_of_lost_steps(trials)} lost more steps than an interval, "
        "or two where the newest checkpoint was damaged.",
        _sentence_on_runs(runs),
        f"The largest relative difference of any step's loss is {largest_difference:.1e}.",
        _sentence_on_launchers(launchers),
    )
    return "\n".join(lines) + "\n"


def _sentence_on_launchers(launchers: Counter[str]) -> str:
    """What started the trials, and how many each."""
    if launchers[AGENTS]:
        return "The pods' agents started the ranks of all of them, without ssh and pdsh."
    return (
        f"DeepSpeed's launcher started {launchers['deepspeed']} of the trials, "
        f"pdsh itself, which is quicker, {launchers['pdsh']}."
    )


def _sentence_on_runs(runs: Sequence[dict[str, Any]]) -> str:
    """How many runs came to their end, and how many of them with other losses."""
    faults = sum(run["faults"] for run in runs)
    apart = Counter(run["setting"] for run in runs if _difference(run) > SAME)
    which = ""
    if apart:
        which = f" ({_names(apart)})"
    whose = "its" if len(runs) == 1 else "their"
    return (
        f"{counted(len(runs), 'run')} came to {whose} end, through {counted(faults, 'fault')}; "
        f"{apart.total()} of them{which} with losses other than the undisturbed run's."
    )


def _difference(measured: dict[str, Any]) -> float:
    """Largest difference of a trial's or a run's losses; 0 where none was measured."""
    return measured["largest_difference"] or 0.0


def _count_over(trials: Sequence[dict[str, Any]], key: str, most_seconds: float) -> int:
    """The number of trials in which something took longer than was asked for."""
    return sum((trial[key] or 0.0) > most_seconds for trial in trials)


def _count_of_lost_steps(trials: Sequence[dict[str, Any]]) -> int:
    """The number of trials that lost more steps than their fault may cost."""
    count = 0
    for trial in trials:
        steps = trial["steps_lost"] or 0
        if steps > INTERVAL * FAULTS[trial["fault"]].intervals:
            count += 1
    return count


def _row(name: str, trials: Sequence[dict[str, Any]]) -> dict[str, str]:
    survived = [trial for trial in trials if trial["survived"]]
    by_itself = [trial for trial in survived if trial["by_itself"]]
    return {
        "fault": name,
        "tried": str(len(trials)),
        "survived": str(len(survived)),
        "named": _named(trials),
        "by itself": str(len(by_itself)),
        "steps lost": _spread(trials, "steps_lost", "{:g}"),
        "to find (s)": _spread(trials, "seconds_to_find", "{:.1f}"),
        "to resume (s)": _spread(trials, "seconds_to_resume", "{:.1f}"),
        "goodput": _spread(trials, "goodput", "{:.0%}", min),
    }


def _named(trials: Sequence[dict[str, Any]]) -> str:
    """How many of the trials in which it was checked name pod, rank and reason rightly."""
    checked = [trial["named"] for trial in trials if trial["named"] is not None]
    if not checked:
        return "not checked"
    return f"{sum(checked)} of {len(checked)}"


def _settings(trials: Sequence[dict[str, Any]]) -> str:
    """The techniques and numbers of pods, each with its trials."""
    counts = Counter(trial["setting"] for trial in trials)
    return _names(counts)


def _names(counts: Counter[str]) -> str:
    """Such as `zero2 x2 7, ddp x3 5`; empty without any."""
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())


def _spread(
    trials: Sequence[dict[str, Any]],
    key: str,
    form: str,
    worst: Callable[[Sequence[float]], float] = max,
) -> str:
    """The median and the worst of the measured values."""
    values = [trial[key] for trial in trials if trial[key] is not None]
    if not values:
        return "not measured"
    middle = statistics.median(values)
    return f"{form.format(middle)}, {form.format(worst(values))}"
