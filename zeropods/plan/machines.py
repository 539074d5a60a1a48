"""The machines that a plan is for: pods, GPUs, links, and the seconds of a step on them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from zeropods.errors import UserError
from zeropods.plan.gpus import (
    GIGA,
    known_gpus,
    memory_bandwidth,
    names_near,
    published_flops,
    published_host_link,
)
from zeropods.plan.memory import touched_by_all
from zeropods.plan.workload import MASTER, Workload, share

ACHIEVED = {"fp32": 11.2 / 19.5, "bf16": 0.4, "fp16": 0.4}
"""Share of a published peak that training reaches. FP32: the share of an A100's 19.5 TFLOP/s that,
with `BANDWIDTH`, keeps the largest of the four errors of the published step times (`report.plan`)
below 10 %; those times include evaluation and saving. BF16 and FP16: published trainings report
0.3 to 0.5."""
BANDWIDTH = 0.94 * GIGA
"""Bytes per second through a pod's link, each way, fitted with `ACHIEVED`: collectives' part of a
10 Gbit/s network."""
LAUNCH_SECONDS = 15e-6
"""Seconds of `Machines.launch_seconds`, fitted to two published runs of ZeRO-3 with few tokens, of
6.86 billion parameters on H100s and 1.84 billion on an A100: with it they are planned 3 and 5 % too
fast. An H200's host that was measured took 29 us."""
HOST_LINK_SHARE = 0.75
"""Share of the published bandwidth between a GPU and its host that copies reach: 12 of the 16 GB/s
of PCIe 3.0 with 16 lanes. An H200 that was measured reached 54 of 64."""
SLOW_HOST_LINK = 16 * GIGA
"""Bytes per second of PCIe 3.0 with 16 lanes, each way, for a GPU whose link is not known."""
TREE_SHARE = 0.9
"""Share of a link's bandwidth that NCCL assumes for a tree (2.7, src/graph/tuning.cc)."""
PCIE_LATENCY = 5.7e-6
"""Seconds per hop within a pod, by PCIe, from the same source."""
NVLINK_LATENCY = 3.4e-6
"""The same by NVLink."""


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Pods that are all alike; each process has a GPU of its own."""

    pods: int = 3
    slots: int = 1
    """Processes per pod."""
    gpu: str = "A100-40GB"
    flops: float | None = None
    """FLOP/s that a process reaches; a share of the GPU's published peak if not given."""
    bandwidth: float = BANDWIDTH
    """Bytes per second through a pod's link, each way, as collectives reach it."""
    latency_seconds: float = 50e-6
    """Seconds of one message between two pods."""
    pcie_bandwidth: float | None = None
    """Bytes per second between a GPU and its host, each way; if not given, `HOST_LINK_SHARE` of the
    GPU's published link, or of `SLOW_HOST_LINK` where none is known."""
    peer_bandwidth: float | None = None
    """Bytes per second between a pod's GPUs, each way, as collectives reach it (NVLink); that of
    PCIe if not given."""
    nvme_bandwidth: float | None = None
    """Bytes per second of a pod's disk, for what ZeRO-3 offloads to it; None where it offloads to
    memory."""
    host_bandwidth: float = 50 * GIGA
    """Bytes per second between a pod's processor and its memory: a few channels of DDR4."""
    launch_seconds: float = LAUNCH_SECONDS
    """Seconds in which the host launches one operation of PyTorch, its part of autograd
    included."""

    @property
    def host_link(self) -> float:
        """Bytes per second between a GPU and its host, each way, as copies reach it."""
        if self.pcie_bandwidth is not None:
            return self.pcie_bandwidth
        published = published_host_link(self.gpu)
        if published is None:
            published = SLOW_HOST_LINK
        return HOST_LINK_SHARE * published

    def achieved_flops(self, precision: str) -> float:
        """FLOP/s that one process reaches: `flops` where it is given, else the part `ACHIEVED` of
        the GPU's published peak.

        Raises:
            UserError: no peak is known for this GPU at this precision, and `flops` is not given.
        """
        if self.flops is not None:
            return self.flops
        peak = published_flops(self.gpu, precision)
        if peak is None:
            other_names = ", ".join(names_near(self.gpu)) or known_gpus(precision)
            unknown = f"GPU {self.gpu!r}: its {precision} peak is unknown"
            raise UserError(f"{unknown}; give --flops, or one of {other_names}")
        return ACHIEVED[precision] * peak


