"""`zeropods plan`: memory and time of each technique before running; `probe` and `profile`: what was measured."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, fields
from functools import partial
from typing import TYPE_CHECKING, Any

from zeropods.errors import UserError
from zeropods.files import given_path, home, write_json
from zeropods.outputs import out_file
from zeropods.tables import GIB, not_negative, number, whole, wrapped

if TYPE_CHECKING:
    from zeropods.cli import Result
    from zeropods.measure.calibration import MachineProbe
    from zeropods.plan.estimate import Calibrated, Request

SECONDS_PER_HOUR = 3_600
OF_GPUS = ("gpu", "gpu_memory", "flops", "bandwidth", "latency", "pcie_bandwidth", "peer_bandwidth")
"""Flags that are refused for a plan without a GPU, which takes such figures from a probe."""
OF_CPUS = ("hosts", "threads")
OF_OTHERS = {
    "--gpus": "--slots",
    "--num_gpus": "--slots",
    "--num_gpus_per_node": "--slots",
    "--num_nodes": "--pods",
    "--per_device_train_batch_size": "--batch-size",
}
"""Flags of the training scripts and of other programs whose name does not lead to the plan's flag in their place."""


def add_verbs(verbs: Any, add: Callable[..., Any]) -> None:
    """Add the verbs and their flags; `add(verbs, name, help, run)` makes one. Flags not given are left to the plan."""
    verb = add(verbs, "plan", "memory and time of each technique, before running", run_plan)
    for flag, read, metavar, text in FLAGS:
        verb.add_argument(flag, type=read, metavar=metavar, help=text, default=argparse.SUPPRESS)
    verb.add_argument("--device", choices=["gpu", "cpu"], default="gpu", help="what trains (default: gpu)")
    verb.add_argument("--machine", type=given_path, metavar="FILE", help="a probe (default: this machine's)")
    verb.add_argument(
        "--fit", type=given_path, nargs="+", metavar="RUNS", help="learn the plan's error from finished runs"
    )
    one = {"dest": "techniques", "default": [], "metavar": "NAME", "help": "only this one; repeatable (default: all)"}
    verb.add_argument("--technique", action="append", **one)
    verb.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    verb.add_argument("--mtbf", type=number, metavar="HOURS", help="between failures: says how often to save")
    verb.add_argument("--save-seconds", type=number, metavar="S", help="of a checkpoint, for --mtbf")
    verb.add_argument("--what-if", action="store_true", help="other requests, and the run's whole life")
    verb.add_argument("--formulas", action="store_true", help="print every term with its formula")

    verb.foreign = OF_OTHERS

    verb = add(verbs, "probe", "how fast this kind of machine is, for later plans; at most 40 s", run_probe)
    where = verb.add_mutually_exclusive_group()
    where.add_argument("--pods", metavar="NAME", help="the cluster (default: the only one that is up, if any)")
    where.add_argument("--alone", action="store_true", help="use this machine only, whatever is up")
    verb.add_argument("--out", type=out_file, metavar="FILE", help="where to keep it (default: beside the clusters)")

    verb = add(verbs, "profile", "a DeepSpeed flops-profiler report as data, checked", run_profile)
    verb.add_argument("file", type=given_path, metavar="FILE", help="a report, a log that holds one, or a run folder")
    verb.add_argument("--depth", type=int, metavar="N", help="show the module tree to this depth; the root is 0")
    verb.add_argument("--top", type=int, default=8, metavar="N", help="how many module classes to show")
    verb.add_argument("--against", type=given_path, metavar="FILE2", help="a second report to compare, with ratios")


