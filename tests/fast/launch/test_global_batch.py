"""`zeropods launch --global-batch`, and a script's own: rows of a step, from which the passes follow."""

import json
import re
from pathlib import Path

import pytest

from zeropods.cli import main
from zeropods.errors import UserError
from zeropods.train.flags import CausalArguments, parse_flags

SCRIPT = "causal_train.py --model_name_or_path llama-tiny --init random --data raw"
PASSES = "--gradient_accumulation_steps"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder with raw data, as far as a launch looks at them."""
    (tmp_path / "raw").mkdir()
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("where", ["--launcher none --slots 16", "--launcher slurm --num-pods 2 --slots 8"])
def test_the_rows_of_a_step_set_the_passes(where: str, capsys: pytest.CaptureFixture[str]) -> None:
    # 1,024 = 16 processes x 8 rows x 8 passes.
    words = f"launch {where} --dry-run --json --global-batch 1024 -- {SCRIPT} --per_device_train_batch_size 8"
    assert main(words.split()) == 0
    arguments = json.loads(capsys.readouterr().out)["arguments"]
    assert arguments[-2:] == ["--gradient_accumulation_steps", "8"]


@pytest.mark.parametrize("flag", ["--global_batch 1024", "--global-batch=1024"])
def test_the_rows_of_a_step_among_the_flags_of_a_script_set_its_passes_too(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"launch --launcher none --slots 16 --dry-run --json -- {SCRIPT} {flag} --per_device_train_batch_size 8"
    assert main(words.split()) == 0
    arguments = json.loads(capsys.readouterr().out)["arguments"]
    # A restart on fewer pods knows the passes, and no other word is lost.
    assert arguments == [*SCRIPT.split()[1:], "--per_device_train_batch_size", "8", PASSES, "8"]


def test_a_script_divides_the_rows_of_a_step_among_its_processes() -> None:
    flags = parse_flags(CausalArguments, ["--global-batch", "48", "--per_device_train_batch_size", "2"])
    divided = flags.divided_among(8)
    assert (divided.gradient_accumulation_steps, divided.global_batch) == (3, None)
    # The run is the one that these passes would be.
    same = parse_flags(CausalArguments, ["--gradient_accumulation_steps", "3", "--per_device_train_batch_size", "2"])
    assert divided == same and divided.comparable() == same.comparable()
    assert same.divided_among(5) == same
    with pytest.raises(UserError, match=re.escape("5 processes of 2 rows a pass cannot reach it; give 40 or 50, or")):
        flags.divided_among(5)
    with pytest.raises(UserError, match=re.escape("--global_batch: sets --gradient_accumulation_steps too; leave one")):
        parse_flags(CausalArguments, ["--global_batch", "48", "--gradient-accumulation-steps=4"])


@pytest.mark.parametrize(
    ("rows", "flags", "line"),
    [
        ("100", "--per_device_train_batch_size 8", "3 processes of 8 rows a pass cannot reach it; give 96 or 120, or"),
        ("5", "", "3 processes of 4 rows a pass cannot reach it; give 12, or another --per_device_train_batch_size"),
        ("96", "--gradient_accumulation_steps 2", "sets --gradient_accumulation_steps 2 too; leave one of them out"),
        ("96", "--global-batch 48", "the script has --global_batch too; leave one of them out"),
    ],
)
def test_rows_that_no_passes_reach_are_refused(
    rows: str, flags: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"launch --launcher none --slots 3 --dry-run --global-batch {rows} -- {SCRIPT} {flags}"
    assert main(words.split()) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"zeropods: --global-batch {rows}: {line}") and error.count("\n") == 1


def test_a_script_of_others_says_its_rows(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").touch()
    launch = ["launch", "--launcher", "none", "--slots", "2", "--dry-run", "--json"]
    words = [*launch, "--global-batch", "8", "--", "mine.py"]
    assert main(words) == 1
    assert "mine.py says no --per_device_train_batch_size; give it" in capsys.readouterr().err
    assert main([*words, "--per_device_train_batch_size", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["arguments"][-1] == "2"