# Seconds of one optimizer step: arithmetic, launches, network, traffic to the host, Adam.

ADAM_BYTES = 28
"""Bytes per parameter: Adam reads weight, gradient and both moments, and writes all but the
gradient, each in FP32."""
HALF_ADAM_BYTES = 44
"""The same on a GPU in BF16 and FP16: the gradient is also widened and its norm taken, and the copy
of the weight is written. It stands for BF16 masters and 8-bit moments too, which move less."""
DDP_BUCKET_BYTES = 25 << 20
"""Default size of a bucket of PyTorch's DistributedDataParallel."""
GRADIENT_COPY_SHARE = 0.5
"""Share of the bandwidth to the host at which gradients are copied that accumulate there, one
tensor at a time: 7.8 GB took 0.29 s on an H200 whose link does 54 GB/s (bloom-560m,
`zero2_offload`, 4 passes). DeepSpeed waits for all earlier copies before each
(`_wait_for_offload_copies`)."""

OUTSIDE_LAUNCHES = 177
"""Operations of a pass for embeddings, masks, head and loss, counted in a T5."""
LAYER_LAUNCHES = {True: 150, False: 188}
"""Operations of a layer in a forward and a backward pass, by whether the model is causal: those of
qwen3-0.6b on an H200 (a step of 129 ms), and half of the 375 that were counted in an encoder's and
a decoder's layer of a T5."""
AGAIN_LAUNCHES = 100
"""What checkpointing adds for each layer: the forward pass again, and the states of random numbers
(qwen3-0.6b on an H200: 210 ms in place of 129)."""
STAGE_3_LAUNCHES = 120
"""What stage 3 adds for each layer that a pass goes through, in launches that take as long: hooks
of its modules, which fetch and release parameters (stage3.py, `DeepSpeedZeRoOffload`). The time
that layers take forward, computed again, and backward counts three times. Fitted, with the next, to
qwen3-0.6b and bloom-560m on an H200."""
INT8_BYTES, INT4_BYTES = 1, 0.5
"""Bytes per element of what ZeRO++ sends quantised. Its scales are left out: 4 B for some 4,000 to
16,000 weights (partition_parameters.py, `CUDAQuantizer`)."""
STEP_LAUNCHES = {1: 145, 2: 145, 3: 600}
"""What the optimizer's step of a stage adds for each layer: norms, checks, copies between flat
buffers and weights. Of stages 1 and 2 it is what qwen3-0.6b took longer by `zero2` on an H200."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Time of a step, by part."""

    compute_seconds: float
    launch_seconds: float
    """What the host takes to launch the operations of all passes, as far as that is longer than
    their arithmetic."""
    communication_seconds: float
    """All communication, including what is hidden behind the arithmetic."""
    exposed_communication_seconds: float
    """Communication that the step waits for."""
    offload_seconds: float
    """Traffic between GPU and host that the step waits for."""
    processor_seconds: float
    """Adam in host memory, on the processor."""
    optimizer_seconds: float
    """The rest of the optimizer's step: the GPU's Adam or, where that is longer, the host's
    launches for it."""

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return (
            self.compute_seconds
            + self.launch_seconds
            + self.exposed_communication_seconds
            + self.offload_seconds
            + self.processor_seconds
            + self.optimizer_seconds
        )


