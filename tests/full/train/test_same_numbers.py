"""Equal effective batch and seed, FP32, no dropout: the same numbers on any number of pods, by every technique."""

import os
import shutil
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.full.conftest import ROOT, TINY, run_several
from tests.full.forks import train_ranks
from tests.full.measure.test_measure import scalars
from tests.full.train.test_checkpoint_training import assert_same_losses
from tests.full.train.test_train import Trap
from tests.full.train.test_train import losses as curve
from zeropods.data.prepare import Preparation, prepare
from zeropods.errors import UserError
from zeropods.files import plain_values_only
from zeropods.launch.command import plan_launch
from zeropods.launch.outcome import failure
from zeropods.launch.script_call import ScriptCall
from zeropods.launch.supervisor import run_launch
from zeropods.measure.planned_runs import planned_memory
from zeropods.measure.profile_corrections import check
from zeropods.measure.record import PRECISION_PARTS, read_record
from zeropods.plan.known_models import known_config
from zeropods.pods.cluster import Cluster
from zeropods.train.checkpoints import hashed, mark_complete, read_manifest
from zeropods.train.engines.deepspeed import DeepSpeed
from zeropods.train.flags import TextToSQLArguments
from zeropods.train.save_and_resume import Checkpoints

EFFECTIVE_BATCH = 12
STEPS = 6
LEARNING_RATE = 3e-4
MAX_GRAD_NORM = 1.0
"""Below the gradients' norms (1.6 to 5.3 here), so that clipping takes part in every step."""
T5_TINY_PARAMETERS = P = 1_024 * 128 + 2 * (196_864 + 262_528) + 512
"""By hand: an embedding; two layers of encoder and decoder (attention 4 x 128 x 128, feed-forward 2 x 128 x 512,
norms); two last norms and two tables of position biases (32 x 4)."""
KEPT = P - 1_024 * 128
"""Elements that ZeRO-3 keeps gathered: those of parameters of at most 100,000 (dsconfig/zero3.json)."""
LIVE = {
    "none-1": (4 * P, 4 * P, 8 * P),
    "zero1profiler-2": (4 * P, 4 * P / 2, 12 * P / 2),
    "zero3-3": (4 * P / 3 + 4 * KEPT, 4 * P / 3, 12 * P / 3),
    "zero3profiler-2": (4 * P / 2 + 4 * KEPT, (4 * P + 4 * P) / 2, 12 * P / 2),
}
"""FP32 bytes of parameters, gradients, and optimizer on each rank of some runs.

DeepSpeed keeps an FP32 master beside FP32 weights: 12 bytes instead of Adam's 8. ZeRO-3 offload has the gradients of
a backward pass and, for the optimizer, the gradients of its master."""
TECHNIQUES = ("ddp", "zero1", "zero1_offload", "zero2", "zero2_offload", "zero3", "zero3_offload")
PROFILED = {"zero1profiler": "zero1", "zero2profiler": "zero2", "zero3profiler": "zero3_offload"}
SEVEN = [
    ("ddp", 2), ("zero1profiler", 2), ("zero1_offload", 2), ("zero2", 3), ("zero2_offload", 1), ("zero3", 3),
    ("zero3profiler", 2),
]  # fmt: skip
"""Every technique, every number of ranks."""
ALL = [(name, pods) for name in (*TECHNIQUES, *PROFILED) for pods in (1, 2, 3) if (name, pods) != ("ddp", 1)]
ON_PODS = ALL if os.environ.get("ZEROPODS_SOAK") == "1" else []
"""Those that are launched over pods, which takes longer than they do; else only notebooks launch and compare some."""
CURVE = [
    "--max_steps", STEPS, "--eval_steps", STEPS // 2, "--precision", "fp32", "--threads", 1,
    "--learning_rate", LEARNING_RATE, "--max_grad_norm", MAX_GRAD_NORM,
]  # fmt: skip


