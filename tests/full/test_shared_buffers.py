"""What DeepSpeed leaves in shared memory, and what a run leaves of it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

GROUP = """
import deepspeed, torch
from zeropods.extension_cache import use_own_cache
use_own_cache()
from zeropods.train.processes import be_the_only_rank
from zeropods.train.shared_buffers import buffer_file, release_shared_buffers
be_the_only_rank()
deepspeed.init_distributed(dist_backend="gloo", verbose=False)
before = buffer_file(0).exists()
release_shared_buffers()
print(before, buffer_file(0).exists())
torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def seen() -> list[str]:
    """Whether a rank's buffer was there before it was released, and after."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    environment = {name: value for name, value in os.environ.items() if name != "RANK"} | {"PATH": path}
    done = subprocess.run(
        [sys.executable, "-c", GROUP], capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()[-2:]


def test_deepspeed_names_its_buffer_as_we_do(seen: list[str]) -> None:
    assert seen[0] == "True"


def test_a_rank_leaves_no_buffer_behind(seen: list[str]) -> None:
    assert seen[1] == "False"
