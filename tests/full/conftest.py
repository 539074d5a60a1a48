"""Fixtures of the full lane: a small sample, prepared once, and a run trained on it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.full.clusters import processes_of
from tests.full.forks import train_ranks
from tests.full.launches import until
from tests.full.slurm_cluster import SlurmCluster, missing
from zeropods import pods
from zeropods.data.prepare import Preparation, prepare
from zeropods.data.sample import write_sample
from zeropods.pods.cluster import Cluster, names, take_down

ROOT = Path(__file__).resolve().parents[2]
TINY = [
    "--model_id", "t5-tiny", "--init", "random", "--dropout", "0", "--logging_steps", "1", "--save_steps", "0",
    "--precision", "fp32",
]  # fmt: skip
"""A processor that multiplies BF16 would be asked to: numbers are compared here."""


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded data set."""
    folder = tmp_path_factory.mktemp("data") / "sample"
    write_sample(folder)
    return folder


@pytest.fixture(scope="session")
def squad_sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded data set in SQuAD's layout."""
    folder = tmp_path_factory.mktemp("data") / "squad"
    write_sample(folder, task="squad")
    return folder


@pytest.fixture(scope="session")
def text_sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded text."""
    folder = tmp_path_factory.mktemp("data") / "text"
    write_sample(folder, task="lm")
    return folder


@pytest.fixture(scope="session")
def text(text_sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The beginnings of its files, of which a few blocks of each split can be made."""
    folder = tmp_path_factory.mktemp("text")
    for name, size in {"train.txt": 9_000, "valid.txt": 1_500, "test.txt": 1_200}.items():
        (folder / name).write_text((text_sample / name).read_text()[:size])
    return folder


@pytest.fixture(scope="session")
def prepared(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first 64 examples of each split of the sample, prepared with a tokenizer of their own."""
    folder = tmp_path_factory.mktemp("prepared") / "sample"
    prepare(Preparation(data=sample, tokenizer="t5-tiny", limit=64), folder)
    return folder


@pytest.fixture(scope="session")
def trained(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    run_several([*TINY, "--max_steps", "6", "--eval_steps", "3", "--dataset_path", prepared], (1, folder, []))
    return folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home without clusters; nothing of one may be left in the end."""
    folder = tmp_path / "home"
    monkeypatch.setenv("ZEROPODS_HOME", str(folder))
    yield folder
    for name in names():
        take_down(name)
    until(lambda: not processes_of(folder))
    assert not folder.exists() or not list(folder.iterdir())


@pytest.fixture(scope="session")
def shared_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the tests' clusters are kept."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("ZEROPODS_HOME", str(folder))
        yield folder


@pytest.fixture(scope="session")
def cluster(shared_home: Path) -> Iterator[Cluster]:
    """Three local pods that every test leaves as they are."""
    up = pods.up(3, name="shared")
    yield up
    up.down()


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    """A SLURM of three nodes; skips where it is not installed."""
    why_not = missing()
    if why_not is not None:
        pytest.skip(why_not)
    cluster = SlurmCluster()
    yield cluster
    cluster.stop()


def run_several(
    common: list[object],
    *runs: tuple[int, Path, list[object]],
    script: str = "textsql_train.py",
    slots: int | None = None,
) -> None:
    """Train one after the other, each on so many ranks, into a folder; `slots` of them believe to be on one pod."""
    for ranks, folder, flags in runs:
        folder.parent.mkdir(parents=True, exist_ok=True)
        said = folder.with_name(f".{folder.name}")
        train_ranks([*common, "--outputdir", folder, *flags], ranks, said, script=script, slots=slots)
