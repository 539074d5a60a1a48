"""Profiler reports whose figures cannot be, or contradict one another: what is named, and that no ratio comes of it."""

import json
import re
from pathlib import Path

import pytest

from tests.fast.measure.test_profile import DATA, ZERO1, ZERO3, a_profiled_record, made, profile, read
from tests.made import a_rank, as_record
from zeropods.measure.profile_contradictions import Fault
from zeropods.measure.profile_corrections import Checked, check_report
from zeropods.report.profile import ProfileReport

CONTRADICTION = "summary_contradicts_tree"


def checked(text: str, passes: int | None = None) -> Checked:
    """A report, checked; with the record of a run of so many passes a step, if there is one."""
    if passes is None:
        return check_report(read(text))
    batch = {"per_device_train_batch_size": 2, "effective_batch_size": 2 * passes}
    record = a_profiled_record(gradient_accumulation_steps=passes, **batch)
    return check_report(read(text), as_record(record))


def faults(text: str, name: str) -> list[Fault]:
    return [fault for fault in checked(text).faults if fault.name == name]


def changed(text: str, old: str, new: str) -> str:
    """A report with one figure of it replaced."""
    assert text.count(old) == 1, old
    return text.replace(old, new)


def in_seconds(text: str) -> str:
    """A report whose summary has its times in seconds, not milliseconds, and its rates to match."""
    beginning, tree = re.split(r"(?=-+ Aggregated)", text, maxsplit=1)
    slower = {"TFLOPS": "GFLOPS", "GFLOPS": "MFLOPS", "MFLOPS": "KFLOPS", "KFLOPS": "FLOPS"}
    lines = []
    for line in beginning.splitlines():
        line = re.sub(r"(\d) ms\s*$", r"\1 s", line)
        line = re.sub(r"[TGMK]FLOPS\s*$", lambda match: slower[match[0].strip()], line)
        rate = re.fullmatch(r"(samples/second:\s+)(\S+)\s*", line)
        lines.append(f"{rate[1]}{float(rate[2]) / 1000:.4f}" if rate else line)
    return "\n".join([*lines, tree])


def published(root: str = "59.82 ms") -> str:
    """A report of t5-small on three pods as it was published: a summary and depths, no tree and no end."""
    text = made(
        lines={
            "world size": "3", "data parallel size": "3", "batch size per GPU": "32", "params per GPU": "60.51 M",
            "params of model = params per GPU * mp_size": "60.51 M", "fwd MACs per GPU": "191.26 GMACs",
            "fwd flops per GPU": "382.64 G", "fwd flops of model = fwd flops per GPU * mp_size": "382.64 G",
            "fwd latency": "60 ms", "fwd FLOPS per GPU = fwd flops per GPU / fwd latency": "6.38 TFLOPS",
            "bwd latency": "287.7 ms", "bwd FLOPS per GPU = 2 * fwd flops per GPU / bwd latency": "2.66 TFLOPS",
            "fwd+bwd FLOPS per GPU = 3 * fwd flops per GPU / (fwd+bwd latency)": "3.3 TFLOPS",
            "step latency": "139.91 ms", "iter latency": "487.61 ms",
            "FLOPS per GPU = 3 * fwd flops per GPU / iter latency": "2.35 TFLOPS", "samples/second": "196.88",
        }
    )  # fmt: skip
    for old, new in (("912", "60.51 M"), ("7.68 KMACs", "191.26 GMACs"), ("1.79 Gs", root)):
        text = changed(text, f"{{'TinyLM': '{old}'}}", f"{{'T5': '{new}'}}")
    return text[: text.index("--- Detailed") - 24]


# The summary against the tree.


@pytest.mark.parametrize("text", [published(), made(), made("clockless"), ZERO1.read_text(), ZERO3.read_text()])
def test_a_report_that_nobody_changed_contradicts_nothing(text: str) -> None:
    of_time = {"impossible_figure", "contradicts_itself", CONTRADICTION, "accumulated_passes", "sizes_contradict"}
    of_parts = {"part_exceeds_whole", "parts_exceed_whole", "model_parallel"}
    assert not {fault.name for fault in checked(text).faults} & (of_time | of_parts)


