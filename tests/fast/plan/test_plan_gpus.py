"""Which GPU a name means, how large it is, and what cuBLAS takes of it."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from zeropods.cli import main
from zeropods.plan.estimate import plan, request_for
from zeropods.plan.gpus import (
    FILE,
    Card,
    cards,
    find_card,
    is_before_ampere,
    memory_bandwidth,
    memory_bytes,
    names_near,
    published_flops,
    workspace_bytes,
)
from zeropods.plan.machines import Machines
from zeropods.tables import GIB, MIB

SOURCES = Path(__file__).resolve().parents[3] / "docs" / "sources.md"


def lines() -> Iterator[dict[str, str]]:
    """The lines of the table of GPUs."""
    with FILE.open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


@pytest.mark.parametrize(
    ("gpu", "card"),
    [
        # As torch and NVML name them.
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe-80GB"),
        ("NVIDIA GH200 480GB", "GH200-96GB"),
        ("NVIDIA GH200 144G HBM3e", "GH200-144GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Blackwell Server"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("AMD Instinct MI300X", "MI300X"),
        # As people write them.
        ("3090", "RTX 3090"),
        ("4090", "RTX 4090"),
        ("5090", "RTX 5090"),
        ("a6000", "RTX A6000"),
        ("6000 ada", "RTX 6000 Ada"),
        ("6000 48GB", "RTX 6000 Ada"),
        ("GeForce 4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("RTX_4090", "RTX 4090"),
        ("a100_80gb", "A100-80GB"),
        ("A100-80", "A100-80GB"),
        ("a10040gb", "A100-40GB"),
        ("A100 40 GB", "A100-40GB"),
        ("H200 141GB", "H200"),
        ("T4 16GB", "T4"),
    ],
)
def test_a_name_means_its_card_however_it_is_written(gpu: str, card: str) -> None:
    meant = find_card(gpu)
    assert meant is not None and meant.name == card


@pytest.mark.parametrize(
    ("gpu", "gigabytes"),
    [
        # Three quarters of 16 lanes of PCIe 3.0, 4.0 and 5.0, and of NVLink to a processor on the same board.
        ("Tesla T4", 12),
        ("A800", 24),
        ("NVIDIA GeForce RTX 3090 Ti", 24),
        ("NVIDIA H200", 48),
        ("NVIDIA GH200 480GB", 337.5),
        # Not published, and not known.
        ("A10G", 12),
        ("a card of the future", 12),
    ],
)
def test_copies_to_the_host_reach_three_quarters_of_the_published_link(gpu: str, gigabytes: float) -> None:
    assert Machines(gpu=gpu).host_link == pytest.approx(gigabytes * 1e9)
    assert Machines(gpu=gpu, pcie_bandwidth=5e9).host_link == 5e9


@pytest.mark.parametrize(
    ("gpu", "near"),
    [
        ("NVIDIA GeForce RTX 4090 Laptop GPU", ["RTX 4090"]),
        ("NVIDIA GeForce RTX 4090 D", ["RTX 4090"]),
        ("NVIDIA GeForce RTX 3090 Ti", ["RTX 3090"]),
        ("rtx4090ti", ["RTX 4090", "RTX 5090", "RTX 3090"]),
        ("RTX 4080 Super", ["RTX 4090"]),
        ("NVIDIA H20-3e", ["H20"]),
        ("NVIDIA GB300-WS", ["GB300"]),
        ("NVIDIA A100-SXM-64GB", ["A100 PCIe-40GB", "A100 PCIe-80GB", "A100-40GB", "A100-80GB"]),
        ("NVIDIA A40-8Q", ["A40"]),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", ["H100 PCIe", "H100 NVL", "H100"]),
        ("6000", ["RTX PRO 6000 Blackwell", "RTX 6000 Ada"]),
        ("an abacus", []),
    ],
)
def test_a_variant_a_slice_or_several_cards_have_no_peak_but_are_near_to_some(gpu: str, near: list[str]) -> None:
    assert published_flops(gpu, "fp32") is None and memory_bandwidth(gpu) is None
    assert names_near(gpu) == near


@pytest.mark.parametrize(
    ("gpu", "mib"),
    [
        # The number in the name is that of the processor's memory.
        ("NVIDIA GH200 480GB", 97_871),
        ("NVIDIA GH200 120GB", 97_871),
        ("NVIDIA GH200 144G HBM3e", 146_831),
        # A name rounds: 79.65 GiB are shown.
        ("NVIDIA H100 80GB HBM3", 81_559),
        ("NVIDIA A100-SXM4-40GB", 40_960),
        ("NVIDIA A100-SXM4-80GB", 81_920),
        ("Tesla T4", 15_360),
        ("NVIDIA L4", 23_034),
        ("NVIDIA A10G", 23_028),
        ("NVIDIA H200", 143_771),
        ("NVIDIA B200", 183_359),
        ("RTX 4090", 24_564),
        ("MI300X", 196_592),
        # Another card, of which nothing else is known.
        ("NVIDIA A100-SXM-64GB", 64 * 1_024),
    ],
)
def test_memory_is_what_nvml_shows_of_the_gpu_not_the_number_in_its_name(gpu: str, mib: int) -> None:
    assert memory_bytes(gpu) == mib * MIB


@pytest.mark.parametrize(
    ("gpu", "gigabytes"),
    [
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 20),
        ("NVIDIA A40-8Q", 8),
    ],
)
def test_memory_of_a_slice_is_that_of_its_profile(gpu: str, gigabytes: int) -> None:
    assert memory_bytes(gpu) == gigabytes * 10**9


@pytest.mark.parametrize("gpu", ["NVIDIA H20-3e", "NVIDIA GeForce RTX 4090 Laptop GPU", "6000", ""])
def test_memory_of_an_unknown_gpu_is_unknown(gpu: str) -> None:
    assert memory_bytes(gpu) is None


@pytest.mark.parametrize(
    ("gpu", "fp32", "bf16"),
    [
        ("NVIDIA B200", 75, 2_250),
        ("NVIDIA GB200", 80, 2_500),
        ("NVIDIA B300 SXM6 AC", 75, 2_250),
        ("NVIDIA GB300", 80, 2_500),
        ("NVIDIA GeForce RTX 5090", 104.8, 209.5),
        ("RTX PRO 6000 Blackwell", 125, 503.8),
        ("AMD Instinct MI300X", 163.4, 1_307.4),
    ],
)
def test_peaks_of_blackwell_and_mi300x_are_those_without_sparsity(gpu: str, fp32: float, bf16: float) -> None:
    peaks = [published_flops(gpu, precision) for precision in ("fp32", "bf16", "fp16")]
    assert peaks == pytest.approx([fp32 * 1e12, bf16 * 1e12, bf16 * 1e12])


@pytest.mark.parametrize("card", cards(), ids=lambda card: card.name)
def test_a_card_is_found_by_its_own_name_and_its_figures_are_of_their_size(card: Card) -> None:
    assert find_card(card.name) is card
    assert 14 * GIB < card.memory_bytes < 300 * GIB and 2e11 < card.bandwidth < 1e13
    assert card.flops["fp32"] < card.flops["fp16"]
    assert ("bf16" in card.flops) is not is_before_ampere(card.name)


def test_every_figure_says_where_it_is_from() -> None:
    listed = SOURCES.read_text(encoding="utf-8")
    for line in lines():
        assert f"| {line['peaks_from']} |" in listed, line["name"]
        assert line["mib_from"].startswith("as ") or f"| {line['mib_from']} |" in listed, line


@pytest.mark.parametrize(
    ("gpu", "is_before"),
    [
        ("Tesla T4", True),
        ("Tesla V100-SXM2-16GB", True),
        ("Tesla P100-PCIE-16GB", True),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", False),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", False),
        ("NVIDIA B200", False),
        ("AMD Instinct MI300X", False),
        ("a card of the future", False),
    ],
)
def test_only_an_older_gpu_of_nvidia_is_before_ampere(gpu: str, is_before: bool) -> None:
    assert is_before_ampere(gpu) is is_before


# What cuBLAS works in.


@pytest.mark.parametrize(
    ("gpu", "mib"),
    [
        ("NVIDIA H100 80GB HBM3", 32),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 32),
        ("NVIDIA B200", 32),
        ("RTX 5090", 32),
        # `:4096:2:16:8`
        ("A100-40GB", 8.125),
        ("Tesla T4", 8.125),
        ("a card of the future", 8.125),
        ("AMD Instinct MI300X", 128 + 76),
    ],
)
def test_the_workspace_is_that_of_the_generation(gpu: str, mib: float) -> None:
    assert workspace_bytes(gpu) == mib * MIB


@pytest.mark.parametrize(("gpu", "mib"), [("H100", 64), ("A100-40GB", 16.25)])
def test_a_plan_counts_a_workspace_for_each_pass_among_tensors_and_in_the_whole(gpu: str, mib: float) -> None:
    for made in plan(request_for("t5-small", machines=Machines(gpu=gpu))).estimates:
        (term,) = (term for term in made.memory.terms if "cuBLAS" in term.name)
        assert term.bytes == mib * MIB and "2 threads x" in term.formula
        assert term.bytes < made.memory.peak_allocated_bytes <= made.memory.device_bytes


def test_two_gpus_differ_by_their_workspaces_alone() -> None:
    older, newer = (plan(request_for("t5-small", machines=Machines(gpu=gpu))).estimates for gpu in ("A100", "H100"))
    for before, after in zip(older, newer, strict=True):
        for name in ("device_bytes", "peak_allocated_bytes"):
            more = getattr(after.memory, name) - getattr(before.memory, name)
            assert more == 2 * (32 - 8.125) * MIB


def test_without_a_gpu_there_is_no_cublas(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "t5-tiny", "--device", "cpu", "--json"]) == 0
    techniques = json.loads(capsys.readouterr().out)["techniques"]
    names = {term["name"] for technique in techniques for term in technique["terms"]}
    assert names and not any("cuBLAS" in name for name in names)


def test_no_gpu_without_cuda_is_proposed_as_a_cheaper_one(capsys: pytest.CaptureFixture[str]) -> None:
    # Only an MI300X is large enough, and slower.
    flags = ["--model", "llama-8b", "--precision", "bf16", "--technique", "none", "--batch-size", "12"]
    assert main(["plan", *flags, "--gpu", "B300", "--pods", "1", "--what-if", "--json"]) == 0
    answers = json.loads(capsys.readouterr().out)["what_if"]
    (answer,) = (row["answer"] for row in answers if row["question"] == "a cheaper GPU")
    assert "MI300X" not in answer
