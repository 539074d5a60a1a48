"""`zeropods VERB`: each verb reads flags, calls one function and returns what to print."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any, NoReturn

from zeropods import __version__
from zeropods.chatter import without_chatter
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
    without_chatter()

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
    foreign: Mapping[str, str] = {}
    """Flags of other programs that do the same, and the flags here in their place."""
    flag_of_a_word: str | None = None
    """Flag that was meant by a word without one, as `--name` by the word in `zeropods pods down demo`."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"formatter_class": Help, **kwargs, "allow_abbrev": False})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:  # type: ignore[override]
        """Parse as argparse does, but let a verb itself report unknown flags, since the error refers to its help."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._meant(unknown)}{self.hint}")
        return found, unknown

    def _meant(self, unknown: Sequence[str]) -> str:
        """The flags that may have been meant by those that are unknown, as an addition to the error about them."""
        known = {flag: flag for flag in self._option_string_actions if flag.startswith("--") and flag != "--help"}
        known |= {f"--{word.lower()}": f"{word} without a flag" for word in self._words()}
        known |= self.foreign
        meant = []
        for word, before in zip(unknown, ("", *unknown), strict=False):
            name = word.partition("=")[0]
            if name in self.foreign:
                meant.append(self.foreign[name])
            elif word.startswith("--"):
                near = get_close_matches(name, known, 1)
                meant += [known[flag] for flag in near]
            elif self.flag_of_a_word and not word.startswith("-") and not before.startswith("-"):
                meant.append(f"{self.flag_of_a_word} {word}")
        return f"; did you mean {' and '.join(dict.fromkeys(meant))}?" if meant else ""

    def _words(self) -> list[str]:
        """The names of the verb's arguments that have no flag, as its help shows them."""
        return [str(action.metavar or action.dest) for action in self._actions if not action.option_strings]

    def error(self, message: str) -> NoReturn:
        """Print the error in one line and exit with status 2."""
        message = re.sub(
            r"invalid (\w+) value: (.*)", lambda m: f"{m[2]}; expected {WORDS.get(m[1], 'a number')}", message
        )
        choice = re.fullmatch(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)", message)
        if choice is not None:
            near = get_close_matches(choice[2], re.findall(r"[\w.-]+", choice[3]), 1)
            if near:
                message = f"{choice[1]} {choice[2]!r}: did you mean {near[0]}? (expected one of {choice[3]})"
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