@pytest.mark.parametrize("text", [published(), made("clockless"), made(), ZERO1.read_text()])
def test_times_of_a_summary_that_are_not_those_of_the_tree_give_no_ratio(text: str, tmp_path: Path) -> None:
    (tmp_path / "right.txt").write_text(text)
    (tmp_path / "wrong.txt").write_text(in_seconds(text))
    (fault,) = faults(in_seconds(text), CONTRADICTION)
    assert fault.where == "fwd latency" and fault.corrected is None
    # Rates that are left in the unit that they had contradict these times too: one fault says it all.
    summary, heading, tree = text.partition("Aggregated")
    only_times = re.sub(r"(latency: .*\d) ms", r"\1 s", summary)
    assert faults(f"{only_times}{heading}{tree}", "contradicts_itself") == []
    assert len(faults(f"{only_times}{heading}{tree}", CONTRADICTION)) == 1
    result, said = profile(tmp_path / "right.txt", "--against", tmp_path / "wrong.txt")
    ratios = {line["name"]: line["ratio"] for line in result["against"]["compared"]}
    counts = {"parameters_per_gpu", "forward_macs", "forward_flops"}
    assert {name for name, ratio in ratios.items() if ratio is not None} == counts
    assert "e+0" not in said
    assert "summary contradicts tree" in profile(tmp_path / "wrong.txt")[1]


def test_one_time_that_the_tree_contradicts_says_nothing_of_the_others() -> None:
    found = checked(changed(published(), " 60 ms", " 60 s"))
    assert {fault.name for fault in found.faults} == {CONTRADICTION, "profiled_step"}
    assert found.figures["forward_seconds"] is found.figures["iteration_seconds"] is None


@pytest.mark.parametrize(
    ("label", "figure", "key"),
    [("fwd MACs per GPU", "7.68 MMACs", "forward_macs"), ("params per GPU", "91.2 K", "parameters_per_gpu")],
)
def test_counts_of_a_summary_are_those_of_the_tree(label: str, figure: str, key: str) -> None:
    found = checked(made("clockless", {label: figure}))
    (fault,) = [fault for fault in found.faults if fault.name == CONTRADICTION]
    assert fault.where == label
    assert found.figures[key] is None


def test_flops_are_no_fewer_than_two_for_each_multiply_add_of_the_tree() -> None:
    lines = {"fwd flops per GPU": "15.36", "fwd FLOPS per GPU = fwd flops per GPU / fwd latency": "768 FLOPS"}
    found = checked(made("clockless", lines))
    assert "fwd flops per GPU" in {fault.where for fault in found.faults if fault.name == CONTRADICTION}
    assert found.figures["forward_flops"] is None


# A line of the summary against the others.


@pytest.mark.parametrize(
    ("label", "figure", "corrected"),
    [
        # The times and the rates agree on what it should be.
        ("iter latency", "60 ms", {"iter latency": 0.05}),
        ("samples/second", "400", {"samples/second": 40}),
        # What follows from it is printed, but which of these was changed is not known.
        ("step latency", "1 s", {"step latency": None, "iter latency": None, "samples/second": None}),
    ],
)
def test_a_line_is_corrected_only_by_lines_that_are_sound(
    label: str, figure: str, corrected: dict[str, float | None]
) -> None:
    found = {fault.where: fault.corrected for fault in faults(made("clockless", {label: figure}), "contradicts_itself")}
    for where, right in corrected.items():
        assert found[where] == (None if right is None else pytest.approx(right))


# Gradient accumulation.


def of_passes(passes: int, kind: str = "clockless") -> str:
    """A report of a step of so many passes: times of all of them, FLOPs and rows of one."""
    forward, backward = 12 * passes, 20 * passes
    whole = forward + backward + 10
    return made(kind, {
        "fwd latency": f"{forward} ms",
        "fwd FLOPS per GPU = fwd flops per GPU / fwd latency": f"{15_360 / forward:.2f} KFLOPS",
        "bwd latency": f"{backward} ms",
        "bwd FLOPS per GPU = 2 * fwd flops per GPU / bwd latency": f"{2 * 15_360 / backward:.2f} KFLOPS",
        "fwd+bwd FLOPS per GPU = 3 * fwd flops per GPU / (fwd+bwd latency)":
            f"{3 * 15_360 / (forward + backward):.2f} KFLOPS",
        "step latency": "10 ms",
        "iter latency": f"{whole} ms",
        "FLOPS per GPU = 3 * fwd flops per GPU / iter latency": f"{3 * 15_360 / whole:.2f} KFLOPS",
        "samples/second": f"{2_000 / whole:.2f}",
    })  # fmt: skip


