"""A tiny causal model trained alone, and by two ranks with DDP and each stage of ZeRO: forks of one process.

    python -m tests.full.causal_ranks OUT.json

Writes the losses of each. DeepSpeed does not begin twice in one process, so each rank has its own.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zeropods.plan.shapes import CausalShape
from zeropods.programs import free_port, wait_passively
from zeropods.train.causal import collate_causal
from zeropods.train.causal_models import random_causal

STEPS, RANKS, RATE = 4, 2, 0.2
STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}
TECHNIQUES = ("alone", "ddp", *STAGES)
SHAPE = CausalShape(
    family="llama", hidden=32, layers=2, heads=4, kv_heads=2, head_size=8, ffn=64, vocabulary=64, positions=64,
    tied=True,
)  # fmt: skip


def main() -> int:
    wait_passively()
    import deepspeed  # noqa: F401

    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    losses = {}
    for technique in TECHNIQUES:
        ranks = range(1 if technique == "alone" else RANKS)
        port = free_port()
        children = [fork(technique, rank, len(ranks), port, out) for rank in ranks]
        if sum(os.waitpid(child, 0)[1] for child in children):
            return 1
        losses[technique] = sum(np.array(json.loads(part(out, rank).read_text())) for rank in ranks).tolist()
    out.write_text(json.dumps(losses))
    return 0


def part(out: Path, rank: int) -> Path:
    return out.with_suffix(f".{rank}.json")


def fork(technique: str, rank: int, ranks: int, port: int, out: Path) -> int:
    child = os.fork()
    if child:
        return child
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    part(out, rank).write_text(json.dumps(losses_of(technique, rank, ranks)))
    if ranks > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    sys.stderr.flush()
    os._exit(0)


def losses_of(technique: str, rank: int, ranks: int) -> list[float]:
    """This rank's share of each step's loss."""
    model = random_causal(SHAPE, seed=1, dropout=0.0).train()
    if technique == "zero3":
        model.activation_checkpointing_enable({"use_reentrant": False})
    forward, backward_and_step = engine(technique, model)
    rows = batch()
    count = sum(int((labels[1:] != -100).sum()) for _, labels in rows)
    losses = []
    for _ in range(STEPS):
        loss = forward(**collate_causal(rows[rank::ranks], 0), num_items_in_batch=count).loss
        losses.append(loss.item())
        # Ranks' gradients are averaged.
        backward_and_step(loss * ranks)
    return losses


def engine(technique: str, model: Any) -> tuple[Any, Any]:
    # Adam would make a rounding of a gradient near 0 a step of full length.
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    if technique in STAGES:
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": STAGES[technique], "stage3_param_persistence_threshold": 0},
        }
        wrapped, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=True)
        return wrapped, lambda loss: (wrapped.backward(loss), wrapped.step())
    if technique == "ddp":
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    return model, lambda loss: (loss.backward(), optimizer.step(), optimizer.zero_grad())


def batch() -> list[tuple[np.ndarray, np.ndarray]]:
    """Four rows of different lengths and numbers of labels."""
    generator = np.random.default_rng(0)
    made = []
    for tokens, labelled in ((12, 3), (20, 5), (20, 1), (7, 6)):
        ids = generator.integers(3, 60, tokens).astype(np.int32)
        made.append((ids, np.where(np.arange(tokens) < tokens - labelled, -100, ids).astype(np.int32)))
    return made


if __name__ == "__main__":
    sys.exit(main())
