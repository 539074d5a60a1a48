"""Every figure of a summary, each against a number computed by hand."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tests import made
from tests.made import a_failed_record, a_rank, as_record
from zeropods.measure.record import PHASES, Record
from zeropods.plan.known_models import known_config
from zeropods.report.formulas import RULES, figures
from zeropods.report.row import Figures
from zeropods.tables import GIB
from zeropods.tasks import TASKS

SHAPE = known_config("t5-tiny")
ONE_TOKEN = {"shape": SHAPE, "largest_batch": made.a_batch(1, 1, 1)}
A100 = "NVIDIA A100-SXM4-40GB"
USED = {"device_used_bytes": made.statistics(9.0, 5.0, 1.0)}
TOKENS = {"source_tokens": 6_400, "target_tokens": 3_200, "padded_tokens": 12_800}


def a_record(*ranks: dict[str, Any], **values: Any) -> Record:
    """A record of ranks that measured what each says."""
    return as_record(made.a_record(ranks=[a_rank(number, **rank) for number, rank in enumerate(ranks)], **values))


def ranks(key: str, *values: Any, **both: Any) -> Record:
    """A record of ranks that differ in one field."""
    return a_record(*({key: value, **both} for value in values))


def a_phase(**peaks: int | None) -> dict[str, Any]:
    none = {"peak_resident_bytes": None, "peak_allocated_bytes": None, "peak_reserved_bytes": None}
    return {"seconds": 1.0, **none, **peaks}


STEADY = [{"steady": a_phase(peak_resident_bytes=size)} for size in (5, 7)]
LIVE = [{"parameters": 4, "gradients": 4, "optimizer": size} for size in (8, 16)]
FOUR = {"pods": 2, "slots": 2}


@pytest.mark.parametrize(
    ("key", "record", "expected"),
    [
        ("duration_seconds", ranks("wall_seconds", 30.0, 31.5), 31.5),
        ("duration_seconds", a_record({"first_step": 5}), None),
        ("duration_seconds", a_record({}, pods=2, world_size=2, status="failed", effective_batch_size=64), None),
        ("start_seconds", ranks("start_seconds", 5.0, 7.0), 7.0),
        ("save_seconds", ranks("save_seconds", [0.25, 0.5], [0.25]), 0.75),
        ("evaluate_seconds", ranks("evaluate_seconds", [0.5], [0.25, 0.5]), 0.75),
        # One rank: 640 rows in steps of 0.8 s: 40 samples/s; 9,600 tokens / 640 = 15 per sample.
        ("tokens_per_second", a_record(TOKENS), 600),
        ("padding_share", a_record(TOKENS, TOKENS), 0.25),
        # 100 rows; means 0.5 and 0.25 s.
        ("evaluation_samples_per_second", ranks("evaluate_seconds", [0.4, 0.6], [0.25]), 200),
        # Two layers of (196,608 + 32,768) x 10 + (262,144 - 32,768) x 5 products, head 131,072 x 5, attention
        # 2 x 128 x (2 x 10^2 + 5^2 + 2 x 10 x 5): 7,619,840, 6 FLOPs each; 40 samples/s.
        ("model_flops_per_second", a_record({**TOKENS, "shape": SHAPE}), 40 * 6 * 7_619_840),
        ("peak_flops_per_second", a_record({"gpu": A100}, {"gpu": A100}), 39.0e12),
        ("peak_flops_kind", a_record({"gpu": A100}, {"gpu": A100}), "published"),
        ("peak_flops_per_second", ranks("matmul_flops_per_second", 2e12, None, gpu="GPU X"), 4e12),
        ("peak_flops_kind", ranks("matmul_flops_per_second", 2e12, None, gpu="GPU X"), "measured matmul"),
        # Pods of one machine share its measured peak; machines of their own have one each.
        ("peak_flops_per_second", ranks("matmul_flops_per_second", 1e11, None), 1e11),
        ("peak_flops_per_second", a_record({"matmul_flops_per_second": 1e11, "machine": "a"}, {"machine": "b"}), 2e11),
        ("model_flops_utilization", a_record({**TOKENS, "shape": SHAPE, "matmul_flops_per_second": 1.8287616e10}), 0.1),
        ("machines", a_record({}, {}), 1),
        ("peak_reserved_bytes", ranks("peak_reserved_bytes", 5, 7), 7),
        ("peak_device_used_bytes", a_record({"sampled": USED}), 9.0),
        ("memory_kind", a_record({}, {}), "resident"),
        ("memory_kind", a_record({"peak_allocated_bytes": 5}), "allocated"),
        ("memory_kind", a_record({"peak_allocated_bytes": 5, "sampled": USED}), "device-used"),
        ("memory_kind", a_record({"peak_resident_bytes": None}), None),
        # Resident memory of a pod is the sum of its ranks', device memory that of its fullest GPU.
        ("pod_memory_bytes", ranks("peak_resident_bytes", 1, 2, 3, 4), [1, 2, 3, 4]),
        ("pod_memory_bytes", a_record(*({"peak_resident_bytes": n} for n in (1, 2, 3, 4)), **FOUR), [1 + 2, 3 + 4]),
        ("pod_memory_bytes", a_record(*({"peak_allocated_bytes": n} for n in (1, 2, 3, 4)), **FOUR), [2, 4]),
        ("peak_memory_bytes", ranks("peak_resident_bytes", GIB, 3 * GIB), 3 * GIB),
        ("peak_steady_bytes", ranks("phases", *STEADY), 7),
        ("peak_steady_bytes", ranks("phases", STEADY[0], {}), None),
        # On a CPU live states are compared with the plan, on a GPU device-used memory.
        ("measured_bytes", ranks("live_bytes", *LIVE), 24),
        ("planned_kind", a_record({}), "live states"),
        ("measured_bytes", a_record({"gpu": A100, "sampled": USED}), 9.0),
        ("planned_bytes", a_record(ONE_TOKEN), 16 * 1_050_368),
        ("planned_bytes", a_record(ONE_TOKEN, technique="custom"), None),
        ("pod_state_bytes", ranks("live_bytes", *LIVE), [16, 24]),
        ("measured_to_planned", a_record({**ONE_TOKEN, "live_bytes": LIVE[0]}), 16 / (16 * 1_050_368)),
        ("train_loss", a_record({}), 2.0),
        ("eval_loss", a_record({}), 2.25),
        ("energy_joules", ranks("energy_joules", 100.0, 150.0), 250.0),
        ("energy_joules", ranks("energy_joules", 100.0, None), None),
        ("energy_kwh", a_record({"energy_joules": 1.8e6}), 0.5),
    ],
)
def test_a_figure_is_what_its_formula_gives(key: str, record: Record, expected: Any) -> None:
    assert getattr(figures(record), key) == (pytest.approx(expected) if isinstance(expected, float | int) else expected)


def test_what_a_run_that_ended_early_has_not_measured_is_none() -> None:
    found = figures(as_record(a_failed_record()))
    known = {key for key, value in vars(found).items() if value is not None}
    assert known >= {"steps", "duration_seconds", "start_seconds", "peak_resident_bytes", "memory_kind"}
    assert not known & {"tokens_per_second", "padding_share", "model_flops_per_second", "peak_flops_kind", "phase_kind"}
    assert not known & {"planned_bytes", "measured_bytes", "train_loss", "energy_kwh", "samples_per_second"}


def test_every_figure_has_a_rule_for_repeats() -> None:
    assert RULES.keys() == {figure.name for figure in fields(Figures)}


def test_every_figure_is_defined_in_the_documentation() -> None:
    text = (Path(__file__).parents[3] / "docs" / "figures.md").read_text(encoding="utf-8")
    kinds = [f"peak_{kind}_bytes" for kind in ("device_used", "reserved", "allocated", "resident", *PHASES)]
    assert len(RULES) > 30 and [key for key in RULES if key not in kinds and f"`{key}`" not in text] == []


def test_every_figure_of_a_score_is_declared_once_and_defined_in_the_documentation() -> None:
    text = (Path(__file__).parents[3] / "docs" / "figures.md").read_text(encoding="utf-8")
    figures_of_scores = {figure for task in TASKS.values() for figure in task.figures}
    keys = {figure.key for figure in figures_of_scores}
    assert len(keys) == len(figures_of_scores) > 5 and [key for key in keys if f"`{key}`" not in text] == []
