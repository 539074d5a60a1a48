"""`zeropods data sample`: a small data set for each task, generated from the files in `facts/` without any download.

Text-to-SQL is in WikiSQL's layout, people in SQuAD's and towns in WikiText's. The last two are made from
`facts/words.json`, the first from the tables in `facts/*.csv`, which are separated by empty lines. A table is

    id,singular,plural        planets,planet,planets
    column names              Planet,Type,Diameter (km)
    kinds                     name,text,level
    phrases, split at |       planet,type|class,diameter|> is wider than {} km|? How wide is {}
    rows                      Mars,rocky,6779

Kinds of text: `name` (what a row is about: the first column, and no other; `who` where that is a person), `text`,
`person`. Kinds of numbers: `amount` (may be summed), `level` (may not), `year`, `count` (of a plural noun). A phrase is
a noun; or, after `= `, `> ` or `< `, a predicate with the value at `{}`; or, after `? `, a question about the column
with the row's name at `{}`.

`facts/questions.json` holds the templates of questions and the words in them. Their slots: `{noun}` the selected
column, `{things}` a counted plural, `{value}` a row's name, `{one}` and `{many}` what a row is about, `{entity}` the
one that fits the number of rows, `{key}` a noun for the naming column, `{whom}` `the ONE` or `each ONE`, `{mods}` `with
a height above 300`, `{preds}` `has a height above 300`, `{many_preds}` the same in the plural, `{clause}` `the height
is above 300`, `{word}` `highest`, `total`, `average` and the like.
"""

from __future__ import annotations

import csv
import json
import operator
from collections import defaultdict
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Literal

from zeropods.data.manifest import SPLITS
from zeropods.data.wikisql import split_files
from zeropods.errors import UserError
from zeropods.outputs import new_folder
from zeropods.sql.query import AGGREGATES, OPERATORS, Condition, Query
from zeropods.sql.table import Cell, SQLTable

FACTS = Path(__file__).with_name("facts")
QUESTIONS = {"train": 24_000, "dev": 600, "test": 600}
HELD_OUT_TABLES = {"dev": 4, "test": 4}
"""Number of tables, by split, that no other split has."""
HELD_OUT_SHARE = 5
"""One question in this many of dev and of test is about a table that only that split has."""

KEY = 0
"""Index of the column that names what a row is about; `KEYS` are the kinds that it may have."""
KEYS = ("name", "who")
NUMBERS = ("amount", "level", "year", "count")
SELECTABLE = {
    "": (*KEYS, "text", "person", *NUMBERS),
    "COUNT": KEYS,
    "MAX": NUMBERS,
    "MIN": NUMBERS,
    "SUM": ("amount", "count"),
    "AVG": ("amount", "level", "count"),
}
"""Kinds of columns that each aggregate may be applied to."""

CONDITION_WEIGHTS = (1.3, 65, 24, 6, 4)
AGGREGATE_WEIGHTS = (66, 12, 12, 7, 12, 7)
"""Weights of the draws, chosen so that what is left after dropping senseless ones is about WikiSQL's mix."""
OPERATOR_WEIGHTS = (55, 22, 22)
STYLE_WEIGHTS = (70, 12, 18)
"""Weights of a question as it is, without its final mark, and both without the mark and in lower case."""
KEY_SHARE = 0.5
"""Share of plain look-ups, with no aggregate and one condition, that find the row by its name."""
SHARE_ASKED = 0.4
"""Share of look-ups by name that use a question written for the column, if there is one."""
PLURAL = {"is": "are", "was": "were", "has": "have"}
COMPARED = (operator.eq, operator.gt, operator.lt)
VALUE = "\0{}\0"
"""Placeholder for the value of a condition, by its number, until the words around it are final."""

Counts = dict[str, dict[str, int]]


@dataclass(frozen=True)
class FactColumn:
    """How people refer to a column."""

    kind: str
    phrases: dict[str, list[str]]
    """Phrases by their mark: names for the column have none, `is wider than {} km` has `>`."""

    @property
    def is_number(self) -> bool:
        """Whether the column's type in WikiSQL's files is `real` rather than `text`."""
        return self.kind in NUMBERS


@dataclass(frozen=True)
class FactTable(SQLTable):
    """A table of facts about things of one sort."""

    singular: str
    plural: str
    columns: tuple[FactColumn, ...]


