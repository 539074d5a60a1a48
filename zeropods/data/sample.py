"""`zeropods data sample`: a small data set for each task, generated from the files in `facts/`
without any download.

Text-to-SQL is in WikiSQL's layout, people in SQuAD's and towns in WikiText's. The last two are made
from `facts/words.json`, the first from the tables in `facts/*.csv`, which are separated by empty
lines. A table is

    id,singular,plural        planets,planet,planets
    column names              Planet,Type,Diameter (km)
    kinds                     name,text,level
    phrases, split at |       planet,type|class,diameter|> is wider than {} km|? How wide is {}
    rows                      Mars,rocky,6779

Kinds of text: `name` (what a row is about: the first column, and no other; `who` where that is a
person), `text`, `person`. Kinds of numbers: `amount` (may be summed), `level` (may not), `year`,
`count` (of a plural noun). A phrase is a noun; or, after `= `, `> ` or `< `, a predicate with the
value at `{}`; or, after `? `, a question about the column with the row's name at `{}`.

`facts/questions.json` holds the templates of questions and the words in them. Their slots: `{noun}`
the selected column, `{things}` a counted plural, `{value}` a row's name, `{one}` and `{many}` what
a row is about, `{entity}` the one that fits the number of rows, `{key}` a noun for the naming
column, `{whom}` `the ONE` or `each ONE`, `{mods}` `with a height above 300`, `{preds}` `has a
height above 300`, `{many_preds}` the same in the plural, `{clause}` `the height is above 300`,
`{word}` `highest`, `total`, `average` and the like.
"""

from __future__ import annotations

import csv
import json
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple

from zeropods.data.manifest import SPLITS
from zeropods.data.wikisql import split_files
from zeropods.errors import UserError
from zeropods.outputs import new_folder
from zeropods.sql.query import AGGREGATES, OPERATORS, Condition, Query
from zeropods.sql.table import Cell, SQLTable
from zeropods.tasks import LM, SQUAD, TEXT2SQL

FACTS_FOLDER = Path(__file__).with_name("facts")
QUESTION_COUNTS = {"train": 24_000, "dev": 600, "test": 600}
HELD_OUT_TABLES = {"dev": 4, "test": 4}
"""Number of tables, by split, that no other split has."""
HELD_OUT_SHARE = 2
"""One question in this many of dev and of test is about a table that only that split has."""

KEY_COLUMN = 0
"""Index of the column that names what a row is about; `KEY_KINDS` are the kinds that it may
have."""
KEY_KINDS = ("name", "who")
NUMBER_KINDS = ("amount", "level", "year", "count")
SELECTABLE = {
    "": (*KEY_KINDS, "text", "person", *NUMBER_KINDS),
    "COUNT": KEY_KINDS,
    "MAX": NUMBER_KINDS,
    "MIN": NUMBER_KINDS,
    "SUM": ("amount", "count"),
    "AVG": ("amount", "level", "count"),
}
"""Kinds of columns that each aggregate may be applied to."""

CONDITION_WEIGHTS = (1.3, 65, 24, 6, 4)
"""Weights of no condition, one, two, three and four."""
AGGREGATE_WEIGHTS = (66, 12, 12, 7, 12, 7)
"""Weights of the draws, chosen so that what is left after dropping senseless ones is about
WikiSQL's mix."""
OPERATOR_WEIGHTS = (55, 22, 22)
STYLE_WEIGHTS = (70, 12, 18)
"""Weights of a question as it is, without its final mark, and both without the mark and in lower
case."""
KEY_SHARE = 0.5
"""Share of plain look-ups, with no aggregate and one condition, that find the row by its name."""
WRITTEN_QUESTION_SHARE = 0.4
"""Share of look-ups by name that use a question written for the column, if there is one."""
WRITTEN_PREDICATE_SHARE = 0.6
"""Share of predicates that use one written for the column, if there is one."""
WHOSE_SHARE = 0.15
"""Share of questions with room for `with a height above 300` that say `whose height is above
300`."""
WITHOUT_VERB_SHARE = 0.75
"""Share of predicates that are said without their verbs, `in China with a height`, if they can
be."""
PLURAL_VERBS = {"is": "are", "was": "were", "has": "have"}
VERB_RANKS = {"is": 0, "was": 0, "has": 2}
"""Order in which predicates are named, by their verbs; all other verbs stand between these."""
OTHER_VERB_RANK = 1
COMPARISONS = (operator.eq, operator.gt, operator.lt)
"""What each of the first three `OPERATORS` does."""
VALUE_PLACEHOLDER = "\0{}\0"
"""Stands for the value of a condition, by its number, until the words around it are final: they may
be put in lower case, and the value may not."""
PHRASE_MARKS = ("=", ">", "<", "?")

