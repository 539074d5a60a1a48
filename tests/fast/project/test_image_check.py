"""What `make image-check` decides by itself: which packages stand for CUDA, where pip looks, what went wrong."""

import configparser
import hashlib
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.made import a_rank, a_record, write_run
from zeropods.measure.record import Record, read_record

ROOT = Path(__file__).resolve().parents[3]
TOOL = ROOT / "tools" / "image_check.py"
CHECK = runpy.run_path(str(TOOL))
LISTED = """\
:env:.default-timeout='180'
:env:.find-links='/opt/wheels'
global.cert='/etc/ssl/ca.crt'
global.constraint='/etc/constraints.txt'
global.extra-index-url='file:///opt/my%20pypi/simple https://pypi.example/simple'
global.find-links='/somewhere/else'
"""
"""What `pip config list` prints."""


@pytest.fixture
def record(tmp_path: Path) -> Record:
    ranks = [a_rank(rank) for rank in range(2)]
    versions = {"python": "3.11.2", "torch": "2.13.0+cpu", "deepspeed": "0.19.8"}
    write_run(tmp_path / "run", a_record(ranks=ranks, technique="zero1", versions=versions))
    return read_record(tmp_path / "run")


def test_the_base_s_pip_finds_what_pip_finds_here() -> None:
    settings = CHECK["pip_settings"](LISTED)
    assert "default-timeout" not in settings and settings["find-links"] == "/opt/wheels"
    sources = CHECK["pip_sources"](settings)
    assert sources.config.splitlines() == [
        "[global]",
        "cert = /etc/pip/cert",
        "constraint = /etc/pip/constraint",
        "extra-index-url = file:///opt/my%20pypi/simple https://pypi.example/simple",
        "find-links = /opt/wheels",
    ]
    assert sources.files == {
        "etc/pip/cert": Path("/etc/ssl/ca.crt"),
        "etc/pip/constraint": Path("/etc/constraints.txt"),
    }
    # The files of a folder `simple` are beside it.
    assert sources.folders == [Path("/opt/my pypi"), Path("/opt/wheels")]
    words = CHECK["build_words"](sources)
    assert words[words.index("--volume") + 1] == "/opt/my pypi:/opt/my pypi:ro"
    assert words.count("--volume") == 2


def test_sources_in_several_lines_are_one_setting_and_a_host_is_no_folder() -> None:
    settings = CHECK["pip_settings"]("global.find-links='\\n/a\\n/b'\nglobal.trusted-host='pypi.example'\n")
    sources = CHECK["pip_sources"](settings)
    config = configparser.RawConfigParser()
    config.read_string(sources.config)
    assert dict(config["global"]) == {"find-links": "/a /b", "trusted-host": "pypi.example"}
    assert sources.folders == [Path("/a"), Path("/b")]


def test_without_settings_pip_looks_where_it_looks_usually() -> None:
    sources = CHECK["pip_sources"]({})
    assert (sources.config, sources.files, sources.folders) == ("[global]\n", {}, [])


def test_every_package_of_cuda_has_one_that_stands_for_it() -> None:
    installer = (ROOT / "docker" / "install-cuda.sh").read_text(encoding="utf-8")
    names = CHECK["cuda_packages"](installer, "13.0")
    assert "cuda-nvcc-13-0" in names and "libcublas-dev-13-0" in names
    assert len(names) == len(set(names)) == 7
    fields = CHECK["control"](names[0], "13.0")
    entry = CHECK["entry"](fields, "a.deb", b"content")
    values = dict(re.findall(r"^(\S+): (.*)$", entry, re.MULTILINE))
    assert (values["Package"], values["Version"], values["Filename"]) == (names[0], "13.0.0-1", "./a.deb")
    assert (values["Size"], values["SHA256"]) == ("7", hashlib.sha256(b"content").hexdigest())


def test_the_pods_are_ended_whatever_comes_of_the_training(tmp_path: Path) -> None:
    (tmp_path / "python3").write_text('#!/bin/sh\necho "$@" >> said\ntest "$3" != launch\n')
    (tmp_path / "python3").chmod(0o755)
    argv = ["bash", "-eu", "-c", CHECK["session"]()]
    path = f"{tmp_path}:/usr/bin:/bin"
    done = subprocess.run(argv, cwd=tmp_path, env={"PATH": path}, check=False, timeout=240)
    said = (tmp_path / "said").read_text().splitlines()
    verbs = [shlex.split(line)[2:4] for line in said]
    assert done.returncode == 1
    assert verbs == [
        ["data", "sample"],
        ["prepare", "--data"],
        ["pods", "up"],
        ["launch", "--num-pods"],
        ["pods", "down"],
    ]


def test_a_training_that_is_as_it_should_be_is_one_line(record: Record) -> None:
    assert CHECK["what_is_wrong"](record, 8536, []) == []
    assert CHECK["conclusion"](record) == (
        "image-check: ok: zero1 on 2 pods over pdsh as user 8536, 20 steps; "
        "Python 3.11.2, torch 2.13.0+cpu, deepspeed 0.19.8; no process is left"
    )


def test_all_that_is_wrong_is_named(tmp_path: Path) -> None:
    bad = a_record(status="pod_lost", reason="pod2 has ended")
    write_run(tmp_path / "run", bad)
    wrong = CHECK["what_is_wrong"](read_record(tmp_path / "run"), 0, [7, 12])
    assert wrong == [
        "the run ended as pod_lost: pod2 has ended",
        "it ran on 1 pod; expected 2",
        "its record belongs to user 0; expected 8536",
        "processes 7, 12 are left",
    ]


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("a\nzeropods: no memory left\ndown: pods\nError: exit status 1\n\n", "zeropods: no memory left"),
        ("E: Unable to locate package\nError: exit status 100\n", "Error: exit status 100"),
        ("", "no output"),
    ],
)
def test_the_reason_of_a_failure_is_what_zeropods_says_or_the_last_line(log: str, reason: str) -> None:
    assert CHECK["reason_in"](log) == reason


def test_processes_in_other_roots_are_no_concern_of_the_check(tmp_path: Path) -> None:
    inside = CHECK["processes_inside"]
    assert inside(tmp_path) == []
    assert os.getpid() in [process.pid for process in inside(Path("/"))]


@pytest.mark.skipif(os.geteuid() != 0, reason="asks for root first")
def test_a_folder_with_files_of_somebody_s_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in CHECK["PROGRAMS"]:
        (programs / name).touch(0o755)
    monkeypatch.setenv("PATH", str(programs))
    work = tmp_path / "work"
    (work / "storage").mkdir(parents=True)
    (work / "letter").write_text("dear")
    argv = [sys.executable, str(TOOL), "--work", str(work)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    said = f"zeropods: {work}: holds letter, which no check has made; name a new folder by --work\n"
    assert (done.returncode, done.stderr) == (1, said)
    assert sorted(path.name for path in work.iterdir()) == ["letter", "storage"]


WITHOUT_PROGRAMS = f"""
import os, runpy
os.geteuid = lambda: 0
os.environ["PATH"] = "/nowhere"
runpy.run_path({str(TOOL)!r}, run_name="__main__")
"""


def test_a_machine_without_buildah_is_told_in_one_line() -> None:
    argv = [sys.executable, "-c", WITHOUT_PROGRAMS]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    (line,) = done.stderr.splitlines()
    missing = "no buildah, mmdebstrap, dpkg-deb; apt-get install buildah mmdebstrap dpkg"
    assert (done.returncode, line) == (1, f"zeropods: image-check: {missing}")
