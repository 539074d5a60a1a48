"""Plain text for the task `lm`: documents of a folder or of a data set at the hub, packed into rows without padding.

A document is an article of WikiText, a text file, a JSON line, or a row of Parquet. The split of a document is told by
the name of its file; where no name tells one, by the hash of its text.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
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

DEV_SHARE = 20
"""Where no name tells a split, one document in so many is dev."""
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
"""` = Title = `, and not ` = = Section = = `."""
WIKITEXT = re.compile(r"(wiki\.)?(train|valid|test)\.(txt|tokens|raw)")
KINDS = (".txt", ".tokens", ".raw", ".jsonl", ".parquet")
"""Endings of files of text; `.tokens` and `.raw` are that where WikiText's files are named so, and else anything."""
BY_LINE = "wikitext"
"""The data set at the hub whose rows are lines, blank ones without their ` \\n`, as in the published files."""
MOST_TOKENS = 2**31 - 1
"""TokenRows are found by 32-bit offsets."""
CHUNK_DOCUMENTS, CHUNK_CHARACTERS = 1_024, 2_000_000
"""What is encoded at once stays in memory."""


class TextData:
    """The documents of a folder, or of a data set at the hub, as blocks of `length` tokens."""

    def __init__(
        self, data: Path | str, limit: int | None, length: int, dataset_config: str | None, text_field: str
    ) -> None:
        self._data, self._limit, self._length = data, limit, length
        self._corpus = open_corpus(data, dataset_config, text_field)
        self.splits, self.hashes = self._corpus.splits, self._corpus.hashes

    def texts(self) -> Iterator[str]:
        """What a tokenizer learns from: the documents of train."""
        return self._documents("train")

    def rows(self, split: str, tokenizer: PreTrainedTokenizerBase, progress: Callable[[int], object]) -> TokenRows:
        """The blocks of a split; nothing predicts the first token of a block.

        Blocks of train have exactly `length` tokens; what is left of the last is counted. Those of
        dev and test overlap by a token and the last may be short, so that every token is predicted but the first.
        """
        documents = self._tokens(split, tokenizer, progress)
        tokens, least = join(documents, tokenizer.eos_token_id), self._length if split == "train" else 2
        if len(tokens) < least:
            raise UserError(
                f"{self._data}, {split}: {len(tokens)} tokens, fewer than one block of {least}; "
                "give more text or a smaller --max-seq-length"
            )
        blocks, leftover = pack(tokens, self._length) if split == "train" else (overlap(tokens, self._length), 0)
        labels = [block.copy() for block in blocks]
        for row in labels:
            row[0] = NO_LOSS
        return TokenRows(blocks, labels, documents=len(documents), leftover_tokens=leftover)

    def _tokens(self, split: str, tokenizer: PreTrainedTokenizerBase, progress: Callable[[int], object]) -> list[Ids]:
        encode, first = tokenizer.backend_tokenizer.encode_batch_fast, first_tokens(tokenizer)
        tokens: list[Ids] = []
        total = 0
        for chunk in _chunks(self._documents(split)):
            new = [np.array([*first, *encoding.ids], np.int32) for encoding in encode(chunk, add_special_tokens=False)]
            tokens += new
            total += sum(map(len, new))
            if total > MOST_TOKENS:
                raise UserError(f"{self._data}, {split}: more than {MOST_TOKENS:,} tokens; say --limit DOCUMENTS")
            progress(len(chunk))
        return tokens

    def _documents(self, split: str) -> Iterator[str]:
        return itertools.islice(self._corpus.documents(split), self._limit)


def _chunks(texts: Iterator[str]) -> Iterator[list[str]]:
    """Lists of a thousand texts, or of fewer that are long."""
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
    """(tokens,) all documents in their order, the end token between two of them."""
    parts = [part for document in documents for part in (document, np.array([end], np.int32))]
    return np.concatenate(parts[:-1]) if parts else np.empty(0, np.int32)


def pack(tokens: Ids, length: int) -> tuple[list[Ids], int]:
    """Blocks of exactly `length` tokens in their order, and how many tokens are left over: fewer than `length`."""
    starts = range(0, len(tokens) - length + 1, length)
    return [tokens[start : start + length] for start in starts], len(tokens) % length


