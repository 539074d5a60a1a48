"""`zeropods plan`: memory and time of each technique before running; `probe` and `profile`: what
was measured."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from zeropods.errors import UserError
from zeropods.files import given_path, home, write_json
from zeropods.outputs import out_file, out_folder
from zeropods.tables import GIB, SECONDS_PER_HOUR, counted, not_negative, number, whole, wrapped

if TYPE_CHECKING:
    from zeropods.cli import Result
    from zeropods.measure.machine_probe import MachineProbe
    from zeropods.plan.advice import Choice
    from zeropods.plan.estimate import Estimate, Plan, Request, SpanOfRuns
    from zeropods.pods.cluster import Cluster

FOR_GPUS = (
    "gpu",
    "gpu_memory",
    "host_memory",
    "flops",
    "bandwidth",
    "latency",
    "pcie_bandwidth",
    "peer_bandwidth",
    "nvme_bandwidth",
    "quantized",
    "price_per_hour",
    "steps",
    "samples",
    "epochs",
    "machine",
    "mtbf",
    "save_seconds",
    "within",
    "check",
    "all",
    "what_if",
    "tune",
    "out",
)
"""Flags that are refused with `--device cpu`: without a GPU neither times nor what fits are
planned."""
OF_ANY_PLAN = ("technique", "trust_remote_code", "formulas")
"""Flags of a plan that are neither in `FOR_GPUS` nor in `FLAGS`."""
NOT_OF_TUNING = (
    "mtbf",
    "save_seconds",
    "within",
    "check",
    "all",
    "what_if",
    "formulas",
    "bucket_size",
)
"""Flags that are refused with `--tune`: those of what a plan shows, and `--bucket-size`, since no
try is started with another size."""
OF_OTHERS = {
    "--gpus": "--slots",
    "--num_gpus": "--slots",
    "--num_gpus_per_node": "--slots",
    "--num_nodes": "--pods",
    "--per_device_train_batch_size": "--batch-size",
}
"""Flags of the training scripts and of other programs, with the plan's flags in their place, whose
names are not alike."""
STATUSES = {"FITS": 0, "TIGHT": 3, "NO": 4}
"""Exit statuses of `--check` by the verdict."""
FIELDS = {
    "gpu_memory": "gpu_memory_bytes",
    "host_memory": "host_memory_bytes",
    "latency": "latency_seconds",
    "technique": "techniques",
}
"""Fields of the request and of its machines by their flags, where the names differ."""


def add_verbs(verbs: Any, add: Callable[..., Any]) -> None:
    """Add the verbs and their flags; `add(verbs, name, help, run)` makes one."""
    plan_help = "memory and time of each technique, before running"
    verb = add(verbs, "plan", plan_help, run_plan)
    verb.foreign = OF_OTHERS
    _add_flags_of_plan(verb)
    probe_help = "how fast this kind of machine is, for plans for its GPU; at most 40 s"
    _add_flags_of_probe(add(verbs, "probe", probe_help, run_probe))
    profile_help = "a DeepSpeed flops-profiler report as data, checked"
    _add_flags_of_profile(add(verbs, "profile", profile_help, run_profile))


def _add_flags_of_plan(verb: argparse.ArgumentParser) -> None:
    """Add the flags of a plan; those of `FLAGS` that are not given are left to the plan."""
    flag = verb.add_argument
    for name, read, metavar, text in FLAGS:
        flag(name, type=read, metavar=metavar, help=text, default=argparse.SUPPRESS)
    device_help = "of a CPU: only states (default: gpu)"
    flag("--device", choices=["gpu", "cpu"], default="gpu", help=device_help)
    machine_help = "a probe (default: this machine's)"
    flag("--machine", type=given_path, metavar="FILE", help=machine_help)
    fit_help = "runs on GPUs: learn the plan's error"
    flag("--fit", type=given_path, nargs="+", metavar="RUNS", help=fit_help)
    technique_help = "only this one; repeatable (default: all)"
    flag("--technique", action="append", default=[], metavar="NAME", help=technique_help)
    flag("--trust-remote-code", action="store_true", help="run code that comes with the model")
    mtbf_help = "between failures: says how often to save"
    flag("--mtbf", type=number, metavar="HOURS", help=mtbf_help)
    save_help = "of a checkpoint, or a run that saved some"
    flag("--save-seconds", type=_seconds_or_run, metavar="S|RUN", help=save_help)
    within_help = "for all: says what is cheapest"
    flag("--within", type=number, metavar="HOURS", help=within_help)
    tune_help = "a script's data: try the best three here"
    flag("--tune", type=given_path, metavar="DATA", help=tune_help)
    out_help = "of those runs (default: runs/tune)"
    flag("--out", type=out_folder, metavar="DIR", help=out_help)
    flag("--check", action="store_true", help="status 3: a tight fit, 4: none")
    flag("--all", action="store_true", help="every technique as asked for, in every part")
    flag("--what-if", action="store_true", help="other requests, and the run's whole life")
    flag("--formulas", action="store_true", help="print every term with its formula")


def _add_flags_of_probe(verb: argparse.ArgumentParser) -> None:
    """Add the flags of a probe."""
    where = verb.add_mutually_exclusive_group()
    pods_help = "the cluster (default: the only one that is up, if any)"
    where.add_argument("--pods", metavar="NAME", help=pods_help)
    where.add_argument("--alone", action="store_true", help="use this machine only, whatever is up")
    out_help = "where to keep it (default: beside the clusters)"
    verb.add_argument("--out", type=out_file, metavar="FILE", help=out_help)


def _add_flags_of_profile(verb: argparse.ArgumentParser) -> None:
    """Add the flags of a profile."""
    flag = verb.add_argument
    file_help = "a report, a log that holds one, or a run folder"
    flag("file", type=given_path, metavar="FILE", help=file_help)
    depth_help = "show the module tree to this depth; the root is 0"
    flag("--depth", type=int, metavar="N", help=depth_help)
    flag("--top", type=int, default=8, metavar="N", help="how many module classes to show")
    against_help = "a second report to compare, with ratios"
    flag("--against", type=given_path, metavar="FILE2", help=against_help)


def run_plan(arguments: argparse.Namespace) -> Result:
    """The plan as plain values; people get tables made from the plan itself. With `--fit` and
    `--tune`, what these return."""
    if arguments.fit:
        return _fit(arguments)
    if arguments.device == "cpu":
        return _plan_states(arguments)
    if arguments.tune is not None:
        return _tune(arguments)
    if arguments.out is not None:
        raise UserError(f"--out {arguments.out}: is the folder of --tune's runs; leave it out")
    return _plan_for_gpus(arguments)


def _fit(arguments: argparse.Namespace) -> Result:
    """Fit the calibration of later plans to finished runs, and return what was fitted; flags of a
    plan are refused."""
    from zeropods.measure.calibration import fit_runs
    from zeropods.report.entry import find_runs

    names = [_name_of(flag) for flag, *_ in FLAGS]
    for name in (*names, *FOR_GPUS, *OF_ANY_PLAN):
        if _is_given(arguments, name):
            raise UserError(f"{_flag(name)}: is for a plan, not for --fit; leave it out")
    if arguments.device == "cpu":
        raise UserError("--device cpu: --fit is for runs on GPUs; leave it out")
    runs = find_runs(arguments.fit)
    return fit_runs(runs.values(), " ".join(map(str, arguments.fit)))


def _plan_states(arguments: argparse.Namespace) -> Result:
    """What is planned without a GPU: the states alone."""
    from zeropods.plan.states import plan_states
    from zeropods.report.states import StatesReport

    for name in FOR_GPUS:
        if _is_given(arguments, name):
            raise UserError(f"{_flag(name)}: is for --device gpu; leave it out")
    request = request_of(arguments, None)
    report = StatesReport(request, plan_states(request))
    arguments.readable = lambda result: report.to_text(arguments.formulas)
    return {**report.to_json(), "formulas": arguments.formulas}


def _plan_for_gpus(arguments: argparse.Namespace) -> Result:
    """Memory and time of each technique on GPUs, and the parts that further flags ask for."""
    from zeropods.plan.advice import advise
    from zeropods.plan.estimate import plan
    from zeropods.report.advice import AdviceReport
    from zeropods.report.plan import PlanReport

    basis = _basis(arguments)
    request = request_of(arguments, basis.probe)
    _check_times(arguments)
    report = PlanReport(plan(request, basis.span_of_runs), basis.source)
    within_seconds = None
    if arguments.within is not None:
        within_seconds = arguments.within * SECONDS_PER_HOUR
    advice = advise(request, _choice(arguments), basis.span_of_runs, within_seconds)
    given = _given(arguments, basis.probe)
    at_first_sight = AdviceReport(request, advice, given, arguments.within)
    document = {
        **report.to_json(),
        "verdict": advice.verdict,
        "advice": advice.to_json(),
        "saving": None,
        "formulas": arguments.formulas,
    }
    texts = []
    if arguments.mtbf is not None:
        best = report.plan.best if advice.best is None else advice.best.estimate
        document["saving"], sentence = _saving(arguments, report.plan, best)
        texts.append(f"\n\n{wrapped(sentence)}")
    if arguments.what_if:
        answers, text = _what_if(arguments, report.plan, basis.span_of_runs)
        document |= answers
        texts.append(f"\n\n{text}")

    def readable(result: Result) -> str:
        """The advice or, with `--all`, the whole plan; then the further parts."""
        if arguments.all:
            text = report.to_text(arguments.formulas)
        else:
            text = at_first_sight.to_text()
            if basis.is_measured:
                text = f"{text}\n\n{wrapped(basis.source)}"
            if arguments.formulas:
                text = f"{text}\n\n{report.formulas()}".rstrip()
        return f"{text}{''.join(texts)}"

    arguments.readable = readable
    if arguments.check:
        arguments.status = lambda result: STATUSES[result["verdict"]]
    return document


def _tune(arguments: argparse.Namespace) -> Result:
    """Try the best plans on the pods at hand, and keep how the tries ended, as
    `zeropods.sweep.tune.tune` does."""
    from zeropods.plan.advice import advise
    from zeropods.pods.cluster import find, names_here
    from zeropods.sweep.tune import tune

    for name in NOT_OF_TUNING:
        if _is_given(arguments, name):
            raise UserError(f"{_flag(name)}: is for a plan that is shown; leave out --tune or this")
    cluster = find() if names_here() else None
    _take_pods_at_hand(arguments, cluster)
    basis = _basis(arguments)
    request = request_of(arguments, basis.probe)
    place = f"--tune {arguments.tune}"
    if request.planned_only:
        flags = ", ".join(request.planned_only)
        raise UserError(f"{place}: {flags} is planned only; leave it out")
    ways = advise(request, _choice(arguments), basis.span_of_runs).ways
    if not ways:
        raise UserError(f"{place}: nothing fits; zeropods plan without it says what would")
    tuning = tune(ways, str(arguments.tune), arguments.out or Path("runs") / "tune", cluster)
    arguments.readable = lambda result: tuning.to_text()
    arguments.status = lambda result: 0 if tuning.best is not None else 1
    return tuning.to_json()


def _take_pods_at_hand(arguments: argparse.Namespace, cluster: Cluster | None) -> None:
    """Set `pods` and `slots` of the arguments to those of the pods at hand, where no flag gave
    them.

    Args:
        cluster: None for this machine alone.

    Raises:
        UserError: a flag asks for more pods than there are, or for other slots than they have.
    """
    from zeropods.pods.hostfile import own_slots

    if set(arguments.technique) == {"none"}:
        # This technique runs one process, however many could run here.
        arguments.pods = getattr(arguments, "pods", 1)
        return
    if cluster is None:
        if getattr(arguments, "pods", 1) != 1:
            remedy = "zeropods pods up starts some, or give --pods 1"
            raise UserError(f"--pods {arguments.pods}: no pods are up; {remedy}")
        arguments.pods = 1
        if "slots" not in arguments:
            arguments.slots = own_slots()
        return
    pods_up = len(cluster.hosts)
    if getattr(arguments, "pods", pods_up) > pods_up:
        fault = f"cluster {cluster.name} has {counted(pods_up, 'pod')}"
        raise UserError(f"--pods {arguments.pods}: {fault}; give at most {pods_up}")
    slots = cluster.hosts[0].slots
    if getattr(arguments, "slots", slots) != slots:
        raise UserError(f"--slots {arguments.slots}: pods of {cluster.name} have {slots}")
    arguments.slots = slots
    if "pods" not in arguments:
        arguments.pods = pods_up


def _choice(arguments: argparse.Namespace) -> Choice:
    """What the advice is free to choose: that which no flag gives."""
    from zeropods.plan.advice import Choice

    return Choice(
        batch="batch_size" not in arguments and "gradient_accumulation" not in arguments,
        checkpointing="gradient_checkpointing" not in arguments,
        precision="precision" not in arguments,
    )


def _given(arguments: argparse.Namespace, probe: MachineProbe | None) -> set[str]:
    """The fields of the request and of its machines that a flag gave, or a probe measured."""
    given = set[str]()
    for flag, *_ in FLAGS:
        name = _name_of(flag)
        if name in arguments:
            given.add(FIELDS.get(name, name))
    if probe is not None:
        precision = str(getattr(arguments, "precision", "fp32"))
        given.update(_probed_values(probe, precision))
    return given


def _saving(arguments: argparse.Namespace, made: Plan, best: Estimate | None) -> tuple[Result, str]:
    """How often to save, as plain values and as text.

    The times of a checkpoint are those that `--save-seconds` gives, those that the run it names has
    measured, or else those that are planned.

    Args:
        best: the estimate that is saved for; None where the plan recommends one.
    """
    from zeropods.report.what_if import measured_saves, planned_saves, recommended, saving

    given = arguments.save_seconds
    if isinstance(given, Path):
        times = measured_saves(given)
    else:
        times = planned_saves(best or recommended(made), given)
    return saving(arguments.mtbf * SECONDS_PER_HOUR, times, best)


def _check_times(arguments: argparse.Namespace) -> None:
    """Refuse `--save-seconds` without `--mtbf`, and `--within` where the training's length is not
    known."""
    given = arguments.save_seconds
    if arguments.mtbf is None and given is not None:
        text = f"{given:g}" if isinstance(given, float) else str(given)
        raise UserError(f"--save-seconds {text}: needs --mtbf HOURS too")
    is_length_known = "steps" in arguments or "samples" in arguments
    if arguments.within is not None and not is_length_known:
        raise UserError(f"--within {arguments.within:g}: needs --samples or --steps too")


def _what_if(
    arguments: argparse.Namespace, made: Plan, span_of_runs: SpanOfRuns | None
) -> tuple[Result, str]:
    """The answers to what-if questions and the run's whole life, as plain values and as text."""
    from zeropods.plan.estimate import plan
    from zeropods.report.what_if import (
        life,
        life_table,
        measured_saves,
        subject,
        what_if_text,
        what_ifs,
    )

    answers = what_ifs(made, partial(plan, span_of_runs=span_of_runs), arguments.machine)
    given = arguments.save_seconds
    if isinstance(given, Path):
        given = measured_saves(given).save_seconds
    phases = life(made, given)
    values = {
        "what_if": [answer.to_json() for answer in answers],
        "life": [asdict(phase) for phase in phases],
    }
    parts = (f"{wrapped(subject(made))}\n", what_if_text(answers), life_table(phases))
    return values, "\n".join(map(str, parts)).rstrip()


