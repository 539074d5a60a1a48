"""Preparation of tables' questions, SQuAD and plain text; their tokenizers; samples and the real data."""

import hashlib
import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tests.hub_wikisql import hub_row
from zeropods.cli import main
from zeropods.data.encoding import first_tokens, train_byte_tokenizer, train_tokenizer, unknown_id
from zeropods.data.manifest import SPLITS, read_manifest
from zeropods.data.prepare import Preparation, prepare
from zeropods.data.sample import write_sample
from zeropods.data.squad import SquadEncoder, SquadExample, read_squad, squad_prompt
from zeropods.data.text import hub_corpus, open_corpus
from zeropods.data.tokenizers import load_causal_tokenizer, load_tokenizer, with_ends
from zeropods.data.wikisql import read_split, read_tables
from zeropods.errors import UserError
from zeropods.report.notebook_tables import longest_row
from zeropods.train.sampler import load_split
from zeropods.train.saved_models import raw_data_of


def test_rows_are_stored_without_padding_end_with_the_end_token_and_are_counted(prepared: Path) -> None:
    split = load_split(prepared, "train")
    assert split is not None and len(split) == 64
    lengths = [len(row) for row in split.sources]
    assert len(set(lengths)) > 5
    assert all(row[-1] == 1 and 0 not in row for row in [*split.sources, *split.targets])
    statistics = read_manifest(prepared).splits["train"]
    assert (statistics.source.total, statistics.source.max) == (sum(lengths), max(lengths))


def test_a_second_call_does_nothing_and_the_same_data_give_the_same_tokenizer(
    sample: Path, prepared: Path, tmp_path: Path
) -> None:
    before = (prepared / "manifest.json").stat().st_mtime_ns
    wanted = Preparation(data=sample, tokenizer="t5-tiny", limit=64)
    manifest, made = prepare(wanted, prepared)
    assert not made and (prepared / "manifest.json").stat().st_mtime_ns == before
    assert prepare(wanted, tmp_path / "again") == (manifest, True)


def test_truncation_is_counted_and_keeps_the_end_token(sample: Path, tmp_path: Path) -> None:
    wanted = Preparation(data=sample, tokenizer="t5-tiny", limit=30, max_source_tokens=12)
    manifest, _ = prepare(wanted, tmp_path / "short")
    split = load_split(tmp_path / "short", "train")
    assert split is not None
    assert manifest.splits["train"].source.truncated_rows == 30
    assert all(len(row) == 12 and row[-1] == 1 for row in split.sources)


def test_the_prompt_schema_is_in_lower_case_and_the_question_alone_is_as_it_is(sample: Path, tmp_path: Path) -> None:
    example = next(read_split(sample, "train"))
    texts = {}
    for prompt in ("schema", "question"):
        out = tmp_path / prompt
        prepare(Preparation(data=sample, tokenizer="t5-tiny", limit=1, prompt=prompt), out)
        rows = load_split(out, "train")
        assert rows is not None
        tokenizer = load_tokenizer(str(out / "tokenizer"))
        texts[prompt] = [tokenizer.decode(ids, skip_special_tokens=True) for ids in (rows.sources[0], rows.targets[0])]
    assert texts["question"] == [f"translate to SQL: {example.question}", example.query_text]
    source, target = texts["schema"]
    assert source.startswith(f"translate to SQL: {example.question.lower()} columns: {example.table.header[0].lower()}")
    assert target.startswith("SELECT ") and target.lower() == example.query_text.lower() != target


def test_copies_are_further_rows_of_train_and_the_first_rows_are_the_questions_themselves(
    sample: Path, tmp_path: Path
) -> None:
    once = Preparation(data=sample, tokenizer="t5-tiny", limit=40)
    thrice = Preparation(data=sample, tokenizer="t5-tiny", limit=40, copies=3)
    assert prepare(once, tmp_path / "once")[0].copies == 1
    manifest, _ = prepare(thrice, tmp_path / "thrice")
    assert manifest.copies == 3
    assert {name: split.rows for name, split in manifest.splits.items()} == {"train": 120, "dev": 40, "test": 40}
    for split in SPLITS:
        rows, more = (load_split(tmp_path / name, split) for name in ("once", "thrice"))
        assert rows is not None and more is not None
        for column in ("sources", "targets"):
            first = getattr(more, column)[:40]
            assert all(map(np.array_equal, getattr(rows, column), first))
            later = getattr(more, column)[40:]
            assert len({row.tobytes() for row in later} - {row.tobytes() for row in first}) > 40 or split != "train"


def test_the_longest_row_may_be_a_varied_copy_and_is_shown_as_the_model_sees_it(sample: Path, tmp_path: Path) -> None:
    out = tmp_path / "set"
    manifest, _ = prepare(Preparation(data=sample, tokenizer="t5-tiny", limit=40, copies=9), out)
    rows = load_split(out, "train")
    assert rows is not None
    lengths = [len(row) for row in rows.sources]
    assert lengths.index(max(lengths)) >= 40
    facts = dict(longest_row(out).rows)
    assert facts["source tokens"] == str(max(lengths)) == str(manifest.splits["train"].source.max)
    longest = rows.sources[lengths.index(max(lengths))]
    assert facts["source"] == load_tokenizer(str(out / "tokenizer")).decode(longest, skip_special_tokens=True)
    with pytest.raises(UserError, match="has no split 'nowhere'; prepare the data set again"):
        longest_row(out, "nowhere")


