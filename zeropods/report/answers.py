"""Answers in sentences to the four questions that runs are made for: does it fit, with what, how long, how good."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from zeropods.evaluate.score_json import NEAR_ZERO, NOT_TRAINED
from zeropods.measure.intervals import ratio_interval
from zeropods.report.columns import inference_text
from zeropods.report.formulas import DEVICE_USED, Values, is_done
from zeropods.report.groups import base_order
from zeropods.tables import GIB, MIB, counted, digits, markdown_text

QUESTIONS = ("Does it fit?", "Which technique?", "How long, and at what cost?", "Is the model still good?")
LINES = "white-space: pre-line"
"""CSS that keeps line breaks, so that each model has a line of its own."""
ONE_BELOW = "float: none; width: auto;"
"""CSS against the column that notebooks give to the questions: a fifth of the page, too narrow for a long word."""
UNKNOWN = "No run left a record, so nothing is known yet."
NO_PRICE = "zeropods summary --price-per-hour adds the cost."
NO_DURATION = "The cost is unknown: no run was timed from start to end, and a resumed run cannot be."
SHOWN_MODELS = 3
NOTABLE = 0.02
"""Share of a size below which a difference is not worth mentioning."""
SHOWN_NAMES = 4
"""Number of rows that one sentence names; the others are counted."""


@dataclass(frozen=True)
class Answers:
    """The questions and their answers, shown as text on a terminal and as a list in a notebook."""

    by_question: Mapping[str, str]
    """Each question with its answer; all questions as one key where they share one answer."""

    def to_json(self) -> list[dict[str, str]]:
        """Each question with its answer."""
        return [{"question": each, "answer": self.by_question.get(each, UNKNOWN)} for each in QUESTIONS]

    def to_markdown(self) -> str:
        """A Markdown list with one item for each question and its answer."""
        return "".join(f"- **{question}** {markdown_text(text)}\n" for question, text in self.by_question.items())

    def _repr_html_(self) -> str:
        items = (
            f"<dt style='{ONE_BELOW}'>{question}</dt><dd style='{ONE_BELOW} {LINES}'>{escape(text)}</dd>"
            for question, text in self.by_question.items()
        )
        return f"<dl>{''.join(items)}</dl>"

    def __repr__(self) -> str:
        return "\n".join(f"{question} {text}" for question, text in self.by_question.items())


def answers(lines: Sequence[Values]) -> Answers:
    """The answers that the rows of a summary give; of several models, each of the first three has its own sentences.

    Args:
        lines: rows in the form that tables take.
    """
    models: dict[tuple[str, str], list[Values]] = {}
    for line in lines:
        if line["technique"] is not None:
            models.setdefault((line["model_id"], line["task"]), []).append(line)
    if not models:
        return Answers({" ".join(QUESTIONS): UNKNOWN})
    tasks = Counter(model for model, _ in models)
    told: list[list[str]] = [[] for _ in QUESTIONS]
    for (model, task), rows in list(models.items())[:SHOWN_MODELS]:
        subject, name = Subject(rows), model.rsplit("/", 1)[-1] + (f" on {task}" if tasks[model] > 1 else "")
        alone, begin = (f"{model} ", "") if len(models) == 1 else ("", f"{name}: ")
        sentences = (alone + subject.fits(), subject.techniques(), subject.time_and_cost(), subject.accuracy())
        for answer, sentence in zip(told, sentences, strict=True):
            answer.append(begin + sentence)
    more = len(models) - SHOWN_MODELS
    for answer in told if more > 0 else []:
        answer.append(f"See the tables for {more} more models.")
    if all(line["cost"] is None for line in lines):
        told[2].append(NO_PRICE if any(line["duration_seconds"] is not None for line in lines) else NO_DURATION)
    return Answers(dict(zip(QUESTIONS, map("\n".join, told), strict=True)))


class Subject:
    """The rows of one model on one task."""

    def __init__(self, rows: Sequence[Values]) -> None:
        self.rows = rows
        # The answers are about the rows that are compared with each other; where there are none, about all rows.
        self.about = [row for row in rows if row["is_compared"]] or list(rows)
        self.alone = [row for row in rows if row not in self.about]
        # The figures of a done row come from runs that ended well; some done rows have a ratio over a base.
        self.done = [row for row in self.about if is_done(row["status"])]
        self.comparable = [row for row in self.done if row["is_compared"] and row["base"] is not None]
        self.base = next((row for row in self.comparable if row["row"] == row["base"]), None)
        self.fastest = max(self.comparable, key=lambda row: row["samples_per_second"], default=None)
        # The rows that need the least memory for the model and what training adds to it, within 2 %.
        sized = [row for row in self.comparable if row["measured_bytes"]]
        is_of_one_kind = len({row["planned_kind"] for row in sized}) == 1
        self.smallest = _alike(sized, "measured_bytes", min) if is_of_one_kind else []

    def fits(self) -> str:
        """What fits, where, and how much memory it took."""
        told = []
        if self.done:
            where = next((f" on {row['hardware']}" for row in self.done if row["hardware"]), "")
            some = f"{len(self.done)} of " if len(self.done) < len(self.about) else ""
            told.append(f"trained in {some}{counted(len(self.about), 'way')}{where}.")
            sized = [row for row in self.done if row["peak_memory_bytes"]]
            kinds = {row["memory_kind"] for row in sized}
            if len(kinds) == 1:
                told.append(f"The fullest pod took {_span(sized, 'peak_memory_bytes', GIB, 'GiB')} {kinds.pop()}.")
            live = [row for row in self.done if row["measured_bytes"] and row["planned_kind"] != DEVICE_USED]
            if live:
                states = _span(live, "measured_bytes", MIB, "MiB")
                told.append(f"Parameters, gradients and optimizer states took {states} per process.")
        else:
            told.append(f"did not finish training: {_names(self.about)} ended with another status.")
        full = [row for row in self.about if "oom" in row["status"]]
        if full:
            told.append(f"{_names(full)} ran out of memory.")
        if self.alone:
            told.append(f"Not compared with {'these' if len(self.about) > 1 else 'it'}: {_names(self.alone)}.")
        return " ".join(told)

    def techniques(self) -> str:
        """The fastest and the smallest row against the base, with the interval of the ratio where there is one; and the
        rows that may be as fast as the fastest, since the interval of their ratio contains 1."""
        base, fastest = self.base, self.fastest
        if base is None or fastest is None or len(self.comparable) < 2:
            return "No two rows differ only in technique and pods, so their speeds are not compared."
        told = [f"Nothing is faster than {base['short_label']}."]
        if fastest is not base:
            times = f"{_ratio(fastest)} times the samples/s of {base['short_label']}"
            told = [f"Fastest is {fastest['short_label']}, with {times}."]
        rates = "samples_per_second_values"
        others = [(row, ratio_interval(row[rates], fastest[rates])) for row in self.comparable if row is not fastest]
        equal = [row for row, interval in others if interval is not None and interval[1] >= 1]
        if equal:
            told.append(f"It cannot be told apart from {_names(equal)}.")
        if any(interval is None for _, interval in others):
            told.append("Fewer than three repeats cannot tell a small difference from chance.")
        if self.smallest and base["measured_bytes"] is not None:
            told.append(self._smallest(base))
        return " ".join(told)

    def _smallest(self, base: Values) -> str:
        smallest = self.smallest
        share, kind = smallest[0]["measured_bytes"] / base["measured_bytes"], smallest[0]["planned_kind"]
        what = "memory of each GPU" if kind == DEVICE_USED else "parameters, gradients and optimizer states"
        if share > 1 - NOTABLE:
            return f"None is notably smaller in {what} than {base['short_label']}."
        begin = f"Smallest is {_names(smallest)}" if len(smallest) == 1 else f"Smallest are {_names(smallest)} alike"
        speeds = f", at {', '.join(map(_ratio, smallest))} times its speed" if len(smallest) <= SHOWN_NAMES else ""
        return f"{begin}: {share:.0%} of the {what} of {base['short_label']}{speeds}."

    def time_and_cost(self) -> str:
        """Times of the fastest, the smallest and the base row, with their cost where there is a price; and the longest
        time among the rows that are not compared."""
        chosen = [row for row in (self.fastest, *self.smallest[:1], self.base) if row is not None] or self.done
        timed = list({row["row"]: row for row in chosen if row["train_seconds"]}.values())[:SHOWN_NAMES]
        alone = [row for row in self.alone if is_done(row["status"]) and row["train_seconds"]]
        told = [f"{'; '.join(map(_time, timed))}."] if timed else []
        if alone:
            told.append(f"In addition, {_time(max(alone, key=lambda row: row['train_seconds']))}.")
        return " ".join(told) or "No run was timed."

    def accuracy(self) -> str:
        """The score of the row with the fewest processes, and which rows differ from it by more than chance."""
        rows = self.done if any(row["inference_result"] is not None for row in self.done) else self.rows
        scored = [row for row in rows if is_done(row["status"]) and row["inference_result"] is not None]
        if not scored:
            return "No score can be shown; create one with zeropods predict and zeropods score."
        base = min(scored, key=base_order)
        told = [f"{base['short_label']} reaches {inference_text(base)}."]
        same = [row for row in scored if all(row[key] == base[key] for key in ("inference_kind", "split"))]
        others = [row for row in same if row is not base]
        apart = [row for row in others if _is_apart(row, base)]
        if _is_near_zero(base):
            told.append(f"{NOT_TRAINED[0].upper()}{NOT_TRAINED[1:]}.")
        if apart:
            shown = ", ".join(f"{row['short_label']} {row['inference_result']:.3f}" for row in apart[:SHOWN_NAMES])
            told.append(f"{shown} {'differs' if len(apart) == 1 else 'differ'} from it by more than chance.")
        elif others and not _is_near_zero(base):
            told.append(
                f"{_names(others)} {'differs' if len(others) == 1 else 'differ'} from it by no more than chance."
            )
        unscored = [row for row in self.done if row["inference_result"] is None]
        if unscored:
            told.append(f"Not scored: {_names(unscored)}.")
        return " ".join(told)


def _time(row: Values) -> str:
    whole = "" if row["duration_seconds"] is None else f", {row['duration_seconds']:,.0f} s from start to end"
    cost = "" if row["cost"] is None else f", which costs {digits(row['cost'])}"
    steps = counted(round(row["steps"]), "step")
    return f"{row['short_label']} trained {steps} in {row['train_seconds']:,.1f} s{whole}{cost}"


def _ratio(row: Values) -> str:
    ends = row["speed_up_interval"]
    return f"{row['speed_up']:.2f}{f' [{ends[0]:.2f}, {ends[1]:.2f}]' if ends else ''}"


def _is_near_zero(row: Values) -> bool:
    """Whether a row's answers are so rarely right that its model has not learned its task; a text has no answers."""
    return bool(row["inference_kind"] != "perplexity" and row["inference_result"] < NEAR_ZERO)