class _Basis(NamedTuple):
    """What a plan for GPUs is based on."""

    probe: MachineProbe | None
    """Measurements of the GPU; None where published figures are used."""
    span_of_runs: SpanOfRuns | None
    """What runs on this GPU have shown; None where nothing was fitted to such runs."""
    source: str
    """Where rates and intervals come from, in a sentence."""

    @property
    def is_measured(self) -> bool:
        """Whether a probe or runs on this GPU say anything."""
        return self.probe is not None or self.span_of_runs is not None


def _basis(arguments: argparse.Namespace) -> _Basis:
    """The probe, the calibration and the tries for the GPU of a plan, as far as there are any.

    Raises:
        UserError: the probe that `--machine` names was measured without a GPU.
    """
    from zeropods.measure.calibration import kept_calibration
    from zeropods.measure.machine_probe import kept_probe, read_probe
    from zeropods.measure.tries import kept_tries, span_with_tries, tries_on
    from zeropods.plan.gpus import words
    from zeropods.plan.machines import Machines

    folder = home()
    if arguments.machine is None:
        probe = kept_probe(folder)
    else:
        probe = read_probe(arguments.machine)
        if not probe.gpus:
            place = f"--machine {arguments.machine}"
            raise UserError(f"{place}: was measured on {probe.name} without a GPU; leave it out")
    # A probe says nothing about another GPU, which a flag may name, nor if it had none.
    if probe is not None and ("gpu" in arguments or not probe.gpus):
        probe = None
    if probe is not None:
        gpu = probe.name
        rates = f"from the probe of {gpu}"
    else:
        gpu = getattr(arguments, "gpu", Machines().gpu)
        rates = f"a part of the published peak of {gpu}"

    span_of_runs: SpanOfRuns | None = None
    unknown = "none of your runs shows yet how far off they are (see --fit)"
    source = f"Rates are {rates}; {unknown}."
    calibration = kept_calibration(folder)
    if calibration is not None:
        for fitted_gpu in calibration.factors:
            if words(gpu) <= words(fitted_gpu):
                span_of_runs = partial(calibration.span, fitted_gpu)
                source = f"Rates are {rates}, intervals those of {calibration.source}."
                break
    tries = tries_on(gpu, kept_tries(folder))
    if tries:
        span_of_runs = span_with_tries(tries, span_of_runs)
        source = f"{source} What fits is as {len(tries)} of your tries showed (--tune)."
    return _Basis(probe, span_of_runs, source)


