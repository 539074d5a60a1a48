"""A report's documents as text, and as files that appear together."""

from __future__ import annotations

import csv
import io
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zeropods.data.writing import writing
from zeropods.report.table import markdown_text


def json_text(document: dict[str, Any]) -> str:
    """JSON with each item of a list on a line of its own: Python indents a tenth as fast as it writes."""

    def written(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)

    def part(value: Any) -> str:
        return "[\n" + ",\n".join(map(written, value)) + "\n]" if isinstance(value, list) and value else written(value)

    return "{\n" + ",\n".join(f"{written(key)}: {part(value)}" for key, value in document.items()) + "\n}\n"


def csv_text(lines: Sequence[Mapping[str, Any]]) -> str:
    """Values by name, a line each; None is empty, a list its items with spaces between them."""
    text = io.StringIO()
    header = dict.fromkeys(key for line in lines for key in line)
    writer = csv.DictWriter(text, list(header), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _cell(value) for key, value in line.items()} for line in lines)
    return text.getvalue()


def markdown_list(title: str, items: Sequence[str]) -> str:
    """A line and its items; nothing where there are none."""
    return f"{title}\n\n" + "".join(f"- {markdown_text(item)}\n" for item in items) if items else ""


def write_files(out: Path, files: Mapping[str, bytes]) -> None:
    """Put files into a folder by name: each of them whole, none before all are written."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".summary.") as staging:
        for name, content in files.items():
            with writing(out / name):
                (Path(staging) / name).write_bytes(content)
        for name in files:
            os.replace(Path(staging) / name, out / name)


def _cell(value: Any) -> Any:
    return " ".join(map(str, value)) if isinstance(value, list) else value
