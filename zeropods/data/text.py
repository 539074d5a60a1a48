"""Plain text for the task `lm`: documents of a folder or of a data set on the hub, packed into rows
without padding.

A document is an article of WikiText, a text file, a JSON line, or a row of Parquet. The split of a
document is given by the name of its file or, if no file name gives one, by the hash of its text.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from zeropods.data.encoding import NO_LOSS, Ids, TokenRows, first_tokens
from zeropods.data.manifest import SPLITS
from zeropods.data.tokenizers import HUB_ANSWER_SECONDS
from zeropods.errors import UserError
from zeropods.files import first_line, is_path, sha256, validated_lines

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEV_SHARE = 20
"""If no file name gives a split, one document in this many is dev."""
SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "valid": "dev",
    "validation": "dev",
    "val": "dev",
    "dev": "dev",
    "eval": "dev",
    "test": "test",
}
"""Words for splits, as in `train.txt`, `wiki.valid.tokens`, `c4-train.00000-of-01024.jsonl` or
`test/1.txt`."""
ARTICLE_TITLE = re.compile(r" = (?!= ).*(?<! =) = ?\n?")
"""A line ` = Title = `, but not ` = = Section = = `."""
WIKITEXT = re.compile(r"(wiki\.)?(train|valid|test)\.(txt|tokens|raw)")
TEXT_SUFFIXES = (".txt", ".tokens", ".raw", ".jsonl", ".parquet")
"""Endings of text files; those of `WIKITEXT_SUFFIXES` count only in the names of WikiText's files,
others may hold anything."""
WIKITEXT_SUFFIXES = (".tokens", ".raw")
BY_LINE = "wikitext"
"""The data set on the hub whose rows are the lines of the published files, blank ones without their
` \\n`."""
MOST_TOKENS = 2**31 - 1
"""Maximum number of tokens of a split, since its rows are found by 32-bit offsets."""
FEWEST_TOKENS_OF_BLOCK = 2
"""Number of tokens of the shortest block: the first one predicts the second."""
CHUNK_DOCUMENTS = 1_024
"""Documents after which a chunk is full; all texts of a chunk are encoded at once, in memory."""
CHUNK_CHARACTERS = 2_000_000
"""Characters after which a chunk is full, if these are fewer documents."""


class TextData:
    """The documents of a folder, or of a data set on the hub, as blocks of `max_seq_length`
    tokens."""

    def __init__(
        self,
        data: Path | str,
        *,
        dataset_config: str | None,
        text_field: str,
        limit: int | None,
        max_seq_length: int,
    ) -> None:
        """Open the raw data.

        Args:
            data: a folder, or the id of a data set on the hub.
            dataset_config: configuration of a data set on the hub.
            text_field: the field of a row that holds its text.
            limit: number of documents to take from the start of each split; None for all.
            max_seq_length: number of tokens in a block.
        """
        self._data = data
        self._limit = limit
        self._max_seq_length = max_seq_length
        self._corpus = open_corpus(data, dataset_config, text_field)
        self.splits = self._corpus.splits
        self.hashes = self._corpus.hashes

    def texts(self) -> Iterator[str]:
        """The texts that a tokenizer is trained on: the documents of train."""
        return self._documents("train")

    def rows(
        self,
        split: str,
        tokenizer: PreTrainedTokenizerBase,
        progress: Callable[[int], object],
    ) -> TokenRows:
        """The blocks of a split, for train only whole ones; the first label of each block is
        -100, since nothing predicts its token.

        Raises:
            UserError: the text is shorter than one block, or has too many tokens.
        """
        documents = self._encoded(split, tokenizer, progress)
        tokens = join(documents, tokenizer.eos_token_id)
        length = self._max_seq_length
        needs_whole_blocks = split == "train"
        least = length if needs_whole_blocks else FEWEST_TOKENS_OF_BLOCK
        if len(tokens) < least:
            raise UserError(
                f"{self._data}, {split}: {len(tokens)} tokens, "
                f"fewer than one block of {least}; "
                "give more text or a smaller --max-seq-length"
            )
        blocks, leftover = cut(tokens, length, whole=needs_whole_blocks)
        labels = [block.copy() for block in blocks]
        for row in labels:
            row[0] = NO_LOSS
        return TokenRows(blocks, labels, documents=len(documents), leftover_tokens=leftover)

    def _documents(self, split: str) -> Iterator[str]:
        """The documents of a split, no more than the limit."""
        return itertools.islice(self._corpus.documents(split), self._limit)

    def _encoded(
        self,
        split: str,
        tokenizer: PreTrainedTokenizerBase,
        progress: Callable[[int], object],
    ) -> list[Ids]:
        """The ids of each document of a split."""
        encode = tokenizer.backend_tokenizer.encode_batch_fast
        first_ids = first_tokens(tokenizer)
        documents: list[Ids] = []
        total_tokens = 0
        for chunk in _chunks(self._documents(split)):
            for encoding in encode(chunk, add_special_tokens=False):
                ids = np.array([*first_ids, *encoding.ids], np.int32)
                documents.append(ids)
                total_tokens += len(ids)
            if total_tokens > MOST_TOKENS:
                raise UserError(
                    f"{self._data}, {split}: more than {MOST_TOKENS:,} tokens; "
                    "use --limit DOCUMENTS"
                )
            progress(len(chunk))
        return documents


def _chunks(texts: Iterator[str]) -> Iterator[list[str]]:
    """Lists of `CHUNK_DOCUMENTS` texts, or of fewer if these are long."""
    chunk: list[str] = []
    characters = 0
    for text in texts:
        chunk.append(text)
        characters += len(text)
        if len(chunk) == CHUNK_DOCUMENTS or characters >= CHUNK_CHARACTERS:
            yield chunk
            chunk = []
            characters = 0
    if chunk:
        yield chunk


def join(documents: Sequence[Ids], end: int) -> Ids:
    """(tokens,) all documents in order, with the end token between two of them."""
    if not documents:
        return np.empty(0, np.int32)
    end_token = np.array([end], np.int32)
    parts = []
    for document in documents:
        parts += [document, end_token]
    return np.concatenate(parts[:-1])


def cut(tokens: Ids, length: int, *, whole: bool) -> tuple[list[Ids], int]:
    """Blocks of tokens in order, and the number of tokens that are left over.

    Whole blocks have exactly `length` tokens. Others have 2 to `length`, and each starts with the
    last token of the one before: since nothing predicts the first token of a block, every token
    except the very first is predicted once.
    """
    if whole:
        starts = range(0, len(tokens) - length + 1, length)
        leftover = len(tokens) % length
    else:
        starts = range(0, len(tokens) - 1, length - 1)
        leftover = 0
    return [tokens[start : start + length] for start in starts], leftover


# Documents by split.


@dataclass(frozen=True)
class Corpus:
    """Text by split."""

    splits: list[str]
    """`train`, and whichever of `dev` and `test` exist."""
    hashes: dict[str, str]
    """What identifies this text: the SHA-256 of each file, or the revision of a data set on the
    hub."""
    read: Callable[[str], Iterator[str]]
    """The documents of a split; `UserError` at the first fault."""
    by_hash: bool
    """Whether only `train` can be read, and dev is a part of it that is chosen by hash."""

    def documents(self, split: str) -> Iterator[str]:
        """The documents of a split in order; blank ones are left out."""
        source = "train" if self.by_hash else split
        for text in self.read(source):
            is_blank = not text.strip()
            if is_blank:
                continue
            is_of_split = not self.by_hash or split_by_hash(text) == split
            if is_of_split:
                yield text


def split_by_hash(text: str) -> str:
    """`dev` for one document in twenty, chosen by the SHA-256 of its text, otherwise `train`.

    The same text is always on the same side, so a document that occurs twice is not in both.
    """
    digest = hashlib.sha256(text.encode()).digest()
    number = int.from_bytes(digest[:8])
    return "dev" if number % DEV_SHARE == 0 else "train"


def open_corpus(data: Path | str, dataset_config: str | None, text_field: str) -> Corpus:
    """The text at `data`: a folder, or otherwise the id of a data set on the hub, at its current
    revision; `UserError` if there is no such text."""
    folder = Path(data)
    if folder.is_dir():
        if dataset_config is not None:
            raise UserError(
                f"dataset_config {dataset_config!r}: {data} is a folder, which has none; "
                "leave it out"
            )
        return folder_corpus(folder, text_field)
    if folder.is_file():
        raise UserError(f"{data}: is a file; give the folder that contains it")
    name = str(data)
    if is_path(name):
        raise UserError(
            f"{data}: no such folder; expected a folder of text or the id of a data set on the hub"
        )
    return hub_corpus(name, dataset_config, text_field, _hub_revision(name))


# Text in a folder.


def folder_corpus(folder: Path, text_field: str) -> Corpus:
    """Text, JSON lines or Parquet in a folder and the folders below it, all of one kind; other
    files are ignored."""
    files = _files_of_text(folder)
    by_split = _files_by_split(folder, files)
    unnamed = by_split.pop(None, [])
    _check_splits(folder, by_split, unnamed)

    def read(split: str) -> Iterator[str]:
        """The documents of a split; all of them where no file's name mentions a split."""
        for path in by_split.get(split, unnamed):
            yield from _documents_of(path, text_field)

    splits = [split for split in SPLITS if split in by_split]
    by_hash = False
    if unnamed:
        # Dev is chosen by hash, unless all documents fall on one side, as a single one does: then
        # all of them go to train.
        sides = {split_by_hash(text) for text in read("train") if text.strip()}
        by_hash = sides == {"train", "dev"}
        splits = ["train", "dev"] if by_hash else ["train"]
    hashes = {str(path.relative_to(folder)): sha256(path) for path in files}
    return Corpus(splits, hashes, read, by_hash)


