"""`zeropods data get`, against a real server on this machine."""

from __future__ import annotations

import hashlib
import io
import json
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from zeropods.data.download import (
    DATASETS,
    RECORD,
    Checksum,
    Download,
    PublishedSet,
    SourceFile,
    get,
    install,
    unpack,
)
from zeropods.errors import UserError

MEMBERS = {"data/train.jsonl": "train.jsonl", "data/train.tables.jsonl": "train.tables.jsonl"}
CONTENT = {path: f"content of {path}\n".encode() * 2_000 for path in MEMBERS}
ARCHIVE = "/sample/data.tar.bz2"


@dataclass
class Shelf:
    """What the server gives out, and what it was asked."""

    files: dict[str, bytes] = field(default_factory=dict)
    cut_after: list[int] = field(default_factory=list)
    """For each of the next answers, the number of bytes after which the connection is cut."""
    fail_with: list[int] = field(default_factory=list)
    """For each of the next answers, the status of an error."""
    knows_ranges: bool = True
    stalls: bool = False
    """Send half of a file and then nothing, until the client leaves."""
    asked: list[str] = field(default_factory=list)
    """The Range header of each request, empty where there was none."""


class Handler(BaseHTTPRequestHandler):
    shelf: Shelf

    def do_GET(self) -> None:
        shelf, wanted = self.shelf, self.headers.get("Range", "")
        shelf.asked.append(wanted)
        content = shelf.files.get(self.path)
        if shelf.fail_with or content is None:
            self.send_error(shelf.fail_with.pop(0) if shelf.fail_with else 404)
            return
        tag = f'"{hashlib.sha256(content).hexdigest()}"'
        start = self._start(wanted, tag)
        self.send_response(206 if start else 200)
        self.send_header("ETag", tag)
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        self._send(content[start:])

    def _start(self, wanted: str, tag: str) -> int:
        if wanted and self.shelf.knows_ranges and self.headers.get("If-Range") in (None, tag):
            return int(wanted.removeprefix("bytes=").rstrip("-"))
        return 0

    def _send(self, body: bytes) -> None:
        if self.shelf.cut_after:
            self.wfile.write(body[: self.shelf.cut_after.pop(0)])
        elif self.shelf.stalls:
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.connection.recv(1)
        else:
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Nothing on stderr."""


@dataclass
class Publisher:
    shelf: Shelf
    url: str


@pytest.fixture
def publisher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Publisher]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    shelf = Shelf(files={ARCHIVE: tar_of(CONTENT)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"shelf": shelf}))
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield Publisher(shelf, f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    server.server_close()


def tar_of(content: dict[str, bytes], special: tarfile.TarInfo | None = None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:bz2") as tar:
        for path, data in content.items():
            member = tarfile.TarInfo(path)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        if special is not None:
            tar.addfile(special)
    return buffer.getvalue()


def sample(archive: bytes, members: dict[str, str] = MEMBERS) -> PublishedSet:
    """A data set of one archive, which is pinned by its SHA-256."""
    checksum = Checksum("sha256", hashlib.sha256(archive).hexdigest())
    return PublishedSet("sample", (SourceFile("http://127.0.0.1:9/nowhere/data.tar.bz2", checksum, members),))


def fetched(publisher: Publisher, out: Path, dataset: PublishedSet | None = None, attempts: int = 3) -> Download:
    chosen = dataset or sample(publisher.shelf.files[ARCHIVE])
    return install(chosen, out, publisher.url, waits_seconds=[0.0] * (attempts - 1))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("content", "digest"),
    [
        (b"", "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"),
        (b"hello\n", "ce013625030ba8dba906f756967f9e9ca394464a"),
    ],
)
def test_git_blob_checksums_are_those_of_git(tmp_path: Path, content: bytes, digest: str) -> None:
    (tmp_path / "file").write_bytes(content)
    assert Checksum("git-blob", "").of(tmp_path / "file") == digest


def test_squad_dev_is_the_file_that_its_checksum_names(shared_data: Path) -> None:
    (source,) = (source for source in DATASETS["squad"].sources if source.filename == "dev-v1.1.json")
    assert source.checksum.of(shared_data / "squad" / source.filename) == source.checksum.value


def test_members_lie_directly_in_the_folder_with_their_content(publisher: Publisher, tmp_path: Path) -> None:
    download = fetched(publisher, tmp_path / "out")
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == [RECORD, "train.jsonl", "train.tables.jsonl"]
    assert (tmp_path / "out" / "train.jsonl").read_bytes() == CONTENT["data/train.jsonl"]
    sizes = {name: len(CONTENT[path]) for path, name in MEMBERS.items()}
    assert (download.files, download.urls) == (sizes, (publisher.url + ARCHIVE,))


def test_members_of_a_zip_file_are_unpacked(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as container:
        container.writestr("wikitext-2/", "")
        container.writestr("wikitext-2/wiki.train.tokens", " = Title = \n")
    unpack(tmp_path / "a.zip", {"wikitext-2/wiki.train.tokens": "train.txt"}, tmp_path)
    assert (tmp_path / "train.txt").read_text() == " = Title = \n"


def test_the_environment_can_name_a_mirror(
    publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.shelf.files = {"/squad/train-v1.1.json": b"{}"}
    monkeypatch.setenv("ZEROPODS_MIRROR", f"{publisher.url}/")
    with pytest.raises(UserError, match=r"/squad/train-v1.1.json: sha256 [0-9a-f]{64}; expected 35276639"):
        get("squad", tmp_path / "out")


def test_a_file_that_is_no_archive_is_kept_as_it_is(publisher: Publisher, tmp_path: Path) -> None:
    publisher.shelf.files = {ARCHIVE: b"{}"}
    (tmp_path / "out").mkdir()
    fetched(publisher, tmp_path / "out", sample(b"{}", members={}))
    assert (tmp_path / "out" / "data.tar.bz2").read_bytes() == b"{}"


def test_a_folder_that_is_complete_is_not_fetched_again(publisher: Publisher, tmp_path: Path) -> None:
    fetched(publisher, tmp_path / "out")
    assert fetched(publisher, tmp_path / "out").already_there
    assert len(publisher.shelf.asked) == 1
    (tmp_path / "out" / "train.jsonl").write_text("short")
    with pytest.raises(UserError, match=r"train.jsonl: not the \d+ bytes that were unpacked; remove"):
        fetched(publisher, tmp_path / "out")


def test_a_foreign_folder_or_file_is_refused_and_untouched(publisher: Publisher, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match="holds something else than sample"):
        fetched(publisher, tmp_path / "out")
    assert names(tmp_path / "out") == ["thesis.tex"]
    with pytest.raises(UserError, match="choose another folder"):
        fetched(publisher, tmp_path / "out" / "thesis.tex")


def test_an_unknown_data_set_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="data set 'wiki'; expected wikisql, squad, wikitext-2"):
        get("wiki", tmp_path / "out")


@pytest.mark.parametrize(("knows_ranges", "attempts"), [(True, 3), (True, 1), (False, 3)])
def test_a_cut_connection_is_continued_where_it_broke(
    publisher: Publisher, tmp_path: Path, knows_ranges: bool, attempts: int
) -> None:
    publisher.shelf.cut_after, publisher.shelf.knows_ranges = [100], knows_ranges
    if attempts == 1:
        with pytest.raises(UserError, match="100 bytes are kept"):
            fetched(publisher, tmp_path / "out", attempts=1)
    fetched(publisher, tmp_path / "out", attempts=attempts)
    assert publisher.shelf.asked == ["", "bytes=100-"]


def test_bytes_of_two_versions_are_fetched_anew(publisher: Publisher, tmp_path: Path) -> None:
    old = publisher.shelf.files[ARCHIVE]
    publisher.shelf.files[ARCHIVE], publisher.shelf.cut_after = b"an older version" * 100, [100]
    with pytest.raises(UserError):
        fetched(publisher, tmp_path / "out", sample(old), attempts=1)
    publisher.shelf.files[ARCHIVE] = old
    assert fetched(publisher, tmp_path / "out", sample(old), attempts=1).files


@pytest.mark.parametrize(
    ("size", "fail_with", "asked"), [(100, [], ["bytes=100-", ""]), (10**5, [416], ["bytes=100000-", ""])]
)
def test_a_partial_file_of_wrong_bytes_or_too_many_is_fetched_anew(
    publisher: Publisher, tmp_path: Path, size: int, fail_with: list[int], asked: list[str]
) -> None:
    publisher.shelf.fail_with = fail_with
    (tmp_path / "out.part").mkdir()
    (tmp_path / "out.part" / "data.tar.bz2.part").write_bytes(b"?" * size)
    fetched(publisher, tmp_path / "out")
    assert publisher.shelf.asked == asked


def test_a_download_that_was_whole_is_not_fetched_again(publisher: Publisher, tmp_path: Path) -> None:
    (tmp_path / "out.part" / "unpacked").mkdir(parents=True)
    (tmp_path / "out.part" / "unpacked" / "half").touch()
    (tmp_path / "out.part" / "data.tar.bz2.part").write_bytes(publisher.shelf.files[ARCHIVE])
    fetched(publisher, tmp_path / "out")
    assert publisher.shelf.asked == []
    assert not (tmp_path / "out" / "half").exists()


def test_a_wrong_checksum_is_one_line_with_both_and_leaves_nothing(publisher: Publisher, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.tar.bz2: sha256 [0-9a-f]{64}; expected [0-9a-f]{64}; name a"):
        fetched(publisher, tmp_path / "out", sample(b"another file"))
    assert names(tmp_path) == []


def test_a_server_error_is_tried_again_and_is_one_line_where_it_stays(publisher: Publisher, tmp_path: Path) -> None:
    publisher.shelf.fail_with = [503, 500]
    assert fetched(publisher, tmp_path / "out").files
    publisher.shelf.fail_with = [503] * 3
    with pytest.raises(UserError, match=r"data.tar.bz2: HTTP 503 .*; check the network and run"):
        fetched(publisher, tmp_path / "other")


def test_a_file_that_is_not_there_is_asked_for_once(publisher: Publisher, tmp_path: Path) -> None:
    wanted = sample(publisher.shelf.files.pop(ARCHIVE))
    with pytest.raises(UserError, match="HTTP 404 Not Found"):
        fetched(publisher, tmp_path / "out", wanted)
    assert len(publisher.shelf.asked) == 1


@pytest.mark.parametrize(
    ("mirror", "said"),
    [
        (None, r"^http://127.0.0.1:9/.*: no connection: .*refused"),
        ("file:///etc", r"^file:///etc/sample/data.tar.bz2: not an HTTP address"),
    ],
)
def test_an_address_that_cannot_be_asked_is_one_line(tmp_path: Path, mirror: str | None, said: str) -> None:
    with pytest.raises(UserError, match=said):
        install(sample(b""), tmp_path / "out", mirror, waits_seconds=[])


def test_no_path_of_an_archive_becomes_a_path_on_disk(publisher: Publisher, tmp_path: Path) -> None:
    link = tarfile.TarInfo("data/way-out")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc"
    publisher.shelf.files[ARCHIVE] = tar_of({"../outside": b"evil", **CONTENT}, link)
    fetched(publisher, tmp_path / "out")
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == [RECORD, "train.jsonl", "train.tables.jsonl"]


@pytest.mark.parametrize(
    ("archive", "said"),
    [
        (
            lambda good: tar_of({"data/train.jsonl": b"{}"}),
            r"data/train\.tables\.jsonl.*; expected the publisher's release",
        ),
        (lambda good: good[:10], "broken archive"),
        (lambda good: good[:200], "broken archive"),
        (lambda good: b"<html>not an archive</html>", "broken archive"),
    ],
)
def test_a_broken_archive_is_one_line_and_leaves_no_half(
    publisher: Publisher, tmp_path: Path, archive: Callable[[bytes], bytes], said: str
) -> None:
    publisher.shelf.files[ARCHIVE] = archive(publisher.shelf.files[ARCHIVE])
    with pytest.raises(UserError, match=said):
        fetched(publisher, tmp_path / "out")
    assert names(tmp_path / "out.part") == ["data.tar.bz2.part"]


def get_in_a_process(publisher: Publisher, out: Path) -> subprocess.Popen[str]:
    """A `get` of SQuAD under way, of which half has been sent."""
    publisher.shelf.files, publisher.shelf.stalls = {"/squad/train-v1.1.json": b"x" * 400_000}, True
    code = (
        "import sys; from zeropods.errors import guarded; from zeropods.data.download import get\n"
        "sys.exit(guarded(lambda: print(get('squad', sys.argv[1], sys.argv[2]))))"
    )
    command = [sys.executable, "-c", code, str(out), publisher.url]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    part = out.with_name("out.part") / "train-v1.1.json.part"
    deadline = time.monotonic() + 20
    while not part.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return process


def test_an_interrupt_keeps_the_partial_file_only(publisher: Publisher, tmp_path: Path) -> None:
    with get_in_a_process(publisher, tmp_path / "out") as process:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (130, "zeropods: interrupted\n")
    assert names(tmp_path) == ["out.part"]


def test_a_second_download_into_the_same_folder_is_refused(publisher: Publisher, tmp_path: Path) -> None:
    with get_in_a_process(publisher, tmp_path / "out") as process:
        with pytest.raises(UserError, match="another command is downloading there"):
            get("squad", tmp_path / "out", publisher.url)
        process.kill()


def test_a_disk_without_room_is_one_line(publisher: Publisher, tmp_path: Path) -> None:
    """A limit on the size of files stands in for a full disk; both are an `OSError` on writing."""
    publisher.shelf.files = {"/squad/train-v1.1.json": b"x" * 400_000}
    code = (
        "import resource, sys; from zeropods.errors import guarded; from zeropods.data.download import get\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "sys.exit(guarded(lambda: print(get('squad', sys.argv[1], sys.argv[2]))))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "out"), publisher.url]
    run = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert (run.returncode, run.stderr.count("\n")) == (1, 1)
    assert "train-v1.1.json.part: File too large" in run.stderr


def test_the_record_in_the_folder_names_the_checksums(publisher: Publisher, tmp_path: Path) -> None:
    fetched(publisher, tmp_path / "out")
    record = json.loads((tmp_path / "out" / RECORD).read_text())
    expected = hashlib.sha256(publisher.shelf.files[ARCHIVE]).hexdigest()
    assert record["checksums"] == [{"algorithm": "sha256", "value": expected}]
