"""What the settings of all notebooks have in common: where they come from, where everything lies, which data they get.

A setting can be given in a notebook's parameters cell, `model = "t5-small"`, which papermill sets too, or for all
notebooks in the environment, `ZEROPODS_MODEL=t5-small`; the cell wins.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, field, fields
from pathlib import Path
from typing import Any, Self

from zeropods.errors import UserError
from zeropods.programs import in_kernel, wait_passively
from zeropods.train.arguments import WORDS

ROOT = Path(__file__).resolve().parents[2]
Flags = dict[str, Any]
"""Flags of a training script, or what `train` and `launch` are given for a run."""
SAMPLE = "sample"
RUNS = Path("runs/notebooks")
FETCHED = {"wikisql": "text2sql", "squad": "squad", "wikitext-2": "lm"}
"""Data sets that `zeropods data get` knows, and the task of each."""


def setting(*names: str, default: Any = None, read: Callable[[str], Any] = str) -> Any:
    """A field whose default is the first value that the environment has as ZEROPODS_NAME, as `read` reads it."""

    def value() -> Any:
        for variable in (f"ZEROPODS_{name.upper()}" for name in names):
            if text := os.environ.get(variable):
                try:
                    return read(text)
                except ValueError:
                    raise UserError(f"{variable}: {text!r}; expected {WORDS.get(read, 'another value')}") from None
        return default

    return field(default_factory=value)


class WorkshopSettings:
    """The base of a notebook's settings, which are a dataclass: a table of them, and their folders."""

    runs: Path
    """Where data and runs lie, relative to the project's root."""
    task: str

    def __post_init__(self) -> None:
        # Threads sleep while they wait, and other libraries' progress bars stay out of a notebook: ours is enough.
        wait_passively()
        if in_kernel():
            for library in ("HF_HUB", "HF_DATASETS"):
                os.environ.setdefault(f"{library}_DISABLE_PROGRESS_BARS", "1")
            warnings.filterwarnings("ignore", message="IProgress not found")

    @classmethod
    def of(cls, variables: Mapping[str, object], **given: Any) -> Self:
        """The settings among a notebook's variables, which its parameters cell or papermill has set.

        A variable that is None, or that is no setting's value any more, leaves the setting to the environment.
        """
        names = [each.name for each in fields(cls)]  # type: ignore[arg-type]
        set_by = {n: v for n in names if isinstance(v := variables.get(n), str | int | float | Path)}
        return cls(**{**set_by, **given})

    def _repr_html_(self) -> str:
        from zeropods.tables import Table

        shown = {n: self._default(n) if v is None else v for n, v in asdict(self).items()}  # type: ignore[call-overload]
        return Table.of_facts(shown).to_html()

    def _default(self, name: str) -> Any:
        """What is shown of a setting that was not given."""
        return "default"

    @property
    def area(self) -> Path:
        """The folder of all that the notebooks make."""
        return ROOT / self.runs

    def _get_data(self, name: str, folder: Path) -> Path:
        """Generate or fetch a data set where it is not there yet; returns its folder."""
        if FETCHED.get(name, self.task) != self.task:
            raise UserError(f"dataset {name!r}: is for {FETCHED[name]}, this notebook is for {self.task}")
        if name == SAMPLE:
            from zeropods.data.sample import write_sample

            write_sample(folder, task=self.task)
        elif name in FETCHED:
            from zeropods.data.download import get

            get(name, folder)
        elif not folder.is_dir():
            known = ", ".join([SAMPLE, *(known for known, task in FETCHED.items() if task == self.task)])
            raise UserError(f"dataset {name!r}: no such folder; expected {known} or a folder")
        return folder


def path_or_id(name: str) -> str:
    """The whole path of a file or folder of the project; other names, such as a hub id, stay."""
    return str(ROOT / name) if (ROOT / name).exists() else name
