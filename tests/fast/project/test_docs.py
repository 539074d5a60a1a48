"""The pages hang together, say what the project says, and what they tell people to type exists."""

import argparse
import json
import re
import runpy
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import cache
from typing import Any

import pytest

from benchmarks.reliability import page as reliability
from benchmarks.reliability.faults import FAULTS
from benchmarks.reliability.seen import difference
from tests import typed
from tests.pages import ROOT, anchors, blocks, code, commands, pages
from zeropods.cli import main, parser
from zeropods.measure.record import read_json
from zeropods.train.flags import CausalArguments, TextToSQLArguments

DIFF = re.compile(r"^```diff\n.*?^```", re.MULTILINE | re.DOTALL)
"""Matches a diff of docs/recipes.md, which names what is not there yet; `test_recipes.py` applies it."""
PAGES = {page: DIFF.sub("", text) for page, text in pages().items()}
ALL = "\n".join(PAGES.values())
LINK = re.compile(r"\]\(([^)\s]+)\)")


def links() -> list[tuple[str, str, str]]:
    """Page, target's path from the project's folder, anchor; of every link that stays in the project."""
    found = []
    for page, text in PAGES.items():
        for target in LINK.findall(text):
            if not re.match(r"[a-z]+:", target):
                path, _, anchor = target.partition("#")
                place = (ROOT / page).parent / path if path else ROOT / page
                found.append((page, str(place.resolve().relative_to(ROOT)), anchor))
    return found


def test_every_link_leads_to_a_file_or_a_folder_and_every_anchor_to_a_heading() -> None:
    broken = [(page, path) for page, path, _ in links() if not (ROOT / path).exists()]
    assert len(links()) > 60 and broken == []
    wanted = [(page, path, anchor) for page, path, anchor in links() if anchor and path in PAGES]
    assert wanted and [each for each in wanted if each[2] not in anchors(PAGES[each[1]])] == []


def test_every_page_is_in_the_index() -> None:
    index = {path for page, path, _ in links() if page == "docs/README.md"}
    assert [page for page in PAGES if page != "docs/README.md" and page not in index] == []


def test_every_verb_is_in_some_page() -> None:
    (verbs,) = [action.choices for action in parser()._actions if action.choices]
    assert [verb for verb in verbs if not re.search(rf"zeropods {verb}\b", ALL)] == []


@pytest.mark.parametrize("pattern", ["dsconfig/*.json", "notebooks/*.ipynb", "cml/*.py", "matrices/*.yaml"])
def test_every_file_for_users_is_in_some_page(pattern: str) -> None:
    files = sorted(ROOT.glob(pattern))
    assert files and [path.name for path in files if not re.search(rf"\b{path.stem}\b", ALL)] == []


def test_the_walk_through_the_house_names_every_room_and_module_beside_them_and_no_other() -> None:
    walk = PAGES["CONTRIBUTING.md"]
    # What the README makes, and git ignores.
    hidden = ("build", "data", "runs", "wikisql_tok_dataset", "__pycache__", "zeropods", "zeropods.egg-info")
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "."} - {*hidden}
    rooms = [f"zeropods/{path.parent.name}" for path in (ROOT / "zeropods").glob("*/__init__.py")]
    assert [folder for folder in (*sorted(folders), *rooms) if f"`{folder}/`" not in walk] == []
    modules = [path.name for path in (ROOT / "zeropods").glob("[a-z]*.py")]
    assert [name for name in modules if f"`{name}`" not in walk and f"`zeropods/{name}`" not in walk] == []
    named = re.findall(r"`((?:zeropods|tests|docs)/[\w/]*/)`", walk)
    assert named and [name for name in named if not (ROOT / name).is_dir()] == []


# README.md.

README = PAGES["README.md"]
MOST_WORDS = 750


