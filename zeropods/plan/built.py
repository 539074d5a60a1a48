"""Any model that transformers builds: its tensors and operations from the model itself on the meta device, its
activations from what autograd saves there; both are kept by configuration in the user's cache."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from zeropods.errors import UserError
from zeropods.files import write_json
from zeropods.plan.shapes import ATTENTIONS, CAUSAL_SHAPES, EAGER, MASKED, T5_SHAPES, Shape, Weight, shape_named

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from zeropods.plan.workload import Workload

SCHEMA = 2
"""Of what is kept in the cache."""
CONFIG = "config.json"
NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm($|\.)|_norm($|\.)")
"""Names that transformers' Trainer leaves out of weight decay."""
ACTIVE_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
POSITIONS = ("max_position_embeddings", "n_positions", "seq_length")
"""What configurations call the experts of a token, and the longest row."""
MOST_SECONDS = 30.0
"""Of one forward pass on the meta device."""
SMALLEST = 16
"""Tokens; a smaller prime is a factor of many a size."""
MOST_PADDED = 0.02
"""Share of what a pass saves that may grow with its rows and with no length."""
BUILDING = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError,
            ValueError)  # fmt: skip
"""What transformers raises of a configuration that makes no model."""

# Sizes of tensors as functions of rows and lengths.
#
# A model is traced at sizes that are primes and divide no size of its own: how often each of them is in the size of a
# tensor says how it grows with rows, tokens and labels. So one pass on the meta device gives the size at all lengths.

Power = tuple[int, int, int]
"""Exponents of rows, tokens and labels; of an encoder-decoder labels are the tokens of the target."""
Polynomial = tuple[tuple[Power, float], ...]
"""Powers with their coefficients."""


def value(terms: Iterable[tuple[Power, float]], rows: float, tokens: float, labels: float) -> float:
    """The polynomial at these sizes."""
    return sum(factor * rows**a * tokens**b * labels**c for (a, b, c), factor in terms)


@dataclass(frozen=True)
class SavedBytes:
    """What like layers save for the backward pass."""

    layers: int
    all: Polynomial
    """Of all layers together."""
    input: Polynomial
    """The input of one layer."""


@dataclass(frozen=True)
class Saved:
    """Bytes that one forward pass saves, parameters left out."""

    stacks: tuple[SavedBytes, ...]
    ends: Polynomial
    """Outside the layers: embedding, rotations, masks, the last norm, the head's input."""


@dataclass(frozen=True, kw_only=True, eq=False)
class BuiltShape(Shape):
    """A model as transformers builds it of a configuration."""

    config: str
    """Text of its `config.json`."""
    folder: str | None
    """Folder or hub id with code of its own, if that was asked for."""
    family: str
    has_encoder: bool
    layers: int
    """Of an encoder-decoder those of the encoder."""
    heads: int
    kv_heads: int
    head_size: int
    hidden: int
    inner: int
    """Width of the feed-forward part, all active experts together."""
    vocabulary: int
    positions: int | None
    sliding: int | None
    """Tokens that a layer with a window sees."""
    windowed: int
    """Layers that see no further than the window."""
    dropout: bool
    runs: tuple[str, ...]
    """Ways of attention."""
    tied: bool
    """Whether the head's matrix is the embedding."""
    experts: str | None
    """`2 of 8`: experts of a token, and all."""
    stack_parameters: tuple[int, ...]
    own: tuple[tuple[int, str], ...]
    """Size and kind of each tensor."""
    products: Polynomial
    """Multiply-adds of the layers' matrices."""

    @property
    def joint(self) -> bool:
        return not self.has_encoder

    @property
    def width(self) -> int:
        return self.hidden

    @property
    def window(self) -> int | None:
        return self.sliding

    @property
    def drops(self) -> bool:
        return self.dropout

    @property
    def attentions(self) -> tuple[str, ...]:
        return self.runs

    def tensors(self) -> tuple[Weight, ...]:
        return tuple(Weight(size, kind) for size, kind in self.own)

    @property
    def embedding(self) -> int:
        return self.own[0][0] if self.own[0][1] == "embedding" else super().embedding

    @property
    def remark(self) -> str | None:
        if self.experts is None:
            return None
        return f"each token meets {self.experts} experts: memory is planned with all, time with those"

    def layer_products(self, tokens: float, labels: float) -> float:
        return value(self.products, 1, tokens, labels) + self.attention_products(tokens, labels)

    def attention_products(self, tokens: float, labels: float = 0.0) -> float:
        each = self.heads * self.head_size
        if self.has_encoder:
            # Whole squares in the encoder, half of them in the decoder; cross-attention.
            return self.layers * each * (2 * tokens**2 + labels**2 + 2 * tokens * labels)
        beyond = max(0.0, tokens - (self.window or tokens))
        return each * (self.layers * tokens**2 - self.windowed * beyond**2)

    def unneeded_products(self, tokens: float) -> float:
        whole = 2.0 * self.layers * self.heads * self.head_size * tokens**2
        return 0.0 if self.has_encoder else whole - self.attention_products(tokens)

    def saved(self, work: Workload) -> Saved:
        """What a pass of this workload saves, from the cache or traced now."""
        precision = "bf16" if work.is_half else "fp32"
        is_eager, is_masked = work.kernel == EAGER, work.kernel == MASKED
        is_plain = self.kv_heads < self.heads and (work.precision == "fp32" or work.before_ampere)
        return _saved(self, precision, is_eager, is_masked, is_plain, work.drops)


