"""A model as transformers builds it, without weights, and what a pass of it on the meta device shows.

The model is traced with numbers of rows, tokens and labels that are primes and divide none of its own sizes: how often
each prime divides the size of a tensor says how that size grows with them. So one pass gives the size at all lengths.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
    masking_utils,
)
from transformers.integrations import moe
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from zeropods.errors import UserError
from zeropods.plan.workload import ATTENTIONS, EAGER, FUSED, MASKED, PLAIN, value

NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm($|\.)|_norm($|\.)")
"""Parameter names that transformers' Trainer leaves out of weight decay."""
ACTIVE_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
POSITIONS = ("max_position_embeddings", "n_positions", "seq_length")
"""Names that configurations use for the experts of a token, and for the longest row."""
MOST_SECONDS = 30.0
"""Most seconds that one forward pass on the meta device may take."""
SMALLEST = 16
"""Number of tokens that a traced row must exceed: a smaller prime divides many sizes."""
MOST_PADDED = 0.02
"""Largest share of what a pass saves that may grow with its rows and with no length."""
BUILDING = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError,
            ValueError)  # fmt: skip
"""Exceptions that transformers raises for a configuration that makes no model."""
HALF_BY_AUTOCAST = {"linear", "matmul", "__matmul__", "addmm", "bmm", "baddbmm", "einsum",
                    "scaled_dot_product_attention"}  # fmt: skip
FLOAT_BY_AUTOCAST = {"pow", "__pow__", "rsqrt", "exp", "softmax", "log_softmax", "layer_norm", "norm", "cumsum", "sum"}
"""Operations that models use and autocast runs in FP16, and in FP32 (PyTorch 2.13, `autocast_mode.h`)."""


# The model without weights.


@contextlib.contextmanager
def _loading(what: str) -> Iterator[None]:
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (*BUILDING, StrictDataclassError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{what} ({reason[:160]}); give another configuration, or a known name") from None


@lru_cache(maxsize=1)
def _built(config: str, folder: str | None) -> PreTrainedModel:
    """The model without weights, ready to train."""
    given = json.loads(config)
    # Beyond the trained length these rotations depend on values, and the meta device has none.
    for name in ("rope_scaling", "rope_parameters"):
        rope = given.get(name)
        if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) in ("dynamic", "longrope", "su"):
            given[name] = {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10_000.0)}
    given |= {name: 0.0 for name in given if "layerdrop" in name}
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with _loading(f"{given['model_type']}: transformers cannot build this model"):
            if folder is None:
                settings = CONFIG_MAPPING[given["model_type"]].from_dict(given)
            else:
                settings = AutoConfig.from_pretrained(folder, trust_remote_code=True)
            encoder = settings.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
            if encoder and not (settings.is_encoder_decoder or getattr(settings, "is_decoder", False)):
                raise ValueError("it is an encoder-only model, which generates no text")
            kind = AutoModelForSeq2SeqLM if settings.is_encoder_decoder else AutoModelForCausalLM
            with torch.device("meta"):
                model = kind.from_config(settings, trust_remote_code=folder is not None, dtype=torch.float32)
    finally:
        logging.set_verbosity(level)
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if given.get("tie_word_embeddings") is False and head is not None and head.weight is table.weight:
        # transformers ties a T5's head and table whatever is configured, until it loads a checkpoint that has both.
        head.weight = torch.nn.Parameter(torch.empty_like(table.weight))
    return model


def _stacks(model: PreTrainedModel) -> list[nn.ModuleList]:
    """The lists of layers: those of the encoder and of the decoder, or one list of all."""
    sides: list[nn.Module] = [model]
    if model.config.is_encoder_decoder:
        sides = [model.get_encoder(), model.get_decoder()]
    lists = [[each for each in side.modules() if isinstance(each, nn.ModuleList)] for side in sides]
    if not all(lists):
        raise UserError(f"{model.config.model_type}: no list of layers found in this model; give a known name")
    return [max(each, key=lambda found: sum(p.numel() for p in found.parameters())) for each in lists]


