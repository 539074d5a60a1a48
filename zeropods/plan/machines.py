"""The machines that a plan is for, and the arithmetic peaks that GPUs are published with."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from zeropods.errors import UserError
from zeropods.tables import GIB

# Arithmetic peaks that GPUs are published with.

GIGA, TERA = 1e9, 1e12
OTHER = frozenset({"mig", "laptop", "d", "ti", "super", "fhhl"})
"""Words in a name that mark another card, or less than a whole one: a MIG slice, a mobile or a cut-down variant."""


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Dense TFLOP/s of one GPU, without sparsity; None where it has no such arithmetic."""

    words: str
    """Words that its name holds; the first entry all of whose words are there counts."""
    fp32: float
    """FP32 outside the tensor cores: what PyTorch does by default, without TF32."""
    half: float
    """FP16 tensor cores with FP32 accumulation."""
    gib: float
    """Memory of the usual card, as nvidia-smi shows it; a name may say another size."""
    has_bf16: bool = True


PEAKS = (
    Peak(words="h100 pcie", fp32=51.2, half=756.0, gib=80),
    Peak(words="h100 nvl", fp32=60.0, half=835.0, gib=94),
    Peak(words="h100", fp32=66.9, half=989.4, gib=80),
    Peak(words="h800 pcie", fp32=51.2, half=756.0, gib=80),
    Peak(words="h800", fp32=66.9, half=989.4, gib=80),
    Peak(words="h200 nvl", fp32=60.0, half=835.0, gib=140),
    Peak(words="h200", fp32=66.9, half=989.4, gib=140),
    Peak(words="gh200", fp32=66.9, half=989.4, gib=96),
    Peak(words="h20", fp32=44.0, half=148.0, gib=96),
    Peak(words="a100", fp32=19.5, half=312.0, gib=40),
    Peak(words="a800", fp32=19.5, half=312.0, gib=80),
    Peak(words="a30", fp32=10.3, half=165.0, gib=24),
    Peak(words="a40", fp32=37.4, half=149.7, gib=45),
    Peak(words="a10", fp32=31.2, half=125.0, gib=22.5),
    Peak(words="a10g", fp32=35.0, half=70.0, gib=22.5),
    Peak(words="l4", fp32=30.3, half=121.0, gib=22.5),
    Peak(words="l40", fp32=90.5, half=181.0, gib=45),
    Peak(words="l40s", fp32=91.6, half=362.0, gib=45),
    Peak(words="rtx a6000", fp32=38.7, half=154.8, gib=48),
    Peak(words="rtx 6000 ada", fp32=91.1, half=364.2, gib=48),
    Peak(words="rtx 4090", fp32=82.6, half=165.2, gib=24),
    Peak(words="rtx 3090", fp32=35.6, half=71.0, gib=24),
    Peak(words="v100 pcie", fp32=14.0, half=112.0, gib=16, has_bf16=False),
    Peak(words="v100", fp32=15.7, half=125.0, gib=16, has_bf16=False),
    Peak(words="t4", fp32=8.1, half=65.0, gib=15, has_bf16=False),
    Peak(words="p100 pcie", fp32=9.3, half=18.7, gib=16, has_bf16=False),
    Peak(words="p100", fp32=10.6, half=21.2, gib=16, has_bf16=False),
)
"""From NVIDIA's data sheets and architecture papers of each GPU (A10G: AWS's); figures "with sparsity" are halved."""


def published_flops(gpu: str, precision: str) -> float | None:
    """FLOP/s of a whole GPU, dense, or None where it is not known here or the GPU cannot do it.

    Args:
        gpu: its name as torch and NVML give it, `NVIDIA A100-SXM4-40GB`, or short, `A100-40GB`.
        precision: `fp32` (what a run uses: without TF32), `bf16` or `fp16`.
    """
    peak = _peak(gpu)
    if peak is None or (precision == "bf16" and not peak.has_bf16):
        return None
    return TERA * {"fp32": peak.fp32, "bf16": peak.half, "fp16": peak.half}[precision]


def memory_bytes(gpu: str) -> int | None:
    """Memory of a GPU: what its name says, as `A100-80GB` does, else that of the usual card; None if unknown."""
    said, peak = re.search(r"(\d+) ?GB", gpu, re.IGNORECASE), _peak(gpu)
    size = float(said[1]) if said else None if peak is None else peak.gib
    return None if size is None else round(GIB * size)


