"""Measure the house, this code base: its size, what each script imports, and whether imports point one way.

    python tools/house.py          # the table
    python tools/house.py --check  # the same; status 1 where an import points upwards or in a circle

Imports inside functions count; those under TYPE_CHECKING do not. Lines are lines of files, blank ones included.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

FLOORS = (
    {"chatter", "cml_task", "errors", "files", "outputs", "programs", "tables", "techniques"},
    {"data", "measure", "plan", "pods", "sql"},
    {"evaluate", "export", "launch", "report", "train"},
    {"sweep"},
    {"cli", "demo", "workshop", "__main__"},
)
"""Packages by floor, from the ground up: a package imports what lies below it, or beside it on its own floor."""

CLOSURES = {
    "textsql_train.py on one pod": (("textsql_train",), 60, 7_000),
    "zeropods launch with agents and ranks": (("zeropods.cli.launch", "textsql_train", "worker_p"), 110, 11_500),
    "zeropods summary": (("zeropods.cli.summary",), 30, 3_000),
}
"""The modules at which each closure of imports begins, and the most modules and lines that it should have."""


class House:
    """The modules of this project, and which of them each one imports."""

    def __init__(self, root: Path = ROOT) -> None:
        paths = [*root.glob("zeropods/**/*.py"), *root.glob("*.py")]
        self.paths = {_module_name(path.relative_to(root)): path for path in paths}
        self.trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in self.paths.items()}
        self.lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in self.paths.items()}
        self.imports = {name: set(self._imported(name)) - {name} for name in self.paths}

    def modules(self) -> list[str]:
        """Modules of the package, without the scripts beside it."""
        return [name for name in self.paths if name.startswith("zeropods")]

    def behind(self, starts: Iterable[str]) -> set[str]:
        """Modules of the package that `starts` need, whenever they import them; not the package's own `__init__`."""
        seen, left = set[str](), list(starts)
        while left:
            name = left.pop()
            if name not in seen:
                seen.add(name)
                left += self.imports[name]
        return {name for name in seen if name.startswith("zeropods.")}

    def circles(self) -> list[list[str]]:
        """A circle of imports, if there is one."""
        try:
            TopologicalSorter(self.imports).prepare()
        except CycleError as error:
            return [error.args[1]]
        return []

    def upward(self) -> list[str]:
        """Imports from a lower floor to a higher one, as `importer -> imported`."""
        return [
            f"{name} -> {other}"
            for name in self.modules()
            for other in sorted(self.imports[name])
            if self._floor(other) > self._floor(name)
        ]

    def lonely(self, lines: int = 60) -> list[str]:
        """Short modules that at most one other module imports."""
        users = Counter(other for imported in self.imports.values() for other in imported)
        short = (name for name in self.modules() if self.lines[name] < lines and self.paths[name].stem[:2] != "__")
        return [name for name in short if users[name] <= 1]

    def shared_class_names(self) -> list[str]:
        """Names of public classes that stand for more than one class."""
        trees = (self.trees[name] for name in self.modules())
        names = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
        return sorted(name for name, times in names.items() if times > 1 and not name.startswith("_"))

    def _imported(self, name: str) -> Iterator[str]:
        for node in _nodes(self.trees[name]):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    yield from {inner if inner in self.paths else node.module} & self.paths.keys()
            elif isinstance(node, ast.Import):
                yield from {alias.name for alias in node.names} & self.paths.keys()

    def _floor(self, name: str) -> int:
        room = [*name.split("."), "__init__"][1]
        found = [number for number, rooms in enumerate(FLOORS) if room in rooms]
        # The package's own `__init__`, which holds its version, lies below all floors.
        return found[0] if found else -1 if room == "__init__" else len(FLOORS)


def _module_name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below a node, except what only a type checker sees."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING"):
            yield child
            yield from _nodes(child)


def _text(*patterns: str) -> str:
    return "\n".join(path.read_text(encoding="utf-8") for each in patterns for path in sorted(ROOT.glob(each)))


def rows(house: House) -> Iterator[tuple[str, str, str]]:
    """What is measured, its value, and the limit that is asked for."""
    modules = house.modules()
    yield "lines in zeropods/", f"{sum(house.lines[name] for name in modules):,}", "20,000"
    yield "modules in zeropods/", f"{len(modules)}", "125"
    for title, (starts, most_modules, most_lines) in CLOSURES.items():
        behind = house.behind(starts)
        found = f"{len(behind)} ({sum(house.lines[name] for name in behind):,} lines)"
        yield f"modules behind {title}", found, f"{most_modules} ({most_lines:,})"
    yield "circles of imports", str(len(house.circles())), "0"
    yield "imports that point upwards", str(len(house.upward())), "0"
    yield "class names used twice", str(len(house.shared_class_names())), "0"
    yield "modules under 60 lines that one other imports", str(len(house.lonely())), "9"
    yield "lines with dict[str, Any]", str(_text("zeropods/**/*.py").count("dict[str, Any]")), "70"
    yield "lines in tests/", f"{len(_text('tests/**/*.py').splitlines()):,}", "15,000"
    yield "words in docs/ and README.md", f"{len(_text('docs/*.md', 'README.md').split()):,}", "15,000"


def main() -> int:
    """Print the table; with `--check` the status says whether imports are in order."""
    house = House()
    for title, found, asked in rows(house):
        print(f"{title:<58}{found:>22}   at most {asked}")
    wrong = [*house.upward(), *(" -> ".join(circle) for circle in house.circles())]
    for line in [*wrong, *house.shared_class_names()]:
        print(f"  {line}")
    return int("--check" in sys.argv[1:] and bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
