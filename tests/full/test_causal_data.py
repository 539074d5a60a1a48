"""Preparation for causal models: SQuAD, plain text, their tokenizers; samples and the real data."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from zeropods.data.encoding import first_tokens, train_byte_tokenizer, train_tokenizer, unknown_id
from zeropods.data.manifest import read_manifest
from zeropods.data.prepare import Preparation, prepare
from zeropods.data.squad import SquadEncoder, SquadExample, read_squad, squad_prompt
from zeropods.data.text import HubCorpus, open_hub
from zeropods.data.tokenizers import END, load_causal_tokenizer, with_ends
from zeropods.errors import UserError
from zeropods.train.sampler import load_split

NO_LOSS = -100
LONG = SquadExample(0, "long", "Who sings?", f"{'a b c ' * 40}Ann {'d e f ' * 40}", ("Ann",), (240,))


@pytest.fixture(scope="module")
def squad(squad_sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample's questions, the loss on their answers."""
    return prepared(tmp_path_factory.mktemp("prepared") / "squad", task="squad", data=squad_sample)


@pytest.fixture(scope="module")
def blocks(text_sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample's text in blocks of 64 tokens."""
    return prepared(tmp_path_factory.mktemp("prepared") / "lm", task="lm", data=text_sample, max_seq_length=64)


def prepared(out: Path, tokenizer: str = "gpt-tiny", **wanted: object) -> Path:
    prepare(Preparation(tokenizer=tokenizer, **wanted), out)  # type: ignore[arg-type]
    return out


def fault(out: Path, **wanted: object) -> str:
    with pytest.raises(UserError) as raised:
        prepared(out, **wanted)  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)
    assert not out.exists()
    return str(raised.value)


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
    folder = prepared(tmp_path / "all", task="squad", data=squad_sample, limit=20, loss_on="all")
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
    said = fault(tmp_path / "set", task="lm", data=text_sample, max_seq_length=100_000)
    assert "fewer than one block of 100000; give more text or a smaller --max-seq-length" in said


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
    with pytest.raises(UserError, match=r"needs \d+ tokens without its context, and 20 are allowed") as raised:
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
    with pytest.raises(UserError, match="tokenizer 'x' has no end token; name another"):
        with_ends("x", PreTrainedTokenizerFast(tokenizer_object=backend))


@pytest.mark.parametrize(
    ("vocabulary", "merges", "said"),
    [
        ({"a": 0}, "", "no vocabulary of GPT-2's kind"),
        ("{", "", "vocab.json: broken JSON"),
        ({"a": 0, END: 1}, "#version: 0.2\na b\n", "merges.txt:2: 'a b' makes no piece of vocab.json"),
    ],
)
def test_a_bare_tokenizer_that_is_none_is_named(
    tmp_path: Path, vocabulary: dict[str, int] | str, merges: str, said: str
) -> None:
    (tmp_path / "vocab.json").write_text(vocabulary if isinstance(vocabulary, str) else json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text(merges)
    with pytest.raises(UserError, match=said):
        load_causal_tokenizer(str(tmp_path))


def test_a_streamed_set_has_its_rows_and_wikitext_the_articles_of_the_published_file(
    text_sample: Path, tmp_path: Path
) -> None:
    for name, content in (("train", "one"), ("validation", "two")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"body": content}) + "\n")
    corpus = HubCorpus(str(tmp_path), None, "body", None)
    assert {split: list(corpus.documents(split)) for split in corpus.splits} == {"train": ["one"], "dev": ["two"]}
    folder = tmp_path / "wikitext"
    folder.mkdir()
    published = (text_sample / "train.txt").read_text()
    lines = [line if line.strip() else "" for line in published.splitlines(keepends=True)]
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    (folder / "test.jsonl").write_text(json.dumps({"text": "x"}) + "\n")
    documents = list(HubCorpus(str(folder), None, "text", None).documents("train"))
    assert (len(documents), "".join(documents)) == (210, published)


def test_a_hub_that_cannot_be_reached_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"'allenai/c4': no such folder, and the hub .* cannot be reached") as raised:
        open_hub("allenai/c4", "en", "text")
    assert "\n" not in str(raised.value)


def test_real_answers_come_back_and_a_cut_context_of_train_still_holds_its_answer(
    shared_data: Path, tmp_path: Path
) -> None:
    gpt2, data = str(shared_data / "gpt2"), shared_data / "squad"
    folder = prepared(tmp_path / "squad", gpt2, task="squad", data=data, limit=200, max_seq_length=256)
    train, found = read_manifest(folder).splits["train"], rows(folder, "train")
    assert (train.rows, train.targets_lost, train.source.max) == (200, 0, 256)
    assert 0 < train.source.truncated_rows <= [len(ids) for ids, _ in found].count(256)
    asked = load_causal_tokenizer(gpt2).batch_decode([ids[labels == NO_LOSS] for ids, labels in found])
    for prompt, example in zip(asked, read_squad(data, "train"), strict=False):
        assert example.answers[0] in prompt.partition(" Context:")[2].removesuffix(" Answer:")


def test_real_text_is_packed_with_less_than_one_percent_left_over(shared_data: Path, tmp_path: Path) -> None:
    lm = prepared(tmp_path / "lm", str(shared_data / "gpt2"), task="lm", data=shared_data / "wikitext-2", limit=20)
    manifest = read_manifest(lm)
    train = manifest.splits["train"]
    assert train.source.total == train.rows * 512
    assert train.leftover_tokens / train.source.total < 0.01
    assert manifest.pad_token == "<|endoftext|>"
