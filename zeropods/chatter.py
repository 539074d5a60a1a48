"""What other libraries say at each run and nobody needs, by sentence, each with the reason.

Anything else is shown. `without_chatter` keeps these sentences of this process's libraries from
being written. A launch shows the lines of its processes without them (`is_chatter`); `launch.log`
in the run folder holds every line.
"""

from __future__ import annotations

import logging
import re
import warnings
from itertools import chain

SENTENCES = {
    "DeepSpeed": {
        r"Setting accelerator to CPU\.": (
            "there is no GPU, as the record says; a launch and a check say it too"
        ),
    },
    "accelerate.accelerator": {
        r"Gradient accumulation steps mismatch: GradientAccumulationPlugin has 1,": (
            "accelerate's plugin has its default; the number of the flags is DeepSpeed's, and is "
            "used"
        ),
    },
    "transformers.trainer": {
        (
            r"There were missing keys in the checkpoint model loaded: "
            r"\[('[\w.]*(embed_tokens|lm_head)\.weight'(, )?)+\]"
        ): "tied weights are saved once, and tied again when they are loaded",
    },
    "transformers.trainer_utils": {
        r"The tokenizer has new PAD/BOS/EOS tokens that differ from the model config": (
            "the model takes the tokenizer's, with which it is saved"
        ),
    },
    "transformers.modeling_utils": {
        (
            r"We strongly recommend passing in an `attention_mask` since your input_ids may be "
            r"padded\."
        ): (
            "a padded batch has a mask; what looks like a pad is the end token of a tokenizer "
            "without pads"
        ),
    },
}
"""Sentences by the logger that writes them, as patterns, and why each says nothing."""

WARNINGS = {
    r"`torch\.distributed\.\w+` is deprecated\. Please use": (
        "DeepSpeed calls it; another version of it may not"
    ),
}
"""The same of warnings, whichever library raises them."""

LINES_OF_PROCESSES = {
    r"\[[\d:., -]+\] \[INFO\] \[[\w.]+:\d+:\w+\] ": (
        "DeepSpeed's account of its own doings; its warnings are shown"
    ),
    r"(train|prepare): [\d,]+( of [\d,]+)? (steps|rows|documents)(, .*)? \(\d+ s\)$": (
        "the launch shows progress itself"
    ),
}
"""Patterns of lines of a run's processes that a launch does not show besides, and why."""

_OF_LOGGERS = list(chain.from_iterable(SENTENCES.values()))
_SENTENCE = re.compile("|".join(f"(?:{pattern})" for pattern in (*_OF_LOGGERS, *WARNINGS)))
_LINE = re.compile(r"(?:\S+: )?(?:" + "|".join(LINES_OF_PROCESSES) + ")")


def without_chatter() -> None:
    """Leave out the sentences above in this process and its forks.

    Call it again where the filters of `warnings` have been reset.
    """
    for name in SENTENCES:
        logger = logging.getLogger(name)
        # A logger calls each of its filters once, however often it is added.
        logger.addFilter(_is_worth_saying)
    for pattern in WARNINGS:
        warnings.filterwarnings("ignore", message=pattern)


def is_chatter(line: str) -> bool:
    """Whether a line of a run's process says nothing that a user needs.

    A pod's name may stand before it.
    """
    return _SENTENCE.search(line) is not None or _LINE.match(line) is not None


def _is_worth_saying(record: logging.LogRecord) -> bool:
    """The filter that `without_chatter` adds to loggers: False leaves a record out."""
    return _SENTENCE.search(record.getMessage()) is None
