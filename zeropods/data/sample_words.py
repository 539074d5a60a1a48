"""A query in a person's words."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from zeropods.data import sample_templates as templates
from zeropods.data.sample_facts import Column, FactTable
from zeropods.data.sample_queries import Draw
from zeropods.sql.query import AGGREGATES, OPERATORS, Condition, Query

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
        return templates.COUNT if query.conds else templates.COUNT_ALL
    if aggregate:
        return _number_templates(aggregate, column, bool(query.conds))
    if query.sel == table.key:
        return _entity_templates(column, drawn)
    if not query.conds:
        return templates.VALUE_ALL
    if query.conds[0].column == table.key:
        return _name_templates(column, rng)
    extra = {"person": templates.VALUE_PERSON * 2, "count": templates.VALUE_COUNT * 2}
    return templates.VALUE + extra.get(column.kind, ())


def _number_templates(aggregate: str, column: Column, conditional: bool) -> tuple[str, ...]:
    plain: tuple[str, ...] = templates.NUMBER if conditional else templates.NUMBER_ALL
    counted: tuple[str, ...] = templates.SUM_COUNT if conditional else templates.SUM_COUNT_ALL
    return plain + counted * 2 if aggregate == "SUM" and column.kind == "count" else plain


def _entity_templates(column: Column, drawn: Draw) -> tuple[str, ...]:
    if not drawn.query.conds:
        return templates.ENTITY_ALL
    who = templates.ENTITY_WHO if column.kind == "who" else ()
    return templates.ENTITY + who + (templates.ENTITY_MANY if drawn.matches > 1 else ())


def _name_templates(column: Column, rng: Random) -> tuple[str, ...]:
    asked = tuple(text.replace("{}", "{value}") + "?" for text in column.marked("?"))
    if asked and rng.random() < SHARE_ASKED:
        return asked
    extra = {"person": templates.OF_NAME_PERSON * 2, "count": templates.OF_NAME_COUNT * 2}
    return templates.OF_NAME + extra.get(column.kind, ())


def _names(table: FactTable, drawn: Draw, rng: Random) -> dict[str, str]:
    """The slots that do not depend on the conditions."""
    column, several = table.columns[drawn.query.sel], drawn.matches > 1
    noun = rng.choice(column.nouns)
    words = templates.YEAR_WORDS if column.kind == "year" else templates.WORDS
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
        words = {"=": ("", "exactly"), ">": templates.MORE, "<": templates.FEWER}
        return f"{rng.choice(words[operator])} {value} {noun}".strip()
    words = {"=": ("of",), ">": templates.ABOVE, "<": templates.BELOW}
    if column.kind == "year":
        words = {"=": ("of",), ">": templates.AFTER, "<": templates.BEFORE}
    return f"{'an' if noun[0] in 'aeio' else 'a'} {noun} {rng.choice(words[operator])} {value}"


def _clause(table: FactTable, condition: Condition, number: int, rng: Random) -> str:
    """`height is above 300`."""
    column, operator = table.columns[condition.column], OPERATORS[condition.operator]
    is_year = column.kind == "year"
    above: tuple[str, ...] = templates.AFTER if is_year else templates.IS_ABOVE
    below: tuple[str, ...] = templates.BEFORE if is_year else templates.IS_BELOW
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