def _files_of_text(folder: Path) -> list[Path]:
    """The files of text in a folder and the folders below it, which must be of one kind."""
    files = [path for path in sorted(folder.rglob("*")) if _is_text(path, folder)]
    if not files:
        patterns = ", ".join(f"*{suffix}" for suffix in TEXT_SUFFIXES)
        raise UserError(f"{folder}: contains no text; expected files named {patterns}")
    name_by_suffix = {path.suffix: path.name for path in files}
    if len(name_by_suffix) > 1:
        names = " and ".join(sorted(name_by_suffix.values()))
        raise UserError(f"{folder}: holds {names}; keep files of one kind there")
    return files


def _is_text(path: Path, folder: Path) -> bool:
    """Whether a path below a folder is a file of text, to judge by its name, and is not hidden."""
    if path.suffix not in TEXT_SUFFIXES:
        return False
    if path.suffix in WIKITEXT_SUFFIXES and not WIKITEXT.fullmatch(path.name):
        return False
    is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    return not is_hidden and path.is_file()


def _files_by_split(folder: Path, files: Sequence[Path]) -> dict[str | None, list[Path]]:
    """The files by the split that their paths mention; those that mention none are under None."""
    by_split: dict[str | None, list[Path]] = {}
    for path in files:
        name = str(path.relative_to(folder))
        words = re.findall(r"[a-z]+", name.lower())
        splits = sorted({SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS})
        if len(splits) > 1:
            raise UserError(
                f"{name}: its name mentions {' and '.join(splits)}; expected only one split"
            )
        split = splits[0] if splits else None
        by_split.setdefault(split, []).append(path)
    return by_split