def prose() -> str:
    """What is read: without code, tables, pictures and what a demo has said."""
    text = re.sub(r"^```.*?^```|^<!-- demo:.*?^<!-- /demo -->", "", README, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^(\|.*|!\[.*|<!--.*)$", "", text, flags=re.MULTILINE)


def test_figures_of_every_page_are_those_of_the_results() -> None:
    pages = runpy.run_path(str(ROOT / "tools" / "readme.py"))["pages"]()
    assert len(pages) == 2 and [path.name for path, text in pages.items() if path.read_text("utf-8") != text] == []


def test_the_readme_is_short_begins_with_six_commands_and_shows_a_plot_of_a_real_run() -> None:
    assert len(prose().split()) <= MOST_WORDS
    first, second, *_ = blocks(README)
    programs = [line.split()[0] for line in first.splitlines()]
    assert programs == ["source", "zeropods", "zeropods", "python", "zeropods", "zeropods"]
    assert re.findall(r"^make \w+", second, flags=re.MULTILINE) == ["make demo", "make test"]
    (plot,) = re.findall(r"!\[[^]]+\]\(([^)]+)\)", README)
    assert plot.startswith("results/demo/") and (ROOT / plot).is_file()


# docs/reliability.md, and what a fault's line says of its trials.


def test_the_page_is_made_of_the_results_and_explains_their_faults() -> None:
    results = read_json(reliability.RESULTS)
    assert reliability.page(results) == reliability.PAGE.read_text(encoding="utf-8")
    assert {one["fault"] for one in results["trials"]} <= set(FAULTS)


TRIAL = {
    "fault": "rank killed",
    "setting": "zero1 x2",
    "busy": 0,
    "launcher": "pdsh",
    "survived": True,
    "named": True,
    "by_itself": True,
    "steps_lost": 2,
    "seconds_to_find": 5.0,
    "seconds_to_resume": 20.0,
    "left_over": 0,
    "largest_difference": 0.0,
    "goodput": None,
}


def test_what_is_over_the_limits_is_counted() -> None:
    plain = TRIAL | {"goodput": 0.75}
    late = {"seconds_to_find": 11.25, "steps_lost": 0, "goodput": 0.25}, {"seconds_to_resume": 61.0, "steps_lost": 6}
    run = {"busy": 0, "launcher": "pdsh", "setting": "ddp x3", "faults": 1, "largest_difference": 0.0}
    environment = {"hardware": {"cpu": "a processor", "cores": 2}}
    trials = [plain, *(plain | values for values in late)]
    said = reliability.page({"trials": trials, "runs": [run], "environment": environment})
    assert "\n1 took more than 10 s to find, 1 more than 60 s to resume.\n1 lost more steps than an interval" in said
    assert "\n1 run came to its end, through 1 fault; 0 of them with losses other than the undisturbed run's.\n" in said
    far = run | {"largest_difference": 0.5}
    other = reliability.page({"trials": trials, "runs": [far], "environment": environment})
    assert "1 of them (ddp x3 1) with losses other than" in other


def test_trials_beside_busy_processes_have_a_table_of_their_own() -> None:
    busy = TRIAL | {"busy": 6, "setting": "zero3 x3", "named": False}
    environment = {"hardware": {"cpu": "a processor", "cores": 2}}
    page = reliability.page({"trials": [TRIAL, busy], "runs": [], "environment": environment})
    _, without, beside = page.split("\n## ")[:3]
    assert without.startswith("Without busy processes\n") and "zero1 x2 1." in without and "| 1 of 1 " in without
    assert beside.startswith("Beside 6 busy processes\n") and "zero3 x3 1." in beside and "| 0 of 1 " in beside


def test_trials_by_agents_have_a_table_of_their_own() -> None:
    by_agents = TRIAL | {"launcher": "agents", "setting": "zero3 x3"}
    run = {"busy": 0, "launcher": "agents", "setting": "zero3 x3", "faults": 1, "largest_difference": 0.0}
    environment = {"hardware": {"cpu": "a processor", "cores": 2}}
    page = reliability.page({"trials": [by_agents, TRIAL], "runs": [run], "environment": environment})
    _, over_ssh, of_agents = page.split("\n## ")[:3]
    assert over_ssh.startswith("Without busy processes\n\n**1 trial, 1 survived")
    assert (
        "zero3 x3" not in over_ssh and "0 runs came to" in over_ssh and "pdsh itself, which is quicker, 1." in over_ssh
    )
    assert of_agents.startswith("Without busy processes, by the pods' agents\n\n**1 trial, 1 survived")
    assert "zero1 x2" not in of_agents and "1 run came to" in of_agents and "without ssh and pdsh." in of_agents


@pytest.mark.parametrize(("losses", "far"), [([], None), ([(1, 4.0), (2, 2.2)], 0.1), ([(1, 3.0)], 0.25)])
def test_the_difference_is_the_largest_relative_one(losses: list[tuple[int, float]], far: float | None) -> None:
    assert difference(losses, {1: 4.0, 2: 2.0}) == (None if far is None else pytest.approx(far))


# docs/cloud.md.

CLOUD = PAGES["docs/cloud.md"]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")] for line in CLOUD[CLOUD.index("| job |") :].splitlines()[2:]
]
HOURS = {"s": 1 / 3600, "h": 1.0}


def planned() -> dict[str, list[str]]:
    """The page's calls of the plan by their models, without variables."""
    (block,) = [block for block in blocks(CLOUD) if "zeropods plan" in block]
    variables = dict(re.findall(r'^(\w+)="(.*)"$', block, re.MULTILINE))
    calls = [
        re.sub(r"\$(\w+)", lambda name: variables[name[1]], line) for line in block.splitlines() if " plan " in line
    ]
    return {re.findall(r"--model (\S+)", call)[0]: shlex.split(call)[1:] for call in calls}


def number(text: str) -> float:
    return float(re.findall(r"[\d,.]+", text)[0].replace(",", ""))


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_row_of_the_page_on_clouds_is_what_the_plan_says(row: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    job, _, technique, memory, rate, time, price = row
    assert main([*planned()[job.split()[0].rstrip(",")], "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    wanted = {"technique": technique.split("`")[1]}
    if "checkpointing" in technique:
        wanted["gradient_checkpointing"] = "without" not in technique
    (each,) = [t for t in document["techniques"] if all(t[name] == value for name, value in wanted.items())]
    assert each["fits"] and number(memory) == round(each["bytes"]["total"] / 2**30, 1)
    unit = "tokens_per_second" if "tokens" in rate else "samples_per_second"
    assert number(rate) == pytest.approx(each[unit], rel=0.01)
    assert number(time) * HOURS[time.split()[1]] == pytest.approx(each["total_seconds"] / 3600, rel=0.1)
    assert number(price) == pytest.approx(each["cost"], abs=0.005, rel=0.02)
    if " as " not in job:
        fitting: list[dict[str, Any]] = [t for t in document["techniques"] if t["fits"]]
        assert each["samples_per_second"] == max(t["samples_per_second"] for t in fitting)


# docs/plan.md.

PLAN = PAGES["docs/plan.md"]


def test_the_table_of_the_page_on_the_plan_is_what_its_command_says(capsys: pytest.CaptureFixture[str]) -> None:
    command = next(line for block in blocks(PLAN) for line in block.splitlines() if line.startswith("zeropods plan"))
    assert main(shlex.split(command)[1:]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0].endswith(": FITS")
    table = text[text.index("| technique") :].split("\n\n")[0]
    assert table == PLAN[PLAN.index("| technique     | checkpointing") :].split("\n\n")[0]


# Verbs and flags, make targets, files, environment variables.

SCRIPTS = {
    "textsql_train.py": {f"--{field.name}" for field in fields(TextToSQLArguments)},
    "causal_train.py": {f"--{field.name}" for field in fields(CausalArguments)},
}
OTHERS = {
    *("--container-image", "--gpus-per-node", "--nodelist", "--nodes", "--open-mode", "--qos", "--signal", "--time"),
    *("--dataset_config_name", "--dataset_name", "--deepspeed_config", "--output_dir", "--max_length", "--model_name"),
    *("--batch_size", "--num_epochs", "--save_checkpoint", "--resume_from_checkpoint", "--tokenizer_name"),
    *("--hostfile", "--num_nodes", "--num_gpus", "--master_addr", "--master_port", "--no_ssh_check", "--ssh_port"),
    *("--dataset_config", "--shm-size", "--build-arg", "--exclude", "--no-deps", "--no-build-isolation"),
    *("--container-mounts", "--container-workdir", "--no-container-mount-home", "--pty"),
    *("--no_ssh", "--follow", "--selector", "--filename", "--namespace"),
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
    assert targets_of(PAGES.values()) <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert set(re.findall(r"^([a-z-]+):.*##", makefile, re.MULTILINE)) <= targets_of(PAGES.values())


def targets_of(texts: Iterable[str]) -> set[str]:
    """The targets of make that pages call."""
    calls = [words for text in texts for words in commands(text, "make") if len(words) > 1]
    return {words[1] for words in calls if re.fullmatch("[a-z-]+", words[1])}


# What a test does with each command that people are told to type (`tests/full/project/test_typed.py` does it).

TYPED = typed.commands()


def test_blocks_of_commands_hold_nothing_else_and_no_command_hides_in_another_block() -> None:
    unknown = [command for command in TYPED if not typed.is_command(command.text)]
    assert [command for command in unknown if not command.text.startswith(("rm ", "find ", "if "))] == []
    known = {(command.page, " ".join(command.text.split())) for command in TYPED}
    lines = []
    for page, text in PAGES.items():
        for block in blocks(typed.NO_SHELL.sub(typed.blank, text)):
            typed_lines = [line for line in typed.block_lines(block) if typed.is_command(line)]
            lines += [(page, " ".join(line.split())) for line in typed_lines]
    assert lines and [line for line in lines if line not in known] == []


def test_every_entry_of_the_lists_of_commands_that_are_not_run_as_printed_is_needed() -> None:
    texts = [command.text for command in TYPED]
    for patterns in (typed.ONLY_PARSED, typed.ELSEWHERE, typed.LONG, typed.SERVERS):
        assert [each for each in patterns if not any(re.fullmatch(each, text) for text in texts)] == []
    spans = {command.text for command in TYPED if command.is_span}
    assert sorted(typed.FRAGMENTS - spans) == []
    unused = []
    for place, (pattern, _) in enumerate(typed.SUBSTITUTIONS):
        if not any(changes(text, place) for text in texts):
            unused.append(pattern)
    assert unused == []


def changes(text: str, place: int) -> bool:
    """Whether the substitution at a place of the table changes a command that those before it have changed."""
    for pattern, replacement in typed.SUBSTITUTIONS[:place]:
        text = re.sub(pattern, replacement, text)
    return re.search(typed.SUBSTITUTIONS[place][0], text) is not None


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
    script = (ROOT / "benchmarks" / "gpu" / "run.sh").read_text(encoding="utf-8")
    of_script = re.findall(r'\[ "\$1" = (--[a-z-]+) \]', script)
    return {*re.findall(r'add_argument\(\s*"(--[a-z-]+)"', text), *of_script}


FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")


@pytest.mark.parametrize("page", sorted(page for page in PAGES if page != "docker/README.md"))
def test_every_flag_that_a_page_names_is_known(page: str) -> None:
    known = OTHERS.union(*VERBS.values(), *SCRIPTS.values(), flags_of_other_programs_of_ours())
    named = {flag.rstrip("-_") for line in code(PAGES[page]) for flag in FLAG.findall(line)}
    assert sorted(named - known) == []