def run_plan(arguments: argparse.Namespace) -> Result:
    """The plan as plain values; people get tables made from the plan itself."""
    from zeropods.measure.calibration import fit_runs, read_probe
    from zeropods.plan.estimate import plan
    from zeropods.report.plan import PlanReport
    from zeropods.report.what_if import life, life_table, saving, what_if_text, what_ifs

    if arguments.fit:
        from zeropods.report.entry import find_runs

        machine = None if arguments.machine is None else read_probe(arguments.machine)
        if machine and machine.gpus:
            raise UserError(
                f"--machine {arguments.machine}: was measured on {machine.name}; give that of the runs without a GPU"
            )
        return fit_runs(find_runs(arguments.fit).values(), " ".join(map(str, arguments.fit)), machine)
    by, probe, source = _by(arguments)
    report = PlanReport(plan(request_of(arguments, probe), by), source)
    made = report.to_json()
    mtbf, save, saves, more, asked = arguments.mtbf, arguments.save_seconds, None, "", {}
    if (mtbf is None) != (save is None):
        given, missing = ("--mtbf", "--save-seconds S") if save is None else ("--save-seconds", "--mtbf HOURS")
        raise UserError(f"{given} {mtbf or save:g}: needs {missing} too")
    if mtbf is not None:
        saves, said = saving(mtbf * SECONDS_PER_HOUR, save, report.plan.best)
        more = f"\n\n{wrapped(said)}"
    if arguments.what_if:
        found = what_ifs(report.plan, partial(plan, by=by), arguments.machine)
        phases = life(report.plan, save)
        more += f"\n\n{what_if_text(found)}\n{life_table(phases)}".rstrip()
        asked = {"what_if": [each.to_json() for each in found], "life": [asdict(phase) for phase in phases]}
    arguments.readable = lambda result: f"{report.to_text(arguments.formulas)}{more}"
    return {**made, "saving": saves, "formulas": arguments.formulas, **asked}


def _by(arguments: argparse.Namespace) -> tuple[Calibrated | None, MachineProbe | None, str]:
    """The calibration for the plan's errors, the probe for the machine's rates, and in words where both are from."""
    from zeropods.measure.calibration import CALIBRATION, kept_calibration, kept_probe, read_probe
    from zeropods.plan.cpu import CPU
    from zeropods.plan.estimate import Calibrated
    from zeropods.plan.gpus import words
    from zeropods.plan.machines import Machines

    folder = home()
    probe = kept_probe(folder) if arguments.machine is None else read_probe(arguments.machine)
    if arguments.device == CPU:
        if arguments.machine and probe and probe.gpus:
            raise UserError(f"--machine {arguments.machine}: was measured on {probe.name}; leave out --device cpu")
        probe = None if probe and probe.gpus else probe
        calibration = kept_calibration(folder)
        rates = f"the probe of {probe.name}" if probe else f"{calibration.machine.name}; zeropods probe measures yours"
        probe = probe or calibration.machine
        said = f"Intervals are those of {calibration.source}, rates those of {rates}."
        return Calibrated(calibration, CPU, probe), probe, said
    if arguments.machine and probe and not probe.gpus:
        raise UserError(f"--machine {arguments.machine}: was measured on {probe.name} without a GPU; give --device cpu")
    probe = probe if probe and probe.gpus and "gpu" not in arguments else None
    gpu = probe.name if probe else getattr(arguments, "gpu", Machines().gpu)
    rates = f"from the probe of {gpu}" if probe else f"a part of the published peak of {gpu}"
    # The shipped calibration covers no GPU, and reading it takes a quarter of the time of a plan.
    own = kept_calibration(folder) if (folder / CALIBRATION).is_file() else None
    known = next((name for name in own.factors if words(gpu) <= words(name)), None) if own else None
    if own is None or known is None:
        return None, probe, f"Rates are {rates}; none of your runs shows yet how far off they are (see --fit)."
    by = Calibrated(own, known, probe or own.machine)
    return by, probe, f"Rates are {rates}, intervals those of {own.source}."


def run_probe(arguments: argparse.Namespace) -> Result:
    """Probe a cluster or this machine, and keep what was found."""
    from zeropods.measure.calibration import MACHINE
    from zeropods.pods.cluster import find, names_here
    from zeropods.train.probe import probe

    cluster = None
    if not arguments.alone and (arguments.pods or names_here()):
        cluster = find(arguments.pods)
    found, path = asdict(probe(cluster)), arguments.out or home() / MACHINE
    write_json(path, found)
    return {**found, "file": str(path)}


