"""What a run measures of itself: steps, phases, memory, the bytes of its tensors."""

import csv
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from zeropods.measure.record import PHASES, RankMeasurement, read_record
from zeropods.train.device import matmul_rates
from zeropods.train.meter import Mark, Meter, StepClock, Tokens


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and values by tag, as TensorBoard reads an event folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_training_and_validation_loss_are_the_record_s_in_one_chart(trained: Path) -> None:
    record = read_record(trained)
    for run, key in (("train", "losses"), ("validation", "eval_losses")):
        drawn = scalars(trained / "tensorboard" / run)["loss"]
        assert drawn == [(point.step, pytest.approx(point.loss)) for point in getattr(record, key)]


def test_step_time_speed_padding_and_memory_stand_beside_the_loss(trained: Path) -> None:
    drawn = scalars(trained / "tensorboard" / "train")
    rank, steps = read_record(trained).ranks[0], np.load(trained / "steps" / "0.npy")
    assert [value for _, value in drawn["step_seconds"]] == pytest.approx(steps, rel=1e-5)
    assert [value for _, value in drawn["samples_per_second"]] == pytest.approx(
        [32 / seconds for seconds in steps], rel=1e-5
    )
    assert len(drawn["padding_share"]) == 6 and all(0 <= share < 1 for _, share in drawn["padding_share"])
    assert all(50e6 < value <= 1.02 * rank.peak_resident_bytes for _, value in drawn["resident_bytes"])
    assert len(drawn["cpu_percent"]) == len(drawn["resident_bytes"])


def test_the_phases_fill_the_time_of_the_run(trained: Path) -> None:
    rank = read_record(trained).ranks[0]
    phases = rank.phases
    assert set(phases) == set(PHASES)
    assert sum(phase.seconds for phase in phases.values()) == pytest.approx(rank.wall_seconds)
    assert phases["load"].seconds == pytest.approx(rank.start_seconds)
    assert phases["first_step"].seconds == pytest.approx(rank.warmup_seconds, rel=0.2)
    assert phases["evaluate"].seconds == pytest.approx(rank.evaluate_seconds.total, rel=0.2)
    assert phases["save"].seconds == pytest.approx(rank.save_seconds.total, rel=0.2)
    assert rank.save_seconds.samples == 1
    peaks = [phase.peak_resident_bytes for phase in phases.values()]
    assert None in peaks or rank.peak_resident_bytes == max(peaks)


def test_samples_of_memory_agree_with_the_kernel_s_peaks(trained: Path) -> None:
    rank = read_record(trained).ranks[0]
    with open(trained / "memory" / "0.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    resident = [int(line["resident_bytes"]) for line in lines]
    assert rank.sampled["resident_bytes"].peak == max(resident) <= 1.02 * rank.peak_resident_bytes
    assert rank.sampled["resident_bytes"].samples == len(lines)
    assert {line["phase"] for line in lines} <= set(PHASES)
    assert set(rank.sampled) == {"resident_bytes", "cpu_percent", "io_wait_percent"}
    used = rank.sampled["cpu_percent"]
    assert 0 < used.mean <= used.peak and used.minimum <= used.p95 <= used.peak


class Later(Mark):
    """A moment that the device reaches when a test says so."""

    reached = 0
    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.at, self.event = float(type(self).made), None

    def is_past(self) -> bool:
        return self.at <= type(self).reached


def test_steps_are_told_when_the_device_has_done_them_and_not_before() -> None:
    clock = StepClock(Later)
    for target in (10, 20, 30):
        clock.lap(Tokens(torch.tensor(7), target, 100))
    assert len(clock.steps()) == 0
    Later.reached = 3
    assert clock.steps().tolist() == [(1.0, 7, 10, 100), (1.0, 7, 20, 100)]
    # What lies between steps belongs to none.
    Later.made += 50
    clock.restart()
    clock.lap(Tokens(0, 40, 0))
    Later.reached = Later.made
    assert clock.steps()["target_tokens"].tolist() == [10, 20, 30, 40]
    assert clock.steps(3).tolist() == [(1.0, 0, 40, 0)]


def test_a_long_curve_of_losses_keeps_every_second_point_and_its_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("zeropods.train.meter.MOST_LOSSES", 8)
    measured = RankMeasurement(rank=0, host="pod")
    meter = Meter(tmp_path, measured, interval=0, age_seconds=0.0)
    for step in range(1, 13):
        meter.on_log(None, SimpleNamespace(global_step=step), None, logs={"loss": 1.0 / step})
    assert [(point.step, point.loss) for point in measured.losses] == [(n, 1.0 / n) for n in (4, 8, 10, 12)]


def test_the_machine_s_peak_disturbs_neither_threads_nor_random_numbers() -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    assert max(matmul_rates("fp32").values()) > 1e9
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
