"""The device that a process trains on: its memory, its number formats and its speed.

Here is also what suits a model to it: lengths, compiled passes, cheaper operations on a CPU.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zeropods.errors import UserError
from zeropods.measure.record import PhasePeak
from zeropods.measure.sampling import Counters, Gpu, find_gpu, resident_bytes
from zeropods.train.flags import NO_FP16

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# What torch reports about the device that this process trains on.


class CudaCounters(Counters):
    """Memory peaks of the process, and of torch's allocator on its GPU.

    The peaks of the allocator are reset at the start.
    """

    def __init__(self) -> None:
        torch.cuda.init()
        torch.cuda.reset_peak_memory_stats()

    def peaks(self) -> PhasePeak:
        """The peaks since the last reset."""
        allocated = torch.cuda.max_memory_allocated()
        reserved = torch.cuda.max_memory_reserved()
        peaks = super().peaks()
        return replace(peaks, peak_allocated_bytes=allocated, peak_reserved_bytes=reserved)

    def reset(self) -> bool:
        """Reset all peaks; False where the kernel's peak of the process cannot be reset."""
        torch.cuda.reset_peak_memory_stats()
        return super().reset()


def held_bytes() -> dict[str, float | None]:
    """Bytes that the process, and torch's allocator on its GPU, hold now.

    Returns:
        The bytes by column of `memory/N.csv`; those of the allocator only in a process that uses a
        GPU.
    """
    columns: dict[str, float | None] = {"resident_bytes": resident_bytes()}
    if torch.cuda.is_initialized():
        columns["allocated_bytes"] = torch.cuda.memory_allocated()
        columns["reserved_bytes"] = torch.cuda.memory_reserved()
    return columns


def gpu_name() -> str | None:
    """Name of this process's GPU; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_name()


def gpu_by_nvml() -> Gpu | None:
    """This process's GPU as NVML knows it; None on a CPU, or where NVML does not know it."""
    if not torch.cuda.is_available():
        return None
    device: Any = torch.cuda.get_device_properties()
    domain = f"{device.pci_domain_id:08X}"
    bus = f"{device.pci_bus_id:02X}"
    slot = f"{device.pci_device_id:02X}"
    return find_gpu([f"GPU-{device.uuid}", f"MIG-{device.uuid}", f"{domain}:{bus}:{slot}.0"])


def device_type() -> str:
    """The type of device that this process computes on: `cuda` or `cpu`."""
    if torch.cuda.is_available():
        return "cuda"
    return "cpu"


def synchronize() -> None:
    """Wait until the device has finished its queued work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# Choices that suit a GPU where lengths vary from batch to batch.

CUDNN_ATTENTION = "ZEROPODS_CUDNN_ATTENTION"
"""Environment variable that lets attention use cuDNN, with the value 1."""
CPU_MULTIPLE = 1
"""Multiple of tokens that lengths are padded to on a CPU, where every further token takes time."""
GPU_MULTIPLE = 8
"""The same on a GPU: few shapes, and BF16 rows that are aligned to 16 bytes."""
COMPILED_MULTIPLE = 16
"""The same for compiled passes. The backward pass of memory-efficient attention asks whether a
length is a multiple of 16, and torch compiles each kind of layer once for every answer (seen with
torch 2.11 on an H200: 7 to 18 s each)."""


def choose_attention() -> None:
    """Keep attention away from cuDNN, unless the environment asks for it.

    It is called in each process that trains or answers, and holds for the whole process.

    With a cuDNN above 9.15, as torch has it from 2.11 on, attention in BF16 or FP16 tries cuDNN
    first on GPUs of compute capability 9.0 and 10.0 (torch's sdp_utils.cpp,
    `check_prefer_cudnn_attention`). cuDNN builds a plan for each new shape, which takes up to a
    second, and batches here have hundreds of shapes; each token of an answer makes a new one.

    Measured on an H200 (results/gpu): t5-small trains at 481 samples/s without cuDNN and at 266
    with it, over 60 steps; 2,000 answers come at 345 questions/s without, 512 at 65 with it.
    `ZEROPODS_CUDNN_ATTENTION=1` measures it again.

    Raises:
        UserError: the variable has another value than 0 or 1.
    """
    wanted = os.environ.get(CUDNN_ATTENTION) or "0"
    if wanted not in ("0", "1"):
        raise UserError(f"{CUDNN_ATTENTION} {wanted!r}; expected 1, or 0 for the other kernels")
    torch.backends.cuda.enable_cudnn_sdp(wanted == "1")


def padding_multiple(given: int | None = None, compiled: bool = False) -> int:
    """The multiple of tokens that lengths are padded to: the given one, or what suits the device.

    Args:
        compiled: whether the passes of the model are compiled.
    """
    if given is not None:
        return given
    if not torch.cuda.is_available():
        return CPU_MULTIPLE
    if compiled:
        return COMPILED_MULTIPLE
    return GPU_MULTIPLE


# Which number format a run uses, and whether the hardware multiplies in it.


def is_ampere() -> bool:
    """Whether this process's GPU is of the Ampere generation or later (compute capability 8.0).

    These have TF32, and can run FlashAttention-2.
    """
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)


def multiplies_bf16() -> bool:
    """Whether this machine has BF16 arithmetic.

    Without it PyTorch's BF16 is 200 times slower than FP32.
    """
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


def resolve_precision(precision: str, model_id: str) -> str:
    """The number format of a run: `fp32`, `bf16` or `fp16`.

    Args:
        precision: the value of `--precision`. `auto` chooses BF16 where the hardware has it and the
            model gains from it, and else FP32.
        model_id: the model's name or folder.

    Raises:
        UserError: FP16 without a GPU.
    """
    has_gpu = torch.cuda.is_available()
    if precision == "fp16" and not has_gpu:
        raise UserError(NO_FP16)
    if precision != "auto":
        return precision
    # A CPU builds and keeps a BF16 kernel for each new length, which takes longer than a tiny model
    # saves.
    gains_nothing = model_id.endswith("-tiny") and not has_gpu
    if multiplies_bf16() and not gains_nothing:
        return "bf16"
    return "fp32"


# A T5 whose passes are compiled: fewer kernels to launch, or none at all.
#
# A small model with a small batch waits for kernel launches, not for arithmetic.
#
# `blocks` compiles four kinds of layer, the first and the others of encoder and decoder, each once
# for all lengths (`COMPILED_MULTIPLE`), and fuses what lies between matrix products.
#
# `graphs` compiles encoder and decoder whole and replays them as CUDA graphs, one for each pair of
# lengths: a whole pass is then a handful of launches. It has not been seen to work yet: with torch
# 2.11 on an H200 a t5-small ended by SIGSEGV in its third step (docs/gpu.md).
#
# Source: torch.compile's regional compilation, and CUDA graph trees (`mode="reduce-overhead"`).

MOST_SHAPES = 256
"""Number of graphs of one function before torch gives up compiling it.

