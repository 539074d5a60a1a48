"""Build docker/Dockerfile on a stand-in for Cloudera's base, and train on two pods in the image.

    tools/image_check.py
    tools/image_check.py --work /var/tmp/image-check

Needs root, buildah and mmdebstrap, but no registry of images and no GPU. The base is a Debian 12
without Python, made of Debian's packages. In place of NVIDIA's repository it has packages of the
same names that are empty but for an `nvcc` that compiles nothing. Everything else of the Dockerfile
runs as it stands. The image is then used as user 8536, with a copy of this project as the home: two
pods come up, and a tiny T5 is trained on them over pdsh. docs/image_check.md says more.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import psutil

from zeropods.errors import UserError, guarded
from zeropods.files import write_text
from zeropods.measure.record import RECORD, Record, read_record
from zeropods.pods.processes import ending_in_order, send
from zeropods.programs import bound_argv
from zeropods.tables import counted

ROOT = Path(__file__).resolve().parents[1]
DOCKER = ROOT / "docker"
PROGRAMS = ("buildah", "mmdebstrap", "dpkg-deb")
SUITE = "bookworm"
MIRRORS = (
    f"deb http://deb.debian.org/debian {SUITE} main",
    f"deb http://deb.debian.org/debian-security {SUITE}-security main",
)
NEEDED_BYTES = 16 * 10**9
"""Room for the base, the image and the container made of it: each is a whole copy of its files,
since overlays do not work in every place in which this may run."""
USER = 8536
"""Number of the image's user, which is CML's."""
HOME = "/home/cdsw"
BASE, IMAGE = "localhost/zeropods-base", "localhost/zeropods-image-check"
PODS = 2
RUN = "runs/image-check"
BUILD_LOG, TRAIN_LOG = "build.log", "train.log"
KEPT = (BUILD_LOG, TRAIN_LOG, RECORD)
"""Files of a check that stay."""
STORAGE, RUNNING, TEMPORARY, PACKAGES, PROJECT = "storage", "running", "tmp", "cuda", "project"
FOLDERS = (STORAGE, RUNNING, TEMPORARY, PACKAGES, PROJECT)
"""Folders that do not."""
LEFT_SECONDS = 20.0
"""Seconds within which the processes of ended pods must be gone."""
STEP_SECONDS = 3_600.0
"""Seconds after which a part of the check is given up."""
KEPT_OF_PIP = ("index-url", "extra-index-url", "find-links", "cert", "constraint", "trusted-host")
"""Settings of pip that say where packages come from."""
FILES_OF_PIP = ("cert", "constraint")
"""Those of them that name a file, which is copied into the base."""
SOURCES_OF_PIP = ("index-url", "extra-index-url", "find-links")
"""Those of them that name an address or a folder each, or several."""
CUDA_FOLDER = "opt/stand-in-cuda"
NVCC = "#!/bin/sh\necho 'nvcc: this one stands for CUDA and compiles nothing' >&2\nexit 1\n"
JOB = (
    "data sample --out data/sample",
    "prepare --data data/sample --tokenizer t5-tiny --limit 256 --out data/prepared",
    f"pods up --count {PODS} --backend local",
    f"launch --num-pods {PODS} --launcher pdsh -- textsql_train.py --deepspeed dsconfig/zero1.json "
    "--model_id t5-tiny --init random --max_steps 8 --per_device_train_batch_size 4 "
    f"--dataset_path data/prepared --outputdir {RUN}",
)
"""What is done in the image, as arguments of `zeropods`."""


def main() -> None:
    """Make the base, build the image, train in it, and say what came of it."""
    work = _arguments().work.absolute()
    _require_what_is_needed(work)
    with ending_in_order(), _workplace(work):
        buildah = Buildah(work)
        sources = pip_sources(pip_settings(_configuration_of_pip()))
        with _timed("the base"):
            _make_base(buildah, sources)
        with _timed("the image"):
            _build(buildah, sources)
        with _timed(f"a training on {counted(PODS, 'pod')}"):
            project = _copied_project(work)
            _train(buildah, project)
            left = _left_over(work)
        folder = project / RUN
        record = read_record(folder)
        owner = (folder / RECORD).stat().st_uid
        shutil.copy(folder / RECORD, work)
        wrong = what_is_wrong(record, owner, left)
        if wrong:
            raise UserError(f"{work}: {'; '.join(wrong)}; see {TRAIN_LOG} there")
        print(conclusion(record), flush=True)


def _arguments() -> argparse.Namespace:
    description, *_ = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument(
        "--work",
        type=Path,
        default=ROOT / "build" / "image-check",
        metavar="DIR",
        help="new folder for all that is made; its logs and the run's record stay; "
        "build/image-check",
    )
    return parser.parse_args()


def _require_what_is_needed(work: Path) -> None:
    """Raise an error of one line if a build cannot go well here."""
    if os.geteuid() != 0:
        raise UserError("image-check: buildah and mmdebstrap need root here; call it as root")
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        raise UserError(
            f"image-check: no {', '.join(missing)}; apt-get install buildah mmdebstrap dpkg"
        )
    work.mkdir(parents=True, exist_ok=True)
    others = sorted({path.name for path in work.iterdir()} - {*FOLDERS, *KEPT})
    if others:
        raise UserError(
            f"{work}: holds {others[0]}, which no check has made; name a new folder by --work"
        )
    free = shutil.disk_usage(work).free
    if free < NEEDED_BYTES:
        raise UserError(
            f"{work}: {free / 1e9:.0f} GB free, and {NEEDED_BYTES / 1e9:.0f} GB are needed; "
            "name a folder on another disk by --work"
        )


# The folder in which all this is done, and the programs that do it.


@contextmanager
def _workplace(work: Path) -> Iterator[None]:
    """The folder without what an earlier call has left; at the end only the logs and the record
    stay, and no process of a container."""
    _remove_folders(work)
    for name in KEPT:
        (work / name).unlink(missing_ok=True)
    try:
        yield
    finally:
        for process in processes_inside(work):
            send(process, signal.SIGKILL)
        with _timed("removing all of it but the logs"):
            _remove_folders(work)


def _remove_folders(work: Path) -> None:
    """Remove the folders, unless something is mounted in them, which would be removed too."""
    mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8")
    mounted = [line.split()[4] for line in mounts.splitlines()]
    for name in FOLDERS:
        folder = work / name
        inside = [place for place in mounted if Path(place).is_relative_to(folder)]
        if inside:
            raise UserError(f"{inside[0]}: is mounted; umount it, and call this again")
        if folder.is_dir():
            shutil.rmtree(folder)


@contextmanager
def _timed(what: str) -> Iterator[None]:
    """Say that something is being made, and how long that took."""
    began = time.monotonic()
    print(f"image-check: {what} ...", flush=True)
    yield
    print(f"image-check: {what}: {time.monotonic() - began:.0f} s", flush=True)


def _run(argv: Sequence[object], log: Path, variables: Mapping[str, str] | None = None) -> None:
    """Run a command with its output in a log.

    Raises:
        UserError: it failed; the log has the reason.
    """
    words = [str(word) for word in argv]
    environment = {**os.environ, **(variables or {})}
    with open(log, "ab") as output:
        done = subprocess.run(
            bound_argv(words),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            timeout=STEP_SECONDS,
            check=False,
        )
    if done.returncode != 0:
        reason = reason_in(log.read_text(encoding="utf-8", errors="replace"))
        raise UserError(f"{log}: {words[0]} ended with status {done.returncode}: {reason:.300}")


def reason_in(log: str) -> str:
    """Why a command has failed: the last error of `zeropods` in its log, which others follow that
    only say that it failed; else the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("zeropods: ")]
    return (errors or lines or ["no output"])[-1]