@pytest.mark.parametrize("passes", [2, 8])
def test_passes_are_recognised_by_the_roots_own_time_and_rates_are_those_of_all_of_them(passes: int) -> None:
    found = checked(of_passes(passes))
    (fault,) = [fault for fault in found.faults if fault.name == "accumulated_passes"]
    assert (fault.where, found.passes) == ("fwd latency", passes)
    assert f"all {passes} passes" in fault.reason
    whole = (12 + 20) * passes + 10
    assert found.figures["samples_per_second"] == pytest.approx(2_000 * passes / whole, rel=0.01)
    assert found.figures["forward_flops_per_second"] == pytest.approx(15_360 / 0.012, rel=0.01)
    assert found.figures["flops_per_second"] == pytest.approx(3 * 15_360e3 * passes / whole, rel=0.01)


def test_passes_are_known_from_the_run_where_the_roots_time_is_that_of_day() -> None:
    found = checked(of_passes(4, "plain"), passes=4)
    assert found.passes == 4 and found.root is not None
    assert found.root.latency_seconds == pytest.approx(0.012)
    assert found.figures["forward_flops_per_second"] == pytest.approx(15_360 / 0.012, rel=0.01)
    assert "accumulated_passes" in {fault.name for fault in found.faults}


def test_a_real_report_of_four_passes_is_corrected_by_its_run_and_doubted_without_it() -> None:
    """t5-tiny, 8 rows in each of 4 passes; the run's own steps took 0.8 to 1.3 s."""
    text = (DATA / "profile-four-passes.txt").read_text()
    rank = a_rank(step_seconds=[0.79, 1.0, 1.03, 0.83, 1.31], warmup_steps=2)
    batch = {"per_device_train_batch_size": 8, "effective_batch_size": 32, "gradient_accumulation_steps": 4}
    known = check_report(read(text), as_record(a_profiled_record(ranks=[rank], **batch)))
    assert known.passes == 4
    # 466.73 MFLOPs in each of four passes, of 421.78 ms together.
    assert known.figures["forward_flops_per_second"] == pytest.approx(4 * 466.73e6 / 0.42178, rel=0.01)
    assert known.figures["samples_per_second"] == pytest.approx(32 / 1.03)
    unknown = checked(text)
    (fault,) = [fault for fault in unknown.faults if fault.name == "accumulated_passes"]
    assert "of how many is not known" in fault.reason
    assert unknown.figures["samples_per_second"] is None and unknown.figures["forward_seconds"] == 0.42178


def test_passes_are_recognised_by_as_many_reports_of_a_log() -> None:
    found = checked(of_passes(3, "plain") * 3)
    assert found.passes == 3


def test_reports_of_different_numbers_of_passes_have_no_ratios() -> None:
    one, eight = (ProfileReport(checked(of_passes(passes)), str(passes)) for passes in (1, 8))
    document = one.against(eight).to_json()
    assert document["differences"] == ["passes of a step 1, 8"]
    several = ProfileReport(checked((DATA / "profile-four-passes.txt").read_text()), "several")
    assert "passes of a step unknown, unknown" in several.against(several).to_json()["differences"]
    assert {line["ratio"] for line in document["compared"]} == {None}


# Figures that cannot be.


@pytest.mark.parametrize(
    ("label", "figure"),
    [
        ("fwd latency", "0 ms"),
        ("fwd latency", "-20 ms"),
        ("step latency", "nan s"),
        ("bwd latency", "inf s"),
        ("fwd flops per GPU", "-15.36 K"),
        ("model parallel size", "0"),
        ("model parallel size", "-2"),
        ("model parallel size", "1.5"),
        ("world size", "none"),
        ("batch size per GPU", "0"),
    ],
)
def test_a_figure_that_cannot_be_is_a_named_fault_and_not_a_line_that_cannot_be_read(label: str, figure: str) -> None:
    found = checked(made(lines={label: figure}))
    (fault,) = [fault for fault in found.faults if fault.name == "impossible_figure"]
    assert fault.where == label and repr(figure) in fault.reason
    assert found.report.missing == ""
    key = next(key for key, (_, where) in found.report.lines.items() if where == label)
    assert found.figures[key] is None
    json.dumps(found.to_json(), allow_nan=False)


