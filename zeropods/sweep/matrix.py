"""A matrix of runs: strict reading from YAML, its cells, and checks that find mistakes before
anything starts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
)

from zeropods import files, techniques
from zeropods.errors import UserError
from zeropods.plan.known_models import tiny_name
from zeropods.tasks import TEXT2SQL, task_with_prompt
from zeropods.train.flags import (
    PASSES,
    ROWS,
    SCRIPTS,
    TextToSQLArguments,
    arguments_of,
    batch_on,
)

AXES = ("model", "technique", "pods", "prompt")
DEFAULT_SCRIPT = TextToSQLArguments.script
ALL_OTHERS = "*"
"""Key that stands for every model or prompt that is not named."""
GENERATED_DATA = "sample"
"""Name of the raw data that are generated."""
TINY_SCALE_STEPS = 3
"""Optimizer steps of each run at tiny scale."""
TINY_SCALE_EXAMPLES = 300
"""Examples of each split at tiny scale."""
TINY_SCALE_QUESTIONS = 8
"""Most questions at tiny scale."""
EFFECTIVE_BATCH_SIZE = "effective_batch_size"
"""Key among the flags of a matrix that is divided among the processes of a cell."""
SET_BY_MATRIX = {
    "model_id": "is the model axis",
    "model_name_or_path": "is the model axis",
    "dataset_path": "is a key of its own, beside flags",
    "data": "is a key of its own, beside flags",
    "tokenizer_name": "is a key of its own, beside flags",
    **dict.fromkeys(techniques.flags_of_techniques(), "follows from the technique axis"),
    "task": "is the prompt axis",
    "outputdir": "follows from --out",
    "local_rank": "is given by the launcher",
}
"""Flags that a matrix sets itself, and where each of them comes from."""

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One combination of the axes: what is compared."""

    model: str
    technique: str
    pods: int
    prompt: str

    @property
    def name(self) -> str:
        """Name of the cell's folder: `t5-tiny-zero1-3-pods-schema`."""
        pods = "1-pod" if self.pods == 1 else f"{self.pods}-pods"
        return f"{Path(self.model).name}-{self.technique}-{pods}-{self.prompt}"

    @property
    def is_one_process(self) -> bool:
        """Whether the cell runs in one process on this machine, without pods."""
        return techniques.technique_named(self.technique).is_alone


# The keys of a file, each with its type. A value of another type is refused, and its place is
# reported.


def _as_list(value: object) -> object:
    """A list of one value, for an axis whose single value is written without a list."""
    if isinstance(value, list | tuple):
        return value
    return [value]


def _checked_flags(value: object) -> dict[str, object]:
    """Flags with plain values; those without a value are left out."""
    if not isinstance(value, dict):
        raise ValueError("expected flags of the script with values, like max_steps: 30")
    flags: dict[str, object] = {}
    for name, flag_value in value.items():
        is_plain = isinstance(flag_value, str | int | float | bool | None)
        if not isinstance(name, str) or not is_plain:
            raise ValueError(f"{name}: expected text, a number, true or false")
        if flag_value is not None:
            flags[name] = flag_value
    return flags


def _as_mapping(value: object) -> object:
    """A mapping of a text that is given alone, and so stands for every model or prompt."""
    if isinstance(value, str):
        return {ALL_OTHERS: value}
    return value


Text = Annotated[StrictStr, Field(pattern=r"\S")]
Count = Annotated[StrictInt, Field(ge=1)]
Axis = Annotated[tuple[Value, ...], BeforeValidator(_as_list), Field(min_length=1)]
Flags = Annotated[Mapping[str, Any], BeforeValidator(_checked_flags)]
TextByName = Annotated[Mapping[Text, Text], BeforeValidator(_as_mapping)]