def step_time(work: Workload, machines: Machines) -> StepTime:
    """Seconds of one step.

    Where communication overlaps (DDP; ZeRO with `overlap_comm`) a pass takes the longer of its
    arithmetic and its traffic; otherwise it takes their sum. The all-gather after the optimizer's
    step of stages 1 and 2 overlaps with nothing. While gradients accumulate, DDP and stage 1 send
    none until the last pass; stage 2 sends them in each pass, and stage 3 also gathers parameters
    in each. A pass takes at least as long as the host needs to launch its operations.
    """
    flops_per_second = machines.achieved_flops(work.precision)
    flops, recomputed_flops = work.flops()
    forward_flops = flops / 3
    backward_flops = 2 * flops / 3 + recomputed_flops - work.frozen_flops()
    forward_seconds = forward_flops / flops_per_second
    backward_seconds = backward_flops / flops_per_second
    compute_seconds = forward_seconds + backward_seconds
    launch_seconds = machines.launch_seconds * launches_of_a_pass(work)
    launch_wait = max(0.0, launch_seconds - compute_seconds)
    # While the GPU waits for the host, communication goes on.
    stretch = 1 + launch_wait / compute_seconds

    sending = traffic(work, machines)
    forward_wait = sending.forward
    backward_wait = sending.backward
    # DDP and FSDP always overlap communication with arithmetic.
    if work.zero.overlap or not work.technique.uses_deepspeed:
        forward_wait = max(0.0, sending.forward - stretch * forward_seconds)
        backward_wait = max(0.0, sending.backward - stretch * backward_seconds)

    passes = work.gradient_accumulation
    passes_that_reduce = passes if work.technique.divides_gradients else 1
    return StepTime(
        compute_seconds=passes * compute_seconds,
        launch_seconds=passes * launch_wait,
        communication_seconds=passes * sending.forward
        + passes_that_reduce * sending.backward
        + sending.after,
        exposed_communication_seconds=passes * forward_wait
        + passes_that_reduce * backward_wait
        + sending.after,
        offload_seconds=_offload_seconds(work, machines),
        processor_seconds=_processor_seconds(work, machines),
        optimizer_seconds=_optimizer_seconds(work, machines),
    )


def launches_of_a_pass(work: Workload) -> int:
    """Number of operations that the host launches for a forward and a backward pass. What it does
    for ZeRO-3 beside them counts as the number of launches that take as long."""
    layer_launches = LAYER_LAUNCHES[work.shape.is_decoder_only]
    runs_of_a_layer = 2
    if work.checkpointing:
        layer_launches += AGAIN_LAUNCHES
        runs_of_a_layer = 3
    if work.technique.divides_parameters:
        layer_launches += runs_of_a_layer * STAGE_3_LAUNCHES
    return OUTSIDE_LAUNCHES + sum(work.shape.layers) * layer_launches


def _optimizer_seconds(work: Workload, machines: Machines) -> float:
    """Seconds of the optimizer's step: the GPU's Adam or, where that takes longer, what the host
    does for it with DeepSpeed.

    The host alone counts where the GPU has no part, since the processor runs Adam
    (`_processor_seconds`), and where the bandwidth of the GPU's memory is not known.
    """
    technique = work.technique
    launch_seconds = 0.0
    if technique.uses_deepspeed:
        launches = STEP_LAUNCHES[technique.stage] * sum(work.shape.layers)
        launch_seconds = machines.launch_seconds * launches
    bandwidth = memory_bandwidth(machines.gpu)
    if technique.offloads or bandwidth is None:
        return launch_seconds
    if technique.uses_deepspeed or work.master_bytes:
        bytes_of_a_parameter: float = HALF_ADAM_BYTES if work.is_half else ADAM_BYTES
    else:
        # Weight, gradient and moments are read, and all but the gradient written.
        bytes_of_a_parameter = 3 * work.trained_bytes + 2 * work.moment_bytes
    parameters = work.trained
    if technique.divides_optimizer:
        parameters = share(parameters, work.ranks)
    return max(bytes_of_a_parameter * parameters / bandwidth, launch_seconds)


