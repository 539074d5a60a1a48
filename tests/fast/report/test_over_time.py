"""Utilisation and memory over time, as notebook 06 shows them: of a GPU, from samples that a run has recorded on an
NVIDIA H200, and of cores."""

import csv
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.made import a_run
from zeropods.report.summary import read_runs

RECORDED = Path(__file__).parents[1] / "data" / "samples-of-a-gpu.csv"
"""`memory/0.csv` of the run bloom-560m-zero1 in results/gpu/part-b."""
ENDED = 1_795_745_815.186
WALL_SECONDS = 37.354
SECONDS = 18.797
"""Time from its first sample to its last."""


def panels(folder: Path, name: str) -> list[Any]:
    """The axes of a plot of the run in a folder."""
    axes: list[Any] = read_runs([folder]).plots[name].figure.axes
    return axes


def test_the_use_of_a_gpu_and_its_memory_are_drawn_as_they_were_recorded(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run", rank={"ended_unix_seconds": ENDED, "wall_seconds": WALL_SECONDS})
    (folder / "memory").mkdir()
    shutil.copy(RECORDED, folder / "memory" / "0.csv")
    with open(RECORDED, encoding="utf-8", newline="") as file:
        samples = list(csv.DictReader(file))
    for name, column, unit, label in (
        ("use_over_time", "utilization_percent", 1, "GPU (%)"),
        ("memory_over_time", "device_used_bytes", 2**30, "GiB device-used"),
    ):
        (axes,) = panels(folder, name)
        (line,) = axes.lines
        assert axes.get_ylabel() == label
        assert list(line.get_ydata()) == pytest.approx([float(sample[column]) / unit for sample in samples])
        assert [min(line.get_xdata()), max(line.get_xdata())] == pytest.approx([0, SECONDS], abs=1e-3)
        # Loading, the first step, training, the evaluation, and what came after it.
        assert len(axes.patches) == 5
    assert max(float(sample["utilization_percent"]) for sample in samples) == 59


def test_without_a_gpu_they_are_the_share_of_the_cores_and_resident_memory(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run", pods=2)
    (folder / "memory").mkdir()
    for rank, (percent, gibibytes) in enumerate(((50, 1), (25, 2))):
        lines = [f"{1_700_000_001 + i},steady,{gibibytes * 2**30},,,{percent}" for i in range(3)]
        header = "unix_seconds,phase,resident_bytes,device_used_bytes,allocated_bytes,cpu_percent"
        (folder / "memory" / f"{rank}.csv").write_text("\n".join([header, *lines, ""]))
    (use,), (memory,) = panels(folder, "use_over_time"), panels(folder, "memory_over_time")
    assert (use.get_ylabel(), memory.get_ylabel()) == ("CPU (% of cores)", "GiB resident")
    assert [set(line.get_ydata()) for line in use.lines] == [{50}, {25}]
    assert [set(line.get_ydata()) for line in memory.lines] == [{1}, {2}]
    # Half of the cores is drawn as half, however little is used.
    assert use.get_ylim() == (0, 105)
    assert memory.get_ylim() == pytest.approx((0, 2.2))