def _window(model: PreTrainedModel) -> tuple[int | None, int]:
    """Number of tokens that a layer with a window sees, and number of such layers."""
    settings = model.config.get_text_config(decoder=True)
    kinds = getattr(settings, "layer_types", None) or ()
    if odd := set(kinds) - {"full_attention", "sliding_attention", "chunked_attention"}:
        raise ValueError(f"it has layers of type {' and '.join(sorted(odd))}; only attention can be planned")
    window = getattr(settings, "sliding_window", None) if getattr(settings, "use_sliding_window", True) else None
    layers = sum("sliding" in kind for kind in kinds) if kinds else len(_stacks(model)[0])
    return (window, layers) if window and layers and not model.config.is_encoder_decoder else (None, 0)


@_loading("the model cannot be traced")
def facts(config: str, folder: str | None) -> dict[str, Any]:
    """The facts of a `Shape`, and what a pass in its default way of training saves.

    Args:
        config: text of a `config.json`.
        folder: folder or hub id whose own code may run, if any.

    Raises:
        UserError: the configuration makes no model that can be trained, or traced.
    """
    model = _built(config, folder)
    settings = model.config.get_text_config(decoder=True)
    joint, stacks = not model.config.is_encoder_decoder, _stacks(model)
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    heads = int(getattr(settings, "num_attention_heads", 0) or 1)
    kv_heads = int(getattr(settings, "num_key_value_heads", None) or heads)
    hidden = int(getattr(settings, "hidden_size", 0) or table.shape[1])
    head_size = getattr(settings, "head_dim", None) or getattr(settings, "d_kv", None) or hidden // heads
    if latent := getattr(settings, "qk_nope_head_dim", None):
        # Latent attention: queries and keys are wider than values, and `head_dim` is the width of their rotated part.
        head_size = (latent + settings.qk_rope_head_dim + settings.v_head_dim) // 2
    active = next((n for name in ACTIVE_EXPERTS if (n := getattr(settings, name, None))), None)
    expert = next((p for p in stacks[-1].parameters() if active and _is_of_experts(p)), None)
    soft_capped = getattr(settings, "attn_logit_softcapping", None) is not None
    # transformers tells this of a model only in these private attributes.
    runs = {
        "eager": joint or not model._supports_sdpa,
        "sdpa": model._supports_sdpa and not soft_capped,
        "flash_attention_2": joint and model._supports_sdpa and model._supports_flash_attn and not soft_capped,
    }
    window, windowed = _window(model)
    drops = any("drop" in name and isinstance(rate, float) and rate > 0 for name, rate in vars(settings).items())
    kernel = EAGER if not runs["sdpa"] else PLAIN if joint and kv_heads < heads else FUSED
    way = f"fp32 {kernel}{' dropout' * drops}"
    traced = _Pass(model, window, way, 1.0 if active is None or expert is None else active / expert.shape[0])
    found = traced.run()
    weights = list[list[int | str]]()
    for name, weight in model.named_parameters():
        if weight is table or (head is not None and weight is head.weight):
            kind = "embedding"
        elif "bias" in name:
            kind = "bias"
        else:
            kind = "norm" if weight.dim() < 2 or NOT_DECAYED.search(name.lower()) else "matrix"
        weights.append([weight.numel(), kind])
    return {
        "facts": {
            "family": model.config.model_type,
            "joint": joint,
            "layers": [len(stack) for stack in stacks],
            "layer_parameters": [sum(p.numel() for p in stack.parameters()) for stack in stacks],
            "heads": heads,
            "kv_heads": kv_heads,
            "head_size": int(head_size),
            "inner": traced.inner,
            "vocabulary": int((table if head is None else head.weight).shape[0]),
            "positions": next((n for name in POSITIONS if isinstance(n := getattr(settings, name, None), int)), None),
            "window": window,
            "windowed": windowed,
            "drops": drops,
            "attentions": [name for name in ATTENTIONS if runs[name]],
            "tied": head is not None and head.weight is table,
            "experts": None if expert is None else f"{active} of {expert.shape[0]}",
            "weights": weights,
            "products": dict(traced.products),
        },
        "saved": {way: found},
    }


