"""A folder with a trained model: what it says about itself and its data, and the model itself,
loaded to answer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropods.data.encoding import first_tokens
from zeropods.data.manifest import FILE, read_manifest
from zeropods.data.wikisql import PROMPTS, split_of
from zeropods.errors import UserError
from zeropods.files import has_weights, is_path, no_folder, read_object, sha256
from zeropods.measure.record import CONFIG, RECORD, RunConfig, read_json, read_record
from zeropods.measure.score_json import SCORES, UNSEEN_SPLITS
from zeropods.tasks import (
    T5_SCRIPT,
    TEXT2SQL,
    answering_tasks,
    task_or_unknown,
    task_with_prompt,
    tasks_of,
)
from zeropods.train.flags import OWN

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

DTYPE_OF_PRECISION = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""PyTorch's names of the precisions that a model can answer in."""
LEVELS_UP = 3
"""Number of folders above a prepared set in which raw data are searched for."""


def model_folder(folder: Path) -> Path:
    """The folder with the weights of a run or model folder; only safetensors files count.

    Raises:
        UserError: there is no folder, or no weights in it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: {no_folder(folder)}; expected a run or model folder")
    model_of_run = folder / "model"
    with_weights = model_of_run if model_of_run.is_dir() else folder
    if not has_weights(with_weights):
        fault = "no trained model (*.safetensors) there"
        raise UserError(f"{folder}: {fault}; expected a run or model folder")
    return with_weights


def model_config(folder: Path) -> dict[str, Any]:
    """The configuration in a run or model folder; `UserError` where it is broken."""
    remedy = (
        "copy the folder again, or make a model folder from a run's checkpoint: zeropods export"
    )
    return read_object(model_folder(folder) / CONFIG, remedy)


def task_of(folder: Path) -> str:
    """The task that a model was trained for, by its run, else by its configuration.

    The configuration has the prompt of a task. A T5 without one counts as one for text-to-SQL.

    Raises:
        UserError: neither names a task that is known here.
    """
    prompt = model_config(folder).get("prompt")
    task = _run_config(folder).get("task")
    if not task:
        task = task_with_prompt(prompt).name
        if task not in SCORES and is_t5(folder):
            task = TEXT2SQL
    if task not in SCORES:
        expected = " or ".join(kind.name for kind in answering_tasks())
        raise UserError(f"{folder}: does not record its task; give --task {expected}")
    return str(task)


def answer_task(model: Path, wanted: str | None = None) -> str:
    """The task whose questions a model is to answer: the wanted one, else the one of its training.

    Raises:
        UserError: the model answers no questions, or none of the wanted task.
    """
    task = wanted or task_of(model)
    kind = task_or_unknown(task)
    if not kind.has_answers:
        fault = "was trained on plain text and answers no questions"
        raise UserError(f"{model}: {fault}; see zeropods perplexity, or --task")
    is_folder = Path(model).is_dir()
    if kind.is_one_text and is_folder and is_t5(model):
        tasks_of_t5 = " or ".join(other.name for other in tasks_of(T5_SCRIPT))
        raise UserError(f"--task {task}: {model} is a T5, which is for {tasks_of_t5}; leave it out")
    return task


def chosen_prompt(folder: Path, wanted: str | None = None, force: bool = False) -> str:
    """Name of the prompt for a T5: the wanted one, else the one that it was trained with.

    Raises:
        UserError: the wanted prompt is not the one that the model records, and is not forced; or
            there is neither.
    """
    with_weights = model_folder(folder)
    recorded = model_config(folder).get("prompt")
    is_another = wanted is not None and wanted != recorded
    if is_another and recorded in PROMPTS and not force:
        fault = f"{with_weights} was trained with {recorded}"
        raise UserError(f"--prompt {wanted}: {fault}; leave it out, or add --force-prompt")
    prompt = wanted or recorded
    if prompt not in PROMPTS:
        expected = " or ".join(PROMPTS)
        raise UserError(f"{with_weights}: does not record its prompt; give --prompt {expected}")
    return str(prompt)


def check_source(name: str | Path) -> None:
    """Refuse a causal model's source that is no run or model folder and cannot be a hub id.

    No hub is asked.
    """
    if Path(name).exists():
        model_folder(Path(name))
    elif is_path(str(name)):
        raise UserError(f"{name}: no such folder; expected a run or model folder, or a hub id")


def is_t5(folder: Path) -> bool:
    """Whether a folder's model has an encoder and a decoder; of those known here, only T5 has."""
    return bool(model_config(folder).get("is_encoder_decoder"))


def trained_length(folder: str | Path) -> int | None:
    """Maximum number of tokens of a row that a run was trained on.

    None where the folder is no run or does not say.
    """
    identity = _run_config(folder).get("identity") or {}
    length = identity.get("max_seq_length")
    return length if isinstance(length, int) else None


