"""Show how this code base reads, room by room, and check what must hold: a mirror and a few rules.

    python tools/house.py          # the tables
    python tools/house.py --check  # the same; status 1 where a rule is broken

A room is a folder of `zeropods/`; the modules right below it are the room `ground`. What the
numbers are for:

* tokens and branches in a code line, comments and docstrings left out: how much a reader has to
  hold in mind at once.
* conditional expressions, and tuple assignments of unlike values, in 1,000 code lines: two thoughts
  in one line.
* lines of more than 100 columns: they are wrapped or cut off on most screens.
* functions of more than 50 lines, or more than 15 branches by radon's count: they do more than one
  thing.
* constants with a namesake in another module: a search finds the wrong one.

A number that is met by an uglier text is a failure. Only these are rules: no imports upwards and
none in a circle; no two public classes of one name; and, in the rooms that have been unfolded, none
of the forms in `FORBIDDEN`. A circle in which only a type checker, or a dotted name in a string,
makes an arrow is shown, and so is one of rooms.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from radon.complexity import cc_visit

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "zeropods"
GROUND = "ground"
WIDEST_LINE = 100
LONGEST_FUNCTION = 50
MOST_BRANCHES = 15

FLOORS = (
    {
        "chatter",
        "cml_task",
        "errors",
        "files",
        "outputs",
        "programs",
        "shipped_models",
        "tables",
        "tasks",
        "techniques",
    },
    {"data", "measure", "plan", "pods", "sql"},
    {"evaluate", "export", "launch", "report", "train"},
    {"sweep"},
    {"cli", "demo", "workshop", "__main__"},
)
"""Packages by floor, from the ground up: a package imports what lies below it, or beside it on its
own floor."""

UNFOLDED = (
    "cli",
    "data",
    "demo",
    "evaluate",
    "ground",
    "launch",
    "measure",
    "plan",
    "pods",
    "report",
    "sql",
    "sweep",
    "train",
)
"""Rooms in which a form of `FORBIDDEN` fails the check. Each room is added when it has been
unfolded."""

IGNORED_TOKENS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
BRANCHES = (
    ast.If,
    ast.IfExp,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.ExceptHandler,
    ast.comprehension,
    ast.Assert,
)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

# The forms that are unfolded wherever they occur.


def _is_conditional_statement(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.IfExp)


def _is_conditional_condition(node: ast.AST) -> bool:
    return isinstance(node, ast.If | ast.While) and isinstance(node.test, ast.IfExp)


def _is_conditional_iterable(node: ast.AST) -> bool:
    return isinstance(node, ast.For) and isinstance(node.iter, ast.IfExp)


def _is_nested_conditional(node: ast.AST) -> bool:
    if not isinstance(node, ast.IfExp):
        return False
    return any(isinstance(part, ast.IfExp) for part in (node.test, node.body, node.orelse))


def _is_nested_f_string(node: ast.AST) -> bool:
    if not isinstance(node, ast.JoinedStr):
        return False
    values = [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
    return any(isinstance(inner, ast.JoinedStr) for value in values for inner in ast.walk(value))


def _is_arithmetic_with_truth(node: ast.AST) -> bool:
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult | ast.Add | ast.Sub):
        return False
    return _is_truth(node.left) or _is_truth(node.right)


def _is_truth(node: ast.AST) -> bool:
    """Whether an expression is True or False by its form: `x or 0` is not, `x > 0 or y` may be."""
    if isinstance(node, ast.BoolOp):
        return any(map(_is_truth, node.values))
    is_negation = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    return is_negation or isinstance(node, ast.Compare)


def _is_unlike_tuple(node: ast.AST) -> bool:
    if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Tuple):
        return False
    if not isinstance(node.value, ast.Tuple):
        return False
    return len({type(value) for value in node.value.elts}) > 1


FORBIDDEN = {
    "a conditional expression as a statement": _is_conditional_statement,
    "a conditional expression as a condition": _is_conditional_condition,
    "a conditional expression in a `for` line": _is_conditional_iterable,
    "a conditional expression in another": _is_nested_conditional,
    "an f-string in an f-string": _is_nested_f_string,
    "arithmetic with truth values": _is_arithmetic_with_truth,
    "a tuple assignment of unlike values": _is_unlike_tuple,
}
"""Forms that hold two thoughts in one line, and what finds each of them."""


class Module:
    """One module: its text, its syntax tree, and what a reader meets in it."""

    def __init__(self, path: Path, root: Path) -> None:
        relative = path.relative_to(root)
        self.path = path
        self.place = str(relative)
        self.name = _dotted_name(relative)
        self.text = path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.text)

    @property
    def is_in_package(self) -> bool:
        """Whether the module belongs to the package; the scripts beside it do not."""
        return self.name.split(".")[0] == PACKAGE

    @property
    def room(self) -> str:
        """The folder of the package in which the module lies."""
        parts = Path(self.place).parts
        return parts[1] if len(parts) > 2 else GROUND

    def code_tokens(self) -> list[tokenize.TokenInfo]:
        """The tokens of the module without comments and docstrings."""
        of_docstrings = self._docstring_lines()
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        kept = []
        for token in tokens:
            if token.type not in IGNORED_TOKENS and token.start[0] not in of_docstrings:
                kept.append(token)
        return kept

    def branches(self) -> int:
        """The decisions of the module: conditions, loops, handlers, comprehensions, `and` and
        `or`."""
        return _branches(self.tree)

    def conditional_expressions(self) -> int:
        """The number of conditional expressions."""
        return sum(isinstance(node, ast.IfExp) for node in ast.walk(self.tree))

    def wide_lines(self) -> int:
        """The number of lines of more than 100 columns."""
        return sum(len(line) > WIDEST_LINE for line in self.text.splitlines())

    def forbidden(self) -> Iterator[tuple[int, str]]:
        """The line and the name of each form of `FORBIDDEN`."""
        for node in ast.walk(self.tree):
            for form, is_form in FORBIDDEN.items():
                if is_form(node):
                    yield getattr(node, "lineno", 0), form

    def long_functions(self) -> Iterator[tuple[str, int]]:
        """The place and the length in lines of each function of more than 50 lines."""
        for node in ast.walk(self.tree):
            if isinstance(node, FUNCTIONS):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > LONGEST_FUNCTION:
                    yield f"{self.place}:{node.lineno} {node.name}", length

    def branching_functions(self) -> Iterator[tuple[str, int]]:
        """The place and the branches, as radon counts them, of each function with more than 15."""
        for block in cc_visit(self.text):
            is_function = block.letter in ("F", "M")
            if is_function and block.complexity > MOST_BRANCHES:
                yield f"{self.place}:{block.lineno} {block.name}", block.complexity

    def constants(self) -> Iterator[str]:
        """The names of the constants that the module defines."""
        for statement in self.tree.body:
            targets = []
            if isinstance(statement, ast.Assign):
                targets = statement.targets
            elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
                targets = [statement.target]
            for target in targets:
                for node in ast.walk(target):
                    if isinstance(node, ast.Name) and node.id.isupper():
                        yield node.id

    def public_classes(self) -> Iterator[str]:
        """The names of the classes that other modules may use."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield node.name

    def _docstring_lines(self) -> set[int]:
        lines = set[int]()
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
                continue
            if isinstance(node.value.value, str):
                lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        return lines