def test_a_module_with_a_negative_figure_is_named_and_nothing_is_worked_out_from_its_tree() -> None:
    text = changed(made(), "1.02 KMACs = 13.33% MACs, 1 ms", "1.02 KMACs = 13.33% MACs, -1 ms")
    (fault,) = faults(text, "impossible_figure")
    assert (fault.where, fault.said) == ("head", -0.001)
    assert checked(text).root is None and checked(text).report.missing == ""


def test_what_follows_from_a_figure_that_cannot_be_is_unknown_and_has_no_ratio(tmp_path: Path) -> None:
    (tmp_path / "right.txt").write_text(made("clockless"))
    (tmp_path / "wrong.txt").write_text(made("clockless", {"fwd latency": "-20 ms"}))
    result, _ = profile(tmp_path / "right.txt", "--against", tmp_path / "wrong.txt")
    ratios = {line["name"]: line["ratio"] for line in result["against"]["compared"]}
    unknown = {"forward_seconds", "forward_flops_per_second", "iteration_seconds", "flops_per_second"}
    assert {name for name, ratio in ratios.items() if ratio is None} == {*unknown, "samples_per_second"}
    table = {line: cells for line, *cells in ProfileReport.read(tmp_path / "wrong.txt").summary().rows}
    assert table["fwd latency"] == ["-20 ms", "unknown"]


# Processes that share a model.


def of_model_parallel(world: int, data: int, model: int) -> str:
    return made(lines={
        "world size": str(world), "data parallel size": str(data), "model parallel size": str(model),
        "samples/second": f"{2 * world / 0.05:.1f}",
    })  # fmt: skip


def test_rows_that_deepspeed_counts_once_for_each_part_of_a_model_are_counted_once() -> None:
    """Two rows in 0.05 s of each of 8 groups of 8 processes, which DeepSpeed takes for those of 64."""
    found = checked(of_model_parallel(64, 8, 8))
    (fault,) = [fault for fault in found.faults if fault.name == "model_parallel"]
    assert (fault.where, fault.said, fault.corrected) == ("samples/second", 2_560, 320)
    assert found.figures["samples_per_second"] == pytest.approx(320)


def test_sizes_that_do_not_fit_together_are_named() -> None:
    assert faults(of_model_parallel(8, 8, 2), "sizes_contradict")[0].where == "world size"
    # Pipeline stages divide the processes too.
    assert not faults(of_model_parallel(16, 4, 2), "sizes_contradict")


# A module against the modules inside it.


@pytest.mark.parametrize(
    ("old", "new", "name", "where"),
    [
        ("(up): Linear(256 = 28.07%", "(up): Linear(2.56 K = 28.07%", "part_exceeds_whole", "blocks.0.mlp"),
        ("(up): Linear(256 = 28.07% Params, 2.05 K", "(up): Linear(256 = 28.07% Params, 2.05 M", "part_exceeds_whole",
         "blocks.0.mlp"),
        ("512 = 56.14% Params, 4.1 KMACs = 53.33% MACs, 2.5 ms", "512 = 56.14% Params, 4.1 KMACs = 53.33% MACs, 1.5 ms",
         "parts_exceed_whole", "blocks.0.mlp"),
        ("784 = 85.96% Params, 6.66 KMACs", "784 = 85.96% Params, 5.66 KMACs", "parts_exceed_whole", "blocks.0"),
        ("512 = 56.14% Params, 4.1", "400 = 56.14% Params, 4.1", "parts_exceed_whole", "blocks.0.mlp"),
    ],
)  # fmt: skip
def test_a_module_has_no_less_than_the_modules_inside_it(old: str, new: str, name: str, where: str) -> None:
    (fault,) = faults(changed(made(), old, new), name)
    assert fault.where == where
    assert fault.corrected is None


def test_modules_that_share_a_matrix_may_have_more_parameters_than_the_model() -> None:
    """T5's embedding is in four modules at the top, and is counted in each of them."""
    names = {fault.name for fault in ProfileReport.read(DATA / "profile-zero1.txt").checked.faults}
    assert "shared_parameters" in names and "parts_exceed_whole" not in names


# What is said of a run beside the report.


def test_a_report_without_a_run_beside_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pasted.txt").write_text(made())
    monkeypatch.chdir(tmp_path)
    result, text = profile(Path("pasted.txt"))
    assert result["run"] == "not compared with its run: there is no record.json beside it"
    assert text.splitlines()[0] == f"pasted.txt, line 2; {result['run']}"