@dataclass(frozen=True)
class Buildah:
    """buildah with a storage of its own, so that nothing of this machine's is touched."""

    work: Path

    @property
    def log(self) -> Path:
        return self.work / BUILD_LOG

    def run(self, command: str, *arguments: object, log: Path | None = None) -> None:
        """Run one of its commands, with the output in the build's log, or in another one."""
        temporary = self.work / TEMPORARY
        temporary.mkdir(exist_ok=True)
        # Caches of `RUN --mount` lie there too.
        _run([*self._argv(), command, *arguments], log or self.log, {"TMPDIR": str(temporary)})

    def mounted(self, container: str) -> Path:
        """The folder that has the files of a container."""
        argv = [*self._argv(), "mount", container]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
        return Path(done.stdout.strip())

    def _argv(self) -> list[str]:
        storage = ["--root", str(self.work / STORAGE), "--runroot", str(self.work / RUNNING)]
        return ["buildah", "--storage-driver", "vfs", *storage]


# Where the image's packages come from: what pip of this machine is told.


@dataclass(frozen=True)
class PipSources:
    """What the pip of the base must be given, so that it finds the packages that this one finds."""

    config: str
    """The text of its `/etc/pip.conf`."""
    files: dict[str, Path]
    """Files of this machine, by their place in the base."""
    folders: list[Path]
    """Folders that the containers see at the same place."""


