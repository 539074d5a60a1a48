"""Answers in sentences to the four questions that runs are made for: does it fit, with what, how
long, how good."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from zeropods.measure.intervals import ratio_interval
from zeropods.measure.score_json import NEAR_ZERO, NOT_TRAINED
from zeropods.report.columns import inference_text
from zeropods.report.formulas import DEVICE_USED
from zeropods.report.groups import base_order
from zeropods.report.row import Row
from zeropods.tables import GIB, MIB, counted, digits, markdown_text, shortened

COST_QUESTION = "How long, and at what cost?"
FOUR_QUESTIONS = ("Does it fit?", "Which technique?", COST_QUESTION, "Is the model still good?")
KEPT_LINE_BREAKS = "white-space: pre-line"
"""CSS that keeps line breaks, so that each model has a line of its own."""
ONE_BELOW = "float: none; width: auto;"
"""CSS against the column that notebooks give to the questions: a fifth of the page, too narrow for
a long word."""
NOTHING_KNOWN = "No run left a record, so nothing is known yet."
NO_PRICE = "zeropods summary --price-per-hour adds the cost."
NO_DURATION = (
    "The cost is unknown: no run was timed from start to end, and a resumed run cannot be."
)
SHOWN_MODELS = 3
"""Maximum number of models, each on one task, that the answers are about."""
NOTABLE = 0.02
"""Share of a size below which a difference is not worth mentioning."""
NAMED_ROWS = 4
"""Number of rows that one sentence names; the others are counted."""


@dataclass(frozen=True)
class Answers:
    """The questions and their answers, shown as text on a terminal and as a list in a notebook."""

    by_question: Mapping[str, str]
    """Each question with its answer; all questions as one key where they share one answer."""

    def to_json(self) -> list[dict[str, str]]:
        """Each question with its answer."""
        document = []
        for question in FOUR_QUESTIONS:
            answer = self.by_question.get(question, NOTHING_KNOWN)
            document.append({"question": question, "answer": answer})
        return document

    def to_markdown(self) -> str:
        """A Markdown list with one item for each question and its answer."""
        items = []
        for question, answer in self.by_question.items():
            items.append(f"- **{question}** {markdown_text(answer)}\n")
        return "".join(items)

    def _repr_html_(self) -> str:
        items = []
        for question, answer in self.by_question.items():
            items.append(f"<dt style='{ONE_BELOW}'>{question}</dt>")
            items.append(f"<dd style='{ONE_BELOW} {KEPT_LINE_BREAKS}'>{escape(answer)}</dd>")
        return f"<dl>{''.join(items)}</dl>"

    def __repr__(self) -> str:
        return "\n".join(f"{question} {answer}" for question, answer in self.by_question.items())


def answers(all_rows: Sequence[Row]) -> Answers:
    """The answers that the rows of a summary give. Where there are several models, each answer has
    a line for each of the first three, and another one says how many more there are.

    Args:
        all_rows: rows with their labels.
    """
    models = _rows_by_model(all_rows)
    if not models:
        return Answers({" ".join(FOUR_QUESTIONS): NOTHING_KNOWN})

    paragraphs: dict[str, list[str]] = {question: [] for question in FOUR_QUESTIONS}
    tasks_of_models = Counter(model for model, _ in models)
    for (model, task), rows in list(models.items())[:SHOWN_MODELS]:
        # The first answer has no subject of its own: `trained in 4 ways`.
        fits, *others = Subject(rows).sentences()
        if len(models) == 1:
            answers_of_model = [f"{model} {fits}", *others]
        else:
            name = model.rsplit("/", 1)[-1]
            if tasks_of_models[model] > 1:
                name = f"{name} on {task}"
            answers_of_model = [f"{name}: {answer}" for answer in (fits, *others)]
        for question, answer in zip(FOUR_QUESTIONS, answers_of_model, strict=True):
            paragraphs[question].append(answer)

    number_left_out = len(models) - SHOWN_MODELS
    if number_left_out > 0:
        for paragraph in paragraphs.values():
            paragraph.append(f"See the tables for {counted(number_left_out, 'more model')}.")
    if all(row.figures.cost is None for row in all_rows):
        paragraphs[COST_QUESTION].append(_why_no_cost(all_rows))
    return Answers({question: "\n".join(paragraph) for question, paragraph in paragraphs.items()})


def _rows_by_model(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """The rows by model and task; a row without a configuration belongs to none."""
    models: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.config is not None:
            models.setdefault((row.config.model_id, row.config.task), []).append(row)
    return models


def _why_no_cost(rows: Sequence[Row]) -> str:
    """Why no row has a cost."""
    has_duration = any(row.figures.duration_seconds is not None for row in rows)
    return NO_PRICE if has_duration else NO_DURATION


class Subject:
    """The rows of one model on one task."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        # The answers are about the rows that are compared with each other; where there are none,
        # about all rows.
        self.about = [row for row in rows if row.is_compared] or list(rows)
        self.not_compared = [row for row in rows if row not in self.about]
        self.done = [row for row in self.about if row.is_done]
        """The rows whose runs ended well."""
        self.comparable = [row for row in self.done if _has_ratio(row)]
        # One as a rule: a summary is about one set of rows for each model and task.
        bases = [row for row in self.comparable if row.letter == row.comparison.base]
        self.base = bases[0] if bases else None
        self.fastest = max(self.comparable, key=lambda row: row.rate, default=None)
        self.smallest = _smallest(self.comparable)
        """The rows that need the least memory, one or more; none where that is not known."""

    def sentences(self) -> list[str]:
        """The answers to the four questions, in their order."""
        return [self.fits(), self.techniques(), self.time_and_cost(), self.accuracy()]

    def fits(self) -> str:
        """What fits, where, and how much memory it took; the first sentence lacks its subject, the
        model."""
        if self.done:
            sentences = [self._ways(), *self._memory()]
        else:
            names = _names(self.about)
            sentences = [f"did not finish training: {names} ended with another status."]
        out_of_memory = []
        without_result = []
        for row in self.rows:
            if "oom" in row.status:
                out_of_memory.append(row)
            elif not row.is_done:
                without_result.append(row)
        if out_of_memory:
            sentences.append(f"{_names(out_of_memory)} ran out of memory.")
        if self.done and without_result:
            sentences.append(f"Without a result: {_names(without_result)}.")
        others = [row for row in self.not_compared if row.is_done]
        if others:
            them = "these" if len(self.about) > 1 else "it"
            sentences.append(f"Other settings, so not compared with {them}: {_names(others)}.")
        return " ".join(sentences)

    def _ways(self) -> str:
        """In how many ways the model was trained, and on which hardware: `trained in 3 of 4 ways on
        NVIDIA H100.`"""
        ways = counted(len(self.about), "way")
        if len(self.done) < len(self.about):
            ways = f"{len(self.done)} of {ways}"
        hardware = next((row.hardware for row in self.done if row.hardware), "")
        where = f" on {hardware}" if hardware else ""
        return f"trained in {ways}{where}."

    def _memory(self) -> list[str]:
        """How much memory pods took, and on CPUs how much of it is parameters, gradients and
        optimizer states; nothing of what was not measured."""
        sentences = []
        sized = [row for row in self.done if row.figures.peak_memory_bytes]
        kinds = {row.figures.memory_kind for row in sized}
        # Sizes of different kinds are not compared.
        if len(kinds) == 1:
            sizes = _span(sized, _peak, GIB, "GiB")
            sentences.append(f"The fullest pod took {sizes} {kinds.pop()}.")
        with_states = []
        for row in self.done:
            # On a GPU what is planned and measured is all memory in use, elsewhere the states
            # alone.
            if row.figures.measured_bytes and row.figures.planned_kind != DEVICE_USED:
                with_states.append(row)
        if with_states:
            states = _span(with_states, _measured, MIB, "MiB")
            sentences.append(
                f"Parameters, gradients and optimizer states took {states} per process."
            )
        return sentences

    def techniques(self) -> str:
        """The fastest and the smallest rows against the base, with the interval of the ratio where
        there is one; and the rows that may be as fast as the fastest, since the interval of their
        rate as a ratio of its rate reaches 1."""
        base = self.base
        fastest = self.fastest
        if base is None or fastest is None or len(self.comparable) < 2:
            return (
                "No two rows differ only in technique and pods, so their speeds are not compared."
            )
        if fastest is base:
            sentences = [f"Nothing is faster than {base.short_label}."]
        else:
            times = f"{_speed_up(fastest)} times the samples/s of {base.short_label}"
            sentences = [f"Fastest is {fastest.short_label}, with {times}."]

        as_fast = []
        has_too_few_repeats = False
        for row in self.comparable:
            if row is fastest:
                continue
            interval = ratio_interval(
                row.samples_per_second_values, fastest.samples_per_second_values
            )
            if interval is None:
                has_too_few_repeats = True
            elif interval[1] >= 1:
                as_fast.append(row)
        if as_fast:
            sentences.append(f"It cannot be told apart from {_names(as_fast)}.")
        if has_too_few_repeats:
            sentences.append("Fewer than three repeats cannot tell a small difference from chance.")

        if self.smallest and base.figures.measured_bytes is not None:
            sentences.append(self._least_memory(base))
        return " ".join(sentences)

    def _least_memory(self, base: Row) -> str:
        """The rows that need the least memory, as a share of the base's; for a subject that has
        such rows, and a base whose memory was measured."""
        smallest = self.smallest
        # Any of them will do: their sizes do not differ notably.
        share = _measured(smallest[0]) / _measured(base)
        memory = "parameters, gradients and optimizer states"
        if smallest[0].figures.planned_kind == DEVICE_USED:
            memory = "memory of each GPU"
        if share > 1 - NOTABLE:
            return f"None is notably smaller in {memory} than {base.short_label}."

        names = _names(smallest)
        beginning = f"Smallest are {names} alike"
        if len(smallest) == 1:
            beginning = f"Smallest is {names}"
        speeds = ""
        # Of more rows not all are named, and nobody could tell whose speed is whose.
        if len(smallest) <= NAMED_ROWS:
            speed_ups = ", ".join(_speed_up(row) for row in smallest)
            speeds = f", at {speed_ups} times its speed"
        return f"{beginning}: {share:.0%} of the {memory} of {base.short_label}{speeds}."

    def time_and_cost(self) -> str:
        """Times of the fastest, the smallest and the base row, or of the first rows that are done
        where there are none of these, with their cost where there is a price; and the longest time
        among the rows that are not compared."""
        chosen = [self.fastest, *self.smallest[:1], self.base]
        rows = [row for row in chosen if row is not None] or self.done
        # By letter, so that a row that was chosen twice is named once.
        timed_by_letter = {row.letter: row for row in rows if row.figures.train_seconds}
        timed = list(timed_by_letter.values())
        sentences = []
        if timed:
            times = [_time(row) for row in timed[:NAMED_ROWS]]
            sentences.append(f"{'; '.join(times)}.")

        others = [row for row in self.not_compared if row.is_done and row.figures.train_seconds]
        if others:
            longest = max(others, key=lambda row: row.figures.train_seconds or 0.0)
            sentences.append(f"In addition, {_time(longest)}.")
        return " ".join(sentences) or "No run was timed."

    def accuracy(self) -> str:
        """The score of the row with the fewest processes, with the rows that have the same, and
        which rows differ from it by more than chance."""
        # Where none of the compared rows was scored, others may have been.
        scored = _scored(self.done) or _scored(self.rows)
        if not scored:
            return "No score can be shown; create one with zeropods predict and zeropods score."
        base = min(scored, key=base_order)
        with_same_score = []
        with_other_score = []
        for row in scored:
            if inference_text(row.accuracy) == inference_text(base.accuracy):
                with_same_score.append(row)
            else:
                with_other_score.append(row)
        sentences = [_reached(base, with_same_score)]
        if _is_near_zero(base):
            # The text begins with a small letter; here it is a sentence.
            sentences.append(f"{NOT_TRAINED[0].upper()}{NOT_TRAINED[1:]}.")
        sentences += _compared_scores(base, with_other_score)
        unscored = [row for row in self.done if row.accuracy.inference_result is None]
        if unscored:
            sentences.append(f"Not scored: {_names(unscored)}.")
        return " ".join(sentences)


