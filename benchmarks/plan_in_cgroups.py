"""Check that what fits by the plan does fit, in pods whose memory a cgroup limits to what the plan asks for.

python -m benchmarks.plan_in_cgroups     # as root, with cgroups of version 1; goes on where it was interrupted

Each setting runs with the largest planned batch, and with a third more rows, which must run out of memory.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zeropods import files, pods
from zeropods.data.prepare import Preparation, prepare
from zeropods.data.sample import write_sample
from zeropods.data.tokenizers import GPT_TINY
from zeropods.errors import UserError, guarded
from zeropods.evaluate.score_json import LM, TEXT2SQL
from zeropods.launch.notebook import launch
from zeropods.measure.record import read_record
from zeropods.pods.cluster import Cluster, workers_of
from zeropods.pods.processes import descendants
from zeropods.programs import wait_passively
from zeropods.tables import GIB
from zeropods.techniques import technique_named


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A setting to try."""

    model: str
    technique: str
    pods: int


CELLS = tuple(
    Cell(model=model, technique=technique, pods=count)
    for model, technique, count in (
        ("distilgpt2", "none", 1), ("distilgpt2", "ddp", 2), ("distilgpt2", "zero1", 2), ("distilgpt2", "zero2", 3),
        ("distilgpt2", "zero3", 2), ("distilgpt2", "zero3_offload", 2), ("t5-efficient-mini", "none", 1),
        ("t5-efficient-mini", "zero1", 3), ("t5-efficient-mini", "zero3", 2), ("t5-small", "none", 1),
        ("t5-small", "ddp", 2), ("t5-small", "zero2", 2),
    )
)  # fmt: skip
ROWS, TOKENS, MORE = 24, 64, 4 / 3
"""Rows for which a pod's memory is chosen, tokens of a causal row, and the factor that makes planned rows too many."""
STEPS = 2
"""Optimizer steps: the first has no moments of Adam yet. A T5 takes twice as many: its longest batch may come first."""
PLENTY_GIB = 64.0
AGENT_BYTES = 80 << 20
"""Bytes of a pod's own processes and the buffers of its connections, which no plan of a training process counts."""


@dataclass(frozen=True, kw_only=True)
class Trial(Cell):
    """A setting and how its two runs ended."""

    limit_gib: float
    """Memory of a pod, as the plan asks for it."""
    rows: int
    """Rows of the largest planned batch."""
    more_rows: int
    status: str
    """Status of the run with the largest planned batch."""
    more_status: str

    @property
    def is_right(self) -> bool:
        """Whether the planned batch ran and the larger one ran out of memory."""
        return self.status == "ok" and self.more_status == "oom"


@contextmanager
def limited(cluster: Cluster, limit: int) -> Iterator[None]:
    """Put each pod with all its processes into a memory cgroup of `limit` bytes; the pods are ended on exit.

    Raises:
        UserError: such a group cannot be made.
    """
    groups = []
    try:
        for worker in workers_of(cluster).processes():
            group = Path(f"/sys/fs/cgroup/memory/zeropods-fits-{os.getpid()}-{worker.pid}")
            group.mkdir()
            groups.append(group)
            (group / "memory.limit_in_bytes").write_text(str(limit))
            for pid in (worker.pid, *(each.pid for each in descendants(worker.pid))):
                (group / "cgroup.procs").write_text(str(pid))
        yield
    except OSError as error:
        raise UserError(
            f"{error.filename}: {error.strerror}; memory cgroups of version 1 and root are needed"
        ) from None
    finally:
        cluster.down()
        for group in groups:
            group.rmdir()


def planned(cell: Cell, lengths: list[str], memory_gib: float) -> dict[str, Any]:
    """What `zeropods plan` says about a cell whose pods have `memory_gib` GiB each."""
    words = ["--device", "cpu", "--model", cell.model, "--technique", cell.technique, "--pods", str(cell.pods),
             "--hosts", str(cell.pods), "--host-memory", f"{memory_gib:.4f}", "--threads", "1", "--batch-size",
             str(ROWS), *lengths]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "zeropods", "plan", "--json", *words], capture_output=True, check=False
    )
    if done.returncode:
        raise UserError(done.stderr.decode().strip())
    found: dict[str, Any] = json.loads(done.stdout)["techniques"][0]
    return found


