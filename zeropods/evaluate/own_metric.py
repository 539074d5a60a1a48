"""A metric of one's own: one function, in one place, named on the command line.

    # lengths.py
    def short(prediction: str, answers: Sequence[str]) -> float:
        "1 for an answer of at most three words, else 0."
        return float(len(prediction.split()) <= 3)

    zeropods score predictions.dev.jsonl --data squad --split dev --metric lengths:short

It is called once for each example, with the model's text and every right answer (of text-to-SQL: the gold query's
text). The mean of what it returns stands in the score file under the function's name, with its 95 % interval.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from zeropods.errors import UserError
from zeropods.evaluate.interval import Interval, mean_interval

Metric = Callable[[str, Sequence[str]], float]
Answered = tuple[str, Sequence[str]]
"""A prediction and the right answers."""


@dataclass(frozen=True)
class OwnMetric:
    """A metric by its name."""

    name: str
    function: Metric

    def values(self, answered: Sequence[Answered]) -> list[float]:
        """Its value for each example; `UserError` names the first that is no finite number."""
        found = []
        for number, (prediction, answers) in enumerate(answered):
            value = self.function(prediction, answers)
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise UserError(
                    f"--metric {self.name}: {value!r:.60} for prediction {number}, {prediction!r:.40}; "
                    "expected a finite number"
                )
            found.append(float(value))
        return found


def own_metric(named: str) -> OwnMetric:
    """The metric that `module:function` names; modules are also looked for in the working folder.

    Raises:
        UserError: another form, a module that is not there, or no function of that name in it.
    """
    module_name, _, name = named.partition(":")
    if not module_name or not name.isidentifier():
        raise UserError(f"--metric {named!r}; expected module:function, as in lengths:short")
    with _working_folder_first():
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            raise UserError(f"--metric {named}: {error}; expected a module here or in the environment") from None
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"--metric {named}: {module_name} has no function {name}; expected one (prediction, answers)")
    return OwnMetric(name, function)


def own_scores(
    metrics: Sequence[OwnMetric], answered: Sequence[Answered]
) -> tuple[dict[str, float], dict[str, Interval | None]]:
    """Means and their intervals by name; two metrics of one name are refused."""
    names = [metric.name for metric in metrics]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"--metric: two functions are called {twice}; rename one")
    values = {metric.name: metric.values(answered) for metric in metrics}
    means = {name: fmean(of_all) for name, of_all in values.items()}
    return means, {name: mean_interval(of_all) for name, of_all in values.items()}


@contextmanager
def _working_folder_first() -> Iterator[None]:
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
