"""A folder with a trained model: what it says about itself, and the model loaded to be asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropods.data.prompts import PROMPTS
from zeropods.data.tokenizers import hub_options
from zeropods.errors import UserError
from zeropods.files import has_weights, refuse_other_weights
from zeropods.measure.record import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


# What a folder with a trained model says about itself, read without loading it.

TASKS = ("text2sql", "squad", "lm")


def model_folder(folder: Path) -> Path:
    """Where the weights of a run or model folder lie: in safetensors files, as nothing else is read."""
    folder = Path(folder)
    within = folder / "model" if (folder / "model").is_dir() else folder
    if not has_weights(within):
        raise UserError(f"{folder}: no trained model (*.safetensors) there; expected a run or model folder")
    refuse_other_weights(within)
    return within


def task_of(folder: Path, asked: str | None = None) -> str:
    """What a model was trained for: `asked`, else what its run says, else the prompt in its configuration.

    Raises:
        UserError: nobody says it.
    """
    if asked is not None:
        return asked
    within = model_folder(folder)
    said = _run_config(Path(folder)).get("task") or _task_of_prompt(read_json(within / "config.json").get("prompt"))
    if said not in TASKS:
        raise UserError(f"{folder}: does not say its task ({said!r}); give --task {' or '.join(TASKS[:2])}")
    return said


def trained_length(folder: Path) -> int | None:
    """The most tokens of a row that a run was trained on; None where the folder is no run, or says nothing."""
    length = (_run_config(Path(folder)).get("identity") or {}).get("max_seq_length")
    return length if isinstance(length, int) else None


def _run_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a run folder; nothing for a model folder, whose file of that name is the model's."""
    is_run = (folder / "model").is_dir() and (folder / "config.json").is_file()
    return read_json(folder / "config.json") if is_run else {}


def _task_of_prompt(prompt: object) -> object:
    return "text2sql" if prompt in PROMPTS else prompt


# A saved causal language model, loaded to be asked.

PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class SavedCausal:
    """A model on the device where it answers, and its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def positions(self) -> int | None:
        """The longest sequence; None where the configuration sets no limit."""
        return getattr(self.model.config, "max_position_embeddings", None)

    @property
    def pad(self) -> int:
        """What shorter rows are filled with; they are masked, so the end token will do."""
        tokenizer = self.tokenizer
        return int(tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)


def load_causal_answerer(source: str | Path, precision: str = "fp32") -> SavedCausal:
    """From a run folder, a model folder or, where there is no such folder, a hub id; weights from safetensors only.

    Raises:
        UserError: no weights, a model of another kind, one that lacks a tensor, or a precision that cannot be had.
    """
    import torch

    dtype, device = _dtype(precision), "cuda" if torch.cuda.is_available() else "cpu"
    local = Path(source).exists()
    name = str(model_folder(Path(source))) if local else str(source)
    if local and read_json(Path(name) / "config.json").get("is_encoder_decoder"):
        raise UserError(f"{source}: an encoder-decoder; expected a causal language model")
    model, tokenizer = _load(name, dtype, {} if local else hub_options(name))
    if tokenizer.eos_token_id is None:
        raise UserError(f"{source}: its tokenizer has no end token; expected one that says where an answer ends")
    return SavedCausal(model.eval().to(device), tokenizer)


def _load(name: str, dtype: Any, options: dict[str, bool]) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
        )
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0][:200]
        raise UserError(f"{name}: cannot be loaded ({reason}); expected a run, a model folder or a hub id") from None
    # transformers would draw a missing tensor at random, and answer with it.
    absent = sorted(found["missing_keys"]) + sorted(str(key) for key in found["mismatched_keys"])
    if absent:
        raise UserError(f"{name}: {absent[0]} is missing, or of another size; save the model again")
    return model, tokenizer


def _dtype(precision: str) -> Any:
    import torch

    if precision not in PRECISIONS:
        raise UserError(f"--precision {precision!r}; expected {', '.join(PRECISIONS)}")
    if precision == "fp16" and not torch.cuda.is_available():
        raise UserError("--precision fp16: needs a GPU; take fp32 or bf16")
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