def _offload_seconds(work: Workload, machines: Machines) -> float:
    """Seconds in which a step waits for traffic between the GPU and its host, and for a disk; 0
    without offload.

    Gradients go to the host in FP32, once a step; weights come back, those of stage 3 in each pass,
    of 1 and 2 once, after the step. Gradients that accumulate on the host are fetched, added to on
    the GPU, and sent back (DeepSpeed 0.19.8, stage_1_and_2.py,
    `async_accumulate_grad_in_cpu_via_gpu`; stage3.py, `partition_grads`, which does so in a single
    pass too).

    In stages 1 and 2 one process after the other copies its gradients while the rest wait: a share
    is a run of tensors in the model's order, and the next bucket is reduced on the stream that
    copies this one's (`reduce_ipg_grads`; `round_robin_gradients`, which would spread the tensors,
    is off). Stage 3 divides each tensor, so that all copy at the same time.
    """
    technique = work.technique
    if not technique.offloads:
        return 0.0
    passes = work.gradient_accumulation
    parameters = share(work.shape.parameters, work.ranks)
    # Gradients on their way to the masters, in FP32. In stages 1 and 2 the processes copy in turn,
    # so that each waits for those of all.
    fp32_gradient_bytes = MASTER * parameters
    if not technique.divides_parameters:
        fp32_gradient_bytes = MASTER * work.shape.parameters
    if technique.divides_parameters:
        # Weights go to the GPU twice in a pass; gradients go there and back.
        weight_bytes = 2 * passes * work.element_bytes * parameters
        gradient_bytes = 2 * passes * work.element_bytes * parameters
        all_bytes = fp32_gradient_bytes + weight_bytes + gradient_bytes
        # No other stage offloads to a disk.
        return all_bytes / machines.host_link + _nvme_seconds(work, machines)

    weight_bytes = work.element_bytes * parameters
    seconds = (fp32_gradient_bytes + weight_bytes) / machines.host_link
    if passes > 1:
        # In stage 1 there and back once, in the pass that reduces.
        copies = 2
        if technique.divides_gradients:
            # There and back in each pass, but the first pass has nothing to fetch.
            copies = 2 * passes - 1
        # Whole tensors, summed over all ranks.
        elements = touched_by_all(work.shape, work.rates_by_kind, work.ranks)
        gradient_bytes = copies * work.element_bytes * elements
        seconds += gradient_bytes / (GRADIENT_COPY_SHARE * machines.host_link)
    return seconds


def _nvme_seconds(work: Workload, machines: Machines) -> float:
    """Seconds in which all processes of a pod read and write what lies on its disk, one sub-group
    after the other, while nothing else runs; 0 where nothing lies there.

    Gradients of the masters are written in the backward pass; then masters, moments and gradients
    are read, and masters and moments written (DeepSpeed 0.19.8, stage3.py,
    `_offload_grad_partition_at_boundary`, `_optimizer_states_and_gradient_swap_in` and `_out`;
    `pipeline_read` and `pipeline_write` are off).
    """
    if not work.zero.on_nvme or machines.nvme_bandwidth is None:
        return 0.0
    master_and_gradient_bytes = 2 * work.master_bytes
    # Each of them is read once and written once.
    bytes_of_a_parameter = 2 * (master_and_gradient_bytes + work.moment_bytes)
    parameters = share(work.shape.parameters, work.ranks)
    return machines.slots * bytes_of_a_parameter * parameters / machines.nvme_bandwidth


def _processor_seconds(work: Workload, machines: Machines) -> float:
    """Seconds of Adam on the host, where the processes of a pod share the processor; 0 without
    offload."""
    if not work.technique.offloads:
        return 0.0
    parameters = share(work.shape.parameters, work.ranks)
    return machines.slots * ADAM_BYTES * parameters / machines.host_bandwidth


