"""Every command that the project tells people to type, in its pages and in the Makefile, and what a test does with it.

A command is run as it is printed, but for the substitutions below. What cannot be run is in `ONLY_PARSED` or in
`FRAGMENTS`, with the reason. So a command that is new in a page is run.
"""

import re
import shlex
import subprocess
from dataclasses import dataclass

from tests.pages import FENCE, INDENTED, ROOT, SPAN, pages

MAKEFILE = "Makefile"
PROGRAMS = (
    "zeropods", "zeropods-cuda", "python", "python3", "make", "deepspeed", "sbatch", "srun", "docker", "ssh", "git",
    "hf", "bash", "source", "xdg-open", "papermill", "rsync", "pip", "export", "apt-get",
)  # fmt: skip
"""Programs with which a command may begin, besides files of the project and programs in `bin/` of an environment."""
VARIABLE = re.compile(r"""[A-Za-z_]\w*=(?:"[^"]*"|'[^']*'|[^\s"']*)(?:\s+|$)""")
"""Matches a variable that is set, alone on a line or before a program."""
NO_SHELL = re.compile(r"^```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)
"""Matches a block whose language is named: none of ours holds commands."""
TARGETS = re.compile(r"^([a-z-]+):", re.MULTILINE)
OF_TARGETS = {"bench-gpu": ("OUT=build/gpu", "DATA=data"), "gpu-pack": ("OUT=build/pack",)}
"""Variables without which a target of the Makefile does nothing."""


@dataclass(frozen=True)
class Command:
    """A command as it is printed."""

    page: str
    """Path of the page from the project's folder."""
    text: str
    """One line; lines that end with a backslash are joined with the next."""
    is_span: bool = False
    """Whether it stands within a sentence, or in a table."""


SUBSTITUTIONS = (
    # Data from a publisher: samples of the same layout.
    (r"zeropods data get wikisql\b", "zeropods data sample"),
    (r"zeropods data get squad\b", "zeropods data sample --task squad"),
    (r"zeropods data get wikitext-2\b", "zeropods data sample --task lm"),
    (r"--tokenizer data/t5/spiece.model", "--tokenizer t5-tiny"),
    # Models from a hub: tiny ones with random weights, and their tokenizers.
    (r"--tokenizer google-t5/t5-small", "--tokenizer t5-tiny"),
    (r"--model_id google-t5/t5-small", "--model_id t5-tiny --init random"),
    (r"--model_name_or_path distilbert/distilgpt2", "--model_name_or_path gpt-tiny --init random --subset 64"),
    (r"zeropods perplexity distilbert/distilgpt2", "zeropods perplexity runs/distilgpt2 --limit 4"),
    (r"--data data/squad --subset 500", "--data data/squad --subset 24 --model_name_or_path gpt-tiny --init random"),
    # Sizes.
    (r"zeropods prepare ", "zeropods prepare --limit 48 "),
    (r"textsql_train\.py ", "textsql_train.py --max_steps 2 --per_device_train_batch_size 4 --threads 1 "),
    (r"causal_train\.py ", "causal_train.py --max_train_steps 2 --max_eval_steps 2 --threads 1 "),
    (r"zeropods predict ", "zeropods predict --limit 4 "),
    (r" --limit 100\b", ""),
    (r"matrices/wikisql(_second)?\.yaml", r"\g<0> --scale tiny"),
    (r"--nodes=4 --gpus-per-node=8", "--nodes=3 --gpus-per-node=2"),
    # Machines that are not here: what would be run there is printed.
    (r"(^|&& )cloud/", r"\1DRY_RUN=1 cloud/"),
    (r"zeropods launch --launcher slurm", "zeropods launch --launcher slurm --dry-run"),
    (r"sbatch --nodelist=gpu7", "sbatch --nodelist=pod1 --gpus-per-node=1"),
    (r"^sbatch ", "sbatch --test-only "),
    # Pyxis and a terminal are not here either.
    (r"^(srun .*?) --container-image=.* --pty bash", r"\1 true"),
    (r"papermill ", "papermill --prepare-only notebooks/"),
    # One way among several to start the same pods.
    (r"^(.*zeropods pods up .*(?:--seconds 900|--backend local|--nvidia-gpu 0))$", r"\1 && zeropods pods down"),
    (r"^(CUDA_VISIBLE_DEVICES=2,3 zeropods pods up .*)$", r"\1 && zeropods pods down"),
    # Hosts of one's own, which tests/full/pods/test_own_hosts.py has: local pods.
    (r"zeropods pods check --hostfile HOSTS", "zeropods pods check --self"),
    (r"zeropods pods up --hostfile HOSTS", "zeropods pods up --count 3 --backend local"),
    # What `zeropods pods up` prints to be pasted before DeepSpeed's own command.
    (
        r"^deepspeed --hostfile FILE (.*) --master_addr ADDR (.*)",
        'eval "$(zeropods pods up --count 3 | grep ^export)" && deepspeed --hostfile $ZEROPODS_HOME/pods/hostfile '
        r"\1 --master_addr $(head -n 1 $ZEROPODS_HOME/pods/hostfile | cut -d ' ' -f 1) \2 && zeropods pods down",
    ),
    # What a reader puts in.
    (r"(--task|sample --task) text2sql\|squad\|lm", r"\1 text2sql"),
    (r"squad\|lm", "squad"),
    (r"--data DATA --tokenizer TOKENIZER", "--data data/wikisql --tokenizer t5-tiny"),
    (r"sweep MATRIX\.yaml --out DIR", "sweep one.yaml --out runs/one"),
    (r"summary DIR", "summary runs/one"),
    (r"summary RUN", "summary runs/bloom"),
    (r"summary --against OLD\.json", "summary runs --out old && zeropods summary runs --against old/summary.json"),
    (r"runs/demo-profiled/RUN", "runs/profiled"),
    (r"zeropods profile FILE (.*)FILE2", r"zeropods profile runs/profiled \1runs/profiled"),
    (r"zeropods profile (?:FILE|RUN)", "zeropods profile runs/profiled"),
    (r"zeropods score FILE", "zeropods score predictions.official.jsonl"),
    (r"zeropods export RUN --out DIR", "zeropods export runs/demo/sample-t5-tiny-schema-one-pod --out exported"),
    (r"--out DIR", "--out made"),
    (r"(textsql_train\.py .*?) \.\.\.", r"\1 --model_id t5-tiny --init random --dataset_path prepared"),
    (r"(causal_train\.py .*?) \.\.\.", r"\1 --model_name_or_path gpt-tiny --init random --subset 24"),
)  # fmt: skip
"""What is put in the place of what, one after the other, in every command: a pattern and its replacement."""


ONLY_PARSED = {
    # A network, a hub, a cloud, a registry, another machine.
    r"git clone .*": "needs a network",
    r"(hf|pip|/tmp/other/bin/pip) .*": "needs a network",
    r"(MAX_JOBS=8 )?\S+ -m pip .*": "needs a network, and would change this environment",
    r"python3 -m venv /tmp/other .*": "needs a network; test_gpu_pack.py makes such an environment (soak)",
    r"ssh .*": "needs another machine",
    r"rsync .*": "needs another machine",
    r"docker .*": "needs a registry with the base image",
    r"!zeropods-cuda": "is in the image; tests/full/project/test_image_scripts.py runs it",
    r"slurm/setup-pyxis\.sh .*": "needs Enroot and the image",
    r"(PYTHON=\S+ )?bash build/pack/run\.sh .*": "needs a pack; tests/full/benchmarks/test_gpu_pack.py runs it (soak)",
    r"deepspeed causal_train\.py": "needs GPUs, which DeepSpeed's launcher counts",
    # A browser.
    r"xdg-open .*": "opens a browser",
    r".* -m jupyterlab .*": "is a server; tests/browser/test_notebooks.py starts it",
    r".* -m zeropods demo runs/demo": "is a server; a page's command starts it here",
    # A server of MLflow.
    r"python textsql_train\.py --report_to mlflow \.\.\.": "tests/full/project/test_mlflow.py reports to one (soak)",
    r"zeropods summary runs --report-to mlflow": "tests/full/project/test_mlflow.py reports to one (soak)",
    # Hosts of one's own.
    r"zeropods launch --hostfile HOSTS -- \.\.\.": "needs hosts; tests/full/pods/test_own_hosts.py launches on some",
    # Many minutes.
    r".*tools/demo\.py.*": "takes minutes; tests/full/project/test_notebooks.py executes the notebooks",
    r".*tools/gallery\.py": "executes notebooks that have changed; tests/full/project/test_gallery.py",
    r"(ZEROPODS_\w+=\S+ )?\S+ -m pytest .*": "runs all tests, this one too",
    r"\S+ -m (ruff|mypy|nbstripout|pre_commit) .*": "checks the whole project; tests/fast/project/test_make.py",
    r"\S+ -m mypy": "checks the whole project",
    r"\S+ tools/image_check\.py( .*)?": "downloads, and needs root; tests/fast/project/test_image_check.py",
    r"\S+ tools/house\.py": "tests/fast/project/test_house.py runs what it does",
    r"if command -v shellcheck .*": "checks the whole project",
    r"tools/setup": "installs; tests/fast/project/test_make.py goes as far as that",
    r"python3 cml/install_dependencies\.py": "installs; tests/full/project/test_cml_tasks.py",
    r"cml/run_notebook\.py NOTEBOOK": "takes minutes; tests/full/project/test_cml_tasks.py",
    r"\S+ -m benchmarks( GROUP)?": "takes an hour",
    r"\S+ -m benchmarks\.published ?": "writes a page; tests/full/plan/test_plan_published.py runs what it does",
    r"\S+ -m benchmarks\.reliability .*": "takes hours",
    r"\S+ -m benchmarks\.gpu .*": "takes minutes, or a GPU; tests/full/benchmarks/test_bench_gpu.py",
    r"\S+ -m benchmarks\.gpu\.pack .*": "downloads; tests/full/benchmarks/test_gpu_pack.py",
    r"rm -rf .*": "removes caches; tests/fast/project/test_make.py",
    r"find \. .*": "removes caches; tests/fast/project/test_make.py",
}
"""Commands that are not run, as patterns, and why; their own parsers read them."""

FRAGMENTS = {
    "zeropods predict --link-cells",
    "zeropods predict --max-new-tokens --num-beams",
    "zeropods prepare --prompt question",
    "zeropods prepare --tokenizer FOLDER_OR_ID",
    "zeropods data get wikisql",
    "zeropods data get wikitext-2",
    "zeropods data get wikisql|squad|wikitext-2",
    "zeropods data sample --task ... [--seed N]",
    "zeropods launch --dry-run",
    "zeropods launch --export GLOO_SOCKET_IFNAME",
    "zeropods launch --export PYTORCH_CUDA_ALLOC_CONF",
    "zeropods launch --global-batch N",
    "zeropods launch --launcher slurm",
    "zeropods launch --launcher slurm --num-pods 1 --slots 8",
    "zeropods launch --restarts 1 --replace",
    "zeropods plan --device cpu",
    "zeropods plan --gpu-memory",
    "zeropods plan --host-memory",
    "zeropods plan --model",
    "zeropods plan --quantized weights,gradients",
    "zeropods pods up --nvidia-gpu 0",
    "zeropods pods up --replace",
    "zeropods score --metric MODULE:FUNCTION",
    "zeropods score --rouge",
    "deepspeed --launcher openmpi",
    "deepspeed --launcher pdsh ...",
    "deepspeed --hostfile ... --launcher pdsh "
    "--num_nodes 3 --num_gpus 1 --master_addr ... --ssh_port 2222 textsql_train.py ...",
    "deepspeed train.py",
    "sbatch --nodelist=NODE",
    "srun --pty",
}
"""Parts of sentences that name a verb with a flag, and are no whole command; `test_docs.py` looks at their flags."""

SERVERS = (r"zeropods demo runs", r"python cml/run_demo\.py", r"zeropods demo .*")
"""Commands that serve a page until Ctrl-C, as patterns. The last ones are parsed, unless ZEROPODS_SOAK=1 is set."""

ELSEWHERE = {
    r"zeropods data sample --out data/sample": "tests/full/project/test_readme.py",
    r"zeropods prepare --data data/sample .* --out data/prepared": "tests/full/project/test_readme.py",
    r"python textsql_train\.py .* --outputdir runs/first .*": "tests/full/project/test_readme.py",
    r"zeropods predict --model runs/first --score": "tests/full/project/test_readme.py",
    r"python textsql_train\.py .* --dataset_path data/own-prepared .*": "tests/full/demo/test_demo_page.py",
    r"zeropods predict --model runs/own --score": "tests/full/demo/test_demo_page.py",
    r"zeropods plan --model t5-large --tune wikisql_tok_dataset": "tests/full/plan/test_plan_tune.py, with others",
    r"python3 -m zeropods launch --launcher none -- textsql_train\.py \.\.\.": "tests/full/launch/test_local_runs.py",
}
"""Commands that another test runs already, as patterns; here they are parsed, unless ZEROPODS_SOAK=1 is set."""

LONG = {
    r"zeropods sweep matrices/demo\.yaml --out runs/demo-matrix": "--dry-run",
    r"zeropods sweep matrices/published\.yaml --scale tiny": "--dry-run",
    r"zeropods sweep matrices/published\.yaml": "--scale tiny --dry-run",
}
"""Commands that take minutes, and the flags with which they are run instead, unless ZEROPODS_SOAK=1 is set."""


def commands() -> list[Command]:
    """Every command of the pages and of the Makefile, in their order; equal ones of a page only once."""
    typed = [command for page, text in pages().items() if page != "CHANGELOG.md" for command in of_page(page, text)]
    return list(dict.fromkeys([*typed, *of_makefile()]))


def of_page(page: str, text: str) -> list[Command]:
    """The commands of a page, in its order.

    A block is commands where its first line is one, and its language is not named.
    """
    text = NO_SHELL.sub(blank, text)
    parts = [(block.start(), block[1], False) for block in FENCE.finditer(text)]
    text = FENCE.sub(blank, text)
    parts += [(block.start(), block[0], False) for block in INDENTED.finditer(text)]
    text = INDENTED.sub(blank, text)
    parts += [(span.start(), span[1], True) for span in SPAN.finditer(text)]
    typed = []
    for _, code, is_span in sorted(parts):
        lines = block_lines(code)
        if is_span:
            typed += [Command(page, code, is_span=True)] if is_whole(code) else []
        elif lines and is_command(lines[0]):
            typed += [Command(page, line) for line in lines]
    return typed


def of_makefile() -> list[Command]:
    """The commands of each target, as make would run them."""
    typed = []
    for target in TARGETS.findall((ROOT / MAKEFILE).read_text(encoding="utf-8")):
        make = ["make", "--no-print-directory", "--dry-run", target, *OF_TARGETS.get(target, ())]
        said = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True, timeout=240).stdout
        lines = block_lines(said)
        typed += [Command(MAKEFILE, line) for line in lines if not line.startswith(("sed ", "test "))]
    return typed


