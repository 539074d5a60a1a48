"""The recipe of `textsql_train.py`: T5, a source and a target in each row."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from zeropods.errors import UserError
from zeropods.train.arguments import TextToSQLArguments
from zeropods.train.compiled import check_compiled
from zeropods.train.dataset import Row, collate
from zeropods.train.model import load_model
from zeropods.train.precision import check_tf32
from zeropods.train.recipe import Prepared
from zeropods.train.t5 import shape_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from zeropods.train.trainer import MeasuredTrainer

TASK = "text2sql"


class TextToSQL:
    """Text-to-SQL with T5, as `recipe.Recipe` has it."""

    joint = False

    def __init__(self, arguments: TextToSQLArguments) -> None:
        self.arguments = arguments

    def check(self, precision: str) -> None:
        """Refuse to compile what ZeRO-3 fetches layer by layer, and TF32 where no hardware has it."""
        check_compiled(self.arguments.compile, self.arguments.deepspeed)
        check_tf32(self.arguments.tf32)

    def found(self) -> Prepared | None:
        """The set at `--dataset_path`."""
        return self._data

    def prepare(self) -> None:
        """Nothing: `zeropods prepare` has done it."""

    def prepared(self) -> Prepared:
        """The set at `--dataset_path`."""
        return self._data

    def settings(self, data: Prepared) -> dict[str, Any]:
        """The flags, with the data's content in the place of their path."""
        return {**self.arguments.comparable(), "dataset_path": data.manifest.content_key}

    def model(self, data: Prepared, precision: str) -> PreTrainedModel:
        """A T5."""
        return load_model(self.arguments, data.tokenizer, data.manifest.prompt)

    def shape(self, model: PreTrainedModel) -> dict[str, Any] | None:
        """The numbers of `plan.shapes.T5Shape`."""
        return shape_of(model.config)

    def collate(self, data: Prepared, rows: list[Row]) -> dict[str, Tensor]:
        """Sources and targets, each padded to the longest."""
        return collate(rows, multiple=self.arguments.pad_to_multiple_of)

    def architecture(self, model: PreTrainedModel) -> str:
        """T5 as transformers has it."""
        return "T5ForConditionalGeneration"

    def conclude(self, trainer: MeasuredTrainer, data: Prepared, folder: Path) -> None:
        """Nothing: predictions are made with constrained decoding, by `zeropods predict`."""

    @cached_property
    def _data(self) -> Prepared:
        place = self.arguments.dataset_path
        data = Prepared.read(Path(place))
        if data.manifest.task != TASK:
            raise UserError(f"--dataset_path {place}: prepared for {data.manifest.task}; causal_train.py trains on it")
        return data