def shape_for(model: str, trust_remote_code: bool = False) -> Shape:
    """The shape of a well-known name, a hub id, a folder, or a `config.json`.

    Raises:
        UserError: it is none of them, cannot be read, or makes no model that can be trained here.
    """
    path, source = Path(model), model
    file = path / CONFIG if path.is_dir() else path
    if not file.is_file():
        with contextlib.suppress(UserError):
            return shape_named(model)
        file = _from_hub(model)
    else:
        source = str(file.parent)
    try:
        text = file.read_text(encoding="utf-8")
        given = json.loads(text)
    except (OSError, ValueError) as error:
        raise UserError(f"--model {model}: {file}: {error}; expected a {CONFIG} as transformers writes it") from None
    kind = given.get("model_type") if isinstance(given, dict) else None
    if not isinstance(kind, str):
        raise UserError(f"--model {model}: {file}: no model_type; expected a {CONFIG} as transformers writes it")
    if given.get("quantization_config"):
        raise UserError(f"--model {model}: its weights are quantised and cannot be trained; name the original model")
    has_code = "AutoConfig" in (given.get("auto_map") or ())
    if has_code and not trust_remote_code and not _knows(kind):
        raise UserError(
            f"--model {model}: {kind} is code of its own, which is not run unasked; give --trust-remote-code if you "
            "have read it"
        )
    try:
        return _shape(text, source if has_code and trust_remote_code else None)
    except UserError as error:
        raise UserError(f"--model {model}: {error}") from None


def _knows(kind: str) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return kind in CONFIG_MAPPING_NAMES


