"""What DeepSpeed's ranks leave in shared memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.full.conftest import ROOT, TINY

BUFFERS = "deepspeed_allreduce_buffer_*"
MEMORY = Path("/dev/shm")
TRAINING = [*TINY, "--max_steps", 1, "--eval_steps", 1, "--deepspeed", ROOT / "dsconfig" / "zero1.json"]


@pytest.fixture(scope="module")
def said(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a short run with DeepSpeed says, operations that it would compile included: its cache is empty."""
    folder = tmp_path_factory.mktemp("shared")
    command = [sys.executable, ROOT / "textsql_train.py", *TRAINING, "--dataset_path", prepared]
    done = subprocess.run(
        [*map(str, command), "--outputdir", str(folder / "run")],
        capture_output=True, text=True, timeout=280, check=False,
        env={**os.environ, "MASTER_ADDR": "127.0.0.1", "TORCH_EXTENSIONS_DIR": str(folder / "extensions")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert not list((folder / "extensions").glob("*/*.so"))
    return done.stdout + done.stderr


def test_training_without_offload_compiles_nothing(said: str) -> None:
    assert "built successfully" not in said


def test_its_ranks_leave_no_buffer_behind(said: str) -> None:
    assert not [file for file in MEMORY.glob(BUFFERS) if file.stat().st_uid == os.getuid()]
