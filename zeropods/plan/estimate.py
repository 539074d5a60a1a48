"""A plan: the checked request, and for each technique whether it fits, the largest batch, time and
cost."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from zeropods.errors import UserError
from zeropods.plan.facts import shape_for
from zeropods.plan.gpus import (
    GIGA,
    is_ambiguous,
    is_before_ampere,
    known_gpus,
    memory_bytes,
    names_near,
    workspace_bytes,
)
from zeropods.plan.machines import Machines, StepTime, step_time
from zeropods.plan.memory import PlannedMemory, plan_memory
from zeropods.plan.methods import (
    ADAMW,
    ADAPTERS,
    ALL_LINEAR,
    FP32_MASTERS,
    LOSSES,
    MASTERS,
    OF_LABELS,
    OPTIMIZERS,
    PLANNED_ONLY,
    Method,
    planned_techniques,
)
from zeropods.plan.terms import total
from zeropods.plan.workload import ATTENTIONS, Shape, Workload, ZeroSettings
from zeropods.tables import GIB, SECONDS_PER_HOUR, counted, nearest_multiples
from zeropods.techniques import HPZ, TECHNIQUES, Technique

BOTH, ALL = "both", "all"
FITS, TIGHT, NO = "FITS", "TIGHT", "NO"
"""Verdicts on memory: enough of it even where a run needs more than planned by the plan's error;
enough or too little within that error; too little."""
MEMORY_ERROR = 0.08
"""The plan's error of memory, as a share, where no runs on the GPU are known: on an H200 the
measured peaks were 0.92 to 1.08 of the planned ones (docs/plan.md)."""
WEIGHTS, GRADIENTS = "weights", "gradients"
QUANTIZED = (WEIGHTS, GRADIENTS)
"""What ZeRO++ can send quantised, as INT8 and as INT4."""
NVME_TECHNIQUE = "zero3_offload"
"""The technique whose optimizer may lie on a disk: DeepSpeed offloads no other's there."""
MOST_GLOBAL_BATCH = 2**31 - 1
"""As many as the flags of a training script allow (`train.flags.MOST_ROWS`)."""
MAY_BE_ZERO = (
    "gradient_checkpointing",
    "dropout",
    "latency_seconds",
    "launch_seconds",
    "price_per_hour",
    "trust_remote_code",
)
"""Fields of a request and of its machines that may be 0, or False; all others are more where they
are numbers."""
KINDS = {False: "an encoder-decoder", True: "a causal model"}
DEFAULTS: dict[bool, dict[str, int | None]] = {
    False: {"batch_size": 32, "source_length": 96, "target_length": 96, "attention": None},
    True: {
        "batch_size": 4,
        "seq_length": 512,
        "label_length": None,
        "attention": None,
        "dropout": None,
    },
}
"""Fields that differ between kinds of model, with their defaults, keyed by whether source and
target are one row: a field that only the other kind has is refused."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A model, a batch and machines; for a causal model, attention and checkpointing may be
    compared.

    `request_for` makes one with the defaults of its model. Memory is in bytes, rates are per
    second.
    """

    model: str
    """Name of a known model, with or without an organisation before it; or a hub id, a folder or a
    `config.json`."""
    trust_remote_code: bool = False
    """Whether the model's own code may run."""
    batch_size: int
    """Rows per pass of one process."""
    gradient_accumulation: int = 1
    """Forward and backward passes per optimizer step."""
    global_batch: int | None = None
    """Rows of all processes in an optimizer step, which say how many passes it takes; None where
    `gradient_accumulation` does."""
    precision: str = "fp32"
    machines: Machines = field(default_factory=Machines)
    gpu_memory_bytes: int = 40 * GIB
    host_memory_bytes: int | None = None
    """Host memory of a pod, for all its processes; None: not checked."""
    zero: ZeroSettings = field(default_factory=ZeroSettings)
    techniques: tuple[str, ...] = ()
    """Names of the techniques to plan; all if it is empty."""
    price_per_hour: float | None = None
    """Price of one pod, in any currency."""
    steps: int | None = None
    """Optimizer steps of the whole training on all pods; a technique with fewer rows per step takes
    more of them."""
    samples: int | None = None
    """Rows of the training set; given with `epochs` in place of `steps`."""
    epochs: float = 1.0
    gradient_checkpointing: bool | str = False
    """True, False, or `both` for a causal model."""
    source_length: int | None = None
    """T5: tokens per row, padding included."""
    target_length: int | None = None
    seq_length: int | None = None
    """Causal: tokens per row, padding included."""
    label_length: int | None = None
    """Causal: tokens per row that carry a loss; all but the first if not given, one of an
    encoder-only model."""
    attention: str | None = None
    """One of `plan.workload.ATTENTIONS` or, for a causal model, `all` for every one that the family
    has at this precision on this GPU; if not given, `sdpa`, or `eager` for a family without it."""
    dropout: bool | None = None
    """Causal: whether there is dropout; if not given, as the family was published: GPT-2 has it."""
    quantized: str | None = None
    """What ZeRO++ sends quantised: one of `QUANTIZED`, or both with a comma between them."""
    masters: str = FP32_MASTERS
    optimizer: str = ADAMW
    loss: str = OF_LABELS
    adapter: str | None = None
    lora_rank: int = Method().lora_rank
    lora_targets: str = ALL_LINEAR
    """These six are the fields of a `Method`; all but the usual values are planned only."""

    def __post_init__(self) -> None:
        fault = next(self._faults(), None)
        if fault is not None:
            raise UserError(fault)

    def _faults(self) -> Iterator[str]:
        """What is wrong with the request, one fault after the other."""
        if self.precision not in self.shape.precisions:
            yield f"--precision {self.precision}; expected {' or '.join(self.shape.precisions)}"
        for name, number in {**vars(self), **vars(self.machines)}.items():
            if isinstance(number, int | float) and number <= 0 and name not in MAY_BE_ZERO:
                yield f"{name} {number:g}; expected more than 0"
        if self.samples is None and self.epochs != 1:
            yield f"--epochs {self.epochs:g} without --samples; give both, or --steps"
        if self.steps is not None and self.samples is not None:
            yield f"--steps {self.steps} and --samples {self.samples}; give one of them"
        yield from self._faults_of_global_batch()
        yield from self._faults_of_checkpointing()
        yield from self._faults_of_lengths()
        yield from self._faults_of_method()
        yield from self._faults_of_quantized()
        yield from self._faults_of_nvme()
        if self.precision == "bf16" and is_before_ampere(self.machines.gpu):
            other = "fp16" if self.shape.is_decoder_only else "fp32"
            without = f"{self.machines.gpu} has no BF16 arithmetic"
            yield f"--precision bf16: {without}; give --precision {other}"
        yield from self._faults_of_attention()

    def _faults_of_attention(self) -> Iterator[str]:
        if self.attention == ALL and not self.shape.is_decoder_only:
            remedy = f"give {' or '.join(self.shape.attentions)}"
            yield f"--attention all: {self.model} is {KINDS[False]}; {remedy}"
        for name in self.attentions:
            fault = self._attention_fault(name)
            if fault is not None:
                yield fault

    def _faults_of_global_batch(self) -> Iterator[str]:
        """Why the rows of a step cannot be made of whole passes, or are too many."""
        rows = self.global_batch
        if rows is None or self.batch_size < 1:
            return
        if rows > MOST_GLOBAL_BATCH:
            yield f"--global-batch {rows}; expected at most {MOST_GLOBAL_BATCH}"
        if self.gradient_accumulation != 1:
            flags = f"--gradient-accumulation {self.gradient_accumulation} --global-batch {rows}"
            yield f"{flags}: the passes follow from the rows; leave one of them out"
        processes = self.machines.pods * self.machines.slots
        if set(self.techniques) == {"none"}:
            # It runs one process. Beside other techniques it can make what all their processes can.
            processes = 1
        rows_of_a_pass = self.batch_size * processes
        if rows % rows_of_a_pass == 0:
            return
        shared = f"{counted(processes, 'process')} of {counted(self.batch_size, 'row')} a pass"
        remedy = f"give {nearest_multiples(rows, rows_of_a_pass)}"
        if self.batch_size > 1:
            remedy = f"{remedy}, or fewer rows by --batch-size"
        yield f"--global-batch {rows}: {shared} cannot reach it; {remedy}"

    def passes_of(self, processes: int) -> int:
        """Passes of an optimizer step where so many processes train; at least one, whose rows may
        then be more than `global_batch`."""
        if self.global_batch is None:
            return self.gradient_accumulation
        return max(1, self.global_batch // (self.batch_size * processes))

    def _faults_of_checkpointing(self) -> Iterator[str]:
        checkpointing = self.gradient_checkpointing
        if checkpointing not in (True, False, BOTH):
            yield f"--gradient-checkpointing {checkpointing}; expected True, False or {BOTH}"
        if checkpointing == BOTH and not self.shape.is_decoder_only:
            kind = KINDS[False]
            yield f"--gradient-checkpointing both: {self.model} is {kind}; give True or False"

    def _faults_of_method(self) -> Iterator[str]:
        expected = {
            "masters": MASTERS,
            "optimizer": OPTIMIZERS,
            "loss": LOSSES,
            "adapter": (None, *ADAPTERS),
        }
        for name, values in expected.items():
            value = getattr(self, name)
            if value not in values:
                names = ", ".join(other for other in values if other is not None)
                yield f"--{name} {value}; expected one of {names}"
        flags_with_bf16 = []
        if self.masters != FP32_MASTERS:
            flags_with_bf16.append(f"--masters {self.masters}")
        if self.adapter is not None:
            flags_with_bf16.append(f"--adapter {self.adapter}")
        if self.precision != "bf16":
            for flag in flags_with_bf16:
                yield f"{flag}: is planned of weights in BF16; give --precision bf16"
        yield from self._faults_of_adapter()
        generates_all = self.shape.is_decoder_only and not self.shape.is_encoder_only
        if self.loss != OF_LABELS and not generates_all:
            yield f"--loss {self.loss}: {self.model} is {kind_of(self.shape)}; leave it out"

    def _faults_of_quantized(self) -> Iterator[str]:
        if self.quantized is None:
            return
        # An empty text is shown in quotes.
        flag = f"--quantized {self.quantized or repr(self.quantized)}"
        names = self.quantized.split(",")
        is_any_twice = len(set(names)) < len(names)
        if is_any_twice or not set(names) <= set(QUANTIZED):
            yield f"{flag}; expected {QUANTIZED[0]}, {QUANTIZED[1]}, or both with a comma"
        if not any(map(_is_zeropp, self.techniques)):
            yield f"{flag}: is of ZeRO++; give --technique zero3++ too"

    def _faults_of_nvme(self) -> Iterator[str]:
        bandwidth = self.machines.nvme_bandwidth
        if bandwidth is not None and NVME_TECHNIQUE not in self.techniques:
            flag = f"--nvme-bandwidth {bandwidth / GIGA:g}"
            yield f"{flag}: is of ZeRO-3 with offload; give --technique {NVME_TECHNIQUE} too"

    def _faults_of_adapter(self) -> Iterator[str]:
        if self.adapter is None:
            for name in ("lora_rank", "lora_targets"):
                value = getattr(self, name)
                if value != getattr(Method(), name):
                    yield f"{_flag(name)} {value}: needs --adapter too; give lora or qlora"
        has_blank = self.lora_targets.split() != [self.lora_targets]
        has_empty_name = "" in self.lora_targets.split(",")
        if has_blank or has_empty_name:
            flag = f"--lora-targets {self.lora_targets!r}"
            yield f"{flag}: has a blank or an empty name; give names such as q_proj,v_proj"

    def _faults_of_lengths(self) -> Iterator[str]:
        shape = self.shape
        tokens, labels = self.lengths
        if shape.is_decoder_only and labels > tokens:
            yield f"--label-length {labels}; expected at most --seq-length {tokens}"
        if shape.family == "gpt2" and shape.positions and tokens > shape.positions:
            yield f"--seq-length {tokens}; {self.model} has {shape.positions} positions"

    @property
    def shape(self) -> Shape:
        """The model's shape."""
        return shape_for(self.model, self.trust_remote_code)

    @property
    def method(self) -> Method:
        """Masters, optimizer, loss and adapter."""
        return Method(
            masters=self.masters,
            optimizer=self.optimizer,
            loss=self.loss,
            adapter=self.adapter,
            lora_rank=self.lora_rank,
            lora_targets=self.lora_targets,
        )

    def with_techniques(self, names: tuple[str, ...], **values: Any) -> Request:
        """The same request for these techniques and with other values, without the settings that
        none of these techniques has; no names stand for all techniques, as usual.

        Raises:
            UserError: there cannot be such a request.
        """
        values["techniques"] = names
        if not any(map(_is_zeropp, names)):
            values["quantized"] = None
        if NVME_TECHNIQUE not in names:
            machines = values.get("machines", self.machines)
            values["machines"] = replace(machines, nvme_bandwidth=None)
        return replace(self, **values)

    @property
    def planned_only(self) -> list[str]:
        """The flags of what is planned, and cannot be trained with this project yet."""
        flags = self.method.planned_only
        if self.shape.is_encoder_only:
            flags.append(f"--model {self.model}")
        trains_with_sdpa = not self.shape.is_decoder_only and "sdpa" in self.shape.attentions
        if trains_with_sdpa and self.attention == "eager":
            flags.append("--attention eager")
        if self.machines.nvme_bandwidth is not None:
            flags.append(f"--nvme-bandwidth {self.machines.nvme_bandwidth / GIGA:g}")
        if self.quantized is not None:
            flags.append(f"--quantized {self.quantized}")
        for technique in PLANNED_ONLY:
            if technique.name in self.techniques:
                flags.append(f"--technique {technique.name}")
        return flags

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens per row, and how many of them carry a loss; for a T5, tokens of source and of
        target."""
        if self.seq_length is None:
            return self.source_length or 0, self.target_length or 0
        labels = self.label_length
        if labels is None and self.shape.is_encoder_only:
            labels = 1
        if labels is None:
            labels = max(1, self.seq_length - 1)
        return self.seq_length, labels

    @property
    def tokens(self) -> int:
        """Tokens per row, of both sides, padding included."""
        return sum(self.lengths) if self.seq_length is None else self.seq_length

    @property
    def remark(self) -> str | None:
        """What a reader has to know about the request, in one line; None where there is nothing."""
        if self.planned_only:
            flags = ", ".join(self.planned_only)
            return f"{flags}: planned only, this project does not train so yet"
        shape = self.shape
        if shape.is_decoder_only and shape.positions is not None and self.tokens > shape.positions:
            trained = f"{self.model} was trained on rows of {shape.positions} tokens"
            return f"{trained}; this plan assumes {self.tokens}"
        if shape.experts:
            used = f"each token uses {shape.experts} experts"
            return f"{used}: memory is planned for all of them, time for the active ones"
        return None

    @property
    def attentions(self) -> list[str]:
        """The kinds of attention to compare: the one that is asked for, all that can run, or the
        default."""
        known = self.shape.attentions
        if self.attention == ALL:
            return [name for name in known if not self._attention_fault(name)]
        if self.attention is not None:
            return [self.attention]
        return ["sdpa"] if "sdpa" in known else ["eager"]

    def _attention_fault(self, name: str) -> str | None:
        """Why a kind of attention cannot run: its name is unknown, the family lacks it, or it is
        FlashAttention-2 in FP32 or on an older GPU; None where it can."""
        known = self.shape.attentions
        if name not in ATTENTIONS:
            return f"--attention {name}; expected {', '.join(ATTENTIONS)} or all"
        if name not in known:
            supported = f"{self.shape.family} supports only {' and '.join(known)}"
            return f"--attention {name}: {supported}; give --attention {known[-1]}"
        if name == "flash_attention_2" and self.precision == "fp32":
            remedy = "give --precision bf16 or --attention sdpa"
            return f"--attention flash_attention_2: does not support fp32; {remedy}"
        if name == "flash_attention_2" and is_before_ampere(self.machines.gpu):
            remedy = "give --attention sdpa"
            return f"--attention flash_attention_2: needs an Ampere or newer GPU; {remedy}"
        return None


def request_for(model: str, **values: Any) -> Request:
    """The request with these fields, and the defaults of its model for the others.

    Raises:
        UserError: the model is unknown, a field is wrong, or a field belongs to the other kind of
            model.
    """
    shape = shape_for(model, values.get("trust_remote_code", False))
    for name, value in values.items():
        if name in _foreign_fields(shape):
            kind = kind_of(shape)
            raise UserError(f"{_flag(name)} {value}: {model} is {kind}; {_remedy(name, shape)}")
    machines = values.get("machines", Machines())
    memory = values.get("gpu_memory_bytes", memory_bytes(machines.gpu))
    if memory is None:
        raise UserError(_unknown_gpu(machines.gpu))
    fields = {**DEFAULTS[shape.is_decoder_only], **values, "gpu_memory_bytes": memory}
    step_rows = values.get("global_batch")
    if step_rows and "batch_size" not in values:
        is_alone = set(values.get("techniques", ())) == {"none"}
        processes = 1 if is_alone else machines.pods * machines.slots
        fields["batch_size"] = _rows_of_a_pass(step_rows, processes, fields["batch_size"])
    return Request(model=model, **fields)


def kind_of(shape: Shape) -> str:
    """The kind of a model, in words."""
    return "an encoder-only model" if shape.is_encoder_only else KINDS[shape.is_decoder_only]


def _rows_of_a_pass(step_rows: int, processes: int, most: int) -> int:
    """The most rows of a pass, up to `most`, with which the processes reach the rows of a step in
    whole passes; 1 where no number of rows does."""
    if step_rows % processes != 0:
        return 1
    rows_of_a_process = step_rows // processes
    rows = min(most, rows_of_a_process)
    while rows_of_a_process % rows != 0:
        rows -= 1
    return rows


def _flag(name: str) -> str:
    """The flag of a field of the request."""
    return f"--{name.replace('_', '-')}"


def _remedy(name: str, shape: Shape) -> str:
    """What to do about a field that a model of this kind does not have."""
    if not name.endswith("_length"):
        return "leave it out"
    lengths = [field for field in DEFAULTS[shape.is_decoder_only] if field.endswith("_length")]
    return f"give {' and '.join(map(_flag, lengths))}"


def _unknown_gpu(gpu: str) -> str:
    """The message about a GPU of which not even the memory is known."""
    near = names_near(gpu)
    if is_ambiguous(gpu):
        return f"--gpu {gpu}: may be {' or '.join(near)}; give one of these names"
    unknown = f"--gpu {gpu}: unknown GPU; give --gpu-memory and --flops"
    if near:
        return f"{unknown}, or a name near to it: {', '.join(near)}"
    return f"{unknown}, or one of {known_gpus()}"


def _foreign_fields(shape: Shape) -> set[str]:
    """Fields that a model of this kind does not have."""
    return DEFAULTS[not shape.is_decoder_only].keys() - DEFAULTS[shape.is_decoder_only].keys()


# The plan of a request.


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One technique, in one way of training, on the machines of a request."""

    work: Workload
    pods: int
    """Number of pods that it uses: `none` is one process on one pod, however many there are."""
    slots: int
    memory: PlannedMemory
    """Memory of one process."""
    needed_bytes: int
    """Bytes that must be available: where runs of this kind are known, the amount that 95 % of them
    do not exceed."""
    fits: bool
    verdict: str
    """`FITS`, `TIGHT` or `NO`: `fits`, with regard to the plan's error."""
    largest_batch_size: int | None
    """Most rows per process that fit; None where not even one fits."""
    time: StepTime
    samples_per_second: float
    total_seconds: float | None
    """Seconds for the steps or samples that were asked for, without evaluation and saving."""
    cost: float | None
    cost_per_million_samples: float | None
    tokens_per_second: float
    """Tokens per second, padding included."""
    intervals: dict[str, tuple[float, float] | None] = field(default_factory=dict)
    """Ranges of `memory`, in bytes, and of `time`, in seconds of a step, of most runs of this kind;
    None if unknown."""

    @property
    def technique(self) -> Technique:
        """The technique."""
        return self.work.technique

    @property
    def labels(self) -> dict[str, Any]:
        """Labels that tell this way of training from the request's others; empty for a model that
        has only one."""
        if not self.work.shape.is_decoder_only:
            return {}
        return {
            "attention": self.work.attention,
            "gradient_checkpointing": self.work.checkpointing,
        }

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory of a pod."""
        return self.memory.host_bytes_of_pod(self.slots)

    def to_json(self) -> dict[str, object]:
        """The estimate as plain values; bytes are of one GPU, host bytes of one pod."""
        return {
            "technique": self.technique.name,
            **self.labels,
            "needed_bytes": self.needed_bytes,
            "fits": self.fits,
            "verdict": self.verdict,
            "largest_batch_size": self.largest_batch_size,
            "pods": self.pods,
            "slots": self.slots,
            "host_bytes": self.host_bytes,
            "nvme_bytes": self.slots * total(self.memory.nvme_terms),
            "samples_per_second": self.samples_per_second,
            "tokens_per_second": self.tokens_per_second,
            "total_seconds": self.total_seconds,
            "cost": self.cost,
            "cost_per_million_samples": self.cost_per_million_samples,
            "bytes": self.memory.parts(),
            "step_seconds": self.time.seconds,
            "intervals": self.intervals,
            "peak_allocated_bytes": self.memory.peak_allocated_bytes,
            **asdict(self.time),
            "terms": [asdict(term) for term in self.memory.terms],
            "host_terms": [asdict(term) for term in self.memory.host_terms],
            "nvme_terms": [asdict(term) for term in self.memory.nvme_terms],
        }


@dataclass(frozen=True)
class Plan:
    """All techniques of a request, each in all ways of training."""

    request: Request
    estimates: tuple[Estimate, ...]

    @property
    def best(self) -> Estimate | None:
        """The estimate that fits and trains most samples per second, the first of equal ones; None
        where none fits."""
        fitting = [estimate for estimate in self.estimates if estimate.fits]

        def rate(estimate: Estimate) -> float:
            # Compare only the digits that survive rounding: recomputation that hides behind the
            # network costs nothing.
            return float(f"{estimate.samples_per_second:.9g}")

        return max(fitting, key=rate, default=None)

    def to_json(self) -> dict[str, object]:
        """The plan as plain values; its request leaves out the fields of other models."""
        request = asdict(self.request)
        for name in _foreign_fields(self.request.shape):
            del request[name]
        best = self.best
        return {
            "request": request,
            "techniques": [estimate.to_json() for estimate in self.estimates],
            "best": None if best is None else best.technique.name,
            "best_labels": {} if best is None else best.labels,
            "remark": self.request.remark,
        }


class Span(NamedTuple):
    """The range in which runs of a kind lie: bytes of memory, or seconds of a step."""

    low: float
    high: float
    most: float
    """The value that 95 % of the runs of the kind do not exceed."""


SpanOfRuns = Callable[[Workload, str, float], Span | None]
"""What runs have shown: the range of runs of a workload's kind for which so much `memory` or `time`
is planned; None where it is not known."""


def plan(request: Request, span_of_runs: SpanOfRuns | None = None) -> Plan:
    """Estimate each technique with each kind of attention that is asked for, with gradient
    checkpointing, without, or both.

    Args:
        span_of_runs: what finished runs have shown of memory and time; where it is known, verdicts
            go by it in place of the plan's own error.

    Raises:
        UserError: a technique is unknown, no peak of the GPU is known, or the model cannot be
            trained in this way.
    """
    if request.gradient_checkpointing == BOTH:
        checkpointings = [False, True]
    else:
        checkpointings = [request.gradient_checkpointing is True]
    techniques = requested_techniques(request)
    estimates = []
    for attention in request.attentions:
        for checkpointing in checkpointings:
            for technique in techniques:
                work = workload_of(request, technique, attention, checkpointing=checkpointing)
                estimates.append(_estimate(request, work, span_of_runs))
    return Plan(request, tuple(estimates))


def workload_of(
    request: Request, technique: Technique, attention: str, *, checkpointing: bool
) -> Workload:
    """The workload of one process of a request, in one way of training."""
    tokens, labels = request.lengths
    processes = 1
    if not technique.is_alone:
        processes = request.machines.pods * request.machines.slots
    return Workload(
        shape=request.shape,
        batch_size=request.batch_size,
        tokens=tokens,
        labels=labels,
        precision=request.precision,
        checkpointing=checkpointing,
        technique=technique,
        ranks=processes,
        zero=zero_of(request, technique),
        gradient_accumulation=request.passes_of(processes),
        attention=attention,
        before_ampere=is_before_ampere(request.machines.gpu),
        dropout=request.dropout,
        method=request.method,
    )


def requested_techniques(request: Request) -> list[Technique]:
    """The techniques that are asked for, or all that are planned, in their usual order.

    Raises:
        UserError: a name is unknown, or the technique cannot train with the request's method.
    """
    return planned_techniques(request.techniques, request.method, request.machines.slots)


def zero_of(request: Request, technique: Technique) -> ZeroSettings:
    """The request's settings of ZeRO, with those that only a technique has: ZeRO-3 with offload may
    use a disk; ZeRO++ divides parameters a second time among a pod's processes, as
    `dsconfig/zero3++.json` has it, and quantises what is asked for."""
    is_on_nvme = request.machines.nvme_bandwidth is not None
    if technique.offloads and technique.divides_parameters:
        return replace(request.zero, on_nvme=is_on_nvme)
    if HPZ not in technique.keys:
        return request.zero
    names = (request.quantized or "").split(",")
    return replace(
        request.zero,
        secondary_ranks=request.machines.slots,
        quantizes_weights=WEIGHTS in names,
        quantizes_gradients=GRADIENTS in names,
    )


def _is_zeropp(name: str) -> bool:
    """Whether a technique of this name is ZeRO++."""
    return any(technique.name == name and HPZ in technique.keys for technique in TECHNIQUES)


def _estimate(request: Request, work: Workload, span_of_runs: SpanOfRuns | None) -> Estimate:
    """The estimate of one technique in one way of training.

    Args:
        work: the workload of one process.
        span_of_runs: as for `plan`.
    """
    machines = request.machines
    pods = 1 if work.technique.is_alone else machines.pods
    slots = 1 if work.technique.is_alone else machines.slots

    def fits(rows: int) -> bool:
        return is_planned_to_fit(request, replace(work, batch_size=rows), span_of_runs)

    need = _need(work, machines, span_of_runs)
    time = step_time(work, machines)
    span_of_time = None
    if span_of_runs is not None:
        span_of_time = span_of_runs(work, "time", time.seconds)
    rate = rows_per_step(work) / time.seconds
    seconds = total_seconds(request, work, time.seconds)
    cost = _cost(request, pods, rate, seconds)
    return Estimate(
        work=work,
        pods=pods,
        slots=slots,
        memory=need.memory,
        fits=fits(work.batch_size),
        verdict=verdict_of(request, work, span_of_runs),
        largest_batch_size=largest_batch_size(request, work, fits),
        time=time,
        samples_per_second=rate,
        total_seconds=seconds,
        cost=cost.total,
        cost_per_million_samples=cost.per_million_samples,
        tokens_per_second=rate * request.tokens,
        needed_bytes=round(need.needed_bytes),
        intervals={"memory": _ends_of(need.span), "time": _ends_of(span_of_time)},
    )


@dataclass(frozen=True)
class _Need:
    """The memory of a process, and how much must be available for it."""

    memory: PlannedMemory
    span: Span | None
    """The range of runs of this kind; None where too few are known."""
    needed_bytes: float
    """Bytes that must be available, as in `Estimate`."""


def _need(work: Workload, machines: Machines, span_of_runs: SpanOfRuns | None) -> _Need:
    """The memory that one process needs: as planned or, where runs of its kind are known, what is
    enough for most of them."""
    memory = plan_memory(work, workspace_bytes=workspace_bytes(machines.gpu))
    span = None
    if span_of_runs is not None:
        span = span_of_runs(work, "memory", memory.device_bytes)
    if span is None:
        return _Need(memory, None, memory.device_bytes)
    return _Need(memory, span, span.most)


def is_planned_to_fit(
    request: Request, work: Workload, span_of_runs: SpanOfRuns | None = None
) -> bool:
    """Whether a GPU and its host have the memory that is planned or, where runs of this kind are
    known, what is enough for most of them."""
    need = _need(work, request.machines, span_of_runs)
    return need.needed_bytes <= request.gpu_memory_bytes and _fits_host(request, work, need)


def _fits_host(request: Request, work: Workload, need: _Need) -> bool:
    """Whether a pod's processes fit into its host's memory, or that memory is not known."""
    if request.host_memory_bytes is None:
        return True
    slots = 1 if work.technique.is_alone else request.machines.slots
    return need.memory.host_bytes_of_pod(slots) <= request.host_memory_bytes


def verdict_of(request: Request, work: Workload, span_of_runs: SpanOfRuns | None = None) -> str:
    """Whether a workload fits a GPU and its host: `FITS`, `TIGHT` or `NO`.

    It fits where the GPU has the most memory that runs of its kind take, and is tight where it only
    has the least. `span_of_runs` says both; where it does not know, they are the planned bytes,
    more or less `MEMORY_ERROR`. Of the host's memory no error is known: too little of it is `NO`.
    """
    need = _need(work, request.machines, span_of_runs)
    if not _fits_host(request, work, need):
        return NO
    if need.span is None:
        least = (1 - MEMORY_ERROR) * need.needed_bytes
        most = (1 + MEMORY_ERROR) * need.needed_bytes
    else:
        least = need.span.low
        most = need.span.most
    if most <= request.gpu_memory_bytes:
        return FITS
    return TIGHT if least <= request.gpu_memory_bytes else NO


def rows_per_step(work: Workload) -> int:
    """Rows of all processes in an optimizer step."""
    return work.gradient_accumulation * work.batch_size * work.ranks


def total_seconds(request: Request, work: Workload, step_seconds: float) -> float | None:
    """Seconds of all steps; None where neither steps nor samples were asked for."""
    samples = _samples(request, work)
    if samples is None:
        return None
    steps_of_an_epoch = math.ceil(samples / rows_per_step(work))
    return request.epochs * steps_of_an_epoch * step_seconds


class _Cost(NamedTuple):
    """What training costs, in the currency of the price; None where that is not known."""

    total: float | None
    per_million_samples: float | None


def _cost(request: Request, pods: int, rate: float, seconds: float | None) -> _Cost:
    """The cost of these pods.

    Args:
        rate: samples per second.
        seconds: time of the whole training; None where it is not known.
    """
    if request.price_per_hour is None:
        return _Cost(None, None)
    price_per_second = pods * request.price_per_hour / SECONDS_PER_HOUR
    per_million_samples = price_per_second * 1_000_000 / rate
    if seconds is None:
        return _Cost(None, per_million_samples)
    return _Cost(price_per_second * seconds, per_million_samples)


def _samples(request: Request, work: Workload) -> int | None:
    """Rows of an epoch: `samples` or, where `steps` is given, the rows of all steps, which count as
    one epoch. None where neither is given."""
    if request.steps is None:
        return request.samples
    if request.global_batch is not None:
        return request.steps * request.global_batch
    # Not `work.ranks`: steps are counted on all pods, and a technique that trains in one process
    # takes more of them for the same rows.
    machines = request.machines
    return (
        request.steps
        * work.gradient_accumulation
        * work.batch_size
        * machines.pods
        * machines.slots
    )


def _ends_of(span: Span | None) -> tuple[float, float] | None:
    """The ends of a range; None for none."""
    return None if span is None else (span.low, span.high)


def largest(fits: Callable[[int], bool]) -> int | None:
    """The largest number for which `fits` holds, by bisection; None where not even 1 does.

    `fits` must hold for every number below one for which it holds, and must not hold for all
    numbers.
    """
    too_many = 1
    while fits(too_many):
        too_many *= 2
    # The last number that fitted; 0 where none did.
    enough = too_many // 2
    between = range(enough + 1, too_many)
    more = bisect_left(between, True, key=lambda number: not fits(number))
    most = enough + more
    return most if most > 0 else None


def largest_batch_size(request: Request, work: Workload, fits: Callable[[int], bool]) -> int | None:
    """The most rows of a pass for which `fits` holds: what `largest` finds, but quicker; None where
    not even 1 does."""
    if not fits(1):
        return None
    return _largest_near(_likely_rows(request, work), fits)


def _likely_rows(request: Request, work: Workload) -> int:
    """About as many rows of a pass as fit, at least 1: a straight line through the memory that two
    large numbers of rows take. With few rows, something else may be larger than what grows."""
    fewer = 512
    more = 1_024
    workspace = workspace_bytes(request.machines.gpu)
    bytes_of_fewer = plan_memory(
        replace(work, batch_size=fewer), workspace_bytes=workspace
    ).device_bytes
    bytes_of_more = plan_memory(
        replace(work, batch_size=more), workspace_bytes=workspace
    ).device_bytes
    bytes_of_a_row = max(1, bytes_of_more - bytes_of_fewer) / (more - fewer)
    # Less than 0 where even the smaller number is too many.
    left_bytes = request.gpu_memory_bytes / (1 + MEMORY_ERROR) - bytes_of_fewer
    return max(1, int(fewer + left_bytes / bytes_of_a_row))


def _largest_near(likely: int, fits: Callable[[int], bool]) -> int:
    """The largest number for which `fits` holds: what `largest` finds, but quicker where it is near
    a likely one. `fits` must hold for 1.

    It goes from the likely number in strides that double, until it has passed the largest; then it
    halves what is between the last number that fits and the first that does not.
    """
    enough = 1
    too_many: int | None = None
    stride = 1
    number = likely
    while too_many is None or too_many - enough > 1:
        if fits(number):
            enough = number
            number += stride
        else:
            too_many = number
            number -= stride
        stride *= 2
        if too_many is not None and not enough < number < too_many:
            number = (enough + too_many) // 2
    return enough
