"""A folder with a trained model: what it says about itself, and the model loaded to be asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropods.data.prompts import PROMPTS
from zeropods.data.tokenizers import hub_options
from zeropods.errors import UserError
from zeropods.evaluate.score_file import LM, SQUAD, TEXT2SQL
from zeropods.files import has_weights, refuse_other_weights
from zeropods.measure.record import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TASKS = (TEXT2SQL, SQUAD, LM)
PRECISIONS = ("fp32", "bf16", "fp16")


# What a folder says about itself, read without loading the model.


def model_folder(folder: Path) -> Path:
    """Where the weights of a run or model folder lie: in safetensors files, as nothing else is read."""
    folder = Path(folder)
    within = folder / "model" if (folder / "model").is_dir() else folder
    if not has_weights(within):
        raise UserError(f"{folder}: no trained model (*.safetensors) there; expected a run or model folder")
    refuse_other_weights(within)
    return within


def task_of(folder: Path) -> str:
    """What a model was trained for: what its run says, else the prompt in its configuration says it.

    Raises:
        UserError: neither says it.
    """
    prompt = read_json(model_folder(folder) / "config.json").get("prompt")
    task = _run_config(folder).get("task") or (TEXT2SQL if prompt in PROMPTS else prompt)
    if task not in TASKS:
        raise UserError(f"{folder}: does not say its task ({task!r}); give --task {TEXT2SQL} or {SQUAD}")
    return str(task)


def trained_length(folder: Path) -> int | None:
    """The most tokens of a row that a run was trained on; None where the folder is no run, or says nothing."""
    length = (_run_config(folder).get("identity") or {}).get("max_seq_length")
    return length if isinstance(length, int) else None


def _run_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a run folder; nothing for a model folder, whose file of that name is the model's."""
    folder = Path(folder)
    is_run = (folder / "model").is_dir() and (folder / "config.json").is_file()
    return read_json(folder / "config.json") if is_run else {}


# A saved model, loaded to be asked.


@dataclass(frozen=True)
class SavedModel:
    """A model on the device where it answers, and its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def positions(self) -> int | None:
        """The longest sequence; None where the configuration sets no limit."""
        return getattr(self.model.config, "max_position_embeddings", None)

    @property
    def pad(self) -> int:
        """Id that shorter rows are filled with; they are masked, so the end token will do."""
        tokenizer = self.tokenizer
        return int(tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)

    def continued(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
        """What a causal model writes after each prompt: its new token ids; the end token and pads may follow.

        Padding is on the left, so that the first new token stands right behind the prompt in every row.

        Args:
            options: those of transformers' `generate`.
        """
        import torch

        longest = max(map(len, prompts))
        ids = torch.full((len(prompts), longest), self.pad)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.as_tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        device = self.model.device
        inputs = {"input_ids": ids.to(device), "attention_mask": mask.to(device), "pad_token_id": self.pad}
        return self.model.generate(**inputs, **options)[:, longest:].tolist()


def load_t5(folder: Path, precision: str = "fp32") -> SavedModel:
    """A T5 from a run folder or a model folder; raises as `load_causal_lm`."""
    from transformers import T5ForConditionalGeneration

    if precision not in PRECISIONS[:2]:
        raise UserError(f"--precision {precision!r}; expected {' or '.join(PRECISIONS[:2])}")
    return _load(T5ForConditionalGeneration, str(model_folder(folder)), precision, {})


def load_causal_lm(source: str | Path, precision: str = "fp32") -> SavedModel:
    """From a run folder, a model folder or, where there is no such folder, a hub id; weights from safetensors only.

    Raises:
        UserError: no weights, a model of another kind, one that lacks a tensor, or a precision that cannot be had.
    """
    import torch
    from transformers import AutoModelForCausalLM

    if precision not in PRECISIONS:
        raise UserError(f"--precision {precision!r}; expected {', '.join(PRECISIONS)}")
    if precision == "fp16" and not torch.cuda.is_available():
        raise UserError("--precision fp16: needs a GPU; take fp32 or bf16")
    local = Path(source).exists()
    name = str(model_folder(Path(source))) if local else str(source)
    if local and read_json(Path(name) / "config.json").get("is_encoder_decoder"):
        raise UserError(f"{source}: an encoder-decoder; expected a causal language model")
    saved = _load(AutoModelForCausalLM, name, precision, {} if local else hub_options(name))
    if saved.tokenizer.eos_token_id is None:
        raise UserError(f"{source}: its tokenizer has no end token; expected one that says where an answer ends")
    return saved


def _load(kind: Any, name: str, precision: str, options: dict[str, bool]) -> SavedModel:
    import torch
    from safetensors import SafetensorError
    from transformers import AutoTokenizer

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    try:
        model, found = kind.from_pretrained(
            name, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
        )  # fmt: skip
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        reason = str(error).strip().split("\n")[0][:200]
        raise UserError(f"{name}: cannot be loaded ({reason}); expected a run, a model folder or a hub id") from None
    # transformers would draw a missing tensor at random, and answer with it.
    absent = sorted(found["missing_keys"]) + sorted(str(key) for key in found["mismatched_keys"])
    if absent:
        raise UserError(f"{name}: {absent[0]} is missing, or of another size; save the model again")
    return SavedModel(model.eval().to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer)