Counts = dict[str, dict[str, int]]
"""Counts by what is counted, then by split or file."""


@dataclass(frozen=True)
class FactColumn:
    """How people refer to a column."""

    kind: str
    phrases: dict[str, list[str]]
    """Phrases by their mark: names for the column have none, `is wider than {} km` has `>`."""

    @property
    def is_number(self) -> bool:
        """Whether the column's type in WikiSQL's files is `real` rather than `text`."""
        return self.kind in NUMBER_KINDS


@dataclass(frozen=True)
class FactTable(SQLTable):
    """A table of facts about things of one sort."""

    singular: str
    plural: str
    columns: tuple[FactColumn, ...]


def write_sample(out: Path, seed: int = 0, task: str = TEXT2SQL) -> dict[str, object]:
    """Write a generated data set for a task into the folder `out`; the same seed gives the same
    bytes.

    For `text2sql` it is in WikiSQL's layout, for `squad` in SQuAD's, for `lm` in WikiText's. An
    `out` that already holds these files is left as it is; one that holds anything else instead
    raises `UserError`.

    Returns:
        What `zeropods data sample --json` prints: `folder`, whether it was `written` now, `seed`,
        and counts by split, such as that of `questions`; for text also the `bytes` of each file.
    """
    generate = GENERATORS[task]
    files, counts = generate(Random(seed))
    is_new = not out.exists() or not any(out.iterdir())
    if is_new:
        with new_folder(out) as folder:
            for name, content in files.items():
                (folder / name).write_bytes(content)
    for name, content in files.items():
        path = out / name
        if not path.is_file() or path.read_bytes() != content:
            raise UserError(
                f"{out}: holds something other than the sample of seed {seed} ({name}); "
                "choose a new folder"
            )
    return {"folder": str(out), "written": is_new, "seed": seed, **counts}


# WikiSQL's layout: questions about tables of facts.


def _wikisql_files(rng: Random) -> tuple[dict[str, bytes], Counts]:
    """`SPLIT.jsonl` and `SPLIT.tables.jsonl` of train, dev and test, and the counts of what they
    hold.

    Some tables of dev and test are also in train; `held_out_questions` are about the others. Across
    all splits, no two questions have the same words.
    """
    tables = read_facts()
    table_by_id = {table.id: table for table in tables}
    rng.shuffle(tables)
    held_out: dict[str, list[FactTable]] = {}
    for split, number in HELD_OUT_TABLES.items():
        # These tables leave `tables`, of which every split has questions.
        held_out[split] = [tables.pop() for _ in range(number)]

    wordings: set[str] = set()
    questions = {}
    table_ids = {}
    # Test is drawn first, as in the committed sample: a change of the order would change it.
    for split in reversed(SPLITS):
        subjects = _subjects(split, tables, held_out.get(split, []))
        questions_of_split = [_new_question(table, wordings, rng) for table in subjects]
        rng.shuffle(questions_of_split)
        questions[split] = questions_of_split
        table_ids[split] = {table.id for table in subjects}

    files: dict[str, bytes] = {}
    counts: Counts = {"questions": {}, "tables": {}, "held_out_questions": {}}
    for split in SPLITS:
        tables_of_split = [table_by_id[id_] for id_ in sorted(table_ids[split])]
        files |= split_files(split, tables_of_split, questions[split])
        counts["questions"][split] = len(questions[split])
        counts["tables"][split] = len(table_ids[split])
    for split in HELD_OUT_TABLES:
        ids_asked_about = [question["table_id"] for question in questions[split]]
        held_out_ids = [id_ for id_ in ids_asked_about if id_ not in table_ids["train"]]
        counts["held_out_questions"][split] = len(held_out_ids)
    return files, counts


