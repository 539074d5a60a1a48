"""The image's recipe, as far as it can be judged without building it."""

import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.dockerfile import Instruction, read_dockerfile
from zeropods.launch.command import SECRET

ROOT = Path(__file__).resolve().parents[2]
CUDA_OF_TORCH = {"2.13.0": "13.0"}
"""From PyPI's metadata of torch: 2.13.0 requires cuda-toolkit==13.0.3."""


@pytest.fixture(scope="module")
def image() -> list[Instruction]:
    return read_dockerfile(ROOT / "docker" / "Dockerfile")


def named(image: list[Instruction], *names: str, words: str = "") -> list[str]:
    """The texts of the instructions of some names that hold some words."""
    found = [instruction.text for instruction in image if instruction.name in names and words in instruction.text]
    assert found, f"no {names} with {words!r}"
    return found


def let_in(path: str) -> bool:
    """Whether .dockerignore lets a path into the build; its last line that matches decides."""
    allowed = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        if line and not line.startswith("#") and fnmatch(path, pattern):
            allowed = line.startswith("!")
    return allowed


def test_what_the_build_copies_is_in_the_repository_and_nothing_else_gets_in(image: list[Instruction]) -> None:
    words = [text.split()[:-1] for text in named(image, "COPY")]
    copied = {word for line in words for word in line if not word.startswith("--")}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30)
    assert copied <= set(listed.stdout.splitlines()) and all(map(let_in, copied))
    assert not any(map(let_in, ["runs/a/record.json", ".zeropods/c/key", ".git/config", "README.md", ".netrc"]))


def test_the_last_user_is_the_one_of_cml_and_not_root(image: list[Instruction]) -> None:
    [made] = named(image, "RUN", words="useradd")
    assert named(image, "USER")[-1] == "8536" and "--uid 8536 --gid 8536" in made


def test_packages_leave_neither_lists_nor_host_keys_nor_downloads(image: list[Instruction]) -> None:
    for text in named(image, "RUN", words="apt-get install"):
        assert text.count("apt-get install") == text.count("--no-install-recommends")
        assert "/var/lib/apt/lists/*" in text
    [text] = named(image, "RUN", words="openssh-server")
    assert text.index("rm -rf /etc/ssh/ssh_host_*") > text.rindex("apt-get install")
    installed = named(image, "RUN", words="pip install")
    assert all("--mount=type=cache,target=/root/.cache/pip" in text for text in installed)


def test_no_download_is_piped_into_a_shell(image: list[Instruction]) -> None:
    texts = [*named(image, "RUN"), *(path.read_text() for path in (ROOT / "docker").glob("*.sh"))]
    assert not [text for text in texts if re.search(r"(curl|wget)[^\n|]*\|\s*(sudo |ba)?sh", text)]


def test_the_cuda_of_the_image_and_of_slurm_s_is_torch_s(image: list[Instruction]) -> None:
    found = [re.findall(r'CUDA_VERSION:?="?([\d.]+)', text) for text in named(image, "ARG", words="CUDA_VERSION=")]
    found.append(re.findall(r'"\$\{CUDA_VERSION:=([\d.]+)\}"', (ROOT / "slurm" / "setup-pyxis.sh").read_text()))
    [torch] = re.findall(r"^torch==(\S+)$", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    assert found == [[CUDA_OF_TORCH[torch]]] * 2


def test_an_argument_is_known_in_every_stage_that_uses_it(image: list[Instruction]) -> None:
    known: dict[int, set[str]] = {}
    for line in image:
        names = known.setdefault(line.stage, {"PATH"})
        if line.name in ("ARG", "ENV", "LABEL"):
            names |= set(re.findall(r"(?:^|\s)(\w+)(?==|$)", line.text))
        used = set(re.findall(r"\$\{?(\w+)", line.text)) if line.name != "RUN" else set()
        assert used <= names | (known[0] if line.name == "FROM" else set()), line


def test_no_variable_of_the_build_sounds_like_a_secret_and_no_key_is_in_it(image: list[Instruction]) -> None:
    names = {name for text in named(image, "ENV", "ARG", "LABEL") for name in re.findall(r"([\w.-]+)=", text)}
    assert names and not [name for name in names if SECRET.search(name)]
    assert not [path for path in (ROOT / "docker").iterdir() if "-----BEGIN" in path.read_text()]
