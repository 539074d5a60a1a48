"""Damaged, foreign and unfinished checkpoints: each is named, none counts, the one before does."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.made_checkpoint import an_origin, content_of, quick_folder, read, save
from zeropods.errors import UserError
from zeropods.train.checkpoint_files import (
    Found,
    complete,
    digest,
    fault,
    make_room,
    measured,
    names_in,
    newest_good,
    share,
)

SHARD = "global_step20/zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.fixture
def folder() -> Iterator[Path]:
    """Two complete checkpoints, of steps 10 and 20."""
    with quick_folder() as run:
        checkpoints = run / "checkpoints"
        for step in (10, 20):
            save(checkpoints, step)
        yield checkpoints


def found(folder: Path) -> Found:
    return newest_good(folder, an_origin())


def test_the_newest_is_found_and_nothing_is_passed_over(folder: Path) -> None:
    assert found(folder) == Found(folder / "checkpoint-20", ())
    assert read(folder / "checkpoint-20") == content_of(20)


def test_steps_are_compared_as_numbers(folder: Path) -> None:
    save(folder, 9)
    assert found(folder).path == folder / "checkpoint-20"


def test_a_checkpoint_of_a_causal_shape_counts(folder: Path) -> None:
    causal = an_origin(model={"family": "gpt2", "hidden": 64, "tied": True, "deepspeed": None})
    save(folder, 30, origin=causal)
    assert newest_good(folder, causal).path == folder / "checkpoint-30"


def test_no_folder_holds_no_checkpoint(tmp_path: Path) -> None:
    assert found(tmp_path / "checkpoints") == Found(None, ())


def flip(path: Path, at: int = 0, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[at % len(content)] ^= 1 << bit
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def link(path: Path) -> None:
    path.rename(path.parents[2] / "elsewhere")
    path.symlink_to(path.parents[2] / "elsewhere")


def other_step(path: Path) -> None:
    path.write_text(path.read_text().replace('"step": 20', '"step": 21'))


@pytest.mark.parametrize(
    ("harm", "name", "why"),
    [
        (flip, SHARD, f"{SHARD}: its bytes have changed since it was saved (SHA-256)"),
        (truncate, SHARD, f"{SHARD}: 233 bytes, expected 234"),
        (Path.unlink, SHARD, f"{SHARD}: missing"),
        (link, SHARD, f"{SHARD}: "),
        (Path.touch, "global_step20/zero_pp_rank_3_mp_rank_00_optim_states.pt", "not in the manifest"),
        (Path.unlink, "manifest.json", "no manifest.json: its save did not end"),
        (lambda path: os.truncate(path, 100), "manifest.json", "manifest.json: damaged (Expecting"),
        (other_step, "manifest.json", "manifest.json: damaged (its digest is another)"),
        (lambda path: path.write_text("[]"), "manifest.json", "manifest.json: damaged (no JSON object)"),
        (lambda path: path.write_text("[" * 100_000), "manifest.json", "manifest.json: damaged"),
        (lambda path: path.write_text("{}"), "manifest.json", "writer None, schema_version None; expected 'zeropods'"),
    ],
)
def test_damage_is_named_and_the_one_before_counts(
    folder: Path, harm: Callable[[Path], object], name: str, why: str
) -> None:
    harm(folder / "checkpoint-20" / name)
    ((skipped, said), *_) = found(folder).skipped
    assert (skipped, why in said) == ("checkpoint-20", True), said
    assert found(folder).path == folder / "checkpoint-10"


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_one_flipped_bit_anywhere_is_found(data: st.DataObject) -> None:
    with quick_folder() as run:
        place = save(run / "checkpoints", 20)
        names = sorted(names_in(place)) + ["manifest.json"] * 3
        path = place / data.draw(st.sampled_from(names))
        flip(path, data.draw(st.integers(0, path.stat().st_size - 1)), data.draw(st.integers(0, 7)))
        assert fault(place, lambda _: None) is not None or same_meaning(path)


def same_meaning(path: Path) -> bool:
    """White space of the manifest may change: what it says is proven, not how it is written."""
    if path.name != "manifest.json":
        return False
    document = json.loads(path.read_text())
    stored = document.pop("digest")
    return digest(document) == stored


def test_every_bad_one_is_named_newest_first_and_none_is_taken(folder: Path) -> None:
    flip(folder / "checkpoint-20" / SHARD)
    (folder / "checkpoint-10" / "manifest.json").unlink()
    assert found(folder).path is None
    assert [name for name, _ in found(folder).skipped] == ["checkpoint-20", "checkpoint-10"]


def test_a_checkpoint_of_another_model_is_named(folder: Path) -> None:
    large = an_origin(model={**an_origin().model, "d_model": 1024}, settings=digest("large"))
    save(folder, 30, origin=large)
    assert found(folder).skipped == (("checkpoint-30", "of another model: d_model 1024, expected 64"),)
    assert found(folder).path == folder / "checkpoint-20"


def test_a_checkpoint_of_other_settings_is_none_of_the_run_but_its_model_fits(folder: Path) -> None:
    longer = an_origin(run_id="r2", settings=digest({"max_steps": 60}))
    place = save(folder, 30, origin=longer)
    assert found(folder).skipped == (("checkpoint-30", "of run r2, which has other settings"),)
    assert fault(place, lambda origin: origin.other_model(an_origin())) is None


def test_a_checkpoint_of_another_step_under_a_new_name_is_named(folder: Path) -> None:
    shutil.copytree(folder / "checkpoint-10", folder / "checkpoint-40")
    assert found(folder).skipped == (("checkpoint-40", "is of step 10, under another name"),)


def point(folder: Path, checkpoint: str) -> None:
    said = json.loads((folder / "latest.json").read_text())
    (folder / "latest.json").write_text(json.dumps({**said, "checkpoint": checkpoint}))


def test_an_older_pointer_is_named_and_not_followed(folder: Path) -> None:
    point(folder, "checkpoint-10")
    older = ("latest.json", "names checkpoint-10; checkpoint-20 is newer and complete")
    assert found(folder) == Found(folder / "checkpoint-20", (older,))


def test_a_pointer_to_what_is_gone_is_named(folder: Path) -> None:
    point(folder, "checkpoint-30")
    assert found(folder) == Found(folder / "checkpoint-20", (("checkpoint-30", "gone"),))


def test_a_pointer_to_another_save_of_the_same_step_is_named(folder: Path) -> None:
    (folder / "latest.json").write_text(json.dumps({"checkpoint": "checkpoint-20", "manifest": "0" * 64}))
    assert found(folder).skipped == (("latest.json", "names another save of checkpoint-20"),)


@pytest.mark.parametrize("text", ["", "7", '{"checkpoint": 1}', '{"checkpoint": "../../etc", "manifest": "0"}'])
def test_a_pointer_that_says_nothing_of_use_is_named_and_nothing_is_lost(folder: Path, text: str) -> None:
    (folder / "latest.json").write_text(text)
    assert [name for name, _ in found(folder).skipped] == ["latest.json"]
    assert found(folder).path == folder / "checkpoint-20"


def test_nothing_is_lost_without_a_pointer(folder: Path) -> None:
    (folder / "latest.json").unlink()
    assert found(folder) == Found(folder / "checkpoint-20", ())


def test_what_a_killed_save_left_is_not_mixed_into_the_next_of_its_step(folder: Path) -> None:
    killed = make_room(folder, 30)
    (killed / "zero_pp_rank_7_of_a_killed_save.pt").touch()
    save(folder, 30)
    assert found(folder) == Found(folder / "checkpoint-30", ())
    assert read(folder / "checkpoint-30") == content_of(30)


def test_a_complete_checkpoint_counts_until_its_step_is_complete_again(folder: Path) -> None:
    make_room(folder, 20)
    assert found(folder).path == folder / "checkpoint-20.previous"
    assert read(folder / "checkpoint-20.previous") == content_of(20)
    save(folder, 20, save="second")
    assert found(folder) == Found(folder / "checkpoint-20", ())
    assert read(folder / "checkpoint-20") == content_of(20, "second")
    assert sorted(os.listdir(folder)) == ["checkpoint-10", "checkpoint-20", "latest.json"]


def test_a_file_that_came_while_the_step_was_saved_is_refused(folder: Path) -> None:
    place = make_room(folder, 30)
    (place / "trainer_state.json").touch()
    files = measured(place, names_in(place))
    (place / "late.pt").touch()
    with pytest.raises(UserError, match=r"late\.pt came or went"):
        complete(folder, 30, an_origin(), files)
    assert found(folder).path == folder / "checkpoint-20"


def test_every_file_is_some_ranks_and_no_two_ranks() -> None:
    names = {*content_of(20), "of_no_known_kind", "rng_state_5.pth"}
    shares = [share(names, rank, 3) for rank in range(3)]
    assert sorted(name for own in shares for name in own) == sorted(names)
    assert shares[1] == [SHARD, "rng_state_1.pth"]


def test_a_file_that_is_being_deleted_elsewhere_is_no_fault(folder: Path) -> None:
    (folder / "checkpoint-20" / ".nfs0001").touch()
    assert found(folder).skipped == ()
