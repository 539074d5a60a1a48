"""A small data set in WikiSQL's layout, made from the facts in `facts/` without any download."""

from __future__ import annotations

import csv
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from importlib import resources
from pathlib import Path
from random import Random
from typing import Any

from zeropods.data.manifest import writing
from zeropods.data.wikisql import SPLITS
from zeropods.errors import UserError
from zeropods.files import new_folder
from zeropods.sql.query import AGGREGATES, OPERATORS, Condition, Query

# The facts that the sample's questions are about, and the words in which people ask for them.
#
# A file of `facts/` holds tables, set apart by empty lines. A table is
#     id,singular,plural        planets,planet,planets
#     column names              Planet,Type,Diameter (km)
#     kinds                     name,text,level
#     phrases, split at |       planet,type|class,diameter|> is wider than {} km|? How wide is {}
#     rows                      Mars,rocky,6779
# Kinds of text: `name` (what a row is about; `who` where that is a person), `text`, `person`.
# Kinds of numbers: `amount` (may be summed), `level` (may not), `year`, `count` (of a plural noun).
# A phrase is a noun; or, after `= `, `> ` or `< `, a predicate with the value at `{}`; or, after `? `,
# a question about the column with the row's name at `{}`.

KINDS = {
    "name": "text", "who": "text", "text": "text", "person": "text",
    "amount": "real", "level": "real", "year": "real", "count": "real",
}  # fmt: skip
KEYS = ("name", "who")


@dataclass(frozen=True)
class Column:
    """A column, and how people refer to it."""

    name: str
    kind: str
    """A key of KINDS."""
    phrases: tuple[str, ...]

    @property
    def type(self) -> str:
        """`text` or `real`, as in WikiSQL's files."""
        return KINDS[self.kind]

    @property
    def nouns(self) -> list[str]:
        """Names for the column: `diameter`."""
        return [p for p in self.phrases if p[:2] not in ("= ", "> ", "< ", "? ")]

    def marked(self, mark: str) -> list[str]:
        """The phrases after a mark: `is wider than {} km` for `>`."""
        return [p[2:] for p in self.phrases if p.startswith(f"{mark} ")]


@dataclass(frozen=True)
class FactTable:
    """A table of facts about things of one sort."""

    id: str
    singular: str
    plural: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str | int | float, ...], ...]

    @property
    def key(self) -> int:
        """Index of the column that names what a row is about."""
        return next(i for i, column in enumerate(self.columns) if column.kind in KEYS)


def read_facts() -> list[FactTable]:
    """All tables, in the order of file names; `ValueError` says which table is malformed."""
    tables = []
    files = (f for f in resources.files("zeropods.data").joinpath("facts").iterdir() if f.name.endswith(".csv"))
    for file in sorted(files, key=lambda f: f.name):
        tables += [_table_sample_facts(block) for block in _blocks(file.read_text("utf-8"))]
    return tables


def _blocks(text: str) -> Iterator[list[list[str]]]:
    for block in text.strip().split("\n\n"):
        yield list(csv.reader(block.strip().splitlines()))


def _table_sample_facts(block: list[list[str]]) -> FactTable:
    (id, singular, plural), names, kinds, phrases, *rows = block
    for line in (kinds, phrases, *rows):
        if len(line) != len(names):
            raise ValueError(f"facts {id}: {line!r}; expected {len(names)} cells")
    columns = tuple(Column(n, k, tuple(p.split("|"))) for n, k, p in zip(names, kinds, phrases, strict=True))
    if not set(kinds) <= KINDS.keys() or sum(kind in KEYS for kind in kinds) != 1:
        raise ValueError(f"facts {id}: kinds {kinds!r}; expected one name or who, and others of {list(KINDS)}")
    cells = tuple(tuple(_cell(c, v) for c, v in zip(columns, row, strict=True)) for row in rows)
    return FactTable(id, singular, plural, columns, cells)


def _cell(column: Column, text: str) -> str | int | float:
    if column.type == "text":
        return text
    return float(text) if "." in text else int(text)


# The folder of a generated sample: written once, never over anything else.


def holds_sample(out: Path, names: Collection[str]) -> bool:
    """Whether all files of a sample are in `out`; `UserError` where it holds anything else."""
    if not out.exists():
        return False
    if not out.is_dir():
        raise UserError(f"{out}: a file; name a folder")
    found = {path.name for path in out.iterdir()}
    if found and not found >= set(names):
        raise UserError(f"{out}: holds {min(found)!r}, not a sample; name a new folder or empty this one")
    return bool(found)


def write_once(out: Path, files: Mapping[str, bytes], seed: int) -> bool:
    """Write the files of a sample; False where `out` holds just these already, `UserError` where it holds others."""
    if holds_sample(out, files.keys()):
        _require_equal(out, files, seed)
        return False
    with new_folder(out) as folder:
        for name, content in files.items():
            with writing(out / name):
                (folder / name).write_bytes(content)
    return True


def _require_equal(out: Path, files: Mapping[str, bytes], seed: int) -> None:
    for name, content in files.items():
        if (out / name).read_bytes() != content:
            raise UserError(f"{out}: {name!r} is not that of the sample of seed {seed}; name a new folder")


# Random queries with a usable answer, in about WikiSQL's mix of aggregates, operators and conditions.

CONDITION_WEIGHTS = (1.3, 65, 24, 6, 4)
AGGREGATE_WEIGHTS = (66, 12, 12, 7, 12, 7)
"""Chosen so that what is left after senseless draws are dropped is about WikiSQL's mix."""
OPERATOR_WEIGHTS = (55, 22, 22)
KEY_SHARE = 0.5
"""How often a plain look-up is by the row's name."""

Row = tuple[str | int | float, ...]


@dataclass(frozen=True)
class Draw:
    """A query, and how many rows of its table it matches."""

    query: Query
    matches: int


def draw(table: FactTable, rng: Random) -> Draw | None:
    """One query, or None where what the dice say makes no sense for the table."""
    agg = rng.choices(range(6), AGGREGATE_WEIGHTS)[0]
    number = rng.choices(range(5), CONDITION_WEIGHTS)[0]
    selectable = [i for i, column in enumerate(table.columns) if _selectable(column.kind, AGGREGATES[agg])]
    if not selectable:
        return None
    sel = rng.choice(selectable)
    columns = _condition_columns(table, sel, agg, number, rng)
    if columns is None:
        return None
    row = rng.choice(table.rows)
    conds = tuple(_condition(table, column, row, rng) for column in columns)
    matches = sum(all(_holds(r, c, table) for c in conds) for r in table.rows)
    sensible = _sensible(table, agg, conds, matches)
    return Draw(Query(sel, agg, conds), matches) if sensible else None


def _selectable(kind: str, aggregate: str) -> bool:
    allowed = {
        "": ("name", "who", "text", "person", "amount", "level", "year", "count"),
        "COUNT": ("name", "who"),
        "MAX": ("amount", "level", "year", "count"),
        "MIN": ("amount", "level", "year", "count"),
        "SUM": ("amount", "count"),
        "AVG": ("amount", "level", "count"),
    }
    return kind in allowed[aggregate]


def _condition_columns(table: FactTable, sel: int, agg: int, number: int, rng: Random) -> list[int] | None:
    if agg == 0 and number == 1 and sel != table.key and rng.random() < KEY_SHARE:
        return [table.key]
    others = [i for i in range(len(table.columns)) if i not in (sel, table.key)]
    return rng.sample(others, number) if number <= len(others) else None


