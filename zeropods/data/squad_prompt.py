"""What a causal model reads for a SQuAD question, and the answer in what it writes."""

from __future__ import annotations

QUESTION, CONTEXT, ANSWER = "Question: ", " Context: ", " Answer:"


def squad_prompt(question: str, context: str) -> str:
    """The text that the model goes on from; an answer follows after a space.

    Line breaks inside a context stay: the first one that the model writes ends its answer.
    """
    return f"{QUESTION}{question.strip()}{CONTEXT}{context.strip()}{ANSWER}"


def answer_in(generated: str) -> str:
    """The answer in the text that a model wrote after a prompt: its first line, without spaces around it."""
    return generated.strip().partition("\n")[0].strip()
