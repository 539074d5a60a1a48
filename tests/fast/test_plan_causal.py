"""Plans of causal language models: by hand for smallest ones, and against what was published."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from tests.fast.test_plan_verb import result
from tests.made import a_rank, a_record, as_record
from zeropods.errors import UserError
from zeropods.measure.record import Record
from zeropods.plan.activations import causal_activations
from zeropods.plan.estimate import plan
from zeropods.plan.jobs import CausalJob
from zeropods.plan.machines import Machines
from zeropods.plan.memory import plan_memory
from zeropods.plan.parameters import (
    attention_products,
    causal_parameters,
    causal_recomputed_flops,
    causal_training_flops,
)
from zeropods.plan.published import claims, layer_bytes_by_formula, state_bytes
from zeropods.plan.recorded import planned
from zeropods.plan.request import CausalRequest, request_for
from zeropods.plan.shapes import CAUSAL_SHAPES, CausalShape, causal_shape, causal_shape_from
from zeropods.plan.step_time import step_time
from zeropods.report import figures
from zeropods.report.plan import claims_table, length_plans
from zeropods.techniques import TECHNIQUES, ZeroSettings, technique_named

SMALLEST = CausalShape(
    family="llama", hidden=4, layers=1, heads=2, kv_heads=1, head_size=2, ffn=3, vocabulary=5, positions=8, tied=False
)
"""Projections of 16, 8, 8 and 16 elements, three feed-forward matrices of 12, table and head of 20, norms of 4."""
SMALLEST_GPT = replace(SMALLEST, family="gpt2", kv_heads=2, tied=True)
JOB = CausalJob(shape=SMALLEST, rows=1, tokens=2, labels=1, precision="bf16")
WHOLE = ZeroSettings(persistent_elements=0)
LINKED = Machines(pods=2, bandwidth=100.0, latency_seconds=0.0, flops=1e12, pcie_bandwidth=64.0, host_bandwidth=28.0)


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("distilgpt2", 81_912_576),
        ("bigscience/bloom-560m", 559_214_592),
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("mistralai/Mistral-7B-v0.1", 7_241_732_096),
        ("meta-llama/Meta-Llama-3-8B", 8_030_261_248),
    ],
)
def test_parameters_are_the_published_ones(model: str, parameters: int) -> None:
    assert causal_parameters(causal_shape(model)) == parameters


def test_parameters_of_smallest_models_by_hand() -> None:
    assert causal_parameters(SMALLEST) == 20 + (48 + 36 + 8) + 4 + 20
    # Positions of 8 x 4; 48 + 12, 16 + 4, 12 + 3 and 12 + 4 with biases; three norms of 8.
    assert causal_parameters(SMALLEST_GPT) == 20 + 32 + (60 + 20 + 15 + 16 + 16) + 8


@pytest.mark.parametrize("name", CAUSAL_SHAPES)
def test_a_causal_shape_written_into_a_record_reads_back(name: str) -> None:
    assert causal_shape_from(asdict(causal_shape(name))) == causal_shape(name)


@pytest.mark.parametrize(
    "change",
    [
        {"family": "mamba"},
        {"tied": 1},
        {"heads": 0},
        {"heads": True},
        {"kv_heads": 3},
        {"experts": 8},
        {"family": "bloom"},
    ],
)
def test_a_causal_shape_that_can_be_none_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"^shape: .*expected"):
        causal_shape_from({**asdict(causal_shape("llama-tiny")), **change})


def test_flops_of_a_smallest_model_by_hand() -> None:
    # 84 matmul parameters a token, 20 a label, and 1 layer x 2 heads x 2 x 3^2 for half the square of attention.
    assert causal_training_flops(SMALLEST, 3, 2) == 6 * (84 * 3 + 20 * 2 + 36)
    assert causal_recomputed_flops(SMALLEST, 3) == 2 * (84 * 3 + 36)


def test_a_window_bounds_what_attention_needs() -> None:
    shape = replace(SMALLEST, family="mistral")
    # In units of a window's square: half of it for the first window, all of it for each of the two behind; doubled.
    whole, third = attention_products(shape, 4_096), attention_products(shape, 3 * 4_096)
    assert (whole, third) == (4 * 4_096**2, 4 * (1 + 2 + 2) * 4_096**2)


def test_scores_that_are_kept_are_computed_for_the_whole_square() -> None:
    fused, eager = (replace(JOB, attention=name).flops()[0] for name in ("sdpa", "eager"))
    assert eager - fused == 6 * attention_products(SMALLEST, 2)


@pytest.mark.parametrize(
    ("change", "layer"),
    [
        # Two RMS norms of FP32 copy, quotient and result; queries, keys, values; log-sums; output; four of width 3.
        ({}, 2 * 2 * (8 * 4 + 4) + 2 * (8 + 8) + 16 + 16 + 4 * 2 * 6),
        # Keys and values repeated; each of 8 scores in FP32 and in BF16.
        ({"attention": "eager"}, 2 * 2 * (8 * 4 + 4) + 48 + 8 * (4 + 2) + 16 + 4 * 2 * 6),
        # FP32 with shared keys takes the plain formula: each score once.
        ({"precision": "fp32"}, 2 * 2 * (12 * 4 + 4) + 96 + 8 * 4 + 32 + 4 * 4 * 6),
        # GPT-2: norms, a third of each for queries, keys and values, masks of dropout, five of width 3.
        (
            {"shape": SMALLEST_GPT, "precision": "fp32", "dropout": True},
            2 * 2 * (8 * 4 + 8) + 96 + 16 + 32 + 2 * 8 + 5 * 4 * 6,
        ),
    ],
)
def test_activations_of_a_smallest_layer_by_hand(change: dict[str, Any], layer: int) -> None:
    assert causal_activations(replace(JOB, **change)).layer == layer


@pytest.mark.parametrize(
    ("model", "attention", "tokens", "precision", "before_ampere", "kernel"),
    [
        ("distilgpt2", "sdpa", 512, "fp32", False, "fused"),
        ("distilgpt2", "sdpa", 512, "fp16", True, "fused"),
        ("llama-8b", "sdpa", 512, "bf16", False, "fused"),
        ("llama-8b", "sdpa", 512, "fp32", False, "plain"),
        ("llama-8b", "sdpa", 512, "fp16", True, "plain"),
        ("mistral-7b", "sdpa", 4_095, "bf16", False, "fused"),
        ("mistral-7b", "sdpa", 4_096, "bf16", False, "masked"),
        ("mistral-7b", "flash_attention_2", 4_096, "bf16", False, "fused"),
        ("bloom-560m", "eager", 512, "bf16", False, "eager"),
    ],
)
def test_what_attention_really_runs(
    model: str, attention: str, tokens: int, precision: str, before_ampere: bool, kernel: str
) -> None:
    job = replace(JOB, shape=causal_shape(model), attention=attention, tokens=tokens, precision=precision)
    assert replace(job, before_ampere=before_ampere).kernel == kernel


def test_the_loss_holds_logits_of_labels_only() -> None:
    found = causal_activations(replace(JOB, rows=3, tokens=100, labels=7))
    assert (found.head, found.head_transient) == (4 * 3 * 7 * 5, 2 * 4 * 3 * 7 * 5)


@pytest.mark.parametrize(
    ("technique", "ranks", "bytes_a_parameter"), [("none", 1, 16), ("zero3", 2, 8), ("zero3_offload", 2, 10)]
)
def test_states_of_a_causal_model_in_half_precision(technique: str, ranks: int, bytes_a_parameter: int) -> None:
    for precision in ("bf16", "fp16"):
        made = plan_memory(replace(JOB, precision=precision), technique_named(technique), ranks, WHOLE)
        assert made.state_bytes == bytes_a_parameter * 136


def test_fp16_without_deepspeed_is_autocast_over_fp32_weights() -> None:
    made = plan_memory(replace(JOB, precision="fp16"), technique_named("ddp"), 2)
    parts = made.parts()
    assert (parts["parameters"], parts["gradients"], parts["optimizer"]) == (4 * 136, 4 * 136, 8 * 136)
    # Copies of 84 + 20 matmul parameters, two bytes each.
    assert causal_activations(replace(JOB, precision="fp16", autocast=True)).copies == 2 * 104


def test_two_gradients_of_a_tied_embedding_are_there_at_one_time() -> None:
    # 20 elements of 2 B, as head and as table, beside all gradients.
    job = replace(JOB, shape=replace(SMALLEST, tied=True))
    assert job.moments().backward[-1] == (2 * 2 * 20, 2 * 116)


@pytest.mark.parametrize("model", ["distilgpt2", "bloom-560m", "qwen3-0.6b", "llama-8b"])
@pytest.mark.parametrize("tokens", [16, 1_024])
def test_tensors_alone_never_exceed_what_must_fit(model: str, tokens: int) -> None:
    asked = {"seq_length": tokens, "precision": "fp16", "attention": "all", "gradient_checkpointing": "both"}
    for variant in request_for(model, **asked).variants():
        for technique in TECHNIQUES:
            made = plan_memory(variant.work, technique, 3)
            assert made.peak_allocated_bytes <= made.device_bytes


def test_passes_of_a_step_send_what_their_technique_cannot_keep() -> None:
    # Half of 2 B x 136 over 100 B/s is 1.36 s; stage 2 reduces in two passes round the ring, after each of four.
    times = {
        name: step_time(JOB, technique_named(name), LINKED, ZeroSettings(live_elements=0), passes=4)
        for name in ("ddp", "zero1", "zero2", "zero3")
    }
    seconds = [time.communication_seconds for time in times.values()]
    assert seconds == pytest.approx([2 * 1.36, 3 * 1.36, (4 * 2 + 1) * 1.36, 4 * 3 * 1.36])


def test_offloaded_gradients_go_down_after_each_pass_and_adam_runs_once() -> None:
    time = step_time(JOB, technique_named("zero2_offload"), LINKED, ZeroSettings(), passes=4)
    assert (time.offload_seconds, time.processor_seconds) == pytest.approx((68 * (4 * 4 + 2) / 64, 68))


def test_a_step_of_several_passes_takes_more_samples() -> None:
    asked = {"model": "distilgpt2", "samples": 1_000, "techniques": ("none",)}
    one, four = (plan(CausalRequest(gradient_accumulation=n, **asked)).estimates[0] for n in (1, 4))
    assert four.time.compute_seconds == pytest.approx(4 * one.time.compute_seconds)
    # 250 steps of 4 rows; 63 of 16.
    assert (one.total_seconds, four.total_seconds) == pytest.approx((250 * one.time.seconds, 63 * four.time.seconds))


def test_the_claimed_96_gb_of_states_leave_out_the_master() -> None:
    assert state_bytes(8_000_000_000, master=False) == 96e9
    assert (state_bytes(8_000_000_000), state_bytes(8_000_000_000, fp32_gradients=True)) == (128e9, 144e9)


def test_the_claimed_1_35_tb_of_activations_are_1348_gib() -> None:
    # A layer: 2^14 x 2^12 x (34 + 5 x 32 x 4) = 2^26 x 674 bytes; 32 of them are 2^31 x 674.
    layer = layer_bytes_by_formula(rows=1, tokens=16_384, hidden=4_096, heads=32)
    assert layer == 2**26 * 674 and 32 * layer / 2**30 == 1_348


def test_activations_of_8b_are_far_from_the_claim_with_flash_attention() -> None:
    eager, flash, again = (claim.bytes for claim in claims()[-3:])
    assert (eager, flash, again) == pytest.approx((1.84e12, 131e9, 30e9), rel=0.01)
    assert "1,348 GiB" in str(claims_table())


def test_claims_of_a_model_without_flash_attention_are_refused() -> None:
    with pytest.raises(UserError, match="bloom has eager only"):
        claims("bloom-560m")


def test_attention_and_checkpointing_are_axes_of_the_table() -> None:
    found = result(
        "--model", "qwen3-0.6b", "--precision", "bf16", "--attention", "all", "--gradient-checkpointing", "both",
        "--technique", "zero1", "--technique", "zero3", "--seq-length", "2048",
    )  # fmt: skip
    ways = [(each["technique"], each["attention"], each["gradient_checkpointing"]) for each in found["techniques"]]
    assert len(set(ways)) == 12 and found["request"]["seq_length"] == 2_048
    assert {"attention", "checkpointing", "tokens/s"} <= {cell.strip() for cell in found["text"].split("|")}


def test_the_choice_says_in_which_way_to_train() -> None:
    found = result(
        "--model", "qwen3-0.6b", "--attention", "all", "--gpu-memory", "16", "--gradient-checkpointing", "both"
    )
    best = found["best_labels"]
    assert f"Choose {found['best']}, {best['attention']}" in found["text"]


@pytest.mark.parametrize(
    ("gpu", "precision", "ways"),
    [
        ("A100", "bf16", ["eager", "sdpa", "flash_attention_2"]),
        ("A100", "fp32", ["eager", "sdpa"]),
        ("T4", "fp16", ["eager", "sdpa"]),
    ],
)
def test_all_attentions_are_those_that_can_run(gpu: str, precision: str, ways: list[str]) -> None:
    request = CausalRequest(model="llama-8b", precision=precision, attention="all", machines=Machines(gpu=gpu))
    assert [variant.labels["attention"] for variant in request.variants()] == ways


def test_a_family_without_sdpa_is_planned_as_it_runs() -> None:
    assert [each["attention"] for each in result("--model", "bloom-560m", "--technique", "ddp")["techniques"]] == [
        "eager"
    ]


def test_a_length_beyond_the_trained_one_is_planned_with_a_note() -> None:
    text = result("--model", "llama-8b", "--seq-length", "16384", "--technique", "zero3", "--precision", "bf16")["text"]
    assert "llama-8b was trained at 8192 tokens" in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--model", "gpt-9"), "gpt-9.*t5-tiny.*llama-8b"),
        (("--model", "bloom-560m", "--source-length", "96"), "bloom-560m is a causal model; give --seq-length"),
        (("--model", "t5-small", "--seq-length", "96"), "t5-small is a T5; give --source-length"),
        (("--model", "t5-small", "--attention", "sdpa"), "--attention sdpa: t5-small is a T5; leave it out"),
        (("--model", "t5-small", "--gradient-checkpointing", "both"), "both: t5-small is a T5; give True or False"),
        (("--model", "bloom-560m", "--attention", "sdpa"), "bloom has eager only"),
        (("--model", "llama-8b", "--attention", "flash"), "flash; expected eager, sdpa, flash_attention_2 or all"),
        (("--model", "llama-8b", "--attention", "flash_attention_2"), "no fp32; give --precision bf16"),
        (("--model", "distilgpt2", "--seq-length", "1025"), "--seq-length 1025; distilgpt2 has 1024 positions"),
        (("--model", "distilgpt2", "--seq-length", "0"), "--seq-length 0; expected more than 0"),
        (("--model", "distilgpt2", "--label-length", "600"), "--label-length 600; expected at most --seq-length 512"),
        (("--model", "distilgpt2", "--gradient-accumulation", "0"), "--gradient-accumulation 0; expected more than 0"),
        (("--model", "distilgpt2", "--gpu", "T4", "--precision", "bf16"), "T4 has no BF16.*fp16"),
        (("--model", "llama-8b", "--precision", "int8"), "--precision int8; expected fp32 or bf16 or fp16"),
    ],
)
def test_bad_input_of_a_causal_plan_is_one_line(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        result(*argv)
    assert "\n" not in str(raised.value)


def test_flash_attention_2_on_a_gpu_before_ampere_is_refused() -> None:
    request = request_for("llama-8b", attention="flash_attention_2", precision="fp16", machines=Machines(gpu="T4"))
    with pytest.raises(UserError, match=r"needs an Ampere GPU.*sdpa"):
        plan(request)


def test_a_plan_by_length_has_a_line_for_each_way_and_length() -> None:
    made = length_plans("llama-tiny", [128, 256], attention="all", precision="bf16", techniques=("zero3",))
    assert len(made.table.rows) == 6
    assert made.plot.text == "planned memory of one GPU at 128, 256 tokens"


def recorded(*, shape: CausalShape = SMALLEST, **values: Any) -> Record:
    """20 steps of 32 rows of 8 tokens, 2 of them with a loss, by the smallest model."""
    batch = {"rows": 32, "source_tokens": 8, "target_tokens": 0}
    counts = {"source_tokens": 640 * 8, "target_tokens": 640 * 2, "padded_tokens": 640 * 8}
    identity = {"attn_implementation": "eager", "dropout": None, **values.pop("identity", {})}
    rank = a_rank(shape=asdict(shape), largest_batch=batch, **counts)
    return as_record(a_record(ranks=[rank], task="squad", identity=identity, **values))


def test_flops_of_a_causal_run_are_those_of_its_rows_a_second() -> None:
    # 40 samples a second, each 6 x (84 x 8 + 20 x 2 + 4 x 8^2).
    record = recorded()
    assert figures.model_flops_per_second(record) == pytest.approx(40 * 6 * (672 + 40 + 256))


def test_tokens_with_a_loss_are_counted_once_in_a_causal_run() -> None:
    assert figures.tokens_per_second(recorded()) == pytest.approx(40 * 8)
    assert figures.padding_share(recorded()) == 0


def test_a_recorded_causal_run_is_planned_with_its_batch_and_attention() -> None:
    made = planned(recorded())
    job = CausalJob(shape=SMALLEST, rows=32, tokens=8, labels=2, attention="eager")
    assert made is not None
    assert made == plan_memory(job, technique_named("none"), 1, context_bytes=0)


def test_a_recorded_bloom_is_planned_as_it_ran_whatever_was_asked() -> None:
    made = planned(recorded(shape=causal_shape("bloom-tiny"), identity={"attn_implementation": "sdpa"}))
    assert made is not None and any("eager attention" in term.formula for term in made.terms)