def _subjects(
    split: str, tables: Sequence[FactTable], held_out: Sequence[FactTable]
) -> list[FactTable]:
    """The table that each question of a split is about; those that only this split has come
    last."""
    number = QUESTION_COUNTS[split]
    number_held_out = number // HELD_OUT_SHARE if held_out else 0
    subjects = [tables[i % len(tables)] for i in range(number - number_held_out)]
    subjects += [held_out[i % len(held_out)] for i in range(number_held_out)]
    return subjects


def write_questions(
    out: Path, split: str, tables: Sequence[FactTable], number: int, seed: int
) -> None:
    """Write a split of this number of questions, in turn about each of the tables, in WikiSQL's
    layout into the folder `out`; no two questions have the same words."""
    rng = Random(seed)
    wordings: set[str] = set()
    subjects = [tables[i % len(tables)] for i in range(number)]
    questions = [_new_question(table, wordings, rng) for table in subjects]
    for name, content in split_files(split, tables, questions).items():
        (out / name).write_bytes(content)


def _new_question(table: FactTable, wordings: set[str], rng: Random) -> dict[str, Any]:
    """A question whose wording is not in `wordings` yet; it is added there."""
    while True:
        drawn = draw(table, rng)
        if drawn is None:
            continue
        query, match_count = drawn
        question, query = ask(table, query, match_count, rng)
        wording = question.lower().rstrip("?.")
        if wording in wordings:
            continue
        wordings.add(wording)
        return {"phase": 1, "table_id": table.id, "question": question, "sql": query.to_json()}


# The files of `facts/`.


def read_facts(folder: Path = FACTS_FOLDER) -> list[FactTable]:
    """All tables of facts in a folder, in the order of the names of their files."""
    tables = []
    for path in sorted(folder.glob("*.csv")):
        for block in path.read_text("utf-8").strip().split("\n\n"):
            tables.append(_fact_table(block.strip().splitlines()))
    return tables


def _fact_table(lines: Sequence[str]) -> FactTable:
    """The table in lines of CSV: what its rows are about, then its columns' names, kinds and
    phrases, then its rows."""
    subject, names, kinds, phrases, *cells_of_rows = csv.reader(lines)
    id_, singular, plural = subject
    columns = []
    types: list[Literal["text", "real"]] = []
    for kind, phrases_of_column in zip(kinds, phrases, strict=True):
        column = FactColumn(kind, _by_mark(phrases_of_column.split("|")))
        columns.append(column)
        types.append("real" if column.is_number else "text")
    rows = []
    for cells in cells_of_rows:
        row: list[Cell] = []
        for column, cell in zip(columns, cells, strict=True):
            row.append(json.loads(cell) if column.is_number else cell)
        rows.append(tuple(row))
    return FactTable(
        id=id_,
        header=tuple(names),
        types=tuple(types),
        rows=tuple(rows),
        singular=singular,
        plural=plural,
        columns=tuple(columns),
    )


def _by_mark(phrases: Sequence[str]) -> dict[str, list[str]]:
    """The phrases without their marks, by mark."""
    by_mark: dict[str, list[str]] = {mark: [] for mark in ("", *PHRASE_MARKS)}
    for phrase in phrases:
        mark, space, rest = phrase.partition(" ")
        if space and mark in PHRASE_MARKS:
            by_mark[mark].append(rest)
        else:
            by_mark[""].append(phrase)
    return by_mark


@cache
def _words(file: str = "questions") -> dict[str, Any]:
    """The templates and words in a JSON file of `facts/`, by name."""
    return json.loads((FACTS_FOLDER / f"{file}.json").read_text("utf-8"))


# Random queries with a usable answer, in roughly WikiSQL's mix of aggregates, operators and
# conditions.


