"""The plan's counts against transformers' own models on the meta device: shapes without weights."""

import json
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel, T5Config, Trainer

from tests.full.plan.test_plan_meta_model import saved_bytes
from tools.plan_facts import ways
from zeropods.plan.activations import Activations
from zeropods.plan.facts import FACTS, shape_named, shape_recorded
from zeropods.plan.known_models import known_config, known_names
from zeropods.plan.meta_model import facts, saved
from zeropods.plan.workload import PLAIN, Shape, Workload
from zeropods.train.causal import causal_config, random_causal
from zeropods.train.text2sql import T5ForTextToSQL


def on_meta(sizes: dict[str, Any], attention: str = "eager") -> PreTrainedModel:
    config = causal_config(sizes)
    config._attn_implementation = attention
    with torch.device("meta"):
        return random_causal(config, 0).train()


NAMES = [
    "t5-tiny",
    "t5-small",
    "distilgpt2",
    "bloom-tiny",
    "qwen3-0.6b",
    "mistral-7b",
    "gpt2",
    "opt-125m",
    "qwen2.5-0.5b",
]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_shipped_of_a_known_name_is_what_its_model_tells(name: str) -> None:
    shipped = json.loads(FACTS.read_text())[name]
    config = json.dumps(known_config(name))
    found = facts(config, None)
    way = list(shipped["saved"])[-1]
    assert (found["facts"], saved(config, None, way)) == (shipped["facts"], shipped["saved"][way])
    assert shipped["saved"].keys() == ways(found["facts"])


@pytest.mark.parametrize("name", known_names("causal"))
def test_weights_that_decay_are_those_of_trainer(name: str) -> None:
    model = on_meta(known_config(name))
    decayed = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    named = [(parameter.numel(), name in decayed) for name, parameter in model.named_parameters()]
    assert [(weight.size, weight.is_matrix) for weight in shape_named(name).weights] == named