def overlap(tokens: Ids, length: int) -> list[Ids]:
    """Blocks for evaluation, of 2 to `length` tokens: each starts with the last token of the one before.

    Since nothing predicts the first token of a block, every token but the very first is predicted once.
    """
    return [tokens[start : start + length] for start in range(0, len(tokens) - 1, length - 1)]


# Documents by split.


def open_corpus(data: Path | str, dataset_config: str | None, text_field: str) -> FolderCorpus | HubCorpus:
    """The text at `data`: a folder, or else the id of a data set at the hub."""
    folder = Path(data)
    if folder.is_dir():
        if dataset_config is not None:
            raise UserError(f"dataset_config {dataset_config!r}: {data} is a folder, which has none; leave it out")
        return FolderCorpus(folder, text_field)
    if folder.is_file():
        raise UserError(f"{data}: a file; name the folder that holds it")
    if is_path(str(data)):
        raise UserError(f"{data}: no such folder; expected a folder of text or the id of a data set at the hub")
    return open_hub(str(data), dataset_config, text_field)


class FolderCorpus:
    """Text, JSON lines or Parquet in a folder and the folders below it, all of one kind."""

    def __init__(self, folder: Path, text_field: str) -> None:
        files = sorted(path for path in folder.rglob("*") if _is_text(path.relative_to(folder)) and path.is_file())
        if not files:
            raise UserError(f"{folder}: no text there; expected files named {', '.join(f'*{kind}' for kind in KINDS)}")
        kinds = {path.suffix: path.name for path in files}
        if len(kinds) > 1:
            names = " and ".join(sorted(kinds.values()))
            raise UserError(f"{folder}: holds {names}; keep files of one kind there")
        self._text_field = text_field
        self._files = _by_split(folder, files)
        self._by_hash = not self._files
        if self._by_hash:
            self._files = {"train": files}
            # A single text, or a few that all fall on one side, are all train.
            self._by_hash = {split_by_hash(text) for text in self._read("train")} == {"train", "dev"}
        self.splits = ["train", "dev"] if self._by_hash else [split for split in SPLITS if split in self._files]
        """`train`, and those of `dev` and `test` that there are."""
        self.hashes = {str(path.relative_to(folder)): sha256(path) for path in files}
        """What tells this text from any other: SHA-256 by file."""

    def documents(self, split: str) -> Iterator[str]:
        """The documents of a split in the order of the files' names; `UserError` at the first fault."""
        if self._by_hash:
            return (text for text in self._read("train") if split == split_by_hash(text))
        return self._read(split)

    def _read(self, split: str) -> Iterator[str]:
        """Documents without a word are left out."""
        for path in self._files[split]:
            yield from (text for text in _documents_of(path, self._text_field) if text.strip())


def _is_text(path: Path) -> bool:
    """Whether a file in the folder is one of text; others, and hidden ones, are left alone."""
    if path.suffix not in KINDS or any(part.startswith(".") for part in path.parts):
        return False
    return path.suffix not in (".tokens", ".raw") or WIKITEXT.fullmatch(path.name) is not None


def _by_split(folder: Path, files: list[Path]) -> dict[str, list[Path]]:
    """The files of each split; nothing where no name tells one."""
    splits: dict[str, list[Path]] = {}
    for path in files:
        name = path.relative_to(folder)
        found = {WORDS[word] for word in re.findall(r"[a-z]+", str(name).lower()) if word in WORDS}
        if len(found) > 1:
            raise UserError(f"{name}: its name tells {' and '.join(sorted(found))}; give it the name of one split")
        splits.setdefault("".join(found), []).append(path)
    unnamed = splits.pop("", [])
    if not splits:
        return {}
    named = next(iter(splits.values()))[0]
    if unnamed:
        raise UserError(f"{unnamed[0]}: no split in its name, but one in {named.name}; expected train, valid or test")
    if "train" not in splits:
        raise UserError(f"{folder}: no file of train, but {named.name}; name one train, as train{named.suffix}")
    return splits


def split_by_hash(text: str) -> str:
    """`dev` for one document in twenty by the SHA-256 of its text, else `train`.

    The same text is always on the same side: a document that occurs twice is not in both.
    """
    return "train" if int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) % DEV_SHARE else "dev"


