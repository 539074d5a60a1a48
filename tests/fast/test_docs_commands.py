"""What the pages tell people to type exists: verbs and flags, make targets, files, environment variables."""

import argparse
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache

import pytest

from tests.pages import ROOT, code, commands, pages
from zeropods.cli import parser
from zeropods.train.arguments import CausalArguments, TextToSQLArguments

PAGES = pages()
SCRIPTS = {
    "textsql_train.py": {f"--{field.name}" for field in fields(TextToSQLArguments)},
    "causal_train.py": {f"--{field.name}" for field in fields(CausalArguments)},
}
OTHERS = {
    *("--container-image", "--gpus-per-node", "--nodelist", "--nodes", "--open-mode", "--qos", "--signal", "--time"),
    *("--dataset_config_name", "--dataset_name", "--deepspeed_config", "--output_dir", "--max_length", "--model_name"),
    *("--batch_size", "--num_epochs", "--save_checkpoint", "--resume_from_checkpoint", "--tokenizer_name"),
    *("--hostfile", "--num_nodes", "--num_gpus", "--master_addr", "--master_port", "--no_ssh_check", "--ssh_port"),
    *("--dataset_config", "--shm-size", "--build-arg", "--exclude"),
}
"""Flags of other programs, and of the systems that this project replaces."""


def verbs(node: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], set[str]]]:
    """Each verb as its words, with its flags."""
    yield path, {option for action in node._actions for option in action.option_strings}
    for action in node._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from verbs(below, (*path, name))


VERBS = dict(verbs(parser()))


def verb_of(words: list[str]) -> tuple[str, ...]:
    """The longest verb that the words begin with."""
    best: tuple[str, ...] = ()
    for path in VERBS:
        if (
            len(path) > len(best)
            and all(named in given.split("|") for named, given in zip(path, words[1:], strict=False))
            and len(words) > len(path)
        ):
            best = path
    return best


def flags(words: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)]


CALLS = [(page, words) for page, text in PAGES.items() for words in commands(text, "zeropods")]


@pytest.mark.parametrize("page", sorted({page for page, _ in CALLS}))
def test_every_verb_of_a_page_exists_and_has_the_flags_of_its_call(page: str) -> None:
    calls = [words for of, words in CALLS if of == page]
    assert [words for words in calls if re.match(r"[a-z]", " ".join(words[1:2])) and not verb_of(words)] == []
    wrong = []
    for words in calls:
        own = words[: words.index("--")] if "--" in words else words
        wrong += [(flag, words) for flag in flags(own) if flag not in VERBS[verb_of(words)]]
    assert wrong == []


@pytest.mark.parametrize("script", sorted(SCRIPTS))
def test_every_flag_of_a_script_exists(script: str) -> None:
    calls = [words for text in PAGES.values() for words in commands(text, script)]
    wrong = [(flag, words) for words in calls for flag in flags(words) if flag not in SCRIPTS[script]]
    assert calls and wrong == []


def test_every_make_target_of_a_page_exists_and_every_target_is_in_some_page() -> None:
    makefile = (ROOT / "Makefile").read_text()
    calls = [words for text in PAGES.values() for words in commands(text, "make") if len(words) > 1]
    called = {words[1] for words in calls if re.fullmatch("[a-z-]+", words[1])}
    assert called <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert set(re.findall(r"^([a-z-]+):.*##", makefile, re.MULTILINE)) <= called


TREE = "docs|dsconfig|notebooks|slurm|cloud|cml|tools|matrices|results|zeropods|tests|docker|benchmarks"
FILE = re.compile(rf"(?<![\w./])((?:{TREE})/[\w./-]*\w)")


def there(name: str) -> bool:
    """Whether there is such a file, whatever its suffix."""
    path = ROOT / name
    return path.exists() or any(path.parent.glob(f"{path.name}*"))


@pytest.mark.parametrize("page", sorted(PAGES))
def test_every_file_that_a_page_names_is_there(page: str) -> None:
    named = {name for line in code(PAGES[page]) for name in FILE.findall(line) if not re.search(r"[A-Z]{3}", name)}
    assert [name for name in sorted(named) if not there(name)] == []


def sources() -> str:
    suffixes = (".py", ".sh", ".sbatch", ".ipynb", ".yaml")
    files = [path for path in ROOT.rglob("*") if path.suffix in suffixes or path.name in ("Makefile", "Dockerfile")]
    skipped = (".venv", "build", "runs", ".zeropods", ".git")
    kept = [path for path in files if path.relative_to(ROOT).parts[0] not in skipped and path.is_file()]
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in kept)


def test_every_environment_variable_is_one_that_the_code_knows() -> None:
    text = sources()
    named = {name for page in PAGES.values() for name in re.findall(r"\b(?:ZEROPODS|CDSW|CML)_[A-Z_]*[A-Z]\b", page)}
    settings = {name.upper() for name in re.findall(r'setting\("(\w+)"', text)}
    unknown = [name for name in named if name not in text and name.removeprefix("ZEROPODS_") not in settings]
    assert named and unknown == []


@cache
def flags_of_other_programs_of_ours() -> set[str]:
    """Those of applications, jobs, benchmarks and tools, as their parsers are told."""
    files = [path for folder in ("cml", "benchmarks", "tools") for path in (ROOT / folder).rglob("*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    return set(re.findall(r'add_argument\(\s*"(--[a-z-]+)"', text))


FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")


@pytest.mark.parametrize("page", sorted(page for page in PAGES if page != "docker/README.md"))
def test_every_flag_that_a_page_names_is_known(page: str) -> None:
    known = OTHERS.union(*VERBS.values(), *SCRIPTS.values(), flags_of_other_programs_of_ours())
    named = {flag.rstrip("-_") for line in code(PAGES[page]) for flag in FLAG.findall(line)}
    assert sorted(named - known) == []