@pytest.mark.parametrize("checkpointing", [False, True], ids=["whole", "checkpointed"])
@pytest.mark.parametrize(
    ("name", "attention", "precision", "layers", "size"),
    [
        ("distilgpt2", "sdpa", "fp32", 6, (3, 1_024)),
        ("distilgpt2", "eager", "bf16", 6, (3, 1_024)),
        ("bloom-560m", "eager", "bf16", 3, (3, 1_024)),
        ("qwen3-0.6b", "sdpa", "bf16", 4, (3, 1_024)),
        ("mistral-7b", "sdpa", "bf16", 3, (3, 1_024)),
        # Beyond its window a mask and repeated keys in every layer.
        ("mistral-7b", "sdpa", "bf16", 2, (1, 4_096)),
        ("llama-8b", "sdpa", "fp32", 2, (3, 1_024)),
    ],
)
def test_the_most_that_is_alive_in_a_pass_is_what_is_planned(
    name: str, attention: str, precision: str, layers: int, size: tuple[int, int], checkpointing: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    sizes, shape = cut(name, layers)
    rows, tokens = size
    job = Workload(
        shape=shape, batch_size=rows, tokens=tokens, labels=tokens - 1, attention=attention, precision=precision,
        checkpointing=checkpointing,
    )  # fmt: skip
    as_on_a_gpu(job, monkeypatch)
    assert most_alive(as_asked(on_meta(sizes, attention), job), job) == pytest.approx(planned_most(job), rel=0.06)


@pytest.mark.parametrize(
    ("name", "attention", "precision", "checkpointing"),
    [
        ("t5-small", "sdpa", "fp32", False),
        ("t5-small", "sdpa", "bf16", False),
        ("t5-small", "eager", "fp32", False),
        ("t5-small", "eager", "bf16", False),
        ("t5-large", "sdpa", "bf16", False),
        ("t5-large", "sdpa", "fp32", True),
    ],
)
def test_activations_of_a_t5_are_what_autograd_saves(
    name: str, attention: str, precision: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Workload(
        shape=shape_named(name), batch_size=32, tokens=96, labels=80, precision=precision, checkpointing=checkpointing,
        attention=attention,
    )  # fmt: skip
    monkeypatch.setattr(nn.functional, "dropout", fused_dropout)
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", fused)
    with torch.device("meta"):
        config = T5Config.from_dict(known_config(name), attn_implementation=attention)
        model = as_asked(T5ForTextToSQL(config).train(), job)
    planned = Activations(job)
    # The head's gradients come with the backward pass.
    expected = pytest.approx(planned.in_loss() - 2 * planned.log_softmax, rel=0.01 if checkpointing else 0.005)
    with torch.device("meta"):
        assert saved_bytes(model, lambda: t5_loss_of(model, job)) == expected


def planned_most(job: Workload) -> int:
    made = Activations(job)
    return max(made.in_loss(), *map(sum, made.backward()))


def cut(name: str, layers: int) -> tuple[dict[str, Any], Shape]:
    """A known model with fewer layers."""
    known = known_config(name)
    sizes = {**known, **{key: layers for key in ("n_layer", "num_hidden_layers") if key in known}}
    shape = shape_recorded(json.dumps(sizes))
    assert shape is not None and shape.layers == [layers]
    return sizes, shape


def as_asked(model: PreTrainedModel, job: Workload) -> PreTrainedModel:
    """The model in the precision of a job, and with its checkpointing."""
    if job.precision == "bf16":
        model.to(torch.bfloat16)
    if job.checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return model


def loss_of(model: PreTrainedModel, job: Workload) -> Tensor:
    positions = torch.ones(job.batch_size * job.labels, dtype=torch.long)
    ids = torch.ones(job.batch_size, job.tokens, dtype=torch.long)
    return model(input_ids=ids, labels=ids, label_positions=positions, num_items_in_batch=len(positions)).loss


def t5_loss_of(model: PreTrainedModel, job: Workload) -> Tensor:
    return model(
        input_ids=torch.ones(job.batch_size, job.tokens, dtype=torch.long),
        # Made for attention already: the meta device cannot look whether a mask hides anything.
        attention_mask=torch.ones(job.batch_size, 1, 1, job.tokens, dtype=torch.bool),
        labels=torch.ones(job.batch_size, job.labels, dtype=torch.long),
        label_positions=torch.ones(job.batch_size * job.labels, dtype=torch.long),
    ).loss


class Alive(TorchDispatchMode):
    """Counts the bytes of all tensors that are alive, and the most there were."""

    def __init__(self, own: set[int]) -> None:
        super().__init__()
        self.own, self.now, self.most, self.sizes = own, 0, 0, dict[int, int]()

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for storage in [leaf.untyped_storage() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]:
            key = storage._cdata
            if key not in self.own and key not in self.sizes:
                self.sizes[key] = storage.nbytes()
                self.now += self.sizes[key]
                weakref.finalize(storage, self.forget, key)
        self.most = max(self.most, self.now)
        return out

    def forget(self, key: int) -> None:
        self.now -= self.sizes.pop(key)


def most_alive(model: PreTrainedModel, job: Workload) -> int:
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    with Alive(own) as alive, torch.device("meta"):
        loss_of(model, job).backward()
    return alive.most


def as_on_a_gpu(job: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels that a GPU takes; the meta device would take plain formulas, and cannot look into position ids."""
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", lambda position_ids: None)
    monkeypatch.setattr(nn.functional, "dropout", fused_dropout)
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", plain if job.kernel == PLAIN else fused)


def fused_dropout(values: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(values, p, True)[0] if training and p else values


def plain(query: Tensor, key: Tensor, value: Tensor, *, dropout_p: float, scale: float, is_causal: bool,
          attn_mask: Tensor | None = None, enable_gqa: bool = False) -> Tensor:  # fmt: skip
    kernel = torch.ops.aten._scaled_dot_product_attention_math
    return kernel(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]


def fused(query: Tensor, key: Tensor, value: Tensor, *, dropout_p: float, scale: float, is_causal: bool,
          attn_mask: Tensor | None = None, enable_gqa: bool = False) -> Tensor:  # fmt: skip
    if query.dtype is torch.float32 or attn_mask is not None:
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention
        bias = None if attn_mask is None else attn_mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
        return kernel(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]
    kernel = torch.ops.aten._scaled_dot_product_flash_attention
    return kernel(query, key, value, dropout_p, is_causal, scale=scale)[0]
