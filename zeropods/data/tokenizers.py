"""Tokenizers by name: from a hub, from a folder, from a bare spiece.model."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from zeropods.errors import UserError
from zeropods.files import check_digests, first_line, read_object
from zeropods.shipped_models import model_source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# The model hub.

HUB_ANSWER_SECONDS = 10.0
"""Time that the hub has for an answer before it counts as out of reach."""


def hub_options(name: str) -> dict[str, bool]:
    """Options for `from_pretrained(name)`: none for a folder, or where the hub answers; the local
    copy only where the hub cannot be reached.

    Without that option, transformers asks five times for each file, with growing pauses, before it
    gives up; that is most of a minute without any output.
    """
    if Path(name).is_dir():
        return {}
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        HfApi().model_info(name, timeout=HUB_ANSWER_SECONDS)
    except (httpx2.TransportError, OfflineModeIsEnabled):
        return {"local_files_only": True}
    except (HfHubHTTPError, HFValidationError):
        pass  # The hub answered; from_pretrained explains better what is wrong with the name.
    return {}


# Tokenizers for T5.

TINY = "t5-tiny"
MISSING_CHARACTERS = "<{}~^"
"""Characters of WikiSQL queries that T5's vocabulary lacks: they are encoded as `<unk>` and decoded
as nothing."""


def load_tokenizer(
    source: str, *, complete: bool = True, instead: str = f"a spiece.model or {TINY}"
) -> PreTrainedTokenizerBase:
    """The tokenizer that `source` names.

    Args:
        source: a hub id, a model that comes with the package, a folder with a tokenizer, or a
            SentencePiece model file.
        complete: whether the characters that T5's vocabulary lacks are added as pieces of their
            own.
        instead: what an error message suggests besides a local folder.

    Raises:
        UserError: there is no such tokenizer, or its files have changed since they were saved.
    """
    import sentencepiece
    from transformers import AutoTokenizer

    source = model_source(source)
    path = Path(source)
    if path.is_file():
        try:
            sentencepiece.SentencePieceProcessor(model_file=source)
        except (RuntimeError, OSError):
            raise UserError(
                f"{path}: not a SentencePiece model; expected a spiece.model or a folder"
            ) from None
        # `T5Tokenizer(vocab_file=...)` silently makes a tokenizer of 104 tokens; a folder is read
        # correctly.
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
                f"tokenizer {source!r} is neither a file nor a folder, "
                f"and the hub did not provide it ({first_line(error)}); "
                f"give a local folder or {instead}"
            ) from None
    return complete_vocabulary(tokenizer) if complete else tokenizer


def complete_vocabulary(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The tokenizer with the `MISSING_CHARACTERS` that it lacks, each alone and after a space, as
    pieces of its unigram model; the same tokenizer if it lacks none.

    They are pieces, not tokens of `add_tokens`: an added token splits the text before the model
    sees it, and the space before it is lost. T5's embedding has 32,128 rows for 32,100 ids, so no
    resize is needed.
    """
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    missing = []
    for character in MISSING_CHARACTERS:
        if tokenizer.unk_token_id in tokenizer(character).input_ids:
            missing.append(character)
    if not missing:
        return tokenizer
    document = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = document["model"]["vocab"]
    for character in missing:
        # The second number is the piece's score, the logarithm of its probability.
        vocabulary += [["▁" + character, -4.0], [character, -6.0]]
    return PreTrainedTokenizerFast(
        tokenizer_object=Backend.from_str(json.dumps(document)),
        eos_token=tokenizer.eos_token,
        unk_token=tokenizer.unk_token,
        pad_token=tokenizer.pad_token,
        clean_up_tokenization_spaces=False,
    )


def _from_folder(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder; `UserError` if there is none."""
    from transformers import AutoTokenizer, T5Tokenizer

    has_piece_model = (folder / "spiece.model").is_file()
    has_tokenizer_file = (folder / "tokenizer.json").is_file()
    kind = T5Tokenizer if has_piece_model and not has_tokenizer_file else AutoTokenizer
    try:
        tokenizer = kind.from_pretrained(folder)
        # If there is only a model's config.json, transformers makes a tokenizer of nothing but
        # special tokens.
        special_tokens = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
        other_tokens = tokenizer.get_vocab().keys() - special_tokens
        if not other_tokens:
            raise OSError("it has no tokenizer files")
        return tokenizer
    except (ValueError, OSError, KeyError, RuntimeError) as error:
        raise UserError(
            f"{folder}: no tokenizer can be read there ({first_line(error)}); "
            "expected a spiece.model or a folder with tokenizer.json"
        ) from None


# Tokenizers for causal models.

GPT_TINY = "gpt-tiny"
END = "<|endoftext|>"
VOCABULARY_FILE = "vocab.json"
MERGES_FILE = "merges.txt"
"""GPT-2's tokenizer files as they were published; a folder may hold just these two."""
DESCRIBING_FILES = ("tokenizer.json", "tokenizer_config.json", "config.json")


def load_causal_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """The tokenizer that `source` names, made fit for causal models by `with_ends`.

    Args:
        source: a hub id, or a folder with tokenizer.json or with GPT-2's vocab.json and merges.txt.

    Raises:
        UserError: there is no such tokenizer, or it cannot be used.
    """
    folder = Path(source)
    if folder.is_file():
        raise UserError(
            f"{source}: is a file; give the folder with tokenizer.json, "
            f"or with {VOCABULARY_FILE} and {MERGES_FILE}"
        )
    if _has_only_published_files(folder):
        tokenizer = _from_published_files(folder)
    else:
        tokenizer = load_tokenizer(source, complete=False, instead=GPT_TINY)
    return with_ends(source, tokenizer)


def _has_only_published_files(folder: Path) -> bool:
    """Whether a folder has GPT-2's two files, and no other that describes a tokenizer."""
    published = (VOCABULARY_FILE, MERGES_FILE)
    has_published = all((folder / name).is_file() for name in published)
    is_described = any((folder / name).is_file() for name in DESCRIBING_FILES)
    return has_published and not is_described


def _from_published_files(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of GPT-2's two files; `UserError` if they do not fit together."""
    from transformers import GPT2TokenizerFast

    vocabulary = read_object(folder / VOCABULARY_FILE, "fetch it again")
    if END not in vocabulary:
        raise UserError(
            f"{folder / VOCABULARY_FILE}: not a vocabulary like GPT-2's, with {END}; "
            "give a folder with tokenizer.json"
        )
    merges = (folder / MERGES_FILE).read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(merges, 1):
        if not line or line.startswith("#version"):
            continue
        pair = line.split(" ")
        is_merge = len(pair) == 2 and {*pair, "".join(pair)} <= vocabulary.keys()
        if not is_merge:
            raise UserError(
                f"{folder / MERGES_FILE}:{number}: "
                f"{line!r:.60} does not merge two tokens of {VOCABULARY_FILE}; fetch both again"
            )
    return GPT2TokenizerFast.from_pretrained(folder)


def with_ends(source: str, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The same tokenizer, given a pad token if it has none, and freed of truncation and padding of
    its own.

    Padding with the end token is harmless: padded positions are masked and carry no loss.

    Args:
        source: the tokenizer's name, for messages.

    Raises:
        UserError: it has no fast implementation, or no end token.
    """
    if not tokenizer.is_fast:
        raise UserError(
            f"tokenizer {source!r} has no fast implementation; convert it to a tokenizer.json"
        )
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"tokenizer {source!r} has no end token; choose another tokenizer, or {GPT_TINY}"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer
