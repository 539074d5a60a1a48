"""What the command line refuses: each call ends with one line that says what is wrong, and nothing is written."""

import re
import shlex
from pathlib import Path

import pytest

from zeropods.cli import main

PREPARE = "prepare --data nowhere --tokenizer gpt-tiny --out nowhere --task"
SCRIPT = "-- script.py --outputdir run"
HERE = "launch --launcher none --dry-run"
HUB = "-- causal_train.py --task lm --data allenai/c4"
SLURM = "launch --launcher slurm"
NAME = "cluster name '': expected 1 to 40 letters"
REFUSED = [
    # Words that nobody knows.
    ("plan --mod t5-small", "unrecognized arguments: --mod t5-small; did you mean --model?; see zeropods plan --help"),
    ("pods up --cout 2", "zeropods pods up: unrecognized arguments: --cout 2; did you mean --count?; see zeropods"),
    ("pods up -n 3", "unrecognized arguments: -n 3; did you mean --count?; see zeropods pods up --help"),
    ("pods up 3", "unrecognized arguments: 3; did you mean --count 3?; see zeropods pods up --help"),
    ("pods down demo", "unrecognized arguments: demo; did you mean --name demo?; see zeropods pods down --help"),
    ("pods down --nam demo", "unrecognized arguments: --nam demo; did you mean --name?; see zeropods pods down --help"),
    ("plan --gpus 2 --per_device_train_batch_size=8", "did you mean --slots and --batch-size?; see zeropods plan"),
    ("perplexity --model m --data d --split test", "--model; did you mean MODEL without a flag?; see zeropods perp"),
    ("summary --qwertz --agianst=x", "arguments: --qwertz --agianst=x; did you mean --against?; see zeropods summary"),
    ("launch --num_nodes=3 --num_gpus=2 x.py", "--num_nodes=3 --num_gpus=2; did you mean --num-pods and --slots?; arg"),
    ("sumary", "zeropods: VERB 'sumary': did you mean summary? (expected one of"),
    ("data form-csv", "WHAT 'form-csv': did you mean from-csv? (expected one of"),
    ("pods up --count 1 --backend locl", "--backend 'locl': did you mean local? (expected one of"),
    ("qwertz", "argument VERB: invalid choice: 'qwertz' (choose from"),
    ("data get imagenet --out x", "invalid choice: 'imagenet'"),
    ("prepare --data x --tokenizer y --prompt none --out z", "argument --prompt: invalid choice: 'none'"),
    ("predict --model m --data d --out p --split validation", "argument --split: invalid choice: 'validation'"),
    ("train", "VERB 'train': did you mean launch? (expected one of"),
    ("help", "VERB 'help': did you mean --help? (expected one of"),
    ("evaluate", "VERB 'evaluate': did you mean score? (expected one of"),
    ("generate", "VERB 'generate': did you mean predict? (expected one of"),
    ("down", "VERB 'down': did you mean pods down? (expected one of"),
    ("pods list --json extra", "zeropods pods list: unrecognized arguments: extra; see zeropods pods list --help"),
    ("pods check --name nosuch", "cluster nosuch: is not up, and no other cluster is; zeropods pods up --count N"),
    # Preparation.
    (f"{PREPARE} squad --prompt schema", "--prompt schema: a flag of task text2sql, not of squad"),
    (f"{PREPARE} lm --plain-vocabulary", "--plain-vocabulary True: a flag of task text2sql, not of lm"),
    (f"{PREPARE} text2sql --max-seq-length 8", "--max-seq-length 8: a flag of task squad and lm, not of text2sql"),
    (f"{PREPARE} squad --text-field body", "--text-field body: a flag of task lm, not of squad"),
    (f"{PREPARE} lm --loss-on answer", "loss_on 'answer': text of the task lm has no answers"),
    (f"{PREPARE} text2sql --max-source-tokens 1", "--max-source-tokens 1; expected at least 2"),
    (f"{PREPARE} lm --max-seq-length 1", "--max-seq-length 1; expected at least 2"),
    (f"{PREPARE} squad --limit 0", "--limit 0; expected at least 1"),
    (f"{PREPARE} squad", "no such folder; give the raw data, or fetch some: zeropods data get squad"),
    ("data sample --out /proc/x/sample", "/proc/x"),
    # Launches.
    (f"{SLURM} --restarts 2 {HUB}", "--restarts 2: SLURM requeues a job by itself"),
    (f"launch --launcher none --restarts 2 --min-pods 1 {HUB}", "--min-pods 1: is for --launcher pdsh or agents"),
    (f"launch --restarts -1 {HUB}", "--restarts -1; expected at least 0"),
    (f"launch --replace {HUB}", "--replace: a new worker is started for a restart; give --restarts too"),
    (f"launch --launcher none --restarts 1 --replace {HUB}", "--replace: is for CML workers; leave it out"),
    (f"launch --partition p {HUB}", "--partition: is for --launcher slurm"),
    (f"{SLURM} --name n {HUB}", "it chooses the nodes"),
    (f"{SLURM} --export HOME {HUB}", "gets the whole environment"),
    *((f"{SLURM} {flag} 0 {HUB}", f"{flag}: 0; expected") for flag in ("--slots", "--cpus-per-slot", "--num-pods")),
    (f"launch --slots 2 {HUB}", "--slots 2: pods have slots of their own; leave it out"),
    (f"launch --launcher none --num-pods 2 {HUB}", "uses this machine only"),
    ("launch textsql_train.py --seed 1", "arguments: --seed 1; arguments of SCRIPT come after '--'; see zeropods"),
    (f"launch --timeout nan {HUB}", "--timeout nan; expected more than 0 seconds"),
    *((f"launch --step-timeout {n} {HUB}", f"--step-timeout {n}; expected more than 4") for n in ("nan", "-1", "0.5")),
    (f"launch --name '' {SCRIPT}", NAME),
    (f"{HERE} --export NOT_SET_HERE {SCRIPT}", "--export NOT_SET_HERE: not set here"),
    (f"{HERE} -- textsql_train.py --outputdir ''", "--outputdir '': expected a folder"),
    (f"{HERE} --export A=B {SCRIPT}", "--export A=B: not set here"),
    (f"{HERE} --export '' {SCRIPT}", "--export : not set here"),
    (f"{HERE} --export AN_API_KEY {SCRIPT}", "--export AN_API_KEY: sounds like a secret"),
    *(
        (f"{HERE} --restarts 1 {SCRIPT} --resume {name}", f"--resume {name}: would lose at each restart what was done")
        for name in ("never", "run/checkpoints/checkpoint-5")
    ),
    # Pods.
    ("pods up", "--count: not given"),
    ("pods up --count 1 --backend local --replace", "--replace: is for CML workers; leave it out"),
    ("pods up --count 1 --backend local --accelerator-label 3", "--accelerator-label 3: is for CML workers; leave"),
    ("pods up --count many", "--count: 'many'; expected a whole number"),
    ("pods up --count 0", "--count 0; expected a positive number"),
    ("pods up --count 1 --slots -1", "--slots -1; expected a positive number"),
    ("pods up --count 1 --seconds inf", "--seconds inf; expected a positive number"),
    ("pods up --count 1 --memory nan", "--memory nan; expected a positive number"),
    ("pods up --count 1 --nvidia-gpu -1", "--nvidia-gpu -1; expected at least 0"),
    *((f"pods up --count 1 --name={name!r}", f"cluster name '{name}'") for name in ("../x", "-x", "a b", "x" * 41)),
    ("pods up --count 1 --backend cml", "backend cml: neither"),
    ("pods up --count 1 --ssh-config x", "ssh configuration x: is for hosts of your own"),
    ("pods up --hostfile hosts --count 3", "--count 3: hosts has 1 hosts"),
    ("launch --hostfile nosuch -- textsql_train.py", "nosuch: no such hostfile"),
    ("pods up --count 100000", "--count 100000; expected at most 500 pods on a machine"),
    *((f"pods {verb} --name ''", NAME) for verb in ("up --count 1", "down", "check")),
    # A file where a folder is expected, and a folder where a file is.
    ("score . --data d --split dev", ".: a folder; give one that zeropods predict has written"),
    ("sweep .", ".: a folder; expected a matrix"),
    ("sweep . --hostfile .", "a folder"),
    ("summary empty.yaml", "empty.yaml: a file; name run folders"),
    ("summary empty.yaml --out s", "empty.yaml: a file; name run folders"),
    ("prepare --data empty.yaml --tokenizer t5-tiny --out p", "empty.yaml: a file; give the raw data, or fetch some"),
    ("data sample --out empty.yaml", "--out empty.yaml: ... Not a directory; choose another place"),
    ("data from-csv --tables empty.yaml --questions empty.yaml --out o", "empty.yaml: a file; expected one with a CSV"),
    ("profile empty.yaml", "empty.yaml:1: no '--- DeepSpeed Flops Profiler ---' in 0 lines; give a profile.txt"),
    ("plan --model empty.yaml", "--model empty.yaml: ... expected a config.json as transformers writes it"),
    ("export nosuch --out x", "nosuch: no such folder; expected the run folder of a training script (--outputdir)"),
    (
        "score nosuch.jsonl --data x --split dev",
        "nosuch.jsonl: no such file; give one that zeropods predict has written",
    ),
    ("launch -- nosuch.py", "nosuch.py: no such script in"),
    ("demo empty.yaml", "empty.yaml: a file; name run folders"),
    ("export empty.yaml --out x", "empty.yaml: a file; expected the run folder"),
    ("plan --model t5-small --machine .", ".: a folder; create it with zeropods probe"),
    ("pods up --hostfile .", ".: a folder; give your own"),
    # Predictions, sweeps, summaries, the demo.
    *((f"predict --model m {flag} 0", f"{flag}: 0; expected more than 0") for flag in ("--limit", "--num-beams")),
    ("predict --model nowhere --out /dev/stdout", "--out '/dev/stdout': is not a file that can be replaced"),
    ("predict --model nowhere --prompt question --force-prompt", "--force-prompt: the answers are not the run's own"),
    ("predict --model ''", "argument --model: expected a name; '.' means the current folder"),
    ("demo other ''", "argument RUN: expected a name"),
    ("perplexity nowhere --data d --split test --max-seq-length 0", "--max-seq-length: 0; expected more than 0"),
    ("sweep empty.yaml --dry-run", "empty.yaml: not a mapping; expected keys with values, like repeats: 2"),
    *((f"summary runs --out s --price-per-hour {price}", "--price-per-hour") for price in ("-1", "nan", "free")),
    *((f"demo . --port {port!r}", "expected a number from 1 to 65535") for port in ("web", "0", "65536", "٣٣", "")),
    # Plans.
    ("plan --model gpt-9", "gpt-9 ... t5-tiny ... llama-8b"),
    ("plan --model t5-small --epochs 2", "--epochs 2 without --samples"),
    ("plan --model t5-small --precision fp16", "--precision fp16; expected fp32 or bf16"),
    ("plan --model t5-small --technique zero9", "zero9 ... zero3_offload"),
    ("plan --model t5-small --technique none --pods 3", "--technique none: runs one process only; leave out --pods"),
    ("plan --model t5-small --gpu Abacus", "Abacus ... --flops"),
    ("plan --model t5-small --gpu 6000", "--gpu 6000: may be RTX PRO 6000 Blackwell or RTX 6000 Ada; give one"),
    ("plan --model t5-small --gpu 4090ti", "4090ti: unknown GPU ... a name near to it: RTX 4090, RTX 5090"),
    ("plan --model t5-small --gpu 'RTX 4090 D' --gpu-memory 24", "'RTX 4090 D': its fp32 peak ... one of RTX 4090"),
    ("plan --model t5-small --steps 1 --samples 2", "give one of them"),
    ("plan --model t5-small --within 24", "--within 24: needs --samples or --steps too"),
    ("plan --model t5-small --global-batch 100", "--global-batch 100: 3 processes of 1 row a pass ... 99 or 102"),
    ("plan --model t5-small --global-batch 96 --batch-size 9", "3 processes of 9 rows a pass ... 81 or 108, or fewer"),
    ("plan --model t5-small --global-batch 96 --gradient-accumulation 2", "passes follow from the rows; leave one"),
    ("plan --model t5-small --save-seconds . --mtbf 1", "record.json"),
    ("plan --model t5-small --save-seconds nowhere --mtbf 1", "'nowhere'; expected seconds above 0, or the folder of"),
    ("plan --model t5-small --save-seconds 5", "needs --mtbf HOURS too"),
    ("plan --model bloom-560m --source-length 9", "bloom-560m is a causal model; give --seq-length and --label-length"),
    ("plan --model t5-small --seq-length 96", "t5-small is an encoder-decoder; give --source-length"),
    ("plan --model t5-small --gradient-checkpointing both", "t5-small is an encoder-decoder; give True or False"),
    ("plan --model llama-8b --attention flash", "flash; expected eager, sdpa, flash_attention_2 or all"),
    ("plan --model llama-8b --attention flash_attention_2", "does not support fp32; give --precision bf16"),
    ("plan --model llama-8b --attention flash_attention_2 --precision fp16 --gpu T4", "an Ampere ... sdpa"),
    ("plan --model distilgpt2 --seq-length 1025", "--seq-length 1025; distilgpt2 has 1024 positions"),
    ("plan --model distilgpt2 --label-length 600", "--label-length 600; expected at most --seq-length 512"),
    ("plan --model distilgpt2 --gpu T4 --precision bf16", "T4 has no BF16 ... fp16"),
    ("plan --model t5-small --gpu T4 --precision bf16", "T4 has no BF16 ... fp32"),
    ("plan --model t5-small --gpu Abacus --gpu-memory 9 --precision bf16", "peak is unknown ... RTX 4090, RTX 3090"),
    ("plan --model ./runs/none", "--model ./runs/none: expected a hub id such as organisation/name, a config.json"),
    ("plan --model llama-8b --precision int8", "--precision int8; expected fp32 or bf16 or fp16"),
    ("plan --model t5-small --pods many", "argument --pods: 'many'; expected a number"),
    ("plan --model t5-small --pods 1.5", "argument --pods: 1.5; expected a whole number"),
    ("plan --model t5-small --pods 0", "argument --pods: 0; expected more than 0"),
    ("plan --model t5-small --latency -1", "argument --latency: -1; expected 0 to 1e+15"),
    ("plan --model t5-small --gpu-memory nan", "argument --gpu-memory: nan; expected 1e-15 to 1e+15"),
    ("plan --model t5-small --gradient-checkpointing yes", "'yes'; expected True or False"),
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a script, a hostfile and an empty matrix."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ZEROPODS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AN_API_KEY", "hush")
    for name in ("script.py", "empty.yaml"):
        (tmp_path / name).touch()
    (tmp_path / "hosts").write_text("127.0.0.1 slots=1\n")
    return tmp_path


@pytest.mark.parametrize(("words", "said"), REFUSED)
def test_a_call_is_refused_in_one_line_and_leaves_nothing(
    words: str, said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(here.iterdir())
    try:
        status = main(shlex.split(words))
    except SystemExit as ended:
        status = int(ended.code or 0)
    out, err = capsys.readouterr()
    (line,) = (line for line in err.splitlines() if line.startswith("zeropods"))
    assert status in (1, 2) and out == ""
    assert all(part in line for part in said.split(" ... ")), line
    # No name of a function, a type or a temporary file.
    assert not re.search(r"NoneType|<class|invalid \w+ value|UserError|\(\) -> |/\.\w", line)
    assert sorted(path for path in here.rglob("*") if path.name != "home") == before
