"""SQuAD's questions and a model's answers to them: what 11 shows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from zeropods.data.squad import SquadExample, read_squad
from zeropods.data.squad_prompt import squad_prompt
from zeropods.evaluate.squad_answers import SquadAnswer, read_answers
from zeropods.evaluate.squad_metrics import exact_match, f1
from zeropods.report.table import Table


def question_table(data: Path, split: str = "train", count: int = 3) -> Table:
    """The first questions of a split: the text that the model reads, and what it shall go on with."""
    return Table.of(
        {"prompt": squad_prompt(example.question, example.context), "answer": example.answers[0]}
        for example in islice(read_squad(data, split), count)
    )


def answered_file(predictions: Path, data: Path, split: str, count: int = 8) -> Table:
    """`answered_table` of a prediction file and the split that it answers."""
    answers = read_answers(predictions)
    return answered_table(answers, list(islice(read_squad(data, split), answers[-1].index + 1)), count)


def answered_table(answers: Sequence[SquadAnswer], examples: Sequence[SquadExample], count: int = 8) -> Table:
    """Question, prediction and expected answer side by side, with exact match and F1.

    Args:
        answers: their `index` names the example that they answer.
        count: how many are shown, taken at even distances.
    """
    by_index = {example.index: example for example in examples}
    chosen = answers[:: max(1, len(answers) // count)][:count]
    return Table.of(_line(answer, by_index[answer.index]) for answer in chosen)


def _line(answer: SquadAnswer, example: SquadExample) -> dict[str, str]:
    return {
        "question": example.question,
        "prediction": answer.text or "(nothing)",
        "expected": " | ".join(dict.fromkeys(example.answers)),
        "exact match": "yes" if exact_match(answer.text, example.answers) else "no",
        "F1": f"{f1(answer.text, example.answers):.2f}",
    }
