"""`zeropods data sample`: a small data set for each task, generated without any download from what `facts/` holds.

Text-to-SQL in WikiSQL's layout, people in SQuAD's and towns in WikiText's. The last two are made of `facts/words.json`,
the first of the tables in `facts/*.csv`, separated by empty lines. A table is

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
from collections.abc import Iterable
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from zeropods.data.manifest import SPLITS
from zeropods.errors import UserError
from zeropods.outputs import new_folder
from zeropods.sql.query import AGGREGATES, OPERATORS, Condition, Query

FACTS = Path(__file__).with_name("facts")
QUESTIONS = {"train": 24_000, "dev": 600, "test": 600}
HELD_OUT_TABLES = {"dev": 4, "test": 4}
"""Number of tables that only this split has."""
HELD_OUT_SHARE = 5
"""One question in so many of dev and of test is about such a table."""

KEY = 0
"""The column that names what a row is about, and the kinds that it may have."""
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
"""Kinds of columns that each aggregate may be asked of."""

CONDITION_WEIGHTS = (1.3, 65, 24, 6, 4)
AGGREGATE_WEIGHTS = (66, 12, 12, 7, 12, 7)
"""Chosen so that what is left after senseless draws are dropped is about WikiSQL's mix."""
OPERATOR_WEIGHTS = (55, 22, 22)
STYLE_WEIGHTS = (70, 12, 18)
"""Of a question as it is, without its mark, and in lower case besides."""
KEY_SHARE = 0.5
"""Share of plain look-ups that go by the row's name."""
SHARE_ASKED = 0.4
"""Share of look-ups by name that use a question written for the column, where there is one."""
PLURAL = {"is": "are", "was": "were", "has": "have"}

Row = tuple[str | int | float, ...]


@dataclass(frozen=True)
class FactColumn:
    """A column, and how people refer to it."""

    name: str
    kind: str
    phrases: tuple[str, ...]

    @property
    def type(self) -> str:
        """`text` or `real`, as in WikiSQL's files."""
        return "real" if self.kind in NUMBERS else "text"

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
    columns: tuple[FactColumn, ...]
    rows: tuple[Row, ...]

    def to_json(self) -> dict[str, object]:
        """The table as WikiSQL's files have it."""
        names, types = [column.name for column in self.columns], [column.type for column in self.columns]
        return {"id": self.id, "header": names, "types": types, "rows": self.rows}


def write_sample(out: Path, seed: int = 0, task: str = "text2sql") -> dict[str, object]:
    """Write a generated data set for a task into the folder `out`; the same seed gives the same bytes.

    For `text2sql` it is in WikiSQL's layout, for `squad` in SQuAD's, for `lm` in WikiText's. An `out` that holds
    just this already is left as it is; one that holds anything else raises `UserError`.

    Returns:
        What `zeropods data sample --json` prints: `folder`, whether it was `written` now, `seed`, and by split how
        many of what there are, such as `questions`; for text also the `bytes` of each file.
    """
    files, counts = {"text2sql": _wikisql_files, "squad": _squad_files, "lm": _text_files}[task](Random(seed))
    is_new = not out.exists() or not any(out.iterdir())
    if is_new:
        with new_folder(out) as folder:
            for name, content in files.items():
                (folder / name).write_bytes(content)
    elif other := [
        name for name, content in files.items() if not (out / name).is_file() or (out / name).read_bytes() != content
    ]:
        raise UserError(f"{out}: holds something else than the sample of seed {seed} ({other[0]}); name a new folder")
    return {"folder": str(out), "written": is_new, "seed": seed, **counts}


def _wikisql_files(rng: Random) -> tuple[dict[str, bytes], dict[str, dict[str, int]]]:
    """`SPLIT.jsonl` and `SPLIT.tables.jsonl` of train, dev and test, and what they hold.

    Tables of dev and test are in part those of train; `held_out_questions` are about others.
    """
    tables = {table.id: table for table in read_facts()}
    questions = _questions_of_splits(list(tables.values()), rng)
    asked = {split: {each["table_id"] for each in of_split} for split, of_split in questions.items()}
    files = {}
    for split, of_split in questions.items():
        files[f"{split}.jsonl"] = _json_lines(of_split)
        files[f"{split}.tables.jsonl"] = _json_lines(tables[id_].to_json() for id_ in sorted(asked[split]))
    return files, {
        "questions": {split: len(of_split) for split, of_split in questions.items()},
        "tables": {split: len(of_split) for split, of_split in asked.items()},
        "held_out_questions": {
            split: sum(each["table_id"] not in asked["train"] for each in questions[split]) for split in HELD_OUT_TABLES
        },
    }


