"""What a causal model writes after a few words: a sample for people to read."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zeropods.data.causal_tokenizer import first_tokens
from zeropods.errors import UserError
from zeropods.evaluate.saved_causal import SavedCausal, load_causal_answerer


@dataclass(frozen=True, kw_only=True)
class SampledText:
    """A prompt and what a model wrote after it."""

    prompt: str
    text: str
    """What followed the prompt, without it; the end token is not shown."""
    new_tokens: int
    seconds: float
    """Of generation; loading left out."""

    def to_json(self) -> dict[str, Any]:
        """What `generated.json` of a run holds."""
        return asdict(self)


def sample_text(
    source: str | Path,
    prompt: str,
    *,
    max_new_tokens: int = 60,
    seed: int = 42,
    temperature: float = 0.0,
    precision: str = "fp32",
) -> SampledText:
    """Let a saved causal model go on from a prompt.

    Args:
        source: run folder, model folder or hub id.
        max_new_tokens: at most; fewer where the model ends, or where its positions do.
        seed: of what is drawn; other parts of the program draw as if nothing had happened.
        temperature: 0 takes the likeliest token each time; above, one is drawn from softmax(logits / temperature).

    Raises:
        UserError: a prompt of no tokens or of more than the model has positions, or a model that cannot be loaded.
    """
    if max_new_tokens < 1:
        raise UserError(f"{max_new_tokens} new tokens; expected at least 1")
    saved = load_causal_answerer(source, precision)
    words = saved.tokenizer(prompt, add_special_tokens=False).input_ids
    ids = [*first_tokens(saved.tokenizer), *words]
    if not words:
        raise UserError(f"prompt {prompt!r}: no tokens; give some words to go on from")
    if saved.positions is not None and len(ids) >= saved.positions:
        raise UserError(f"prompt of {len(ids)} tokens, the model has {saved.positions} positions; give a shorter one")
    began = time.perf_counter()
    new = _continued(saved, ids, max_new_tokens, seed, temperature)
    seconds = time.perf_counter() - began
    text = saved.tokenizer.decode(new, skip_special_tokens=True)
    return SampledText(prompt=prompt, text=text, new_tokens=len(new), seconds=seconds)


def _continued(saved: SavedCausal, ids: list[int], most: int, seed: int, temperature: float) -> list[int]:
    import torch

    left = most if saved.positions is None else min(most, saved.positions - len(ids))
    drawn: dict[str, Any] = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    start = torch.tensor([ids], device=saved.model.device)
    devices = [saved.model.device] if saved.model.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.inference_mode():
        torch.manual_seed(seed)
        generated = saved.model.generate(
            input_ids=start,
            attention_mask=torch.ones_like(start),
            max_new_tokens=left,
            eos_token_id=saved.tokenizer.eos_token_id,
            pad_token_id=saved.pad,
            **drawn,
        )
    return generated[0, len(ids) :].tolist()