def _configuration_of_pip() -> str:
    argv = [sys.executable, "-m", "pip", "config", "list"]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout


def pip_settings(listed: str) -> dict[str, str]:
    """The settings that say where packages come from, out of what `pip config list` prints. Those
    of the environment win, as in pip itself."""
    of_files: dict[str, str] = {}
    of_environment: dict[str, str] = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if key not in KEPT_OF_PIP:
            continue
        settings = of_files
        if section == ":env:":
            settings = of_environment
        settings[key] = str(ast.literal_eval(value))
    return {**of_files, **of_environment}


def pip_sources(settings: Mapping[str, str]) -> PipSources:
    """What such settings become in the base: files are copied into it, folders are seen there.

    An index that is a folder `simple` has its files beside that folder.
    """
    lines = ["[global]"]
    files: dict[str, Path] = {}
    folders: dict[Path, None] = {}
    for key, value in settings.items():
        if key in FILES_OF_PIP:
            place = f"etc/pip/{key}"
            files[place] = Path(value)
            lines.append(f"{key} = /{place}")
            continue
        words = value.split()
        # In one line, since pip reads a further line as another setting.
        lines.append(f"{key} = {' '.join(words)}")
        if key not in SOURCES_OF_PIP:
            continue
        for word in words:
            folder = _local_folder(word)
            if folder is not None:
                folders[folder] = None
    return PipSources("\n".join(lines) + "\n", files, list(folders))


def _local_folder(source: str) -> Path | None:
    """The folder of this machine that a source of packages needs; None for an address elsewhere."""
    parts = urlsplit(source)
    if parts.scheme not in ("", "file"):
        return None
    folder = Path(unquote(parts.path))
    if folder.name == "simple":
        return folder.parent
    return folder


# The base.


def _make_base(buildah: Buildah, sources: PipSources) -> None:
    """Make the image on which the Dockerfile is built."""
    buildah.run("from", "--name", "base", "scratch")
    root = buildah.mounted("base")
    _run(
        ["mmdebstrap", "--variant=minbase", "--mode=root", SUITE, root, *MIRRORS],
        buildah.log,
    )
    write_text(root / "etc" / "pip.conf", sources.config)
    for place, file in sources.files.items():
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, root / place)
    _add_cuda(root, buildah.work / PACKAGES, buildah.log)
    buildah.run("umount", "base")
    buildah.run("commit", "--rm", "--format", "docker", "base", BASE)


def cuda_packages(installer: str, version: str) -> list[str]:
    """Names of the packages that `docker/install-cuda.sh` installs for a version of CUDA.

    Args:
        installer: its text.
    """
    (parts,) = re.findall(r"^readonly PARTS=\((.*)\)$", installer, re.MULTILINE)
    return [f"{part}-{version.replace('.', '-')}" for part in parts.split()]


def _add_cuda(root: Path, work: Path, log: Path) -> None:
    """Add a repository in the place of NVIDIA's, with packages of the same names."""
    installer = (DOCKER / "install-cuda.sh").read_text(encoding="utf-8")
    dockerfile = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
    (version,) = re.findall(r"^ARG CUDA_VERSION=(\S+)$", dockerfile, re.MULTILINE)
    (address,) = re.findall(r"REPOSITORIES:=(\S+)}", installer)
    repository = root / CUDA_FOLDER
    repository.mkdir(parents=True)
    entries = []
    for name in cuda_packages(installer, version):
        package = work / name
        fields = control(name, version)
        write_text(package / "DEBIAN" / "control", fields)
        if name.startswith("cuda-nvcc"):
            compiler = package / "usr" / "local" / f"cuda-{version}" / "bin" / "nvcc"
            write_text(compiler, NVCC)
            compiler.chmod(0o755)
        archive = repository / f"{name}.deb"
        _run(["dpkg-deb", "--root-owner-group", "--build", package, archive], log)
        entries.append(entry(fields, archive.name, archive.read_bytes()))
    write_text(repository / "Packages", "\n".join(entries))
    # The installer leaves a repository alone that a file here names already.
    source = f"# In the place of {address}\ndeb [trusted=yes] file:/{CUDA_FOLDER} ./\n"
    write_text(root / "etc" / "apt" / "sources.list.d" / "cuda.list", source)


def control(name: str, version: str) -> str:
    """The fields of a Debian package that stands for one of NVIDIA's."""
    return (
        f"Package: {name}\n"
        f"Version: {version}.0-1\n"
        "Architecture: all\n"
        "Maintainer: zeropods' image check\n"
        "Description: stands for a package of NVIDIA's\n"
    )