def _questions_of_splits(tables: list[FactTable], rng: Random) -> dict[str, list[dict[str, Any]]]:
    """The questions of each split as WikiSQL's files have them; no two of all splits have the same words."""
    rng.shuffle(tables)
    held_out = {split: [tables.pop() for _ in range(number)] for split, number in HELD_OUT_TABLES.items()}
    seen: set[str] = set()
    splits: dict[str, list[dict[str, Any]]] = {}
    for split in reversed(SPLITS):
        unknown = QUESTIONS[split] // HELD_OUT_SHARE if split in held_out else 0
        known = QUESTIONS[split] - unknown
        asked = [_new_question(tables[n % len(tables)], seen, rng) for n in range(known)]
        asked += [_new_question(held_out[split][n % len(held_out[split])], seen, rng) for n in range(unknown)]
        rng.shuffle(asked)
        splits[split] = asked
    return {split: splits[split] for split in SPLITS}


def read_facts() -> list[FactTable]:
    """All tables, in the order of file names."""
    blocks = (block for file in sorted(FACTS.glob("*.csv")) for block in file.read_text("utf-8").strip().split("\n\n"))
    return [_fact_table(list(csv.reader(block.strip().splitlines()))) for block in blocks]


@cache
def _words(file: str = "questions") -> dict[str, Any]:
    """Templates and words by name, as a JSON file of `facts/` has them."""
    return json.loads((FACTS / f"{file}.json").read_text("utf-8"))


def _fact_table(block: list[list[str]]) -> FactTable:
    (id, singular, plural), names, kinds, phrases, *rows = block
    columns = tuple(FactColumn(n, k, tuple(p.split("|"))) for n, k, p in zip(names, kinds, phrases, strict=True))
    cells = tuple(tuple(_cell(c, v) for c, v in zip(columns, row, strict=True)) for row in rows)
    return FactTable(id, singular, plural, columns, cells)


def _cell(column: FactColumn, text: str) -> str | int | float:
    if column.type == "text":
        return text
    return float(text) if "." in text else int(text)


def _new_question(table: FactTable, seen: set[str], rng: Random) -> dict[str, Any]:
    """A question whose words are in no other; they are added to `seen`."""
    while True:
        drawn = draw(table, rng)
        if drawn is None:
            continue
        question, query = ask(table, drawn, rng)
        words = question.lower().rstrip("?.")
        if words not in seen:
            seen.add(words)
            return {"phase": 1, "table_id": table.id, "question": question, "sql": query.to_json()}


def _json_lines(documents: Iterable[dict[str, object]]) -> bytes:
    return "".join(json.dumps(document, ensure_ascii=False) + "\n" for document in documents).encode()


# Random queries with a usable answer, in about WikiSQL's mix of aggregates, operators and conditions.


class Draw(NamedTuple):
    """A query, and the number of rows of its table that it matches."""

    query: Query
    matches: int


def draw(table: FactTable, rng: Random) -> Draw | None:
    """One query, or None where what the dice say makes no sense for the table."""
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
    row = rng.choice(table.rows)
    conds = tuple(_condition(table, column, row, rng) for column in columns)
    matches = sum(all(_holds(r, c, table) for c in conds) for r in table.rows)
    # No `1 moons`, no condition that every row meets, no statistics of a single row.
    odd = any(table.columns[c.column].kind == "count" and c.value == "1" for c in conds)
    all_rows = bool(conds) and matches == len(table.rows)
    fewest = 2 if AGGREGATES[agg] in ("MAX", "MIN", "SUM", "AVG") else 1
    return None if odd or all_rows or matches < fewest else Draw(Query(sel, agg, conds), matches)


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
    start, rounding = (low, ROUND_CEILING) if operator == ">" else (high, ROUND_FLOOR)
    for exponent in range(9, -5, -1):
        step = Decimal(1).scaleb(exponent)
        number = (start / step).to_integral_value(rounding) * step
        if (low <= number < high) if operator == ">" else (low < number <= high):
            break
    return f"{number.normalize() + 0:f}"


