"""What DeepSpeed's ranks leave in shared memory."""

from __future__ import annotations

import os
from pathlib import Path

from tests.full.conftest import ROOT, TINY
from tests.full.forks import fork_server

BUFFERS = "deepspeed_allreduce_buffer_*"
MEMORY = Path("/dev/shm")
TRAINING = [*TINY, "--max_steps", 1, "--eval_steps", 1, "--deepspeed", ROOT / "dsconfig" / "zero1.json"]


def test_training_without_offload_compiles_nothing_and_leaves_no_buffer(prepared: Path, tmp_path: Path) -> None:
    argv = [*TRAINING, "--dataset_path", prepared, "--outputdir", tmp_path / "run"]
    own = {"MASTER_ADDR": "127.0.0.1", "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    (rank,) = fork_server().begin(argv, 1, tmp_path / "said", **own)
    said = rank.communicate(280)
    assert rank.returncode == 0, said[-4000:]
    assert not list((tmp_path / "extensions").glob("*/*.so"))
    assert not [file for file in MEMORY.glob(BUFFERS) if file.stat().st_uid == os.getuid()]
