"""The pack for a machine with a GPU but no network, as far as it needs no torch: what it refuses, what is collected."""

import io
import json
import subprocess
import sys
import tarfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import collect
from benchmarks.gpu.cells import Cell
from benchmarks.gpu.commands import ended_as_expected
from benchmarks.gpu.machine import Machine, nvidia_gpu
from benchmarks.gpu.pack import RUN, check_pack, code_digest
from benchmarks.gpu.pack import main as pack_main
from benchmarks.gpu.parts import parts
from benchmarks.gpu.session import with_ready_cells
from zeropods.errors import UserError, guarded

ROOT = Path(__file__).resolve().parents[3]
H200 = Machine(device="cuda", gpu="NVIDIA H200", memory_bytes=140 << 30)


def test_the_cells_of_a_call_have_names_of_their_own() -> None:
    for steps in parts().values():
        names = [cell.name for step in steps for cell in step.cells]
        assert len(names) == len(set(names))


def test_a_step_whose_cells_cannot_run_is_left_out_and_that_of_the_facts_stays() -> None:
    steps = parts()["a"]
    alone = [cell for step in steps for cell in step.cells if not cell.needs_deepspeed]
    kept = [step.name for step in with_ready_cells(steps, alone)]
    assert kept == ["facts", "recipe", "prediction", "attention", "prediction with cuDNN"]


def test_a_pack_knows_the_code_that_made_it_by_its_content(tmp_path: Path) -> None:
    code = tmp_path / "zeropods" / "a.py"
    code.parent.mkdir()
    code.write_text("one = 1\n")
    before = code_digest(tmp_path)
    compiled = tmp_path / "zeropods" / "__pycache__" / "a.pyc"
    compiled.parent.mkdir()
    compiled.write_bytes(b"0")
    cache = tmp_path / "zeropods" / "sql" / ".ruff_cache" / "0.17" / "1"
    cache.parent.mkdir(parents=True)
    cache.write_bytes(b"0")
    assert code_digest(tmp_path) == before
    code.write_text("one = 2\n")
    assert code_digest(tmp_path) != before


def test_a_pack_of_other_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pack.json").write_text(json.dumps({"code": "0", "revision": "abc"}))
    with pytest.raises(UserError, match=r"was made from other code \(abc\).*make the pack again"):
        check_pack(tmp_path)
    (tmp_path / "pack.json").write_text(json.dumps({"code": code_digest(), "revision": "abc"}))
    assert check_pack(tmp_path)["revision"] == "abc"


def raw(folder: Path) -> Path:
    """A folder that looks as if it held all raw data."""
    for name in (
        "wikisql/train.jsonl",
        "wikisql/dev.jsonl",
        "squad/dev-v1.1.json",
        "t5/spiece.model",
        "gpt2/vocab.json",
    ):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return folder


