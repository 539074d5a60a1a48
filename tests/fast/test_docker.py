"""The image's recipe, as far as it can be judged without building it."""

from __future__ import annotations

import re
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.dockerfile import Instruction, read_dockerfile
from zeropods.launch.command import SECRET

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
SCRIPTS = sorted((ROOT / "docker").glob("*.sh"))
CUDA_OF_TORCH = {"2.13.0": "13.0"}
"""From PyPI's metadata of torch: 2.13.0 requires cuda-toolkit==13.0.3."""


@pytest.fixture(scope="module")
def image() -> list[Instruction]:
    return read_dockerfile(DOCKERFILE)


def named(image: list[Instruction], name: str) -> list[Instruction]:
    return [instruction for instruction in image if instruction.name == name]


def defaults(image: list[Instruction]) -> dict[str, str]:
    """Build arguments that have a default."""
    texts = (instruction.text.partition("=") for instruction in named(image, "ARG"))
    return {name: value.strip('"') for name, equals, value in texts if equals}


def runs_with(image: list[Instruction], words: str) -> list[str]:
    found = [instruction.text for instruction in named(image, "RUN") if words in instruction.text]
    assert found, f"no RUN with {words!r}"
    return found


def pinned(name: str) -> str:
    match = re.search(rf"^{name}==(\S+)$", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    assert match, name
    return match[1]


def tracked() -> set[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30)
    return set(listed.stdout.splitlines())


def let_in(path: str) -> bool:
    """Whether .dockerignore lets a path into the build; its last line that matches decides."""
    allowed = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        if line and not line.startswith("#") and fnmatch(path, pattern):
            allowed = line.startswith("!")
    return allowed


def sources(image: list[Instruction]) -> list[str]:
    words = [instruction.text.split() for instruction in named(image, "COPY")]
    return [word for line in words for word in line[:-1] if not word.startswith("--")]


def test_every_file_that_the_build_copies_is_in_the_repository_and_let_in(image: list[Instruction]) -> None:
    copied = sources(image)
    assert copied and set(copied) <= tracked() and all(map(let_in, copied))


@pytest.mark.parametrize("path", ["runs/a/record.json", ".zeropods/c/key", ".git/config", "README.md", ".netrc"])
def test_nothing_else_gets_into_the_build(path: str) -> None:
    assert not let_in(path)


def test_the_last_user_is_the_one_of_cml_and_not_root(image: list[Instruction]) -> None:
    [made] = runs_with(image, "useradd")
    assert named(image, "USER")[-1].text == "8536" and "--uid 8536 --gid 8536" in made


def test_recommended_packages_are_left_out_and_lists_removed(image: list[Instruction]) -> None:
    for text in runs_with(image, "apt-get install"):
        assert text.count("apt-get install") == text.count("--no-install-recommends")
        assert "/var/lib/apt/lists/*" in text


def test_host_keys_go_in_the_layer_that_makes_them(image: list[Instruction]) -> None:
    [text] = runs_with(image, "openssh-server")
    assert text.index("rm -rf /etc/ssh/ssh_host_*") > text.rindex("apt-get install")


def test_no_download_is_piped_into_a_shell(image: list[Instruction]) -> None:
    texts = [instruction.text for instruction in image] + [path.read_text() for path in SCRIPTS]
    assert not [text for text in texts if re.search(r"(curl|wget)[^\n|]*\|\s*(sudo |ba)?sh", text)]


def test_requirements_are_installed_before_anything_that_changes_more_often(image: list[Instruction]) -> None:
    texts = [f"{instruction.name} {instruction.text}" for instruction in image]
    pip = next(number for number, text in enumerate(texts) if "pip install" in text and "requirements.txt" in text)
    session = next(number for number, text in enumerate(texts) if "use-cuda.sh" in text)
    assert texts[pip - 1] == "COPY requirements.txt /opt/zeropods/" and session > pip


def test_pip_keeps_its_downloads_out_of_the_image(image: list[Instruction]) -> None:
    assert all("--mount=type=cache,target=/root/.cache/pip" in text for text in runs_with(image, "pip install"))


def test_the_cuda_that_is_installed_is_torch_s(image: list[Instruction]) -> None:
    assert defaults(image)["CUDA_VERSION"] == CUDA_OF_TORCH[pinned("torch")]


def test_slurm_s_image_is_of_the_same_cuda(image: list[Instruction]) -> None:
    said = re.search(r'"\$\{CUDA_VERSION:=([\d.]+)\}"', (ROOT / "slurm" / "setup-pyxis.sh").read_text())
    assert said and said[1] == defaults(image)["CUDA_VERSION"]


def test_an_argument_is_known_in_every_stage_that_uses_it(image: list[Instruction]) -> None:
    known: dict[int, set[str]] = {}
    for line in image:
        names = known.setdefault(line.stage, {"PATH"})
        if line.name in ("ARG", "ENV", "LABEL"):
            names |= set(re.findall(r"(?:^|\s)(\w+)(?==|$)", line.text))
        used = set(re.findall(r"\$\{?(\w+)", line.text)) if line.name != "RUN" else set()
        assert used <= names | (known[0] if line.name == "FROM" else set()), line


def test_no_variable_of_the_build_sounds_like_a_secret_and_no_key_is_in_it(image: list[Instruction]) -> None:
    lines = [*named(image, "ENV"), *named(image, "ARG"), *named(image, "LABEL")]
    names = {name for line in lines for name in re.findall(r"([\w.-]+)=", line.text)}
    assert names and not [name for name in names if SECRET.search(name)]
    assert not [path for path in (ROOT / "docker").iterdir() if "-----BEGIN" in path.read_text()]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_of_the_image_is_sound(script: Path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("no shellcheck")
    checked = subprocess.run(["shellcheck", script], capture_output=True, text=True, check=False, timeout=30)
    assert checked.returncode == 0, checked.stdout
