"""Make the raw data on which the base model `t5-tiny` is trained.

    tools/base_data.py --wikisql data/wikisql --out data/base

They are in WikiSQL's layout. Its split train is that of WikiSQL, and after it questions about the
tables of facts in `base_facts/`, made as `zeropods data sample` makes its own from other facts; dev
and test are WikiSQL's. A folder that is whole already is left as it is.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from zeropods.data.sample import read_facts, write_questions
from zeropods.data.wikisql import check_folder, split_file, wikisql_splits
from zeropods.errors import guarded
from zeropods.outputs import new_folder

FACTS = Path(__file__).with_name("base_facts")
QUESTIONS = 24_000
"""Number of questions about the facts, beside 56,355 of WikiSQL."""
SEED = 20_261_127
SUFFIXES = ("jsonl", "tables.jsonl")


def main() -> None:
    """Make the folder that the arguments name."""
    parser = argparse.ArgumentParser(description="Make the base model's data.", allow_abbrev=False)
    parser.add_argument("--wikisql", type=Path, required=True, help="WikiSQL's folder")
    parser.add_argument("--out", type=Path, required=True, help="the folder to make")
    arguments = parser.parse_args()
    if wikisql_splits(arguments.out):
        print(f"{arguments.out}: was there already")
        return
    write_base_data(arguments.wikisql, arguments.out)
    print(f"{arguments.out}: written")


def write_base_data(wikisql: Path, out: Path) -> None:
    """Make the folder `out`; `UserError` where WikiSQL is not there."""
    check_folder(wikisql, "wikisql")
    with new_folder(out) as folder:
        for split in wikisql_splits(wikisql):
            for suffix in SUFFIXES:
                path = split_file(wikisql, split, suffix)
                shutil.copyfile(path, folder / path.name)
        with tempfile.TemporaryDirectory() as made:
            write_questions(Path(made), "train", read_facts(FACTS), QUESTIONS, SEED)
            for path in Path(made).iterdir():
                _append(path, folder / path.name)


def _append(path: Path, whole: Path) -> None:
    with open(whole, "ab") as file:
        file.write(path.read_bytes())


if __name__ == "__main__":
    sys.exit(guarded(main))
