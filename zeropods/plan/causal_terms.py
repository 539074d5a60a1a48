"""Activations of a causal model as a plan's terms, and over the moments of a pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeropods.plan.causal_activations import causal_activations
from zeropods.plan.causal_parameters import embedding, layer_parameters
from zeropods.plan.term import Term, short, total
from zeropods.plan.workload import Moments

if TYPE_CHECKING:
    from zeropods.plan.causal_job import CausalJob


def causal_activation_terms(job: CausalJob) -> tuple[Term, ...]:
    """The most that there is at one time: everything saved, and the head's transient or that of one layer."""
    terms = _within_layers_and_head(job)
    beyond = _tied(job) - total(terms)
    if beyond <= 0:
        return terms
    name = "gradients of the embedding, as head and as table, where activations were"
    return *terms, Term(name, beyond, f"{short(_tied(job))}B, less those", "activations")


def _within_layers_and_head(job: CausalJob) -> tuple[Term, ...]:
    a, layers = causal_activations(job), job.shape.layers
    head = a.head + a.head_transient
    formula = " + ".join(f"{short(part)}B" for part in (a.ends, a.mask, a.copies) if part)
    ends = Term("ends, mask, copies of weights", a.ends + a.mask + a.copies, formula, "activations")
    if not job.checkpointing:
        saved = Term("layers", layers * a.layer, f"{_each(job, a.layer)}, {job.kernel} attention", "activations")
        most = _head(job, head) if head - a.head >= a.layer_transient else _both(a.head, a.layer_transient)
        return saved, ends, most
    again = a.layer + a.layer_transient
    inputs = Term("inputs of layers", layers * a.layer_input, _each(job, a.layer_input), "activations")
    computed = Term("one layer, computed again", again, f"{short(again)}B, {job.kernel} attention", "activations")
    return inputs, ends, _head(job, head) if head >= again else computed


def causal_moments(job: CausalJob) -> Moments:
    """Activations and gradients in the loss, and at the last layer, the first layer and the embedding."""
    a, size, layers = causal_activations(job), job.element_bytes, job.shape.layers
    kept = a.layer_input if job.checkpointing else a.layer
    working, ends = a.layer_transient + (a.layer if job.checkpointing else 0), a.ends + a.mask + a.copies
    table, width = size * embedding(job.shape), size * job.shape.hidden * job.shape.ffn
    # Of the layer at work only the feed-forward part's last matrix has its gradient while the most is saved.
    others = (layers - 1) * size * layer_parameters(job.shape) + width
    backward = (
        (layers * kept + working + ends, table),
        (kept + working + a.mask + a.copies, table + others),
        (_tied(job), size * job.parameters),
    )
    return Moments(layers * kept + ends + a.head + a.head_transient, backward)


def _tied(job: CausalJob) -> int:
    """A tied embedding has a gradient as the head and another as the table; both are there while they are added."""
    return 2 * job.element_bytes * embedding(job.shape) if job.shape.tied else 0


def _each(job: CausalJob, of_layer: int) -> str:
    a_token = of_layer / (job.rows * job.tokens) / 1e3
    return f"{job.shape.layers} layers x {job.rows} rows x {job.tokens} tokens x {a_token:.4g} kB"


def _head(job: CausalJob, size: int) -> Term:
    formula = f"3 x 4 B x {job.rows} rows x {job.labels} labels x {job.shape.vocabulary} words"
    return Term("log-softmax over the vocabulary, with its gradients", size, formula, "activations")


def _both(head: int, transient: int) -> Term:
    formula = f"{short(head)}B + {short(transient)}B"
    return Term("log-softmax, and gradients within a layer", head + transient, formula, "activations")