class Axes(BaseModel):
    """Values by axis, for a whole matrix or a part of it; empty where an axis is not named."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    model: Axis[Text] = ()
    technique: Axis[Text] = ()
    pods: Axis[Count] = ()
    prompt: Axis[Text] = ()

    @property
    def values(self) -> dict[str, tuple[Any, ...]]:
        """The values of the axes that are named."""
        return {axis: getattr(self, axis) for axis in AXES if getattr(self, axis)}

    def has(self, cell: Cell) -> bool:
        """Whether a cell has one of the values on each of the named axes."""
        return all(getattr(cell, axis) in values for axis, values in self.values.items())


class MatrixEntry(Axes):
    """A part of a matrix with flags of its own."""

    flags: Flags = {}
    """Flags that override the common ones."""


class Matrix(Axes):
    """The matrix of a file, read and checked. Paths are relative to the working folder, as in the
    script's flags."""

    entries: tuple[MatrixEntry, ...] = Field(default=(), alias="cells", min_length=1)
    """`cells` of the file: each is a matrix of its own, whose axes override the common ones."""
    exclude: tuple[Axes, ...] = ()
    """Values of the cells that are left out."""
    repeats: Count = 1
    seeds: tuple[Annotated[StrictInt, Field(ge=0)], ...] = ()
    """One seed for each repeat; if empty, all repeats use the script's own seed."""
    slots: Count = 1
    """Number of processes per pod."""
    script: Text = DEFAULT_SCRIPT
    data: Text | None = None
    """Raw data, prepared for each model and prompt: a folder, or `sample`, which is generated."""
    limit: Count | None = None
    """Number of examples to use of each split of `data`, from its beginning."""
    copies: Count | None = None
    """text2sql: rows of the split train of `data` for each question; see `zeropods prepare`."""
    tokenizer: TextByName = {}
    """Tokenizer by model, for `data`; the model's own where none is named."""
    dataset_path: TextByName = {}
    """Prepared data set by prompt, instead of `data`."""
    timeout_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)] | None = None
    """Seconds after which a run is ended."""
    questions: Count | None = None
    """Number of test questions that the model of each finished cell (of each repeat, where repeats
    have seeds of their own) answers to be scored; none if not given."""
    link_cells: StrictBool = False
    """text2sql: whether answers compare only with cells that the question quotes; see `zeropods
    predict`."""
    flags: Flags = {}
    """Flags of the script, for all cells. `effective_batch_size` is divided among the processes of
    a cell."""

    @property
    def blocks(self) -> tuple[MatrixEntry, ...]:
        """The entries, never none: for a file without `cells` a single one that overrides
        nothing."""
        return self.entries or (MatrixEntry(),)

    @cached_property
    def combinations(self) -> list[tuple[Cell, Mapping[str, Any]]]:
        """Every cell with its flags, in the order of the file, including impossible and excluded
        cells."""
        combinations: list[tuple[Cell, Mapping[str, Any]]] = []
        for entry in self.blocks:
            flags = {**self.flags, **entry.flags}
            values = self.values_in(entry)
            by_axis = [values.get(axis, ()) for axis in AXES]
            for combination in itertools.product(*by_axis):
                cell = Cell(**dict(zip(AXES, combination, strict=True)))
                combinations.append((cell, flags))
        return combinations

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """Cells that are possible and not excluded, in the order of the file."""
        return tuple(cell for cell, reason in self._included() if reason is None)

    @cached_property
    def left_out(self) -> list[dict[str, str]]:
        """Cells that are impossible and not excluded: for each the `cell` and the `reason`."""
        left_out = []
        for cell, reason in self._included():
            if reason is not None:
                left_out.append({"cell": cell.name, "reason": reason})
        return left_out

    def values_in(self, entry: MatrixEntry) -> dict[str, tuple[Any, ...]]:
        """The values by axis that hold in an entry: its own, and the common ones for the rest."""
        return {**self.values, **entry.values}

    def flags_of(self, cell: Cell) -> Mapping[str, Any]:
        """The common flags, and those of the entry of a cell, which must be one of this matrix."""
        return next(flags for other, flags in self.combinations if other == cell)

    def rows(self, cell: Cell) -> int | None:
        """Rows per process and forward pass that give a cell the effective batch size; None where
        that is not given.

        Raises:
            UserError: the effective batch size does not divide.
        """
        flags = self.flags_of(cell)
        effective = flags.get(EFFECTIVE_BATCH_SIZE)
        if effective is None:
            return None
        passes = int(flags.get(PASSES, 1))
        processes = 1 if cell.is_one_process else cell.pods * self.slots
        batch = batch_on(passes * processes, effective, effective)
        if batch is None:
            raise UserError(
                f"flags.{EFFECTIVE_BATCH_SIZE}: {effective} rows cannot be divided evenly among "
                f"{processes} processes x {passes} passes of {cell.name}; "
                f"give a multiple of {passes * processes}, or exclude the cell"
            )
        return batch.rows

    def to_json(self) -> dict[str, object]:
        """The document from which this matrix can be read: `matrix_of(matrix.to_json())` equals
        it."""
        document = self.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        always = {"script": self.script, "repeats": self.repeats, "slots": self.slots}
        return {**always, **document}

    def _included(self) -> Iterator[tuple[Cell, str | None]]:
        """Cells that are not excluded, each with the reason why it is impossible, or None."""
        for cell, _ in self.combinations:
            is_excluded = any(part.has(cell) for part in self.exclude)
            if not is_excluded:
                yield cell, self._why_impossible(cell)

    def _why_impossible(self, cell: Cell) -> str | None:
        """The reason why a cell is impossible, or None."""
        if cell.is_one_process and cell.pods > 1:
            return "none is one process; on several pods ddp is the baseline"
        technique = techniques.technique_named(cell.technique)
        if technique.engine == techniques.DDP and cell.pods * self.slots == 1:
            return "ddp with a single process is the same as technique none"
        if technique.least_slots > self.slots:
            return f"{cell.technique} divides nothing on pods of 1 slot; give slots: 2 or more"
        return None


