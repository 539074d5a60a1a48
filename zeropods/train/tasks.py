"""What a training script's runs have of their own: data, batches, a model with its loss, and scores.

The engine (`run`, `attempt`, `trainer`) is the same for all. `text2sql.TextToSQL` and `causal.Causal` are tasks; a
script names its own, so that a run of one loads nothing of the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from torch import Tensor

from zeropods.data.manifest import Manifest, read_manifest
from zeropods.errors import UserError
from zeropods.train.arguments import RunArguments
from zeropods.train.sampler import Row, TokenizedSplit, load_split

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
        manifest, train = read_manifest(folder), load_split(folder, "train")
        if train is None:
            raise UserError(f"{folder}: has no train split; prepare the data set again")
        return cls(folder, manifest, train, load_split(folder, "dev"))

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer that the set was prepared with."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.folder / "tokenizer")


class Task(Protocol):
    """A script's part of a run. The engine calls the methods in this order."""

    flags: ClassVar[type[RunArguments]]
    """The kind of `arguments`."""
    joint: ClassVar[bool]
    """Whether a row is one text, of which some tokens carry a loss; else it is a source and a target."""

    def __init__(self, arguments: Any) -> None: ...

    @property
    def arguments(self) -> RunArguments:
        """The flags of the call."""

    def check(self, precision: str) -> None:
        """Refuse what can be seen to be wrong without the data."""

    @property
    def is_prepared(self) -> bool:
        """Whether the data are there; else `prepare` comes before `data`."""

    def prepare(self) -> None:
        """Prepare raw data. Called on rank 0, which holds the lock of the run folder."""

    def data(self) -> Prepared:
        """The rows that the run trains on and evaluates."""

    def settings(self, data: Prepared) -> dict[str, object]:
        """What must be equal for two calls to mean the same run: flags, and what the data say instead of flags."""

    def model(self, data: Prepared) -> PreTrainedModel:
        """The model in FP32, checked against the data.

        Its `forward` returns the sum of the token losses, in nats, divided by `num_items_in_batch`: the label tokens of
        the whole optimizer step, over all ranks.
        """

    def batch(self, data: Prepared, rows: list[Row]) -> dict[str, Tensor]:
        """A batch of rows; `label_positions` are among it."""

    def score(self, trainer: MeasuredTrainer, data: Prepared, folder: Path) -> str:
        """Score the model that is trained and saved in a run folder, and say how good it is; every rank takes part."""
