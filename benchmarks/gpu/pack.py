"""`make gpu-pack OUT=DIR`: what a machine with a GPU, but without a network, lacks to run the two
calls of a session.

    python -m benchmarks.gpu.pack --out DIR --data DIR [--python 3.12]

The pack holds wheels, prepared sets, raw questions and `run.sh`; the project itself is not in it.
It is run in the root of the same project: of the very code that packed it, which a digest in
`pack.json` makes sure of.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.gpu.machine import NEEDED
from zeropods import files
from zeropods.data.sample import write_sample
from zeropods.errors import UserError, guarded
from zeropods.measure.environment import git_revision
from zeropods.outputs import new_folder, out_folder
from zeropods.programs import child_environment
from zeropods.tables import MIB
from zeropods.train.flags import PROJECT

CARRIED = (
    "transformers",
    "hjson",
    "pydantic",
    "pydantic_core",
    "annotated-types",
    "typing-inspection",
)
"""Packages of which a wheel is fetched, at the version that is installed here. What they need
beyond these, a machine on which people train with PyTorch has."""
BUILT = ("deepspeed",)
"""Packages that are published as source: a wheel is built here, without compiled operations, for
every Python."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
GRANTED = tuple(name for name in NEEDED if name not in (*CARRIED, *BUILT))
"""Packages that are taken for granted there, beside Python itself, a driver and `nvidia-smi`."""
MOST_BYTES = 40 * MIB
DEV_ROWS = 256
"""Dev rows of the packed sets: an evaluation that is not measured should take no time."""
QUESTIONS = 2_000
"""Dev questions that a model is asked."""
WORKSHOP_ROWS = 500
TINY = "cpu"
"""Folder, among the pack's data, of what `--device cpu` takes."""
TINY_ROWS = 280
RUN = Path(__file__).with_name("run.sh")
CONTENTS = "pack.json"
DATA = "data.tar.gz"
WHEELS = "wheels"
CODE = ("zeropods/**/*", "benchmarks/**/*", "dsconfig/*.json", "tools/compile_ops.py", "*.py")


def code_digest(project: Path = PROJECT) -> str:
    """SHA-256 over the names and contents of the files that a session runs."""
    digest = hashlib.sha256()
    paths = set[Path]()
    for pattern in CODE:
        paths |= set(project.glob(pattern))
    for path in sorted(paths):
        name = path.relative_to(project)
        # Compiled files, and hidden folders of tools: a copy of the tracked files has neither.
        is_of_tools = any(part == "__pycache__" or part.startswith(".") for part in name.parts)
        if path.is_file() and not is_of_tools:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{name} {content}\n".encode())
    return digest.hexdigest()


def check_pack(folder: Path) -> dict[str, Any]:
    """The contents of a pack, `pack.json`; `UserError` if it was made from other code than this
    project's."""
    contents = files.read_object(folder / CONTENTS, "make the pack again: make gpu-pack OUT=DIR")
    if contents.get("code") != code_digest():
        revision = contents.get("revision") or "another state"
        raise UserError(
            f"{folder}: was made from other code ({revision}) than that in {PROJECT}; "
            "make the pack again, or check that revision out"
        )
    return contents


def make_pack(out: Path, data: Path, python: str) -> dict[str, Any]:
    """Make a pack in a new folder, which appears whole.

    Args:
        data: folder with `wikisql/`, `squad/`, `t5/spiece.model` and `gpt2/`.
        python: the Python of the other machine, such as `3.12`.

    Returns:
        What stands in its `pack.json`.
    """
    _check_data(data)
    if out.exists() and any(out.iterdir()) and not (out / CONTENTS).is_file():
        raise UserError(f"--out {out}: is not empty and holds no pack; choose another folder")
    with new_folder(out) as place:
        (place / WHEELS).mkdir()
        wheels = _fetch_wheels(place / WHEELS, python)
        _pack_data(place / DATA, data)
        shutil.copy(RUN, place / RUN.name)
        contents = {
            "revision": git_revision(PROJECT),
            "code": code_digest(),
            "python": python,
            "wheels": wheels,
            "taken_for_granted": GRANTED,
            "dev_rows_of_the_sets": DEV_ROWS,
            "questions": QUESTIONS,
        }
        files.write_json(place / CONTENTS, contents)
        size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
        if size > MOST_BYTES:
            most = MOST_BYTES / MIB
            raise UserError(
                f"--out {out}: the pack would have {size / MIB:.1f} MiB; "
                f"expected at most {most:.0f}"
            )
    return {**contents, "bytes": size}


def _check_data(data: Path) -> None:
    """Refuse a folder that lacks one of the data sets or tokenizers."""
    needed = ("wikisql/train.jsonl", "wikisql/dev.jsonl", "squad", "t5/spiece.model", "gpt2")
    missing = [name for name in needed if not (data / name).exists()]
    if missing:
        raise UserError(
            f"--data {data}: has no {', '.join(missing)}; docs/gpu.md says what belongs there"
        )


# Wheels for the Python of the other machine.