def draw(table: FactTable, rng: Random) -> tuple[Query, int] | None:
    """A random query and the number of rows that its conditions match; None if what was drawn makes
    no sense for the table. The caller draws again then."""
    agg = rng.choices(range(len(AGGREGATES)), AGGREGATE_WEIGHTS)[0]
    number = rng.choices(range(len(CONDITION_WEIGHTS)), CONDITION_WEIGHTS)[0]
    kinds = SELECTABLE[AGGREGATES[agg]]
    selectable = [i for i, column in enumerate(table.columns) if column.kind in kinds]
    if not selectable:
        return None
    sel = rng.choice(selectable)
    columns = _draw_columns(table, agg, sel, number, rng)
    if columns is None:
        return None
    # All conditions are made for one row, so that at least this one meets them.
    row_to_find = rng.choice(table.rows)
    conditions = [_draw_condition(table, column, row_to_find[column], rng) for column in columns]
    matches = [row for row in table.rows if _meets_all(table, row, conditions)]
    if not _makes_sense(table, agg, conditions, len(matches)):
        return None
    return Query(sel, agg, tuple(conditions)), len(matches)


def _draw_columns(
    table: FactTable, agg: int, sel: int, number: int, rng: Random
) -> list[int] | None:
    """The columns that `number` conditions are about; None if the table has too few."""
    is_plain_look_up = agg == 0 and number == 1 and sel != KEY_COLUMN
    if is_plain_look_up and rng.random() < KEY_SHARE:
        return [KEY_COLUMN]
    others = [i for i in range(len(table.columns)) if i not in (sel, KEY_COLUMN)]
    if number > len(others):
        return None
    return rng.sample(others, number)


