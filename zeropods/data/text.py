"""Plain text for the task `lm`: documents of a folder or of a data set at the hub, packed into rows without padding.

A document is an article of WikiText, a text file, a JSON line, or a row of Parquet. The split of a document is told by
the name of its file; where no name tells one, by the hash of its text.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from zeropods.data.tokenizers import ANSWER_SECONDS, Ids
from zeropods.errors import UserError
from zeropods.files import encodable, first_line, json_lines, sha256

if TYPE_CHECKING:
    import pyarrow
    from datasets import IterableDataset

SPLITS = ("train", "dev", "test")
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
WIKITEXT_KINDS = ("*.tokens", "*.raw")
"""Text where WikiText's files are named so, and anything elsewhere."""
ROWS_AT_ONCE = 1_024
BY_LINE = "wikitext"
"""The data set at the hub whose rows are lines, blank ones without their ` \\n`, as in the published files."""


class Corpus(Protocol):
    """Documents by split."""

    hashes: dict[str, str]
    """What tells this text from any other: SHA-256 by file, or a revision at the hub."""
    splits: list[str]
    """`train`, and those of `dev` and `test` that there are."""

    def documents(self, split: str) -> Iterator[str]:
        """The documents of a split, in an order that does not change."""


def open_corpus(data: Path | str, dataset_config: str | None, text_field: str) -> Corpus:
    """The text at `data`: a folder, or else the id of a data set at the hub."""
    folder = Path(data)
    if folder.is_dir():
        if dataset_config is not None:
            raise UserError(f"dataset_config {dataset_config!r}: {data} is a folder, which has none; leave it out")
        return FolderCorpus(folder, text_field)
    if folder.is_file():
        raise UserError(f"{data}: a file; name the folder that holds it")
    if folder.is_absolute() or len(folder.parts) > 2 or folder.parts[:1] in (("..",), ("~",)):
        raise UserError(f"{data}: no such folder; expected a folder of text or the id of a data set at the hub")

    return open_hub(str(data), dataset_config, text_field)


class FolderCorpus:
    """Text, JSON lines or Parquet in a folder and the folders below it, all of one kind."""

    def __init__(self, folder: Path, text_field: str) -> None:
        files = sorted(path for path in folder.rglob("*") if kind_of(path) and not _is_hidden(path, folder))
        if not files:
            raise UserError(f"{folder}: no text there; expected files named {', '.join(READERS)}")
        kinds = {kind_of(path): path.name for path in files}
        if len(kinds) > 1:
            names = " and ".join(sorted(kinds.values()))
            raise UserError(f"{folder}: holds {names}; keep files of one kind there")
        self._text_field = text_field
        self._named = by_split(folder, files)
        self._files = self._named or {"train": files}
        self.hashes = {str(path.relative_to(folder)): sha256(path) for path in files}
        self.splits = [split for split in SPLITS if split in self._files] if self._named else self._split_by_hashes()

    def documents(self, split: str) -> Iterator[str]:
        """The documents of a split in the order of the files' names; `UserError` at the first fault."""
        if self._named:
            return self._read(split)
        if self.splits == ["train"]:
            return self._read("train")
        return (text for text in self._read("train") if split == split_by_hash(text))

    def _read(self, split: str) -> Iterator[str]:
        for path in self._files[split]:
            yield from read_documents(path, self._text_field)

    def _split_by_hashes(self) -> list[str]:
        """Train and dev, if there are documents of both; else, as for a single file, all is train."""
        both = {split_by_hash(text) for text in self._read("train")} == {"train", "dev"}
        return ["train", "dev"] if both else ["train"]


def _is_hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def hub_name(name: str, config: str | None) -> str:
    """What a manifest calls a data set at the hub."""
    return f"{name} {config or ''}".strip()


def open_hub(name: str, config: str | None, field: str) -> HubCorpus:
    """The data set as it is at the hub now; `UserError` where the hub does not answer or has none of that name."""
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        revision = HfApi().dataset_info(name, timeout=ANSWER_SECONDS).sha
    except (httpx2.TransportError, OfflineModeIsEnabled, OSError) as error:
        raise UserError(f"{_nowhere(name)} cannot be reached ({first_line(error)}); name a folder of text") from None
    except (HfHubHTTPError, HFValidationError) as error:
        raise UserError(f"{_nowhere(name)} did not give it ({first_line(error)}); name a folder of text") from None
    return HubCorpus(name, config, field, revision)


class HubCorpus:
    """Documents of a data set by split: rows, or articles where rows are lines."""

    def __init__(self, name: str, config: str | None, field: str, revision: str | None) -> None:
        self._name, self._config, self._field, self._revision = name, config, field, revision
        self.hashes = {hub_name(name, config): revision or "local"}
        self._theirs = self._split_names()
        if "train" not in self._theirs:
            raise UserError(f"data set {name!r}: has no split train, but {', '.join(self._theirs)}; name another")
        self._shared = list(self._theirs) == ["train"]
        self.splits = ["train", "dev"] if self._shared else [split for split in SPLITS if split in self._theirs]

    def documents(self, split: str) -> Iterator[str]:
        """The documents of a split as they are streamed."""
        import httpx2
        from huggingface_hub.errors import HfHubHTTPError

        try:
            for text in self._documents("train" if self._shared else split):
                if text.strip() and (not self._shared or split == split_by_hash(text)):
                    yield text
        except (httpx2.HTTPError, HfHubHTTPError, ConnectionError, TimeoutError) as error:
            raise UserError(
                f"data set {self._name!r}: the hub stopped answering ({first_line(error)}); try again"
            ) from None

    def _documents(self, split: str) -> Iterator[str]:
        from datasets import load_dataset

        rows = load_dataset(
            self._name, self._config, split=self._theirs[split], streaming=True, revision=self._revision
        )
        texts = self._texts(split, rows)
        return articles(text or " \n" for text in texts) if self._by_line else texts

    @property
    def _by_line(self) -> bool:
        return self._name.rpartition("/")[2] == BY_LINE

    def _texts(self, split: str, rows: IterableDataset) -> Iterator[str]:
        for number, row in enumerate(rows, 1):
            place, text = f"data set {self._name!r}, {split}, row {number}", row.get(self._field)
            if not isinstance(text, str):
                raise UserError(
                    f"{place}: no text in {self._field!r}; name the field that holds it (--text-field), "
                    f"of {', '.join(map(repr, row))}"
                )
            yield encodable(place, self._field, text)

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


