"""What DeepSpeed's ranks leave in shared memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.full.conftest import ROOT, TINY

BUFFERS = "deepspeed_allreduce_buffer_*"
MEMORY = Path("/dev/shm")
TRAINING = [*TINY, "--max_steps", 1, "--eval_steps", 1, "--deepspeed", ROOT / "dsconfig" / "zero1.json"]


def test_training_without_offload_compiles_nothing_and_leaves_no_buffer(prepared: Path, tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "textsql_train.py", *TRAINING, "--dataset_path", prepared]
    done = subprocess.run(
        [*map(str, command), "--outputdir", str(tmp_path / "run")],
        capture_output=True, text=True, timeout=280, check=False,
        env={**os.environ, "MASTER_ADDR": "127.0.0.1", "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert "built successfully" not in done.stdout + done.stderr
    assert not list((tmp_path / "extensions").glob("*/*.so"))
    assert not [file for file in MEMORY.glob(BUFFERS) if file.stat().st_uid == os.getuid()]
