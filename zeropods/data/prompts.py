"""What a model reads for a question: the two prompts of text-to-SQL, and SQuAD's."""

from __future__ import annotations

from collections.abc import Sequence

# The two prompts: what the model reads for a question about a table.

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


# What a causal model reads for a SQuAD question, and the answer in what it writes.

QUESTION, CONTEXT, ANSWER = "Question: ", " Context: ", " Answer:"


def squad_prompt(question: str, context: str) -> str:
    """The text that the model goes on from; an answer follows after a space.

    Line breaks inside a context stay: the first one that the model writes ends its answer.
    """
    return f"{QUESTION}{question.strip()}{CONTEXT}{context.strip()}{ANSWER}"


def answer_in(generated: str) -> str:
    """The answer in the text that a model wrote after a prompt: its first line, without spaces around it."""
    return generated.strip().partition("\n")[0].strip()