def _check_splits(
    folder: Path, by_split: dict[str | None, list[Path]], unnamed: Sequence[Path]
) -> None:
    """Refuse a folder in which only some files mention a split, or none of them mentions train."""
    if not by_split:
        return
    named = next(iter(by_split.values()))[0]
    if unnamed:
        raise UserError(
            f"{unnamed[0]}: its name mentions no split, but {named.name} does; "
            "expected train, valid or test"
        )
    if "train" not in by_split:
        raise UserError(
            f"{folder}: has {named.name} but no file for train; name one train{named.suffix}"
        )


# Text of a data set on the hub.


def hub_corpus(name: str, config: str | None, field: str, revision: str | None) -> Corpus:
    """A data set on the hub, which is streamed: its documents are rows, or articles where rows are
    lines.

    Args:
        config: name of the configuration; None for the data set's only one.
        field: the field of a row that holds its text.
        revision: the commit to read; None where it is not known.

    Raises:
        UserError: there is no such configuration, or no split train.
    """
    import datasets
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError

    try:
        names = datasets.get_dataset_split_names(name, config, revision=revision)
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"data set {name!r}, configuration {config!r}: {first_line(error)}; "
            "choose a configuration that it has (--dataset-config)"
        ) from None
    hub_splits: dict[str, str] = {}
    """The hub's name of each split that is one of ours."""
    for hub_split in map(str, names):
        if hub_split in SPLIT_WORDS:
            hub_splits[SPLIT_WORDS[hub_split]] = hub_split
    if "train" not in hub_splits:
        raise UserError(
            f"data set {name!r}: has no split train, only {', '.join(hub_splits)}; choose another"
        )

    def texts(split: str) -> Iterator[str]:
        rows = datasets.load_dataset(
            name, config, split=hub_splits[split], streaming=True, revision=revision
        )
        for number, row in enumerate(rows, 1):
            yield _text_in(row, f"data set {name!r}, {split}, row {number}", field)

    def read(split: str) -> Iterator[str]:
        is_by_line = name.rpartition("/")[2] == BY_LINE
        try:
            if is_by_line:
                # A blank line of the original file is an empty text at the hub.
                yield from articles(text or " \n" for text in texts(split))
            else:
                yield from texts(split)
        except (httpx2.HTTPError, HfHubHTTPError, ConnectionError, TimeoutError) as error:
            raise UserError(
                f"data set {name!r}: the hub stopped answering ({first_line(error)}); try again"
            ) from None

    splits = [split for split in SPLITS if split in hub_splits]
    # Where the data set has train only, dev is a part of it.
    by_hash = splits == ["train"]
    if by_hash:
        splits = ["train", "dev"]
    return Corpus(splits, {hub_name(name, config): revision or "local"}, read, by_hash)