def _draw_condition(table: FactTable, column: int, cell: Cell, rng: Random) -> Condition:
    """A condition that a cell meets.

    Comparisons split a column at one of its quartiles, so that the same limits recur in many
    questions.
    """
    equality = Condition(column, OPERATORS.index("="), str(cell))
    if not table.columns[column].is_number:
        return equality
    symbol = rng.choices(OPERATORS[:3], OPERATOR_WEIGHTS)[0]
    if symbol == "=":
        return equality
    values = sorted({Decimal(str(row[column])) for row in table.rows})
    if len(values) < 2:
        return equality
    # A cut is an index of `values`: the limit is to lie between this value and the next one.
    cuts = sorted({(len(values) - 1) * quarter // 4 for quarter in (1, 2, 3)})
    position = values.index(Decimal(str(cell)))
    cuts_by_symbol = {
        ">": [cut for cut in cuts if cut < position],
        "<": [cut for cut in cuts if cut >= position],
    }
    # The smallest and the largest values have a cut on one side only.
    if not cuts_by_symbol[symbol]:
        symbol = "<" if symbol == ">" else ">"
    cut = rng.choice(cuts_by_symbol[symbol])
    limit = _roundest_between(values[cut], values[cut + 1], symbol)
    # The sum with 0 turns -0 into 0.
    plain_limit = limit.normalize() + 0
    return Condition(column, OPERATORS.index(symbol), f"{plain_limit:f}")


def _roundest_between(low: Decimal, high: Decimal, symbol: str) -> Decimal:
    """The roundest number that separates the two: `> n` holds for `high` only, `< n` for `low`
    only."""
    # From billions to ten-thousandths, the rounder first: the facts need no finer numbers.
    for exponent in range(9, -5, -1):
        step = Decimal(1).scaleb(exponent)
        if symbol == ">":
            number = (low / step).to_integral_value(ROUND_CEILING) * step
            separates = low <= number < high
        else:
            number = (high / step).to_integral_value(ROUND_FLOOR) * step
            separates = low < number <= high
        if separates:
            break
    return number


def _meets_all(table: FactTable, row: Sequence[Cell], conditions: Sequence[Condition]) -> bool:
    """Whether a row meets all conditions."""
    for column, operator_index, value in conditions:
        compare = COMPARISONS[operator_index]
        cell = str(row[column])
        if table.columns[column].is_number:
            meets = compare(float(cell), float(value))
        else:
            meets = compare(cell, value)
        if not meets:
            return False
    return True


def _makes_sense(
    table: FactTable, agg: int, conditions: Sequence[Condition], match_count: int
) -> bool:
    """Whether somebody would ask a query that matches this number of rows.

    Nobody would ask for `1 moons`, by conditions that every row meets, or for a statistic of a
    single row.
    """
    for column, _, value in conditions:
        if table.columns[column].kind == "count" and value == "1":
            return False
    if conditions and match_count == len(table.rows):
        return False
    is_statistic = AGGREGATES[agg] in ("MAX", "MIN", "SUM", "AVG")
    fewest = 2 if is_statistic else 1
    return match_count >= fewest


# A query in a person's words.


def ask(table: FactTable, query: Query, match_count: int, rng: Random) -> tuple[str, Query]:
    """A question, and the query with its conditions in the order in which the question names them.

    Values appear in the question exactly as in the query; the words around them may be lower-cased.

    Args:
        match_count: number of rows that the query's conditions match.
    """
    conditions = list(query.conds)
    rng.shuffle(conditions)
    has_several = match_count > 1
    template = rng.choice(_templates(table, query, has_several, rng))
    slots, conditions_as_named = _condition_slots(table, template, conditions, has_several, rng)
    slots |= _noun_slots(table, query, has_several, rng)
    question = template.format(**slots)
    bare = question.rstrip("?.")
    question = rng.choices((question, bare, bare.lower()), STYLE_WEIGHTS)[0]
    for number, condition in enumerate(conditions):
        question = question.replace(VALUE_PLACEHOLDER.format(number), condition.value)
    return question, replace(query, conds=tuple(conditions_as_named))


def _condition_slots(
    table: FactTable,
    template: str,
    conditions: Sequence[Condition],
    has_several: bool,
    rng: Random,
) -> tuple[dict[str, str], Sequence[Condition]]:
    """The slots of a template that hold the conditions, and the conditions in the order in which
    they are named there.

    The placeholder of a value has the number of its condition among `conditions`.
    """
    has_mods = "{mods}" in template
    has_predicates = "{preds}" in template or "{many_preds}" in template
    if not has_mods and not has_predicates:
        clauses = _clauses(table, conditions, "the", rng)
        return {"clause": _joined(clauses)}, conditions
    is_plural = "{many}" in template or ("{entity}" in template and has_several)
    predicates = _predicates(table, conditions, rng)
    slots = _predicate_slots(table, predicates, is_plural, rng)
    if has_mods and rng.random() < WHOSE_SHARE:
        clauses = _clauses(table, conditions, "whose", rng)
        slots["mods"] = _joined(clauses)
        return slots, conditions
    return slots, [predicate.condition for predicate in predicates]


def _templates(table: FactTable, query: Query, has_several: bool, rng: Random) -> list[str]:
    """The templates that fit a query, some more than once, since they are to be drawn more
    often."""
    words = _words()
    column = table.columns[query.sel]
    aggregate = AGGREGATES[query.agg]
    # Templates for questions about all rows have names of their own.
    ending = "" if query.conds else "_all"
    if aggregate == "COUNT":
        return words[f"count{ending}"]
    if aggregate == "SUM" and column.kind == "count":
        return words[f"number{ending}"] + words[f"sum_count{ending}"] * 2
    if aggregate:
        return words[f"number{ending}"]
    if query.sel == KEY_COLUMN:
        return _templates_of_things(column, query, has_several)
    if not query.conds:
        return words["value_all"]
    is_by_name = query.conds[0].column == KEY_COLUMN
    if is_by_name and column.phrases["?"] and rng.random() < WRITTEN_QUESTION_SHARE:
        return [text.replace("{}", "{value}") + "?" for text in column.phrases["?"]]
    kind = "of_name" if is_by_name else "value"
    return words[kind] + words.get(f"{kind}_{column.kind}", []) * 2


def _templates_of_things(column: FactColumn, query: Query, has_several: bool) -> list[str]:
    """The templates that ask for the names of the things that a table is about."""
    words = _words()
    if not query.conds:
        return words["entity_all"]
    templates = list(words["entity"])
    if column.kind == "who":
        templates += words["entity_who"]
    if has_several:
        templates += words["entity_many"]
    return templates


def _noun_slots(table: FactTable, query: Query, has_several: bool, rng: Random) -> dict[str, str]:
    """The slots of a template that do not depend on the conditions, by name; a template uses some
    of them."""
    column = table.columns[query.sel]
    noun = rng.choice(column.phrases[""])
    noun_of_value = f"number of {noun}" if column.kind == "count" else noun
    if has_several:
        entity = table.plural
        determiner = rng.choice(("each", "every"))
    else:
        entity = table.singular
        determiner = "the"
    key = rng.choice(table.columns[KEY_COLUMN].phrases[""])
    words_by_aggregate = _words()["words"]
    if column.kind == "year":
        words_by_aggregate = _words()["year_words"]
    word = rng.choice(words_by_aggregate.get(AGGREGATES[query.agg], ("",)))
    return {
        "value": VALUE_PLACEHOLDER.format(0),
        "noun": noun_of_value,
        "things": noun,
        "one": table.singular,
        "many": table.plural,
        "entity": entity,
        "whom": f"{determiner} {table.singular}",
        "key": key,
        "word": word,
    }


class Predicate(NamedTuple):
    """A condition in two parts: `is` and `taller than 300 m`, `has` and `a height above 300`."""

    verb: str
    rest: str
    condition: Condition


def _predicates(table: FactTable, conditions: Sequence[Condition], rng: Random) -> list[Predicate]:
    """The conditions as predicates, in the order in which they are named."""
    predicates = []
    for number, condition in enumerate(conditions):
        verb, rest = _predicate(table, condition, number, rng).split(" ", 1)
        predicates.append(Predicate(verb, rest, condition))
    return sorted(predicates, key=lambda predicate: VERB_RANKS.get(predicate.verb, OTHER_VERB_RANK))


def _predicate(table: FactTable, condition: Condition, number: int, rng: Random) -> str:
    """A condition as a predicate: `is taller than 300 m`, `has a height above 300`.

    Args:
        number: that of the condition, which the placeholder of its value gets.
    """
    column = table.columns[condition.column]
    symbol = OPERATORS[condition.operator]
    value = VALUE_PLACEHOLDER.format(number)
    phrases = column.phrases[symbol]
    if phrases and rng.random() < WRITTEN_PREDICATE_SHARE:
        return rng.choice(phrases).replace("{}", value)
    noun = rng.choice(column.phrases[""])
    if not column.is_number:
        article = rng.choice(("", "the "))
        return f"has {article}{noun} {value}"
    words = _words()
    if column.kind == "count":
        relations = {"=": ("", "exactly"), ">": words["more"], "<": words["fewer"]}
        relation = rng.choice(relations[symbol])
        return f"has {relation} {value} {noun}".replace("  ", " ")
    if column.kind == "year":
        relations = {"=": ("of",), ">": words["after"], "<": words["before"]}
    else:
        relations = {"=": ("of",), ">": words["above"], "<": words["below"]}
    relation = rng.choice(relations[symbol])
    article = "an" if noun[0] in "aeio" else "a"
    return f"has {article} {noun} {relation} {value}"


def _clauses(
    table: FactTable, conditions: Sequence[Condition], first_word: str, rng: Random
) -> list[str]:
    """The conditions as clauses: `the height is above 300`."""
    clauses = []
    for number, condition in enumerate(conditions):
        clauses.append(f"{first_word} {_clause(table, condition, number, rng)}")
    return clauses


def _clause(table: FactTable, condition: Condition, number: int, rng: Random) -> str:
    """A condition as a clause: `height is above 300`; `number` is as for `_predicate`."""
    words = _words()
    column = table.columns[condition.column]
    is_year = column.kind == "year"
    # Both are drawn, whichever is used, so that the random numbers that follow are those of the
    # committed sample.
    above = rng.choice(words["after" if is_year else "is_above"])
    below = rng.choice(words["before" if is_year else "is_below"])
    relations = {"=": "", ">": f"{above} ", "<": f"{below} "}
    relation = relations[OPERATORS[condition.operator]]
    noun = rng.choice(column.phrases[""])
    if column.kind == "count":
        noun = f"number of {noun}"
    return f"{noun} is {relation}{VALUE_PLACEHOLDER.format(number)}"


def _predicate_slots(
    table: FactTable, predicates: Sequence[Predicate], is_plural: bool, rng: Random
) -> dict[str, str]:
    """The slots for predicates: `is wide and has a height`, `in China with a height`."""
    singular = _joined([f"{verb} {rest}" for verb, rest, _ in predicates])
    plural = _joined([f"{PLURAL_VERBS.get(verb, verb)} {rest}" for verb, rest, _ in predicates])
    fitting = plural if is_plural else singular

    can_be_without_verb = all(predicate.verb in PLURAL_VERBS for predicate in predicates)
    if can_be_without_verb and rng.random() < WITHOUT_VERB_SHARE:
        mods = _without_verbs(predicates)
    elif table.columns[KEY_COLUMN].kind == "who":
        mods = f"who {fitting}"
    else:
        mods = f"that {fitting}"

    return {"preds": fitting, "many_preds": plural, "mods": mods}


def _without_verbs(predicates: Sequence[Predicate]) -> str:
    """Predicates of `is`, `was` and `has` as attributes: `in China with a height above 300`."""
    states = _joined([rest for verb, rest, _ in predicates if verb != "has"])
    possessions = _joined([rest for verb, rest, _ in predicates if verb == "has"])
    attributes = []
    if states:
        attributes.append(states)
    if possessions:
        attributes.append(f"with {possessions}")
    return " ".join(attributes)


def _joined(parts: Sequence[str]) -> str:
    """`a, b and c`; empty for no parts."""
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


# SQuAD's layout: statements about three people, and questions about them.

PARAGRAPH_COUNTS = {"train": 200, "dev": 40}
QUESTIONS_OF_PARAGRAPH = 4
PEOPLE_OF_PARAGRAPH = 3
FACTS_OF_PERSON = 3
"""Number of statements that a paragraph has about each of its people."""
PARAGRAPHS_OF_ARTICLE = 20
ANSWER_COUNTS = {"train": 1, "dev": 3}
"""Number of times that each answer is marked, by split, as in SQuAD."""


class Fact(NamedTuple):
    """A statement about a person."""

    sentence: str
    answer: str
    """The part of the sentence that answers the questions."""
    questions: list[str]


def _squad_files(rng: Random) -> tuple[dict[str, bytes], Counts]:
    """`train-v1.1.json` and `dev-v1.1.json`, and the number of questions of each split."""
    files = {}
    question_counts = {}
    contexts = set[str]()
    for split, number in PARAGRAPH_COUNTS.items():
        paragraphs: list[dict[str, object]] = []
        while len(paragraphs) < number:
            facts = _draw_facts(rng)
            context = " ".join(fact.sentence for fact in facts)
            # No paragraph occurs twice, so that dev has none of train.
            if context in contexts:
                continue
            contexts.add(context)
            questions = _draw_questions(split, len(paragraphs), facts, context, rng)
            paragraphs.append({"context": context, "qas": questions})
        document = {"version": "1.1", "data": _articles(split, paragraphs)}
        text = json.dumps(document, ensure_ascii=False) + "\n"
        files[f"{split}-v1.1.json"] = text.encode()
        question_counts[split] = number * QUESTIONS_OF_PARAGRAPH
    return files, {"questions": question_counts}


def _draw_facts(rng: Random) -> list[Fact]:
    """Some statements about each of a few people."""
    words = _words("words")
    facts = []
    for name in rng.sample(words["people"], PEOPLE_OF_PARAGRAPH):
        slots = {
            "name": name,
            "city": rng.choice(words["cities"]),
            "job": rng.choice(words["jobs"]),
            "year": rng.randint(1940, 2005),
            "pet": f"a {rng.choice(words['colours'])} {rng.choice(words['pets'])}",
        }
        for sentence, answer, questions in rng.sample(words["said"], FACTS_OF_PERSON):
            fact = Fact(
                sentence=sentence.format(**slots),
                answer=answer.format(**slots),
                questions=[question.format(**slots) for question in questions],
            )
            facts.append(fact)
    return facts


def _draw_questions(
    split: str, paragraph: int, facts: Sequence[Fact], context: str, rng: Random
) -> list[dict[str, object]]:
    """Questions about some of the facts, with the places of their answers in the context."""
    questions: list[dict[str, object]] = []
    for number, fact in enumerate(rng.sample(facts, QUESTIONS_OF_PARAGRAPH)):
        # The answer ends its sentence; the name at the beginning may hold the same letters.
        start = context.index(fact.sentence) + fact.sentence.rindex(fact.answer)
        answer = {"answer_start": start, "text": fact.answer}
        questions.append(
            {
                "id": f"{split}-{paragraph}-{number}",
                "question": rng.choice(fact.questions),
                "answers": [answer] * ANSWER_COUNTS[split],
            }
        )
    return questions


def _articles(split: str, paragraphs: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """The paragraphs of a split, a few in each article."""
    articles: list[dict[str, object]] = []
    for start in range(0, len(paragraphs), PARAGRAPHS_OF_ARTICLE):
        title = f"People_{split}_{len(articles) + 1}"
        of_article = paragraphs[start : start + PARAGRAPHS_OF_ARTICLE]
        articles.append({"title": title, "paragraphs": of_article})
    return articles


# WikiText's layout: articles about invented towns, with an order that a model can learn.

ARTICLE_COUNTS = {"train": 210, "valid": 20, "test": 20}


def _text_files(rng: Random) -> tuple[dict[str, bytes], Counts]:
    """`train.txt`, `valid.txt` and `test.txt`; the number of articles of each split and the size of
    each file."""
    words = _words("words")
    # Each town has one article, in one of the splits.
    towns = []
    for beginning in words["town_beginnings"]:
        for ending in words["town_endings"]:
            towns.append(beginning + ending)
    rng.shuffle(towns)
    files = {}
    for split, number in ARTICLE_COUNTS.items():
        articles = [_article(towns.pop(), rng) for _ in range(number)]
        files[f"{split}.txt"] = "".join(articles).encode()
    sizes = {name: len(content) for name, content in files.items()}
    return files, {"articles": ARTICLE_COUNTS, "bytes": sizes}


def _article(town: str, rng: Random) -> str:
    """An article: title, opening and three sections; what the opening says about a town comes back
    further down."""
    # The order of the draws is that of the committed sample, and must not change.
    words = _words("words")
    river = rng.choice(words["rivers"])
    land = rng.choice(words["lands"])
    trade = rng.choice(words["trades"])
    founded = rng.randint(1050, 1750)
    founder = rng.choice(words["founders"])
    people = rng.randint(2, 90)
    oldest_record = founded + rng.randint(5, 60)
    year = founded
    built = []
    for building in rng.sample(words["buildings"], 4):
        year += rng.randint(20, 70)
        built.append(f"In {year} the {building} of {town} {rng.choice(words['ends'])} .")
    share = rng.randint(20, 60)
    second_trade = rng.choice(words["trades"])
    season = rng.choice(words["seasons"])
    team = rng.choice(words["teams"])
    wins = rng.randint(2, 19)
    points = wins + rng.randint(1, 9)
    return "".join(words["article"]).format(
        town=town,
        river=river,
        land=land,
        trade=trade,
        founded=founded,
        founder=founder,
        people=people,
        oldest=oldest_record,
        built=" ".join(built),
        carried=year + 10,
        share=share,
        half=share // 2,
        second=second_trade,
        season=season,
        team=team,
        wins=wins,
        points=points,
    )


GENERATORS = {TEXT2SQL: _wikisql_files, SQUAD: _squad_files, LM: _text_files}
"""What makes the files of a sample, by its task."""
