"""The flags of the training scripts, as the scripts, a launch and a sweep read them: without torch."""

import pytest

from zeropods.errors import UserError
from zeropods.train.arguments import SCRIPTS, CausalArguments, TextToSQLArguments, parse_flags

T5, CAUSAL = TextToSQLArguments, CausalArguments


def test_without_flags_it_is_the_workshop() -> None:
    a = parse_flags(CausalArguments, [])
    assert (a.model_id, a.per_device_train_batch_size, a.gradient_accumulation_steps) == ("bigscience/bloom-560m", 4, 4)
    assert (a.epochs, a.learning_rate, a.weight_decay, a.gradient_checkpointing) == (3.0, 5e-5, 0.01, False)


def test_flags_are_read_in_every_form() -> None:
    argv = ["--model_id", "a", "--max-steps=5", "--dropout=0.2", "--scaled_rates", "false", "--load_best_model"]
    read = parse_flags(TextToSQLArguments, [*argv, "--local_rank=0", "--max_steps", "-1"])
    assert (read.model_id, read.max_steps, read.dropout) == ("a", -1, 0.2)
    assert (read.scaled_rates, read.load_best_model, read.seed) == (False, True, 42)


@pytest.mark.parametrize(
    ("kind", "words", "said"),
    [
        (T5, "--epoch 3", "--epoch: no flag of textsql_train.py; --epochs?"),
        (T5, "--model_name_or_path x", "--model_name_or_path: no flag of textsql_train.py; --model_id?"),
        (CAUSAL, "--dataset_paht x", "--dataset_paht: no flag of causal_train.py; --data?"),
        (T5, "--seed", "--seed: expected one argument"),
        (T5, "--seed 1.5", "--seed: '1.5'; expected a whole number"),
        (T5, "--learning_rate fast", "--learning_rate: 'fast'; expected a number"),
        (T5, "--tf32 maybe", "--tf32: 'maybe'; expected True or False"),
        (T5, "--early_stopping_patience 2 --eval_steps 5", "give both the same value"),
        (T5, "--compile graphs --gradient_accumulation_steps 2", "take 1 pass, or --compile blocks"),
        (T5, "--compile graphs --deepspeed a.json", "--deepspeed a.json: cannot be recorded as a graph"),
        (CAUSAL, "--task text2sql", "--task 'text2sql'; expected squad, lm"),
        (CAUSAL, "--task lm --loss_on answer", "--loss_on answer: the text of --task lm has no answers"),
        (CAUSAL, "--init drawn", "--init 'drawn'; expected pretrained, random or the folder of a finished run"),
        (CAUSAL, "--num_train_epochs inf", "--num_train_epochs inf; expected a finite number, more than 0"),
        (CAUSAL, "--max_grad_norm nan", "--max_grad_norm nan; expected a finite number, at least 0"),
        (CAUSAL, "--seed -1", "--seed -1; expected at least 0 and at most 4294967295"),
        (CAUSAL, "--adam_beta2 1", "--adam_beta2 1.0; expected at least 0 and less than 1"),
        (CAUSAL, "--precision fp8", "--precision 'fp8'; expected auto, fp32, bf16, fp16"),
    ],
)
def test_bad_flags_are_refused_in_one_line(kind: type[T5 | CAUSAL], words: str, said: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_flags(kind, words.split())
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", SCRIPTS.values())
def test_where_a_run_is_written_is_no_setting_of_it(kind: type[T5 | CAUSAL]) -> None:
    there = kind(outputdir="there", resume="never", save_total_limit=2, memory_interval=0.0)
    assert there.comparable() == kind().comparable()
