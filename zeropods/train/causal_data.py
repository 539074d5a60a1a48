"""The data of a causal run: a prepared set, or raw data that the run itself prepares."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from zeropods import atomic
from zeropods.data.byte_tokenizer import GPT_TINY
from zeropods.data.causal import CausalPreparation, key_of_preparation, prepare_causal
from zeropods.data.manifest import FILE, Manifest, read_manifest
from zeropods.errors import UserError
from zeropods.plan.causal_shapes import CAUSAL_SHAPES
from zeropods.report.progress import progress
from zeropods.train.causal_arguments import MAX_SEQ_LENGTH, TASKS, CausalArguments
from zeropods.train.disk_errors import said_in_one_line
from zeropods.train.recipe import Prepared

REMEDY = "see to the disk, then call again"
OWN = "data"
"""The set of a run that was given raw data, in its run folder."""


@dataclass(frozen=True)
class CausalData:
    """Finds, prepares and reads what `--data` names."""

    arguments: CausalArguments

    @property
    def is_prepared(self) -> bool:
        """Whether `--data` is a prepared set."""
        return (self._given / FILE).is_file()

    @property
    def folder(self) -> Path:
        """Where the prepared set is, or will be."""
        return self._given if self.is_prepared else self.arguments.run_folder / OWN

    def check(self) -> None:
        """Refuse flags that contradict a prepared set, and raw data that are not there or of another kind."""
        if self.is_prepared:
            _check_flags(self.arguments, read_manifest(self._given))
        elif self._task == "squad":
            _check_questions(self.arguments, prepared=(self.folder / FILE).is_file())

    def prepare(self) -> None:
        """Make the set of raw data where it is not there yet; one of other data is never replaced."""
        if self.is_prepared:
            return
        if (self.folder / FILE).is_file():
            made = read_manifest(self.folder)
            if made.content_key != key_of_preparation(self._wanted, made):
                raise UserError(
                    f"{self.folder}: was prepared from other data, or with other settings, than --data "
                    f"{self.arguments.data} now has; choose another --outputdir"
                )
            return
        # This process holds the run's lock: what is half made was left by one that was killed.
        atomic.remove_unfinished(self.folder)
        with progress("prepare", "rows") as bar, said_in_one_line(self.folder, "the prepared data", REMEDY):
            prepare_causal(self._wanted, self.folder, bar.update)

    def read(self) -> Prepared:
        """The rows that the run trains on and evaluates."""
        whole = Prepared.read(self.folder)
        if whole.tokenizer.pad_token_id is None:
            raise UserError(f"{self.folder}: its tokenizer has no token to pad with; prepare the data again")
        a = self.arguments
        # Of raw data the subset was prepared.
        subset = a.subset if self.is_prepared else None
        evaluated = a.max_eval_steps and a.max_eval_steps * a.per_device_eval_batch_size
        dev = None if whole.dev is None else whole.dev.first(subset).first(evaluated)
        return Prepared(whole.folder, whole.manifest, whole.train.first(subset), dev)

    @property
    def _task(self) -> str:
        return self.arguments.task or TASKS[0]

    @property
    def _given(self) -> Path:
        return Path(self.arguments.data)

    @cached_property
    def _wanted(self) -> CausalPreparation:
        a = self.arguments
        return CausalPreparation(
            task=self._task,
            data=self._given if self._given.is_dir() or self._task == "squad" else a.data,
            tokenizer=a.tokenizer_name or _own_tokenizer(a),
            max_seq_length=a.max_seq_length or MAX_SEQ_LENGTH,
            loss_on=a.loss_on,
            limit=a.subset,
            dataset_config=a.dataset_config,
            text_field=a.text_field or "text",
        )


def _own_tokenizer(arguments: CausalArguments) -> str:
    """The model's; the small models of ours have one that is trained on the data."""
    tiny = arguments.init == "random" and arguments.model_id in CAUSAL_SHAPES and arguments.model_id.endswith("-tiny")
    return GPT_TINY if tiny else arguments.model_id


def _check_questions(arguments: CausalArguments, *, prepared: bool) -> None:
    """Refuse flags of plain text, and a folder that is not there, unless the run has prepared its data already."""
    for name in ("dataset_config", "text_field"):
        if getattr(arguments, name) is not None:
            raise UserError(f"--{name} {getattr(arguments, name)}: is for --task lm; leave it out")
    if not prepared and not Path(arguments.data).is_dir():
        raise UserError(
            f"--data {arguments.data}: no such folder; give a prepared set, or make one: zeropods data get squad"
        )


def _check_flags(arguments: CausalArguments, manifest: Manifest) -> None:
    """Refuse flags that say something else than a prepared set does, or that have no effect on one."""
    place = f"--data {arguments.data}"
    if manifest.task not in TASKS:
        raise UserError(f"{place}: prepared for {manifest.task}; textsql_train.py trains on it")
    said: dict[str, Any] = {
        "task": manifest.task,
        "max_seq_length": manifest.max_seq_length,
        "loss_on": manifest.loss_on,
        "tokenizer_name": manifest.tokenizer,
        "dataset_config": None,
        "text_field": None,
    }
    for name, value in said.items():
        given = getattr(arguments, name)
        if given is not None and given != value:
            shown = "is made already" if value is None else f"was prepared with {value}"
            raise UserError(f"--{name} {given}: {place} {shown}; leave the flag out, or prepare the data anew")
