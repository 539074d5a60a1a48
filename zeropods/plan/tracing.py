"""What a forward pass saves and multiplies, found by one pass on the meta device.

The model is traced with numbers of rows, tokens and labels that are primes and divide none of its
own sizes: how often each prime divides the size of a tensor says how that size grows with them. So
one pass gives the size at all lengths.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel, masking_utils
from transformers.integrations import moe
from transformers.pytorch_utils import Conv1D

from zeropods.errors import UserError
from zeropods.plan.adapters import Adapted, adapted
from zeropods.plan.methods import LORA
from zeropods.plan.workload import EAGER, MASKED, PLAIN, value_at

MOST_SECONDS = 30.0
"""Most seconds that one forward pass on the meta device may take."""
SMALLEST = 16
"""Number of tokens that a traced row must exceed: a smaller prime divides many sizes."""
MOST_PADDED = 0.02
"""Largest share of what a pass saves that may grow with its rows and with no length."""
HALF_BY_AUTOCAST = {
    "linear",
    "matmul",
    "__matmul__",
    "addmm",
    "bmm",
    "baddbmm",
    "einsum",
    "scaled_dot_product_attention",
}
FLOAT_BY_AUTOCAST = {
    "pow",
    "__pow__",
    "rsqrt",
    "exp",
    "softmax",
    "log_softmax",
    "layer_norm",
    "norm",
    "cumsum",
    "sum",
}
"""Operations that models use and autocast runs in FP16, and in FP32 (PyTorch 2.13,
`autocast_mode.h`)."""


def stacks_of(model: PreTrainedModel) -> list[nn.ModuleList]:
    """The lists of layers: those of the encoder and of the decoder, or one list of all."""
    sides: list[nn.Module] = [model]
    if model.config.is_encoder_decoder:
        sides = [model.get_encoder(), model.get_decoder()]
    stacks = []
    for side in sides:
        lists = [module for module in side.modules() if isinstance(module, nn.ModuleList)]
        if not lists:
            place = model.config.model_type
            raise UserError(f"{place}: no list of layers found in this model; give a known name")
        # Some models also have short lists of other modules.
        stacks.append(max(lists, key=parameters_of))
    return stacks


def parameters_of(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def is_of_experts(parameter: Tensor) -> bool:
    """Whether a parameter holds matrices of all experts; a convolution has a dimension of one."""
    return parameter.dim() == 3 and min(parameter.shape) > 1


class Pass:
    """One forward pass of a model in training on a GPU, with rows padded on the right; sizes are
    kept by `_power`.

    Args:
        pass_name: its name, as in `Workload.saved`: precision, kernel, dropout; with adapters
            `lora`, kernel, targets, dropout.
        active: share of the experts that a token uses.
    """

    def __init__(
        self, model: PreTrainedModel, window: int | None, pass_name: str, active: float = 1.0
    ) -> None:
        words = pass_name.split()
        self.precision = words[0]
        self.kernel = words[1]
        has_dropout = words[-1] == "dropout"
        model.set_attn_implementation("eager" if self.kernel == EAGER else "sdpa")
        if self.precision == LORA:
            model = adapted(model, words[2])
        else:
            model.to(torch.bfloat16 if self.precision == "bf16" else torch.float32)
        model.train(has_dropout)
        self.model = model
        self.active = active
        self.is_causal = not model.config.is_encoder_decoder
        self.lists = stacks_of(model)
        self.primes = _primes(model, window, masked=self.kernel == MASKED)
        """Rows, tokens and labels of the batch: three primes, so that a size shows which of
        them are its factors."""
        self.stacks: list[Counter[str]] = [Counter() for _ in self.lists]
        self.inputs: list[dict[str, int]] = [{} for _ in self.lists]
        self.held = Counter[str]()
        self.ends = Counter[str]()
        self.products = Counter[str]()
        self.inner = 0
        self.scores = 0
        self._into = [self.ends]
        """Where the bytes that are saved are counted: last the layer that runs."""
        tensors = (*model.parameters(), *model.buffers())
        self._seen = {tensor.untyped_storage()._cdata: tensor for tensor in tensors}
        """Tensors whose memory has been counted or is the model's own, by address."""
        self._given = dict(self._seen)
        """The same for what layers are given."""

    def run(self) -> dict[str, Any]:
        """Run the pass, and return the fields of `Saved`."""
        rows, tokens, labels = self.primes
        with contextlib.ExitStack() as during:
            for handle in self._hooks():
                during.callback(handle.remove)
            for context in _on_a_gpu(self.kernel == PLAIN):
                during.enter_context(context)
            during.enter_context(
                torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)
            )
            if self.precision in ("autocast", LORA):
                during.enter_context(_Autocast())
            batch = {"input_ids": torch.ones(rows, tokens, dtype=torch.long)}
            if not self.is_causal:
                batch["decoder_input_ids"] = torch.ones(rows, labels, dtype=torch.long)
                # The mask has its final form: the meta device cannot check whether a mask hides
                # anything.
                batch["attention_mask"] = torch.ones(rows, 1, 1, tokens, dtype=torch.bool)
            self._until = time.monotonic() + MOST_SECONDS
            self.model(**batch, use_cache=False)
        self._check_that_sizes_grow()
        found: dict[str, Any] = {
            "layers": [dict(stack) for stack in self.stacks],
            "inputs": self.inputs,
            "held": dict(self.held),
            "ends": dict(self.ends),
            "scores": self.scores,
        }
        if self.precision == LORA:
            found |= self._adapters()
        return found

    def _adapters(self) -> dict[str, Any]:
        """The fields of `Saved` that only adapters have."""
        elements = 0
        numbers = []
        for layers in self.lists:
            adapters = [module for module in layers.modules() if isinstance(module, Adapted)]
            elements += sum(module.elements for module in adapters)
            numbers.append(len(adapters))
        return {"adapter": elements, "adapted": numbers}

    def _check_that_sizes_grow(self) -> None:
        """Refuse a model of which much of what it saves grows with its rows, and with no length."""
        kept = self.ends + sum(self.stacks, Counter())
        of_rows_alone = {
            power: kept[power] for power in kept if power[0] != "0" and power[1:] == "00"
        }
        if value_at(of_rows_alone, *self.primes) > MOST_PADDED * value_at(kept, *self.primes):
            raise ValueError(
                "it pads rows to a fixed length, "
                "or keeps states whose size does not depend on the length"
            )

    def _hooks(self) -> Iterator[Any]:
        """Register all hooks; yields the handle of each."""
        for number, layers in enumerate(self.lists):
            for layer in layers:
                yield layer.register_forward_pre_hook(
                    partial(self._enter, number), with_kwargs=True
                )
                yield layer.register_forward_hook(lambda *_: self._into.pop() and None)
            for module in layers.modules():
                if isinstance(module, nn.Linear | Conv1D):
                    yield module.register_forward_pre_hook(self._multiply)
                self._count_experts(module)
        head = self.model.get_output_embeddings()
        if head is not None and self.is_causal:
            rows, _, labels = self.primes
            some = torch.ones(rows * labels, dtype=torch.long, device="meta")
            yield head.register_forward_pre_hook(
                lambda _, given: given[0].flatten(0, 1).index_select(0, some)[None]
            )

    def _count_experts(self, module: nn.Module) -> None:
        """Count the products of a tensor that holds the matrices of all experts, of which each
        token uses some."""
        used = []
        for parameter in module.parameters(recurse=False):
            if is_of_experts(parameter):
                used.append(round(self.active * parameter.numel()))
        if used:
            width = int(self.model.get_input_embeddings().weight.shape[1])
            self.products["110"] += sum(used)
            self.inner = max(self.inner, min(used) // width)

    def _keep(self, tensor: Tensor) -> Tensor:
        if time.monotonic() > self._until:
            raise TimeoutError(
                f"tracing took more than {MOST_SECONDS:g} s: "
                "its layers process a row token by token"
            )
        self._count(tensor, self._seen, self._into[-1])
        return tensor

    def _count(self, tensor: Tensor, seen: dict[int, Tensor], into: Counter[str]) -> None:
        """Add a tensor's memory, unless it was seen before."""
        storage = tensor.untyped_storage()
        if storage._cdata in seen:
            return
        seen[storage._cdata] = tensor
        power, factor = _power(storage.nbytes(), self.primes)
        into[power] += factor
        grows_with_the_square = power == "120"
        if grows_with_the_square and into is not self.ends:
            self.scores = max(self.scores, factor)

    def _enter(
        self, number: int, layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        hidden = given[0] if given else named["hidden_states"]
        power, factor = _power(hidden.untyped_storage().nbytes(), self.primes)
        self.inputs[number] = {power: factor}
        for other in tree_leaves((given, named)):
            if isinstance(other, Tensor) and other is not hidden:
                self._count(other, self._given, self.held)
        self._into.append(self.stacks[number])

    def _multiply(self, module: nn.Module, given: tuple[Any, ...]) -> None:
        weight: Any = module.weight
        # transformers' Conv1D, in GPT-2, holds its matrix transposed.
        inputs = int(getattr(module, "in_features", weight.shape[0]))
        self.inner = max(self.inner, inputs)
        power, factor = _power(given[0].numel() // inputs, self.primes)
        self.products[power] += factor * weight.numel()


class _Autocast(TorchFunctionMode):
    """FP16 autocast, which the meta device lacks: it casts the inputs of an operation, and each
    parameter only once."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        kwargs = kwargs or {}
        if name in HALF_BY_AUTOCAST:
            kind = torch.half
        elif name in FLOAT_BY_AUTOCAST:
            kind = torch.float32
        else:
            return func(*args, **kwargs)

        def cast(given: Any) -> Any:
            if (
                not isinstance(given, Tensor)
                or not given.is_floating_point()
                or given.dtype == kind
            ):
                return given
            if not isinstance(given, nn.Parameter):
                return given.to(kind)
            return self._copies.setdefault(id(given), given.to(kind))

        args, kwargs = tree_map(cast, (args, kwargs))
        return func(*args, **kwargs)


class _Fused(torch.autograd.Function):
    """SDPA as a GPU's kernel runs it, which keeps no scores, only the logarithms of their sums."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        # The layout that transformers wants next: heads of a token beside each other.
        rows, heads, tokens, _ = query.shape
        output = query.new_empty(rows, tokens, heads, value.shape[-1]).transpose(1, 2)
        logarithms = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, logarithms, bias)
        return output


def _on_a_gpu(plain: bool) -> Iterator[contextlib.AbstractContextManager[Any]]:
    """Contexts that replace what the meta device would run, or could not run, by what a GPU runs.

    Args:
        plain: whether attention whose heads share keys runs by the plain formula, and not in a
            kernel.
    """

    def dropout(
        values: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or not p:
            return values
        # A mask of one byte per element is saved.
        return torch.native_dropout(values, p, True)[0]

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if enable_gqa and plain:
            math_kernel = torch.ops.aten._scaled_dot_product_attention_math
            options = {"scale": scale, "enable_gqa": enable_gqa}
            return math_kernel(query, key, value, attn_mask, dropout_p, is_causal, **options)[0]
        bias = None if attn_mask is None else attn_mask.to(query.dtype)
        return _Fused.apply(query, key, value, bias)

    yield torch.device("meta")
    yield _replaced(
        masking_utils, find_packed_sequence_indices=lambda _: None, fast_all=lambda _: True
    )
    yield _replaced(moe, _can_use_grouped_mm=lambda *_: False)
    yield _replaced(nn.functional, dropout=dropout, scaled_dot_product_attention=attention)


@contextlib.contextmanager
def _replaced(module: ModuleType, **functions: Any) -> Iterator[None]:
    """Replace functions of a module, all of which it must have, as long as the block goes on."""
    own = {name: getattr(module, name) for name in functions}
    vars(module).update(functions)
    try:
        yield
    finally:
        vars(module).update(own)


def _power(number: int, primes: tuple[int, int, int]) -> tuple[str, int]:
    """How often each prime divides a whole number, as digits, and what is left of the number."""
    rest = number
    digits = ""
    for prime in primes:
        count = 0
        while rest and rest % prime == 0:
            rest //= prime
            count += 1
        digits += str(count)
    return digits, rest


def _primes(model: PreTrainedModel, window: int | None, *, masked: bool) -> tuple[int, int, int]:
    """Rows, tokens and labels to trace with: three primes that divide no size of the model's
    tensors; tokens lie beyond the model's window if `masked`, else within it."""
    sizes = {size for parameter in model.parameters() for size in parameter.shape}

    def first(numbers: range, *others: int) -> int:
        for number in numbers:
            divides_none = all(size % number for size in sizes)
            if number not in others and divides_none and _is_prime(number):
                return number
        raise ValueError(f"a window of {window} tokens is too small to trace")

    if masked:
        tokens = first(range((window or 0) + 1, 10**6))
    else:
        tokens = first(range(min((window or 128) - 1, 127), SMALLEST, -1))
    rows = first(range(211, 10**6), tokens)
    labels = first(range(1_031, 10**6), tokens, rows)
    return rows, tokens, labels


def _is_prime(number: int) -> bool:
    return all(number % divisor for divisor in range(2, math.isqrt(number) + 1))
