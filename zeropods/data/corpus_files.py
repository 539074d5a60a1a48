"""Documents of a file: an article of WikiText, a text file, a JSON line, or a row of Parquet."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from zeropods.data.articles import articles
from zeropods.data.json_lines import encodable, json_lines
from zeropods.errors import UserError

if TYPE_CHECKING:
    import pyarrow

WIKITEXT = re.compile(r"(wiki\.)?(train|valid|test)\.(txt|tokens|raw)")
WIKITEXT_KINDS = ("*.tokens", "*.raw")
"""Text where WikiText's files are named so, and anything elsewhere."""
BATCH = 1_024


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
            for batch in file.iter_batches(BATCH, columns=[field]):
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
