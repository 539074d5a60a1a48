"""Advice as people see it: what fits, what to run, and what was assumed."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from zeropods.errors import UserError
from zeropods.files import has_weights
from zeropods.plan.advice import Advice, Way
from zeropods.plan.estimate import MEMORY_ERROR, NO, TIGHT, Estimate, Request
from zeropods.plan.known_models import CAUSAL_TINY, T5_TINY, hub_id
from zeropods.plan.machines import GIGA
from zeropods.plan.workload import ZeroSettings
from zeropods.tables import GIB, SECONDS_PER_HOUR, Table, counted, digits, wrapped
from zeropods.tasks import CAUSAL_SCRIPT, T5_SCRIPT

TIGHT_MARK = "~"
COMMAND_COLUMNS = 74
"""Columns of a line of a command, which with its indent and the backslash after it fits 80."""
T5_DATA = "wikisql_tok_dataset"
CAUSAL_DATA = "squad"
"""Folders of data that the scripts take where none is named."""
NOT_TRAINED = "This is planned only: the project does not train so yet."
BITS_PER_BYTE = 8
LEAST_OF_TEN_GIGABITS = 7
"""Gbit/s above which a pod's link is called one of 10 Gbit/s, as its wire is: programs reach 7 to
10 of them."""


@dataclass(frozen=True)
class AdviceReport:
    """What `zeropods plan` shows at first sight."""

    request: Request
    advice: Advice
    given: Collection[str] = ()
    """Names of the fields of the request and of its machines that a flag gave, or a probe
    measured; all others are assumed."""
    within_hours: float | None = None
    """Most hours of the whole training for the cheapest way; None where nobody gave any."""

    def to_text(self) -> str:
        """The verdict, what fits, the best and the cheapest, what was assumed, and the command,
        wrapped for the terminal."""
        advice = self.advice
        parts = [wrapped(f"{self.title}: {advice.verdict}")]
        if advice.ways:
            parts.append(str(self.table()).rstrip("\n"))
        sentences = [*self.sentences(), *self.assumptions()]
        parts.append("\n".join(wrapped(sentence) for sentence in sentences))
        if self.request.remark:
            parts.append(wrapped(f"Note: {self.request.remark}."))
        command = self.launch_command()
        if command:
            parts.append(command)
        hint = "All techniques: --all; each term: --formulas; other machines: --what-if"
        parts.append(wrapped(hint))
        return "\n\n".join(parts)

    @property
    def title(self) -> str:
        """The job and the machines, in a line."""
        request = self.request
        # A causal model has one length, an encoder-decoder those of source and target.
        tokens = request.seq_length or f"{request.source_length} + {request.target_length}"
        machines = request.machines
        pods = counted(machines.pods, "pod")
        gpus = f"{machines.slots} x {machines.gpu}"
        if "gpu" not in self.given and "gpu_memory_bytes" in self.given:
            # The name is that of the default GPU, whose memory is another.
            gpus = counted(machines.slots, "GPU")
        gpu_size = f"{request.gpu_memory_bytes / GIB:.4g} GiB"
        return f"{request.model}, rows of {tokens} tokens, on {pods} of {gpus} ({gpu_size} each)"

    def table(self) -> Table:
        """A table of the ways that fit, the fastest first."""
        lines = []
        for way in self.advice.ways:
            estimate = way.estimate
            work = estimate.work
            mark = TIGHT_MARK if estimate.verdict == TIGHT else ""
            batch = f"{work.batch_size}"
            if work.gradient_accumulation > 1:
                batch = f"{batch}x{work.gradient_accumulation}"
            line = {
                "technique": estimate.technique.name,
                "checkpointing": "yes" if work.checkpointing else "no",
                "memory (GiB)": f"{mark}{estimate.memory.device_bytes / GIB:.1f}",
                "host (GiB)": f"{estimate.host_bytes / GIB:.1f}",
                "batch size (rows)": batch,
                "step (s)": digits(estimate.time.seconds),
                "samples/s": digits(estimate.samples_per_second),
            }
            lines.append(line)
        return Table.of(lines, self._heading())

    def _heading(self) -> str:
        """What all lines of the table have in common."""
        precisions = {way.estimate.work.precision for way in self.advice.ways}
        names = " or ".join(sorted(name.upper() for name in precisions))
        return f"What fits, in {names}, the fastest first"

    def sentences(self) -> list[str]:
        """How to read the table; what to choose; where nothing fits, what would."""
        advice = self.advice
        sentences = []
        otherwise = ""
        if advice.verdict == NO:
            sentences.append("Nothing that was asked for fits.")
            # The best and the cheapest way may have another batch or checkpointing.
            otherwise = " otherwise"
        ways = advice.ways
        if any(way.estimate.work.gradient_accumulation > 1 for way in ways):
            sentences.append("A batch of 8x4 is 8 rows a pass and 4 passes a step.")
        if any(way.estimate.verdict == TIGHT for way in ways):
            within = f"within the plan's error of {MEMORY_ERROR:.0%}"
            sentences.append(f"{TIGHT_MARK}: TIGHT, {within}; measure it before you rely on it.")
        if advice.best is not None:
            sentences.append(f"Best{otherwise}: {self._best(advice.best)}")
        if advice.cheapest is not None:
            sentences.append(f"Cheapest{otherwise}: {_cheapest(advice.cheapest)}")
        elif self.within_hours is not None:
            sentences.append(f"No way that fits ends within {self.within_hours:g} h.")
        for change in advice.changes:
            fits = "it fits"
            if change.way.estimate.verdict == TIGHT:
                fits = "it is a tight fit"
            sentence = f"With {change.what} {fits}: {described(change.way.estimate)}."
            if change.way.request.planned_only:
                sentence = f"{sentence} {NOT_TRAINED}"
            sentences.append(sentence)
        if advice.verdict == NO and not advice.changes:
            sentences.append("No other technique, batch, precision, GPU or number of pods would.")
        return sentences

    def _best(self, way: Way) -> str:
        """The best way, how fast it is, and how many rows its steps have."""
        estimate = way.estimate
        tight = ", TIGHT" if estimate.verdict == TIGHT else ""
        speed = f"{digits(estimate.samples_per_second)} samples/s"
        memory = f"{estimate.memory.device_bytes / GIB:.1f} GiB of a GPU{tight}"
        sentence = f"{described(estimate)}: {speed}, {memory}."
        if self.request.global_batch is None:
            step = f"Its steps have {counted(way.step_rows, 'row')}"
            sentence = f"{sentence} {step}; --global-batch N keeps another number."
        return sentence

    # What was assumed, where it is used.

    def assumptions(self) -> list[str]:
        """A sentence with the speeds that nobody gave and that the times shown depend on, and one
        where the memory of a host was not checked; none where nothing was assumed."""
        advice = self.advice
        shown_ways = [*advice.ways, *(change.way for change in advice.changes)]
        for chosen in (advice.best, advice.cheapest):
            if chosen is not None:
                shown_ways.append(chosen)
        estimates = [way.estimate for way in shown_ways]
        if not estimates:
            return []
        sentences = []
        assumed_speeds = self._assumed_speeds(estimates)
        if assumed_speeds:
            sentences.append(f"Times assume {', '.join(assumed_speeds)}.")
        offloads = any(estimate.technique.offloads for estimate in estimates)
        if offloads and self.request.host_memory_bytes is None:
            sentences.append("Host memory was not checked (no --host-memory).")
        return sentences

    def _assumed_speeds(self, estimates: Sequence[Estimate]) -> list[str]:
        """The speeds that these estimates depend on and that nobody gave, each with its flag.

        Args:
            estimates: those that are shown, on any number of pods.
        """
        machines = self.request.machines
        assumed = []
        # Either flag says how fast the GPU is.
        if not {"gpu", "flops"} & set(self.given):
            assumed.append(f"the speed of an {machines.gpu} (no --gpu)")
        crosses_network = any(estimate.pods > 1 for estimate in estimates)
        if crosses_network and "bandwidth" not in self.given:
            network = _network_text(machines.bandwidth)
            assumed.append(f"a network of {network} between pods (no --bandwidth)")
        stays_in_pod = any(estimate.pods == 1 and estimate.slots > 1 for estimate in estimates)
        if stays_in_pod and machines.peer_bandwidth is None:
            assumed.append("PCIe between a pod's GPUs (no --peer-bandwidth)")
        uses_pcie = stays_in_pod or any(estimate.technique.offloads for estimate in estimates)
        if uses_pcie and "pcie_bandwidth" not in self.given:
            gigabytes = machines.host_link / GIGA
            assumed.append(f"PCIe of {gigabytes:.3g} GB/s (no --pcie-bandwidth)")
        return assumed

    # How to run it.

    def launch_command(self) -> str:
        """The command that runs the best way, under a line that says with which configuration; a
        sentence where there is no such command; empty where nothing fits or the way is planned
        only."""
        way = self.advice.best
        # `to_text` shows the request's remark, which says what is planned only.
        if way is None or way.request.planned_only:
            return ""
        technique = way.estimate.technique
        if technique.least_slots > way.estimate.slots:
            least = counted(technique.least_slots, "process")
            reason = f"a launch refuses it on pods of fewer than {least}"
            return wrapped(f"{technique.name}: {reason}, where it divides nothing.")
        words = launch_words(way.request, way)
        if words is None:
            return wrapped(why_no_command(self.request.model))
        introduction = "Run it without a DeepSpeed configuration:"
        file = technique.file
        if file is not None:
            introduction = f"Run it by {_short_path(file)}:"
            bucket = self.request.zero.reduce_elements
            # The file has the default bucket: a plan of another one holds for a changed copy only.
            if bucket != ZeroSettings().reduce_elements:
                changed_key = f"reduce_bucket_size {bucket}"
                introduction = f"Run it by {_short_path(file)}, in a copy with {changed_key}:"
        return f"{wrapped(introduction)}\n\n{_command_in_lines(words)}"


def _network_text(bytes_per_second: float) -> str:
    """The speed of a network by its usual name, that of its wire, where it is one of 10 Gbit/s."""
    gigabits = BITS_PER_BYTE * bytes_per_second / GIGA
    if LEAST_OF_TEN_GIGABITS < gigabits <= 10:
        return "10 Gbit/s"
    return f"{gigabits:.3g} Gbit/s"


def described(estimate: Estimate) -> str:
    """The way of an estimate in words: `zero3 with checkpointing in BF16, 8 rows x 4 passes on 2
    pods of 4 processes`."""
    work = estimate.work
    text = estimate.technique.name
    if work.checkpointing:
        text = f"{text} with checkpointing"
    batch = counted(work.batch_size, "row")
    if work.gradient_accumulation > 1:
        batch = f"{batch} x {work.gradient_accumulation} passes"
    where = f"{counted(estimate.pods, 'pod')} of {counted(estimate.slots, 'process')}"
    if estimate.pods * estimate.slots == 1:
        where = "one GPU"
    return f"{text} in {work.precision.upper()}, {batch} on {where}"


def _cheapest(way: Way) -> str:
    """The cheapest way, how long it takes, and what it costs where a price was given."""
    estimate = way.estimate
    # The search finds a cheapest way only where the length of the training is known.
    hours = (estimate.total_seconds or 0.0) / SECONDS_PER_HOUR
    sentence = f"{described(estimate)}: {digits(hours)} h"
    if estimate.cost is not None:
        sentence = f"{sentence}, cost {estimate.cost:.2f}"
    return f"{sentence}."


def launch_words(request: Request, way: Way, data: str | None = None) -> list[str] | None:
    """The words of the `zeropods launch` that trains in this way; None where no script finds the
    model by the name that the plan has, for which `why_no_command` gives the reason.

    Args:
        request: says the model.
        way: says everything else.
        data: the folder of the data, or a name that the script knows; if not given, the script's
            own default, written out.
    """
    estimate = way.estimate
    work = estimate.work
    model = model_to_train(request.model)
    if model is None:
        return None
    words = ["zeropods", "launch"]
    if estimate.pods == 1:
        words += ["--launcher", "none", "--slots", str(estimate.slots)]
    else:
        words += ["--num-pods", str(estimate.pods)]
    if work.shape.is_decoder_only:
        words += ["--", CAUSAL_SCRIPT, "--model_name_or_path", model, "--data", data or CAUSAL_DATA]
        words += ["--max_seq_length", str(work.tokens), "--attn_implementation", work.attention]
    else:
        words += ["--", T5_SCRIPT, "--model_id", model]
        words += ["--dataset_path", data or T5_DATA]
    if model in (*T5_TINY, *CAUSAL_TINY):
        # Our own models have no pretrained weights.
        words += ["--init", "random"]
    for name, value in estimate.technique.flags.items():
        if value is not None:
            text = _short_path(value) if isinstance(value, Path) else str(value)
            words += [f"--{name}", text]
    words += ["--precision", work.precision]
    words += ["--per_device_train_batch_size", str(work.batch_size)]
    words += ["--gradient_accumulation_steps", str(work.gradient_accumulation)]
    words += ["--gradient_checkpointing", str(work.checkpointing)]
    return words


def model_to_train(model: str) -> str | None:
    """The name by which a training script finds the model of a plan: a hub id for a known name, a
    folder with weights; None for a configuration without weights, and for a tuned model without its
    organisation.

    Args:
        model: what `--model` of a plan takes: a name, a hub id, a folder or a configuration file.
    """
    path = Path(model)
    if path.is_file():
        path = path.parent
    if path.is_dir():
        # A run keeps its model in `model`.
        for folder in (path / "model", path):
            if has_weights(folder):
                return str(folder)
        return None
    try:
        return hub_id(model)
    except UserError:
        # None of the known names: the training script looks it up on the hub.
        return model


def why_no_command(model: str) -> str:
    """Why no script finds a model by its name, in a sentence."""
    if Path(model).exists():
        reason = "a configuration alone has no weights, so there is no command to train it"
    else:
        reason = f"for the command to train it give its hub id, --model ORGANISATION/{model}"
    return f"{model}: {reason}."


def _short_path(path: Path) -> str:
    """A path from the working folder where it lies below that, else the whole path."""
    here = Path.cwd()
    if path.is_relative_to(here):
        return str(path.relative_to(here))
    return str(path)


def _command_in_lines(words: list[str]) -> str:
    """A command as text to paste into a shell, in lines that fit a narrow terminal; a flag and its
    value stay together."""
    pieces: list[str] = []
    for word in words:
        begins_piece = word.startswith("--") or word in (CAUSAL_SCRIPT, T5_SCRIPT)
        if begins_piece or not pieces:
            pieces.append(shlex.quote(word))
        else:
            pieces[-1] = f"{pieces[-1]} {shlex.quote(word)}"
    lines = pieces[:1]
    for piece in pieces[1:]:
        longer_line = f"{lines[-1]} {piece}"
        if len(longer_line) > COMMAND_COLUMNS:
            lines.append(piece)
        else:
            lines[-1] = longer_line
    return " \\\n    ".join(lines)