def request_of(arguments: argparse.Namespace, probe: MachineProbe | None) -> Request:
    """The checked request for a plan, in which a probe's figures replace the machines' published or
    usual ones."""
    if "model" not in arguments:
        raise UserError("--model is missing; give a name such as t5-large, or --fit RUNS")
    from zeropods.plan.estimate import Request, request_for
    from zeropods.plan.machines import Machines
    from zeropods.plan.workload import ZeroSettings

    several = [name for name in ("pods", "slots") if getattr(arguments, name, 1) > 1]
    if several and set(arguments.technique) == {"none"}:
        flags = " and ".join(map(_flag, several))
        raise UserError(f"--technique none: runs one process only; leave out {flags}")

    values = {FIELDS.get(name, name): value for name, value in vars(arguments).items()}
    if probe is not None:
        precision = str(values.get("precision", "fp32"))
        # What was asked for wins over what was probed.
        values = {**_probed_values(probe, precision), **values}
    values["techniques"] = tuple(values["techniques"])
    values["machines"] = Machines(**_fields_of(Machines, values))
    if "bucket_size" in values:
        values["zero"] = ZeroSettings(reduce_elements=values["bucket_size"])
    return request_for(**_fields_of(Request, values))


def _probed_values(probe: MachineProbe, precision: str) -> dict[str, Any]:
    """Fields of the request and of its machines that a probe of GPUs measured."""
    from zeropods.plan.machines import ACHIEVED

    values: dict[str, Any] = {"gpu": probe.name}
    if precision in probe.matmul_flops_per_second and precision in ACHIEVED:
        values["flops"] = ACHIEVED[precision] * probe.flops(precision)
    if probe.pcie_bandwidth is not None:
        values["pcie_bandwidth"] = probe.pcie_bandwidth
    if probe.launch_seconds is not None:
        values["launch_seconds"] = probe.launch_seconds
    if probe.machines > 1:
        values["bandwidth"] = probe.bandwidth
        values["latency_seconds"] = probe.latency_seconds
    if probe.gpu_memory_bytes is not None:
        values["gpu_memory_bytes"] = probe.gpu_memory_bytes
    return values