Each pair of lengths has two graphs.
"""


def compile_model(model: Any, how: str) -> None:
    """Compile a T5's layers, or its encoder and decoder, in place.

    Names of parameters, and so saved files, do not change.

    Args:
        how: `off`, `blocks` or `graphs`.
    """
    if how == "off":
        return
    import torch._dynamo

    settings = torch._dynamo.config
    settings.recompile_limit = max(MOST_SHAPES, settings.recompile_limit)
    # Compiling again for each new length would never end, so lengths are symbols from the start.
    for stack in (model.encoder, model.decoder):
        if how == "graphs":
            stack.compile(dynamic=True, mode="reduce-overhead")
        else:
            for block in stack.block:
                block.compile(dynamic=True)


# A model made of operations that suit a CPU.
#
# Names of parameters, and so saved files, do not change.
#
# Dropout at a quarter of the cost: 16 random bits per element instead of a Bernoulli draw, and a
# mask of bits.
#
# On a CPU `bernoulli_` draws with one thread and takes a fifth of T5's training step. Sixteen bits
# of the same generator, compared with a threshold, give the rate to within 1 in 65,536. The mask
# sets all bits of an element or none, so that one `and` applies it: `where` takes three to seven
# times as long.

LEVELS = 1 << 16
"""Number of values that 16 random bits have."""
ELEMENTS_PER_DRAW = 4
"""Number of elements whose 16 bits come from one random number of 64 bits."""
INTEGER_TYPES = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by the number of bytes of an element."""


class _Dropout(torch.autograd.Function):
    """Dropout of a CPU tensor whose elements have 2, 4 or 8 bytes."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, rate: float) -> Tensor:
        # Number of the `LEVELS` values of 16 bits that drop an element. At least one value keeps
        # an element, since the scale would be infinite otherwise.
        dropping_levels = min(round(rate * LEVELS), LEVELS - 1)
        keep_mask = _keep_mask(values.shape, dropping_levels)
        # The scale keeps the mean.
        ctx.scale = LEVELS / (LEVELS - dropping_levels)
        ctx.save_for_backward(keep_mask)
        return _masked(values, keep_mask, ctx.scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (keep_mask,) = ctx.saved_tensors
        return _masked(gradients[0], keep_mask, ctx.scale), None


def _keep_mask(shape: torch.Size, dropping_levels: int) -> Tensor:
    """A mask of 16 bits an element: -1, which sets all bits, for one that stays, and 0 for others.
    Of `LEVELS` equally likely levels, `dropping_levels` drop an element.

    The random bits are freed when this returns, before the masked values are made.
    """
    elements = shape.numel()
    draws = math.ceil(elements / ELEMENTS_PER_DRAW)
    words = torch.empty(draws, dtype=torch.int64)
    # From the whole range of 64 bits: `random_()` draws no negative numbers, so that the top bit of
    # every fourth element would be 0.
    words.random_(-(1 << 63), None)
    bits = words.view(torch.int16)[:elements]
    # As signed numbers, 16 bits begin at -LEVELS / 2.
    threshold = dropping_levels - LEVELS // 2
    mask = torch.empty_like(bits)
    # Written into the mask as 1 or 0, without a tensor of truth values in between.
    torch.ge(bits, threshold, out=mask)
    return mask.neg_().view(shape)


def _masked(values: Tensor, keep_mask: Tensor, scale: float) -> Tensor:
    """The values, times `scale`, where the mask is -1; zeros where it is 0."""
    as_integers = values.view(INTEGER_TYPES[values.element_size()])
    kept_bits = as_integers & keep_mask
    return kept_bits.view(values.dtype).mul_(scale)


class BitDropout(nn.Dropout):
    """Drops elements at the rate of `nn.Dropout`, on a CPU with cheaper masks."""

    def forward(self, input: Tensor) -> Tensor:
        """In training, zero elements with probability `p` and scale the others by 1 / (1 - p)."""
        if not self.training or input.device.type != "cpu":
            return super().forward(input)
        if not self.p:
            return input
        return _Dropout.apply(input, self.p)


# Products with weights that no longer change, laid out once in the format that oneDNN multiplies.
#
# On AMD, MKL multiplies FP32 without AVX-512, at half the speed; on CPUs that have no AVX-512 both
# are equally fast.


class PackedLinear(nn.Module):
    """A linear layer without gradients."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach())
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = layer.bias

    def forward(self, values: Tensor) -> Tensor:
        """Map (..., inputs) to (..., outputs)."""
        return torch.ops.mkldnn._linear_pointwise(values, self.weight, self.bias, "none", [], "")


