"""The model of a workshop as it is before training, to be measured beside the trained one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from zeropods.atomic import new_folder

if TYPE_CHECKING:
    from zeropods.workshop.causal import CausalWorkshop


def untrained(workshop: CausalWorkshop) -> str | Path:
    """Where the model is read from before its first step: pretrained, its own place; random, a folder that is made.

    The random weights are those with which a run begins: the same shape and seed.
    """
    flags = workshop.training
    if flags.get("init", "pretrained") == "pretrained":
        return str(flags["model_name_or_path"])
    folder = workshop.area / workshop.prepared.name / "untrained"
    if not folder.is_dir():
        with new_folder(folder) as new:
            _write(workshop, new)
    return folder


def _write(workshop: CausalWorkshop, folder: Path) -> None:
    from transformers import AutoTokenizer

    from zeropods.train.causal_arguments import CausalArguments
    from zeropods.train.causal_model import load_causal

    names = ("model_name_or_path", "init", "dropout", "seed")
    said = {name: workshop.training[name] for name in names if name in workshop.training}
    tokenizer = AutoTokenizer.from_pretrained(workshop.prepared / "tokenizer")
    model = load_causal(CausalArguments(**said, data=str(workshop.prepared)), tokenizer, precision="fp32")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
