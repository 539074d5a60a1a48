"""A matrix of runs: strict reading from YAML, its cells, and checks that find mistakes before anything starts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictInt, StrictStr, ValidationError

from zeropods import files, techniques
from zeropods.errors import UserError
from zeropods.evaluate.score_json import LM
from zeropods.plan.known_models import tiny_name
from zeropods.train.arguments import SCRIPTS, TextToSQLArguments, arguments_of, batch_on

AXES = ("model", "technique", "pods", "prompt")
SCRIPT = TextToSQLArguments.script
EACH = "*"
"""Key that stands for every model or prompt that is not named."""
SAMPLE = "sample"
"""Name of the raw data that are generated."""
TINY_STEPS, TINY_EXAMPLES, TINY_QUESTIONS = 3, 300, 8
"""Optimizer steps of each run, examples of each split, and most questions, at tiny scale."""
EFFECTIVE, ROWS, PASSES = "effective_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps"
SET_BY = {
    **dict.fromkeys(("model_id", "model_name_or_path"), "is the model axis"),
    **dict.fromkeys(("dataset_path", "data", "tokenizer_name"), "is a key of its own, beside flags"),
    **{"deepspeed": "follows from the technique axis", "task": "is the prompt axis"},
    **{"outputdir": "follows from --out", "local_rank": "is given by the launcher"},
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


# The keys of a file, each with its type; a value of another type is refused, and its place is reported.


def _flags(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ValueError("expected flags of the script with values, like max_steps: 30")
    for name, each in value.items():
        if not isinstance(name, str) or not isinstance(each, str | int | float | bool | None):
            raise ValueError(f"{name}: expected text, a number, true or false")
    return {name: each for name, each in value.items() if each is not None}


Text = Annotated[StrictStr, Field(pattern=r"\S")]
Count = Annotated[StrictInt, Field(ge=1)]
# A single value needs no list; a single text stands for every model or prompt.
Axis = Annotated[
    tuple[Value, ...], BeforeValidator(lambda v: v if isinstance(v, list | tuple) else [v]), Field(min_length=1)
]
Flags = Annotated[Mapping[str, Any], BeforeValidator(_flags)]
Texts = Annotated[Mapping[Text, Text], BeforeValidator(lambda v: {EACH: v} if isinstance(v, str) else v)]


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
    """The matrix of a file, read and checked. Paths are relative to the working folder, as in the script's flags."""

    entries: tuple[MatrixEntry, ...] = Field(default=(), alias="cells", min_length=1)
    """`cells` of the file: each is a matrix of its own, whose axes override the common ones."""
    exclude: tuple[Axes, ...] = ()
    """Values of the cells that are left out."""
    repeats: Count = 1
    seeds: tuple[Annotated[StrictInt, Field(ge=0)], ...] = ()
    """One seed for each repeat; if empty, all repeats use the script's own seed."""
    slots: Count = 1
    """Number of processes per pod."""
    script: Text = SCRIPT
    data: Text | None = None
    """Raw data, prepared for each model and prompt: a folder, or `sample`, which is generated."""
    limit: Count | None = None
    """Number of examples to use of each split of `data`, from its beginning."""
    tokenizer: Texts = {}
    """Tokenizer by model, for `data`; the model's own where none is named."""
    dataset_path: Texts = {}
    """Prepared data set by prompt, instead of `data`."""
    timeout_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)] | None = None
    """Seconds after which a run is ended."""
    questions: Count | None = None
    """Number of test questions that the model of each finished cell (of each repeat, where repeats have seeds of their
    own) answers to be scored; none if not given."""
    flags: Flags = {}
    """Flags of the script, for all cells. `effective_batch_size` is divided among the processes of a cell."""

    @cached_property
    def combinations(self) -> list[tuple[Cell, Mapping[str, Any]]]:
        """Every cell with its flags, in the order of the file, including impossible and excluded cells."""
        return [
            (Cell(**dict(zip(AXES, chosen, strict=True))), {**self.flags, **entry.flags})
            for entry in self.entries or (MatrixEntry(),)
            for chosen in itertools.product(*({**self.values, **entry.values}.get(axis, ()) for axis in AXES))
        ]

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """Cells that are possible and not excluded, in the order of the file."""
        return tuple(cell for cell, impossible in self._wanted() if not impossible)

    @cached_property
    def left_out(self) -> list[dict[str, str]]:
        """Cells that are impossible and not excluded: for each the `cell` and the `reason`."""
        return [{"cell": cell.name, "reason": why} for cell, why in self._wanted() if why]

    def flags_of(self, cell: Cell) -> Mapping[str, Any]:
        """The common flags, and those of the cell's entry."""
        return next(flags for each, flags in self.combinations if each == cell)

    def rows(self, cell: Cell) -> int | None:
        """Rows per process and forward pass that give a cell the effective batch size; None where that is not given.

        Raises:
            UserError: the effective batch size does not divide.
        """
        flags = self.flags_of(cell)
        effective = flags.get(EFFECTIVE)
        if effective is None:
            return None
        passes, processes = int(flags.get(PASSES, 1)), 1 if cell.is_one_process else cell.pods * self.slots
        same = batch_on(passes * processes, effective, effective)
        if same is None:
            raise UserError(
                f"flags.{EFFECTIVE}: {effective} rows cannot be divided evenly among {processes} processes x "
                f"{passes} passes of {cell.name}; give a multiple of {passes * processes}, or exclude the cell"
            )
        return same.rows

    def to_json(self) -> dict[str, object]:
        """The document from which this matrix can be read: `matrix_of(matrix.to_json())` equals it."""
        document = self.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        return {"script": self.script, "repeats": self.repeats, "slots": self.slots, **document}

    def _wanted(self) -> Iterator[tuple[Cell, str | None]]:
        """Cells that are not excluded, each with the reason why it is impossible, or None."""
        for cell, _ in self.combinations:
            impossible = None
            if cell.is_one_process and cell.pods > 1:
                impossible = "none is one process; on several pods ddp is the baseline"
            elif cell.technique == "ddp" and cell.pods * self.slots == 1:
                impossible = "ddp with a single process is the same as technique none"
            if not any(part.has(cell) for part in self.exclude):
                yield cell, impossible


