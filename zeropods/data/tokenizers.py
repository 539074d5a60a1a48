"""Tokenizers by name: from a hub, from a folder, from a bare spiece.model."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from zeropods.errors import UserError
from zeropods.files import check_digests, first_line, read_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# The model hub.

ANSWER_SECONDS = 10.0


def hub_options(name: str) -> dict[str, bool]:
    """Options for `from_pretrained(name)`: none for a folder, only the local copy if the hub cannot be reached.

    Otherwise transformers asks five times for each file, with growing pauses, before it gives up; that is
    most of a minute without any output.
    """
    if Path(name).is_dir():
        return {}
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        HfApi().model_info(name, timeout=ANSWER_SECONDS)
    except (httpx2.TransportError, OfflineModeIsEnabled):
        return {"local_files_only": True}
    except (HfHubHTTPError, HFValidationError):
        pass  # The hub answered; from_pretrained explains better what is wrong with the name.
    return {}


# Tokenizers for T5.

TINY = "t5-tiny"
MISSING_CHARACTERS = "<{}~^"
"""Characters of WikiSQL queries that T5's vocabulary lacks: they are encoded as `<unk>` and decoded as nothing."""


def load_tokenizer(
    source: str, *, complete: bool = True, instead: str = f"a spiece.model or {TINY}"
) -> PreTrainedTokenizerBase:
    """The tokenizer that `source` names.

    Args:
        source: a hub id, a folder with a tokenizer, or a SentencePiece model file.
        complete: add the characters that T5's vocabulary lacks as pieces of their own.
        instead: what an error message suggests besides a local folder.
    """
    import sentencepiece
    from transformers import AutoTokenizer

    path = Path(source)
    if path.is_file():
        try:
            sentencepiece.SentencePieceProcessor(model_file=source)
        except (RuntimeError, OSError):
            raise UserError(f"{path}: not a SentencePiece model; expected a spiece.model or a folder") from None
        # `T5Tokenizer(vocab_file=...)` silently makes a tokenizer of 104 tokens; a folder is read correctly.
        with tempfile.TemporaryDirectory() as folder:
            shutil.copyfile(path, f"{folder}/spiece.model")
            tokenizer = _from_folder(Path(folder))
    elif path.is_dir():
        check_digests(path, weights=False)
        tokenizer = _from_folder(path)
    else:
        try:
            tokenizer = AutoTokenizer.from_pretrained(source, **hub_options(source))
        except (ValueError, OSError) as error:
            raise UserError(
                f"tokenizer {source!r} is neither a file nor a folder, and the hub did not provide it "
                f"({first_line(error)}); give a local folder or {instead}"
            ) from None
    return complete_vocabulary(tokenizer) if complete else tokenizer


def complete_vocabulary(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Append the missing characters, each alone and after a space, as pieces of the unigram model.

    They are pieces, not tokens of `add_tokens`: an added token splits the text before the model sees it, and
    the space before it is lost. T5's embedding has 32,128 rows for 32,100 ids, so no resize is needed.
    """
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    missing = [c for c in MISSING_CHARACTERS if tokenizer.unk_token_id in tokenizer(c).input_ids]
    if not missing:
        return tokenizer
    document = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = document["model"]["vocab"]
    for character in missing:
        vocabulary += [["▁" + character, -4.0], [character, -6.0]]
    return PreTrainedTokenizerFast(
        tokenizer_object=Backend.from_str(json.dumps(document)),
        eos_token=tokenizer.eos_token,
        unk_token=tokenizer.unk_token,
        pad_token=tokenizer.pad_token,
        clean_up_tokenization_spaces=False,
    )


def _from_folder(folder: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer, T5Tokenizer

    bare = (folder / "spiece.model").is_file() and not (folder / "tokenizer.json").is_file()
    try:
        found = (T5Tokenizer if bare else AutoTokenizer).from_pretrained(folder)
        # If there is only a model's config.json, transformers makes a tokenizer of nothing but special tokens.
        if not found.get_vocab().keys() - {*found.all_special_tokens, *found.get_added_vocab()}:
            raise OSError("it has no tokenizer files")
        return found
    except (ValueError, OSError, KeyError, RuntimeError) as error:
        raise UserError(
            f"{folder}: no tokenizer can be read there ({first_line(error)}); "
            "expected a spiece.model or a folder with tokenizer.json"
        ) from None


# Tokenizers for causal models.

GPT_TINY = "gpt-tiny"
END = "<|endoftext|>"
BARE = ("vocab.json", "merges.txt")
"""GPT-2's tokenizer files as they were published; a folder may hold just these."""
DESCRIBED = ("tokenizer.json", "tokenizer_config.json", "config.json")


def load_causal_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """The tokenizer that `source` names: it has an end token, which also pads if there is no pad token.

    Args:
        source: a hub id, or a folder with tokenizer.json or with GPT-2's vocab.json and merges.txt.
    """
    from transformers import GPT2TokenizerFast

    folder = Path(source)
    if folder.is_file():
        raise UserError(f"{source}: is a file; give the folder with tokenizer.json, or with {' and '.join(BARE)}")
    if all((folder / name).is_file() for name in BARE) and not any((folder / name).is_file() for name in DESCRIBED):
        vocabulary = read_object(folder / BARE[0], "fetch it again")
        if END not in vocabulary:
            said = f"not a vocabulary like GPT-2's, with {END}; give a folder with tokenizer.json"
            raise UserError(f"{folder / BARE[0]}: {said}")
        merges = (folder / BARE[1]).read_text(encoding="utf-8", errors="replace").split("\n")
        for number, line in enumerate(merges, 1):
            pair = line.split(" ")
            is_merge = len(pair) == 2 and {*pair, "".join(pair)} <= vocabulary.keys()
            if line and not line.startswith("#version") and not is_merge:
                said = f"{line!r:.60} does not merge two tokens of {BARE[0]}; fetch both again"
                raise UserError(f"{folder / BARE[1]}:{number}: {said}")
        return with_ends(source, GPT2TokenizerFast.from_pretrained(folder))
    return with_ends(source, load_tokenizer(source, complete=False, instead=GPT_TINY))


def with_ends(source: str, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The tokenizer with a pad token, and without truncation or padding of its own; refused if it cannot be used.

    Padding with the end token is harmless: padded positions are masked and carry no loss.
    """
    if not tokenizer.is_fast:
        raise UserError(f"tokenizer {source!r} has no fast implementation; convert it to a tokenizer.json")
    if tokenizer.eos_token_id is None:
        raise UserError(f"tokenizer {source!r} has no end token; choose another tokenizer, or {GPT_TINY}")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer
