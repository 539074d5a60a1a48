"""Train a small T5 for two steps under DeepSpeed's profiler, with ZeRO-1 and with ZeRO-3: `profiled_t5.py FOLDER`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from zeropods.programs import own_programs_first, use_own_cache

ROWS, SOURCE, TARGET = 4, 24, 10
STAGES = (1, 3)
"""In this order: DeepSpeed replaces the linear function of the whole process for stage 3."""


def main(folder: Path) -> None:
    """One process; the second step of each stage is profiled into `FOLDER/STAGE.txt`."""
    os.environ["PATH"] = own_programs_first(os.environ.get("PATH"))
    use_own_cache()
    import torch

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    for stage in STAGES:
        _train(stage, folder / f"{stage}.txt")
    torch.distributed.destroy_process_group()


def _train(stage: int, report: Path) -> None:
    import deepspeed
    import torch

    from zeropods.plan.shapes import T5_SHAPES
    from zeropods.train.text2sql import random_t5

    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1_000_000},
        "zero_allow_untested_optimizer": True,
        "flops_profiler": {"enabled": True, "profile_step": 1, "output_file": str(report)},
    }
    model = random_t5(T5_SHAPES["t5-tiny"], seed=0, dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    source, target = torch.ones(ROWS, SOURCE, dtype=torch.int64), torch.full((ROWS, TARGET), 5)
    for _ in range(2):
        engine.backward(engine(input_ids=source, attention_mask=source, labels=target).loss)
        engine.step()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