def write_sample(out: Path, seed: int = 0, task: str = "text2sql") -> dict[str, object]:
    """Write a generated data set for a task into the folder `out`; the same seed gives the same bytes.

    For `text2sql` it is in WikiSQL's layout, for `squad` in SQuAD's, for `lm` in WikiText's. An `out` that already
    holds these files is left as it is; one that holds anything else instead raises `UserError`.

    Returns:
        What `zeropods data sample --json` prints: `folder`, whether it was `written` now, `seed`, and counts by split,
        such as that of `questions`; for text also the `bytes` of each file.
    """
    files, counts = {"text2sql": _wikisql_files, "squad": _squad_files, "lm": _text_files}[task](Random(seed))
    is_new = not out.exists() or not any(out.iterdir())
    if is_new:
        with new_folder(out) as folder:
            for name, content in files.items():
                (folder / name).write_bytes(content)
    for name, content in files.items():
        if not (out / name).is_file() or (out / name).read_bytes() != content:
            raise UserError(
                f"{out}: holds something other than the sample of seed {seed} ({name}); choose a new folder"
            )
    return {"folder": str(out), "written": is_new, "seed": seed, **counts}


def _wikisql_files(rng: Random) -> tuple[dict[str, bytes], Counts]:
    """`SPLIT.jsonl` and `SPLIT.tables.jsonl` of train, dev and test, and the counts of what they hold.

    Some tables of dev and test are also in train; `held_out_questions` are about the others. Across all splits, no two
    questions have the same words.
    """
    tables = read_facts()
    by_id = {table.id: table for table in tables}
    rng.shuffle(tables)
    held_out = {split: [tables.pop() for _ in range(number)] for split, number in HELD_OUT_TABLES.items()}
    seen: set[str] = set()
    questions, asked = {}, {}
    for split in reversed(SPLITS):
        unknown, own = QUESTIONS[split] // HELD_OUT_SHARE if split in held_out else 0, held_out.get(split, [])
        about = [tables[n % len(tables)] for n in range(QUESTIONS[split] - unknown)]
        about += [own[n % len(own)] for n in range(unknown)]
        questions[split] = [_new_question(table, seen, rng) for table in about]
        rng.shuffle(questions[split])
        asked[split] = {table.id for table in about}
    files: dict[str, bytes] = {}
    for split in SPLITS:
        files |= split_files(split, [by_id[id_] for id_ in sorted(asked[split])], questions[split])
    return files, {
        "questions": {split: len(questions[split]) for split in SPLITS},
        "tables": {split: len(asked[split]) for split in SPLITS},
        "held_out_questions": {
            split: sum(each["table_id"] not in asked["train"] for each in questions[split]) for split in HELD_OUT_TABLES
        },
    }


def read_facts() -> list[FactTable]:
    """All tables of facts, in the order of the names of their files."""
    tables = []
    for block in (b for file in sorted(FACTS.glob("*.csv")) for b in file.read_text("utf-8").strip().split("\n\n")):
        (id_, singular, plural), names, kinds, phrases, *lines = csv.reader(block.strip().splitlines())
        columns = []
        for kind, written in zip(kinds, phrases, strict=True):
            by_mark = defaultdict[str, list[str]](list)
            for phrase in written.split("|"):
                marked = phrase[:2] in ("= ", "> ", "< ", "? ")
                by_mark[phrase[0] if marked else ""].append(phrase[2:] if marked else phrase)
            columns.append(FactColumn(kind, by_mark))
        types: list[Literal["text", "real"]] = ["real" if column.is_number else "text" for column in columns]
        reads = [json.loads if column.is_number else str for column in columns]
        rows = (tuple(read(cell) for read, cell in zip(reads, line, strict=True)) for line in lines)
        tables.append(FactTable(id_, tuple(names), tuple(types), tuple(rows), singular, plural, tuple(columns)))
    return tables


@cache
def _words(file: str = "questions") -> dict[str, Any]:
    """The templates and words in a JSON file of `facts/`, by name."""
    return json.loads((FACTS / f"{file}.json").read_text("utf-8"))


def _new_question(table: FactTable, seen: set[str], rng: Random) -> dict[str, Any]:
    """A question whose wording is not in `seen` yet; it is added there."""
    while True:
        drawn = draw(table, rng)
        if drawn is None:
            continue
        question, query = ask(table, *drawn, rng)
        words = question.lower().rstrip("?.")
        if words not in seen:
            seen.add(words)
            return {"phase": 1, "table_id": table.id, "question": question, "sql": query.to_json()}


# Random queries with a usable answer, in roughly WikiSQL's mix of aggregates, operators and conditions.


