"""`zeropods plan`, memory and time of each technique before running, and `zeropods profile`, what was measured."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropods.errors import UserError
from zeropods.tables import GIB, not_negative, number, whole, wrapped

if TYPE_CHECKING:
    from zeropods.cli import Result
    from zeropods.plan.estimate import Estimate, Request

SECONDS_PER_HOUR = 3_600


def add_verbs(verbs: Any, add: Callable[..., Any]) -> None:
    """The verbs and their flags; `add(verbs, name, help, run)` makes one. What is not given is left to the plan."""
    verb = add(verbs, "plan", "memory and time of each technique, before running", run_plan)
    for flag, read, metavar, text in FLAGS:
        needed = flag == "--model"
        verb.add_argument(flag, type=read, metavar=metavar, help=text, default=argparse.SUPPRESS, required=needed)
    one = {"dest": "techniques", "default": [], "metavar": "NAME", "help": "only this one; repeatable (default: all)"}
    verb.add_argument("--technique", action="append", **one)
    verb.add_argument("--trust-remote-code", action="store_true", help="run the code that a model brings")
    verb.add_argument("--mtbf", type=number, metavar="HOURS", help="between failures: says how often to save")
    verb.add_argument("--save-seconds", type=number, metavar="S", help="of a checkpoint, for --mtbf")
    verb.add_argument("--what-if", action="store_true", help="what other requests would give, and the run's whole life")
    verb.add_argument("--formulas", action="store_true", help="print every term with its formula")

    verb = add(verbs, "profile", "a DeepSpeed flops-profiler report as data, checked", run_profile)
    verb.add_argument("file", type=Path, metavar="FILE", help="a report, a log that holds one, or a run folder")
    verb.add_argument("--depth", type=int, metavar="N", help="show the tree of modules down to it; the root is 0")
    verb.add_argument("--top", type=int, default=8, metavar="N", help="how many classes of modules to show")
    verb.add_argument("--against", type=Path, metavar="FILE2", help="a second report beside it, with ratios")


def run_plan(arguments: argparse.Namespace) -> Result:
    """The plan as plain values; people get tables made from the plan itself."""
    from zeropods.plan.estimate import plan
    from zeropods.report.plan import PlanReport
    from zeropods.report.what_if import life, life_table, what_if_table, what_ifs

    report = PlanReport(plan(request_of(arguments)))
    made = report.to_json()
    saving = _saving(arguments, report.plan.best)
    said = f"\n\n{_saving_text(saving)}" if saving else ""
    found, phases = (
        (what_ifs(report.plan), life(report.plan, arguments.save_seconds)) if arguments.what_if else ((), ())
    )
    more = f"\n\n{what_if_table(found)}\n{life_table(phases)}".rstrip() if arguments.what_if else ""
    arguments.readable = lambda result: f"{report.to_text(arguments.formulas)}{said}{more}"
    asked = {"what_if": [each.to_json() for each in found], "life": [asdict(phase) for phase in phases]}
    return {**made, "saving": saving, "formulas": arguments.formulas, **(asked if arguments.what_if else {})}


def _saving(arguments: argparse.Namespace, best: Estimate | None) -> Result | None:
    """How often to save, in seconds and in steps of the technique that the plan chooses; None where nobody asked."""
    from zeropods.plan.estimate import saving_plan

    mtbf, save = arguments.mtbf, arguments.save_seconds
    if mtbf is None and save is None:
        return None
    if mtbf is None or save is None:
        given, missing = ("--mtbf", "--save-seconds S") if save is None else ("--save-seconds", "--mtbf HOURS")
        raise UserError(f"{given} {mtbf or save:g}: needs {missing} too")
    found = saving_plan(mtbf * SECONDS_PER_HOUR, save)
    return {
        "mtbf_seconds": mtbf * SECONDS_PER_HOUR,
        "save_seconds": save,
        **asdict(found),
        "technique": best and best.technique.name,
        "steps": best and max(1, round(found.interval_seconds / best.time.seconds)),
    }


def _saving_text(saving: Result) -> str:
    steps = "" if saving["steps"] is None else f", {saving['steps']:,} steps of {saving['technique']}"
    hours = saving["mtbf_seconds"] / SECONDS_PER_HOUR
    return (
        f"Save every {saving['interval_seconds']:,.0f} s{steps}: {saving['goodput']:.1%} of the time is left for steps "
        f"that count, with a failure every {hours:,.4g} h (Young 1974, Daly 2006)."
    )


def request_of(arguments: argparse.Namespace) -> Request:
    """What was asked, checked."""
    from zeropods.plan.estimate import Request, request_for
    from zeropods.plan.machines import Machines
    from zeropods.techniques import ZeroSettings

    names = {"gpu_memory": "gpu_memory_bytes", "host_memory": "host_memory_bytes", "latency": "latency_seconds"}
    given = {names.get(name, name): value for name, value in vars(arguments).items()}
    machines = {field.name: given[field.name] for field in fields(Machines) if field.name in given}
    zero = {"reduce_elements": given["bucket_size"]} if "bucket_size" in given else {}
    given |= {"machines": Machines(**machines), "zero": ZeroSettings(**zero), "techniques": tuple(given["techniques"])}
    return request_for(**{field.name: given[field.name] for field in fields(Request) if field.name in given})


def _gibibytes(text: str) -> int:
    return round(GIB * number(text))


def _times(factor: float) -> Callable[[str], float]:
    return lambda text: factor * number(text)


def _truth(text: str) -> bool | str:
    if text not in ("True", "False", "both"):
        raise argparse.ArgumentTypeError(f"{text!r}; expected True or False, or both for a causal model")
    return text if text == "both" else text == "True"


def run_profile(arguments: argparse.Namespace) -> Result:
    """Read and check the report, and the second one."""
    from zeropods.report.profile import ProfileReport

    for name, least in (("depth", 0), ("top", 1)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise UserError(f"--{name} {value}; expected at least {least}")
    report = ProfileReport.read(arguments.file)
    pair = report.against(ProfileReport.read(arguments.against)) if arguments.against is not None else None
    # People get tables made from the report itself, not from its JSON.
    arguments.readable = lambda result: wrapped(report.to_text(arguments.depth, arguments.top, pair), "  ")
    against = {} if pair is None else {"against": pair.to_json(arguments.depth)}
    return report.checked.to_json(arguments.depth) | against


FLAGS: tuple[tuple[str, Callable[[str], Any], str, str], ...] = (
    ("--model", str, "MODEL", "a name as t5-large, llama-8b; a hub id; a folder; a config.json"),
    ("--pods", whole, "N", "pods, all alike (default: 3)"),
    ("--slots", whole, "N", "processes per pod, one GPU each (default: 1)"),
    ("--gpu-memory", _gibibytes, "GIB", "of one GPU (default: that of --gpu)"),
    ("--host-memory", _gibibytes, "GIB", "of one pod (default: not checked)"),
    ("--batch-size", whole, "ROWS", "of a process (default: 32, causal 4)"),
    ("--gradient-accumulation", whole, "PASSES", "of a step (default: 1)"),
    ("--source-length", whole, "TOKENS", "T5: of a row, with padding (default: 96)"),
    ("--target-length", whole, "TOKENS", "T5: of a row, with padding (default: 96)"),
    ("--seq-length", whole, "TOKENS", "causal: of a padded row (default: 512)"),
    ("--label-length", whole, "TOKENS", "causal: with a loss (default: all but one)"),
    ("--attention", str, "NAME", "eager, flash_attention_2, all (default: sdpa)"),
    ("--precision", str, "P", "fp32, bf16, causal: fp16 too (default: fp32)"),
    ("--gradient-checkpointing", _truth, "BOOL", "True, False, or both (default: False)"),
    ("--bucket-size", whole, "ELEMENTS", "of reduce_bucket_size (default: 1e7)"),
    ("--bandwidth", _times(1e9), "GB/S", "of a pod's link, each way (default: 0.86)"),
    ("--latency", not_negative, "S", "of a message to a pod (default: 5e-5)"),
    ("--gpu", str, "NAME", "says peak and memory (default: A100-40GB)"),
    ("--flops", _times(1e12), "TFLOP/S", "of a GPU (default: a share of its peak)"),
    ("--pcie-bandwidth", _times(1e9), "GB/S", "from a GPU to its host (default: 12)"),
    ("--peer-bandwidth", _times(1e9), "GB/S", "between a pod's GPUs (default: that of PCIe)"),
    ("--price-per-hour", not_negative, "PRICE", "of one pod, in any currency (default: none)"),
    ("--steps", whole, "N", "of a training, for its time and cost"),
    ("--samples", whole, "N", "of the training set, in place of --steps"),
    ("--epochs", number, "N", "over --samples (default: 1)"),
)
"""Flag, how it is read, its unit, what it says; names in Python are those of the requests and of `Machines`."""