def _has_ratio(row: Row) -> bool:
    """Whether a row is compared with a base, maybe itself."""
    return row.is_compared and row.comparison.base is not None


def _smallest(rows: Sequence[Row]) -> list[Row]:
    """The rows that need the least measured memory, which are those within `NOTABLE` of the
    smallest; none where nothing was measured, or memory of different kinds."""
    sized = [row for row in rows if row.figures.measured_bytes]
    kinds = {row.figures.planned_kind for row in sized}
    if len(kinds) != 1:
        return []
    return _near(sized, _measured, min(map(_measured, sized)))


def _time(row: Row) -> str:
    """How many steps a row trained in which time, and what it costs where that is known."""
    steps = counted(round(row.figures.steps or 0), "step")
    text = f"{row.short_label} trained {steps} in {row.figures.train_seconds:,.1f} s"
    if row.figures.duration_seconds is not None:
        text += f", {row.figures.duration_seconds:,.0f} s from start to end"
    if row.figures.cost is not None:
        text += f", which costs {digits(row.figures.cost)}"
    return text


def _speed_up(row: Row) -> str:
    """The ratio of a row's rate to that of its base, with its interval."""
    text = f"{row.comparison.speed_up:.2f}"
    if row.comparison.speed_up_interval:
        low, high = row.comparison.speed_up_interval
        text += f" [{low:.2f}, {high:.2f}]"
    return text