def is_before_ampere(gpu: str) -> bool:
    """Whether a GPU is known to be older than Ampere: it has no BF16 arithmetic and no FlashAttention."""
    peak = _peak(gpu)
    return peak is not None and not peak.has_bf16


def words(gpu: str) -> frozenset[str]:
    """What a GPU's name is told by, however it is written."""
    return frozenset(re.findall(r"[a-z0-9]+", gpu.lower()))


def _peak(gpu: str) -> Peak | None:
    said = words(gpu)
    peak = next((peak for peak in PEAKS if said.issuperset(peak.words.split())), None)
    return None if said & OTHER else peak


# The machines that a plan is for: pods, GPUs, links.

ACHIEVED = {"fp32": 10.35 / 19.5, "bf16": 0.4, "fp16": 0.4}
"""Share of a published peak that training reaches. FP32: of an A100's 19.5 TFLOP/s what, with `BANDWIDTH`, makes the
largest of the four errors of the published step times (`plan.published`) small, 8 %; evaluation and saving are in
them. BF16 and FP16: 0.3 to 0.5 is what published trainings of such sizes report."""
BANDWIDTH = 0.86 * GIGA
"""Bytes per second through a pod's link, each way, fitted with it: collectives' part of a network of 10 Gbit/s."""
TREE_SHARE = 0.9
"""Part of a link's bandwidth that NCCL gives a tree (2.7, src/graph/tuning.cc)."""
PCIE_LATENCY, NVLINK_LATENCY = 5.7e-6, 3.4e-6
"""Seconds of a hop within a pod, by the same source."""


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Pods, alike; each process has a GPU of its own, or shares the cores of its machine."""

    pods: int = 3
    slots: int = 1
    """Processes per pod."""
    device: str = "gpu"
    """`gpu`, or `cpu`: processes that share the cores of their machine."""
    hosts: int = 1
    """CPU: machines that all pods are on together."""
    threads: int | None = None
    """CPU: of each process; as many as the machine has cores if not given."""
    machine_bytes: int | None = None
    """CPU: memory of a machine, which its processes share; None where that of a process is given."""
    gpu: str = "A100-40GB"
    flops: float | None = None
    """FLOP/s that a process reaches; a share of the GPU's published peak if not given."""
    bandwidth: float = BANDWIDTH
    """Bytes per second through a pod's link, each way, as collectives reach it."""
    latency_seconds: float = 50e-6
    """Of one message between two pods."""
    pcie_bandwidth: float = 12 * GIGA
    """Bytes per second between a GPU and its host, each way: PCIe 3.0 x16 as copies reach it."""
    peer_bandwidth: float | None = None
    """Between the GPUs of a pod, each way, as collectives reach it (NVLink); that of PCIe if not given."""
    host_bandwidth: float = 50 * GIGA
    """Bytes per second between a pod's processor and its memory: a few channels of DDR4."""

    @property
    def link(self) -> float:
        """Bytes per second through the slowest link of a ring over all processes."""
        if self.pods > 1:
            return self.bandwidth
        return self.pcie_bandwidth if self.peer_bandwidth is None else self.peer_bandwidth

    @property
    def ring_latency(self) -> float:
        """Seconds of a message once round a ring: hops between neighbours within the pods, and from pod to pod."""
        return self.pods * (self.slots - 1) * self._hop_within + (self.pods - 1) * self.latency_seconds

    @property
    def tree_latency(self) -> float:
        """Seconds of a message through each pod and up a tree of pods, or down again."""
        return (self.slots - 1) * self._hop_within + int(math.log2(self.pods)) * self.latency_seconds

    @property
    def _hop_within(self) -> float:
        return PCIE_LATENCY if self.peer_bandwidth is None else NVLINK_LATENCY

    def achieved_flops(self, precision: str) -> float:
        """FLOP/s of one process.

        Raises:
            UserError: no peak is known for this GPU at this precision, and none was given.
        """
        if self.flops is not None:
            return self.flops
        peak = published_flops(self.gpu, precision)
        if peak is None:
            known = ", ".join(peak.words.upper() for peak in PEAKS)
            raise UserError(f"GPU {self.gpu!r}: no {precision} peak known; give --flops, or one of {known}")
        return ACHIEVED[precision] * peak