def _from_hub(model: str) -> Path:
    """The `config.json` of a hub id: from the local cache, else from the hub."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model) or Path(model).is_dir():
        known = ", ".join((*T5_SHAPES, *CAUSAL_SHAPES))
        raise UserError(
            f"--model {model}: expected a hub id as organisation/name, a folder with a {CONFIG}, such a file, or one "
            f"of {known}"
        )
    from huggingface_hub import constants

    cached = Path(constants.HF_HUB_CACHE, f"models--{model.replace('/', '--')}")
    with contextlib.suppress(OSError):
        file = cached / "snapshots" / (cached / "refs" / "main").read_text().strip() / CONFIG
        if file.is_file():
            return file
    from httpx2 import TransportError
    from huggingface_hub import HfApi

    try:
        # The hub is asked first: a file is asked for five times, with growing pauses, before it is given up.
        HfApi().model_info(model, timeout=10.0)
        return Path(HfApi().hf_hub_download(model, CONFIG))
    except (OSError, ValueError, TransportError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"--model {model}: its {CONFIG} cannot be had from the hub ({reason[:120]}); give that file, or a folder "
            "that holds it"
        ) from None


# What is kept from call to call, by configuration and versions.


def _cached(key: tuple[object, ...], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The document of a key, or what `make` gives; where no cache can be written it is made each time."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    versions = (SCHEMA, version("torch"), version("transformers"))
    digest = hashlib.sha256(json.dumps((*key, *versions)).encode()).hexdigest()
    file = root / "zeropods" / "plan" / f"{digest[:32]}.json"
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(file.read_text(encoding="utf-8")))
    made = make()
    with contextlib.suppress(OSError):
        write_json(file, made)
    return made


@lru_cache(maxsize=64)
def _shape(config: str, folder: str | None) -> BuiltShape:
    with _loading("the model cannot be traced"):
        found = _cached((config, folder), lambda: _facts(config, folder))
    lists = {name: tuple(found[name]) for name in ("runs", "stack_parameters")}
    own = tuple((size, kind) for size, kind in found["own"])
    return BuiltShape(
        config=config, folder=folder, **{**found, **lists, "own": own, "products": _polynomial(found["products"])}
    )


@lru_cache(maxsize=256)
def _saved(shape: BuiltShape, precision: str, eager: bool, masked: bool, plain: bool, drops: bool) -> Saved:
    way = (precision, eager, masked, plain, drops)
    found = _cached((shape.config, shape.folder, *way), lambda: asdict(_traced(shape, *way)))
    stacks = (
        SavedBytes(each["layers"], _polynomial(each["all"]), _polynomial(each["input"])) for each in found["stacks"]
    )
    return Saved(tuple(stacks), _polynomial(found["ends"]))


def _polynomial(terms: list[Any]) -> Polynomial:
    return tuple(((a, b, c), factor) for (a, b, c), factor in terms)


# The model on the meta device.


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
    import torch
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES
    from transformers.utils import logging

    given = json.loads(config)
    # What a rotation does beyond the trained length looks at values, and the meta device has none.
    for name in ("rope_scaling", "rope_parameters"):
        rope = given.get(name)
        if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) in ("dynamic", "longrope", "su"):
            given[name] = {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10_000.0)}
    given |= {name: 0.0 for name in given if "layerdrop" in name}
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with _loading(f"{given['model_type']}: transformers builds no such model"):
            if folder is None:
                settings = CONFIG_MAPPING[given["model_type"]].from_dict(given)
            else:
                settings = AutoConfig.from_pretrained(folder, trust_remote_code=True)
            encoder = settings.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
            if encoder and not (settings.is_encoder_decoder or getattr(settings, "is_decoder", False)):
                raise ValueError("it is an encoder alone, which answers with no text")
            kind = AutoModelForSeq2SeqLM if settings.is_encoder_decoder else AutoModelForCausalLM
            with torch.device("meta"):
                model = kind.from_config(settings, trust_remote_code=folder is not None, dtype=torch.float32)
    finally:
        logging.set_verbosity(level)
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if given.get("tie_word_embeddings") is False and head is not None and head.weight is table.weight:
        # transformers ties the two of a T5 whatever is said, until it meets a checkpoint that has both.
        head.weight = torch.nn.Parameter(torch.empty_like(table.weight))
    return model


def _stacks(model: PreTrainedModel, has_encoder: bool) -> list[nn.ModuleList]:
    """The layers: those of the encoder and of the decoder, or of all."""
    from torch import nn

    sides: list[nn.Module] = [model.get_encoder(), model.get_decoder()] if has_encoder else [model]
    lists = [[each for each in side.modules() if isinstance(each, nn.ModuleList)] for side in sides]
    if not all(lists):
        raise UserError(f"{model.config.model_type}: no list of layers was found in it; give a known name")
    return [max(each, key=lambda found: sum(p.numel() for p in found.parameters())) for each in lists]


def _facts(config: str, folder: str | None) -> dict[str, Any]:
    """The fields of `BuiltShape` that the model tells."""
    model = _built(config, folder)
    settings = model.config.get_text_config(decoder=True)
    has_encoder = bool(model.config.is_encoder_decoder)
    stacks = _stacks(model, has_encoder)
    table = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    hidden = int(getattr(settings, "hidden_size", 0) or table.shape[1])
    heads = int(getattr(settings, "num_attention_heads", 0) or 1)
    head_size = getattr(settings, "head_dim", None) or getattr(settings, "d_kv", None) or hidden // heads
    kinds = getattr(settings, "layer_types", None) or ()
    if odd := set(kinds) - {"full_attention", "sliding_attention", "chunked_attention"}:
        raise ValueError(f"its layers are of {' and '.join(sorted(odd))}; only attention is planned")
    window = getattr(settings, "sliding_window", None) if getattr(settings, "use_sliding_window", True) else None
    count = len(stacks[0])
    windowed = sum("sliding" in kind for kind in kinds) if kinds else count
    window = window if windowed and not has_encoder else None
    if latent := getattr(settings, "qk_nope_head_dim", None):
        # Latent attention: queries and keys are wider than values, and `head_dim` is of their rotated part.
        head_size = (latent + settings.qk_rope_head_dim + settings.v_head_dim) // 2
    active = next((n for name in ACTIVE_EXPERTS if (n := getattr(settings, name, None))), None)
    expert = next((p for p in stacks[-1].parameters() if active and _is_of_experts(p)), None)
    soft_capped = getattr(settings, "attn_logit_softcapping", None) is not None
    # transformers answers these of a model, and tells no other way.
    runs = {
        "eager": True,
        "sdpa": model._supports_sdpa and not soft_capped,
        "flash_attention_2": model._supports_sdpa and model._supports_flash_attn and not soft_capped,
    }
    traced = _Pass(model, window, 1.0 if active is None or expert is None else active / expert.shape[0])
    traced.run(plain=False)
    return {
        "family": model.config.model_type,
        "has_encoder": has_encoder,
        "layers": count,
        "heads": heads,
        "kv_heads": int(getattr(settings, "num_key_value_heads", None) or heads),
        "head_size": int(head_size),
        "hidden": hidden,
        "inner": traced.inner,
        "vocabulary": int((table if head is None else head.weight).shape[0]),
        "positions": next((n for name in POSITIONS if isinstance(n := getattr(settings, name, None), int)), None),
        "sliding": window,
        "windowed": windowed if window else 0,
        "dropout": any(
            "drop" in name and isinstance(rate, float) and rate > 0 for name, rate in vars(settings).items()
        ),
        "runs": [name for name in ATTENTIONS if runs[name]] if not has_encoder or not runs["sdpa"] else ["sdpa"],
        "tied": head is not None and head.weight is table,
        "experts": None if expert is None else f"{active} of {expert.shape[0]}",
        "stack_parameters": [sum(p.numel() for p in stack.parameters()) for stack in stacks],
        "own": [[p.numel(), _kind(name, p, (table, head and head.weight))] for name, p in model.named_parameters()],
        "products": list(traced.products.items()),
    }


def _is_of_experts(parameter: Tensor) -> bool:
    """Whether matrices of all experts are in it; a convolution has a dimension of one."""
    return parameter.dim() == 3 and min(parameter.shape) > 1


def _kind(name: str, parameter: Tensor, tables: tuple[Tensor, Tensor | None]) -> str:
    if any(parameter is table for table in tables):
        return "embedding"
    return "norm" if parameter.dim() < 2 or NOT_DECAYED.search(name.lower()) else "matrix"


# One forward pass on the meta device.


def _traced(shape: BuiltShape, precision: str, eager: bool, masked: bool, plain: bool, drops: bool) -> Saved:
    import torch

    model = _built(shape.config, shape.folder)
    with _loading(f"{shape.family}: what it saves cannot be traced"):
        model.set_attn_implementation("eager" if eager else "sdpa")
        model.to(torch.bfloat16 if precision == "bf16" else torch.float32)
        model.train(drops)
        found = _Pass(model, shape.window, masked=masked)
        found.run(plain)
    return Saved(
        tuple(
            SavedBytes(len(layers), tuple(all_.items()), tuple(input_.items()))
            for layers, all_, input_ in zip(found.lists, found.stacks, found.inputs, strict=True)
        ),
        tuple(found.ends.items()),
    )


class _Pass:
    """One forward pass of a model as it runs on a GPU in training, rows padded on the right; sizes by power.

    Args:
        active: share of the experts that a token meets.
        masked: whether rows are longer than the window.
    """

    def __init__(
        self, model: PreTrainedModel, window: int | None, active: float = 1.0, *, masked: bool = False
    ) -> None:
        self.model, self.active, self.has_encoder = model, active, bool(model.config.is_encoder_decoder)
        self.lists = _stacks(model, self.has_encoder)
        self.primes = _primes(model, window, masked)
        self.stacks: list[Counter[Power]] = [Counter() for _ in self.lists]
        self.inputs: list[dict[Power, float]] = [{} for _ in self.lists]
        self.ends: Counter[Power] = Counter()
        self.products: Counter[Power] = Counter()
        self.inner = 0
        self._into = [self.ends]
        self._seen = {each.untyped_storage()._cdata: each for each in (*model.parameters(), *model.buffers())}

    def run(self, plain: bool) -> None:
        """Args: plain: whether heads that share keys take PyTorch's plain formula."""
        import torch

        rows, tokens, labels = self.primes
        batch = {"input_ids": torch.ones(rows, tokens, dtype=torch.long, device="meta")}
        if self.has_encoder:
            batch |= {
                "decoder_input_ids": torch.ones(rows, labels, dtype=torch.long, device="meta"),
                # Made for attention already: the meta device cannot look whether a mask hides anything.
                "attention_mask": torch.ones(rows, 1, 1, tokens, dtype=torch.bool, device="meta"),
            }
        with contextlib.ExitStack() as during:
            for handle in self._hooks():
                during.callback(handle.remove)
            during.enter_context(_on_a_gpu(plain))
            during.enter_context(torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor))
            self._until = time.monotonic() + MOST_SECONDS
            self.model(**batch, use_cache=False)
        kept = self.ends + sum(self.stacks, Counter())
        padded = value([(power, kept[power]) for power in kept if power[0] and not any(power[1:])], *self.primes)
        if padded > MOST_PADDED * value(kept.items(), *self.primes):
            raise ValueError("it pads rows to a length of its own, or keeps states that are as large at every length")

    def _hooks(self) -> Iterator[Any]:
        import torch
        from torch import nn
        from transformers.pytorch_utils import Conv1D

        for number, layers in enumerate(self.lists):
            for layer in layers:
                yield layer.register_forward_pre_hook(partial(self._enter, number), with_kwargs=True)
                yield layer.register_forward_hook(lambda *_: self._into.pop() and None)
            for module in layers.modules():
                if isinstance(module, nn.Linear | Conv1D):
                    yield module.register_forward_pre_hook(self._multiply)
                self._count_experts(module)
        head = self.model.get_output_embeddings()
        if head is not None and not self.has_encoder:
            rows, _, labels = self.primes
            some = torch.ones(rows * labels, dtype=torch.long, device="meta")
            yield head.register_forward_pre_hook(lambda _, given: given[0].flatten(0, 1).index_select(0, some)[None])

    def _keep(self, tensor: Tensor) -> Tensor:
        if time.monotonic() > self._until:
            raise TimeoutError(f"more than {MOST_SECONDS:g} s: its layers go through a row token by token")
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen[storage._cdata] = tensor
            power, factor = _power(storage.nbytes(), self.primes)
            self._into[-1][power] += factor
        return tensor

    def _enter(self, number: int, layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        hidden = given[0] if given else named["hidden_states"]
        power, factor = _power(hidden.untyped_storage().nbytes(), self.primes)
        self.inputs[number] = {power: factor}
        self._into.append(self.stacks[number])

    def _multiply(self, module: nn.Module, given: tuple[Any, ...]) -> None:
        weight: Any = module.weight
        # transformers' Conv1D of GPT-2 holds its matrix the other way round.
        inputs = int(getattr(module, "in_features", weight.shape[0]))
        self.inner = max(self.inner, inputs)
        power, factor = _power(given[0].numel() // inputs, self.primes)
        self.products[power] += factor * weight.numel()

    def _count_experts(self, module: nn.Module) -> None:
        """Matrices of all experts are in one tensor; each token meets some of them."""
        met = [round(self.active * each.numel()) for each in module.parameters(recurse=False) if _is_of_experts(each)]
        self.products[1, 1, 0] += sum(met)
        hidden = int(self.model.get_input_embeddings().weight.shape[1])
        self.inner = max(self.inner, min(met, default=0) // hidden)


@contextlib.contextmanager
def _on_a_gpu(plain: bool) -> Iterator[None]:
    """What a GPU takes in place of what the meta device would take, or could not."""
    import torch
    from torch import nn
    from transformers import masking_utils
    from transformers.integrations import moe

    with (
        torch.device("meta"),
        patch.object(masking_utils, "find_packed_sequence_indices", lambda _: None),
        patch.object(masking_utils, "fast_all", lambda _: True),
        patch.object(moe, "_can_use_grouped_mm", lambda *_: False),
        patch.object(nn.functional, "dropout", _dropout),
        patch.object(nn.functional, "scaled_dot_product_attention", _attention(plain)),
    ):
        yield


def _dropout(values: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Dropout as a GPU has it: it saves a mask of one byte an element."""
    import torch

    return torch.native_dropout(values, p, True)[0] if training and p else values


def _attention(plain: bool) -> Callable[..., Tensor]:
    """SDPA as a GPU runs it: a kernel that keeps no score, but the logarithms of its sums; or the plain formula."""
    import torch

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
            # As transformers wants it next: heads of a token beside each other.
            rows, heads, tokens, _ = query.shape
            output = query.new_empty(rows, tokens, heads, value.shape[-1]).transpose(1, 2)
            logarithms = query.new_empty(query.shape[:-1], dtype=torch.float32)
            ctx.save_for_backward(query, key, value, output, logarithms, bias)
            return output

    def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
                  is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False) -> Tensor:  # fmt: skip
        if enable_gqa and plain:
            math_kernel = torch.ops.aten._scaled_dot_product_attention_math
            options = {"scale": scale, "enable_gqa": enable_gqa}
            return math_kernel(query, key, value, attn_mask, dropout_p, is_causal, **options)[0]
        return Fused.apply(query, key, value, None if attn_mask is None else attn_mask.to(query.dtype))

    return attention


def _power(number: int, primes: tuple[int, int, int]) -> tuple[Power, int]:
    """How often each prime is in a whole number, and what is left of it."""
    left, counts = number, [0, 0, 0]
    for place, prime in enumerate(primes):
        while left and left % prime == 0:
            left, counts[place] = left // prime, counts[place] + 1
    return (counts[0], counts[1], counts[2]), left


def _primes(model: PreTrainedModel, window: int | None, masked: bool) -> tuple[int, int, int]:
    """Rows, tokens and labels to trace at: three primes that divide no size of the model's tensors; tokens lie beyond
    its window or within."""
    sizes = {size for parameter in model.parameters() for size in parameter.shape}

    def first(numbers: range, *others: int) -> int:
        primes = (n for n in numbers if n not in others and all(n % k for k in range(2, math.isqrt(n) + 1)))
        if (found := next((n for n in primes if all(size % n for size in sizes)), None)) is None:
            raise ValueError(f"a window of {window} tokens is too small to trace")
        return found

    tokens = first(range((window or 0) + 1, 10**6) if masked else range(min((window or 128) - 1, 127), SMALLEST, -1))
    rows = first(range(211, 10**6), tokens)
    return rows, tokens, first(range(1_031, 10**6), tokens, rows)
