"""`zeropods VERB`: each verb reads flags, calls one function and returns what to print."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn

from zeropods import __version__
from zeropods.cli import data, launch, models, plan, pods, summary, sweep
from zeropods.errors import guarded
from zeropods.programs import wait_passively
from zeropods.tables import Help

WORDS = {"int": "a whole number", "Path": "a path"}
"""Words for the values that argparse calls by the name of the function that reads them."""

Result = dict[str, Any]
"""What a verb returns: printed as JSON with `--json`, else line by line."""


def main(argv: list[str] | None = None) -> int:
    """Run one verb; the exit status is 0 only if what was asked for was done."""
    wait_passively()

    def command() -> int:
        from zeropods.pods.processes import ending_in_order

        arguments = parser().parse_args(argv)
        with ending_in_order():
            result = arguments.run(arguments)
        print(json.dumps(result, ensure_ascii=False) if arguments.json else arguments.readable(result))
        return arguments.status(result)

    return guarded(command)


@cache
def parser() -> argparse.ArgumentParser:
    """All verbs and their flags."""
    root = VerbParser(prog="zeropods", description="Measure DeepSpeed ZeRO fine-tuning on your own pods.")
    root.add_argument("--version", action="version", version=__version__)
    verbs = root.add_subparsers(required=True, metavar="VERB")
    for verb in (data, models, pods, launch, plan, sweep, summary):
        verb.add_verbs(verbs, _verb)
    return root


class VerbParser(argparse.ArgumentParser):
    """A parser without abbreviated flags, for verbs too; a wrong flag is reported in one line, as all errors are."""

    hint = ""
    """Addition to the error about an unknown flag: what may have caused it."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"formatter_class": Help, **kwargs, "allow_abbrev": False})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:  # type: ignore[override]
        """Parse as argparse does, but let a verb itself report unknown flags, since the error refers to its help."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self.hint}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Print the error in one line and exit with status 2."""
        message = re.sub(
            r"invalid (\w+) value: (.*)", lambda m: f"{m[2]}; expected {WORDS.get(m[1], 'a number')}", message
        )
        self.exit(2, f"{self.prog}: {' '.join(message.split())}; see {self.prog} --help\n")


def _verb(verbs: Any, name: str, help_: str, run: Callable[[argparse.Namespace], Result]) -> Any:
    verb = verbs.add_parser(name, help=help_, description=help_)
    verb.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    verb.set_defaults(run=run, readable=_readable, status=lambda result: 0)
    return verb


def _readable(result: Result) -> str:
    return "\n".join(f"{name:24} {_shown(value)}" for name, value in result.items())


def _shown(value: Any) -> str:
    """A value as text for people: values by name become a list, and no value a dash."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(each)}" for name, each in value.items()) or "-"
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value)) or "-"
    if isinstance(value, bool) or value is None:
        return "-" if value is None else ("no", "yes")[value]
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