def entry(fields: str, name: str, content: bytes) -> str:
    """What the list of a repository says of a package, with its file."""
    digest = hashlib.sha256(content).hexdigest()
    return f"{fields}Filename: ./{name}\nSize: {len(content)}\nSHA256: {digest}\n"


# The image, and a training in it.


def _build(buildah: Buildah, sources: PipSources) -> None:
    buildah.run("bud", *build_words(sources), ROOT)


def build_words(sources: PipSources) -> list[str]:
    """The arguments with which `buildah bud` builds the Dockerfile on the base."""
    return [
        *("--file", str(DOCKER / "Dockerfile")),
        *("--ignorefile", str(ROOT / ".dockerignore")),
        *("--build-arg", f"BASE_IMAGE={BASE}"),
        *("--isolation", "chroot"),
        *("--network", "host"),
        # In its own format buildah leaves out SHELL.
        *("--format", "docker"),
        "--pull-never",
        "--layers=false",
        *_volumes(sources.folders),
        *("--tag", IMAGE),
    ]


def _volumes(folders: Sequence[Path]) -> list[str]:
    """Flags that show folders to a container at the same place."""
    words = []
    for folder in folders:
        words += ["--volume", f"{folder}:{folder}:ro"]
    return words


def _copied_project(work: Path) -> Path:
    """A copy of the project's files that belongs to the image's user."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(listing, cwd=ROOT, capture_output=True, timeout=60, check=True).stdout
    project = work / PROJECT
    for name in os.fsdecode(listed).split("\0"):
        source = ROOT / name
        if name and source.is_file():
            target = project / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    for folder, _, names in os.walk(project):
        for path in (folder, *(os.path.join(folder, name) for name in names)):
            os.chown(path, USER, USER)
    return project


def _train(buildah: Buildah, project: Path) -> None:
    """Train in the image as its user; the pods are ended whatever comes of it."""
    buildah.run("from", "--pull-never", "--name", "session", IMAGE)
    buildah.run(
        "run",
        *("--isolation", "chroot"),
        *("--network", "host"),
        *("--user", str(USER)),
        *("--env", f"HOME={HOME}"),
        *("--volume", f"{project}:{HOME}"),
        *("--workingdir", HOME),
        "session",
        "--",
        *("bash", "-euxc", session()),
        log=buildah.work / TRAIN_LOG,
    )


def session() -> str:
    """What a shell does in the image, line by line."""
    zeropods = ["python3", "-m", "zeropods"]
    lines = [f"trap {shlex.quote(shlex.join([*zeropods, 'pods', 'down']))} EXIT"]
    lines += [shlex.join([*zeropods, *arguments.split()]) for arguments in JOB]
    return "\n".join(lines)


def processes_inside(work: Path) -> list[psutil.Process]:
    """The processes that have a container's files as their root, which lie below this folder."""
    inside = []
    for process in psutil.process_iter():
        # Others end meanwhile.
        with suppress(OSError):
            root = os.readlink(f"/proc/{process.pid}/root")
            if Path(root).is_relative_to(work):
                inside.append(process)
    return inside


def _left_over(work: Path) -> list[int]:
    """Ids of the processes that are still there some time after the pods have ended."""
    deadline = time.monotonic() + LEFT_SECONDS
    left = processes_inside(work)
    while left and time.monotonic() < deadline:
        time.sleep(0.5)
        left = processes_inside(work)
    return sorted(process.pid for process in left)


def what_is_wrong(record: Record, owner: int, left: Sequence[int]) -> list[str]:
    """What a training in the image lacks to be as it should; empty where nothing does.

    Args:
        owner: number of the user to whom the record belongs.
        left: ids of processes that did not end.
    """
    wrong = []
    if record.status != "ok":
        wrong.append(f"the run ended as {record.status}: {record.reason}")
    if record.pods != PODS:
        wrong.append(f"it ran on {counted(record.pods, 'pod')}; expected {PODS}")
    if owner != USER:
        wrong.append(f"its record belongs to user {owner}; expected {USER}")
    if left:
        wrong.append(f"processes {', '.join(map(str, left))} are left")
    return wrong


def conclusion(record: Record) -> str:
    """What a training that went well shows, in one line."""
    versions = record.versions
    packages = ", ".join(f"{name} {versions[name]}" for name in ("torch", "deepspeed"))
    return (
        f"image-check: ok: {record.technique} on {counted(PODS, 'pod')} over pdsh as user {USER}, "
        f"{counted(record.steps, 'step')}; Python {versions['python']}, {packages}; "
        "no process is left"
    )


if __name__ == "__main__":
    sys.exit(guarded(main))
