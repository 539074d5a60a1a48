"""What other libraries say at each run and nobody needs, by sentence, each with the reason; anything else is shown.

`without_chatter` keeps these sentences of this process's libraries from being written. A launch shows the lines of its
processes without them (`is_chatter`); `launch.log` in the run folder holds every line.
"""

from __future__ import annotations

import logging
import re

SENTENCES = {
    "DeepSpeed": {
        r"Setting accelerator to CPU\.": "there is no GPU, as the record says; a launch and a check say it too",
    },
    "accelerate.accelerator": {
        r"Gradient accumulation steps mismatch: GradientAccumulationPlugin has 1,": (
            "accelerate's plugin has its default; the number of the flags is DeepSpeed's, and is used"
        ),
    },
    "transformers.trainer": {
        r"There were missing keys in the checkpoint model loaded: \[('[\w.]*(embed_tokens|lm_head)\.weight'(, )?)+\]": (
            "tied weights are saved once, and tied again when they are loaded"
        ),
    },
}
"""Sentences by the logger that writes them, as patterns, and why each says nothing."""

LINES = {
    r"\[[\d:., -]+\] \[INFO\] \[[\w.]+:\d+:\w+\] ": "DeepSpeed's account of its own doings; its warnings are shown",
    r"(train|prepare): [\d,]+( of [\d,]+)? (steps|rows|documents)(, .*)? \(\d+ s\)$": (
        "the launch shows progress itself"
    ),
}
"""Patterns of lines of a run's processes, besides these sentences, that a launch does not show, and why."""

_SENTENCE = re.compile("|".join(f"(?:{each})" for sentences in SENTENCES.values() for each in sentences))
_LINE = re.compile(r"(?:\S+: )?(?:" + "|".join(LINES) + ")")


def without_chatter() -> None:
    """Let the loggers of these libraries leave out the sentences above, in this process and its forks."""
    for name in SENTENCES:
        logger = logging.getLogger(name)
        # A logger calls each of its filters once, however often it is added.
        logger.addFilter(_is_worth_saying)


def is_chatter(line: str) -> bool:
    """Whether a line of a run's process says nothing that a user needs; a pod's name may stand before it."""
    return _SENTENCE.search(line) is not None or _LINE.match(line) is not None


def _is_worth_saying(record: logging.LogRecord) -> bool:
    return _SENTENCE.search(record.getMessage()) is None
