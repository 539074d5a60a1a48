"""Scores of prediction files, computed by hand and over the real dev splits, and the metrics that compute them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.made import a_record, write_run
from zeropods.cli import main
from zeropods.data.wikisql import read_split
from zeropods.errors import UserError
from zeropods.evaluate.score import Prediction, load_metric, right_queries, score, write_predictions
from zeropods.measure.score_json import QueryScore, read_score
from zeropods.report.notebook_tables import compared_answers, paired_table
from zeropods.sql.query import Condition, Query, format_query, parse_query

ROOT = Path(__file__).resolve().parents[3]
HEADER = ["Name", "Goals"]
TABLES = [
    {"id": "known", "header": HEADER, "types": ["text", "real"], "rows": [["Ann", 3], ["Bob", 3]]},
    {"id": "new", "header": HEADER, "types": ["text", "text"], "rows": []},
]
GOLD = [
    ("known", Query(0, 0, (Condition(1, 0, "3"),))),
    ("known", Query(1, 0, (Condition(0, 0, "Ann"),))),
    ("known", Query(0, 3)),
    ("known", Query(0, 3, (Condition(1, 1, "9"),))),
    ("new", Query(0, 0, (Condition(0, 0, "Ann"), Condition(1, 0, "3")))),
]
ANSWERS = [
    "SELECT Name FROM table WHERE Goals > 2",
    "SELECT Goals FROM table WHERE Name = ann",
    "SELECT COUNT Name FROM",
    "SELECT COUNT Name FROM table WHERE Goals > 9",
    "SELECT Name FROM table WHERE Goals = 3 AND Name = Ann",
]
CONTEXT = "The red fox ran to the river, and a grey fox slept."
QUESTIONS = [
    ("Who ran?", ("The red fox", "red fox ran")),
    ("Who slept?", ("a grey fox",)),
    ("Where to?", ("the river",)),
]


def write_lines(path: Path, documents: Iterable[object]) -> Path:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


@pytest.fixture
def wikisql(tmp_path: Path) -> Path:
    """Five dev examples on two tables, one of which train has too; the first three gold queries find something."""
    folder = tmp_path / "wikisql"
    folder.mkdir()
    write_lines(folder / "train.tables.jsonl", TABLES[:1])
    write_lines(folder / "dev.tables.jsonl", TABLES)
    examples = [
        {"phase": 1, "table_id": table, "question": f"question {index}", "sql": query.to_json()}
        for index, (table, query) in enumerate(GOLD)
    ]
    write_lines(folder / "dev.jsonl", examples)
    return folder


@pytest.fixture
def squad(tmp_path: Path) -> Path:
    """Three dev questions about one sentence."""
    qas = [
        {"id": f"q{i}", "question": q, "answers": [{"text": a, "answer_start": CONTEXT.index(a)} for a in answers]}
        for i, (q, answers) in enumerate(QUESTIONS)
    ]
    article = {"title": "Foxes", "paragraphs": [{"context": CONTEXT, "qas": qas}]}
    folder = tmp_path / "squad"
    folder.mkdir()
    (folder / "dev-v1.1.json").write_text(json.dumps({"version": "1.1", "data": [article]}))
    return folder


def queries(folder: Path, answers: Iterable[tuple[int, str]]) -> Path:
    path = folder / "predictions.dev.jsonl"
    write_predictions(
        path, [Prediction(index=i, question=f"question {i}", text=t, query=parse_query(t, HEADER)) for i, t in answers]
    )
    return path


def query_score(predictions: Path, data: Path, **how: Any) -> QueryScore:
    found = score(predictions, data, "dev", **how)
    assert isinstance(found, QueryScore)
    return found


def test_queries_are_scored_as_by_hand(wikisql: Path, tmp_path: Path) -> None:
    # Exact match compares the text, logical form neither order nor letter case, execution the usable results.
    found = query_score(queries(tmp_path, enumerate(ANSWERS)), wikisql)
    assert (found.examples, found.executable, found.unparseable) == (5, 3, 1)
    assert (found.exact_match, found.logical_form_accuracy, found.execution_accuracy) == (1 / 5, 3 / 5, 2 / 3)
    assert read_score(tmp_path / "score.dev.json") == found
    assert found.groups is not None and list(found.groups) == ["known_tables", "unseen_tables"]
    known, unseen = found.groups.values()
    assert (known.examples, known.logical_form_accuracy) == (4, 2 / 4)
    assert (unseen.examples, unseen.logical_form_accuracy, unseen.executable) == (1, 1.0, 0)
    assert unseen.execution_accuracy is unseen.intervals["execution_accuracy"] is None
    kinds = {name: (part.examples, part.logical_form_accuracy) for name, part in (found.kinds or {}).items()}
    counts = {"no aggregate": (3, 2 / 3), "COUNT": (2, 1 / 2)}
    assert kinds == {**counts, "0 conditions": (1, 0.0), "1 condition": (3, 2 / 3), "2 conditions": (1, 1.0)}


def test_a_part_in_any_order_is_scored_by_index_and_has_groups_where_there_are_both(
    wikisql: Path, tmp_path: Path
) -> None:
    found = query_score(queries(tmp_path, [(4, ANSWERS[4]), (1, ANSWERS[1])]), wikisql)
    assert (found.examples, found.logical_form_accuracy, found.executable) == (2, 1.0, 1)
    assert query_score(queries(tmp_path, [(0, ANSWERS[0])]), wikisql).groups is None
    (wikisql / "train.tables.jsonl").unlink()
    assert query_score(queries(tmp_path, enumerate(ANSWERS)), wikisql).groups is None


def test_a_score_near_zero_comes_with_its_reason_and_what_to_do(
    wikisql: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--data", str(wikisql), "--split", "dev"]
    wrong = ["SELECT Name FROM table WHERE Name = nobody"] * 5
    for folder in (tmp_path, write_run(tmp_path / "run", a_record())):
        assert main(["score", str(queries(folder, enumerate(wrong))), *words]) == 0
    first, second, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("5 answers: execution 0.000")
    remedy = "train longer, or start from a trained model"
    assert second == f"0 of 3 right: how its model was trained is not recorded here; {remedy}"
    training = "trained 20 steps only, 0.64 epochs, from random weights to a loss of 2"
    assert f"0 of 3 right: {training}; {remedy}" in others
    assert main(["score", str(queries(tmp_path, enumerate(ANSWERS))), *words]) == 0
    assert " right: " not in capsys.readouterr().out


def test_a_value_that_is_no_number_is_wrong_and_no_error(wikisql: Path, tmp_path: Path) -> None:
    path = queries(tmp_path, [(0, "SELECT Name FROM table WHERE Goals = many")])
    assert query_score(path, wikisql, rouge=True).execution_accuracy == 0.0


def test_gold_queries_of_the_real_dev_split_are_all_right(shared_data: Path, tmp_path: Path) -> None:
    folder = shared_data / "wikisql"
    every_fourth = islice(read_split(folder, "dev"), 0, None, 4)
    gold = [(e, format_query(e.query, e.table.header)) for e in every_fourth]
    path = tmp_path / "predictions.dev.jsonl"
    write_predictions(path, [Prediction(index=e.index, question=e.question, text=t, query=e.query) for e, t in gold])
    found = query_score(path, folder)
    listed = json.loads((folder / "dev.executable.json").read_text())
    executable = sum(index % 4 == 0 for index in listed)
    assert (found.examples, found.executable, found.unparseable) == (2_106, executable, 0)
    assert (found.exact_match, found.logical_form_accuracy, found.execution_accuracy) == (1.0, 1.0, 1.0)


# WikiSQL's official evaluator reads one line for each example, in order.


def test_the_official_example_predictions_get_the_official_verdict(
    shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    predictions = tmp_path / "example.pred.dev.jsonl"
    predictions.write_bytes((shared_data / "wikisql" / "example.pred.dev.jsonl").read_bytes())
    call = ["score", str(predictions), "--data", str(shared_data / "wikisql"), "--split", "dev", "--json"]
    assert main(call) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["examples"], result["unparseable"], result["executable"]) == (8_421, 606, 1_935)
    assert result["logical_form_accuracy"] == pytest.approx(3_807 / 8_421, abs=1e-12)
    # The official code finds 892: it binds the last value twice where two conditions are on one column.
    assert result["execution_accuracy"] == pytest.approx(888 / 1_935, abs=1e-12)


def official(folder: Path, *lines: object) -> Path:
    return write_lines(folder / "official.jsonl", lines)


def test_an_official_line_may_have_an_error_and_other_keys(wikisql: Path, tmp_path: Path) -> None:
    answers = [{"query": query.to_json(), "error": "", "seq_output": []} for _, query in GOLD]
    answers[1] = {"query": None, "error": "no column"}
    answers[2] = {"error": "no column"}
    answers[3] = {"query": {"sel": 7, "agg": 0, "conds": []}}
    path = official(tmp_path, *answers)
    result = query_score(path, wikisql, rouge=True)
    assert (result.examples, result.unparseable, result.executable) == (5, 2, 3)
    assert (result.exact_match, result.logical_form_accuracy, result.execution_accuracy) == (2 / 5, 2 / 5, 1 / 3)
    assert right_queries(path, wikisql, "dev") == {0: True, 1: False, 2: False, 3: False, 4: True}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"query": None, "error": "why"}] * 4, "official.jsonl: 4 lines, but dev has 5 examples; .* in order"),
        ([{"query": None, "error": "why"}] * 6, "official.jsonl: 6 lines, but dev has 5 examples; .* in order"),
        ([{"query": {"sel": 0}}], "official.jsonl:1: query.agg: Field required; correct it"),
        ([{"query": None, "error": "why"}, {"answer": 1}], "official.jsonl:2: has neither a query nor an error"),
        ([{"query": None}], "official.jsonl:1: has neither a query nor an error"),
        ([{"answer": 1}], r"official.jsonl:1: keys answer; expected .* or one of WikiSQL's official evaluator"),
    ],
)
def test_an_official_file_that_does_not_fit_the_split_is_refused(
    wikisql: Path, tmp_path: Path, lines: list[object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        score(official(tmp_path, *lines), wikisql, "dev")
    assert not (tmp_path / "score.dev.json").exists()


WITHOUT_TORCH = "import sys; from zeropods.cli import main; sys.exit(main(sys.argv[1:]) or 'torch' in sys.modules)"


def test_the_verb_scores_answers_with_custom_metrics_and_loads_no_torch(
    squad: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metric = "def starts(prediction, answers):\n    return float(any(a.startswith(prediction[:1]) for a in answers))\n"
    (tmp_path / "start_metrics.py").write_text(metric)
    path, texts = tmp_path / "predictions.dev.jsonl", ("A red  fox.", "grey wolf", "")
    write_predictions(
        path, [Prediction(index=i, id=f"q{i}", question=QUESTIONS[i][0], text=text) for i, text in enumerate(texts)]
    )
    call = ["score", str(path), "--data", str(squad), "--split", "dev", "--json"]
    command = [sys.executable, "-c", WITHOUT_TORCH, *call, "--metric", "start_metrics:starts"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=600, check=True)
    document = json.loads(done.stdout)
    assert list(document) == ["task", "examples", "exact_match", "f1", "intervals", "own_metrics"]
    # The first is right; "grey wolf" shares one of two words on each side; the last is empty.
    assert (document["exact_match"], document["f1"]) == (pytest.approx(1 / 3), pytest.approx(0.5))
    assert document["own_metrics"] == {"starts": pytest.approx(1 / 3)}
    assert set(document["intervals"]) == {"exact_match", "f1", "starts"}
    assert document == json.loads((tmp_path / "score.dev.json").read_text())
    assert main([*call, "--rouge"]) == 1
    said = "zeropods: --rouge: is for text2sql, but these predictions are for squad; leave it out\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("data", "line", "said"),
    [
        ("wikisql", {"index": 5, "query": None}, "index 5; the examples of dev are 0 to 4"),
        ("wikisql", {"index": 1, "question": "Another?", "query": None},
         r"question 'Another\?', but example 1 of dev asks 'question 1'"),
        ("squad", {"id": "other"}, r"question 'Who ran\?'.*, but example 0 of dev asks 'Who"),
        ("squad", {"id": "q0", "question": "Who?"}, r"question 'Who\?'.*, but example 0 of dev asks 'Who"),
        ("squad", {"id": "q0", "index": 1}, r"question 'Who ran\?'.*, but example 1 of dev asks 'Who"),
    ],
)  # fmt: skip
def test_predictions_of_another_split_are_refused(
    request: pytest.FixtureRequest, tmp_path: Path, data: str, line: dict[str, object], said: str
) -> None:
    whole = {"index": 0, "question": "Who ran?", "prediction": "", **line}
    with pytest.raises(UserError, match=f"jsonl:1: {said}"):
        score(write_lines(tmp_path / "p.jsonl", [whole]), request.getfixturevalue(data), "dev")


# The metrics, as `evaluate.load` gives them.

GOLD_QUERY = Query(0, 3, (Condition(1, 1, "3"), Condition(0, 0, "Ann")))
REFERENCE = {"query": format_query(GOLD_QUERY, HEADER), "header": HEADER}
JSON = json.dumps(GOLD_QUERY.to_json())


def test_query_accuracy_reads_texts_and_json_on_both_sides() -> None:
    accuracy = load_metric("query_accuracy")
    texts = [
        REFERENCE["query"],
        "SELECT COUNT Name FROM table WHERE Name = ann AND Goals > 3",
        "SELECT MAX Name FROM table",
    ]
    predictions = [*texts, "SELECT", JSON, '{"sel": 9, "agg": 0, "conds": []}', "{"]
    references = [REFERENCE] * 5 + [REFERENCE | {"query": JSON}, REFERENCE]
    assert accuracy.compute(predictions=predictions, references=references) == {
        "exact_match": 2 / 7, "logical_form_accuracy": 3 / 7, "unparseable": 3,
    }  # fmt: skip
    with pytest.raises(ValueError, match="reference 'SELECT' is not a query on columns"):
        accuracy.compute(predictions=["x"], references=[REFERENCE | {"query": "SELECT"}])


def test_rouge_is_the_hand_computed_one() -> None:
    """`a b c` against `a b d e`: 2 of 3 and 4 words in common, 1 of 2 and 3 pairs, F1 4/7 and 2/5."""
    rouge = load_metric("rouge_f1")
    result = rouge.compute(predictions=["a b c"], references=["a b d e"])
    assert result == pytest.approx({"rouge1": 4 / 7, "rouge2": 2 / 5, "rougeL": 4 / 7, "rougeLsum": 4 / 7})
    lists = rouge.compute(predictions=["a b", "a b"], references=["a b", "c d"], average=False)
    assert lists["rouge2"] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("prediction", "right", "exact", "f1"),
    [
        ("The  Cat!", ["wolf", "cat"], 1, 1.0),
        ("an\tapple\n", ["apple"], 1, 1.0),
        ("mother-in-law's", ["motherinlaws"], 1, 1.0),
        ("U.S. the", ["«us»"], 0, 0.0),
        # 2 of 3 words are right, and 2 of 2 are found: 2 x 2/3 x 1 / (5/3) = 0.8.
        ("big red fox", ["bird", "red fox"], 0, 0.8),
        # A word counts as often as both have it: 1 of 2 and 1 of 1.
        ("fox fox", ["fox"], 0, 2 / 3),
        ("", ["fox"], 0, 0.0),
        ("the", ["a"], 1, 0.0),
    ],
)
def test_squad_accuracy_is_the_hand_computed_one(prediction: str, right: list[str], exact: int, f1: float) -> None:
    found = load_metric("squad_accuracy").compute(predictions=[prediction], references=[right])
    assert found == {"exact_match": exact, "f1": pytest.approx(f1)}


def test_models_are_compared_question_by_question(sample: Path, tmp_path: Path) -> None:
    examples = list(islice(read_split(sample, "test"), 10))
    right = [Prediction(index=e.index, question=e.question, text="as expected", query=e.query) for e in examples]
    unread = [Prediction(index=e.index, question=e.question, text="", query=None) for e in examples]
    answers = {"none": right, "zero1": right[:4] + unread[4:], "zero3": unread[:3] + right[3:]}
    runs = []
    for technique, given in answers.items():
        runs.append(write_run(tmp_path / technique, a_record(technique=technique)))
        write_predictions(tmp_path / technique / "predictions.test.jsonl", given)
    table = paired_table(runs, sample, "test")
    lines = [dict(zip(table.header, row, strict=True)) for row in table.rows]
    # The exact test by hand: 2 x 0.5 ** 6 and 2 x 0.5 ** 3.
    assert [(line["right only in the first"], line["p"], line["more than chance"]) for line in lines] == [
        ("0", "1.00", "is the first"),
        ("6", "0.03", "yes"),
        ("3", "0.25", "no"),
    ]
    shown = compared_answers(runs, sample, "test", count=2)
    assert shown.header[2:] == tuple(line["run"] for line in lines)
    assert shown.rows[1][2:] == ("as expected", "(no query)", "as expected")
    assert not paired_table([], sample, "test").rows and not compared_answers([], sample, "test").rows


def test_repeats_of_one_technique_have_lines_of_their_own(sample: Path, tmp_path: Path) -> None:
    examples = list(islice(read_split(sample, "test"), 4))
    right = [Prediction(index=e.index, question=e.question, text="as expected", query=e.query) for e in examples]
    runs = []
    for repeat in ("1", "2"):
        folder = tmp_path / "none" / repeat
        runs.append(write_run(folder, a_record(technique="none", run_id=repeat)))
        write_predictions(folder / "predictions.test.jsonl", right)
    table = paired_table(runs, sample, "test")
    assert [row[0] for row in table.rows] == ["none x1 none/1", "none x1 none/2"]
    assert compared_answers(runs, sample, "test").header[2:] == ("none x1 none/1", "none x1 none/2")


def test_a_byte_order_mark_and_a_blank_last_line_of_ones_own_file_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, answers = tmp_path / "data", tmp_path / "p.jsonl"
    assert main(["data", "sample", "--out", str(data)]) == 0
    asked = [json.loads(line) for line in (data / "test.jsonl").read_text().splitlines()[:2]]
    for name in ("test.jsonl", "test.tables.jsonl"):
        (data / name).write_text(f"\ufeff{(data / name).read_text()}\n  \n")
    lines = [
        {"index": n, "question": each["question"], "prediction": "", "query": each["sql"]}
        for n, each in enumerate(asked)
    ]
    answers.write_text("\ufeff" + "".join(f"{json.dumps(each)}\n" for each in lines) + "\n")
    capsys.readouterr()
    assert main(["score", str(answers), "--data", str(data), "--split", "test", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["execution_accuracy"] == 1.0
    answers.write_text("{\n")
    assert main(["score", str(answers), "--data", str(data), "--split", "test"]) == 1
    assert "p.jsonl:1: broken JSON: " in capsys.readouterr().err
