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
SMALLEST_PRIME = 16
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
    """The lists of layers: those of the encoder and of the decoder, or one list of all.

    Raises:
        UserError: the model has no list of layers.
    """
    sides: list[nn.Module] = [model]
    if model.config.is_encoder_decoder:
        sides = [model.get_encoder(), model.get_decoder()]
    stacks = []
    for side in sides:
        lists = [module for module in side.modules() if isinstance(module, nn.ModuleList)]
        if not lists:
            model_type = model.config.model_type
            raise UserError(
                f"{model_type}: no list of layers found in this model; give a known name"
            )
        # Some models also have short lists of other modules.
        stacks.append(max(lists, key=parameters_of))
    return stacks


def parameters_of(module: nn.Module) -> int:
    """Number of elements of all parameters of a module."""
    return sum(parameter.numel() for parameter in module.parameters())


def is_of_experts(parameter: Tensor) -> bool:
    """Whether a parameter holds matrices of all experts; a convolution has a dimension of one."""
    return parameter.dim() == 3 and min(parameter.shape) > 1


class Pass:
    """One forward pass of a model in training on a GPU, with rows padded on the right.

    Sizes are kept as polynomials (`workload.Polynomial`). The model is changed: it gets the pass's
    attention and, unless a copy of it gets adapters, the pass's precision.

    Args:
        model: a model on the meta device.
        window: number of tokens that a layer with a window sees; None without such layers.
        pass_name: its name, as in `Workload.saved`: precision, kernel, dropout; with adapters
            `lora`, kernel, targets, dropout.
        active: share of the experts that a token uses.
    """

    def __init__(
        self, model: PreTrainedModel, window: int | None, pass_name: str, active: float = 1.0
    ) -> None:
        parts_of_name = pass_name.split()
        self.precision = parts_of_name[0]
        self.kernel = parts_of_name[1]
        has_dropout = parts_of_name[-1] == "dropout"
        model.set_attn_implementation("eager" if self.kernel == EAGER else "sdpa")
        if self.precision == LORA:
            targets = parts_of_name[2]
            model = adapted(model, targets)
        else:
            model.to(torch.bfloat16 if self.precision == "bf16" else torch.float32)
        model.train(has_dropout)
        self.model = model
        self.active = active
        self.is_causal = not model.config.is_encoder_decoder
        self.layers = stacks_of(model)
        self.primes = _primes(model, window, masked=self.kernel == MASKED)
        """Rows, tokens and labels of the batch: three primes, so that a size shows which of
        them are its factors."""
        self.saved_in_layers: list[Counter[str]] = [Counter() for _ in self.layers]
        self.inputs: list[dict[str, int]] = [{} for _ in self.layers]
        self.held = Counter[str]()
        self.ends = Counter[str]()
        self.products = Counter[str]()
        self.inner = 0
        self.scores = 0
        """These seven become fields of `Saved` and `Shape`, by their names there; `saved_in_layers`
        becomes `Saved.layers`."""
        self._counters = [self.ends]
        """Where the bytes that are saved are counted: the last one is that of the layer that runs,
        the first one that of all beside the layers."""
        tensors = (*model.parameters(), *model.buffers())
        self._counted = {tensor.untyped_storage()._cdata: tensor for tensor in tensors}
        """Tensors whose memory has been counted or is the model's own, by address. They are kept,
        so that no other tensor gets the address of one."""
        self._counted_as_held = dict(self._counted)
        """The same for what layers are given beside their input. Saved or not, it is counted by
        itself: a plan adds it only with checkpointing, in place of what layers save."""
        self._deadline = math.inf
        """Time of the monotonic clock at which the pass is given up."""

    def run(self) -> dict[str, Any]:
        """Run the pass, which can be done once, and return the fields of `Saved`.

        Raises:
            ValueError: much of what is saved does not grow with the lengths.
            TimeoutError: the pass takes more than `MOST_SECONDS`.
        """
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
            self._deadline = time.monotonic() + MOST_SECONDS
            self.model(**batch, use_cache=False)
        self._check_that_sizes_grow()
        fields: dict[str, Any] = {
            "layers": [dict(counter) for counter in self.saved_in_layers],
            "inputs": self.inputs,
            "held": dict(self.held),
            "ends": dict(self.ends),
            "scores": self.scores,
        }
        if self.precision == LORA:
            fields |= self._fields_of_adapters()
        return fields

    def _fields_of_adapters(self) -> dict[str, Any]:
        """The fields of `Saved` that only a pass with adapters has."""
        elements = 0
        adapters_of_stacks = []
        for layers in self.layers:
            adapters = [module for module in layers.modules() if isinstance(module, Adapted)]
            elements += sum(adapter.elements for adapter in adapters)
            adapters_of_stacks.append(len(adapters))
        return {"adapter": elements, "adapted": adapters_of_stacks}

    def _check_that_sizes_grow(self) -> None:
        """Refuse a model of which much of what it saves grows with its rows, and with no length.

        Raises:
            ValueError: it is more than `MOST_PADDED` of what is saved.
        """
        saved = self.ends + sum(self.saved_in_layers, Counter())
        of_rows_alone = {}
        for exponents, coefficient in saved.items():
            grows_with_rows = exponents[0] != "0"
            grows_with_lengths = exponents[1:] != "00"
            if grows_with_rows and not grows_with_lengths:
                of_rows_alone[exponents] = coefficient
        if value_at(of_rows_alone, *self.primes) > MOST_PADDED * value_at(saved, *self.primes):
            raise ValueError(
                "it pads rows to a fixed length, "
                "or keeps states whose size does not depend on the length"
            )

    def _hooks(self) -> Iterator[Any]:
        """Register the hooks one by one, and yield the handle of each; count the products of
        experts, which need no hook."""
        for side, layers in enumerate(self.layers):
            for layer in layers:
                yield layer.register_forward_pre_hook(
                    partial(self._enter_layer, side), with_kwargs=True
                )
                yield layer.register_forward_hook(self._leave_layer)
            for module in layers.modules():
                if isinstance(module, nn.Linear | Conv1D):
                    yield module.register_forward_pre_hook(self._multiply)
                self._count_experts(module)
        head = self.model.get_output_embeddings()
        if head is not None and self.is_causal:
            # This project's loss computes logits only where there is a label. So the head gets rows
            # x labels positions in place of all; which ones does not matter, here always the first.
            rows, _, labels = self.primes
            positions = torch.ones(rows * labels, dtype=torch.long, device="meta")
            yield head.register_forward_pre_hook(
                lambda _, inputs: inputs[0].flatten(0, 1).index_select(0, positions)[None]
            )

    def _count_experts(self, module: nn.Module) -> None:
        """Count the products of tensors that hold the matrices of all experts, of which each token
        uses some; nothing for a module without such tensors."""
        elements_in_use = []
        for parameter in module.parameters(recurse=False):
            if is_of_experts(parameter):
                elements_in_use.append(round(self.active * parameter.numel()))
        if elements_in_use:
            self.products["110"] += sum(elements_in_use)
            # The smallest is a single matrix of each expert; a larger one may be two in one.
            width = int(self.model.get_input_embeddings().weight.shape[1])
            self.inner = max(self.inner, min(elements_in_use) // width)

    def _keep(self, tensor: Tensor) -> Tensor:
        """Count a tensor that autograd saves; the tensor itself, as the hook has to return.

        Raises:
            TimeoutError: the pass has gone on for too long.
        """
        if time.monotonic() > self._deadline:
            raise TimeoutError(
                f"tracing took more than {MOST_SECONDS:g} s: "
                "its layers process a row token by token"
            )
        self._count(tensor, self._counted, self._counters[-1])
        return tensor

    def _count(self, tensor: Tensor, counted: dict[int, Tensor], counter: Counter[str]) -> None:
        """Add a tensor's memory to `counter`, and the tensor to `counted`; nothing where its memory
        is in `counted` already."""
        storage = tensor.untyped_storage()
        if storage._cdata in counted:
            return
        counted[storage._cdata] = tensor
        exponents, coefficient = _term(storage.nbytes(), self.primes)
        counter[exponents] += coefficient
        grows_with_the_square = exponents == "120"
        if grows_with_the_square and counter is not self.ends:
            self.scores = max(self.scores, coefficient)

    def _enter_layer(
        self, side: int, layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        """Note the input of a layer that is about to run, count what else it is given, and count
        for its stack from now on.

        Args:
            side: 0 for the encoder or the only stack, 1 for the decoder.
            layer: the layer; every hook is given its module.
        """
        hidden = inputs[0] if inputs else named["hidden_states"]
        exponents, coefficient = _term(hidden.untyped_storage().nbytes(), self.primes)
        self.inputs[side] = {exponents: coefficient}
        for other in tree_leaves((inputs, named)):
            if isinstance(other, Tensor) and other is not hidden:
                self._count(other, self._counted_as_held, self.held)
        self._counters.append(self.saved_in_layers[side])

    def _leave_layer(self, *_: Any) -> None:
        """Count beside the layers again. A hook that returned something would change the layer's
        output."""
        self._counters.pop()

    def _multiply(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Count the products of a linear layer that is about to run."""
        weight: Any = module.weight
        # transformers' Conv1D, in GPT-2, holds its matrix transposed.
        width = int(getattr(module, "in_features", weight.shape[0]))
        self.inner = max(self.inner, width)
        exponents, coefficient = _term(inputs[0].numel() // width, self.primes)
        self.products[exponents] += coefficient * weight.numel()


class _Autocast(TorchFunctionMode):
    """FP16 autocast, which the meta device lacks: it casts the inputs of an operation, and each
    parameter only once."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, which may be any function of torch, with its tensors cast where autocast
        does so."""
        name = func.__name__
        kwargs = kwargs or {}
        if name in HALF_BY_AUTOCAST:
            dtype = torch.half
        elif name in FLOAT_BY_AUTOCAST:
            dtype = torch.float32
        else:
            return func(*args, **kwargs)

        def cast(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            if value.dtype == dtype:
                return value
            if not isinstance(value, nn.Parameter):
                return value.to(dtype)
            return self._copies.setdefault(id(value), value.to(dtype))

        args, kwargs = tree_map(cast, (args, kwargs))
        return func(*args, **kwargs)


class _Fused(torch.autograd.Function):
    """SDPA as a GPU's kernel runs it, which keeps no scores, only the logarithms of their sums.

    It computes nothing, and has no backward: only shapes and what is saved count.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        # The layout that transformers wants next: heads of a token beside each other.
        rows, heads, tokens, _ = query.shape
        output = query.new_empty(rows, tokens, heads, value.shape[-1]).transpose(1, 2)
        logarithms = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, logarithms, bias)
        return output


def _on_a_gpu(plain: bool) -> Iterator[contextlib.AbstractContextManager[Any]]:
    """Contexts that replace what the meta device would run, or could not run, by what a GPU runs;
    the first of them puts new tensors on the meta device.

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
    # Both look at values, of which the meta device has none: no row is packed, and no mask hides
    # anything.
    yield _replaced(
        masking_utils, find_packed_sequence_indices=lambda _: None, fast_all=lambda _: True
    )
    yield _replaced(moe, _can_use_grouped_mm=lambda *_: False)
    yield _replaced(nn.functional, dropout=dropout, scaled_dot_product_attention=attention)


@contextlib.contextmanager
def _replaced(module: ModuleType, **functions: Any) -> Iterator[None]:
    """Replace functions of a module, all of which it must have, as long as the block goes on."""
    originals = {name: getattr(module, name) for name in functions}
    vars(module).update(functions)
    try:
        yield
    finally:
        vars(module).update(originals)


def _term(size: int, primes: tuple[int, int, int]) -> tuple[str, int]:
    """A size as a term of a `Polynomial`: how often each prime divides it, as a digit each, and
    what is left of it, the coefficient."""
    coefficient = size
    exponents = ""
    for prime in primes:
        exponent = 0
        # Any prime divides 0 for ever.
        while coefficient and coefficient % prime == 0:
            coefficient //= prime
            exponent += 1
        exponents += str(exponent)
    return exponents, coefficient


def _primes(model: PreTrainedModel, window: int | None, *, masked: bool) -> tuple[int, int, int]:
    """Rows, tokens and labels to trace with: three primes that divide no size of the model's
    tensors; tokens lie beyond the model's window if `masked`, else within it.

    Raises:
        ValueError: within the window there is no such prime.
    """
    sizes = {size for parameter in model.parameters() for size in parameter.shape}

    def first_prime_of(numbers: range, *others: int) -> int:
        for number in numbers:
            divides_none = all(size % number for size in sizes)
            if number not in others and divides_none and _is_prime(number):
                return number
        # Only a window makes the numbers few.
        raise ValueError(f"a window of {window} tokens is too small to trace")

    # Rows and labels are larger than most factors of sizes; with more tokens the pass would only
    # take longer.
    if masked:
        tokens = first_prime_of(range((window or 0) + 1, 10**6))
    else:
        tokens = first_prime_of(range(min((window or 128) - 1, 127), SMALLEST_PRIME, -1))
    rows = first_prime_of(range(211, 10**6), tokens)
    labels = first_prime_of(range(1_031, 10**6), tokens, rows)
    return rows, tokens, labels


def _is_prime(number: int) -> bool:
    return all(number % divisor for divisor in range(2, math.isqrt(number) + 1))