def test_queries_that_cannot_be_read_back_are_counted_and_the_first_is_shown(
    sample: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    shutil.copytree(sample, data)
    lines = [json.loads(line) for line in (data / "dev.jsonl").read_text().splitlines()]
    for number, value in ((7, ""), (9, "Ann ")):
        lines[number]["sql"]["conds"] = [[0, 0, value]]
    (data / "dev.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    call = ["prepare", "--data", str(data), "--tokenizer", "t5-tiny", "--limit", "20"]
    assert main([*call, "--out", str(tmp_path / "set")]) == 0
    splits = read_manifest(tmp_path / "set").splits
    assert [splits[split].targets_unreadable for split in SPLITS] == [0, 2, 0]
    first = splits["dev"].first_unreadable
    assert first is not None and first.startswith("row 8 of dev: 'SELECT ") and first.endswith(" = '")
    printed = capsys.readouterr().out
    said = "2 rows whose query cannot be read back from its text, so that no answer is right; correct or remove them"
    assert printed.count("cannot be read back") == 1
    assert f"{said}, the first is {first}\n" in printed


def test_a_set_of_the_hub_is_prepared_as_the_official_one_and_found_again(sample: Path, tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    splits = {"train": "train", "validation": "dev"}
    saved = {}
    for theirs, ours in splits.items():
        examples = itertools.islice(read_split(sample, ours), 50)
        saved[theirs] = Dataset.from_list([hub_row(example) for example in examples])
    DatasetDict(saved).save_to_disk(hub)
    tokenizer = str(prepare_tokenizer(sample, tmp_path))
    sets = {}
    for name, data in (("official", sample), ("hub", hub)):
        out = tmp_path / f"set of {name}"
        prepare(Preparation(data=data, tokenizer=tokenizer, limit=30), out)
        sets[name] = {split: load_split(out, split) for split in ("train", "dev")}
    for split, one in sets["hub"].items():
        other = sets["official"][split]
        assert one is not None and other is not None
        assert [row.tolist() for row in one.sources] == [row.tolist() for row in other.sources]
        assert [row.tolist() for row in one.targets] == [row.tolist() for row in other.targets]
    assert raw_data_of(tmp_path / "set of hub", ("test", "dev")) == (hub, "dev")


def prepare_tokenizer(sample: Path, folder: Path) -> Path:
    """A tokenizer trained on the sample, as a folder."""
    prepare(Preparation(data=sample, tokenizer="t5-tiny", limit=30), folder / "for its tokenizer")
    return folder / "for its tokenizer" / "tokenizer"


def test_every_real_query_is_read_back(shared_data: Path, tmp_path: Path) -> None:
    tokenizer = str(shared_data / "t5" / "spiece.model")
    wanted = Preparation(data=shared_data / "wikisql", tokenizer=tokenizer, limit=2_000)
    manifest, _ = prepare(wanted, tmp_path / "set")
    assert [split.targets_unreadable for split in manifest.splits.values()] == [0, 0]


def test_a_fault_leaves_the_old_set_and_a_foreign_folder_is_refused(sample: Path, tmp_path: Path) -> None:
    data, out = tmp_path / "data", tmp_path / "set"
    shutil.copytree(sample, data)
    old, _ = prepare(Preparation(data=data, tokenizer="t5-tiny", limit=20), out)
    with open(data / "dev.jsonl", "r+", encoding="utf-8") as file:
        file.write("{broken")
    with pytest.raises(UserError, match=r"dev.jsonl:1: broken JSON"):
        prepare(Preparation(data=data, tokenizer="t5-tiny", limit=20), out)
    assert read_manifest(out) == old
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    with pytest.raises(UserError, match="not a prepared data set"):
        prepare(Preparation(data=sample, tokenizer="t5-tiny", limit=5), data)
    assert not (data / "manifest.json").exists()


@pytest.mark.parametrize(
    ("source", "said"), [("nowhere/nothing", "hub did not provide it"), (__file__, "not a SentencePiece model")]
)
def test_a_tokenizer_that_is_none_is_named(source: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_tokenizer(source)


def test_missing_characters_survive_in_the_completed_vocabulary_and_when_it_is_read_again(
    shared_data: Path, tmp_path: Path
) -> None:
    model = str(shared_data / "t5" / "spiece.model")
    text = "SELECT a FROM table WHERE x{1} < ~2 AND y^2 <3"
    for complete, expected in ((True, text), (False, "SELECT a FROM table WHERE x1 2 AND y2 3")):
        tokenizer = load_tokenizer(model, complete=complete)
        decoded = tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True)
        assert " ".join(decoded.split()) == expected
    tokenizer = load_tokenizer(model)
    assert len(tokenizer) <= 32_128
    tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer(str(tmp_path))
    assert again.get_vocab() == tokenizer.get_vocab()
    assert again("a < b ~ c").input_ids == tokenizer("a < b ~ c").input_ids


def test_ids_by_words_are_the_tokenizers_own(shared_data: Path) -> None:
    from zeropods.data.encoding import Encoder
    from zeropods.data.wikisql import read_split, source_of

    tokenizer = load_tokenizer(str(shared_data / "t5" / "spiece.model"))
    examples = itertools.islice(read_split(shared_data / "wikisql", "dev"), 0, None, 8)
    texts = [source_of(e, "schema") for e in examples]
    texts += ["", "  two  spaces ", "a\u00a0b\tc", "e\u0301 \u0308x < ~y"]
    expected = [encoding.ids for encoding in tokenizer.backend_tokenizer.encode_batch_fast(texts)]
    assert [ids.tolist() for ids in Encoder(tokenizer)(texts)] == expected


# Causal models: questions and text.


NO_LOSS = -100
LONG = SquadExample(0, "long", "Who sings?", f"{'a b c ' * 40}Ann {'d e f ' * 40}", ("Ann",), (240,))


@pytest.fixture(scope="module")
def squad(squad_sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample's questions, the loss on their answers."""
    return made(tmp_path_factory.mktemp("prepared") / "squad", task="squad", data=squad_sample)


@pytest.fixture(scope="module")
def blocks(text_sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample's text in blocks of 64 tokens."""
    return made(tmp_path_factory.mktemp("prepared") / "lm", task="lm", data=text_sample, max_seq_length=64)


def made(out: Path, tokenizer: str = "gpt-tiny", **wanted: object) -> Path:
    prepare(Preparation(tokenizer=tokenizer, **wanted), out)  # type: ignore[arg-type]
    return out


def rows(folder: Path, split: str) -> list[tuple[np.ndarray, np.ndarray]]:
    loaded = load_split(folder, split)
    assert loaded is not None
    return [loaded[number] for number in range(len(loaded))]


def test_a_row_is_the_prompt_the_answer_and_the_end_token_and_these_two_carry_the_loss(
    squad_sample: Path, squad: Path, tmp_path: Path
) -> None:
    tokenizer = load_causal_tokenizer(str(squad / "tokenizer"))
    dev = rows(squad, "dev")
    for (ids, labels), example in zip(dev, read_squad(squad_sample, "dev"), strict=True):
        answer = f" {example.answers[0]}<|endoftext|>"
        assert tokenizer.decode(ids) == squad_prompt(example.question, example.context) + answer
        assert len(ids) == len(labels) and tokenizer.decode(labels[labels != NO_LOSS]) == answer
    statistics = read_manifest(squad).splits["dev"]
    with_loss = [np.count_nonzero(labels != NO_LOSS) for _, labels in dev]
    assert (statistics.source.total, statistics.target.total) == (sum(len(ids) for ids, _ in dev), sum(with_loss))
    folder = made(tmp_path / "all", task="squad", data=squad_sample, limit=20, loss_on="all")
    assert all(labels.tolist() == [NO_LOSS, *ids[1:].tolist()] for ids, labels in rows(folder, "train"))


def test_blocks_of_train_are_full_and_those_of_an_evaluation_hold_every_token(text_sample: Path, blocks: Path) -> None:
    tokenizer, splits = load_causal_tokenizer(str(blocks / "tokenizer")), read_manifest(blocks).splits
    train = rows(blocks, "train")
    assert {len(ids) for ids, _ in train} == {64} and 0 <= splits["train"].leftover_tokens < 64
    assert (splits["train"].rows, splits["train"].documents) == (len(train), 210)
    first, *others = [ids for ids, _ in rows(blocks, "test")]
    tokens = np.concatenate([first, *(ids[1:] for ids in others)])
    assert tokenizer.decode(tokens).replace("<|endoftext|>", "") == (text_sample / "test.txt").read_text()
    labels = [labels for _, labels in rows(blocks, "dev")]
    with_loss = np.concatenate([row[1:] for row in labels])
    assert all(row[0] == NO_LOSS for row in labels) and len(with_loss) == splits["dev"].target.total
    assert np.count_nonzero(with_loss == tokenizer.eos_token_id) == 19  # Between 20 articles.


def test_a_text_shorter_than_a_block_is_refused(text_sample: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^.* fewer than one block of 100000; give more .* smaller --max-seq-length$"):
        made(tmp_path / "set", task="lm", data=text_sample, max_seq_length=100_000)
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize("keep_answer", [True, False])
def test_a_cut_row_keeps_question_and_answer_and_has_the_limits_length(keep_answer: bool) -> None:
    tokenizer = train_byte_tokenizer([LONG.context])
    (row,) = SquadEncoder(tokenizer, 120).rows([LONG], keep_answer=keep_answer)
    whole = tokenizer.decode(row.ids)
    context = whole.removeprefix("Question: Who sings? Context:").removesuffix(" Answer: Ann<|endoftext|>")
    assert (len(row.ids), row.cut) == (120, True)
    assert context in f" {LONG.context}"
    assert ("Ann" in context) == keep_answer


def test_a_cut_prompt_keeps_the_beginning_and_a_limit_without_room_says_what_it_needs() -> None:
    tokenizer = train_byte_tokenizer([LONG.context])
    (prompt,) = SquadEncoder(tokenizer, 100).rows([LONG], has_answer=False)
    said = tokenizer.decode(prompt.ids)
    assert (len(prompt.ids), prompt.answer) == (100, 0) and said.endswith(" Answer:")
    assert said.startswith("Question: Who sings? Context: a b c a b c")
    with pytest.raises(UserError, match=r"needs \d+ tokens without its context, but only 20 are allowed") as raised:
        SquadEncoder(tokenizer, 20).rows([LONG], keep_answer=True)
    needed = int(str(raised.value).split("needs ")[1].split()[0])
    (row,) = SquadEncoder(tokenizer, needed).rows([LONG], keep_answer=True)
    assert len(row.ids) == needed


def test_a_row_begins_with_its_prompt_for_tokenizers_of_other_kinds(squad_sample: Path) -> None:
    examples = list(itertools.islice(read_squad(squad_sample, "train"), 50))
    texts = [squad_prompt(e.question, e.context) for e in examples]
    for tokenizer in (train_tokenizer(texts), train_byte_tokenizer(texts), _with_a_first_token(texts)):
        encoder = SquadEncoder(tokenizer, 512)
        prompts = [row.ids for row in encoder.rows(examples, has_answer=False)]
        whole = encoder.rows(examples, keep_answer=True)
        assert all(row.ids[: -row.answer].tolist() == p.tolist() for p, row in zip(prompts, whole, strict=True))
        assert all(prompt.tolist()[:1] == (first_tokens(tokenizer) or [prompt[0]]) for prompt in prompts)


def _with_a_first_token(texts: list[str]) -> PreTrainedTokenizerBase:
    """As Llama's: words with the space before them, `<s>` before every text."""
    tokenizer = train_byte_tokenizer(texts)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    first = [("<s>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=first)
    return tokenizer


def test_a_trained_tokenizer_reads_every_byte_and_is_the_same_again(text_sample: Path, tmp_path: Path) -> None:
    tokenizer = train_byte_tokenizer([(text_sample / "train.txt").read_text()])
    tokenizer.save_pretrained(tmp_path)
    again = load_causal_tokenizer(str(tmp_path))
    odd = "  naïve 東京\r\n\t<unk> {x}"
    assert again.get_vocab() == tokenizer.get_vocab()
    assert again.decode(again(odd).input_ids) == odd
    assert (len(again) <= 1_024, again.pad_token, unknown_id(again)) == (True, "<|pad|>", None)


def test_a_tokenizer_without_a_pad_token_pads_with_its_end_token_and_needs_that(shared_data: Path) -> None:
    tokenizer = load_causal_tokenizer(str(shared_data / "gpt2"))
    assert (len(tokenizer), tokenizer.pad_token_id, unknown_id(tokenizer)) == (50_257, tokenizer.eos_token_id, None)
    backend = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(UserError, match="tokenizer 'x' has no end token; choose another"):
        with_ends("x", PreTrainedTokenizerFast(tokenizer_object=backend))


@pytest.mark.parametrize(
    ("vocabulary", "merges", "said"),
    [
        ({"a": 0}, "", "not a vocabulary like GPT-2's"),
        ("{", "", "vocab.json: broken JSON"),
        ({"<|endoftext|>": 0, "a": 1}, "#version: 0.2\na b\n", "merges.txt:2: 'a b' does not merge two tokens"),
    ],
)
def test_a_bare_tokenizer_that_is_none_is_named(tmp_path: Path, vocabulary: object, merges: str, said: str) -> None:
    (tmp_path / "vocab.json").write_text(vocabulary if isinstance(vocabulary, str) else json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text(merges)
    with pytest.raises(UserError, match=said):
        load_causal_tokenizer(str(tmp_path))


def test_a_streamed_set_has_its_rows_and_wikitext_the_articles_of_the_published_file(
    text_sample: Path, tmp_path: Path
) -> None:
    for name, content in (("train", "one"), ("validation", "two")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"body": content}) + "\n")
    corpus = hub_corpus(str(tmp_path), None, "body", None)
    assert {split: list(corpus.documents(split)) for split in corpus.splits} == {"train": ["one"], "dev": ["two"]}
    folder = tmp_path / "wikitext"
    folder.mkdir()
    published = (text_sample / "train.txt").read_text()
    lines = [line if line.strip() else "" for line in published.splitlines(keepends=True)]
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    (folder / "test.jsonl").write_text(json.dumps({"text": "x"}) + "\n")
    documents = list(hub_corpus(str(folder), None, "text", None).documents("train"))
    assert (len(documents), "".join(documents)) == (210, published)


def test_a_hub_that_cannot_be_reached_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"'allenai/c4': no such folder, and the data set hub cannot be") as raised:
        open_corpus("allenai/c4", "en", "text")
    assert "\n" not in str(raised.value)


def test_real_answers_come_back_and_a_cut_context_of_train_still_holds_its_answer(
    shared_data: Path, tmp_path: Path
) -> None:
    gpt2, data = str(shared_data / "gpt2"), shared_data / "squad"
    folder = made(tmp_path / "squad", gpt2, task="squad", data=data, limit=200, max_seq_length=256)
    train, found = read_manifest(folder).splits["train"], rows(folder, "train")
    assert (train.rows, train.targets_lost, train.source.max) == (200, 0, 256)
    assert 0 < train.source.truncated_rows <= [len(ids) for ids, _ in found].count(256)
    asked = load_causal_tokenizer(gpt2).batch_decode([ids[labels == NO_LOSS] for ids, labels in found])
    for prompt, example in zip(asked, read_squad(data, "train"), strict=False):
        assert example.answers[0] in prompt.partition(" Context:")[2].removesuffix(" Answer:")


# What the embedded sample promises.


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_summary_counts_what_the_files_hold(tmp_path: Path) -> None:
    summary = write_sample(tmp_path)
    assert contents(tmp_path).keys() == {
        f"{split}.{suffix}" for split in SPLITS for suffix in ("jsonl", "tables.jsonl")
    }
    assert summary == {
        "folder": str(tmp_path),
        "written": True,
        "seed": 0,
        "questions": {split: len(list(read_split(tmp_path, split))) for split in SPLITS},
        "tables": {split: len(read_tables(tmp_path / f"{split}.tables.jsonl")) for split in SPLITS},
        "held_out_questions": {"dev": 300, "test": 300},
    }
    line = (tmp_path / "dev.jsonl").read_text("utf-8").splitlines()[0]
    assert json.loads(line).keys() == {"phase", "table_id", "question", "sql"}


def digest(folder: Path) -> str:
    return hashlib.sha256(b"".join(content for _, content in sorted(contents(folder).items()))).hexdigest()[:16]


def test_the_bytes_of_seed_0_never_change(tmp_path: Path) -> None:
    for task in ("text2sql", "squad", "lm"):
        write_sample(tmp_path / task, task=task)
    found = {path.name: digest(path) for path in tmp_path.iterdir()}
    assert found == {"text2sql": "1635e8d91bc411ea", "squad": "c2d63e897c87ab3f", "lm": "4a904dcbc2f9d396"}


@pytest.mark.parametrize("task", ["squad", "lm"])
def test_a_sample_is_written_once_and_not_over_anything_else(task: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    assert write_sample(out, task=task)["written"]  # An empty folder is filled.
    assert not write_sample(out, task=task)["written"]
    with pytest.raises(UserError, match=r"than the sample of seed 7 \(train.*\); choose a new folder"):
        write_sample(out, seed=7, task=task)
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match=r"something other than the sample .*; choose a new folder"):
        write_sample(tmp_path, task=task)
    with pytest.raises(NotADirectoryError):
        write_sample(tmp_path / "thesis.txt", task="lm")
    assert (tmp_path / "thesis.txt").read_text() == "mine"
