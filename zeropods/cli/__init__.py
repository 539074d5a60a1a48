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

VALUE_WORDS = {"int": "a whole number", "Path": "a path"}
"""Words for the values that argparse calls by the name of the function that reads them."""

OTHER_VERBS = {
    "help": "--help",
    "train": "launch",
    "run": "launch",
    "finetune": "launch",
    "fine-tune": "launch",
    "tokenize": "prepare",
    "preprocess": "prepare",
    "infer": "predict",
    "inference": "predict",
    "generate": "predict",
    "eval": "score",
    "evaluate": "score",
    "convert": "export",
    "serve": "demo",
    "chat": "demo",
    "estimate": "plan",
    "report": "summary",
    "compare": "summary",
    "up": "pods up",
    "down": "pods down",
    "check": "pods check",
}
"""Verbs of other programs, and others that people try, with ours in their place."""

Result = dict[str, Any]
"""What a verb returns. It is printed as JSON with `--json`, else as text by the function
`readable`, and `status` makes the exit status of it.

Both are defaults of the verb's parser, so that they are among its arguments. A verb may replace
them there while it runs, with a function that knows more than its result tells.
"""


def main(argv: list[str] | None = None) -> int:
    """Run one verb and return the exit status, which is 0 only if what was asked for was done.

    Args:
        argv: the words after `zeropods`; those of this process if not given.
    """
    # Both have to come before a verb loads torch and the libraries that log.
    wait_passively()
    without_chatter()

    def command() -> int:
        from zeropods.pods.processes import ending_in_order

        arguments = parser().parse_args(argv)
        with ending_in_order():
            result = arguments.run(arguments)
        if arguments.json:
            print(json.dumps(result, ensure_ascii=False))
        else:
            print(arguments.readable(result))
        return arguments.status(result)

    return guarded(command)


@cache
def parser() -> argparse.ArgumentParser:
    """The parser of all verbs and their flags, which is made once."""
    description = "Measure DeepSpeed ZeRO fine-tuning on your own pods."
    root = VerbParser(prog="zeropods", description=description)
    root.add_argument("--version", action="version", version=__version__)
    verbs = root.add_subparsers(required=True, metavar="VERB")
    for module in (data, models, pods, launch, plan, sweep, summary):
        module.add_verbs(verbs, _verb)
    return root


class VerbParser(argparse.ArgumentParser):
    """A parser without abbreviated flags, for verbs too; a wrong flag is reported in one line, as
    all errors are."""

    hint = ""
    """Addition to the error about an unknown flag: what may have caused it."""
    foreign: Mapping[str, str] = {}
    """Flags of other programs that do the same, and the flags here in their place."""
    flag_of_a_word: str | None = None
    """Flag that was probably meant by a word without a flag: `--name` in `zeropods pods down
    demo`. None where no flag is to be suggested."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"formatter_class": Help, **kwargs, "allow_abbrev": False})

    def parse_known_args(  # type: ignore[override]
        self, args: Any = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse as argparse does, but let a verb itself report unknown flags, since the error
        refers to its help."""
        arguments, unknown = super().parse_known_args(args, namespace)
        if unknown:
            words = " ".join(unknown)
            self.error(f"unrecognized arguments: {words}{self._suggestion(unknown)}{self.hint}")
        return arguments, unknown

    def _suggestion(self, unknown: Sequence[str]) -> str:
        """The flags that may have been meant by the unknown words, as an addition to the error
        about them; empty where nothing comes near."""
        meanings = self._meanings()
        meant = []
        previous = ""
        for word in unknown:
            name = word.partition("=")[0]
            is_value_of_a_flag = previous.startswith("-")
            if name in self.foreign:
                meant.append(self.foreign[name])
            elif word.startswith("--"):
                for near in get_close_matches(name, meanings, 1):
                    meant.append(meanings[near])
            elif self.flag_of_a_word and not word.startswith("-") and not is_value_of_a_flag:
                meant.append(f"{self.flag_of_a_word} {word}")
            previous = word
        if not meant:
            return ""
        return f"; did you mean {' and '.join(dict.fromkeys(meant))}?"

    def _meanings(self) -> dict[str, str]:
        """What to suggest for a flag that is spelled nearly like one of these keys."""
        meanings = {}
        for flag in self._option_string_actions:
            if flag.startswith("--") and flag != "--help":
                meanings[flag] = flag
        for name in self._names_without_flag():
            meanings[f"--{name.lower()}"] = f"{name} without a flag"
        meanings |= self.foreign
        return meanings

    def _names_without_flag(self) -> list[str]:
        """The names of the verb's arguments that have no flag, as its help shows them."""
        names = []
        for action in self._actions:
            if not action.option_strings:
                names.append(str(action.metavar or action.dest))
        return names

    def error(self, message: str) -> NoReturn:
        """Print the error in one line and exit with status 2."""
        # argparse has no hook for its messages: two of them are recognised here and reworded.
        message = re.sub(r"invalid (\w+) value: (.*)", _expectation, message)
        choice = re.fullmatch(
            r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)", message
        )
        if choice is not None:
            name, value, choices = choice.groups()
            near = get_close_matches(value, re.findall(r"[\w.-]+", choices), 1)
            if name == "VERB" and value in OTHER_VERBS:
                near = [OTHER_VERBS[value]]
            if near:
                message = f"{name} {value!r}: did you mean {near[0]}? (expected one of {choices})"
        line = " ".join(message.split())
        self.exit(2, f"{self.prog}: {line}; see {self.prog} --help\n")


def _expectation(match: re.Match[str]) -> str:
    """What argparse says of an invalid value, in the words of `VALUE_WORDS`."""
    function, value = match.groups()
    return f"{value}; expected {VALUE_WORDS.get(function, 'a number')}"


def _verb(verbs: Any, name: str, help_: str, run: Callable[[argparse.Namespace], Result]) -> Any:
    """Add a verb with the usual `readable` and `status`, and return its parser."""
    verb = verbs.add_parser(name, help=help_, description=help_)
    verb.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    verb.set_defaults(run=run, readable=_readable, status=lambda result: 0)
    return verb


def _readable(result: Result) -> str:
    """A line for each value of a result, with its name."""
    return "\n".join(f"{name:24} {_shown(value)}" for name, value in result.items())


def _shown(value: Any) -> str:
    """A value as text for people: values by name become a list, and no value a dash."""
    if isinstance(value, dict):
        texts = [f"{name} {_shown(item)}" for name, item in value.items()]
        return ", ".join(texts) or "-"
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value)) or "-"
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.4g}"
    return str(value)