def draw(table: FactTable, rng: Random) -> tuple[Query, int] | None:
    """A random query and the number of rows that it matches, or None if what was drawn makes no sense for the table."""
    agg = rng.choices(range(6), AGGREGATE_WEIGHTS)[0]
    number = rng.choices(range(5), CONDITION_WEIGHTS)[0]
    selectable = [i for i, column in enumerate(table.columns) if column.kind in SELECTABLE[AGGREGATES[agg]]]
    if not selectable:
        return None
    sel = rng.choice(selectable)
    others = [i for i in range(len(table.columns)) if i not in (sel, KEY)]
    if agg == 0 and number == 1 and sel != KEY and rng.random() < KEY_SHARE:
        columns = [KEY]
    elif number <= len(others):
        columns = rng.sample(others, number)
    else:
        return None
    row, matching = rng.choice(table.rows), list(table.rows)
    conds = tuple(_condition(table, column, row[column], rng) for column in columns)
    for column, compared, value in conds:
        read: Any = float if table.columns[column].is_number else str
        matching = [row for row in matching if COMPARED[compared](read(row[column]), read(value))]
    # No `1 moons`, no condition that every row meets, no statistics of a single row.
    odd = any(table.columns[c.column].kind == "count" and c.value == "1" for c in conds)
    all_rows = bool(conds) and len(matching) == len(table.rows)
    fewest = 2 if AGGREGATES[agg] in ("MAX", "MIN", "SUM", "AVG") else 1
    return None if odd or all_rows or len(matching) < fewest else (Query(sel, agg, conds), len(matching))


