"""What every workshop has: where the project is, a setting from the environment, a quiet notebook."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zeropods.errors import UserError
from zeropods.threads import wait_passively

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
