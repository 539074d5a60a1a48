"""Plain text for the task `lm`: documents of a folder, or of a data set at the hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from zeropods.data.checksum import sha256
from zeropods.data.corpus_files import READERS, kind_of, read_documents
from zeropods.data.corpus_splits import SPLITS, by_split, split_by_hash
from zeropods.errors import UserError


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
    from zeropods.data.corpus_hub import open_hub

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