@pytest.mark.parametrize(
    ("there", "flags", "message"),
    [
        ("", "", "has no wikisql/train.jsonl, wikisql/dev.jsonl, squad, t5/spiece.model, gpt2"),
        ("data", "--python 2.6", "for Python 2.6: "),
        ("data letter", "", "is not empty and holds no pack"),
    ],
)
def test_a_pack_that_cannot_be_made_is_one_line_and_nothing_is_written(
    there: str,
    flags: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    if "data" in there:
        raw(data)
    out = tmp_path / "out"
    if "letter" in there:
        out.mkdir()
        (out / "letter.txt").touch()
    # Nothing is fetched in this test: pip finds no wheel anywhere.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(sys, "argv", ["pack", "--out", str(out), "--data", str(data), *flags.split()])
    assert guarded(pack_main) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", *(["out"] if "letter" in there else [])]


@pytest.mark.parametrize(
    ("words", "folder", "message"),
    [
        ((), ROOT, "give a part, a to g, and a number of seconds"),
        (("a", "230", "--without"), ROOT, "--without: give the name of a package"),
        (("a", "230"), ROOT / "docs", "is not the root of zeropods"),
    ],
)
def test_a_wrong_call_of_the_pack_is_one_line(words: tuple[str, ...], folder: Path, message: str) -> None:
    done = subprocess.run(["bash", str(RUN), *words], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("UserWarning: The NVIDIA driver on your system is too old (found version 11040)\nnull", "too old"),
        ("null", "torch finds no GPU here;"),
        ('{"gpu": "AMD Instinct MI300X", "memory_bytes": 1, "cuda": null}', "is a build for AMD's GPUs"),
    ],
)
def test_a_machine_without_a_gpu_of_nvidia_is_told_so(answer: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        nvidia_gpu(answer, answer)
    assert "\n" not in str(error.value)


# What calls brought back.


def record(**values: Any) -> dict[str, Any]:
    cell = asdict(Cell(name="bloom-560m-none", kind="causal", model="bloom-560m", prompt="squad", passes=4))
    return {"cell": cell, "status": "ok", "batch": 4, "step_seconds": [0.4] * 4, "samples_per_second": 40.0, **values}


def archive(folder: Path, name: str, documents: dict[str, Any]) -> None:
    with tarfile.open(folder / f"{name}.tar.gz", "w:gz") as packed:
        packed.addfile(tarfile.TarInfo(f"{name}/cells"), None)
        for path, document in documents.items():
            content = json.dumps(document).encode()
            member = tarfile.TarInfo(f"{name}/{path}.json")
            member.size = len(content)
            packed.addfile(member, io.BytesIO(content))


def collected(folder: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", "--collect", str(folder), "--out", str(out)])
    return guarded(collect.main)


def test_half_a_result_is_collected_and_what_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = {"peak_allocated_bytes": 10 << 30, "device_bytes": 12 << 30, "host_bytes": 0}
    measured = record(planned_for_its_batch=plan, peak_allocated_bytes=12 << 30)
    archive(tmp_path, "part-b", {"machine": asdict(H200), "cells/bloom-560m-none": measured})
    assert collected(tmp_path, tmp_path / "out", monkeypatch) == 0
    page = (tmp_path / "out" / "README.md").read_text()
    assert "Outside 10% of the planned peak: bloom-560m-none 1.20." in page
    assert "Not measured: bloom-560m-zero1," in page
    figures = json.loads((tmp_path / "out" / "summary.json").read_text())
    (row,) = figures["b"]["cells"]
    assert row["measured_to_planned"] == pytest.approx(1.2)
    assert row["three_epochs_seconds"] is None
    assert (tmp_path / "out" / "part-b" / "cells" / "bloom-560m-none.json").is_file()


def a_command(name: str, **values: Any) -> dict[str, Any]:
    """How a command of a pack ended."""
    ended = {"name": name, "status": 0, "expected_status": 0, "seconds": 20.1}
    return {**ended, "kills_rank_at": None, "killed_at_step": None, **values}


def test_commands_that_ended_otherwise_and_what_they_left_running_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = a_command("probe")
    killed = a_command("killed", status=1, kills_rank_at=60, killed_at_step=62)
    spared = a_command("spared", kills_rank_at=60)
    documents = {"machine": asdict(H200), "commands": {"commands": [probe, killed, spared]}}
    archive(tmp_path, "part-e", {**documents, "left_over": {"processes": ["an agent"]}})
    assert collected(tmp_path, tmp_path / "out", monkeypatch) == 0
    page = (tmp_path / "out" / "README.md").read_text()
    ends = [line.split("|")[1:3] for line in page.splitlines() if line.startswith(("| probe", "| killed", "| spared"))]
    assert [[text.strip() for text in end] for end in ends] == [
        ["probe", "ended with 0"],
        ["killed", "ended with 1, not 0; rank 0 was killed at step 62"],
        ["spared", "ended with 0, and its rank was not killed"],
    ]
    assert [ended_as_expected(ended) for ended in (probe, killed, spared)] == [True, False, False]
    assert "Processes of commands left running: 1." in page
    assert "Not measured: pods up, pods check," in page


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("other.txt", b"", "has no part-a.tar.gz or part-b.tar.gz"),
        ("part-a.tar.gz", b"cut off", "part-a.tar.gz: cannot be read"),
    ],
)
def test_what_cannot_be_collected_is_one_line(
    name: str,
    content: bytes,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / name).write_bytes(content)
    assert collected(tmp_path, tmp_path / "out", monkeypatch) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "out").exists()


def test_an_archive_that_does_not_say_its_machine_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    archive(tmp_path, "part-a", {"steps": []})
    assert collected(tmp_path, tmp_path / "out", monkeypatch) == 1
    assert "does not say which machine it is of" in capsys.readouterr().err
