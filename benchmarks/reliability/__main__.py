"""Inject real faults into real runs: which are survived, how soon each is found, and what it costs.

    python -m benchmarks.reliability --trials 200 --seconds 3000
    python -m benchmarks.reliability --trials 14 --alone

Trains a tiny model on two local pods, and breaks the run again and again at random moments until it is done. Each trial
is kept in `results/reliability.json` as soon as it has ended, and `docs/reliability.md` is made from them; a later call
adds the missing ones. A trial takes about 40 s on two cores. Faults of network and disk need root. With `--alone` each
run is broken once and then trains to its end, so that its record tells its goodput.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.reliability.chain import FLAGS, LAUNCHERS, STEPS, WORK, Chain, chain
from benchmarks.reliability.faults import FAULTS, ON_A_DISK, may_mount
from benchmarks.reliability.page import PAGE, RESULTS, page
from benchmarks.reliability.seen import Losses, difference
from benchmarks.reliability.trial import MEASURED, comes_to, goodput, trial
from tests.namespaces import are_possible
from zeropods import files
from zeropods.data.prepare import Preparation, prepare
from zeropods.data.sample import write_sample
from zeropods.errors import UserError, guarded
from zeropods.measure import environment
from zeropods.measure.record import read_json
from zeropods.pods.processes import ending_in_order

DEEPSPEED_SHARE = 0.25
"""Share of runs that DeepSpeed's launcher starts: they take twice as long to start."""


def main() -> None:
    """Run the missing trials as long as there is time, then render the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--trials", type=int, default=200, help="of all faults together, earlier calls included; 200")
    parser.add_argument("--seconds", type=float, default=14_400.0, help="begin no further trial after so long; 14,400")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=possible(), metavar="FAULT", help="only these")
    parser.add_argument("--alone", action="store_true", help="break each run once; --trials counts those with goodput")
    parser.add_argument("--page", action="store_true", help="only make the page anew")
    asked = parser.parse_args()
    results: dict[str, Any] = {"trials": [], "runs": [], "environment": _environment()}
    if RESULTS.is_file():
        results = read_json(RESULTS)
    if not asked.page:
        with ending_in_order():
            _add(results, asked.trials, asked.faults, time.monotonic() + asked.seconds, alone=asked.alone)
    files.write_text(PAGE, page(results))
    died = sum(not one["survived"] for one in results["trials"])
    if died:
        raise UserError(f"{RESULTS}: {died} trials were not survived; see {WORK}")


def possible() -> list[str]:
    """The faults that can be injected here."""
    disks, networks = may_mount(), are_possible()
    return [
        name
        for name, fault in FAULTS.items()
        if (disks or name not in ON_A_DISK) and (networks or not fault.needs_networks)
    ]


def _add(results: dict[str, Any], trials: int, faults: list[str], deadline: float, *, alone: bool) -> None:
    data = _prepared()
    undisturbed = _undisturbed(data)

    def counted() -> list[str]:
        return [one["fault"] for one in results["trials"] if not alone or one["goodput"] is not None]

    while len(counted()) < trials and time.monotonic() < deadline:
        seed = secrets.randbits(32)
        random = Random(seed)
        told: dict[str, Any] = {"seed": seed, "launcher": LAUNCHERS[random.random() > DEEPSPEED_SHARE]}
        with chain(data, told["launcher"], random) as broken:
            while one := _one(broken, counted(), faults, undisturbed):
                broken.faults += 1
                if alone and one["survived"]:
                    one["goodput"] = goodput(broken)
                _keep(results, "trials", told | one)
                if alone or not one["survived"] or len(counted()) >= trials or time.monotonic() > deadline:
                    break
            if broken.is_finished():
                far = difference(broken.log.all, undisturbed)
                of_run = {"faults": broken.faults, "largest_difference": far, "goodput": goodput(broken)}
                _keep(results, "runs", told | of_run)


def _one(broken: Chain, tried: list[str], faults: list[str], undisturbed: Losses) -> dict[str, Any] | None:
    """Try one of the faults that were tried least so far; returns the trial, or None where the run has ended."""
    able = [name for name in faults if broken.has_spare or not FAULTS[name].costs_a_pod]
    least = min(tried.count(name) for name in able)
    name = broken.random.choice([name for name in able if tried.count(name) == least])
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


def _undisturbed(data: Path) -> Losses:
    """The loss of each step of a run without faults; kept for later calls on the same machine."""
    key, kept = {"flags": list(FLAGS), **_environment()}, WORK / "undisturbed.json"
    if kept.is_file() and read_json(kept)["key"] == key:
        return {int(step): loss for step, loss in read_json(kept)["losses"].items()}
    with chain(data, "pdsh", Random(0)) as whole:
        comes_to(whole, STEPS)
        losses = dict(whole.log.read())
    if len(losses) != STEPS:
        raise UserError(f"{whole.area}: the undisturbed run ended after {len(losses)} steps; see said there")
    files.write_json(kept, {"key": key, "losses": losses})
    return losses


if __name__ == "__main__":
    sys.exit(guarded(main))
