"""WikiSQL's questions in the layout of the Hugging Face hub, as the package `datasets` leaves them on disk."""

import json
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from zeropods.data.wikisql import Example
from zeropods.sql.query import format_query


def hub_row(example: Example) -> dict[str, Any]:
    """An example as a row of the hub's `wikisql`."""
    table = example.table
    conds = example.query.conds
    return {
        "phase": 2,
        "question": example.question,
        "table": {
            "header": list(table.header), "page_title": f"Page of {table.id}", "page_id": "",
            "types": list(table.types), "id": table.id, "section_title": "", "caption": "",
            "rows": [[str(cell) for cell in row] for row in table.rows], "name": f"table_{table.id}",
        },
        "sql": {
            "human_readable": format_query(example.query, table.header), "sel": example.query.sel,
            "agg": example.query.agg,
            "conds": {
                "column_index": [condition.column for condition in conds],
                "operator_index": [condition.operator for condition in conds],
                "condition": [condition.value for condition in conds],
            },
        },
    }  # fmt: skip


def as_json(rows: list[dict[str, Any]], path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def as_parquet(rows: list[dict[str, Any]], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def as_arrow(rows: list[dict[str, Any]], path: Path) -> None:
    """As `save_to_disk` writes it: Arrow's stream format."""
    path.parent.mkdir(parents=True)
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_stream(path, table.schema) as stream:
        stream.write_table(table, max_chunksize=7)
