"""A library that ends a training script's process by itself: what the script's exit status then says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zeropods.train.flags import PROJECT


def trained(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """A rank of `textsql_train.py` that imports this code in place of torch."""
    (folder / "torch.py").write_text(f"import sys\n{code}\n")
    # Other ranks than the first do not check the model and the data that the flags name.
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{PROJECT}", "RANK": "1"}
    command = [sys.executable, str(PROJECT / "textsql_train.py"), "--outputdir", str(folder / "run")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize(
    ("code", "call"),
    [
        ("sys.exit()", "exit()"),
        ("exit(0)", "exit(0)"),
        ("sys.exit(256)", "exit(256)"),
        ("import os, signal; signal.signal(10, lambda *_: sys.exit(0)); os.kill(os.getpid(), 10)", "exit(0)"),
    ],
    ids=["nothing", "0", "a multiple of 256", "by a signal"],
)
def test_exit_with_status_0_within_a_run_is_an_error_that_says_who_called_it(
    tmp_path: Path, code: str, call: str
) -> None:
    done = trained(tmp_path, code)
    assert done.returncode == 1, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"zeropods: {call} was called at {tmp_path / 'torch.py'}:2 ")
    assert "before the run was finished" in line


def test_exit_with_another_status_keeps_it(tmp_path: Path) -> None:
    assert trained(tmp_path, "sys.exit(7)").returncode == 7
