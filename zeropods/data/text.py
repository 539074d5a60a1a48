"""Plain text for the task `lm`: documents of a folder or of a data set on the hub, packed into rows without padding.

A document is an article of WikiText, a text file, a JSON line, or a row of Parquet. The split of a document is given by
the name of its file or, if no file name gives one, by the hash of its text.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from zeropods.data.encoding import NO_LOSS, Ids, TokenRows, first_tokens
from zeropods.data.manifest import SPLITS
from zeropods.data.tokenizers import ANSWER_SECONDS
from zeropods.errors import UserError
from zeropods.files import first_line, is_path, sha256, validated_lines

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from zeropods.data.prepare import Preparation

DEV_SHARE = 20
"""If no file name gives a split, one document in this many is dev."""
WORDS = {
    "train": "train",
    "training": "train",
    "valid": "dev",
    "validation": "dev",
    "val": "dev",
    "dev": "dev",
    "eval": "dev",
    "test": "test",
}
"""Words for splits, as in `train.txt`, `wiki.valid.tokens`, `c4-train.00000-of-01024.jsonl` or `test/1.txt`."""
TITLE = re.compile(r" = (?!= ).*(?<! =) = ?\n?")
"""A line ` = Title = `, but not ` = = Section = = `."""
WIKITEXT = re.compile(r"(wiki\.)?(train|valid|test)\.(txt|tokens|raw)")
KINDS = (".txt", ".tokens", ".raw", ".jsonl", ".parquet")
"""Endings of text files; `.tokens` and `.raw` count only in the names of WikiText's files, others may hold anything."""
BY_LINE = "wikitext"
"""The data set on the hub whose rows are the lines of the published files, blank ones without their ` \\n`."""
MOST_TOKENS = 2**31 - 1
"""Maximum number of tokens of a split, since its rows are found by 32-bit offsets."""
CHUNK_DOCUMENTS, CHUNK_CHARACTERS = 1_024, 2_000_000
"""Documents or characters after which a chunk is full; all texts of a chunk are encoded at once, in memory."""


class TextData:
    """The documents of a folder, or of a data set on the hub, as blocks of `max_seq_length` tokens."""

    def __init__(self, wanted: Preparation) -> None:
        self._wanted = wanted
        self._corpus = open_corpus(wanted.data, wanted.dataset_config, wanted.text_field)
        self.splits, self.hashes = self._corpus.splits, self._corpus.hashes

    def texts(self) -> Iterator[str]:
        """The texts that a tokenizer is trained on: the documents of train."""
        return itertools.islice(self._corpus.documents("train"), self._wanted.limit)

    def rows(self, split: str, tokenizer: PreTrainedTokenizerBase, progress: Callable[[int], object]) -> TokenRows:
        """The blocks of a split, for train only whole ones; the first label of each block is -100."""
        encode, first = tokenizer.backend_tokenizer.encode_batch_fast, first_tokens(tokenizer)
        length = self._wanted.max_seq_length
        documents: list[Ids] = []
        total = 0
        for chunk in _chunks(itertools.islice(self._corpus.documents(split), self._wanted.limit)):
            new = [np.array([*first, *encoding.ids], np.int32) for encoding in encode(chunk, add_special_tokens=False)]
            documents += new
            total += sum(map(len, new))
            if total > MOST_TOKENS:
                raise UserError(
                    f"{self._wanted.data}, {split}: more than {MOST_TOKENS:,} tokens; use --limit DOCUMENTS"
                )
            progress(len(chunk))
        tokens, least = join(documents, tokenizer.eos_token_id), length if split == "train" else 2
        if len(tokens) < least:
            raise UserError(
                f"{self._wanted.data}, {split}: {len(tokens)} tokens, fewer than one block of {least}; "
                "give more text or a smaller --max-seq-length"
            )
        blocks, leftover = cut(tokens, length, whole=split == "train")
        labels = [block.copy() for block in blocks]
        for row in labels:
            row[0] = NO_LOSS
        return TokenRows(blocks, labels, documents=len(documents), leftover_tokens=leftover)


def _chunks(texts: Iterator[str]) -> Iterator[list[str]]:
    """Lists of `CHUNK_DOCUMENTS` texts, or of fewer if these are long."""
    chunk: list[str] = []
    characters = 0
    for text in texts:
        chunk.append(text)
        characters += len(text)
        if len(chunk) == CHUNK_DOCUMENTS or characters >= CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def join(documents: Sequence[Ids], end: int) -> Ids:
    """(tokens,) all documents in order, with the end token between every two."""
    parts = [part for document in documents for part in (document, np.array([end], np.int32))]
    return np.concatenate(parts[:-1]) if parts else np.empty(0, np.int32)