def _run_config(folder: str | Path) -> dict[str, Any]:
    """`config.json` of a run folder; empty for a model folder, whose file is the model's."""
    path = Path(folder) / CONFIG
    is_run = path.is_file() and (Path(folder) / "model").is_dir()
    return read_json(path) if is_run else {}


def raw_data(run: Path) -> tuple[Path, str]:
    """The folder of the data that a run was trained on, and the split that its model has not seen.

    Raises:
        UserError: the folder is a model folder, or a run of text, which has no questions; or the
            data are no longer near the prepared set.
    """
    if has_weights(run) and not (run / RECORD).is_file():
        fault = "a model folder, which does not record where its data are"
        raise UserError(f"{run}: {fault}; give --data DIR")
    if not task_or_unknown(read_record(run).task).has_answers:
        fault = "was trained on plain text and answers no questions"
        raise UserError(f"{run}: {fault}; see zeropods perplexity")
    data_and_split = raw_data_of(prepared_of(run), UNSEEN_SPLITS)
    if data_and_split is None:
        fault = f"the raw data of {prepared_of(run)} are no longer near it"
        raise UserError(f"{run}: {fault}; give --data and --split")
    return data_and_split


def prepared_of(run: Path, config: RunConfig | None = None) -> Path:
    """The folder of the prepared set that a run was trained on.

    It is the one that the run was given, where it is still there, else the one within the run
    folder, which the run made from raw data.

    Args:
        config: the run's configuration, where it is known; otherwise its record is read.
    """
    dataset = (config or read_record(run)).dataset
    places = []
    if dataset.get("path"):
        places.append(Path(dataset["path"]))
    if dataset.get("relative_path"):
        # The run and its data may have been moved together.
        places.append(run / dataset["relative_path"])
    for place in places:
        if (place / FILE).is_file():
            return place
    return run / OWN


def raw_data_of(prepared: Path, splits: Sequence[str]) -> tuple[Path, str] | None:
    """The folder with the raw data of a prepared set, and the first of the splits that it has.

    The folder is looked for where it was and near the prepared set; its files are recognised by
    their digests.

    Args:
        prepared: the folder of the prepared set.
        splits: the splits that will do, the best one first.

    Returns:
        None where the raw data have none of the splits, or are gone.
    """
    manifest = read_manifest(prepared)
    digests = manifest.source_sha256
    splits_there = {split_of(name) for name in digests}
    split = next((split for split in splits if split in splits_there), None)
    if split is None:
        return None
    digests_of_split = {name: digest for name, digest in digests.items() if split_of(name) == split}
    for folder in chain([Path(manifest.data)], _folders_near(prepared)):
        # Another user's folder nearby may not be readable.
        with contextlib.suppress(PermissionError):
            if _has_files(folder, digests_of_split):
                return folder, split
    return None


def _folders_near(prepared: Path) -> Iterator[Path]:
    """The folders above a prepared set and what lies in them, the nearest first."""
    for folder in Path(prepared).resolve().parents[:LEVELS_UP]:
        yield folder
        yield from sorted(folder.glob("*"))
        yield from sorted(folder.glob("data/*"))


def _has_files(folder: Path, digests: Mapping[str, str]) -> bool:
    """Whether a folder has all files of these names, each with its SHA-256."""
    for name, digest in digests.items():
        path = folder / name
        if not path.is_file() or sha256(path) != digest:
            return False
    return True


@dataclass(frozen=True)
class SavedModel:
    """A model on the device where it answers, and its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    multiple: int = 1
    """Multiple of tokens that prompts are padded to; what is added is masked."""

    @property
    def positions(self) -> int | None:
        """Number of tokens of the longest sequence; None where the configuration sets no limit."""
        return getattr(self.model.config, "max_position_embeddings", None)

    def batch(self, prompts: Sequence[Sequence[int]]) -> BatchEncoding:
        """Token ids of each prompt and their mask, on the model's device.

        A causal model's prompts are padded on the left, so that the first new token stands right
        behind each of them.
        """
        padded = self.tokenizer.pad(
            {"input_ids": prompts},
            padding_side="right" if self.model.config.is_encoder_decoder else "left",
            pad_to_multiple_of=self.multiple,
            return_tensors="pt",
        )
        return padded.to(self.model.device)

    def generated(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
        """The new token ids after each prompt; the end token and padding may follow.

        Args:
            options: arguments of transformers' `generate`.
        """
        import torch

        batch = self.batch(prompts)
        with torch.inference_mode():
            ids: torch.Tensor = self.model.generate(
                **batch, do_sample=False, pad_token_id=self.tokenizer.pad_token_id, **options
            )
        if self.model.config.is_encoder_decoder:
            # The decoder begins with a token of its own.
            return ids[:, 1:].tolist()
        prompt_length = batch["input_ids"].shape[1]
        return ids[:, prompt_length:].tolist()


def load_model(source: str | Path, precision: str = "fp32", *, causal: bool) -> SavedModel:
    """Load a model from a run folder or a model folder, or a causal model by its hub id.

    Args:
        source: a hub id only where there is no folder of that name.
        precision: a key of DTYPE_OF_PRECISION, or `auto`: BF16 where the processor multiplies it
            and the model gains by it.
        causal: whether a causal language model is wanted; otherwise an encoder-decoder such as T5.

    Raises:
        UserError: no weights, a model of another kind, or one that lacks a tensor; a precision that
            is unavailable.
    """
    import torch
    from transformers import AutoConfig, AutoTokenizer

    from zeropods.train.device import choose_attention, padding_multiple, prepack
    from zeropods.train.pretrained import loading, source_options

    precision = _usable_precision(source, precision, causal=causal)
    if causal:
        check_source(source)
    is_folder = Path(source).exists() or not causal
    name = str(model_folder(Path(source))) if is_folder else str(source)
    options = source_options(name)
    with loading(name):
        config = AutoConfig.from_pretrained(name, **options)
    if causal and config.is_encoder_decoder:
        fault = f"its model is a {config.model_type}"
        raise UserError(f"{source}: {fault}; expected a causal one, such as gpt2")
    model = read_model(name, DTYPE_OF_PRECISION[precision], causal=causal, **options)
    with loading(name):
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
    if tokenizer.eos_token_id is None:
        fault = "its tokenizer has no end token"
        raise UserError(f"{source}: {fault}; expected one that marks where an answer ends")
    # Padding is masked, so the end token can serve.
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = model.eval().to("cuda" if torch.cuda.is_available() else "cpu")
    prepack(model)
    choose_attention()
    # A causal model's prompts grow by a token in each step, so that no multiple lasts.
    multiple = 1 if causal else padding_multiple()
    return SavedModel(model, tokenizer, multiple)


def _usable_precision(source: str | Path, precision: str, *, causal: bool) -> str:
    """The precision in which a model answers: the given one, with `auto` resolved.

    Arguments are those of `load_model`.

    Raises:
        UserError: FP16 for an encoder-decoder, or without a GPU.
    """
    import torch

    from zeropods.train.device import resolve_precision

    if precision == "fp16" and not (causal and torch.cuda.is_available()):
        raise UserError("--precision fp16: needs a GPU and a causal model; use fp32 or bf16")
    # What `auto` is depends on the model too; a model folder or a hub id stands for itself.
    model_id = _run_config(source).get("model_id") or str(source)
    return resolve_precision(precision, model_id)


def read_model(name: str, dtype: str, *, causal: bool, **options: Any) -> PreTrainedModel:
    """Load a model folder or hub id on the CPU, with `train.pretrained.load_weights`."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
    from transformers.utils.logging import disable_progress_bar

    from zeropods.train.pretrained import load_weights

    disable_progress_bar()
    kind = AutoModelForCausalLM if causal else AutoModelForSeq2SeqLM
    return load_weights(kind, name, dtype=dtype, **options)


# What a causal model writes after a few words: a sample for people to read.


@dataclass(frozen=True, kw_only=True)
class SampledText:
    """A prompt and what a model wrote after it: what `generated.json` of a run holds."""

    prompt: str
    text: str
    """What followed the prompt, without it; the end token is not shown."""
    new_tokens: int
    seconds: float
    """Seconds of generation, without loading."""


def sample_text(source: str | Path, prompt: str, *, max_new_tokens: int = 60) -> SampledText:
    """Let a saved causal model continue a prompt, with the likeliest token each time.

    Args:
        source: run folder, model folder or hub id.
        max_new_tokens: maximum number of new tokens; fewer where the model ends, or where its
            positions do.

    Raises:
        UserError: a prompt without tokens or that leaves no position for a new one; a model that
            cannot be loaded.
    """
    saved = load_model(source, causal=True)
    words = saved.tokenizer(prompt, add_special_tokens=False).input_ids
    ids = [*first_tokens(saved.tokenizer), *words]
    if not words:
        raise UserError(f"prompt {prompt!r}: contains no tokens; give some words to continue")
    most_new_tokens = max_new_tokens
    if saved.positions is not None:
        most_new_tokens = min(max_new_tokens, saved.positions - len(ids))
    if most_new_tokens < 1:
        fault = f"prompt of {len(ids)} tokens, but the model has only {saved.positions} positions"
        raise UserError(f"{fault}; give a shorter one")
    began = time.perf_counter()
    (new_ids,) = saved.generated(
        [ids], max_new_tokens=most_new_tokens, eos_token_id=saved.tokenizer.eos_token_id
    )
    text = saved.tokenizer.decode(new_ids, skip_special_tokens=True)
    seconds = time.perf_counter() - began
    return SampledText(prompt=prompt, text=text, new_tokens=len(new_ids), seconds=seconds)