def prepack(model: PreTrainedModel) -> None:
    """Replace the linear layers of a model that only predicts, in place, on a CPU with AVX-512.

    PyTorch's operations for this have no public name: where they are missing, layers stay as they
    are. The head stays, since its rows are embeddings too.
    """
    if model.device.type != "cpu":
        return
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return
    head = model.get_output_embeddings()

    def packed(layer: nn.Linear) -> nn.Module:
        if layer is head:
            return layer
        return PackedLinear(layer)

    _replace(model, nn.Linear, packed)


def suit_cpu(model: nn.Module) -> None:
    """Put a `BitDropout` in the place of every dropout module, in place.

    Dropout inside attention is no module, and stays PyTorch's own.
    """
    _replace(model, nn.Dropout, lambda dropout: BitDropout(dropout.p))


def _replace(
    model: nn.Module, kind: type[nn.Module], replacement: Callable[[Any], nn.Module]
) -> None:
    """Put `replacement(child)` in the place of each child that is of exactly this kind."""
    # A list, since the modules are replaced while they are walked.
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is kind:
                setattr(module, name, replacement(child))


# How fast this machine multiplies matrices: the peak that a CPU's manufacturer does not publish.

MEASURING_SECONDS = 0.06
"""Seconds for which one size, or one operation, is measured, after a warm-up round."""
SIDES = {"cpu": (256, 512, 1_024), "cuda": (2_048, 4_096, 8_192)}
"""Sides of the square matrices that are tried: small ones wait for memory, large ones take long."""
TORCH_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""torch's types of numbers by this project's names of precisions."""


def matmul_rates(precision: str) -> dict[int, float]:
    """FLOP/s of matrix multiplications on this rank's device, with all cores that the process may
    use.

    Two n x n matrices take 2 n^3 FLOP. A size that would take too long is not tried: some CPUs only
    emulate BF16. Afterwards the number of threads is as before, and the GPU cache is emptied.

    Args:
        precision: `fp32` (without TF32, as a run trains), `bf16` or `fp16`.

    Returns:
        The rates by side of the matrices.
    """
    device = device_type()
    dtype = TORCH_TYPES.get(precision, torch.float32)
    threads_before = torch.get_num_threads()
    rates: dict[int, float] = {}
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        for side in SIDES[device]:
            flop = 2 * side**3
            # The sides grow, so larger ones would take too long as well.
            if rates and flop / max(rates.values()) > MEASURING_SECONDS:
                break
            rates[side] = flop / _product_seconds(side, dtype, device)
    finally:
        torch.set_num_threads(threads_before)
        if device == "cuda":
            torch.cuda.empty_cache()
    return rates


def _product_seconds(side: int, dtype: torch.dtype, device: str) -> float:
    """Seconds of the product of two matrices; they are freed when this returns."""
    # A separate generator: the run's own random numbers must depend on its seed alone.
    generator = torch.Generator(device).manual_seed(0)
    left = torch.randn(side, side, dtype=dtype, device=device, generator=generator)
    right = torch.randn(side, side, dtype=dtype, device=device, generator=generator)
    product = torch.empty_like(left)
    return fastest_seconds(lambda: torch.matmul(left, right, out=product), MEASURING_SECONDS)


def fastest_seconds(action: Callable[[], object], seconds: float) -> float:
    """Seconds of the fastest round of `action`.

    Args:
        seconds: how long to repeat it, after a warm-up round.
    """
    action()
    synchronize()
    fastest = float("inf")
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        round_began = time.perf_counter()
        action()
        synchronize()
        round_seconds = time.perf_counter() - round_began
        fastest = min(fastest, round_seconds)
    return fastest