def _is_apart(row: Values, base: Values) -> bool:
    """Whether the 95 % intervals of two scores do not overlap; a score without an interval is compared as it is."""
    spans = [each["inference_result_interval"] or [each["inference_result"]] * 2 for each in (row, base)]
    return bool(spans[0][0] > spans[1][1] or spans[0][1] < spans[1][0])


def _names(rows: Sequence[Values]) -> str:
    """The labels of rows, `A none x1, B zero1 x2 and C ddp x3`; of many rows, the first ones and how many more."""
    more = len(rows) - SHOWN_NAMES
    shown = [row["short_label"] for row in rows[:SHOWN_NAMES]] + ([f"{more} more"] if more > 0 else [])
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def _alike(rows: Sequence[Values], key: str, choose: Callable[..., float]) -> list[Values]:
    """The row with the smallest or largest value of a size, and the rows whose value is not notably different."""
    size = choose((row[key] for row in rows), default=0.0)
    return [row for row in rows if abs(row[key] - size) <= NOTABLE * size]


def _span(rows: Sequence[Values], key: str, unit: int, name: str) -> str:
    """The smallest and the largest value of a size, and the rows that have them where they differ notably."""
    least, most = (_alike(rows, key, choose) for choose in (min, max))
    low, high = (f"{digits(choose(row[key] for row in rows) / unit)} {name}" for choose in (min, max))
    if low == high or any(row in most for row in least):
        return low if low == high else f"{low.removesuffix(f' {name}')} to {high}"
    return f"{low} ({_names(least)}) to {high} ({_names(most)})"