def blank(code: re.Match[str]) -> str:
    """Blanks as long as the code, so that what follows keeps its place."""
    return re.sub(r"[^\n]", " ", code[0])


def block_lines(block: str) -> list[str]:
    """Lines without indentation and comments; those that a backslash continues are joined."""
    joined = re.sub(r"\\\n\s*", "", block)
    lines = [re.sub(r"(^|\s+)# .*", "", line).strip() for line in joined.splitlines()]
    return [line for line in lines if line]


def is_command(text: str) -> bool:
    """Whether a line begins with a program, or only sets variables."""
    program = program_of(text)
    if not program:
        return bool(VARIABLE.match(text))
    is_of_environment = "/bin/" in program
    return program in PROGRAMS or is_of_environment or ("/" in program and (ROOT / program).is_file())


def is_whole(span: str) -> bool:
    """Whether a span of a sentence is a command with arguments, not the name of a program, a verb or a target."""
    if not is_command(span) or not program_of(span):
        return False
    words = words_of(span)
    names = [word for word in words if re.fullmatch("[a-zA-Z]+", word)]
    verb_words = 3 if words[1:2] == ["pods"] else 2
    is_verb = words[0] == "zeropods" and words == names and len(words) <= verb_words
    return len(words) > 1 and not is_verb


def program_of(text: str) -> str:
    """The first word that sets no variable; `!` is how a notebook runs a command."""
    rest = text
    while match := VARIABLE.match(rest):
        rest = rest[match.end() :]
    return next(iter(rest.removeprefix("!").split()), "")


def words_of(text: str) -> list[str]:
    """The words of a command as a shell reads them, without variables that are set before it."""
    words = shlex.split(text, comments=True)
    while words and VARIABLE.fullmatch(words[0]):
        del words[0]
    return words


def is_only_parsed(command: Command) -> bool:
    """Whether a command cannot be run here."""
    is_target = program_of(command.text) == "make"
    return is_target or any(re.fullmatch(pattern, command.text) for pattern in ONLY_PARSED)


def is_fragment(command: Command) -> bool:
    """Whether it is no whole command."""
    return command.is_span and command.text in FRAGMENTS


def substituted(text: str) -> str:
    """The command as a test runs it."""
    for pattern, replacement in SUBSTITUTIONS:
        text = re.sub(pattern, replacement, text)
    return text
