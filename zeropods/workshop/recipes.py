"""Jobs that were published, and small ones of the same kind, each as the flags of `causal_train.py`."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeropods.data.tokenizers import GPT_TINY
from zeropods.errors import UserError
from zeropods.programs import wait_passively

# What every workshop has: where the project is, a setting from the environment, a quiet notebook.

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = "sample"
RUNS = Path("runs/notebooks")


def setting(name: str, default: Any, read: Callable[[str], Any] = str) -> Callable[[], Any]:
    """What a setting is where the notebook does not say: the environment's value, or the default."""
    variable = f"ZEROPODS_{name.upper()}"

    def value() -> Any:
        text = os.environ.get(variable)
        try:
            return read(text) if text else default
        except ValueError:
            raise UserError(f"{variable}: {text!r}; expected {read.__name__}") from None

    return value


def at_ease() -> None:
    """Let threads sleep while they wait; keep other libraries' progress bars out of a notebook: ours is enough."""
    wait_passively()
    if "ipykernel" in sys.modules:
        for library in ("HF_HUB", "HF_DATASETS"):
            os.environ.setdefault(f"{library}_DISABLE_PROGRESS_BARS", "1")
        warnings.filterwarnings("ignore", message="IProgress not found")


# Jobs that were published, and small ones of the same kind, each as the flags of `causal_train.py`.
#
# Where the published ones are described: docs/causal.md.


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A job: a model, a data set, and how the one is trained on the other."""

    model: str
    dataset: str
    """`sample`, which is generated; `squad` or `wikitext-2`, which are fetched; or a data set at the hub."""
    max_seq_length: int
    technique: str = "none"
    """How it is trained where a notebook does not compare techniques: the name of a file of `dsconfig/`, or `none`."""
    flags: dict[str, Any] = field(default_factory=dict)
    """Further flags of the script."""
    tokenizer: str | None = None
    """The model's own if not given."""
    dataset_config: str | None = None
    subset: int | None = None
    """Only the first N questions or documents of each split."""


SMALL: dict[str, Any] = {
    "init": "random",
    "precision": "fp32",
    "dropout": 0.0,
    "threads": 1,
    "save_steps": 0,
    "logging_steps": 1,
}
"""Of a model from random weights: without dropout and in FP32, so that techniques can be compared to the last digit."""

SMALL_SQUAD = Recipe(
    model="bloom-tiny",
    dataset=SAMPLE,
    max_seq_length=512,
    tokenizer=GPT_TINY,
    subset=500,
    flags={**SMALL, "learning_rate": 2e-3, "weight_decay": 0.01, "num_train_epochs": 3},
)
SMALL_TEXT = Recipe(
    model="gpt-tiny",
    dataset=SAMPLE,
    max_seq_length=128,
    tokenizer=GPT_TINY,
    flags={
        **SMALL,
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "learning_rate": 2e-3,
        "num_warmup_steps": 10,
        "num_train_epochs": 3,
        "generation_prompt": "The oldest record of",
    },
)
BLOOM_SQUAD = Recipe(
    model="bigscience/bloom-560m",
    dataset="squad",
    max_seq_length=512,
    subset=500,
    flags={
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "learning_rate": 5e-5,
        "weight_decay": 0.01,
        "num_train_epochs": 3,
        "precision": "fp16",
    },
)
"""The BLOOM and SQuAD workshop: evaluated and saved after each epoch."""
DISTILGPT2_WIKITEXT = Recipe(
    model="distilbert/distilgpt2",
    dataset="wikitext-2",
    max_seq_length=128,
    technique="causal_zero2_offload",
    flags={
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "lr_scheduler_type": "cosine",
        "num_train_epochs": 1,
        "precision": "fp16",
        "generation_prompt": "The history of",
    },
)
"""The template for causal language models."""
QWEN_C4 = Recipe(
    model="Qwen/Qwen3-0.6B",
    dataset="allenai/c4",
    dataset_config="en",
    max_seq_length=1024,
    technique="causal_zero2_offload",
    subset=20_000,
    flags={
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "learning_rate": 5e-5,
        "adam_beta2": 0.95,
        "weight_decay": 0.1,
        "lr_scheduler_type": "cosine",
        "num_warmup_steps": 10,
        "max_train_steps": 1000,
        "save_steps": 50,
        "eval_steps": 50,
        "max_eval_steps": 50,
        "precision": "bf16",
    },
)
"""The recipe for several nodes; on one node 100 steps."""
MISTRAL_8B = Recipe(
    model="mistralai/Mistral-7B-v0.1",
    dataset="wikitext-2",
    max_seq_length=4096,
    technique="causal_zero3_offload",
    flags={
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 64,
        "learning_rate": 1e-5,
        "num_train_epochs": 1,
        "num_warmup_steps": 100,
        "logging_steps": 10,
        "save_steps": 500,
        "eval_steps": 500,
        "seed": 42,
        "precision": "bf16",
        "attn_implementation": "flash_attention_2",
    },
)
"""The template for 8 billion parameters on eight GPUs; it names no data set."""

RECIPES: dict[str, dict[str, Recipe]] = {
    SAMPLE: {"squad": SMALL_SQUAD, "lm": SMALL_TEXT},
    "published": {"squad": BLOOM_SQUAD, "lm": DISTILGPT2_WIKITEXT},
    "multi_node": {"lm": QWEN_C4},
    "eight_billion": {"lm": MISTRAL_8B},
}
"""By name, then by task."""


def recipe(name: str, task: str) -> Recipe:
    """A recipe by its name and task; `UserError` where there is none."""
    if name not in RECIPES:
        raise UserError(f"recipe {name!r}; expected {', '.join(RECIPES)}")
    if task not in RECIPES[name]:
        raise UserError(f"recipe {name!r}: is for {', '.join(RECIPES[name])}, not for {task!r}")
    return RECIPES[name][task]
