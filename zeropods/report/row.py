"""What a summary knows of a run and of a row: its figures, its accuracy and its ratio to another
row, as typed values.

`formulas.py` computes the figures, `entry.py` the accuracy and `groups.py` the rest; `columns.py`
says how people read them, and docs/figures.md defines each. None stands for what was not measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zeropods.measure.record import RunConfig
from zeropods.tasks import TASKS, Measure, figures_of

CUSTOM_METRIC = "own_metrics."
"""Prefix of the key of a custom metric in the files of a report."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Every figure of a run, or of a row of repeats. The fields are the keys of a run in
    `summary.json` and `summary.csv`, in their order."""

    duration_seconds: float | None = None
    """Seconds from a process's start to its end, of the slowest rank; None for a resumed run."""
    steps: float | None = None
    """Number of optimizer steps."""
    train_seconds: float | None = None
    """Seconds of the optimizer steps, each in the last attempt that did it, of the slowest
    rank."""
    samples_per_second: float | None = None
    """Training samples/s of all ranks together, after warm-up."""
    tokens_per_second: float | None = None
    """Tokens/s without padding, of both sides."""
    padding_share: float | None = None
    """Share, of 1, of padding among all tokens that were computed."""
    evaluation_samples_per_second: float | None = None
    """Rows of the dev split / mean seconds of an evaluation."""
    start_seconds: float | None = None
    """Seconds from a process's start to its first step."""
    evaluate_seconds: float | None = None
    """Seconds of all evaluations together, of the slowest rank."""
    save_seconds: float | None = None
    """Seconds of all saving together, of the slowest rank."""

    precision_weights: str | None = None
    """Number format of the model's weights in the first step: `fp32`, `bf16` or `fp16`, or several
    of them."""
    precision_master_weights: str | None = None
    """Number format of the weights which the optimizer updates."""
    precision_optimizer_states: str | None = None
    """Number format of the moments of AdamW."""
    precision_gradients_sent: str | None = None
    """Number format of the gradients which are added up over the ranks; None with one rank."""
    precision_linear_output: str | None = None
    """Number format of what the linear layers return."""

    model_flops_per_second: float | None = None
    """FLOP/s that the model needs, without recomputation."""
    peak_flops_per_second: float | None = None
    """Peak FLOP/s of all the run's hardware at its precision."""
    peak_flops_kind: str | None = None
    """`published` or `measured matmul`."""
    peak_flops_run: str | None = None
    """Name of the run that measured this peak, maybe the run itself; None where it is published."""
    machines: int | None = None
    """Number of distinct machines of the ranks."""

    pod_memory_bytes: Sequence[float] | None = None
    """Peak memory of each pod in bytes, in pod order."""
    peak_memory_bytes: float | None = None
    """Peak memory of the pod that needed most, in bytes."""
    pod_state_bytes: Sequence[float] | None = None
    """Live parameters, gradients and optimizer states of each pod in bytes, in pod order."""
    pod_activation_bytes: float | None = None
    """Bytes of the activations of a pod's largest batch, by the plan."""
    memory_kind: str | None = None
    """Kind of the memory of pods and processes: `device-used`, `allocated` or `resident`."""
    process_peak_bytes: float | None = None
    """Peak memory of the process that needed most, in bytes."""
    process_mean_bytes: float | None = None
    """Mean over ranks of the means of their samples, in bytes."""
    process_minimum_bytes: float | None = None
    """The least sample of any rank, in bytes."""
    peak_device_used_bytes: float | None = None
    """Peak device-used memory of the rank that needed most, in bytes."""
    peak_reserved_bytes: float | None = None
    """The same of memory that the allocator reserved."""
    peak_allocated_bytes: float | None = None
    """The same of memory that the allocator gave out."""
    peak_resident_bytes: float | None = None
    """The same of the process's resident memory."""
    phase_kind: str | None = None
    """Kind of the peaks by phase: `allocated` on GPUs, `resident` on CPUs."""
    peak_load_bytes: float | None = None
    """Peak memory before the first step, of the rank that needed most, in bytes."""
    peak_first_step_bytes: float | None = None
    """The same within the first step."""
    peak_steady_bytes: float | None = None
    """The same within later steps."""
    peak_evaluate_bytes: float | None = None
    """The same within evaluations."""
    peak_save_bytes: float | None = None
    """The same while saving."""
    planned_kind: str | None = None
    """What is planned: `device-used` memory on GPUs, `live states` on CPUs."""
    planned_bytes: float | None = None
    """Planned bytes of that kind, of one rank."""
    measured_bytes: float | None = None
    """Measured bytes of that kind, of the rank that needed most."""

    utilization_percent_mean: float | None = None
    """Mean share of time in which the GPUs were busy, in percent, as the mean over ranks."""
    utilization_percent_p95: float | None = None
    """The 95th percentile of that share. This and the following percentiles are means over
    ranks."""
    memory_utilization_percent_mean: float | None = None
    """The mean for the GPUs' memory, in percent of time."""
    memory_utilization_percent_p95: float | None = None
    """The 95th percentile for the GPUs' memory, in percent of time."""
    power_watts_mean: float | None = None
    """Mean power of a GPU in watts."""
    power_watts_p95: float | None = None
    """The 95th percentile of that power in watts."""
    cpu_percent_mean: float | None = None
    """Mean use of the cores, in percent of all of them."""
    cpu_percent_p95: float | None = None
    """The 95th percentile of that use, in percent."""
    io_wait_percent_mean: float | None = None
    """Mean share of time in which the cores waited for input or output, in percent."""
    io_wait_percent_p95: float | None = None
    """The 95th percentile of that share, in percent."""
    train_loss: float | None = None
    """The last training loss, in nats per token."""
    eval_loss: float | None = None
    """The last loss on the dev split, in nats per token."""
    energy_joules: float | None = None
    """Energy of all GPUs from start to end, in joules."""

    model_flops_utilization: float | None = None
    """Model FLOP/s / peak FLOP/s, a share of 1."""
    measured_to_planned: float | None = None
    """Measured bytes / planned bytes."""
    energy_kwh: float | None = None
    """The same energy in kilowatt-hours."""
    plan_peak_planned_bytes: float | None = None
    """Peak memory of a process in bytes by `zeropods plan`."""
    plan_peak_low_bytes: float | None = None
    """Lower end of the plan's interval; None where too few runs of the kind are known."""
    plan_peak_high_bytes: float | None = None
    """Upper end of the plan's interval."""
    plan_peak_measured_bytes: float | None = None
    """Measured peak memory of a process in bytes, of the kind that this plan is about."""
    plan_step_planned_seconds: float | None = None
    """Seconds of a step by `zeropods plan`."""
    plan_step_low_seconds: float | None = None
    """Lower end of the plan's interval; None where too few runs of the kind are known."""
    plan_step_high_seconds: float | None = None
    """Upper end of the plan's interval."""
    plan_step_measured_seconds: float | None = None
    """Median seconds of a step, of the slowest rank."""
    goodput: float | None = None
    """Share of the wall time of a restarted run that went into steps that count."""
    lost_steps: float | None = None
    """Number of steps that were done again after restarts."""
    cost: float | None = None
    """The price of all pods from start to end, in the currency of the price that was given."""


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """How good the model of a run is, or the models of repeats are; all fields are empty where
    nothing was scored."""

    split: str | None = None
    """The split whose answers were scored."""
    tables: str | None = None
    """The tables that the questions are about: `all`, `known` or `unseen`; only of a task with
    tables."""
    values: Mapping[str, float | None] = field(default_factory=dict)
    """The figures of the task's scores by their keys; None for what a score could not measure."""
    intervals: Mapping[str, list[float] | None] = field(default_factory=dict)
    """The ends of the 95 % interval of each measure that the task has, by its key; None where it
    has no interval."""
    rouge: Mapping[str, float] = field(default_factory=dict)
    """Mean F1 by ROUGE measure."""
    custom_metrics: Mapping[str, float] = field(default_factory=dict)
    """Means of custom metrics by name."""
    custom_intervals: Mapping[str, list[float] | None] = field(default_factory=dict)
    """Their 95 % intervals, by the same names."""
    judged_by: Measure | None = None
    """The measure that the model is judged by; None for a task without one."""

    @property
    def inference_kind(self) -> str | None:
        """Name of the measure that the model is judged by."""
        return None if self.judged_by is None else self.judged_by.name

    @property
    def inference_result(self) -> float | None:
        """The value of that measure."""
        return None if self.judged_by is None else self.values[self.judged_by.key]

    @property
    def inference_result_interval(self) -> list[float] | None:
        """Its 95 % interval."""
        return None if self.judged_by is None else self.intervals[self.judged_by.key]

    def to_json(self) -> dict[str, object]:
        """The values by their keys in the files of a report: every figure of every task, None where
        it was not scored, and an interval only of what was scored."""
        values: dict[str, object] = {"split": self.split, "tables": self.tables}
        all_figures = figures_of(TASKS.values())
        counts = [figure for figure in all_figures if figure.is_count]
        measures = [figure for figure in all_figures if not figure.is_count]
        for figure in (*counts, *measures):
            values[figure.key] = self.values.get(figure.key)
        for name, ends in self.intervals.items():
            values[f"{name}_interval"] = ends
        values.update(self.rouge)
        for name, value in self.custom_metrics.items():
            values[f"{CUSTOM_METRIC}{name}"] = value
        for name, ends in self.custom_intervals.items():
            values[f"{CUSTOM_METRIC}{name}_interval"] = ends
        values["inference_kind"] = self.inference_kind
        values["inference_result"] = self.inference_result
        if self.judged_by is not None:
            values["inference_result_interval"] = self.inference_result_interval
        return values


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How a row compares with its base, the comparable row with the fewest processes. The fields
    are the keys in `summary.json`, in their order."""

    base: str | None = None
    """Letter of the base, maybe the row's own; None where no other row is comparable."""
    speed_up: float | None = None
    """Samples/s of the row / samples/s of its base."""
    speed_up_interval: Sequence[float] | None = None
    """The ends of the speed-up's 95 % interval; None unless both rows have three repeats."""
    scaling_efficiency: float | None = None
    """Speed-up / (processes of the row / processes of its base)."""
    differs_in: list[str] = field(default_factory=list)
    """The settings besides technique and pods in which the two rows differ; empty unless such
    comparisons were asked for."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a summary: one run, or its repeats."""

    letter: str
    """Its name in tables and plots."""
    runs: list[str]
    """Names of all its runs."""
    name: str
    """Name of the run; of repeats, the part of their paths that they share."""
    repeats: int
    """Number of runs that its figures come from."""
    status: str
    """The status of all its runs, or their number by status: `2 ok, 1 oom`."""
    reasons: list[str]
    """Why its runs ended so, in a line each, as far as that is known; equal reasons once."""
    config: RunConfig | None
    """The first run's record, or its configuration where it has no record; None where neither can
    be read."""
    figures: Figures
    samples_per_second_values: list[float]
    """Samples/s of each repeat that was timed."""
    samples_per_second_interval: list[float] | None
    """The 95 % interval of their mean; None for fewer than three."""
    accuracy: Accuracy
    comparison: Comparison = Comparison()
    label: str = ""
    """`plain_label` with the model, where rows have several, and with what tells the row apart from
    another one of the same technique and pods. `columns.labelled_rows` fills this and the following
    fields."""
    short_label: str = ""
    """The label without a model."""
    base_label: str = ""
    """The plain label of its base; empty where it has none."""
    hardware: str = ""
    """The hardware in a few words; empty where it is not known."""
    is_compared: bool = False
    """Whether it is among the rows that a summary is about."""

    @property
    def technique_and_pods(self) -> str:
        """Its technique with pods and slots, such as `zero1 x3`; without a configuration its
        status."""
        if self.config is None:
            return self.status
        return f"{self.config.technique} {pods_and_slots(self.config)}"

    @property
    def plain_label(self) -> str:
        """Its letter, and its technique with pods and slots."""
        return f"{self.letter} {self.technique_and_pods}"

    @property
    def known_config(self) -> RunConfig:
        """The configuration of a row that has one."""
        # Callers ask only rows that have settings or figures, which come from a configuration.
        assert self.config is not None
        return self.config

    @property
    def rate(self) -> float:
        """Samples/s of a row that was timed."""
        # Callers leave out the rows without samples/s.
        assert self.figures.samples_per_second is not None
        return self.figures.samples_per_second

    @property
    def is_done(self) -> bool:
        """Whether its figures are from runs that ended well."""
        return is_done(self.status)


def is_done(status: str) -> bool:
    """Whether the figures of a row are from runs that ended well: its status is `ok`, or
    `2 ok, 1 oom`."""
    return "ok" in status.replace(",", " ").split()


def pods_and_slots(config: RunConfig) -> str:
    """The pods of a run, and the slots of a pod where they are several: `x3`, `x3x2`."""
    # A configuration may come from a file, in which nothing keeps the pods above 0.
    slots = config.world_size // max(1, config.pods)
    return f"x{config.pods}x{slots}" if slots > 1 else f"x{config.pods}"