# Reading and writing.


class _Loader(yaml.SafeLoader):
    """A loader that refuses a key that occurs twice; YAML's own silently takes the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value]
        for place, (key, _) in enumerate(node.value):
            if key.value in names[:place]:
                raise yaml.MarkedYAMLError(problem=f"{key.value} occurs twice", problem_mark=key.start_mark)
        return super().construct_mapping(node, deep)


def read_matrix(path: Path) -> Matrix:
    """The matrix of a YAML file; `UserError` names the file, the key and the value, or the line."""
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (FileNotFoundError, IsADirectoryError):
        raise UserError(f"{path}: {files.no_file(path)}; expected a matrix like matrices/demo.yaml") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{path}: line {line}: {error.problem}; correct the YAML") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}; correct the YAML") from None
    if not isinstance(document, dict):
        raise UserError(f"{path}: not a mapping; expected keys with values, like repeats: 2")
    return matrix_of(document, str(path))


def matrix_of(document: Mapping[str, Any], place: str) -> Matrix:
    """The matrix of a document, checked; `place` is where it came from, for messages."""
    try:
        matrix = Matrix.model_validate(document)
    except ValidationError as error:
        found = error.errors()[0]
        key = "".join(f"[{part + 1}]" if isinstance(part, int) else f".{part}" for part in found["loc"]).lstrip(".")
        if found["type"] == "extra_forbidden":
            keys = [field.alias or name for name, field in Matrix.model_fields.items()]
            near = get_close_matches(str(found["loc"][-1]), keys, 1)
            remedy = f"{near[0]}?" if near else f"known keys are {', '.join(keys)}"
            raise UserError(f"{place}: {key}: no such key; {remedy}") from None
        said = found["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
        raise UserError(f"{place}: {key}: {found['input']!r:.60}; {said.replace('should', 'must')}") from None
    prompts = (arguments_of(matrix.script) or SCRIPTS[SCRIPT]).prompts
    if not matrix.prompt:
        matrix = matrix.model_copy(update={"prompt": prompts[:1]})
    for axis, known in (("technique", techniques.NAMES), ("prompt", sorted(prompts))):
        for value in (each for part in (matrix, *matrix.entries, *matrix.exclude) for each in getattr(part, axis)):
            if value not in known:
                raise UserError(f"{place}: {axis}: {value!r}; expected one of {', '.join(known)}")
    fault = next(_faults(matrix), None)
    if fault is not None:
        raise UserError(f"{place}: {fault}")
    return matrix


def write_matrix(matrix: Matrix, path: Path) -> None:
    """Write a matrix so that reading the file gives an equal one."""
    files.write_text(path, yaml.safe_dump(matrix.to_json(), sort_keys=False, allow_unicode=True))


def at_tiny_scale(matrix: Matrix, place: str) -> Matrix:
    """The same cells as a trial that takes minutes on any machine; `place` is where the matrix came from.

    Our tiny models with random weights replace the models, and `TINY_EXAMPLES` generated examples replace the data;
    runs have `TINY_STEPS` steps and answer `TINY_QUESTIONS` questions at most. Everything else stays.

    Raises:
        UserError: the script is not ours, a model's shape is unknown, or one tiny model would replace two models.
    """
    kind = arguments_of(matrix.script)
    if kind is None:
        raise UserError(f"{place}: script {matrix.script}: --scale is for {', '.join(SCRIPTS)}")
    fewer = {"init": "random", kind.called["max_steps"]: TINY_STEPS, "logging_steps": 1, "threads": 1}
    document: dict[str, Any] = {**matrix.to_json()}
    document.pop("dataset_path", None)
    document.pop("tokenizer", None)
    for part in (document, *document.get("cells", ()), *document.get("exclude", ())):
        if "model" in part:
            part["model"] = [tiny_name(model) for model in part["model"]]
    for part in document.get("cells", ()):
        if "flags" in part:
            part["flags"] |= {name: value for name, value in fewer.items() if name in part["flags"]}
    if matrix.questions is not None:
        document["questions"] = min(matrix.questions, TINY_QUESTIONS)
    document |= {"data": SAMPLE, "limit": TINY_EXAMPLES, "flags": {**matrix.flags, **fewer}}
    return matrix_of(document, f"{place} --scale tiny")


# Checks of a matrix as a whole; the first fault is reported. Flags and models are checked with the runs that use them.


def _faults(matrix: Matrix) -> Iterator[str]:
    for values in ({**matrix.values, **entry.values} for entry in matrix.entries or (MatrixEntry(),)):
        yield from (f"{axis}: is missing; give at least one value" for axis in AXES if axis not in values)
    for number, part in enumerate(matrix.exclude, 1):
        if not any(part.has(cell) for cell, _ in matrix.combinations):
            shown = ", ".join(f"{axis} {'/'.join(map(str, values))}" for axis, values in part.values.items())
            yield f"exclude[{number}]: {shown}: there is no such cell; correct it, or leave it out"
    if not matrix.cells:
        why = matrix.left_out[0]["reason"] if matrix.left_out else "exclude leaves out all of them"
        yield f"technique: no cell is left: {why}"
    names = [cell.name for cell in matrix.cells]
    yield from (f"cells: {name} occurs twice; leave one of them out" for name in names if names.count(name) > 1)
    if matrix.seeds and len(matrix.seeds) != matrix.repeats:
        yield f"seeds: {len(matrix.seeds)} for {matrix.repeats} repeats; give one for each"
    own = {f"cells[{n}].flags": {**matrix.flags, **e.flags} for n, e in enumerate(matrix.entries, 1) if e.flags}
    for place, flags in {"flags": matrix.flags, **own}.items():
        yield from _flag_faults(place, flags, is_seeded=bool(matrix.seeds))
    try:
        for cell in matrix.cells:
            matrix.rows(cell)
    except UserError as error:
        yield str(error)
    yield from _data_faults(matrix)


def _flag_faults(place: str, flags: Mapping[str, Any], *, is_seeded: bool) -> Iterator[str]:
    if is_seeded and "seed" in flags:
        yield f"{place}.seed: contradicts seeds; leave one of them out"
    for name in (EFFECTIVE, PASSES):
        value = flags.get(name, 1)
        if type(value) is not int or value < 1:
            yield f"{place}.{name}: {value!r}; expected a whole number, at least 1"
    if EFFECTIVE in flags and ROWS in flags:
        yield f"{place}.{ROWS}: follows from {EFFECTIVE}; leave one of them out"
    yield from (f"{place}.{name}: {SET_BY[name]}; leave it out" for name in flags if name in SET_BY)


def _data_faults(matrix: Matrix) -> Iterator[str]:
    models, prompts = {cell.model for cell in matrix.cells}, {cell.prompt for cell in matrix.cells}
    kind, sets = arguments_of(matrix.script), matrix.dataset_path
    if kind is not None and matrix.data is None and not sets:
        yield "data: is missing; name a folder with raw data, or a prepared one by dataset_path"
    if matrix.questions and (kind is None or LM in prompts):
        runs = f"of {matrix.script}" if kind is None else f"with prompt {LM}"
        yield f"questions: {matrix.questions}; runs {runs} answer none, so nothing can be scored; leave it out"
    if matrix.data is not None and sets:
        yield f"dataset_path: contradicts data {matrix.data!r}; leave one of them out"
    for key in ("tokenizer", "limit"):
        if getattr(matrix, key) and matrix.data is None:
            yield f"{key}: is for data that is to be prepared; give data, or leave it out"
    for key, given, known in (("tokenizer", matrix.tokenizer, models), ("dataset_path", sets, prompts)):
        for name in (name for name in given if name not in (EACH, *known)):
            yield f"{key}.{name}: no cell of this matrix has it; correct it, or leave it out"
    for prompt in sorted(prompts) if sets and EACH not in sets else ():
        if prompt not in sets:
            yield f"dataset_path.{prompt}: is missing; name the set that was prepared with that prompt"
    if EACH in sets and len(prompts) > 1:
        yield f"dataset_path: one data set for several prompts ({', '.join(sorted(prompts))}); give one for each"