class HubCorpus:
    """Documents of a data set at the hub by split: rows, or articles where rows are lines."""

    def __init__(self, name: str, config: str | None, field: str, revision: str | None) -> None:
        self._name, self._config, self._field, self._revision = name, config, field, revision
        self.hashes = {hub_name(name, config): revision or "local"}
        self._theirs = self._split_names()
        if "train" not in self._theirs:
            raise UserError(f"data set {name!r}: has no split train, but {', '.join(self._theirs)}; name another")
        self._by_hash = list(self._theirs) == ["train"]
        self.splits = ["train", "dev"] if self._by_hash else [split for split in SPLITS if split in self._theirs]

    def documents(self, split: str) -> Iterator[str]:
        """The documents of a split as they are streamed."""
        import httpx2
        from huggingface_hub.errors import HfHubHTTPError

        texts = self._texts("train" if self._by_hash else split)
        if self._name.rpartition("/")[2] == BY_LINE:
            texts = articles(text or " \n" for text in texts)
        try:
            for text in texts:
                if text.strip() and (not self._by_hash or split == split_by_hash(text)):
                    yield text
        except (httpx2.HTTPError, HfHubHTTPError, ConnectionError, TimeoutError) as error:
            raise UserError(
                f"data set {self._name!r}: the hub stopped answering ({first_line(error)}); try again"
            ) from None

    def _texts(self, split: str) -> Iterator[str]:
        from datasets import load_dataset

        rows = load_dataset(
            self._name, self._config, split=self._theirs[split], streaming=True, revision=self._revision
        )
        for number, row in enumerate(rows, 1):
            yield _text_in(row, f"data set {self._name!r}, {split}, row {number}", self._field)

    def _split_names(self) -> dict[str, str]:
        """Their name of each split that we know."""
        import datasets

        try:
            names: list[Any] = datasets.get_dataset_split_names(self._name, self._config, revision=self._revision)
        except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
            raise UserError(
                f"data set {self._name!r}, configuration {self._config!r}: {first_line(error)}; "
                "name a configuration that it has (--dataset-config)"
            ) from None
        return {WORDS[name]: name for name in map(str, names) if name in WORDS}


def open_hub(name: str, config: str | None, field: str) -> HubCorpus:
    """The data set as it is at the hub now; `UserError` where the hub does not answer or has none of that name."""
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        revision = HfApi().dataset_info(name, timeout=ANSWER_SECONDS).sha
    except (httpx2.TransportError, OfflineModeIsEnabled, OSError, HfHubHTTPError, HFValidationError) as error:
        answered = isinstance(error, HfHubHTTPError | HFValidationError)
        fault = "did not give it" if answered else "cannot be reached"
        raise UserError(
            f"data {name!r}: no such folder, and the hub of data sets {fault} ({first_line(error)}); "
            "name a folder of text"
        ) from None
    return HubCorpus(name, config, field, revision)


def hub_name(name: str, config: str | None) -> str:
    """What a manifest calls a data set at the hub."""
    return f"{name} {config or ''}".strip()


# Documents of a file.


def articles(lines: Iterable[str]) -> Iterator[str]:
    """The articles of a split, each from its title to the next; joined they are the lines again.

    A title stands between blank lines: some 30 lines of WikiText-2 look like one and are rows of a table.
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
    """The documents of a file in their order; `UserError` at the first fault."""
    if path.suffix == ".jsonl":
        for place, document in validated_lines(dict[str, object], path):
            yield _text_in(document, place, field)
    elif path.suffix == ".parquet":
        yield from _cells(path, field)
    elif WIKITEXT.fullmatch(path.name):
        yield from articles(_lines(path))
    else:
        yield "".join(_lines(path))


def _lines(path: Path) -> Iterator[str]:
    """Lines with their ends as they are."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{path}:{number}: byte {line[error.start]:#04x} is not UTF-8; convert the file"
                ) from None


def _cells(path: Path, field: str) -> Iterator[str]:
    """The column `field` of a Parquet file."""
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            batches = file.iter_batches(CHUNK_DOCUMENTS, columns=[field] if field in names else names)
            rows = (row for batch in batches for row in batch.to_pylist())
            for number, row in enumerate(rows, 1):
                yield _text_in(row, f"{path}, row {number}", field)
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{path}: no Parquet can be read there ({first_line(error)}); fetch it again") from None


def _text_in(row: dict[str, object], place: str, field: str) -> str:
    """The text of a JSON object, or of a row of a table."""
    text = row.get(field)
    if not isinstance(text, str):
        raise UserError(
            f"{place}: no text in {field!r}; name the field that holds it (--text-field), "
            f"of {', '.join(map(repr, row))}"
        )
    return text