def _scored(rows: Sequence[Row]) -> list[Row]:
    """The rows whose runs ended well and were scored."""
    scored = []
    for row in rows:
        if row.is_done and row.accuracy.inference_result is not None:
            scored.append(row)
    return scored


def _reached(base: Row, rows: Sequence[Row]) -> str:
    """The sentence that says which score some rows have reached.

    Args:
        base: one of the rows.
        rows: rows whose scores read alike.
    """
    measure = base.accuracy.judged_by
    text = inference_text(base.accuracy)
    names = _names(rows)
    is_one = len(rows) == 1
    is_share_of_answers = measure is not None and measure.is_share
    if is_share_of_answers and _result(base) == 0:
        verb = "answers" if is_one else "answer"
        return f"{names} {verb} nothing right: {text}."
    verb = "reaches" if is_one else "reach"
    return f"{names} {verb} {text}."


def _compared_scores(base: Row, rows: Sequence[Row]) -> list[str]:
    """One sentence: which scores differ from the base's by more than chance; where none does, which
    differ by no more than chance. No sentence where there is no score to compare, or all are near
    zero.

    Args:
        rows: the scored rows whose score is not the base's. Those with a score by another measure
            or of another split are left out.
    """
    measure = base.accuracy.judged_by
    others = []
    for row in rows:
        has_same_measure = row.accuracy.judged_by == measure
        if has_same_measure and row.accuracy.split == base.accuracy.split:
            others.append(row)
    apart = [row for row in others if _is_apart(row, base)]
    if measure is not None and apart:
        scores = [f"{row.short_label} {measure.text(_result(row))}" for row in apart]
        shown = ", ".join(scores[:NAMED_ROWS])
        verb = "differs" if len(apart) == 1 else "differ"
        return [f"{shown} {verb} from it by more than chance."]
    # Scores near zero are alike because nothing was learned.
    if others and not _is_near_zero(base):
        verb = "differs" if len(others) == 1 else "differ"
        return [f"{_names(others)} {verb} from it by no more than chance."]
    return []