def _fields_of(kind: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Those of the values whose names are fields of a dataclass."""
    names = [field.name for field in fields(kind)]
    return {name: values[name] for name in names if name in values}


def _is_given(arguments: argparse.Namespace, name: str) -> bool:
    """Whether a flag was given; not for flags such as `--device`, which have a default value."""
    value = getattr(arguments, name, None)
    # A 0 was given: it must not count as False here.
    is_left_out = value is None or value is False or value == []
    return not is_left_out


def _flag(name: str) -> str:
    """The flag of a name among the arguments."""
    return f"--{name.replace('_', '-')}"


def _name_of(flag: str) -> str:
    """The name of a flag among the arguments."""
    return flag.removeprefix("--").replace("-", "_")


def run_probe(arguments: argparse.Namespace) -> Result:
    """Probe a cluster or this machine, and write what was measured to a file; a line on stderr says
    if no plan will use it."""
    from zeropods.launch.probe import probe
    from zeropods.measure.machine_probe import MACHINE
    from zeropods.pods.cluster import find, names_here

    cluster = None
    if not arguments.alone and (arguments.pods or names_here()):
        cluster = find(arguments.pods)
    measured = probe(cluster)
    values = asdict(measured)
    path = arguments.out or home() / MACHINE
    write_json(path, values)
    if not measured.gpus:
        print(f"{path}: was measured without a GPU, so no plan uses it", file=sys.stderr)
    return {**values, "file": str(path)}


def run_profile(arguments: argparse.Namespace) -> Result:
    """Read and check the report, and the second one if it was given."""
    from zeropods.report.profile import ProfileReport

    for name, least in (("depth", 0), ("top", 1)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise UserError(f"--{name} {value}; expected at least {least}")
    report = ProfileReport.read(arguments.file)
    pair = None
    if arguments.against is not None:
        pair = report.against(ProfileReport.read(arguments.against))

    def readable(result: Result) -> str:
        # People get tables made from the report itself, not from its JSON.
        return wrapped(report.to_text(arguments.depth, arguments.top, pair), "  ")

    arguments.readable = readable
    document = report.checked.to_json(arguments.depth)
    if pair is not None:
        document["against"] = pair.to_json(arguments.depth)
    return document


def _seconds_or_run(text: str) -> float | Path:
    """A number of seconds, or the folder of a run."""
    path = Path(text)
    if path.is_dir():
        return path
    try:
        return number(text)
    except argparse.ArgumentTypeError as error:
        place = str(error).partition(";")[0]
        raise argparse.ArgumentTypeError(
            f"{place}; expected seconds above 0, or the folder of a run"
        ) from None


def _gibibytes(text: str) -> int:
    """The bytes of a number of GiB."""
    return round(GIB * number(text))


def _times(factor: float) -> Callable[[str], float]:
    """A function that reads a number in a unit of `factor`, such as 1e9 for GB/s."""

    def read(text: str) -> float:
        return factor * number(text)

    return read


def _truth(text: str) -> bool | str:
    """The truth value of a flag's text, or the text `both`."""
    if text not in ("True", "False", "both"):
        expected = "True or False, or both for a causal model"
        raise argparse.ArgumentTypeError(f"{text!r}; expected {expected}")
    return text if text == "both" else text == "True"


FLAGS: tuple[tuple[str, Callable[[str], Any], str, str], ...] = (
    ("--model", str, "MODEL", "such as t5-large, a hub id, folder, config"),
    ("--pods", whole, "N", "pods, all alike (default: 3)"),
    ("--slots", whole, "N", "processes per pod, one GPU each (default: 1)"),
    ("--gpu-memory", _gibibytes, "GIB", "of one GPU (default: that of --gpu)"),
    ("--host-memory", _gibibytes, "GIB", "of one pod (default: not checked)"),
    ("--batch-size", whole, "ROWS", "per process (default: 32, causal 4)"),
    ("--gradient-accumulation", whole, "PASSES", "per step (default: 1)"),
    ("--global-batch", whole, "ROWS", "per step of all processes, in their place"),
    ("--source-length", whole, "TOKENS", "T5: per row, with padding (default: 96)"),
    ("--target-length", whole, "TOKENS", "T5: per row, with padding (default: 96)"),
    ("--seq-length", whole, "TOKENS", "causal: per padded row (default: 512)"),
    ("--label-length", whole, "TOKENS", "causal: with a loss (default: all but one)"),
    ("--attention", str, "NAME", "eager, flash_attention_2, all; default sdpa"),
    ("--precision", str, "P", "fp32, bf16, causal: fp16 too (default: fp32)"),
    ("--gradient-checkpointing", _truth, "BOOL", "True, False, or both (default: False)"),
    ("--masters", str, "KIND", "bf16: fp32, bf16, none (default: fp32)"),
    ("--optimizer", str, "NAME", "or adamw_foreach, adamw_8bit; default adamw"),
    ("--loss", str, "NAME", "transformers, fused, chunked; default labels"),
    ("--adapter", str, "NAME", "lora or qlora (default: none)"),
    ("--lora-rank", whole, "N", "of the adapters (default: 16)"),
    ("--lora-targets", str, "NAMES", "ends of layers' names (default: all-linear)"),
    ("--bucket-size", whole, "ELEMENTS", "of reduce_bucket_size (default: 1e7)"),
    ("--quantized", str, "NAMES", "zero3++: weights,gradients, or one of them"),
    ("--bandwidth", _times(1e9), "GB/S", "of a pod's link, each way (default: 0.94)"),
    ("--latency", not_negative, "S", "of a message to a pod (default: 5e-5)"),
    ("--gpu", str, "NAME", "sets peak and memory (default: A100-40GB)"),
    ("--flops", _times(1e12), "TFLOP/S", "of a GPU (default: a share of its peak)"),
    ("--pcie-bandwidth", _times(1e9), "GB/S", "from a GPU to its host (default: of --gpu)"),
    ("--peer-bandwidth", _times(1e9), "GB/S", "between a pod's GPUs (default: that of PCIe)"),
    ("--nvme-bandwidth", _times(1e9), "GB/S", "zero3_offload: its optimizer on a disk"),
    ("--price-per-hour", not_negative, "PRICE", "of one pod, in any currency (default: none)"),
    ("--steps", whole, "N", "of the training, for its time and cost"),
    ("--samples", whole, "N", "of the training set, in place of --steps"),
    ("--epochs", number, "N", "over --samples (default: 1)"),
)
"""Flag, function that reads it, unit, help; `request_of` maps them to the fields of `Request` and
`Machines`."""