def cut(tokens: Ids, length: int, *, whole: bool) -> tuple[list[Ids], int]:
    """Blocks of tokens in order, and the number of tokens that are left over.

    Whole blocks have exactly `length` tokens. Others have 2 to `length`, and each starts with the last token of the
    one before: since nothing predicts the first token of a block, every token except the very first is predicted once.
    """
    starts = range(0, len(tokens) - length + 1, length) if whole else range(0, len(tokens) - 1, length - 1)
    return [tokens[start : start + length] for start in starts], len(tokens) % length if whole else 0


# Documents by split.


@dataclass(frozen=True)
class Corpus:
    """Text by split."""

    splits: list[str]
    """`train`, and whichever of `dev` and `test` exist."""
    hashes: dict[str, str]
    """What identifies this text: the SHA-256 of each file, or the revision of a data set on the hub."""
    read: Callable[[str], Iterator[str]]
    """The documents of a split; `UserError` at the first fault."""
    by_hash: bool
    """Whether only `train` can be read, and dev is a part of it that is chosen by hash."""

    def documents(self, split: str) -> Iterator[str]:
        """The documents of a split in order; blank ones are left out."""
        texts = (text for text in self.read("train" if self.by_hash else split) if text.strip())
        return (text for text in texts if not self.by_hash or split == split_by_hash(text))


def split_by_hash(text: str) -> str:
    """`dev` for one document in twenty, chosen by the SHA-256 of its text, otherwise `train`.

    The same text is always on the same side, so a document that occurs twice is not in both.
    """
    return "train" if int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) % DEV_SHARE else "dev"


def open_corpus(data: Path | str, dataset_config: str | None, text_field: str) -> Corpus:
    """The text at `data`: a folder, or otherwise the id of a data set on the hub, at its current revision."""
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    folder, name = Path(data), str(data)
    if folder.is_dir():
        if dataset_config is not None:
            raise UserError(f"dataset_config {dataset_config!r}: {data} is a folder, which has none; leave it out")
        return folder_corpus(folder, text_field)
    if folder.is_file():
        raise UserError(f"{data}: is a file; give the folder that contains it")
    if is_path(name):
        raise UserError(f"{data}: no such folder; expected a folder of text or the id of a data set on the hub")
    try:
        revision = HfApi().dataset_info(name, timeout=ANSWER_SECONDS).sha
    except (httpx2.TransportError, OfflineModeIsEnabled, OSError, HfHubHTTPError, HFValidationError) as error:
        answered = isinstance(error, HfHubHTTPError | HFValidationError)
        fault = "did not provide it" if answered else "cannot be reached"
        raise UserError(
            f"data {name!r}: no such folder, and the data set hub {fault} ({first_line(error)}); give a folder of text"
        ) from None
    return hub_corpus(name, dataset_config, text_field, revision)


def folder_corpus(folder: Path, text_field: str) -> Corpus:
    """Text, JSON lines or Parquet in a folder and the folders below it, all of one kind; other files are ignored."""
    files: list[Path] = []
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        other = path.suffix in (".tokens", ".raw") and not WIKITEXT.fullmatch(path.name)
        if path.suffix in KINDS and not hidden and not other and path.is_file():
            files.append(path)
    if not files:
        raise UserError(f"{folder}: contains no text; expected files named {', '.join(f'*{kind}' for kind in KINDS)}")
    kinds = {path.suffix: path.name for path in files}
    if len(kinds) > 1:
        raise UserError(f"{folder}: holds {' and '.join(sorted(kinds.values()))}; keep files of one kind there")

    by_split: dict[str, list[Path]] = {}
    for path in files:
        name = str(path.relative_to(folder))
        found = {WORDS[word] for word in re.findall(r"[a-z]+", name.lower()) if word in WORDS}
        if len(found) > 1:
            raise UserError(f"{name}: its name mentions {' and '.join(sorted(found))}; expected only one split")
        by_split.setdefault("".join(found), []).append(path)
    unnamed = by_split.pop("", [])
    if by_split:
        named = next(iter(by_split.values()))[0]
        if unnamed:
            said = f"its name mentions no split, but {named.name} does; expected train, valid or test"
            raise UserError(f"{unnamed[0]}: {said}")
        if "train" not in by_split:
            raise UserError(f"{folder}: has {named.name} but no file for train; name one train{named.suffix}")

    def read(split: str) -> Iterator[str]:
        return (text for path in by_split.get(split, unnamed) for text in _documents_of(path, text_field))

    # A single text, or a few that all fall on one side, go to train.
    sides = {split_by_hash(text) for text in read("train") if text.strip()} if unnamed else set()
    by_hash = sides == {"train", "dev"}
    splits = ["train", "dev"] if by_hash else [split for split in SPLITS if split in by_split] or ["train"]
    return Corpus(splits, {str(path.relative_to(folder)): sha256(path) for path in files}, read, by_hash)


