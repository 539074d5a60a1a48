"""The precision that a run measures in its first step: by every technique in BF16, and nothing else by it."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.full.conftest import ROOT, TINY, run_several
from zeropods.measure.record import MeasuredPrecision, RankMeasurement, read_record
from zeropods.programs import child_environment, free_port
from zeropods.train.engines.ddp import Ddp
from zeropods.train.flags import TextToSQLArguments
from zeropods.train.precision import PrecisionRecorder

ENGINE = Ddp(TextToSQLArguments())
SHORT: list[object] = [
    "--max_steps", 2, "--eval_steps", 0, "--save_model", False, "--per_device_train_batch_size", 2, "--threads", 1,
    "--memory_interval", 0,
]  # fmt: skip
CAUSAL: list[object] = [
    "--model_name_or_path", "gpt-tiny", "--init", "random", "--threads", 1, "--logging_steps", 1, "--save_steps", 0,
    "--memory_interval", 0, "--max_train_steps", 2, "--eval_steps", 0, "--save_model", False,
    "--per_device_train_batch_size", 2, "--task", "lm", "--max_seq_length", 32,
]  # fmt: skip
BF16 = MeasuredPrecision(
    weights="bf16", master_weights="fp32", optimizer_states="fp32", gradients_sent="bf16", linear_output="bf16"
)
TECHNIQUES = [("none", 1), ("ddp", 2), ("zero1", 2), ("zero2", 2), ("zero3", 2), ("zero3_offload", 2)]


def configured(name: str) -> list[object]:
    """The flags of a technique in BF16."""
    config = [] if name in ("none", "ddp") else ["--deepspeed", ROOT / "dsconfig" / f"{name}.json"]
    return ["--precision", "bf16", *config]


# In FP32 all techniques are trained by test_same_numbers, which asks what they measured.


@pytest.mark.parametrize(("name", "ranks"), TECHNIQUES)
def test_a_run_in_bf16_measures_what_it_computes_in(name: str, ranks: int, prepared: Path, tmp_path: Path) -> None:
    run_several([*TINY, *SHORT, "--dataset_path", prepared], (ranks, tmp_path / "run", configured(name)))
    record = read_record(tmp_path / "run")
    assert (record.status, record.precision) == ("ok", "bf16")
    assert record.measured_precision == (BF16 if ranks > 1 else replace(BF16, gradients_sent=None))
    assert [rank.measured_precision for rank in record.ranks] == [record.measured_precision] * ranks


def test_a_causal_run_measures_it_too(text: Path, tmp_path: Path) -> None:
    """GPT-2, most of whose linear layers are of a class of their own."""
    common = [*CAUSAL, "--data", text]
    run_several(common, (2, tmp_path / "run", configured("zero2")), script="causal_train.py")
    assert read_record(tmp_path / "run").measured_precision == BF16


def test_no_layer_is_hooked_that_torch_compiles() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 1))
    model[0].compile()
    with PrecisionRecorder(RankMeasurement(rank=0, host="here"), 1, ENGINE) as recorder:
        recorder.on_step_begin(None, SimpleNamespace(global_step=0), None, model=model, optimizer=None)
        assert [len(layer._forward_hooks) for layer in (model[0][0], model[1])] == [0, 1]
    assert not model[1]._forward_hooks


# What libraries do behind a configuration's back.

BEHIND_ITS_BACK = """
import sys, torch
from torch import nn
from types import SimpleNamespace
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from zeropods.measure.record import RankMeasurement
from zeropods.train.engines.ddp import Ddp
from zeropods.train.flags import TextToSQLArguments
from zeropods.train.precision import PrecisionRecorder

dist.init_process_group("gloo")
model = nn.Linear(4, 4)
ddp = nn.parallel.DistributedDataParallel(model)
ddp.register_comm_hook(None, fp16_compress_hook)
optimizer = torch.optim.AdamW(ddp.parameters())
measured = RankMeasurement(rank=0, host="here")
with PrecisionRecorder(measured, 2, Ddp(TextToSQLArguments())) as recorder:
    state = SimpleNamespace(global_step=0)
    recorder.on_step_begin(None, state, None, model=model, optimizer=optimizer)
    with torch.autocast("cpu", torch.bfloat16):
        loss = ddp(torch.ones(2, 4)).float().sum()
    loss.backward()
    dist.all_reduce(torch.ones((), dtype=torch.float64))
    optimizer.step()
    recorder.on_step_end(None, state, None, model=model, optimizer=optimizer)
print(measured.measured_precision.text)
dist.destroy_process_group()
"""


def test_gradients_are_seen_as_they_are_sent_and_outputs_as_they_are_computed() -> None:
    """FP32 weights under autocast, whose gradients DDP sends in FP16; a norm of FP64 is no gradient."""
    port = str(free_port())
    ranks = []
    for rank in ("0", "1"):
        place = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, "-c", BEHIND_ITS_BACK]
        environment = {**os.environ, **child_environment(), **place}
        ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True))
    printed = [rank.communicate(timeout=600)[0].strip() for rank in ranks]
    assert printed == ["bf16; weights, master weights, optimizer states in fp32; gradients sent in fp16"] * 2


def test_nothing_is_left_after_the_first_step_and_nothing_is_changed_by_it() -> None:
    def trained(*, is_measured: bool) -> tuple[list[float], RankMeasurement]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        measured = RankMeasurement(rank=0, host="here")
        recorder = PrecisionRecorder(measured, 1, ENGINE)
        losses = []
        for step in range(3):
            about: Any = {"model": model, "optimizer": optimizer}
            if is_measured:
                recorder.on_step_begin(None, SimpleNamespace(global_step=step), None, **about)
            loss = model(torch.ones(4, 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if is_measured:
                recorder.on_step_end(None, SimpleNamespace(global_step=step + 1), None, **about)
                assert not any(module._forward_hooks for module in model.modules())
        return losses, measured

    plain, _ = trained(is_measured=False)
    observed, measured = trained(is_measured=True)
    assert observed == plain
    assert measured.measured_precision is not None and measured.measured_precision.text == "fp32"