def request_of(arguments: argparse.Namespace, probe: MachineProbe | None) -> Request:
    """The checked request for a plan, in which a probe's figures replace the machines' published or usual ones."""
    if "model" not in arguments:
        raise UserError("--model is missing; give a name such as t5-large, or --fit RUNS")
    from zeropods.plan.estimate import Request, request_for
    from zeropods.plan.machines import ACHIEVED, Machines
    from zeropods.plan.workload import ZeroSettings

    foreign, device = (OF_GPUS, "gpu") if arguments.device == "cpu" else (OF_CPUS, "cpu")
    wrong = next((name for name in foreign if name in arguments), None)
    if wrong is not None:
        raise UserError(f"--{wrong.replace('_', '-')}: is for --device {device}; leave it out")
    several = [f"--{name}" for name in ("pods", "slots") if getattr(arguments, name, 1) > 1]
    if several and set(arguments.techniques) == {"none"}:
        raise UserError(f"--technique none: runs one process only; leave out {' and '.join(several)}")
    names = {"gpu_memory": "gpu_memory_bytes", "host_memory": "host_memory_bytes", "latency": "latency_seconds"}
    given = {names.get(name, name): value for name, value in vars(arguments).items()}
    if probe and arguments.device == "cpu":
        # Without a GPU, the field for a GPU's memory holds the memory of a process.
        memory = given.pop("host_memory_bytes", None)
        if memory is None:
            given["machine_bytes"] = probe.memory_bytes
            memory = probe.memory_bytes // -(-given.get("pods", 3) // given.get("hosts", 1))
        given["gpu_memory_bytes"] = memory // given.get("slots", 1)
    elif probe:
        precision, measured = str(given.get("precision", "fp32")), dict[str, Any]()
        if precision in probe.matmul_flops_per_second and precision in ACHIEVED:
            measured["flops"] = ACHIEVED[precision] * probe.flops(precision)
        if probe.pcie_bandwidth is not None:
            measured["pcie_bandwidth"] = probe.pcie_bandwidth
        if probe.machines > 1:
            measured |= {"bandwidth": probe.bandwidth, "latency_seconds": probe.latency_seconds}
        if probe.gpu_memory_bytes is not None:
            measured["gpu_memory_bytes"] = probe.gpu_memory_bytes
        given = {"gpu": probe.name, **measured, **given}
    zero = {"reduce_elements": given["bucket_size"]} if "bucket_size" in given else {}
    machines = {field.name: given[field.name] for field in fields(Machines) if field.name in given}
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
    """Read and check the report, and the second one if it was given."""
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
    ("--model", str, "MODEL", "such as t5-large, a hub id, folder, config"),
    ("--pods", whole, "N", "pods, all alike (default: 3)"),
    ("--slots", whole, "N", "processes per pod, one GPU each (default: 1)"),
    ("--gpu-memory", _gibibytes, "GIB", "of one GPU (default: that of --gpu)"),
    ("--host-memory", _gibibytes, "GIB", "of one pod (default: not checked)"),
    ("--batch-size", whole, "ROWS", "per process (default: 32, causal 4)"),
    ("--gradient-accumulation", whole, "PASSES", "per step (default: 1)"),
    ("--source-length", whole, "TOKENS", "T5: per row, with padding (default: 96)"),
    ("--target-length", whole, "TOKENS", "T5: per row, with padding (default: 96)"),
    ("--seq-length", whole, "TOKENS", "causal: per padded row (default: 512)"),
    ("--label-length", whole, "TOKENS", "causal: with a loss (default: all but one)"),
    ("--attention", str, "NAME", "eager, flash_attention_2, all; default sdpa"),
    ("--precision", str, "P", "fp32, bf16, causal: fp16 too (default: fp32)"),
    ("--gradient-checkpointing", _truth, "BOOL", "True, False, or both (default: False)"),
    ("--bucket-size", whole, "ELEMENTS", "of reduce_bucket_size (default: 1e7)"),
    ("--bandwidth", _times(1e9), "GB/S", "of a pod's link, each way (default: 0.86)"),
    ("--latency", not_negative, "S", "of a message to a pod (default: 5e-5)"),
    ("--gpu", str, "NAME", "sets peak and memory (default: A100-40GB)"),
    ("--flops", _times(1e12), "TFLOP/S", "of a GPU (default: a share of its peak)"),
    ("--pcie-bandwidth", _times(1e9), "GB/S", "from a GPU to its host (default: 12)"),
    ("--peer-bandwidth", _times(1e9), "GB/S", "between a pod's GPUs (default: that of PCIe)"),
    ("--hosts", whole, "N", "CPU: machines for all pods (default: 1)"),
    ("--threads", whole, "N", "CPU: per process (default: all cores)"),
    ("--price-per-hour", not_negative, "PRICE", "of one pod, in any currency (default: none)"),
    ("--steps", whole, "N", "of the training, for its time and cost"),
    ("--samples", whole, "N", "of the training set, in place of --steps"),
    ("--epochs", number, "N", "over --samples (default: 1)"),
)
"""Flag, function that reads it, unit, help; `request_of` maps them to the fields of `Request` and `Machines`."""
