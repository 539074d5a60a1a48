"""A script and the words of its command line: its flags are read here once, without loading the
script.

A flag that comes twice counts with its last value. What our own scripts would refuse is refused
here with the same message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

from zeropods.errors import UserError
from zeropods.train.deepspeed_config import Config, read_config
from zeropods.train.flags import (
    PASSES,
    PROJECT,
    ROWS,
    STEP_ROWS,
    RunArguments,
    TextToSQLArguments,
    arguments_of,
    parse_flags,
    passes_to_reach,
)

STARTERS = ("python", "python3", "deepspeed", "torchrun", "accelerate")
"""Programs that people put before a script; a launch names the script itself."""


@dataclass(frozen=True)
class ConfigFile:
    """A DeepSpeed configuration that was read from its file."""

    path: str
    """The path as it is written on the command line."""
    config: Config


@dataclass(frozen=True)
class ScriptCall:
    """A script with the words of its command line.

    Its flags are read when they are needed first, and are then kept, as is the DeepSpeed
    configuration that they name: whoever has the call reads neither of them again.
    """

    script: Path
    arguments: tuple[str, ...] = ()
    """The words after the script, as they are executed."""

    @classmethod
    def of(cls, name: str | Path, arguments: Sequence[str]) -> ScriptCall:
        """The call of a script in the working folder, or else in the project; `UserError` where it
        is in neither of them."""
        return cls(find_script(name), tuple(arguments))

    @property
    def kind(self) -> type[RunArguments] | None:
        """The class that declares the script's flags; None for a script that is not one of ours."""
        return arguments_of(self.script)

    @cached_property
    def flag_texts(self) -> Mapping[str, str]:
        """The values of the flags on the command line as they are written, by the flags' names with
        `_` for `-`."""
        return flag_values(self.arguments)

    @cached_property
    def parsed(self) -> RunArguments | None:
        """All flags of one of our scripts, those that were left out with their defaults; None for
        another script. `UserError` where the script would refuse them."""
        if self.kind is None:
            return None
        return parse_flags(self.kind, self.arguments)

    @cached_property
    def values(self) -> Mapping[str, object]:
        """The flags by name with typed values: those of our scripts with defaults, and those of
        another script by what they look like. `UserError` as for `parsed`."""
        if self.parsed is not None:
            return asdict(self.parsed)
        return {name: _value_of(text) for name, text in self.flag_texts.items()}

    @property
    def own_step_rows(self) -> int | None:
        """Rows of an optimizer step by `--global_batch` of one of our scripts; None without it."""
        if STEP_ROWS not in self.flag_texts or self.parsed is None:
            return None
        return self.parsed.global_batch

    def with_step_rows(self, step_rows: int, processes: int) -> ScriptCall:
        """The same call with the passes in an optimizer step set, so that the step has these rows.

        Args:
            step_rows: rows of all processes in an optimizer step.
            processes: number of ranks.

        Raises:
            UserError: no whole number of passes reaches these rows, the passes are given too, or
                the rows of a pass are not known.
        """
        place = f"--global-batch {step_rows}"
        remedy = "leave one of them out"
        if PASSES in self.flag_texts:
            passes = self.flag_texts[PASSES]
            raise UserError(f"{place}: sets --{PASSES} {passes} too; {remedy}")
        if self.own_step_rows is not None:
            raise UserError(f"{place}: the script has --{STEP_ROWS} too; {remedy}")
        rows = self.values.get(ROWS)
        if not isinstance(rows, int) or rows < 1:
            reason = f"{self.script.name} says no --{ROWS}"
            raise UserError(f"{place}: {reason}; give it, or leave this out")
        passes_flag = train_arguments(**{PASSES: passes_to_reach(step_rows, rows, processes)})
        return ScriptCall(self.script, (*self.arguments, *passes_flag))

    def with_own_step_rows(self, processes: int) -> ScriptCall:
        """The same call with passes in place of the script's own `--global_batch`, so that a
        restart knows them; the call itself where the script has no such flag or is not given it.

        `UserError` as for `with_step_rows`.
        """
        step_rows = self.own_step_rows
        if step_rows is None:
            return self
        without = ScriptCall(self.script, without_flag(self.arguments, STEP_ROWS))
        return without.with_step_rows(step_rows, processes)

    @property
    def folder(self) -> Path:
        """Absolute path of the folder in which the script leaves its run."""
        # A script that is not ours counts as if it had the text-to-SQL script's default.
        kind = self.kind or TextToSQLArguments
        return Path(self.flag_texts.get("outputdir", kind.outputdir)).resolve()

    @cached_property
    def deepspeed(self) -> ConfigFile | None:
        """The DeepSpeed configuration; None where none is named. `UserError` where it cannot be
        read."""
        path = self.flag_texts.get("deepspeed")
        if path is None:
            return None
        return ConfigFile(path, read_config(Path(path)))


def train_arguments(**flags: Any) -> list[str]:
    """The words of a command line with these flags; a flag whose value is None is left out."""
    arguments = []
    for name, value in flags.items():
        if value is not None:
            arguments += [f"--{name}", str(value)]
    return arguments


def flag_values(arguments: Sequence[str]) -> dict[str, str]:
    """Values of `--name value` and `--name=value` by name, with `_` for `-`; that of a flag without
    a value is empty. If a flag comes twice, the last value counts."""
    values: dict[str, str] = {}
    # The last argument is followed by what counts as another flag, so it has no value.
    for argument, following in zip_longest(arguments, arguments[1:], fillvalue="--"):
        if not argument.startswith("--"):
            continue
        name, equals, value = argument[2:].partition("=")
        if not equals and not following.startswith("--"):
            value = following
        values[name.replace("-", "_")] = value
    return values


def without_flag(arguments: Sequence[str], name: str) -> tuple[str, ...]:
    """The words of a command line without a flag and its value, be that in the same word or in the
    next one.

    Args:
        name: the flag without dashes in front, and with `_` for `-`.
    """
    kept = []
    is_value = False
    for argument in arguments:
        if is_value:
            is_value = False
            continue
        flag_name, equals, _ = argument.partition("=")
        if flag_name.startswith("--") and flag_name[2:].replace("-", "_") == name:
            is_value = not equals
        else:
            kept.append(argument)
    return tuple(kept)


def find_script(name: str | Path) -> Path:
    """Absolute path of a script in the working folder, else of one in the project; `UserError`
    where there is none, or where it is a notebook."""
    folders = dict.fromkeys((Path.cwd(), PROJECT))
    for folder in folders:
        path = (folder / name).resolve()
        if not path.is_file():
            continue
        if path.suffix == ".ipynb":
            raise UserError(f"{name}: a notebook; run it with papermill; a launch needs a script")
        return path
    remedy = ""
    if str(name) in STARTERS:
        remedy = "; name the script itself, as in -- textsql_train.py"
    places = " or in ".join(str(folder) for folder in folders)
    raise UserError(f"{name}: no such script in {places}{remedy}")


def _value_of(text: str) -> object:
    """The value of a flag of a script whose flags are not known, by what its text looks like: a
    truth value, a whole number, another number, or else the text itself."""
    if text in ("True", "False"):
        return text == "True"
    for number_type in (int, float):
        with suppress(ValueError):
            return number_type(text)
    return text
