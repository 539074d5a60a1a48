"""The machines that a plan is for: pods, GPUs, links."""

from __future__ import annotations

from dataclasses import dataclass

from zeropods.errors import UserError
from zeropods.plan.peaks import PEAKS, published_flops

GIGA, TERA = 1e9, 1e12
ACHIEVED = {"fp32": 12.0 / 19.5, "bf16": 0.4, "fp16": 0.4}
"""Share of a published peak that training reaches. FP32: 12 of an A100's 19.5 TFLOP/s fit the published step times of
t5-small and t5-large. BF16 and FP16: 0.3 to 0.5 is what published trainings of such sizes report."""


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Pods, alike; each process has a GPU of its own."""

    pods: int = 3
    slots: int = 1
    """Processes a pod."""
    gpu: str = "A100-40GB"
    flops: float | None = None
    """FLOP/s that a process reaches; a share of the GPU's published peak if not given."""
    bandwidth: float = 1.1 * GIGA
    """Bytes a second through a pod's link, each way, as collectives reach it; the default is that of the published
    reports, a 10 Gbit/s network."""
    latency_seconds: float = 50e-6
    """Of one message between two processes."""
    pcie_bandwidth: float = 12 * GIGA
    """Bytes a second between a GPU and its host, each way: PCIe 3.0 x16 as copies reach it."""
    peer_bandwidth: float | None = None
    """Between the GPUs of a pod, each way, as collectives reach it (NVLink); that of PCIe if not given."""
    host_bandwidth: float = 50 * GIGA
    """Bytes a second between a pod's processor and its memory: a few channels of DDR4."""

    @property
    def link(self) -> float:
        """Bytes a second through the slowest link of a ring over all processes."""
        if self.pods > 1:
            return self.bandwidth
        return self.pcie_bandwidth if self.peer_bandwidth is None else self.peer_bandwidth

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
