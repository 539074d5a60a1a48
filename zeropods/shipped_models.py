"""Models that come with the package, by the name under which they are asked for.

Each is a folder of `models/`: configuration, FP16 weights in safetensors, tokenizer, their digests,
and a card that says on what it was trained and how well it does.
"""

from __future__ import annotations

from pathlib import Path

MODELS = Path(__file__).with_name("models")
SHIPPED = ("t5-tiny",)


def model_source(name: str) -> str:
    """What `from_pretrained` is given for a model or a tokenizer: the folder of a shipped one, else
    the name itself, which is a hub id or a folder.

    A folder of that name in the working directory comes first, as it does for a hub id.
    """
    if name in SHIPPED and not Path(name).is_dir():
        return str(MODELS / name)
    return name
