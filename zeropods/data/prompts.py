"""The two prompts: what the model reads for a question about a table."""

from __future__ import annotations

from collections.abc import Sequence

PROMPTS = ("question", "schema")
MAX_SOURCE_TOKENS = {"question": 96, "schema": 256}
"""`question` is cut where the original recipe cuts; `schema` above WikiSQL's longest (226 tokens)."""
MAX_TARGET_TOKENS = 96


def source_text(prompt: str, question: str, header: Sequence[str], types: Sequence[str]) -> str:
    """The source text of a question.

    `question` is the original recipe. `schema` appends the column names, so that the model need not
    guess them, and marks the numeric ones: a column is text where nothing is said.
    """
    source = f"translate to SQL: {question.strip()}"
    if prompt == "question":
        return source
    return f"{source} columns: {'; '.join(map(_column, header, types))}"


def _column(name: str, type_: str) -> str:
    return f"{name} ({type_})" if type_ == "real" else name