def _is_near_zero(row: Row) -> bool:
    """Whether a row's answers are so rarely right that its model has not learned its task; a text
    has no answers."""
    measure = row.accuracy.judged_by
    is_share = measure is not None and measure.is_share
    return is_share and _result(row) < NEAR_ZERO


def _result(row: Row) -> float:
    """The figure that the model of a scored row is judged by."""
    # Callers ask only rows that `_scored` has chosen.
    assert row.accuracy.inference_result is not None
    return row.accuracy.inference_result


def _is_apart(row: Row, base: Row) -> bool:
    """Whether the 95 % intervals of two scores do not overlap."""
    low, high = _ends(row)
    base_low, base_high = _ends(base)
    return low > base_high or high < base_low


def _ends(row: Row) -> tuple[float, float]:
    """The ends of a score's interval; the score itself twice where it has none."""
    interval = row.accuracy.inference_result_interval
    if not interval:
        return _result(row), _result(row)
    low, high = interval
    return low, high


def _names(rows: Sequence[Row]) -> str:
    """The labels of rows, `A none x1, B zero1 x2 and C ddp x3`; of many rows, the first ones and
    how many more."""
    names = shortened([row.short_label for row in rows], NAMED_ROWS)
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _peak(row: Row) -> float:
    """Memory of the fullest pod in bytes; 0 where it was not measured."""
    return row.figures.peak_memory_bytes or 0.0


def _measured(row: Row) -> float:
    """The measured memory of a process in bytes; 0 where it was not measured."""
    return row.figures.measured_bytes or 0.0


def _near(rows: Sequence[Row], size_of: Callable[[Row], float], bytes_: float) -> list[Row]:
    """The rows whose size is not notably different from a number of bytes."""
    return [row for row in rows if abs(size_of(row) - bytes_) <= NOTABLE * bytes_]


def _span(rows: Sequence[Row], size_of: Callable[[Row], float], unit: int, name: str) -> str:
    """The smallest and the largest size, and the rows that have them where they differ notably:
    `1.2 GiB (A none x1) to 2.5 GiB (B zero1 x2)`.

    Args:
        rows: one or more.
        size_of: a row's size in bytes.
        unit: number of bytes of the unit in which sizes are written.
        name: name of this unit.
    """
    sizes = [size_of(row) for row in rows]
    low = digits(min(sizes) / unit)
    high = digits(max(sizes) / unit)
    if low == high:
        return f"{low} {name}"
    smallest = _near(rows, size_of, min(sizes))
    largest = _near(rows, size_of, max(sizes))
    are_alike = any(row in largest for row in smallest)
    if are_alike:
        return f"{low} to {high} {name}"
    return f"{low} {name} ({_names(smallest)}) to {high} {name} ({_names(largest)})"
