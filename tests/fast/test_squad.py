"""The reader of SQuAD names the place of every fault; the prompt and the sample are what they say."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from zeropods.data.download import DATASETS, RECORD
from zeropods.data.sample import write_sample
from zeropods.data.squad import SquadExample, answer_in, read_squad, squad_prompt, squad_splits
from zeropods.errors import UserError

QUESTION = {"id": "q1", "question": "Where is Ann?", "answers": [{"text": "in Rome", "answer_start": 7}]}
DOCUMENT = {
    "version": "1.1",
    "data": [{"title": "Ann", "paragraphs": [{"context": "Ann is in Rome.", "qas": [QUESTION]}]}],
}


def write(folder: Path, document: Any, name: str = "train-v1.1.json") -> Path:
    content = document if isinstance(document, bytes) else json.dumps(document).encode()
    (folder / name).write_bytes(content)
    return folder


def fault(folder: Path, split: str = "train") -> str:
    with pytest.raises(UserError) as raised:
        list(read_squad(folder, split))
    assert "\n" not in str(raised.value)
    return str(raised.value)


def changed(**changes: Any) -> dict[str, Any]:
    document = deepcopy(DOCUMENT)
    document["data"][0]["paragraphs"][0]["qas"][0] |= changes
    return document


def test_a_question_comes_with_its_context_and_answers(tmp_path: Path) -> None:
    (example,) = read_squad(write(tmp_path, DOCUMENT), "train")
    assert example == SquadExample(0, "q1", "Where is Ann?", "Ann is in Rome.", ("in Rome",), (7,))


def test_a_file_of_another_name_is_found_by_its_split(tmp_path: Path) -> None:
    write(tmp_path, DOCUMENT, "train-v1.1.part.json")
    assert (squad_splits(tmp_path), len(list(read_squad(tmp_path, "train")))) == (["train"], 1)


def test_two_files_of_a_split_are_refused(tmp_path: Path) -> None:
    write(write(tmp_path, DOCUMENT, "train-a.json"), DOCUMENT, "train-b.json")
    assert "train-a.json, train-b.json are all of split 'train'" in fault(tmp_path)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (changed(answers=[{"text": "in Oslo", "answer_start": 7}]), "'q1': answer 'in Oslo' is not in its context"),
        (changed(answers=[{"text": "in Rome", "answer_start": 6}]), "'in Rome' is not at answer_start 6 but at 7"),
        (changed(answers=[{"text": " ", "answer_start": 3}]), "answers.0.text is ' '"),
        (changed(answers=[]), "answers is []"),
        (changed(question="half \ud800"), "train-v1.1.json: broken JSON"),
        (b'{"data":\n [}', "train-v1.1.json: broken JSON: expected value at line 2 column 3"),
        ([], "train-v1.1.json: it is []"),
        ({"data": []}, "train-v1.1.json: holds no question"),
        ({"data": DOCUMENT["data"] * 2}, "id 'q1' occurs twice"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, document: Any, said: str) -> None:
    assert said in fault(write(tmp_path, document))


def test_a_missing_file_says_where_it_comes_from(tmp_path: Path) -> None:
    assert "zeropods data get squad" in fault(tmp_path, "dev")


def test_what_data_get_leaves_is_read(tmp_path: Path) -> None:
    for source in DATASETS["squad"]:
        write(tmp_path, DOCUMENT, source.filename)
    assert squad_splits(write(tmp_path, {}, RECORD)) == ["train", "dev"]


def test_the_prompt_ends_where_the_answer_begins_and_an_answer_is_the_first_line_after_it() -> None:
    assert squad_prompt(" Where? ", "Here.\n") == "Question: Where? Context: Here. Answer:"
    assert answer_in(" in Rome \nQuestion: Who?") == "in Rome"


def test_the_sample_is_read_without_a_fault_and_dev_asks_of_other_contexts(tmp_path: Path) -> None:
    summary = write_sample(tmp_path / "squad", task="squad")
    read = {split: list(read_squad(tmp_path / "squad", split)) for split in ("train", "dev")}
    found = {split: len(examples) for split, examples in read.items()}
    assert found == summary["questions"] == {"train": 800, "dev": 160}
    assert not {e.context for e in read["train"]} & {e.context for e in read["dev"]}


@pytest.mark.parametrize(("split", "questions"), [("train", 11_877), ("dev", 10_570)])
def test_every_real_question_is_read(shared_data: Path, split: str, questions: int) -> None:
    assert sum(1 for _ in read_squad(shared_data / "squad", split)) == questions