def _holds(row: Row, condition: Condition, table: FactTable) -> bool:
    column, operator, value = condition
    if table.columns[column].type == "text":
        return row[column] == value
    cell, limit = float(row[column]), float(value)
    return (cell == limit, cell > limit, cell < limit)[operator]


# A query in a person's words.


def ask(table: FactTable, drawn: Draw, rng: Random) -> tuple[str, Query]:
    """A question, and the query with its conditions in the order in which the question names them.

    Values enter the question as they stand in the query; the words around them may be lower-cased.
    """
    conds = list(drawn.query.conds)
    rng.shuffle(conds)
    template, order = rng.choice(_templates(table, drawn, rng)), list(range(len(conds)))
    if "{mods}" in template or "preds}" in template:
        said = sorted(((_predicate(table, c, n, rng), n) for n, c in enumerate(conds)), key=_rank)
        several = "{many}" in template or ("{entity}" in template and drawn.matches > 1)
        slots = _spoken(table, [text for text, _ in said], several, rng)
        if "{mods}" in template and rng.random() < 0.15:
            slots["mods"] = _joined(["whose " + _clause(table, c, n, rng) for n, c in enumerate(conds)])
        else:
            order = [n for _, n in said]
    else:
        slots = {"clause": _joined(["the " + _clause(table, c, n, rng) for n, c in enumerate(conds)])}
    question = template.format(**slots, value=_mark(0), **_names(table, drawn, rng))
    bare = question.rstrip("?.")
    question = rng.choices((question, bare, bare.lower()), STYLE_WEIGHTS)[0]
    for number, condition in enumerate(conds):
        question = question.replace(_mark(number), condition.value)
    return question, replace(drawn.query, conds=tuple(conds[n] for n in order))


def _templates(table: FactTable, drawn: Draw, rng: Random) -> list[str]:
    """The templates that fit a query."""
    query, column, words = drawn.query, table.columns[drawn.query.sel], _words()
    aggregate, ending = AGGREGATES[query.agg], "" if query.conds else "_all"
    if aggregate == "COUNT":
        return words[f"count{ending}"]
    if aggregate:
        counted = words[f"sum_count{ending}"] * 2 if aggregate == "SUM" and column.kind == "count" else []
        return words[f"number{ending}"] + counted
    if query.sel == KEY:
        who = words["entity_who"] if column.kind == "who" else []
        several = words["entity_many"] if drawn.matches > 1 else []
        return words["entity"] + who + several if query.conds else words["entity_all"]
    if not query.conds:
        return words["value_all"]
    by_name = query.conds[0].column == KEY
    written = [text.replace("{}", "{value}") + "?" for text in column.marked("?")] if by_name else []
    if written and rng.random() < SHARE_ASKED:
        return written
    kind = "of_name" if by_name else "value"
    return words[kind] + words.get(f"{kind}_{column.kind}", []) * 2


def _names(table: FactTable, drawn: Draw, rng: Random) -> dict[str, str]:
    """The slots that do not depend on the conditions."""
    column, several = table.columns[drawn.query.sel], drawn.matches > 1
    noun = rng.choice(column.nouns)
    words = _words()["year_words" if column.kind == "year" else "words"]
    return {
        "noun": f"number of {noun}" if column.kind == "count" else noun,
        "things": noun,
        "one": table.singular,
        "many": table.plural,
        "entity": table.plural if several else table.singular,
        "whom": f"{rng.choice(('each', 'every')) if several else 'the'} {table.singular}",
        "key": rng.choice(table.columns[KEY].nouns),
        "word": rng.choice(words.get(AGGREGATES[drawn.query.agg], ("",))),
    }


def _predicate(table: FactTable, condition: Condition, number: int, rng: Random) -> str:
    """`is taller than 300 m`, `has a height above 300`."""
    column, operator = table.columns[condition.column], OPERATORS[condition.operator]
    written = column.marked(operator)
    if written and rng.random() < 0.6:
        return rng.choice(written).replace("{}", _mark(number))
    noun, value, words = rng.choice(column.nouns), _mark(number), _words()
    if column.type == "text":
        return f"has {rng.choice(('', 'the '))}{noun} {value}"
    if column.kind == "count":
        chosen = {"=": ("", "exactly"), ">": words["more"], "<": words["fewer"]}
        return f"has {rng.choice(chosen[operator])} {value} {noun}".replace("  ", " ")
    above, below = ("after", "before") if column.kind == "year" else ("above", "below")
    chosen = {"=": ("of",), ">": words[above], "<": words[below]}
    return f"has {'an' if noun[0] in 'aeio' else 'a'} {noun} {rng.choice(chosen[operator])} {value}"


def _clause(table: FactTable, condition: Condition, number: int, rng: Random) -> str:
    """`height is above 300`."""
    column, operator = table.columns[condition.column], OPERATORS[condition.operator]
    above, below = ("after", "before") if column.kind == "year" else ("is_above", "is_below")
    # Both are drawn, whichever is said: the numbers that follow are those of the committed sample.
    relation = {"=": "", ">": f"{rng.choice(_words()[above])} ", "<": f"{rng.choice(_words()[below])} "}[operator]
    noun = rng.choice(column.nouns)
    return f"{'number of ' if column.kind == 'count' else ''}{noun} is {relation}{_mark(number)}"


def _rank(said: tuple[str, int]) -> int:
    return {"is": 0, "was": 0, "has": 2}.get(said[0].split()[0], 1)


def _spoken(table: FactTable, predicates: list[str], several: bool, rng: Random) -> dict[str, str]:
    """The slots for predicates that are sorted by rank."""
    plural = [_plural(text) for text in predicates]
    fitting = plural if several else predicates
    short = all(text.split()[0] in PLURAL for text in predicates) and rng.random() < 0.75
    that = "who" if table.columns[KEY].kind == "who" else "that"
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
    return " ".join(filter(None, [_joined(state), f"with {_joined(possession)}" if possession else ""]))


def _joined(parts: list[str]) -> str:
    return ", ".join(parts[:-1]) + f" and {parts[-1]}" if len(parts) > 1 else "".join(parts)


def _mark(number: int) -> str:
    """Stands for the value of a condition until the words around it are final."""
    return f"\0{number}\0"


# SQuAD's layout: what is said of three people, and questions about it.

PARAGRAPHS = {"train": 200, "dev": 40}
QUESTIONS_OF_PARAGRAPH = 4
PEOPLE_OF_PARAGRAPH = 3
FACTS_OF_PERSON = 3
PARAGRAPHS_OF_ARTICLE = 20
ARTICLES = {"train": 210, "valid": 20, "test": 20}


class Fact(NamedTuple):
    """What is said of somebody: a sentence, the answer in it, and questions that it answers."""

    sentence: str
    answer: str
    questions: tuple[str, ...]


def _squad_files(rng: Random) -> tuple[dict[str, bytes], dict[str, dict[str, int]]]:
    """`train-v1.1.json` and `dev-v1.1.json`, and the number of questions of each split."""
    seen: set[str] = set()
    files = {}
    for split, paragraphs in PARAGRAPHS.items():
        made = [_paragraph(f"{split}-{number}", seen, rng) for number in range(paragraphs)]
        articles = [
            {"title": f"People_{split}_{n}", "paragraphs": made[begin : begin + PARAGRAPHS_OF_ARTICLE]}
            for n, begin in enumerate(range(0, paragraphs, PARAGRAPHS_OF_ARTICLE), 1)
        ]
        document = {"version": "1.1", "data": articles}
        files[f"{split}-v1.1.json"] = json.dumps(document, ensure_ascii=False).encode() + b"\n"
    questions = {split: number * QUESTIONS_OF_PARAGRAPH for split, number in PARAGRAPHS.items()}
    return files, {"questions": questions}


def _paragraph(id_: str, seen: set[str], rng: Random) -> dict[str, object]:
    """A context that is in no other paragraph, and questions about some of its facts."""
    facts: list[Fact] = []
    for name in rng.sample(_words("words")["people"], PEOPLE_OF_PARAGRAPH):
        facts += rng.sample(_facts_of(name, rng), FACTS_OF_PERSON)
    context = " ".join(fact.sentence for fact in facts)
    if context in seen:
        return _paragraph(id_, seen, rng)
    seen.add(context)
    asked = rng.sample(facts, QUESTIONS_OF_PARAGRAPH)
    return {"context": context, "qas": [_question(f"{id_}-{n}", f, context, rng) for n, f in enumerate(asked)]}


def _facts_of(name: str, rng: Random) -> list[Fact]:
    words = _words("words")
    city, job, year = rng.choice(words["cities"]), rng.choice(words["jobs"]), str(rng.randint(1940, 2005))
    pet = f"a {rng.choice(words['colours'])} {rng.choice(words['pets'])}"
    return [
        Fact(f"{name} lives in {city}.", city, (f"Where does {name} live?", f"In which city does {name} live?")),
        Fact(f"{name} works as a {job}.", job, (f"What is the job of {name}?", f"What does {name} work as?")),
        Fact(f"{name} was born in {year}.", year, (f"When was {name} born?", f"In which year was {name} born?")),
        Fact(f"{name} has {pet}.", pet, (f"Which animal does {name} have?", f"What pet does {name} have?")),
    ]


def _question(id_: str, fact: Fact, context: str, rng: Random) -> dict[str, object]:
    start = context.index(fact.sentence) + fact.sentence.rindex(fact.answer)
    answer = {"answer_start": start, "text": fact.answer}
    answers = [answer, answer, answer] if id_.startswith("dev") else [answer]
    return {"id": id_, "question": rng.choice(fact.questions), "answers": answers}


# WikiText's layout: articles about invented towns, with an order to be learned.


def _text_files(rng: Random) -> tuple[dict[str, bytes], dict[str, dict[str, int]]]:
    """`train.txt`, `valid.txt` and `test.txt`; the number of articles of each split and the size of each file."""
    towns = [first + last for first in _words("words")["town_beginnings"] for last in _words("words")["town_endings"]]
    rng.shuffle(towns)
    files = {}
    for split, number in ARTICLES.items():
        files[f"{split}.txt"] = "".join(_article(towns.pop(), rng) for _ in range(number)).encode()
    return files, {"articles": ARTICLES, "bytes": {name: len(content) for name, content in files.items()}}


def _article(town: str, rng: Random) -> str:
    """Title, opening and three sections: what the opening says of a town comes back further down."""
    words = _words("words")
    river, land, trade = rng.choice(words["rivers"]), rng.choice(words["lands"]), rng.choice(words["trades"])
    year = rng.randint(1050, 1750)
    opening = (
        f"{town} is a town on the River {river} , near {land} . It was founded in {year} "
        f"by {rng.choice(words['founders'])} and is known for its {trade} . "
        f"The people of {town} number about {rng.randint(2, 90)} @,@ 000 ."
    )
    history = [f"The oldest record of {town} is from {year + rng.randint(5, 60)} ."]
    for building in rng.sample(words["buildings"], 4):
        year += rng.randint(20, 70)
        history.append(f"In {year} the {building} of {town} {rng.choice(words['ends'])} .")
    history.append(f"By {year + 10} the {trade} of {town} was carried down the {river} to the sea .")
    share, second = rng.randint(20, 60), rng.choice(words["trades"])
    economy = (
        f"About {share} percent of the people of {town} live from {trade} , and {share // 2} percent from {second} . "
        f"A market for {trade} is held on the bank of the {river} in {rng.choice(('spring', 'summer', 'autumn'))} ."
    )
    team, wins = rng.choice(words["teams"]), rng.randint(2, 19)
    sport = (
        f"The {team} club of {town} has won the cup of the {river} valley {wins} times , "
        f"most recently by {wins + rng.randint(1, 9)} points to {wins} ."
    )
    sections = {"History": " ".join(history), "Economy": economy, "Sport": sport}
    text = f" \n = {town} = \n \n {opening} \n"
    return text + "".join(f" \n = = {title} = = \n \n {body} \n" for title, body in sections.items())
