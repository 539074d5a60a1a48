"""Pure BF16, BF16 masters, 8-bit Adam, adapters, other losses and FSDP2 in a plan: by hand."""

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from tests.fast.plan.test_plan_formulas import LINKED, LLAMA, LLAMA_WORK, PLAIN, T5_WORK
from zeropods.cli import parser
from zeropods.errors import UserError
from zeropods.plan.activations import Activations
from zeropods.plan.estimate import plan, request_for
from zeropods.plan.facts import shape_named
from zeropods.plan.machines import Machines, step_time, traffic
from zeropods.plan.memory import PlannedMemory, plan_memory
from zeropods.plan.methods import FSDP2, Method
from zeropods.plan.workload import Saved, Workload, read_zero_settings
from zeropods.techniques import technique_named

P, MATRICES = 136, 84
"""Parameters of the smallest llama, and those of its layer's matrices."""
SAVED = Saved([{"110": 200}], [{"110": 8}], {}, {"110": 40}, 0, adapter=50, adapted=(7,))
ADAPTED = replace(LLAMA, trace=lambda way: SAVED)
"""The same, whose seven matrices have 50 inputs and outputs together."""
TRAINED = 3 * 50
LORA = {"adapter": "lora", "precision": "bf16"}
LORA_WORK = replace(LLAMA_WORK, shape=ADAPTED, method=Method(adapter="lora", lora_rank=3))


def planned(work: Workload, technique: str, ranks: int = 1, **method: Any) -> PlannedMemory:
    of = FSDP2 if technique == "fsdp2" else technique_named(technique)
    made = replace(work.method, **method)
    return plan_memory(replace(work, technique=of, ranks=ranks, zero=PLAIN, method=made))


def states(made: PlannedMemory) -> tuple[int, int, int]:
    parts = made.parts()
    return parts["parameters"], parts["gradients"], parts["optimizer"]


def test_pure_bf16_has_states_of_two_bytes_and_no_master() -> None:
    assert states(planned(LLAMA_WORK, "none", masters="none")) == (2 * P, 2 * P, 4 * P)


def test_a_step_of_foreach_adam_takes_the_roots_of_all_second_moments_at_one_time() -> None:
    llama = Workload(shape=shape_named("llama-8b"), batch_size=1, tokens=8, labels=1, precision="bf16")
    made = planned(llama, "none", masters="none", optimizer="adamw_foreach")
    # As published of Llama-3-8B: 10 B per parameter, 74.80 GiB.
    assert made.peak_allocated_bytes == 10 * llama.shape.parameters


@pytest.mark.parametrize(
    ("technique", "state_bytes"),
    # Of ZeRO-1 the fuller process keeps the gradients of the tensors that its half touches, whole: 80 elements.
    [("zero1", 2 * P + 2 * 80 + 6 * 68), ("zero3", 10 * 68)],
)
def test_bf16_masters_of_deepspeed_are_two_bytes_and_moments_are_four(technique: str, state_bytes: int) -> None:
    assert planned(LLAMA_WORK, technique, 2, masters="bf16").state_bytes == state_bytes


def test_eight_bit_moments_are_a_byte_each_and_a_scale_for_256_elements() -> None:
    assert planned(LLAMA_WORK, "none", masters="none", optimizer="adamw_8bit").parts()["optimizer"] == round(
        2.03125 * P
    )
    # This project's FP32 master stays.
    assert planned(LLAMA_WORK, "none", optimizer="adamw_8bit").parts()["optimizer"] == round(6.03125 * P)


def test_of_an_adapter_alone_are_gradients_and_moments_in_fp32() -> None:
    assert states(planned(LORA_WORK, "none")) == (2 * P + 4 * TRAINED, 4 * TRAINED, 8 * TRAINED)
    assert planned(LORA_WORK, "ddp", 2).parts()["buffers"] == 4 * TRAINED
    # DeepSpeed makes adapters BF16, with FP32 masters, and ZeRO-3 divides the frozen weights too.
    assert states(planned(LORA_WORK, "zero3", 2)) == (P + TRAINED, TRAINED, 12 * TRAINED // 2)


def test_an_adapter_keeps_its_narrow_output_beside_what_a_pass_of_rank_1_saves() -> None:
    (layers,) = LORA_WORK.saved().layers
    assert layers["110"] == 200 + 2 * 7 * 2


def test_qlora_quantises_the_matrices_of_layers_and_needs_one_of_them_whole() -> None:
    made = planned(LORA_WORK, "none", adapter="qlora")
    frozen = round((0.5 + 1 / 64 + 4 / 64 / 256) * MATRICES) + 2 * (P - MATRICES)
    assert made.parts()["parameters"] == frozen + 4 * TRAINED
    assert made.parts()["buffers"] == 2 * 16


def test_a_frozen_weight_has_no_gradient_to_compute() -> None:
    # 2 rows x (84 matrices x 2 tokens + head 20 x 1 label) are not multiplied; an adapter's are added.
    work = replace(LORA_WORK, batch_size=2)
    assert work.frozen_flops() == 2 * 2 * (MATRICES * 2 + 20) - 6 * 2 * 2 * TRAINED
    seconds = [step_time(each, LINKED).compute_seconds for each in (work, replace(work, method=Method()))]
    assert seconds[1] - seconds[0] == pytest.approx(work.frozen_flops() / 1e12)


@pytest.mark.parametrize("loss", ["transformers", "fused", "chunked"])
def test_a_loss_of_all_tokens_multiplies_the_head_with_all(loss: str) -> None:
    # Of 2 rows of 2 tokens with one label each, the head of 20 is multiplied with 2 tokens more: 6 FLOPs each.
    work = replace(LLAMA_WORK, batch_size=2)
    of_all = replace(work, method=Method(loss=loss))
    assert of_all.flops()[0] - work.flops()[0] == 6 * 20 * 2
    # As much as where all tokens have labels.
    assert of_all.flops() == replace(work, labels=2).flops()
    # With a frozen head 2 of the 6 are saved.
    frozen = replace(LORA_WORK, batch_size=2)
    saved = replace(frozen, method=replace(frozen.method, loss=loss)).frozen_flops() - frozen.frozen_flops()
    assert saved == 2 * 20 * 2
    seconds = [step_time(each, LINKED).compute_seconds for each in (work, of_all)]
    assert seconds[1] - seconds[0] == pytest.approx(6 * 20 * 2 / 1e12)


def test_adam_moves_what_it_steps() -> None:
    quick = replace(LINKED, launch_seconds=0.0)
    a100 = 1.555e12
    pure = replace(LLAMA_WORK, method=Method(masters="none"))
    seconds = [step_time(work, quick).optimizer_seconds for work in (pure, LORA_WORK)]
    assert seconds == pytest.approx([(3 * 2 + 2 * 4) * P / a100, (3 * 4 + 2 * 8) * TRAINED / a100])


def test_fsdp_divides_fp32_states_and_gathers_in_bf16() -> None:
    made = planned(LLAMA_WORK, "fsdp2", 2)
    assert states(made) == (4 * P // 2, 4 * P // 2, 8 * P // 2)
    # 44 parameters are outside of the one layer of 92; two layers, their gradients, and what these are reduced from.
    assert made.parts()["buffers"] == 2 * (44 + 2 * 92 + 2 * 92)
    assert planned(LLAMA_WORK, "fsdp2", 2, masters="none").state_bytes == 8 * P // 2


def test_fsdp_s_step_is_as_published_20_bytes_per_parameter_and_rank() -> None:
    mistral = Workload(shape=shape_named("mistral-7b"), batch_size=1, tokens=8, labels=1, precision="bf16")
    made = planned(mistral, "fsdp2", 4, optimizer="adamw_foreach")
    assert made.peak_allocated_bytes == pytest.approx(20 * mistral.shape.parameters / 4)


@pytest.mark.parametrize(
    ("loss", "of_bytes"),
    [
        # Two tokens, one of which has a label; 5 words; width 4.
        ("labels", 3 * 4 * 1 * 5),
        ("transformers", 14 * 2 * 5),
        ("fused", 8 * 2 * 5),
        ("chunked", 2 * 2 * 2 * 4),
    ],
)
def test_bytes_of_a_loss(loss: str, of_bytes: int) -> None:
    assert Activations(replace(LLAMA_WORK, method=Method(loss=loss))).loss == of_bytes


@pytest.mark.parametrize(
    ("model", "asked", "message"),
    [
        ("llama-tiny", {"masters": "fp16"}, "--masters fp16; expected one of fp32, bf16, none"),
        ("llama-tiny", {"adapter": "dora"}, "--adapter dora; expected one of lora, qlora"),
        ("llama-tiny", {"adapter": "lora"}, "--adapter lora: is planned of weights in BF16; give --precision bf16"),
        ("llama-tiny", {"lora_rank": 8}, "--lora-rank 8: needs --adapter too"),
        ("llama-tiny", {"adapter": "lora", "lora_rank": 0}, "lora_rank 0; expected more than 0"),
        *(
            ("gpt-tiny", {**LORA, "lora_targets": names}, f"--lora-targets '{names}': has a blank or an empty name; ")
            for names in ("q_proj, v_proj", "q_proj,", ",", "", "c attn", " c_attn")
        ),
        ("t5-tiny", {"loss": "chunked"}, "--loss chunked: t5-tiny is an encoder-decoder"),
        ("t5-tiny", {"attention": "all"}, "--attention all: t5-tiny is an encoder-decoder; give eager or sdpa"),
        ("t5-tiny", {"attention": "flash_attention_2"}, "t5 supports only eager and sdpa; give --attention sdpa"),
        (
            "llama-tiny",
            {"machines": Machines(nvme_bandwidth=3e9), "techniques": ("zero2_offload",)},
            "--nvme-bandwidth 3: is of ZeRO-3 with offload; give --technique zero3_offload too",
        ),
        ("llama-tiny", {"quantized": "weights"}, "--quantized weights: is of ZeRO++; give --technique zero3++ too"),
        *(
            (
                "llama-tiny",
                {"quantized": names, "techniques": ("zero3++",)},
                f"--quantized {names or repr('')}; expected ",
            )
            for names in ("", ",weights", "weights,weights", "weights, gradients")
        ),
        (
            "llama-tiny",
            {"masters": "none", "precision": "bf16", "techniques": ("zero2",)},
            "technique 'zero2': --masters",
        ),
        (
            "llama-tiny",
            {"masters": "bf16", "precision": "bf16", "techniques": ("ddp",)},
            "technique 'ddp': --masters bf16",
        ),
        ("llama-tiny", {"optimizer": "adamw_8bit", "techniques": ("zero1",)}, "technique 'zero1': --optimizer"),
    ],
)
def test_what_cannot_be_trained_so_is_refused(model: str, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        plan(request_for(model, **asked))


def test_a_plan_of_what_this_project_does_not_train_says_so_and_has_the_techniques_that_can() -> None:
    argv = ["plan", "--model", "llama-tiny", "--precision", "bf16", "--masters", "none", "--optimizer", "adamw_8bit"]
    arguments = parser().parse_args(argv)
    found = arguments.run(arguments)
    assert [each["technique"] for each in found["techniques"]] == ["none", "ddp"]
    note = "Note: --masters none, --optimizer adamw_8bit: planned only, this project does not train so yet."
    assert note in arguments.readable(found)
    arguments = parser().parse_args([*argv[:5], "--technique", "fsdp2"])
    found = arguments.run(arguments)
    assert "Note: --technique fsdp2: planned only" in arguments.readable(found)


def test_zeropp_keeps_a_second_share_and_gathers_it_within_a_pod() -> None:
    # Two pods of two processes; half of 2 B x 136 stays in each, and is gathered over PCIe, 64 B/s, half of it.
    settings = replace(PLAIN, live_elements=0, secondary_ranks=2)
    zero3 = replace(LLAMA_WORK, technique=technique_named("zero3"), ranks=4, zero=replace(PLAIN, live_elements=0))
    zeropp = replace(zero3, technique=technique_named("zero3++"), zero=settings)
    plain, second = plan_memory(zero3).parts()["buffers"], plan_memory(zeropp).parts()["buffers"]
    assert second - plain == 2 * P // 2
    machines = replace(LINKED, slots=2)
    everywhere, within = 3 / 4 * 2 * P / 100, 1 / 2 * 2 * P / 64
    assert traffic(zero3, machines) == pytest.approx((everywhere, 2 * everywhere, 0), rel=1e-3)
    assert traffic(zeropp, machines) == pytest.approx((everywhere, within + everywhere, 0), rel=1e-3)
    # Of four passes the first alone gathers from all.
    passes = traffic(replace(zeropp, gradient_accumulation=4), machines)
    assert passes.forward == pytest.approx((everywhere + 3 * within) / 4, rel=1e-3)


def test_zeropp_sends_weights_in_a_byte_and_gradients_of_matrices_in_half_of_one() -> None:
    # Two pods of two processes. 16, 8, 8 and 16 elements can be divided among twice four processes; 88 others go on
    # round the ring, 2 B each. The 48 are sent within a pod, then between pods, each time half of them.
    work = replace(LLAMA_WORK, technique=technique_named("zero3++"), ranks=4)
    settings = replace(PLAIN, live_elements=0, secondary_ranks=2, quantizes_weights=True, quantizes_gradients=True)
    found = traffic(replace(work, zero=settings), replace(LINKED, slots=2))
    everywhere, within = 3 / 4 * P / 100, 1 / 2 * P / 64
    reduced = 1 / 2 * 48 / 2 / 64 + 1 / 2 * 48 / 2 / 100 + 3 / 4 * 2 * 88 / 100
    assert found == pytest.approx((everywhere, within + reduced, 0), rel=1e-3)
    # Within one pod gradients are sent as they are.
    alone = traffic(replace(work, zero=replace(settings, secondary_ranks=1)), replace(LINKED, pods=1, slots=4))
    assert alone == pytest.approx((3 / 4 * P / 64, 3 / 4 * P / 64 + 3 / 4 * 2 * P / 64, 0), rel=1e-3)


def test_quantised_traffic_is_that_of_zeropp_alone_and_planned_only() -> None:
    asked = {"machines": replace(LINKED, slots=2), "quantized": "weights,gradients"}
    made = plan(request_for("llama-tiny", techniques=("zero3", "zero3++"), **asked))
    quantized = [estimate.work.zero.quantizes_weights for estimate in made.estimates]
    assert quantized == [estimate.work.zero.quantizes_gradients for estimate in made.estimates] == [False, True]
    assert made.request.planned_only == ["--quantized weights,gradients"]
    config = {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}
    assert read_zero_settings(config).quantizes_weights and not read_zero_settings(config).quantizes_gradients


EAGER_T5 = {"attention": "eager", "source_length": 64, "target_length": 16, "batch_size": 4}


def test_eager_attention_of_a_t5_keeps_probabilities_and_their_dropout_where_sdpa_keeps_a_bias() -> None:
    # t5-small, 6 layers of 8 heads, in each stack: a probability, its mask and what is left of it take 4 + 1 + 4 B;
    # SDPA keeps a bias, 4 B, and the logarithms of sums, 4 B for each token and head. The bias of the decoder's own
    # tokens is the same for all rows, with a byte of its mask.
    found = {}
    for attention in ("eager", "sdpa"):
        request = request_for("t5-small", techniques=("none",), **{**EAGER_T5, "attention": attention})
        (estimate,) = plan(request).estimates
        found[attention] = Activations(estimate.work)
        assert request.planned_only == (["--attention eager"] if attention == "eager" else [])
    layers, heads, rows, tokens, labels = 6, 8, 4, 64, 16
    encoder = layers * heads * rows * tokens * ((9 - 4) * tokens - 4)
    # A byte of a mask for each token is next to nothing.
    more = found["eager"].stacks[0].all_kept - found["sdpa"].stacks[0].all_kept
    assert more == pytest.approx(encoder, rel=1e-3)
    decoder = found["eager"].stacks[1].all_kept - found["sdpa"].stacks[1].all_kept
    cross = heads * rows * labels * ((9 - 4) * tokens - 4)
    own = heads * rows * labels * (9 * labels - 4) - (4 * heads + 1) * labels**2
    assert decoder == pytest.approx(layers * (cross + own), rel=1e-3)


def test_a_decoder_at_work_has_gradients_of_its_scores_over_the_source() -> None:
    work = Workload(shape=shape_named("t5-small"), batch_size=4, tokens=4_096, labels=16, attention="eager")
    # Two of FP32, of eight heads.
    assert Activations(work).stacks[1].working == 2 * 4 * 8 * 4 * 16 * 4_096


def test_what_zero_3_offloads_to_a_disk_leaves_four_buffers_of_a_sub_group_in_host_memory() -> None:
    # Two processes; 142 elements that decay make the larger of two sub-groups, 71 of them a process.
    work = replace(T5_WORK, technique=technique_named("zero3_offload"), ranks=2, zero=PLAIN)
    on_disk = replace(work, zero=replace(PLAIN, on_nvme=True))
    before, after = plan_memory(work, 0), plan_memory(on_disk, 0)
    assert [term.bytes for term in after.nvme_terms] == [4 * 112, 12 * 112] and not before.nvme_terms
    buffers = {term.name: term.bytes for term in after.host_terms}["buffers of what lies on NVMe"]
    assert buffers == 4 * 4 * 71
    assert after.state_bytes == before.state_bytes and after.terms == before.terms
    # 4 B of a gradient are written; 16 B read and 12 B written in the step, by two slots on one disk.
    machines = replace(LINKED, pods=1, slots=2)
    seconds = [step_time(each, replace(machines, nvme_bandwidth=8.0)).offload_seconds for each in (work, on_disk)]
    assert seconds[1] - seconds[0] == pytest.approx(2 * 32 * 112 / 8)


def test_a_disk_is_that_of_zero_3_with_offload_and_planned_only() -> None:
    machines = Machines(pods=1, slots=2, nvme_bandwidth=3e9)
    request = request_for("t5-large", machines=machines, techniques=("zero3_offload", "zero2_offload"))
    disk, memory = reversed(plan(request).estimates)
    assert (disk.technique.name, memory.technique.name) == ("zero3_offload", "zero2_offload")
    assert disk.to_json()["nvme_bytes"] == pytest.approx(16 * 737_668_096, rel=1e-6) and not memory.memory.nvme_terms
    assert request.planned_only == ["--nvme-bandwidth 3"]
    config = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "pin_memory": True}}}
    assert read_zero_settings(config).on_nvme


@pytest.mark.parametrize(
    "words",
    [
        ("--nvme-bandwidth", "3", "--technique", "zero3_offload", "--technique", "zero2"),
        ("--quantized", "weights", "--slots", "2", "--technique", "zero3++", "--technique", "zero2"),
        # Where nothing fits, other techniques are looked for.
        ("--nvme-bandwidth", "3", "--technique", "zero3_offload", "--gpu-memory", "0.2"),
    ],
)
def test_a_setting_of_one_technique_leaves_the_plan_of_others_as_it_is(words: tuple[str, ...]) -> None:
    arguments = parser().parse_args(["plan", "--model", "t5-small", "--pods", "2", *words, "--what-if"])
    found = arguments.run(arguments)
    named = [word for flag, word in pairwise(words) if flag == "--technique"]
    if found["verdict"] == "FITS":
        assert {way["technique"] for way in found["advice"]["ways"]} == set(named)
    # Each command that it names can be planned.
    text = arguments.readable(found)
    commands = [line.split() for line in text.splitlines() if line.startswith("zeropods plan ")]
    assert len(commands) > 5
    for _, *command in commands:
        again = parser().parse_args(command)
        assert again.run(again)["techniques"]
