"""`docs/reliability.md`, made from `results/reliability.json`: the median and the worst of each fault's trials."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.reliability.chain import INTERVAL, STEP_TIMEOUT, STEPS
from benchmarks.reliability.faults import FAULTS
from benchmarks.reliability.trial import LEFT_SECONDS, SAME, VERIFIED_STEPS
from zeropods.pods.leases import RUN_SECONDS
from zeropods.tables import Table, counted

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "results" / "reliability.json", ROOT / "docs" / "reliability.md"
FIND_SECONDS, RESUME_SECONDS = 10, 60
"""Most seconds asked for: to find a fault, and to resume the run."""
ABOUT = f"""\
# What was broken, and what came of it

A tiny T5 trains on local pods, {STEPS} steps with a checkpoint every {INTERVAL}, and is broken at random moments, up to
four times a run. No fault is simulated: processes get signals, network cables are pulled, bits flip on the disk,
libraries end the process. This page is made of `results/reliability.json`:

    python -m benchmarks.reliability --trials 56             # adds the trials that are missing
    python -m benchmarks.reliability --trials 40 --busy 6    # with six processes that compute beside them
    python -m benchmarks.reliability --page                  # only makes the page
"""
REMARKS = f"""\
* survived: training went on, with the losses of a run that nothing disturbed (FP32, dropout 0: {VERIFIED_STEPS} steps
  after each restart, within {SAME:g} relative); a damaged file was named
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
    """The page as Markdown: a table of the trials on quiet cores, and one for each number of busy processes."""
    parts = [ABOUT]
    for busy in sorted({one["busy"] for one in results["trials"]}):
        heading = f"Beside {counted(busy, 'busy process')}" if busy else "Without busy processes"
        trials = [one for one in results["trials"] if one["busy"] == busy]
        runs = [one for one in results["runs"] if one["busy"] == busy]
        rows = [_row(name, [one for one in trials if one["fault"] == name]) for name in FAULTS]
        parts += [f"## {heading}\n", _summary(trials, runs), Table.of(rows).to_markdown()]
    hardware = results["environment"]["hardware"]
    cores = f"{hardware['cores']} cores ({hardware['cpu']})"
    parts += [f"Measured on {cores}, shared with other work at the time.\n", REMARKS]
    faults = "".join(f"* {name}: {fault.means}\n" for name, fault in FAULTS.items())
    return "\n".join([*parts, f"## The faults\n{faults}"])


def _summary(trials: Sequence[dict[str, Any]], runs: Sequence[dict[str, Any]]) -> str:
    """What came of some trials, and of the runs that ended among them, in a few sentences."""
    launchers = Counter(one["launcher"] for one in trials)
    faults = sum(one["faults"] for one in runs)
    far = max((one["largest_difference"] or 0.0 for one in [*trials, *runs]), default=0.0)
    apart = Counter(one["setting"] for one in runs if (one["largest_difference"] or 0.0) > SAME)
    which = f" ({_names(apart)})" if apart else ""
    checked = sum(one["named"] is not None for one in trials)
    named = sum(one["named"] is True for one in trials)
    lines = (
        f"**{counted(len(trials), 'trial')}, {sum(one['survived'] for one in trials)} survived, "
        f"{sum(one['left_over'] or 0 for one in trials)} processes left over.**",
        f"Pod, rank and reason were checked in {checked} of them, and named rightly in {named}.",
        f"Trials by technique and number of pods: {_settings(trials)}.",
        f"{_over(trials, 'seconds_to_find', FIND_SECONDS)} took more than {FIND_SECONDS} s to find, "
        f"{_over(trials, 'seconds_to_resume', RESUME_SECONDS)} more than {RESUME_SECONDS} s to resume.",
        f"{_over_steps(trials)} lost more steps than an interval, or two where the newest checkpoint was damaged.",
        f"{counted(len(runs), 'run')} came to {'its' if len(runs) == 1 else 'their'} end, through "
        f"{counted(faults, 'fault')}; {apart.total()} of them{which} with losses other than the undisturbed run's.",
        f"The largest relative difference of any step's loss is {far:.1e}.",
        f"DeepSpeed's launcher started {launchers['deepspeed']} of the trials, pdsh itself, which is quicker, "
        f"{launchers['pdsh']}.",
    )
    return "\n".join(lines) + "\n"


def _over(trials: Sequence[dict[str, Any]], key: str, asked: float) -> int:
    return sum((one[key] or 0.0) > asked for one in trials)


def _over_steps(trials: Sequence[dict[str, Any]]) -> int:
    return sum((one["steps_lost"] or 0) > INTERVAL * FAULTS[one["fault"]].intervals for one in trials)


def _row(name: str, trials: Sequence[dict[str, Any]]) -> dict[str, str]:
    return {
        "fault": name,
        "tried": str(len(trials)),
        "survived": str(sum(one["survived"] for one in trials)),
        "named": _named(trials),
        "by itself": str(sum(one["by_itself"] and one["survived"] for one in trials)),
        "steps lost": _spread(trials, "steps_lost", "{:g}"),
        "to find (s)": _spread(trials, "seconds_to_find", "{:.1f}"),
        "to resume (s)": _spread(trials, "seconds_to_resume", "{:.1f}"),
        "goodput": _spread(trials, "goodput", "{:.0%}", min),
    }


def _named(trials: Sequence[dict[str, Any]]) -> str:
    """How many of the trials in which it was checked name pod, rank and reason rightly."""
    checked = [one["named"] for one in trials if one["named"] is not None]
    return f"{sum(checked)} of {len(checked)}" if checked else "not checked"


def _settings(trials: Sequence[dict[str, Any]]) -> str:
    """The techniques and numbers of pods, each with its trials."""
    counts = Counter(one["setting"] for one in trials)
    return _names(counts)


def _names(counts: Counter[str]) -> str:
    """Such as `zero2 x2 7, ddp x3 5`; empty without any."""
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())


def _spread(
    trials: Sequence[dict[str, Any]], key: str, form: str, worst: Callable[[Sequence[float]], float] = max
) -> str:
    """The median and the worst of the measured values."""
    values = [one[key] for one in trials if one[key] is not None]
    if not values:
        return "not measured"
    return f"{form.format(statistics.median(values))}, {form.format(worst(values))}"