@dataclass
class Room:
    """What is counted of one room."""

    name: str
    lines: int = 0
    tokens: int = 0
    branches: int = 0
    conditional_expressions: int = 0
    unlike_tuples: int = 0
    wide_lines: int = 0
    long_functions: int = 0
    branching_functions: int = 0
    namesakes: int = 0
    forbidden: Counter[str] = field(default_factory=Counter)

    def add(self, module: Module, namesakes: set[str]) -> None:
        """Count a module of the room."""
        tokens = module.code_tokens()
        self.lines += len({token.start[0] for token in tokens})
        self.tokens += len(tokens)
        self.branches += module.branches()
        self.conditional_expressions += module.conditional_expressions()
        self.forbidden.update(form for _, form in module.forbidden())
        self.unlike_tuples = self.forbidden["a tuple assignment of unlike values"]
        self.wide_lines += module.wide_lines()
        self.long_functions += len(list(module.long_functions()))
        self.branching_functions += len(list(module.branching_functions()))
        self.namesakes += len(namesakes.intersection(module.constants()))

    def tokens_a_line(self) -> float:
        """Tokens in a code line, on average."""
        return self.tokens / max(self.lines, 1)

    def cells(self) -> list[str]:
        """The row of the table."""
        lines = max(self.lines, 1)
        return [
            self.name,
            f"{self.lines:,}",
            f"{self.tokens_a_line():.1f}",
            f"{self.branches / lines:.2f}",
            f"{1_000 * self.conditional_expressions / lines:.1f}",
            f"{1_000 * self.unlike_tuples / lines:.1f}",
            str(self.wide_lines),
            str(self.long_functions),
            str(self.branching_functions),
            str(self.namesakes),
            str(sum(self.forbidden.values())),
        ]