# Reading and writing.


class _Loader(yaml.SafeLoader):
    """A loader that refuses a key that occurs twice in a mapping; PyYAML's own silently takes the
    last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names: list[object] = []
        for key, _ in node.value:
            if key.value in names:
                problem = f"{key.value} occurs twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            names.append(key.value)
        return super().construct_mapping(node, deep)


def read_matrix(path: Path) -> Matrix:
    """The matrix of a YAML file; `UserError` names the file, the key and the value, or the line."""
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (FileNotFoundError, IsADirectoryError):
        reason = files.no_file(path)
        raise UserError(f"{path}: {reason}; expected a matrix like matrices/demo.yaml") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{path}: line {line}: {error.problem}; correct the YAML") from None
    except (yaml.YAMLError, ValueError) as error:
        problem = " ".join(str(error).split())
        raise UserError(f"{path}: {problem}; correct the YAML") from None
    if not isinstance(document, dict):
        raise UserError(f"{path}: not a mapping; expected keys with values, like repeats: 2")
    return matrix_of(document, str(path))


def matrix_of(document: Mapping[str, Any], place: str) -> Matrix:
    """The matrix of a document; `UserError` names the first fault.

    Args:
        document: the keys of a matrix file.
        place: where the document came from, for messages.
    """
    try:
        matrix = Matrix.model_validate(document)
    except ValidationError as error:
        raise UserError(f"{place}: {_first_fault(error)}") from None
    if not matrix.prompt:
        # Where the file names no prompt, it is the script's default, the first that it knows.
        default_prompt = _prompts_of(matrix)[:1]
        matrix = matrix.model_copy(update={"prompt": default_prompt})
    first_fault = next(_faults(matrix), None)
    if first_fault is not None:
        raise UserError(f"{place}: {first_fault}")
    return matrix


def write_matrix(matrix: Matrix, path: Path) -> None:
    """Write a matrix so that reading the file gives an equal one."""
    text = yaml.safe_dump(matrix.to_json(), sort_keys=False, allow_unicode=True)
    files.write_text(path, text)


def at_tiny_scale(matrix: Matrix, place: str) -> Matrix:
    """The same cells as a trial that takes minutes on any machine; `place` is where the matrix came
    from.

    Our tiny models with random weights replace the models, and `TINY_SCALE_EXAMPLES` generated
    examples replace the data; runs have `TINY_SCALE_STEPS` steps and answer `TINY_SCALE_QUESTIONS`
    questions at most. Everything else stays.

    Raises:
        UserError: the script is not ours, a model's shape is unknown, or one tiny model would
            replace two models.
    """
    kind = arguments_of(matrix.script)
    if kind is None:
        scripts = ", ".join(SCRIPTS)
        raise UserError(f"{place}: script {matrix.script}: --scale is for {scripts}")
    tiny_flags = {
        "init": "random",
        kind.names_here["max_steps"]: TINY_SCALE_STEPS,
        "logging_steps": 1,
        "threads": 1,
    }
    document: dict[str, Any] = {**matrix.to_json()}
    # Both are about the data and the models that are replaced.
    document.pop("dataset_path", None)
    document.pop("tokenizer", None)
    for part in (document, *document.get("cells", ()), *document.get("exclude", ())):
        if "model" in part:
            part["model"] = [tiny_name(model) for model in part["model"]]
    for part in document.get("cells", ()):
        entry_flags = part.get("flags", {})
        for name, value in tiny_flags.items():
            # A flag that an entry sets itself would win over the common one.
            if name in entry_flags:
                entry_flags[name] = value
    if matrix.questions is not None:
        document["questions"] = min(matrix.questions, TINY_SCALE_QUESTIONS)
    document["data"] = GENERATED_DATA
    document["limit"] = TINY_SCALE_EXAMPLES
    document["flags"] = {**matrix.flags, **tiny_flags}
    return matrix_of(document, f"{place} --scale tiny")


# A fault of one key, in words.


def _first_fault(error: ValidationError) -> str:
    """The first fault that the types of the keys have shown: the key, its value and what was
    expected."""
    details = error.errors()[0]
    location = details["loc"]
    key = _written_key(location)
    if details["type"] == "extra_forbidden":
        return f"{key}: no such key; {_known_key_like(str(location[-1]))}"
    expectation = details["msg"].removeprefix("Value error, ")
    expectation = expectation.replace("Input should be", "expected").replace("should", "must")
    return f"{key}: {details['input']!r:.60}; {expectation}"


def _written_key(location: tuple[int | str, ...]) -> str:
    """A key as people write it, with places counted from 1: `cells[1].pods`."""
    written = ""
    for part in location:
        if isinstance(part, int):
            written += f"[{part + 1}]"
        else:
            written += f".{part}"
    return written.lstrip(".")


def _known_key_like(name: str) -> str:
    """The known key that is most like an unknown one, as a question: `repeats?`; where none is like
    it, all known keys."""
    keys = [field.alias or field_name for field_name, field in Matrix.model_fields.items()]
    near = get_close_matches(name, keys, 1)
    if near:
        return f"{near[0]}?"
    return f"known keys are {', '.join(keys)}"


# Checks of a matrix as a whole. Each yields a message for every fault, of which the first is
# reported. Whether the script takes the flags, and a model exists, is checked with the runs.


def _faults(matrix: Matrix) -> Iterator[str]:
    # Values come first: a cell of an unknown technique cannot be made, and later checks make them.
    yield from _unknown_values(matrix)
    yield from _missing_axes(matrix)
    yield from _exclusions_of_nothing(matrix)
    if not matrix.cells:
        reason = "exclude leaves out all of them"
        if matrix.left_out:
            reason = matrix.left_out[0]["reason"]
        yield f"technique: no cell is left: {reason}"
    names = [cell.name for cell in matrix.cells]
    for name in names:
        if names.count(name) > 1:
            yield f"cells: {name} occurs twice; leave one of them out"
    if matrix.seeds and len(matrix.seeds) != matrix.repeats:
        yield f"seeds: {len(matrix.seeds)} for {matrix.repeats} repeats; give one for each"
    yield from _flag_faults("flags", matrix.flags, is_seeded=bool(matrix.seeds))
    for number, entry in enumerate(matrix.entries, 1):
        if entry.flags:
            flags = {**matrix.flags, **entry.flags}
            yield from _flag_faults(f"cells[{number}].flags", flags, is_seeded=bool(matrix.seeds))
    yield from _undivided_batches(matrix)
    yield from _data_faults(matrix)


def _prompts_of(matrix: Matrix) -> tuple[str, ...]:
    """The prompts that the script knows, its default first; for a script that is not ours, those
    of `DEFAULT_SCRIPT`."""
    kind = arguments_of(matrix.script) or SCRIPTS[DEFAULT_SCRIPT]
    return kind.prompts


def _unknown_values(matrix: Matrix) -> Iterator[str]:
    known_values = {"technique": techniques.NAMES, "prompt": sorted(_prompts_of(matrix))}
    for axis, known in known_values.items():
        for part in (matrix, *matrix.entries, *matrix.exclude):
            for value in getattr(part, axis):
                if value not in known:
                    yield f"{axis}: {value!r}; expected one of {', '.join(known)}"


def _missing_axes(matrix: Matrix) -> Iterator[str]:
    for entry in matrix.blocks:
        values = matrix.values_in(entry)
        for axis in AXES:
            if axis not in values:
                yield f"{axis}: is missing; give at least one value"


def _exclusions_of_nothing(matrix: Matrix) -> Iterator[str]:
    for number, part in enumerate(matrix.exclude, 1):
        if any(part.has(cell) for cell, _ in matrix.combinations):
            continue
        shown = []
        for axis, values in part.values.items():
            shown.append(f"{axis} {'/'.join(map(str, values))}")
        place = f"exclude[{number}]: {', '.join(shown)}"
        yield f"{place}: there is no such cell; correct it, or leave it out"


def _flag_faults(place: str, flags: Mapping[str, Any], *, is_seeded: bool) -> Iterator[str]:
    if is_seeded and "seed" in flags:
        yield f"{place}.seed: contradicts seeds; leave one of them out"
    for name in (EFFECTIVE_BATCH_SIZE, PASSES):
        value = flags.get(name, 1)
        if type(value) is not int or value < 1:
            yield f"{place}.{name}: {value!r}; expected a whole number, at least 1"
    if EFFECTIVE_BATCH_SIZE in flags and ROWS in flags:
        yield f"{place}.{ROWS}: follows from {EFFECTIVE_BATCH_SIZE}; leave one of them out"
    for name in flags:
        if name in SET_BY_MATRIX:
            yield f"{place}.{name}: {SET_BY_MATRIX[name]}; leave it out"


def _undivided_batches(matrix: Matrix) -> Iterator[str]:
    try:
        for cell in matrix.cells:
            matrix.rows(cell)
    except UserError as error:
        yield str(error)


def _data_faults(matrix: Matrix) -> Iterator[str]:
    """Faults of the keys that say which data the runs train on, and what they answer afterwards."""
    has_raw_data = matrix.data is not None
    is_ours = arguments_of(matrix.script) is not None
    if is_ours and not has_raw_data and not matrix.dataset_path:
        yield "data: is missing; name a folder with raw data, or a prepared one by dataset_path"
    yield from _question_faults(matrix)
    if has_raw_data and matrix.dataset_path:
        yield f"dataset_path: contradicts data {matrix.data!r}; leave one of them out"
    for key in ("tokenizer", "limit", "copies"):
        if getattr(matrix, key) and not has_raw_data:
            yield f"{key}: is for data that is to be prepared; give data, or leave it out"
    models = {cell.model for cell in matrix.cells}
    prompts = {cell.prompt for cell in matrix.cells}
    yield from _names_without_cells("tokenizer", matrix.tokenizer, models)
    yield from _names_without_cells("dataset_path", matrix.dataset_path, prompts)
    yield from _prepared_set_faults(matrix.dataset_path, sorted(prompts))


def _question_faults(matrix: Matrix) -> Iterator[str]:
    """Faults of `questions`, and of `link_cells`, which is for questions only."""
    if matrix.questions is None:
        if matrix.link_cells:
            yield "link_cells: true; no questions are answered; give questions, or leave it out"
        return
    prompts = [cell.prompt for cell in matrix.cells]
    without_answers = [prompt for prompt in prompts if not task_with_prompt(prompt).has_answers]
    silent_runs = None
    if arguments_of(matrix.script) is None:
        silent_runs = f"of {matrix.script}"
    elif without_answers:
        silent_runs = f"with prompt {without_answers[0]}"
    if silent_runs is not None:
        reason = f"runs {silent_runs} answer none, so nothing can be scored"
        yield f"questions: {matrix.questions}; {reason}; leave it out"
    tasks = {task_with_prompt(prompt).name for prompt in prompts}
    if matrix.link_cells and tasks != {TEXT2SQL}:
        yield f"link_cells: true; is for {TEXT2SQL}, whose tables have cells; leave it out"


def _names_without_cells(key: str, texts: Mapping[str, str], known: set[str]) -> Iterator[str]:
    """Faults of a mapping by model or prompt: names that no cell has."""
    for name in texts:
        if name != ALL_OTHERS and name not in known:
            yield f"{key}.{name}: no cell of this matrix has it; correct it, or leave it out"


def _prepared_set_faults(paths: Mapping[str, str], prompts: Sequence[str]) -> Iterator[str]:
    """Faults of the prepared data sets that are named by prompt."""
    if ALL_OTHERS in paths:
        if len(prompts) > 1:
            shown = ", ".join(prompts)
            yield f"dataset_path: one data set for several prompts ({shown}); give one for each"
    elif paths:
        for prompt in prompts:
            if prompt not in paths:
                remedy = "name the set that was prepared with that prompt"
                yield f"dataset_path.{prompt}: is missing; {remedy}"