def hub_corpus(name: str, config: str | None, field: str, revision: str | None) -> Corpus:
    """A data set on the hub, which is streamed: its documents are rows, or articles where rows are lines."""
    import datasets
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError

    try:
        found: list[Any] = datasets.get_dataset_split_names(name, config, revision=revision)
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"data set {name!r}, configuration {config!r}: {first_line(error)}; "
            "choose a configuration that it has (--dataset-config)"
        ) from None
    theirs = {WORDS[split]: split for split in map(str, found) if split in WORDS}
    if "train" not in theirs:
        raise UserError(f"data set {name!r}: has no split train, only {', '.join(theirs)}; choose another")

    def texts(split: str) -> Iterator[str]:
        rows = datasets.load_dataset(name, config, split=theirs[split], streaming=True, revision=revision)
        for number, row in enumerate(rows, 1):
            yield _text_in(row, f"data set {name!r}, {split}, row {number}", field)

    def read(split: str) -> Iterator[str]:
        by_line = name.rpartition("/")[2] == BY_LINE
        try:
            yield from articles(text or " \n" for text in texts(split)) if by_line else texts(split)
        except (httpx2.HTTPError, HfHubHTTPError, ConnectionError, TimeoutError) as error:
            raise UserError(f"data set {name!r}: the hub stopped answering ({first_line(error)}); try again") from None

    by_hash = list(theirs) == ["train"]
    splits = ["train", "dev"] if by_hash else [split for split in SPLITS if split in theirs]
    return Corpus(splits, {hub_name(name, config): revision or "local"}, read, by_hash)


def hub_name(name: str, config: str | None) -> str:
    """The name that a manifest gives to a data set on the hub."""
    return f"{name} {config or ''}".strip()


# Documents of a file.


def articles(lines: Iterable[str]) -> Iterator[str]:
    """The articles of a split, each from its title to the next; joined, they are the lines again.

    A title stands between blank lines: some 30 lines of WikiText-2 look like one but are rows of a table.
    """
    article: list[str] = []
    title_before = False
    blank_before = True
    for line in lines:
        blank = not line.strip()
        if title_before and blank and len(article) > 1:
            title = article.pop()
            if any(part.strip() for part in article):
                yield "".join(article)
                article = []
            article.append(title)
        article.append(line)
        title_before = blank_before and TITLE.fullmatch(line) is not None
        blank_before = blank
    if article:
        yield "".join(article)


def _documents_of(path: Path, field: str) -> Iterator[str]:
    """The documents of a file in order; `UserError` at the first fault."""
    import pyarrow
    from pyarrow import parquet

    if path.suffix == ".jsonl":
        for place, document in validated_lines(dict[str, object], path):
            yield _text_in(document, place, field)
    elif path.suffix == ".parquet":
        try:
            with parquet.ParquetFile(path) as file:
                names = file.schema_arrow.names
                batches = file.iter_batches(CHUNK_DOCUMENTS, columns=[field] if field in names else names)
                rows = (row for batch in batches for row in batch.to_pylist())
                for number, row in enumerate(rows, 1):
                    yield _text_in(row, f"{path}, row {number}", field)
        except pyarrow.ArrowInvalid as error:
            raise UserError(f"{path}: not a readable Parquet file ({first_line(error)}); fetch it again") from None
    elif WIKITEXT.fullmatch(path.name):
        yield from articles(_lines(path))
    else:
        yield "".join(_lines(path))


def _lines(path: Path) -> Iterator[str]:
    """The lines of a file, with their line endings as they are."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{path}:{number}: byte {line[error.start]:#04x} is not UTF-8; convert the file"
                ) from None


def _text_in(row: dict[str, object], place: str, field: str) -> str:
    """The text of a JSON object, or of a row of a table."""
    text = row.get(field)
    if not isinstance(text, str):
        raise UserError(
            f"{place}: no text in {field!r}; give the field that contains it (--text-field), "
            f"one of {', '.join(map(repr, row))}"
        )
    return text