HEADINGS = (
    "room",
    "code lines",
    "tokens",
    "branches",
    "a if b else c",
    "unlike tuples",
    "wide",
    "long",
    "branching",
    "namesakes",
    "to unfold",
)
"""Columns of the table: `tokens` and `branches` in a code line, the next two in 1,000 code lines,
then numbers."""


class House:
    """All modules of the project, and the arrows between them."""

    def __init__(self, root: Path = ROOT) -> None:
        paths = sorted([*root.glob(f"{PACKAGE}/**/*.py"), *root.glob("*.py")])
        modules = [Module(path, root) for path in paths]
        self.modules = {module.name: module for module in modules}
        self.package = [module for module in modules if module.is_in_package]
        self.imports = {module.name: self._imports_of(module, types=False) for module in modules}
        self.arrows = {module.name: self._imports_of(module, types=True) for module in modules}

    def rooms(self) -> list[Room]:
        """The rooms, the one with most tokens in a code line first."""
        namesakes = self.namesakes()
        rooms: dict[str, Room] = {}
        for module in self.package:
            room = rooms.setdefault(module.room, Room(module.room))
            room.add(module, namesakes)
        return sorted(rooms.values(), key=Room.tokens_a_line, reverse=True)

    def whole(self) -> Room:
        """The same figures of the whole package."""
        namesakes = self.namesakes()
        whole = Room("all")
        for module in self.package:
            whole.add(module, namesakes)
        return whole

    def namesakes(self) -> set[str]:
        """Names of constants that more than one module defines."""
        definitions = Counter(name for module in self.package for name in set(module.constants()))
        return {name for name, times in definitions.items() if times > 1}

    def upward(self) -> list[str]:
        """Imports from a lower floor to a higher one, as `importer -> imported`."""
        lines = []
        for module in self.package:
            for other in sorted(self.imports[module.name]):
                if _floor(other) > _floor(module.name):
                    lines.append(f"{module.name} -> {other}")
        return lines

    def circles(self) -> list[str]:
        """A circle of modules and a circle of rooms, where there is one; arrows of types and
        strings count."""
        lines = []
        for kind, arrows in (("modules", self.arrows), ("rooms", self._arrows_of_rooms())):
            circle = _circle(arrows)
            if circle:
                lines.append(f"a circle of {kind}: {' -> '.join(circle)}")
        return lines

    def circle_of_imports(self) -> list[str]:
        """The modules along a circle of imports that are carried out; empty where there is none."""
        return _circle(self.imports)

    def shared_class_names(self) -> list[str]:
        """Names of public classes that stand for more than one class."""
        names = Counter(name for module in self.package for name in module.public_classes())
        return sorted(name for name, times in names.items() if times > 1)

    def forbidden(self, rooms: Iterable[str]) -> list[str]:
        """Each form of `FORBIDDEN` in some rooms, with its place."""
        lines = []
        for module in self.package:
            if module.room in rooms:
                for number, form in sorted(module.forbidden()):
                    lines.append(f"{module.place}:{number}: {form}")
        return lines

    def _arrows_of_rooms(self) -> dict[str, set[str]]:
        """The rooms that each room needs; the ground, and the package's own `__init__`, are
        none."""
        arrows: dict[str, set[str]] = defaultdict(set)
        for module in self.package:
            for other in self.arrows[module.name]:
                needed = self.modules[other].room
                if module.room != GROUND and needed not in (GROUND, module.room):
                    arrows[module.room].add(needed)
        return dict(arrows)

    def _imports_of(self, module: Module, *, types: bool) -> set[str]:
        """Modules of the project that a module names; with `types` also for a type checker only, or
        in a string."""
        names = set[str]()
        for node in _nodes(module.tree, types=types):
            names |= self._names_in(node, types=types)
        if module.path.name == "__init__.py":
            # A package names its own modules, which say nothing of where it stands.
            names = {name for name in names if not name.startswith(f"{module.name}.")}
        return {name for name in names if name in self.modules and name != module.name}

    def _names_in(self, node: ast.AST, *, types: bool) -> set[str]:
        """The dotted names in an import, and with `types` in a string; they may be of no module."""
        if isinstance(node, ast.Import):
            return {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            names = set[str]()
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                names.add(inner if inner in self.modules else node.module)
            return names
        if types and isinstance(node, ast.Constant) and isinstance(node.value, str):
            return {node.value}
        return set()


def _dotted_name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def _floor(name: str) -> int:
    """The number of a module's floor, from 0; the package's own `__init__` lies below all, what is
    unknown above."""
    parts = name.split(".")
    if len(parts) == 1:
        return -1
    for number, rooms in enumerate(FLOORS):
        if parts[1] in rooms:
            return number
    return len(FLOORS)


def _branches(tree: ast.AST) -> int:
    count = 0
    for node in ast.walk(tree):
        if isinstance(node, BRANCHES):
            count += 1
        elif isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
    return count


def _nodes(node: ast.AST, *, types: bool) -> Iterator[ast.AST]:
    """All nodes below a node; without `types` except what only a type checker sees."""
    for child in ast.iter_child_nodes(node):
        if types or not _is_for_types(child):
            yield child
            yield from _nodes(child, types=types)


def _is_for_types(node: ast.AST) -> bool:
    """Whether only a type checker sees what is below a node."""
    return isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"


def _circle(arrows: dict[str, set[str]]) -> list[str]:
    """One circle of a graph, as the names along it; empty where there is none."""
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def _table(rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        first = row[0].ljust(widths[0])
        rest = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([first, *rest]))
    return "\n".join(lines)


def broken_rules(house: House) -> list[str]:
    """A line for each rule that is broken, with its place."""
    broken = [f"upwards: {line}" for line in house.upward()]
    circle = house.circle_of_imports()
    if circle:
        broken.append(f"a circle of imports: {' -> '.join(circle)}")
    broken += [f"more than one class is named {name}" for name in house.shared_class_names()]
    return broken + house.forbidden(UNFOLDED)


def main() -> int:
    """Print the tables; with `--check` the status says whether every rule holds."""
    house = House()
    rows = [list(HEADINGS)]
    rows += [room.cells() for room in house.rooms()]
    rows.append(house.whole().cells())
    print(_table(rows))
    places = []
    for module in house.package:
        for place, branches in module.branching_functions():
            places.append((branches, f"{branches} branches: {place}"))
    for _, line in sorted(places, reverse=True):
        print(line)
    broken = broken_rules(house)
    for line in [*house.circles(), *broken]:
        print(line)
    is_failure = "--check" in sys.argv[1:] and bool(broken)
    return int(is_failure)


if __name__ == "__main__":
    sys.exit(main())