# Seconds on the network, by the collectives that NCCL chooses.
#
# An all-gather or a reduce-scatter sends (R - 1) / R of a tensor over each link of a ring of R
# processes, an all-reduce twice as much (Patarasuk & Yuan 2009, doi:10.1016/j.jpdc.2008.09.002).
# The ring enters and leaves a pod once: slots share a pod's link, and add no traffic to it, only
# hops within the pod. An all-reduce takes a pair of trees between the pods where their fewer hops
# outweigh the volume, which is twice the tensor (NCCL 2.7, src/graph/tuning.cc).


class Traffic(NamedTuple):
    """Seconds of communication in a step of one pass, by what can run at the same time."""

    forward: float
    """Gathering parameters for the forward pass."""
    backward: float
    """Gathering parameters for the backward pass, and reducing gradients."""
    after: float
    """What follows the optimizer's step, when nothing else runs."""


@dataclass(frozen=True)
class Network:
    """The links between all processes, and one tensor on them: all parameters, or all gradients."""

    machines: Machines
    ranks: int
    tensor_bytes: int

    @property
    def link(self) -> float:
        """Bytes per second of the slowest link of a ring over all processes."""
        if self.machines.pods > 1:
            return self.machines.bandwidth
        return self.machines.peer_bandwidth or self.machines.host_link

    @property
    def hops(self) -> int:
        """Number of hops of a message within a pod, past all its processes."""
        return self.machines.slots - 1

    @property
    def hop_seconds(self) -> float:
        """Seconds of each of these hops."""
        return PCIE_LATENCY if self.machines.peer_bandwidth is None else NVLINK_LATENCY

    def ring_seconds(self, messages: int) -> float:
        """Seconds in which the tensor passes round the ring once, cut into this many messages: an
        all-gather or a reduce-scatter."""
        pods = self.machines.pods
        latency = pods * self.hops * self.hop_seconds + (pods - 1) * self.machines.latency_seconds
        sent_bytes = (self.ranks - 1) / self.ranks * self.tensor_bytes
        return sent_bytes / self.link + messages * latency

    def all_reduce_seconds(self, messages: int) -> float:
        """Seconds in which the tensor is summed on every process, cut into this many messages:
        twice round the ring, or up and down the trees where that is quicker."""
        levels = int(math.log2(self.machines.pods))
        latency = self.hops * self.hop_seconds + levels * self.machines.latency_seconds
        tree_seconds = self.tensor_bytes / self.link / TREE_SHARE + messages * latency
        return min(2 * self.ring_seconds(messages), 2 * tree_seconds)


def traffic(work: Workload, machines: Machines) -> Traffic:
    """Seconds of communication in a step of one pass; zero for one process."""
    if work.ranks == 1:
        return Traffic(0.0, 0.0, 0.0)
    technique = work.technique
    zero = work.zero
    parameters = work.shape.parameters
    network = Network(machines, work.ranks, work.element_bytes * parameters)
    if work.is_fsdp or work.method.adapter is not None:
        return _traffic_of_adapters_or_fsdp(work, network)

    if not technique.uses_deepspeed:
        buckets = math.ceil(network.tensor_bytes / DDP_BUCKET_BYTES)
        return Traffic(0.0, network.all_reduce_seconds(buckets), 0.0)

    buckets = math.ceil(parameters / zero.reduce_elements)
    if not technique.divides_parameters:
        if zero.multi_rank_all_reduce:
            reduce_seconds = network.all_reduce_seconds(buckets)
        else:
            reduce_seconds = network.ring_seconds(buckets)
        return Traffic(0.0, reduce_seconds, network.ring_seconds(1))

    gathered = network
    # A matrix is gathered by itself; other tensors are too small to count.
    messages = sum(weight.is_matrix for weight in work.shape.weights)
    if zero.quantizes_weights:
        gathered = replace(network, tensor_bytes=INT8_BYTES * parameters)
        # The scales are sent by themselves.
        messages *= 2
    forward_seconds = gathered.ring_seconds(messages)
    again_seconds = forward_seconds
    if zero.secondary_ranks > 1:
        # Once a step over all processes, every other time within a pod: the mean of all passes.
        again_seconds = _within_a_pod(gathered, zero.secondary_ranks).ring_seconds(messages)
        passes = work.gradient_accumulation
        forward_seconds = (forward_seconds + (passes - 1) * again_seconds) / passes
    # Parameters that the forward pass has left gathered need not be fetched again.
    share_to_fetch_again = max(0.0, 1 - zero.live_elements / parameters)
    if zero.quantizes_gradients and machines.pods > 1:
        reduce_seconds = _quantized_reduction_seconds(work, network)
    else:
        reduce_seconds = network.ring_seconds(buckets)
    return Traffic(forward_seconds, share_to_fetch_again * again_seconds + reduce_seconds, 0.0)


def _quantized_reduction_seconds(work: Workload, network: Network) -> float:
    """Seconds in which ZeRO++ reduces all gradients once, as INT4.

    Each process sends a part of a matrix's gradient to every other process of its pod; then it
    sends the sum of the parts that it got to the process with its number in every other pod. That
    makes half a byte for each parameter, first within a pod, then through a pod's link. Scales are
    sent by themselves, so that there are four messages a matrix. Gradients that cannot be divided
    among twice the processes, and those of biases and norms, go round the ring as they are
    (DeepSpeed 0.19.8, coalesced_collectives.py, `all_to_all_quant_reduce`).
    """
    machines = network.machines
    quantized_elements = 0
    matrices = 0
    for weight in work.shape.weights:
        if weight.is_matrix and weight.size % (2 * work.ranks) == 0:
            quantized_elements += weight.size
            matrices += 1
    quantized_bytes = INT4_BYTES * quantized_elements
    pod_link = _within_a_pod(network, machines.slots).link
    within_pods = (machines.slots - 1) / machines.slots * quantized_bytes / pod_link
    between_pods = (machines.pods - 1) / machines.pods * quantized_bytes / network.link
    latency = network.hops * network.hop_seconds + machines.latency_seconds
    other_bytes = work.element_bytes * (work.shape.parameters - quantized_elements)
    others = replace(network, tensor_bytes=other_bytes).ring_seconds(1)
    return within_pods + between_pods + 2 * matrices * latency + others


def _within_a_pod(network: Network, ranks: int) -> Network:
    """The same tensor on the links of one pod."""
    machines = replace(network.machines, pods=1, slots=ranks)
    return replace(network, machines=machines, ranks=ranks)


def _traffic_of_adapters_or_fsdp(work: Workload, all_weights: Network) -> Traffic:
    """Seconds of communication with adapters, whose gradients alone are sent, or of FSDP2, which
    gathers each layer twice.

    Args:
        all_weights: the network, with all weights as its tensor.
    """
    technique = work.technique
    gradient_bytes = min(work.trained_bytes, work.element_bytes) * work.trained
    gradients = replace(all_weights, tensor_bytes=gradient_bytes)
    if not technique.divides_parameters:
        after = gradients.ring_seconds(1) if technique.divides_optimizer else 0.0
        return Traffic(0.0, gradients.all_reduce_seconds(1), after)
    gathered = all_weights
    if work.method.adapter is not None:
        gathered = replace(all_weights, tensor_bytes=work.frozen_bytes)
    # Weights and gradients are sent a layer at a time.
    layers = sum(work.shape.layers)
    gather_seconds = gathered.ring_seconds(layers)
    return Traffic(gather_seconds, gather_seconds + gradients.ring_seconds(layers), 0.0)