def by_split(folder: Path, files: list[Path]) -> dict[str, list[Path]]:
    """The files of each split; nothing where no name tells one."""
    splits: dict[str, list[Path]] = {}
    for path in files:
        splits.setdefault(_split_of(path.relative_to(folder)), []).append(path)
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

    The same text is always on the same side: a document that stands there twice is not in both.
    """
    return "train" if int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) % DEV_SHARE else "dev"


def _split_of(name: Path) -> str:
    found = {WORDS[word] for word in re.findall(r"[a-z]+", str(name).lower()) if word in WORDS}
    if len(found) > 1:
        raise UserError(f"{name}: its name tells {' and '.join(sorted(found))}; give it the name of one split")
    return "".join(found)


def kind_of(path: Path) -> str | None:
    """A key of `READERS`; None for what is no file of text, which is left alone."""
    kind = f"*{path.suffix}"
    if kind not in READERS or not path.is_file():
        return None
    return kind if kind not in WIKITEXT_KINDS or WIKITEXT.fullmatch(path.name) else None


def read_documents(path: Path, field: str) -> Iterator[str]:
    """The documents of a file in their order, those without a word left out; `UserError` at the first fault."""
    return (text for text in READERS[str(kind_of(path))](path, field) if text.strip())


def _text(path: Path, field: str) -> Iterator[str]:
    if WIKITEXT.fullmatch(path.name):
        return articles(_lines(path))
    return iter(["".join(_lines(path))])


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


def _json(path: Path, field: str) -> Iterator[str]:
    for number, document in json_lines(path):
        place = f"{path}:{number}"
        if not isinstance(document.get(field), str):
            raise UserError(f"{place}: {_without(field, list(document))}")
        yield encodable(place, field, document[field])


def _parquet(path: Path, field: str) -> Iterator[str]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if field not in columns or not _is_text(file.schema_arrow.field(field).type):
                raise UserError(f"{path}: {_without(field, columns)}")
            for batch in file.iter_batches(ROWS_AT_ONCE, columns=[field]):
                yield from _cells(path, field, batch)
    except pyarrow.ArrowInvalid as error:
        raise UserError(
            f"{path}: no Parquet can be read there ({str(error).splitlines()[0]}); fetch it again"
        ) from None


def _cells(path: Path, field: str, batch: pyarrow.RecordBatch) -> Iterator[str]:
    for text in batch.column(0).to_pylist():
        if text is None:
            raise UserError(f"{path}: a row without {field!r}; leave that row out")
        yield text


def _is_text(type_: pyarrow.DataType) -> bool:
    from pyarrow import types

    return types.is_string(type_) or types.is_large_string(type_) or types.is_string_view(type_)


def _without(field: str, there: list[str]) -> str:
    return f"no text in {field!r}; name the field that holds it (--text-field), of {', '.join(map(repr, there))}"


READERS: dict[str, Callable[[Path, str], Iterator[str]]] = {
    "*.txt": _text,
    **dict.fromkeys(WIKITEXT_KINDS, _text),
    "*.jsonl": _json,
    "*.parquet": _parquet,
}


def _nowhere(name: str) -> str:
    return f"data {name!r}: no such folder, and the hub of data sets"


# Documents as one row of tokens, cut into blocks without padding.


def join(documents: Sequence[Ids], end: int) -> Ids:
    """(tokens,) all documents in their order, the end token between two of them."""
    if not documents:
        return np.empty(0, np.int32)
    starts = np.cumsum([0] + [len(document) + 1 for document in documents])
    joined = np.full(starts[-1] - 1, end, np.int32)
    between = np.zeros(len(joined), bool)
    between[starts[1:-1] - 1] = True
    joined[~between] = np.concatenate(documents)
    return joined


def pack(tokens: Ids, length: int) -> tuple[Ids, int]:
    """Blocks of exactly `length` tokens, none padded.

    Returns:
        (blocks, length) the tokens in their order, and how many are left over: fewer than `length`.
    """
    blocks, leftover = divmod(len(tokens), length)
    return tokens[: blocks * length].reshape(blocks, length), leftover


def overlap(tokens: Ids, length: int) -> tuple[NDArray[np.int64], Ids]:
    """Blocks for evaluation: each starts with the last token of the one before, the last may be short.

    Since nothing predicts the first token of a block, every token but the very first is predicted once.

    Returns:
        (blocks,) tokens of each block, 2 to `length`, and (sum of them,) the blocks one behind the other.
    """
    predicted = len(tokens) - 1
    if predicted < 1:
        return np.empty(0, np.int64), np.empty(0, np.int32)
    blocks = -(-predicted // (length - 1))
    positions = np.arange(blocks)[:, None] * (length - 1) + np.arange(length)
    within = positions < len(tokens)
    return within.sum(axis=1), tokens[positions[within]]