def _condition(table: FactTable, column: int, row: Row, rng: Random) -> Condition:
    """A condition that the row meets; comparisons part a column at its quartiles, so that limits recur."""
    operator = rng.choices(range(3), OPERATOR_WEIGHTS)[0] if table.columns[column].type == "real" else 0
    values = sorted({Decimal(str(r[column])) for r in table.rows}) if operator else []
    if len(values) < 2:
        return Condition(column, 0, str(row[column]))
    at = values.index(Decimal(str(row[column])))
    cuts = sorted({(len(values) - 1) * quarter // 4 for quarter in (1, 2, 3)})
    below = [cut for cut in cuts if cut < at]
    above = [cut for cut in cuts if cut >= at]
    if not (below if operator == 1 else above):
        operator = 3 - operator
    cut = rng.choice(below if operator == 1 else above)
    return Condition(column, operator, _round_number(values[cut], values[cut + 1], OPERATORS[operator]))


def _round_number(low: Decimal, high: Decimal, operator: str) -> str:
    """The roundest number that parts `low` from `high`: `> n` holds for `high` only, `< n` for `low` only."""
    for exponent in range(9, -5, -1):
        step = Decimal(1).scaleb(exponent)
        if operator == ">":
            number = (low / step).to_integral_value(ROUND_CEILING) * step
        else:
            number = (high / step).to_integral_value(ROUND_FLOOR) * step
        if (low <= number < high) if operator == ">" else (low < number <= high):
            break
    return f"{number.normalize() + 0:f}"


def _holds(row: Row, condition: Condition, table: FactTable) -> bool:
    column, operator, value = condition
    if table.columns[column].type == "text":
        return row[column] == value
    cell, limit = float(row[column]), float(value)
    return (cell == limit, cell > limit, cell < limit)[operator]


def _sensible(table: FactTable, agg: int, conds: tuple[Condition, ...], matches: int) -> bool:
    """No `1 moons`, no statistics of a single row, no condition that every row meets."""
    if any(table.columns[c.column].kind == "count" and c.value == "1" for c in conds):
        return False
    if conds and matches == len(table.rows):
        return False
    return matches >= (2 if AGGREGATES[agg] in ("MAX", "MIN", "SUM", "AVG") else 1)


# Question templates of the sample.
#
# Slots: `{noun}` the selected column, `{things}` a counted plural, `{value}` a row's name, `{one}` and `{many}`
# what a row is about, `{entity}` the one that fits the number of rows, `{key}` a noun for the naming column,
# `{whom}` `the ONE` or `each ONE`, `{mods}` `with a height above 300`, `{preds}` `has a height above 300`,
# `{many_preds}` the same in the plural, `{clause}` `the height is above 300`, `{word}` `highest`, `total`,
# `average` and the like.

OF_NAME = (
    "What is the {noun} of {value}?",
    "What is the {noun} of {value}?",
    "What is the {noun} for {value}?",
    "What is {value}'s {noun}?",
    "Tell me the {noun} of {value}.",
    "Give the {noun} of {value}.",
    "Name the {noun} of {value}.",
    "Find the {noun} for {value}.",
    "Show me the {noun} of {value}.",
    "For {value}, what is the {noun}?",
    "What is the {noun} of the {one} {value}?",
    "Look up the {noun} of {value}.",
    "What is the {noun} when the {key} is {value}?",
    "When the {key} is {value}, what is the {noun}?",
)
OF_NAME_PERSON = (
    "Who is the {noun} of {value}?",
    "Who is the {noun} for {value}?",
    "Who is {value}'s {noun}?",
)
OF_NAME_COUNT = (
    "How many {things} does {value} have?",
    "How many {things} are there for {value}?",
    "{value} has how many {things}?",
)

VALUE = (
    "What is the {noun} of {whom} {mods}?",
    "What is the {noun} of {whom} {mods}?",
    "Give the {noun} of {whom} {mods}.",
    "Tell me the {noun} for {whom} {mods}.",
    "Find the {noun} of {whom} {mods}.",
    "For {whom} {mods}, what is the {noun}?",
    "What is the {noun} when {clause}?",
    "What is the {noun} if {clause}?",
    "When {clause}, what is the {noun}?",
    "Show the {noun} where {clause}.",
    "Which {noun} is listed where {clause}?",
)
VALUE_PERSON = ("Who is the {noun} of {whom} {mods}?", "Who is the {noun} when {clause}?")
VALUE_COUNT = ("How many {things} does {whom} {mods} have?", "How many {things} are there when {clause}?")
VALUE_ALL = (
    "List the {noun} of every {one}.",
    "What is the {noun} of each {one}?",
    "Show the {noun} for all {many}.",
    "Give the {noun} of all {many}.",
)

ENTITY = (
    "Which {entity} {preds}?",
    "Which {entity} {preds}?",
    "What {entity} {preds}?",
    "Name the {entity} {mods}.",
    "Find the {entity} {mods}.",
    "Tell me the {entity} {mods}.",
    "Show the {entity} {mods}.",
    "Give me the {entity} {mods}.",
    "I am looking for the {entity} {mods}.",
    "What is the {key} when {clause}?",
    "When {clause}, what is the {key}?",
    "Which {key} is listed where {clause}?",
)
ENTITY_WHO = ("Who {preds}?", "Who {preds}?", "Who is listed where {clause}?")
ENTITY_MANY = ("List the {many} {mods}.", "Which are the {many} {mods}?", "List all {many} {mods}.")
ENTITY_ALL = (
    "List all {many}.",
    "Name every {one}.",
    "Show all the {many}.",
    "Which {many} are listed?",
    "What are the names of all {many}?",
)

COUNT = (
    "How many {many} {many_preds}?",
    "How many {many} {many_preds}?",
    "How many {many} are there {mods}?",
    "What is the number of {many} {mods}?",
    "Count the {many} {mods}.",
    "Tell me the number of {many} {mods}.",
    "How many {many} are listed where {clause}?",
    "When {clause}, how many {many} are there?",
)
COUNT_ALL = (
    "How many {many} are there?",
    "How many {many} are listed?",
    "Count all the {many}.",
    "What is the number of {many}?",
)

NUMBER = (
    "What is the {word} {noun} of {many} {mods}?",
    "What is the {word} {noun} of {many} {mods}?",
    "What is the {word} {noun} among {many} {mods}?",
    "Give the {word} {noun} of {many} {mods}.",
    "Tell me the {word} {noun} for {many} {mods}.",
    "Find the {word} {noun} of all {many} {mods}.",
    "For {many} {mods}, what is the {word} {noun}?",
    "What is the {word} {noun} when {clause}?",
    "When {clause}, what is the {word} {noun}?",
    "Name the {word} {noun} where {clause}.",
)
NUMBER_ALL = (
    "What is the {word} {noun} of all {many}?",
    "What is the {word} {noun}?",
    "Give the {word} {noun} of the {many}.",
    "Over all {many}, what is the {word} {noun}?",
    "Find the {word} {noun} among the {many}.",
)
SUM_COUNT = (
    "How many {things} do {many} {mods} have in total?",
    "How many {things} do all {many} {mods} have together?",
)
SUM_COUNT_ALL = (
    "How many {things} do all {many} have in total?",
    "How many {things} do the {many} have together?",
)

WORDS = {
    "MAX": ("highest", "greatest", "largest", "maximum"),
    "MIN": ("lowest", "smallest", "minimum"),
    "SUM": ("total", "combined"),
    "AVG": ("average", "mean"),
}
YEAR_WORDS = {"MAX": ("latest", "most recent"), "MIN": ("earliest",)}

ABOVE = ("above", "over", "greater than", "of more than")
BELOW = ("below", "under", "smaller than", "of less than")
IS_ABOVE = ("above", "over", "greater than", "more than")
IS_BELOW = ("below", "under", "less than")
MORE = ("more than", "over")
FEWER = ("fewer than", "less than", "under")
AFTER = ("after", "later than")
BEFORE = ("before", "earlier than")


# A query in a person's words.

PLURAL = {"is": "are", "was": "were", "has": "have"}
SHARE_ASKED = 0.4
"""How often a look-up by name uses a question written for the column, where there is one."""


def ask(table: FactTable, drawn: Draw, rng: Random) -> tuple[str, Query]:
    """A question, and the query with its conditions in the order in which the question names them.

    Values enter the question as they stand in the query; the words around them may be lower-cased.
    """
    conds = list(drawn.query.conds)
    rng.shuffle(conds)
    template = rng.choice(_templates(table, drawn, rng))
    if "{mods}" in template or "preds}" in template:
        said = sorted(((_predicate(table, c, n, rng), n) for n, c in enumerate(conds)), key=_rank)
        order = [n for _, n in said]
        slots = _spoken(table, [text for text, _ in said], _is_plural(template, drawn), rng)
        if "{mods}" in template and rng.random() < 0.15:
            order = list(range(len(conds)))
            slots["mods"] = _joined(["whose " + _clause(table, c, n, rng) for n, c in enumerate(conds)])
    else:
        order = list(range(len(conds)))
        slots = {"clause": _joined(["the " + _clause(table, c, n, rng) for n, c in enumerate(conds)])}
    question = template.format(**slots, value=_mark(0), **_names(table, drawn, rng))
    question = _finished(question, rng)
    for number, condition in enumerate(conds):
        question = question.replace(_mark(number), condition.value)
    return question, replace(drawn.query, conds=tuple(conds[n] for n in order))


def _is_plural(template: str, drawn: Draw) -> bool:
    """Whether what the conditions are said of stands in the plural."""
    return "{many}" in template or ("{entity}" in template and drawn.matches > 1)


def _templates(table: FactTable, drawn: Draw, rng: Random) -> tuple[str, ...]:
    """The templates that fit a query."""
    query, column = drawn.query, table.columns[drawn.query.sel]
    aggregate = AGGREGATES[query.agg]
    if aggregate == "COUNT":
        return COUNT if query.conds else COUNT_ALL
    if aggregate:
        return _number_templates(aggregate, column, bool(query.conds))
    if query.sel == table.key:
        return _entity_templates(column, drawn)
    if not query.conds:
        return VALUE_ALL
    if query.conds[0].column == table.key:
        return _name_templates(column, rng)
    extra = {"person": VALUE_PERSON * 2, "count": VALUE_COUNT * 2}
    return VALUE + extra.get(column.kind, ())


def _number_templates(aggregate: str, column: Column, conditional: bool) -> tuple[str, ...]:
    plain: tuple[str, ...] = NUMBER if conditional else NUMBER_ALL
    counted: tuple[str, ...] = SUM_COUNT if conditional else SUM_COUNT_ALL
    return plain + counted * 2 if aggregate == "SUM" and column.kind == "count" else plain


def _entity_templates(column: Column, drawn: Draw) -> tuple[str, ...]:
    if not drawn.query.conds:
        return ENTITY_ALL
    who = ENTITY_WHO if column.kind == "who" else ()
    return ENTITY + who + (ENTITY_MANY if drawn.matches > 1 else ())


def _name_templates(column: Column, rng: Random) -> tuple[str, ...]:
    asked = tuple(text.replace("{}", "{value}") + "?" for text in column.marked("?"))
    if asked and rng.random() < SHARE_ASKED:
        return asked
    extra = {"person": OF_NAME_PERSON * 2, "count": OF_NAME_COUNT * 2}
    return OF_NAME + extra.get(column.kind, ())


def _names(table: FactTable, drawn: Draw, rng: Random) -> dict[str, str]:
    """The slots that do not depend on the conditions."""
    column, several = table.columns[drawn.query.sel], drawn.matches > 1
    noun = rng.choice(column.nouns)
    words = YEAR_WORDS if column.kind == "year" else WORDS
    return {
        "noun": f"number of {noun}" if column.kind == "count" else noun,
        "things": noun,
        "one": table.singular,
        "many": table.plural,
        "entity": table.plural if several else table.singular,
        "whom": f"{rng.choice(('each', 'every')) if several else 'the'} {table.singular}",
        "key": rng.choice(table.columns[table.key].nouns),
        "word": rng.choice(words.get(AGGREGATES[drawn.query.agg], ("",))),
    }


def _predicate(table: FactTable, condition: Condition, number: int, rng: Random) -> str:
    """`is taller than 300 m`, `has a height above 300`."""
    column, operator = table.columns[condition.column], OPERATORS[condition.operator]
    written = column.marked(operator)
    if written and rng.random() < 0.6:
        return rng.choice(written).replace("{}", _mark(number))
    return "has " + _possession(column, operator, _mark(number), rng)


def _possession(column: Column, operator: str, value: str, rng: Random) -> str:
    noun = rng.choice(column.nouns)
    if column.type == "text":
        return f"{rng.choice(('', 'the '))}{noun} {value}"
    if column.kind == "count":
        words = {"=": ("", "exactly"), ">": MORE, "<": FEWER}
        return f"{rng.choice(words[operator])} {value} {noun}".strip()
    words = {"=": ("of",), ">": ABOVE, "<": BELOW}
    if column.kind == "year":
        words = {"=": ("of",), ">": AFTER, "<": BEFORE}
    return f"{'an' if noun[0] in 'aeio' else 'a'} {noun} {rng.choice(words[operator])} {value}"


def _clause(table: FactTable, condition: Condition, number: int, rng: Random) -> str:
    """`height is above 300`."""
    column, operator = table.columns[condition.column], OPERATORS[condition.operator]
    is_year = column.kind == "year"
    above: tuple[str, ...] = AFTER if is_year else IS_ABOVE
    below: tuple[str, ...] = BEFORE if is_year else IS_BELOW
    relation = {"=": "", ">": f"{rng.choice(above)} ", "<": f"{rng.choice(below)} "}[operator]
    noun = rng.choice(column.nouns)
    return f"{'number of ' if column.kind == 'count' else ''}{noun} is {relation}{_mark(number)}"


def _rank(said: tuple[str, int]) -> int:
    return {"is": 0, "was": 0, "has": 2}.get(said[0].split()[0], 1)


def _spoken(table: FactTable, predicates: list[str], several: bool, rng: Random) -> dict[str, str]:
    """The slots for predicates that are sorted by rank."""
    plural = [_plural(text) for text in predicates]
    fitting = plural if several else predicates
    short = all(text.split()[0] in PLURAL for text in predicates) and rng.random() < 0.75
    that = "who" if table.columns[table.key].kind == "who" else "that"
    return {
        "preds": _joined(fitting),
        "many_preds": _joined(plural),
        "mods": _short_modifiers(predicates) if short else f"{that} {_joined(fitting)}",
    }


def _plural(predicate: str) -> str:
    verb, rest = predicate.split(" ", 1)
    return f"{PLURAL.get(verb, verb)} {rest}"


def _short_modifiers(predicates: list[str]) -> str:
    """`in China with a height above 300`."""
    state = [text.split(" ", 1)[1] for text in predicates if not text.startswith("has ")]
    possession = [text.split(" ", 1)[1] for text in predicates if text.startswith("has ")]
    parts = [_joined(state)] if state else []
    return " ".join(parts + ([f"with {_joined(possession)}"] if possession else []))


def _joined(parts: list[str]) -> str:
    return ", ".join(parts[:-1]) + f" and {parts[-1]}" if len(parts) > 1 else "".join(parts)


def _mark(number: int) -> str:
    """Stands for the value of a condition until the words around it are final."""
    return f"\0{number}\0"


def _finished(question: str, rng: Random) -> str:
    style = rng.choices(("as it is", "no mark", "lower"), (70, 12, 18))[0]
    if style == "as it is":
        return question
    bare = question.rstrip("?.")
    return bare.lower() if style == "lower" else bare


# A small data set in WikiSQL's layout, made from the facts in `facts/` without any download.

QUESTIONS = {"train": 24_000, "dev": 600, "test": 600}
HELD_OUT_TABLES = {"dev": 4, "test": 4}
"""How many tables only this split has."""
HELD_OUT_SHARE = 5
"""One question in so many of dev and of test is about such a table."""

NAMES = {f"{split}.{suffix}" for split in SPLITS for suffix in ("jsonl", "tables.jsonl")}


@dataclass(frozen=True)
class Asked:
    """A question about a table, and the query that answers it."""

    question: str
    table: FactTable
    query: Query


@dataclass(frozen=True, kw_only=True)
class SampleSummary:
    """What `write_sample` left behind."""

    folder: Path
    written: bool
    """False where the folder held exactly this already."""
    seed: int
    questions: dict[str, int]
    """Questions of each split."""
    tables: dict[str, int]
    """Tables of each split; those of dev and test are in part those of train."""
    held_out_questions: dict[str, int]
    """Questions of dev and of test about tables that train has not."""


def write_sample(out: Path, seed: int = 0) -> SampleSummary:
    """Write `SPLIT.jsonl` and `SPLIT.tables.jsonl` of train, dev and test into the folder `out`.

    The same seed gives the same bytes. An `out` that holds them already is left as it is; one that holds
    anything else raises `UserError`.
    """
    holds_sample(out, NAMES)  # Making the questions takes seconds: a folder of others is refused before.
    splits = make_sample(seed)
    written = write_once(out, _files(splits), seed)
    return _summary(out, seed, written, splits)


def make_sample(seed: int = 0) -> dict[str, list[Asked]]:
    """The questions of each split; no two of all splits have the same words."""
    rng = Random(seed)
    tables = read_facts()
    rng.shuffle(tables)
    seen: set[str] = set()
    splits: dict[str, list[Asked]] = {}
    held_out = {}
    for split, number in HELD_OUT_TABLES.items():
        held_out[split] = [tables.pop() for _ in range(number)]
    for split in reversed(SPLITS):
        unknown = QUESTIONS[split] // HELD_OUT_SHARE if split in held_out else 0
        asked = _asked(tables, QUESTIONS[split] - unknown, seen, rng)
        asked += _asked(held_out.get(split, []), unknown, seen, rng)
        rng.shuffle(asked)
        splits[split] = asked
    return {split: splits[split] for split in SPLITS}


def _asked(tables: list[FactTable], number: int, seen: set[str], rng: Random) -> list[Asked]:
    """New questions, as many about each table as about the next; their words are added to `seen`."""
    return [_new(tables[n % len(tables)], seen, rng) for n in range(number)]


def _new(table: FactTable, seen: set[str], rng: Random) -> Asked:
    while True:
        drawn = draw(table, rng)
        if drawn is None:
            continue
        question, query = ask(table, drawn, rng)
        words = question.lower().rstrip("?.")
        if words not in seen:
            seen.add(words)
            return Asked(question, table, query)


def _files(splits: dict[str, list[Asked]]) -> dict[str, bytes]:
    files = {}
    for split, asked in splits.items():
        files[f"{split}.jsonl"] = _json_lines(_question(a) for a in asked)
        files[f"{split}.tables.jsonl"] = _json_lines(_table(t) for t in _tables(asked))
    return files


def _tables(asked: list[Asked]) -> list[FactTable]:
    by_id = {a.table.id: a.table for a in asked}
    return [by_id[id_] for id_ in sorted(by_id)]


def _question(asked: Asked) -> dict[str, Any]:
    return {
        "phase": 1,
        "table_id": asked.table.id,
        "question": asked.question,
        "sql": asked.query.to_json(),
    }


def _table(table: FactTable) -> dict[str, Any]:
    return {
        "id": table.id,
        "header": [column.name for column in table.columns],
        "types": [column.type for column in table.columns],
        "rows": table.rows,
    }


def _json_lines(documents: Iterable[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(d, ensure_ascii=False) + "\n" for d in documents).encode()


def _summary(out: Path, seed: int, written: bool, splits: dict[str, list[Asked]]) -> SampleSummary:
    known = {asked.table.id for asked in splits["train"]}
    return SampleSummary(
        folder=out,
        written=written,
        seed=seed,
        questions={split: len(asked) for split, asked in splits.items()},
        tables={split: len(_tables(asked)) for split, asked in splits.items()},
        held_out_questions={split: sum(a.table.id not in known for a in splits[split]) for split in HELD_OUT_TABLES},
    )
