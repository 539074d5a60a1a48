"""What differs between one training script's runs and another's; the engine is the same for all."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from zeropods.data.manifest import Manifest
from zeropods.train.arguments import RunArguments
from zeropods.train.sampler import Row, TokenizedSplit, load_prepared

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from zeropods.train.trainer import MeasuredTrainer


@dataclass(frozen=True)
class Prepared:
    """A run's data: rows of the train split, and of the dev split where there is one."""

    folder: Path
    manifest: Manifest
    train: TokenizedSplit
    dev: TokenizedSplit | None

    @classmethod
    def read(cls, folder: Path) -> Prepared:
        """The data of a prepared set."""
        return cls(folder, *load_prepared(folder))

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The one that the set was prepared with."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.folder / "tokenizer")


class Recipe(Protocol):
    """A script's part of a run. The engine asks in the order of these methods."""

    joint: bool
    """Whether a row is one text, of which some tokens carry a loss; else it is a source and a target."""

    def __init__(self, arguments: Any) -> None: ...

    def check(self, precision: str) -> None:
        """Refuse what can be seen to be wrong without the data."""

    def found(self) -> Prepared | None:
        """The data, where they are prepared; None where that is still to be done."""

    def prepare(self) -> None:
        """Prepare raw data. On rank 0, which holds the lock of the run folder."""

    def prepared(self) -> Prepared:
        """The data, after `prepare`."""

    def settings(self, data: Prepared) -> dict[str, Any]:
        """What must be equal for two calls to mean the same run: flags, and what the data say instead of flags."""

    def model(self, data: Prepared, precision: str) -> PreTrainedModel:
        """The model in FP32, checked against the data; its `forward` gives the loss as `T5ForTextToSQL` says."""

    def shape(self, model: PreTrainedModel) -> dict[str, Any] | None:
        """Its architecture as `plan` has it; None for one that the project does not know."""

    def collate(self, data: Prepared, rows: list[Row]) -> dict[str, Tensor]:
        """A batch of rows."""

    def architecture(self, model: PreTrainedModel) -> str:
        """The class of transformers by which the saved model is loaded."""

    def conclude(self, trainer: MeasuredTrainer, data: Prepared, folder: Path) -> None:
        """What is done with a model that is trained and saved in a run folder; every rank takes part."""


def recipe_of(arguments: RunArguments) -> Recipe:
    """The recipe of a script, by the class of its flags."""
    from zeropods.train.arguments import CausalArguments, TextToSQLArguments

    if isinstance(arguments, CausalArguments):
        from zeropods.train.causal import Causal

        return Causal(arguments)
    from zeropods.train.text2sql import TextToSQL

    assert isinstance(arguments, TextToSQLArguments)
    return TextToSQL(arguments)
