"""Pages in processes of their own: the demo page, over runs whose models have random weights, and other servers."""

import itertools
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.made import a_record, a_score, write_run
from zeropods.data.wikisql import Example, read_split, source_of, target_of

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+/")
SECONDS = 600.0


@dataclass
class Served:
    """A page that a process serves, and what a browser asked for while it was open."""

    process: subprocess.Popen[bytes]
    address: str
    log: Path
    requests: list[str] = field(default_factory=list)

    def end(self) -> None:
        """End it as a user does, or by force where it does not listen."""
        self.process.terminate()
        try:
            self.process.wait(timeout=600)
        finally:
            self.process.kill()
            self.process.wait()

    @property
    def port(self) -> int:
        return int(self.address.rstrip("/").rsplit(":", 1)[1])


def untrained_runs(folder: Path, data: Path) -> Path:
    """Two runs in a folder: what their models answer is a query all the same."""
    examples = list(itertools.islice(read_split(data, "test"), 300))
    for seed, name in enumerate(("first", "second")):
        accuracy = a_score(execution_accuracy=0.75 - seed / 4)
        record = a_record(dataset={"path": str(folder / "prepared")})
        run = write_run(folder / name, record, score_test=accuracy)
        (run / "config.json").write_text(json.dumps(record))
        save_model(run / "model", seed, examples)
    return folder


def save_model(folder: Path, seed: int, examples: list[Example]) -> None:
    from zeropods.data.encoding import train_tokenizer
    from zeropods.plan.known_models import known_config
    from zeropods.train.text2sql import random_t5

    texts = [text for example in examples for text in (source_of(example, "schema"), target_of(example, "schema"))]
    model = random_t5(known_config("t5-tiny"), seed=seed)
    model.config.prompt = "schema"
    model.save_pretrained(folder)
    train_tokenizer(texts).save_pretrained(folder)


def start(
    command: list[object], log: Path, cwd: Path = ROOT, said: re.Pattern[str] = ADDRESS, **environment: str
) -> Served:
    """A process of Python that serves a page, as soon as it says where."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *map(str, command)], cwd=cwd, env={**os.environ, **environment},
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    deadline = time.monotonic() + SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        if found := said.search(log.read_text()):
            return Served(process, found.group(), log)
        time.sleep(0.2)
    process.kill()
    process.wait()
    raise AssertionError(log.read_text()[-4000:])