def flags(name: str, ranks: int) -> list[object]:
    """What makes a run one of `dsconfig/NAME.json`, of `ddp`, or of one process alone, on so many ranks."""
    config = [] if name in ("none", "ddp") else ["--deepspeed", ROOT / "dsconfig" / f"{name}.json"]
    return ["--per_device_train_batch_size", EFFECTIVE_BATCH // ranks, *config]


def over_pods(cluster: Cluster, pods: int, name: str, prepared: Path, folder: Path) -> None:
    """Train on so many pods of a cluster."""
    given = [*TINY, *CURVE, *flags(name, pods), "--dataset_path", prepared, "--outputdir", folder]
    call = ScriptCall.of("textsql_train.py", [str(argument) for argument in given])
    planned = plan_launch(cluster, call, pods=pods)
    record = run_launch(planned, cluster)
    assert (record.status, record.pods) == ("ok", pods), failure(folder, record)


@pytest.fixture(scope="module")
def forked(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that the others must equal, in one process without DeepSpeed, and those that need no pods."""
    folder = tmp_path_factory.mktemp("forked")
    pairs = [("none", 1), *SEVEN]
    runs = [(ranks, folder / f"{name}-{ranks}", flags(name, ranks)) for name, ranks in pairs]
    # Layers that are computed again give the same numbers.
    recomputed = {folder / "zero3-3": ["--gradient_checkpointing", True]}
    runs = [(ranks, run, [*given, *recomputed.get(run, [])]) for ranks, run, given in runs]
    # The first one's model, trained further.
    loaded = ["--init", "pretrained", "--model_id", folder / "none-1" / "model", "--max_steps", 3, "--eval_steps", 0]
    further = [("none", 1), ("zero3_offload", 2)]
    runs += [(ranks, folder / f"loaded-{ranks}", [*flags(name, ranks), *loaded]) for name, ranks in further]
    run_several([*TINY, *CURVE, "--dataset_path", prepared], *runs)
    return folder


def weights(run: Path) -> dict[str, Any]:
    from safetensors.numpy import load_file

    return load_file(run / "model" / "model.safetensors")


@pytest.mark.skipif(not ON_PODS, reason="`make soak` launches them over pods")
@pytest.mark.parametrize(("name", "pods"), ON_PODS or ALL[:1])
def test_a_technique_on_pods_gives_the_numbers_of_one_process(
    name: str, pods: int, cluster: Cluster, forked: Path, prepared: Path, tmp_path: Path
) -> None:
    over_pods(cluster, pods, name, prepared, tmp_path / "run")
    assert_same_numbers(tmp_path / "run", forked / "none-1", name, pods)


@pytest.mark.parametrize(("name", "ranks"), SEVEN)
def test_a_technique_gives_the_numbers_of_one_process(name: str, ranks: int, forked: Path) -> None:
    assert_same_numbers(forked / f"{name}-{ranks}", forked / "none-1", name, ranks)


def assert_same_numbers(run: Path, alone: Path, name: str, ranks: int) -> None:
    record, expected = read_record(run), read_record(alone)
    assert (record.technique, record.world_size) == (PROFILED.get(name, name), ranks)
    assert record.effective_batch_size == expected.effective_batch_size == EFFECTIVE_BATCH
    assert len(record.losses) == STEPS
    assert curve(record) == pytest.approx(curve(expected), rel=1e-3)
    assert curve(record, "eval_losses") == pytest.approx(curve(expected, "eval_losses"), rel=1e-3)
    assert_weights_are_those_of(alone, run)
    assert_loads_without_a_missing_weight(run)
    assert (run / "profile.txt").is_file() == (name in PROFILED)
    if name in PROFILED:
        assert_report_is_read_and_its_faults_are_found(run, name)


def assert_report_is_read_and_its_faults_are_found(run: Path, name: str) -> None:
    """What this version of DeepSpeed writes is read to its last line, and mended to what arithmetic says."""
    checked = check(run)
    always = {"root_latency", "root_flops_per_second", "profiled_step"}
    of_stage = {"linear_counted_twice", "sharded_parameters"} if name == "zero3profiler" else {"shared_parameters"}
    assert not checked.report.missing and checked.root is not None
    # How much the profiler costs differs between machines.
    of_time = {"profiler_overhead", "unusual_step"}
    assert {fault.name for fault in checked.faults} - of_time == always | of_stage
    assert checked.figures["parameters_per_gpu"] == pytest.approx(T5_TINY_PARAMETERS, rel=0.005)
    assert checked.figures["forward_macs"] == pytest.approx(checked.closed_form_macs, rel=0.01)


def assert_weights_are_those_of(alone: Path, run: Path) -> None:
    """Within the furthest that AdamW can have moved them apart, and all but a fiftieth much nearer.

    On some processors the sums of smaller batches are rounded otherwise, and a unit of a feed-forward layer whose
    input is near zero is on in one run and off in the other. AdamW then moves its weights apart: 0.6 % of all, once.
    """
    ours, theirs = weights(run), weights(alone)
    assert ours.keys() == theirs.keys()
    assert {value.dtype for value in ours.values()} == {np.dtype("float32")}
    apart = np.concatenate([np.abs(ours[name] - theirs[name]).ravel() for name in theirs])
    assert apart.max() <= 2 * LEARNING_RATE * STEPS
    assert np.mean(apart <= 1e-5) >= 0.98


def assert_loads_without_a_missing_weight(run: Path) -> None:
    from transformers import T5ForConditionalGeneration

    model, loaded = T5ForConditionalGeneration.from_pretrained(run / "model", output_loading_info=True)
    assert not loaded["missing_keys"]
    assert not loaded["unexpected_keys"]
    assert model.lm_head.weight.data_ptr() == model.shared.weight.data_ptr()


def test_a_loaded_model_that_zero3_divides_is_trained_and_saved_as_by_one_process(forked: Path) -> None:
    one, two = (forked / f"loaded-{ranks}" for ranks in (1, 2))
    assert curve(read_record(two)) == pytest.approx(curve(read_record(one)), rel=1e-4)
    # It went on from what was learned.
    assert curve(read_record(one))[0] < curve(read_record(forked / "none-1"))[0] - 1
    assert_weights_are_those_of(one, two)
    assert_loads_without_a_missing_weight(two)


@pytest.mark.parametrize("name", ["none-1", *(f"{name}-{ranks}" for name, ranks in SEVEN)])
def test_live_bytes_are_those_of_the_plan_and_of_the_technique_s_arithmetic(forked: Path, name: str) -> None:
    record = read_record(forked / name)
    found = [vars(rank.live_bytes) for rank in record.ranks]
    plan = planned_memory(record)
    assert plan is not None and plan.state_bytes == pytest.approx(sum(found[0].values()), rel=0.02)
    for live in found if name in LIVE else ():
        assert [live[part] for part in ("parameters", "gradients", "optimizer")] == pytest.approx(LIVE[name], rel=0.02)


@pytest.mark.parametrize("name", ["none-1", *(f"{name}-{ranks}" for name, ranks in SEVEN)])
def test_a_run_measures_that_everything_in_it_was_fp32(forked: Path, name: str) -> None:
    measured = read_record(forked / name).measured_precision
    assert measured is not None
    sent = None if name.endswith("-1") else "fp32"
    assert asdict(measured) == {**dict.fromkeys(PRECISION_PARTS, "fp32"), "gradients_sent": sent}


def test_a_rank_says_what_it_trained_and_on_what(forked: Path) -> None:
    first, *others = read_record(forked / "zero3-3").ranks
    assert {rank.parameters for rank in (first, *others)} == {P}
    assert first.shape is not None and known_config("t5-tiny").items() <= first.shape.items()
    assert first.largest_batch.rows == 4
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert {rank.machine for rank in (first, *others)} == {boot}
    assert first.matmul_flops_per_second > 1e9
    assert {rank.matmul_flops_per_second for rank in others} == {None}
    assert (first.gpu, first.peak_allocated_bytes, first.energy_joules) == (None, None, None)


def test_deepspeed_s_own_scalars_are_in_the_run_folder(forked: Path) -> None:
    drawn = scalars(forked / "zero2-3" / "tensorboard" / "train_t5")
    # Its steps are samples, 12 rows of each; beside the rate it writes times where its profiler is on.
    assert [step for step, _ in drawn["Train/Samples/lr"]] == [12 * step for step in range(1, STEPS + 1)]


# Runs that go on with another number of ranks: to the losses, step by step, of one that nothing disturbed.

SAVED, LAST = (10, 20) if os.environ.get("ZEROPODS_SOAK") == "1" else (5, 10)
TEXT_TO_SQL, CAUSAL = "textsql_train.py", "causal_train.py"
EACH = ["--save_steps", SAVED, "--eval_steps", 0, "--threads", 1, "--logging_steps", 1]
FLAGS: dict[str, list[object]] = {
    TEXT_TO_SQL: [*TINY, *EACH, "--max_steps", LAST],
    CAUSAL: [
        "--model_name_or_path", "gpt-tiny", "--init", "random", "--dropout", 0, "--task", "lm", "--max_seq_length", 32,
        "--gradient_accumulation_steps", 1, "--max_train_steps", LAST, "--memory_interval", 0, "--precision", "fp32",
        *EACH,
    ],
}  # fmt: skip
RESUMED = ("none", "zero1", "zero1_offload", "zero2", "zero2_offload", "zero3", "zero3_offload")
"""`none` on several ranks is `ddp`."""
RANKS = (1, 2, 3, 4)
FEW = [
    (TEXT_TO_SQL, "zero1", 2, 3), (TEXT_TO_SQL, "zero2_offload", 1, 2), (TEXT_TO_SQL, "zero3", 2, 1),
    (CAUSAL, "none", 1, 2), (CAUSAL, "zero3_offload", 1, 2),
]  # fmt: skip
CAUSAL_TOO = [(CAUSAL, name, old, new) for name in RESUMED for old, new in ((1, 3), (3, 2))]
EVERY = [
    *[(TEXT_TO_SQL, name, old, new) for name in RESUMED for old in RANKS for new in RANKS if old != new],
    *CAUSAL_TOO,
]  # fmt: skip
PAIRS = EVERY if os.environ.get("ZEROPODS_SOAK") == "1" else FEW


@dataclass(frozen=True)
class Runs:
    """Runs in a folder."""

    sources: dict[str, Path]
    """The prepared data of each script."""
    folder: Path
    made: dict[str, Path] = field(default_factory=dict)

    def train(
        self, name: str, ranks: int, run: Path, *given: object, script: str = TEXT_TO_SQL, status: int = 0
    ) -> str:
        """Train on so many ranks; returns what rank 0 said."""
        data = "--dataset_path" if script == TEXT_TO_SQL else "--data"
        argv = [*FLAGS[script], data, self.sources[script], "--outputdir", run, *flags(name, ranks), *given]
        return train_ranks(argv, ranks, self.folder / run.name, script=script, status=status)

    def undisturbed(self, name: str, ranks: int, script: str = TEXT_TO_SQL) -> Path:
        """A run of all steps; made once."""
        run = self.folder / f"{Path(script).stem}-{name}-{ranks}"
        if run.name not in self.made:
            self.train(name, ranks, run, script=script)
            self.made[run.name] = run
        return run

    def killed(self, name: str, ranks: int, copy: str, script: str = TEXT_TO_SQL) -> Path:
        """A copy of such a run, as if it had been killed after its first checkpoint."""
        run = Path(shutil.copytree(self.undisturbed(name, ranks, script), self.folder / copy))
        (run / "record.json").unlink()
        shutil.rmtree(run / "checkpoints" / f"checkpoint-{LAST}")
        return run


@pytest.fixture(scope="module")
def runs(prepared: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Of blocks of a few lines, where they are of text."""
    blocks = tmp_path_factory.mktemp("blocks") / "prepared"
    prepare(Preparation(task="lm", data=text, tokenizer="gpt-tiny", max_seq_length=32), blocks)
    return Runs({TEXT_TO_SQL: prepared, CAUSAL: blocks}, tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize(("script", "name", "old", "new"), PAIRS)
def test_each_loss_after_the_change_is_that_of_the_undisturbed_run(
    script: str, name: str, old: int, new: int, runs: Runs
) -> None:
    run = runs.killed(name, old, f"{Path(script).stem}-{name}-{old}-{new}", script)
    said = runs.train(name, new, run, script=script)
    assert (f"made of checkpoint-{SAVED} ({old} ranks -> {new})" in said) == (name != "none")
    assert_same_losses(run, runs.undisturbed(name, old, script), SAVED, LAST)
    # What was made for this number of ranks is gone with the next checkpoint.
    assert not (run / "checkpoints" / "universal").exists()


def test_other_rows_per_step_and_another_technique_are_refused_with_what_fits(runs: Runs) -> None:
    run = runs.killed("zero1", 2, "refused")
    said = runs.train("zero1", 1, run, "--per_device_train_batch_size", 8, status=1)
    assert said.splitlines()[-1] == (
        f"zeropods: {run}: holds a run with 12 rows per step, but this call has 8 rows x 1 passes x 1 processes = 8; "
        "give --per_device_train_batch_size 6 --gradient_accumulation_steps 2"
    )
    run = runs.killed("zero1", 2, "technique")
    said = runs.train("none", 1, run, status=1)
    assert f"{run}: holds a run with technique zero1, but this call uses none; give the run's own --deepspeed" in said


@pytest.fixture
def saved(runs: Runs, request: pytest.FixtureRequest) -> Path:
    """A checkpoint of two ranks with ZeRO-1, of which there is no universal form yet."""
    run = runs.killed("zero1", 2, request.node.name)
    return run / "checkpoints" / f"checkpoint-{SAVED}"


def fitted(saved: Path, ranks: int = 1, technique: str = "zero1") -> Path:
    """What so many ranks load of it, as this process alone makes it, had it been saved with that technique."""
    manifest = read_manifest(saved)
    saved_by = replace(manifest.origin, model={**manifest.origin.model, "deepspeed": technique})
    engine = DeepSpeed(TextToSQLArguments(deepspeed=str(ROOT / "dsconfig" / "zero1.json")))
    ours = Checkpoints(saved.parent, replace(saved_by, world_size=ranks), engine)
    return ours.fitted(saved, replace(manifest, origin=saved_by))


def test_a_universal_form_that_was_left_behind_is_made_again(saved: Path) -> None:
    assert fitted(saved, 2) == saved
    # Of partial offload and the like nobody has made sure that the universal form is right.
    with pytest.raises(UserError, match=r"saved by 2 ranks; .* it can be resumed only on 2 ranks"):
        fitted(saved, 1, "custom")
    place = fitted(saved)
    whole = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    os.truncate(place / "scheduler.pt", 10)
    assert fitted(saved, 3) == place
    assert {path.name for path in whole} >= {"scheduler.pt", "trainer_state.json", "latest_universal", "fp32.pt"}
    assert (place / "scheduler.pt").read_bytes() == whole[place / "scheduler.pt"]


def test_stages_as_python_3_11_2_pickles_them_are_read_and_no_other_attribute(tmp_path: Path) -> None:
    import torch
    from deepspeed.runtime.zero.config import ZeroStageEnum

    class Attribute:
        def __init__(self, *asked: object) -> None:
            self.asked = asked

        def __reduce__(self) -> tuple[object, ...]:
            return getattr, self.asked

    torch.save([Attribute(ZeroStageEnum, "gradients"), torch.ones(2)], tmp_path / "stage.pt")
    torch.save([Attribute("text", "upper")], tmp_path / "attribute.pt")
    with plain_values_only():
        assert torch.load(tmp_path / "stage.pt")[0] is ZeroStageEnum.gradients
        with pytest.raises(KeyError, match="upper"):
            torch.load(tmp_path / "attribute.pt")


def test_a_pickle_that_is_no_plain_value_is_not_opened_though_its_manifest_fits(saved: Path, tmp_path: Path) -> None:
    import torch

    torch.save(Trap(tmp_path / "made"), saved / f"global_step{SAVED}" / "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    mark_complete(saved.parent, SAVED, read_manifest(saved).origin, hashed(saved))
    with pytest.raises(UserError, match=rf"global_step{SAVED}: contains \S*, which is not a plain value; the file"):
        fitted(saved)
    assert not (tmp_path / "made").exists()
