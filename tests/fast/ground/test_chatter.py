"""What is not shown of other libraries' words, what is, and lines about progress where there is no terminal."""

import logging
import re
import sys
import time

import pytest

from tests.full.launches import until
from zeropods.chatter import SENTENCES, is_chatter, without_chatter
from zeropods.tables import SampleRate, duration_text, progress

TIED = "There were missing keys in the checkpoint model loaded: ['encoder.embed_tokens.weight', 'lm_head.weight']."
LOST = "There were missing keys in the checkpoint model loaded: ['encoder.block.0.layer.0.SelfAttention.q.weight']."
NO_MASK = "We strongly recommend passing in an `attention_mask` since your input_ids may be padded. See ..."
SAID = {
    "DeepSpeed": ("Setting accelerator to CPU. If you have GPU or other accelerator, ...", "ZeRO is out of memory"),
    "accelerate.accelerator": (
        "Gradient accumulation steps mismatch: GradientAccumulationPlugin has 1, DeepSpeed config has 4. Using ...",
        "Gradient accumulation steps mismatch: GradientAccumulationPlugin has 2, DeepSpeed config has 4. Using ...",
    ),
    "transformers.trainer": (TIED, LOST),
    "transformers.trainer_utils": (
        "The tokenizer has new PAD/BOS/EOS tokens that differ from the model config and generation config. ...",
        "The tokenizer has no end token",
    ),
    "transformers.modeling_utils": (
        NO_MASK,
        "We strongly recommend another model",
    ),
}
"""By logger, a sentence that is left out and one like it that is not."""


@pytest.mark.parametrize("name", SENTENCES)
def test_known_sentences_of_a_library_are_left_out_and_no_other(name: str, caplog: pytest.LogCaptureFixture) -> None:
    known, other = SAID[name]
    logger = logging.getLogger(name)
    without_chatter()
    without_chatter()
    logger.warning(known)
    logger.warning(other)
    assert [record.getMessage() for record in caplog.records] == [other]


@pytest.mark.parametrize(
    ("line", "is_left_out"),
    [
        ("[2026-11-27 05:00:00,123] [INFO] [launch.py:164:main] WORLD INFO DICT: {'127.0.1.1': [0]}", True),
        ("pod2: [2026-11-27 05:00:00,123] [INFO] [launch.py:273:sigkill_handler] Killing subprocess 17", True),
        (
            "pod1: [2026-11-27 05:00:00,123] [WARNING] [real_accelerator.py:213:get] Setting accelerator to CPU. If",
            True,
        ),
        (f"pod1: {TIED}", True),
        (f"pod1: [transformers] {NO_MASK}", True),
        ("pod1: FutureWarning: `torch.distributed.all_gather_into_tensor` is deprecated. Please use `torch.", True),
        ("pod1: FutureWarning: `torch.load` is deprecated. Please use another", False),
        ("pod1: train: 120 of 300 steps, loss 3.21 (40 s)", True),
        ("pod1: train: 120 of 300 steps, loss 3.21, speed 96.1 samples/s, 60 s left (40 s)", True),
        ("[2026-11-27 05:00:00,123] [WARNING] [stage3.py:2142:step] 1 allocator cache flushes", False),
        ("pod2: [2026-11-27 05:00:00,123] [ERROR] [launch.py:325:sigkill_handler] exits with return code = -9", False),
        ("pod1: RuntimeError: the size of tensor a (3) must match", False),
        ("pod1: my own script: train: began", False),
        (f"pod1: {LOST}", False),
    ],
)
def test_a_launch_leaves_out_lines_that_say_nothing(line: str, is_left_out: bool) -> None:
    assert is_chatter(line) == is_left_out


def test_progress_in_a_pipe_is_a_line_now_and_then_also_where_nothing_is_done(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines: list[str] = []

    def has_lines(number: int) -> bool:
        lines.extend(capsys.readouterr().err.splitlines())
        return len(lines) >= number

    with progress("train", "steps", every_seconds=0.05) as bar:
        until(lambda: has_lines(1))
        bar.total = 300
        bar.update(120)
        bar.set_postfix({"loss": "3.21"}, refresh=False)
        seen = len(lines)
        until(lambda: has_lines(seen + 2))
    assert lines[0].startswith("train: 0 steps (")
    assert lines[-1].startswith("train: 120 of 300 steps, loss 3.21 (")
    assert is_chatter(lines[-1])
    capsys.readouterr()
    time.sleep(0.2)
    assert capsys.readouterr().err == ""


def test_work_that_takes_less_writes_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert not sys.stderr.isatty()
    with progress("prepare", "rows", 10) as bar:
        bar.update(10)
    assert capsys.readouterr().err == ""


def test_a_line_about_a_training_says_its_steps_loss_speed_and_the_time_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines: list[str] = []
    rate = SampleRate(32)

    def has_lines_with(word: str) -> bool:
        lines.extend(capsys.readouterr().err.splitlines())
        return bool(lines) and word in lines[-1]

    with progress("train", "steps", 1_300, every_seconds=0.05) as bar:
        # A run that resumes has done 1,000 steps; only its own ones tell its pace.
        for done in (1_000, 100, 100):
            bar.update(done)
            rate.count(bar.n)
            time.sleep(0.01)
        bar.set_postfix({"loss": "3.21", **rate.shown()})
        until(lambda: has_lines_with("loss"))
        bar.update(100)
        until(lambda: has_lines_with("1,300 of"))
    said = re.compile(r"train: 1,200 of 1,300 steps, loss 3\.21, speed [\d,.]+ samples/s, \d+ s left \(\d+ s\)")
    assert any(said.fullmatch(line) for line in lines) and is_chatter(lines[-1])
    assert "left" not in lines[-1]


def test_a_speed_leaves_out_the_first_step_and_what_comes_between_steps() -> None:
    rate = SampleRate(10)
    time.sleep(0.5)
    rate.count(1)
    assert rate.shown() == {}
    rate.count(2)
    time.sleep(0.5)
    rate.pause()
    rate.count(3)
    # Two steps of 10 samples: with one of the two pauses they would be 40 samples/s at most.
    speed = rate.shown()["speed"]
    assert float(speed.removesuffix(" samples/s").replace(",", "")) > 40


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (119, "119 s"), (120, "2 min"), (7_199, "120 min"), (9_000, "2.5 h")]
)
def test_a_time_is_in_seconds_minutes_or_hours(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