def prepared(work: Path) -> dict[str, list[str]]:
    """Make the two sets, with as many rows as the largest trial takes; returns flags of a plan for their lengths."""
    rows = math.ceil(MORE * ROWS) * max(cell.pods for cell in CELLS)
    write_sample(work / "text", task="lm")
    prepare(
        Preparation(task="lm", data=work / "text", tokenizer=GPT_TINY, max_seq_length=TOKENS, limit=rows), work / LM
    )
    write_sample(work / "sample")
    manifest, _ = prepare(Preparation(data=work / "sample", tokenizer="t5-tiny", limit=rows), work / TEXT2SQL)
    lengths = manifest.splits["train"]
    return {
        LM: ["--seq-length", str(TOKENS)],
        TEXT2SQL: ["--source-length", str(lengths.source.max), "--target-length", str(lengths.target.max)],
    }


def status(cell: Cell, rows: int, limit: int, work: Path) -> str:
    """Status with which a run of `rows` rows ends on pods limited to `limit` bytes."""
    folder = work / "runs" / f"{cell.model}-{cell.technique}-x{cell.pods}-{rows}"
    is_t5 = cell.model.startswith("t5")
    flags: dict[str, Any] = {
        "per_device_train_batch_size": rows, "per_device_eval_batch_size": 1, "eval_steps": 0, "save_steps": 0,
        "precision": "fp32", "threads": 1, "init": "random", "outputdir": folder,
        "deepspeed": technique_named(cell.technique).file,
    }  # fmt: skip
    if is_t5:
        flags |= {"model_id": cell.model, "dataset_path": work / TEXT2SQL, "max_steps": 2 * STEPS}
    else:
        flags |= {
            "model_name_or_path": cell.model, "data": work / LM, "max_train_steps": STEPS, "max_eval_steps": 1,
            "gradient_accumulation_steps": 1,
        }  # fmt: skip
    cluster = pods.up(cell.pods, name="fits", backend="local")
    with limited(cluster, limit), suppress(UserError):
        launch(cluster, "textsql_train.py" if is_t5 else "causal_train.py", pods=cell.pods, **flags)
    if (found := read_record(folder)).status == "interrupted":
        raise UserError(f"{folder}: interrupted: {found.reason}")
    return found.status


def main() -> None:
    """Run the trials, and print the result of each."""
    parser = argparse.ArgumentParser(prog="benchmarks.plan_in_cgroups", description=__doc__, allow_abbrev=False)
    parser.add_argument("--work", type=Path, default=Path("runs/plan-in-cgroups"), help="where the runs are")
    parser.add_argument("--out", type=Path, default=Path("results/plan_in_cgroups.json"))
    arguments = parser.parse_args()
    wait_passively()
    work, trials = arguments.work.resolve(), list[Trial]()
    if arguments.out.is_file():
        trials = [Trial(**each) for each in json.loads(arguments.out.read_text(encoding="utf-8"))["trials"]]
    lengths = prepared(work)
    for cell in CELLS[len(trials) :]:
        said = lengths[TEXT2SQL if cell.model.startswith("t5") else LM]
        gib = planned(cell, said, PLENTY_GIB)["needed_bytes"] / GIB
        rows = planned(cell, said, gib)["largest_batch_size"]
        more, limit = math.ceil(MORE * rows), round(gib * GIB) + AGENT_BYTES
        ends = [status(cell, each, limit, work) for each in (rows, more)]
        trials.append(
            Trial(**asdict(cell), limit_gib=gib, rows=rows, more_rows=more, status=ends[0], more_status=ends[1])
        )
        print(trials[-1], flush=True)
        files.write_json(arguments.out, {"trials": [asdict(each) for each in trials]})
    right = sum(each.is_right for each in trials)
    print(f"{right} of {len(trials)} right; {sum(each.status != 'ok' for each in trials)} planned to fit did not")


if __name__ == "__main__":
    sys.exit(guarded(main))