def hub_name(name: str, config: str | None) -> str:
    """The name that a manifest gives to a data set on the hub."""
    return f"{name} {config or ''}".strip()


def _hub_revision(name: str) -> str | None:
    """The current revision of a data set on the hub; `UserError` if the hub does not have it, or
    does not answer."""
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        return HfApi().dataset_info(name, timeout=HUB_ANSWER_SECONDS).sha
    except (HfHubHTTPError, HFValidationError) as error:
        fault = f"did not provide it ({first_line(error)})"
    except (httpx2.TransportError, OfflineModeIsEnabled, OSError) as error:
        fault = f"cannot be reached ({first_line(error)})"
    raise UserError(
        f"data {name!r}: no such folder, and the data set hub {fault}; give a folder of text"
    )


# Documents of a file.


def articles(lines: Iterable[str]) -> Iterator[str]:
    """The articles of a split, each from its title to the next; joined, they are the lines again.

    A title stands between blank lines: some 30 lines of WikiText-2 look like one but are rows of a
    table.
    """
    article: list[str] = []
    is_blank_before = True
    # Whether the line before would be a title if this one is blank.
    is_title_before = False
    for line in lines:
        is_blank = not line.strip()
        if is_title_before and is_blank and len(article) > 1:
            # The line before, which is in this article already, begins the next one.
            title = article.pop()
            has_text = any(part.strip() for part in article)
            if has_text:
                yield "".join(article)
                article = []
            article.append(title)
        article.append(line)
        is_title_before = is_blank_before and ARTICLE_TITLE.fullmatch(line) is not None
        is_blank_before = is_blank
    if article:
        yield "".join(article)


def _documents_of(path: Path, field: str) -> Iterator[str]:
    """The documents of a file in order; `UserError` at the first fault."""
    if path.suffix == ".jsonl":
        for place, document in validated_lines(dict[str, object], path):
            yield _text_in(document, place, field)
    elif path.suffix == ".parquet":
        yield from _documents_of_parquet(path, field)
    elif WIKITEXT.fullmatch(path.name):
        yield from articles(_lines(path))
    else:
        yield "".join(_lines(path))


def _documents_of_parquet(path: Path, field: str) -> Iterator[str]:
    """The documents of a Parquet file, of which a chunk of rows is in memory at a time."""
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            # Where there is no such field, all are read, so that the message of `_text_in` can
            # name them.
            columns = [field] if field in names else names
            for batch in file.iter_batches(CHUNK_DOCUMENTS, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield _text_in(row, f"{path}, row {number}", field)
    except pyarrow.ArrowInvalid as error:
        raise UserError(
            f"{path}: not a readable Parquet file ({first_line(error)}); fetch it again"
        ) from None


def _lines(path: Path) -> Iterator[str]:
    """The lines of a file, with their line endings as they are."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield line.decode("utf-8")
            except UnicodeDecodeError as error:
                byte = line[error.start]
                raise UserError(
                    f"{path}:{number}: byte {byte:#04x} is not UTF-8; convert the file"
                ) from None


def _text_in(row: dict[str, object], place: str, field: str) -> str:
    """The text of a JSON object, or of a row of a table; `UserError` if the field holds none."""
    text = row.get(field)
    if not isinstance(text, str):
        fields = ", ".join(map(repr, row))
        raise UserError(
            f"{place}: no text in {field!r}; give the field that contains it (--text-field), "
            f"one of {fields}"
        )
    return text