def saved(config: str, folder: str | None, way: str) -> dict[str, Any]:
    """The fields of `Saved` for a way of training, named as in `Workload.saved`; the arguments are those of `facts`."""
    model = _built(config, folder)
    with _loading(f"{model.config.model_type}: what it saves cannot be traced"):
        return _Pass(model, _window(model)[0], way).run()


def _is_of_experts(parameter: Tensor) -> bool:
    """Whether a parameter holds matrices of all experts; a convolution has a dimension of one."""
    return parameter.dim() == 3 and min(parameter.shape) > 1


# One forward pass on the meta device.


class _Pass:
    """One forward pass of a model in training on a GPU, with rows padded on the right; sizes are kept by `_power`.

    Args:
        way: way of training, named as in `Workload.saved`: precision, kernel, dropout.
        active: share of the experts that a token uses.
    """

    def __init__(self, model: PreTrainedModel, window: int | None, way: str, active: float = 1.0) -> None:
        self.precision, self.kernel, *dropout = way.split()
        model.set_attn_implementation("eager" if self.kernel == EAGER else "sdpa")
        model.to(torch.bfloat16 if self.precision == "bf16" else torch.float32).train(bool(dropout))
        self.model, self.active, self.joint = model, active, not model.config.is_encoder_decoder
        self.lists = _stacks(model)
        self.primes = _primes(model, window, masked=self.kernel == MASKED)
        self.stacks: list[Counter[str]] = [Counter() for _ in self.lists]
        self.inputs: list[dict[str, int]] = [{} for _ in self.lists]
        self.held, self.ends, self.products = Counter[str](), Counter[str](), Counter[str]()
        self.inner = self.scores = 0
        self._into = [self.ends]
        own = {each.untyped_storage()._cdata: each for each in (*model.parameters(), *model.buffers())}
        self._seen, self._given = own, dict(own)

    def run(self) -> dict[str, Any]:
        """Run the pass, and return the fields of `Saved`."""
        rows, tokens, labels = self.primes
        with contextlib.ExitStack() as during:
            for handle in self._hooks():
                during.callback(handle.remove)
            for context in _on_a_gpu(self.kernel == PLAIN):
                during.enter_context(context)
            during.enter_context(torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor))
            if self.precision == "autocast":
                during.enter_context(_Autocast())
            batch = {"input_ids": torch.ones(rows, tokens, dtype=torch.long)}
            if not self.joint:
                batch["decoder_input_ids"] = torch.ones(rows, labels, dtype=torch.long)
                # The mask has its final form: the meta device cannot check whether a mask hides anything.
                batch["attention_mask"] = torch.ones(rows, 1, 1, tokens, dtype=torch.bool)
            self._until = time.monotonic() + MOST_SECONDS
            self.model(**batch, use_cache=False)
        kept = self.ends + sum(self.stacks, Counter())
        padded = value({power: kept[power] for power in kept if power[0] != "0" and power[1:] == "00"}, *self.primes)
        if padded > MOST_PADDED * value(kept, *self.primes):
            raise ValueError("it pads rows to a fixed length, or keeps states whose size does not depend on the length")
        return {
            "layers": list(map(dict, self.stacks)),
            "inputs": self.inputs,
            "held": dict(self.held),
            "ends": dict(self.ends),
            "scores": self.scores,
        }

    def _hooks(self) -> Iterator[Any]:
        for number, layers in enumerate(self.lists):
            for layer in layers:
                yield layer.register_forward_pre_hook(partial(self._enter, number), with_kwargs=True)
                yield layer.register_forward_hook(lambda *_: self._into.pop() and None)
            for module in layers.modules():
                if isinstance(module, nn.Linear | Conv1D):
                    yield module.register_forward_pre_hook(self._multiply)
                # One tensor holds the matrices of all experts; each token uses some of them.
                own = module.parameters(recurse=False)
                if met := [round(self.active * each.numel()) for each in own if _is_of_experts(each)]:
                    self.products["110"] += sum(met)
                    self.inner = max(self.inner, min(met) // int(self.model.get_input_embeddings().weight.shape[1]))
        head = self.model.get_output_embeddings()
        if head is not None and self.joint:
            rows, _, labels = self.primes
            some = torch.ones(rows * labels, dtype=torch.long, device="meta")
            yield head.register_forward_pre_hook(lambda _, given: given[0].flatten(0, 1).index_select(0, some)[None])

    def _keep(self, tensor: Tensor) -> Tensor:
        if time.monotonic() > self._until:
            raise TimeoutError(f"tracing took more than {MOST_SECONDS:g} s: its layers process a row token by token")
        self._count(tensor, self._seen, self._into[-1])
        return tensor

    def _count(self, tensor: Tensor, seen: dict[int, Tensor], into: Counter[str]) -> None:
        """Add a tensor's memory, unless it was seen before."""
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen[storage._cdata] = tensor
            power, factor = _power(storage.nbytes(), self.primes)
            into[power] += factor
            self.scores = max(self.scores, factor * (power == "120" and into is not self.ends))

    def _enter(self, number: int, layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
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
    """FP16 autocast, which the meta device lacks: it casts the inputs of an operation, and each parameter only once."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        kind = torch.half if name in HALF_BY_AUTOCAST else torch.float32 if name in FLOAT_BY_AUTOCAST else None

        def cast(given: Any) -> Any:
            if not isinstance(given, Tensor) or not given.is_floating_point() or given.dtype == kind:
                return given
            if not isinstance(given, nn.Parameter):
                return given.to(kind)
            return self._copies.setdefault(id(given), given.to(kind))

        args, kwargs = (args, kwargs or {}) if kind is None else tree_map(cast, (args, kwargs or {}))
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
        plain: whether attention whose heads share keys runs by the plain formula, and not in a kernel.
    """

    def dropout(values: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        # A mask of one byte per element is saved.
        return torch.native_dropout(values, p, True)[0] if training and p else values

    def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
                  is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False) -> Tensor:  # fmt: skip
        if enable_gqa and plain:
            math_kernel = torch.ops.aten._scaled_dot_product_attention_math
            options = {"scale": scale, "enable_gqa": enable_gqa}
            return math_kernel(query, key, value, attn_mask, dropout_p, is_causal, **options)[0]
        return _Fused.apply(query, key, value, None if attn_mask is None else attn_mask.to(query.dtype))

    yield torch.device("meta")
    yield patch.multiple(masking_utils, find_packed_sequence_indices=lambda _: None, fast_all=lambda _: True)
    yield patch.object(moe, "_can_use_grouped_mm", lambda *_: False)
    yield patch.multiple(nn.functional, dropout=dropout, scaled_dot_product_attention=attention)


def _power(number: int, primes: tuple[int, int, int]) -> tuple[str, int]:
    """How often each prime divides a whole number, as digits, and what is left of the number."""
    left, counts = number, [0, 0, 0]
    for place, prime in enumerate(primes):
        while left and left % prime == 0:
            left, counts[place] = left // prime, counts[place] + 1
    return "".join(map(str, counts)), left


def _primes(model: PreTrainedModel, window: int | None, *, masked: bool) -> tuple[int, int, int]:
    """Rows, tokens and labels to trace with: three primes that divide no size of the model's tensors; tokens lie beyond
    the model's window if `masked`, else within it."""
    sizes = {size for parameter in model.parameters() for size in parameter.shape}

    def first(numbers: range, *others: int) -> int:
        primes = (n for n in numbers if n not in others and all(n % k for k in range(2, math.isqrt(n) + 1)))
        if (found := next((n for n in primes if all(size % n for size in sizes)), None)) is None:
            raise ValueError(f"a window of {window} tokens is too small to trace")
        return found

    tokens = first(range((window or 0) + 1, 10**6) if masked else range(min((window or 128) - 1, 127), SMALLEST, -1))
    rows = first(range(211, 10**6), tokens)
    return rows, tokens, first(range(1_031, 10**6), tokens, rows)