def _condition(table: FactTable, column: int, cell: Cell, rng: Random) -> Condition:
    """A condition that a cell meets; comparisons split a column at its quartiles, so that the same limits recur."""
    compared = rng.choices(range(3), OPERATOR_WEIGHTS)[0] if table.columns[column].is_number else 0
    values = sorted({Decimal(str(r[column])) for r in table.rows}) if compared else []
    if len(values) < 2:
        return Condition(column, 0, str(cell))
    at = values.index(Decimal(str(cell)))
    cuts = sorted({(len(values) - 1) * quarter // 4 for quarter in (1, 2, 3)})
    sides = {1: [cut for cut in cuts if cut < at], 2: [cut for cut in cuts if cut >= at]}
    compared = compared if sides[compared] else 3 - compared
    cut = rng.choice(sides[compared])
    low, high, above = values[cut], values[cut + 1], OPERATORS[compared] == ">"
    # The roundest number that separates the two: `> n` holds for `high` only, `< n` for `low` only.
    for exponent in range(9, -5, -1):
        step = Decimal(1).scaleb(exponent)
        start, rounding = (low, ROUND_CEILING) if above else (high, ROUND_FLOOR)
        number = (start / step).to_integral_value(rounding) * step
        if (low <= number < high) if above else (low < number <= high):
            break
    return Condition(column, compared, f"{number.normalize() + 0:f}")


# A query in a person's words.


def ask(table: FactTable, query: Query, matches: int, rng: Random) -> tuple[str, Query]:
    """A question, and the query with its conditions in the order in which the question names them.

    Values appear in the question exactly as in the query; the words around them may be lower-cased.
    """
    conds, several = list(query.conds), matches > 1
    rng.shuffle(conds)
    template, order = rng.choice(_templates(table, query, several, rng)), list(range(len(conds)))
    if "{mods}" in template or "preds}" in template:
        rank = {"is": 0, "was": 0, "has": 2}
        said = [(_predicate(table, c, n, rng).split(" ", 1), n) for n, c in enumerate(conds)]
        said.sort(key=lambda each: rank.get(each[0][0], 1))
        plural = "{many}" in template or ("{entity}" in template and several)
        slots = _spoken(table, [words for words, _ in said], plural, rng)
        if "{mods}" in template and rng.random() < 0.15:
            slots["mods"] = _joined(["whose " + _clause(table, c, n, rng) for n, c in enumerate(conds)])
        else:
            order = [n for _, n in said]
    else:
        slots = {"clause": _joined(["the " + _clause(table, c, n, rng) for n, c in enumerate(conds)])}
    column = table.columns[query.sel]
    noun = rng.choice(column.phrases[""])
    question = template.format(
        **slots,
        value=VALUE.format(0),
        noun=f"number of {noun}" if column.kind == "count" else noun,
        things=noun,
        one=table.singular,
        many=table.plural,
        entity=table.plural if several else table.singular,
        whom=f"{rng.choice(('each', 'every')) if several else 'the'} {table.singular}",
        key=rng.choice(table.columns[KEY].phrases[""]),
        word=rng.choice(_words()["year_words" if column.kind == "year" else "words"].get(AGGREGATES[query.agg], ("",))),
    )
    bare = question.rstrip("?.")
    question = rng.choices((question, bare, bare.lower()), STYLE_WEIGHTS)[0]
    for number, condition in enumerate(conds):
        question = question.replace(VALUE.format(number), condition.value)
    return question, replace(query, conds=tuple(conds[n] for n in order))


def _templates(table: FactTable, query: Query, several: bool, rng: Random) -> list[str]:
    """The templates that fit a query."""
    column, words, ending = table.columns[query.sel], _words(), "" if query.conds else "_all"
    aggregate = AGGREGATES[query.agg]
    if aggregate == "COUNT":
        return words[f"count{ending}"]
    if aggregate:
        counted = words[f"sum_count{ending}"] * 2 if aggregate == "SUM" and column.kind == "count" else []
        return words[f"number{ending}"] + counted
    if query.sel == KEY:
        who = words["entity_who"] if column.kind == "who" else []
        many = words["entity_many"] if several else []
        return words["entity"] + who + many if query.conds else words["entity_all"]
    if not query.conds:
        return words["value_all"]
    by_name = query.conds[0].column == KEY
    written = [text.replace("{}", "{value}") + "?" for text in column.phrases["?"]] if by_name else []
    if written and rng.random() < SHARE_ASKED:
        return written
    kind = "of_name" if by_name else "value"
    return words[kind] + words.get(f"{kind}_{column.kind}", []) * 2


def _predicate(table: FactTable, condition: Condition, number: int, rng: Random) -> str:
    """A condition as a predicate: `is taller than 300 m`, `has a height above 300`."""
    column, compared, value = table.columns[condition.column], OPERATORS[condition.operator], VALUE.format(number)
    written = column.phrases[compared]
    if written and rng.random() < 0.6:
        return rng.choice(written).replace("{}", value)
    noun, words = rng.choice(column.phrases[""]), _words()
    if not column.is_number:
        return f"has {rng.choice(('', 'the '))}{noun} {value}"
    if column.kind == "count":
        chosen = {"=": ("", "exactly"), ">": words["more"], "<": words["fewer"]}
        return f"has {rng.choice(chosen[compared])} {value} {noun}".replace("  ", " ")
    above, below = ("after", "before") if column.kind == "year" else ("above", "below")
    chosen = {"=": ("of",), ">": words[above], "<": words[below]}
    return f"has {'an' if noun[0] in 'aeio' else 'a'} {noun} {rng.choice(chosen[compared])} {value}"


def _clause(table: FactTable, condition: Condition, number: int, rng: Random) -> str:
    """A condition as a clause: `height is above 300`."""
    column = table.columns[condition.column]
    above, below = ("after", "before") if column.kind == "year" else ("is_above", "is_below")
    # Both are drawn, whichever is used, so that the random numbers that follow are those of the committed sample.
    relations = ("", f"{rng.choice(_words()[above])} ", f"{rng.choice(_words()[below])} ")
    noun = rng.choice(column.phrases[""])
    counted = "number of " if column.kind == "count" else ""
    return f"{counted}{noun} is {relations[condition.operator]}{VALUE.format(number)}"


def _spoken(table: FactTable, predicates: list[list[str]], several: bool, rng: Random) -> dict[str, str]:
    """The slots for predicates, each given as verb and rest: `is wide and has a height`, `in China with a height`."""
    singular = [f"{verb} {rest}" for verb, rest in predicates]
    plural = [f"{PLURAL.get(verb, verb)} {rest}" for verb, rest in predicates]
    fitting = _joined(plural if several else singular)
    if all(verb in PLURAL for verb, _ in predicates) and rng.random() < 0.75:
        possession = _joined([rest for verb, rest in predicates if verb == "has"])
        state = _joined([rest for verb, rest in predicates if verb != "has"])
        mods = " ".join(filter(None, [state, possession and f"with {possession}"]))
    else:
        mods = f"{'who' if table.columns[KEY].kind == 'who' else 'that'} {fitting}"
    return {"preds": fitting, "many_preds": _joined(plural), "mods": mods}


def _joined(parts: list[str]) -> str:
    return ", ".join(parts[:-1]) + f" and {parts[-1]}" if len(parts) > 1 else "".join(parts)


# SQuAD's layout: statements about three people, and questions about them.

PARAGRAPHS = {"train": 200, "dev": 40}
QUESTIONS_OF_PARAGRAPH = 4
PEOPLE_OF_PARAGRAPH = 3
FACTS_OF_PERSON = 3
PARAGRAPHS_OF_ARTICLE = 20


def _squad_files(rng: Random) -> tuple[dict[str, bytes], Counts]:
    """`train-v1.1.json` and `dev-v1.1.json`, and the number of questions of each split."""
    files, contexts = {}, set[str]()
    for split, number in PARAGRAPHS.items():
        paragraphs: list[dict[str, object]] = []
        while len(paragraphs) < number:
            facts = _facts(rng)
            context = " ".join(sentence for sentence, _, _ in facts)
            if context in contexts:
                continue
            contexts.add(context)
            asked = []
            for n, (sentence, answer, questions) in enumerate(rng.sample(facts, QUESTIONS_OF_PARAGRAPH)):
                marked = {"answer_start": context.index(sentence) + sentence.rindex(answer), "text": answer}
                id_ = f"{split}-{len(paragraphs)}-{n}"
                answers = [marked] * (3 if split == "dev" else 1)
                asked.append({"id": id_, "question": rng.choice(questions), "answers": answers})
            paragraphs.append({"context": context, "qas": asked})
        articles = [
            {"title": f"People_{split}_{n}", "paragraphs": paragraphs[begin : begin + PARAGRAPHS_OF_ARTICLE]}
            for n, begin in enumerate(range(0, number, PARAGRAPHS_OF_ARTICLE), 1)
        ]
        files[f"{split}-v1.1.json"] = (
            json.dumps({"version": "1.1", "data": articles}, ensure_ascii=False) + "\n"
        ).encode()
    return files, {"questions": {split: number * QUESTIONS_OF_PARAGRAPH for split, number in PARAGRAPHS.items()}}


def _facts(rng: Random) -> list[tuple[str, str, list[str]]]:
    """Some statements (`said`) about each of a few people: a sentence, the answer in it, and questions about it."""
    words, facts = _words("words"), []
    for name in rng.sample(words["people"], PEOPLE_OF_PARAGRAPH):
        slots = {"name": name, "city": rng.choice(words["cities"]), "job": rng.choice(words["jobs"])}
        slots["year"] = rng.randint(1940, 2005)
        slots["pet"] = f"a {rng.choice(words['colours'])} {rng.choice(words['pets'])}"
        for sentence, answer, questions in rng.sample(words["said"], FACTS_OF_PERSON):
            asked = [question.format(**slots) for question in questions]
            facts.append((sentence.format(**slots), answer.format(**slots), asked))
    return facts


# WikiText's layout: articles about invented towns, with an order that a model can learn.

ARTICLES = {"train": 210, "valid": 20, "test": 20}


def _text_files(rng: Random) -> tuple[dict[str, bytes], Counts]:
    """`train.txt`, `valid.txt` and `test.txt`; the number of articles of each split and the size of each file."""
    towns = [first + last for first in _words("words")["town_beginnings"] for last in _words("words")["town_endings"]]
    rng.shuffle(towns)
    files = {}
    for split, number in ARTICLES.items():
        files[f"{split}.txt"] = "".join(_article(towns.pop(), rng) for _ in range(number)).encode()
    return files, {"articles": ARTICLES, "bytes": {name: len(content) for name, content in files.items()}}


def _article(town: str, rng: Random) -> str:
    """An article: title, opening and three sections; what the opening says about a town comes back further down."""
    words = _words("words")
    slots = {"town": town, **{name: rng.choice(words[f"{name}s"]) for name in ("river", "land", "trade")}}
    year = slots["founded"] = rng.randint(1050, 1750)
    slots |= {"founder": rng.choice(words["founders"]), "people": rng.randint(2, 90)}
    slots["oldest"] = year + rng.randint(5, 60)
    built = []
    for building in rng.sample(words["buildings"], 4):
        year += rng.randint(20, 70)
        built.append(f"In {year} the {building} of {town} {rng.choice(words['ends'])} .")
    share = rng.randint(20, 60)
    slots |= {"built": " ".join(built), "carried": year + 10, "share": share, "half": share // 2}
    slots |= {"second": rng.choice(words["trades"]), "season": rng.choice(words["seasons"])}
    slots["team"], wins = rng.choice(words["teams"]), rng.randint(2, 19)
    return "".join(words["article"]).format(**slots, wins=wins, points=wins + rng.randint(1, 9))