def installed_version(package: str) -> str:
    """The version that this project runs with here; `UserError` where the package is not
    installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        raise UserError(
            f"{package}: is not installed here, so no version of it is known; run make setup"
        ) from None


def _fetch_wheels(folder: Path, python: str) -> list[str]:
    """Put the wheels of CARRIED and BUILT into a folder; returns their names."""
    wanted = [f"{package}=={installed_version(package)}" for package in CARRIED]
    where = ["--python-version", python, "--implementation", "cp", "--only-binary=:all:"]
    for platform_name in PLATFORMS:
        where += ["--platform", platform_name]
    for requirement in wanted:
        _pip(
            ["download", "--no-deps", *where, "-d", str(folder), requirement],
            f"{requirement} for Python {python}",
        )
    for package in BUILT:
        requirement = f"{package}=={installed_version(package)}"
        # The build needs torch, which is installed here.
        words = ["wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), requirement]
        _pip(words, requirement)
    return sorted(path.name for path in folder.glob("*.whl"))


def _pip(words: Sequence[str], what: str) -> None:
    """Call pip; `UserError` names what it could not bring."""
    argv = [sys.executable, "-m", "pip", *words, "--disable-pip-version-check", "--no-input", "-q"]
    done = subprocess.run(
        argv,
        env={**child_environment(), "DS_BUILD_OPS": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = lines[-1].removeprefix("ERROR: ") if lines else "pip failed"
        raise UserError(
            f"no wheel of {what}: {reason}; choose another PYTHON=, and nothing was written"
        )


# Sets that are prepared here, where `datasets` and a tokenizer's trainer are.


def _pack_data(archive: Path, data: Path) -> None:
    """Prepare the sets that the cells train on, cut to what they need, and pack them with the raw
    questions."""
    with tempfile.TemporaryDirectory(prefix="zeropods-pack-") as name:
        work = Path(name)
        few = work / "wikisql-few"
        _cut_wikisql(data / "wikisql", few, DEV_ROWS)
        for prompt in ("question", "schema"):
            words = [
                "--data",
                str(few),
                "--tokenizer",
                str(data / "t5" / "spiece.model"),
                "--prompt",
                prompt,
            ]
            _prepare(work / "data" / prompt, words)
        words = [
            "--task",
            "squad",
            "--data",
            str(data / "squad"),
            "--tokenizer",
            str(data / "gpt2"),
        ]
        words += ["--limit", str(WORKSHOP_ROWS), "--loss-on", "all"]
        _prepare(work / "data" / "squad", words)
        raw = work / "data" / "wikisql"
        raw.mkdir()
        _cut_wikisql(data / "wikisql", raw, QUESTIONS, train=False)
        tiny_data(work / "data" / TINY)
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w:gz") as packed:
            packed.add(work / "data", arcname="data")
        files.write_bytes(archive, content.getvalue())


def tiny_data(folder: Path) -> None:
    """The same sets for tiny models, from the embedded sample: with these a machine without a GPU
    tries everything."""
    raw = folder / "wikisql"
    squad = folder / "squad-raw"
    write_sample(raw)
    write_sample(squad, task="squad")
    few = ["--limit", str(TINY_ROWS)]
    for prompt in ("question", "schema"):
        words = ["--data", str(raw), "--tokenizer", "t5-tiny", "--prompt", prompt]
        _prepare(folder / prompt, [*words, *few])
    words = [
        "--task",
        "squad",
        "--data",
        str(squad),
        "--tokenizer",
        "gpt-tiny",
        "--max-seq-length",
        "128",
    ]
    _prepare(folder / "squad", [*words, "--loss-on", "all", *few])
    shutil.rmtree(squad)


def _cut_wikisql(source: Path, target: Path, dev_rows: int, *, train: bool = True) -> None:
    """Copy WikiSQL with only the first questions of its dev split, and with its train split or
    without."""
    target.mkdir(exist_ok=True)
    wanted = ("train.", "dev.") if train else ("dev.",)
    for path in sorted(source.glob("*.jsonl")):
        if not path.name.startswith(wanted):
            continue
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        if path.name == "dev.jsonl":
            lines = lines[:dev_rows]
        (target / path.name).write_text("".join(lines), encoding="utf-8")


def _prepare(out: Path, words: Iterable[str]) -> None:
    argv = [sys.executable, "-m", "zeropods", "prepare", *words, "--out", str(out)]
    done = subprocess.run(argv, cwd=PROJECT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["it wrote nothing"]
        raise UserError(f"preparing {out.name}: {lines[-1].removeprefix('zeropods: ')}")


def main() -> int:
    """Make a pack, and say what it holds and what it takes for granted."""
    arguments = _parser().parse_args()
    contents = make_pack(arguments.out, arguments.data, arguments.python)
    out = arguments.out
    size = contents["bytes"] / MIB
    revision = contents["revision"]
    print(f"{out}: {size:.1f} MiB for Python {arguments.python}")
    print(f"  wheels: {', '.join(contents['wheels'])}")
    print("  sets: question, schema, squad; raw dev questions")
    print(f"  taken for granted there: {', '.join(GRANTED)}; nvidia-smi; g++ and ninja for offload")
    print(f"  there, in the root of this project at {revision}: bash {out}/run.sh a 230")
    return 0


def _parser() -> argparse.ArgumentParser:
    description, _, _ = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu.pack", description=description, allow_abbrev=False
    )
    parser.add_argument("--out", type=out_folder, required=True, help="folder to make")
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        help="folder with wikisql, squad, t5 and gpt2",
    )
    major, minor, _ = platform.python_version_tuple()
    parser.add_argument(
        "--python",
        default=f"{major}.{minor}",
        help="Python of the other machine (default: this one's)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(guarded(main))
