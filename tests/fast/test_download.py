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
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from zeropods.data.download import DATASETS, RECORD, Dataset, Download, Source, get, install, staged, unpack
from zeropods.data.manifest import Checksum, git_blob_hash
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


def sample(archive: bytes, members: dict[str, str] = MEMBERS) -> Dataset:
    """A data set of one archive, which is proven by its SHA-256."""
    checksum = Checksum("sha256", hashlib.sha256(archive).hexdigest())
    return Dataset("sample", (Source("http://127.0.0.1:9/nowhere/data.tar.bz2", checksum, members),))


def fetched(publisher: Publisher, out: Path, dataset: Dataset | None = None, attempts: int = 3) -> Download:
    chosen = dataset or sample(publisher.shelf.files[ARCHIVE])
    return install(chosen, out, publisher.url, waits_seconds=[0.0] * (attempts - 1))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_git_names_an_empty_file_as_git_does(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert git_blob_hash(tmp_path / "empty") == "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"


def test_git_names_hello_as_git_does(tmp_path: Path) -> None:
    (tmp_path / "hello").write_bytes(b"hello\n")
    assert Checksum("git-blob", "").of(tmp_path / "hello") == "ce013625030ba8dba906f756967f9e9ca394464a"


def test_wikisql_is_proven_by_the_hash_of_the_official_release() -> None:
    (source,) = DATASETS["wikisql"].sources
    assert source.checksum == Checksum("git-blob", "941de4cb2ad5fa7aeb2e37d314468636ce070af7")


def test_squad_dev_is_the_file_that_its_checksum_names(shared_data: Path) -> None:
    (source,) = (source for source in DATASETS["squad"].sources if source.filename == "dev-v1.1.json")
    assert source.checksum.of(shared_data / "squad" / source.filename) == source.checksum.value


def test_members_lie_directly_in_the_folder(publisher: Publisher, tmp_path: Path) -> None:
    fetched(publisher, tmp_path / "out")
    assert names(tmp_path / "out") == [RECORD, "train.jsonl", "train.tables.jsonl"]


def test_members_keep_their_content(publisher: Publisher, tmp_path: Path) -> None:
    fetched(publisher, tmp_path / "out")
    assert (tmp_path / "out" / "train.jsonl").read_bytes() == CONTENT["data/train.jsonl"]


def test_nothing_unfinished_is_left_beside(publisher: Publisher, tmp_path: Path) -> None:
    fetched(publisher, tmp_path / "out")
    assert names(tmp_path) == ["out"]


def test_summary_says_what_came_from_where(publisher: Publisher, tmp_path: Path) -> None:
    download = fetched(publisher, tmp_path / "out")
    sizes = {name: len(CONTENT[path]) for path, name in MEMBERS.items()}
    assert (download.files, download.urls) == (sizes, (publisher.url + ARCHIVE,))


def test_the_environment_can_name_a_mirror(
    publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.shelf.files = {"/squad/train-v1.1.json": b"{}"}
    monkeypatch.setenv("ZEROPODS_MIRROR", f"{publisher.url}/")
    with pytest.raises(UserError, match=r"/squad/train-v1.1.json: sha256 [0-9a-f]{64}; expected 35276639"):
        get("squad", tmp_path / "out")


def test_a_file_that_is_no_archive_is_kept_as_it_is(publisher: Publisher, tmp_path: Path) -> None:
    publisher.shelf.files = {ARCHIVE: b"{}"}
    fetched(publisher, tmp_path / "out", sample(b"{}", members={}))
    assert (tmp_path / "out" / "data.tar.bz2").read_bytes() == b"{}"


def test_a_folder_that_is_complete_is_not_fetched_again(publisher: Publisher, tmp_path: Path) -> None:
    fetched(publisher, tmp_path / "out")
    assert fetched(publisher, tmp_path / "out").already_there
    assert len(publisher.shelf.asked) == 1


def test_an_empty_folder_is_filled(publisher: Publisher, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert not fetched(publisher, tmp_path / "out").already_there


def test_a_foreign_folder_is_refused_and_untouched(publisher: Publisher, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match="holds something else than sample"):
        fetched(publisher, tmp_path / "out")
    assert names(tmp_path / "out") == ["thesis.tex"]


def test_a_file_in_the_place_of_the_folder_is_refused(publisher: Publisher, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(UserError, match="choose another folder"):
        fetched(publisher, tmp_path / "out")


def test_a_folder_that_was_damaged_is_named(publisher: Publisher, tmp_path: Path) -> None:
    fetched(publisher, tmp_path / "out")
    (tmp_path / "out" / "train.jsonl").write_text("short")
    with pytest.raises(UserError, match=r"train.jsonl: not the \d+ bytes that were unpacked; remove"):
        fetched(publisher, tmp_path / "out")


def test_an_unknown_data_set_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="data set 'wiki'; expected wikisql, squad, wikitext-2"):
        get("wiki", tmp_path / "out")


def test_a_cut_connection_is_continued_where_it_broke(publisher: Publisher, tmp_path: Path) -> None:
    publisher.shelf.cut_after = [100]
    fetched(publisher, tmp_path / "out")
    assert publisher.shelf.asked == ["", "bytes=100-"]


def test_a_later_call_continues_a_partial_file(publisher: Publisher, tmp_path: Path) -> None:
    publisher.shelf.cut_after = [100]
    with pytest.raises(UserError, match="100 bytes are kept"):
        fetched(publisher, tmp_path / "out", attempts=1)
    fetched(publisher, tmp_path / "out", attempts=1)
    assert publisher.shelf.asked == ["", "bytes=100-"]


def test_a_server_without_ranges_is_asked_for_the_whole(publisher: Publisher, tmp_path: Path) -> None:
    publisher.shelf.cut_after, publisher.shelf.knows_ranges = [100], False
    assert fetched(publisher, tmp_path / "out").files


def test_bytes_of_two_versions_are_not_joined(publisher: Publisher, tmp_path: Path) -> None:
    old = publisher.shelf.files[ARCHIVE]
    publisher.shelf.files[ARCHIVE], publisher.shelf.cut_after = b"an older version" * 100, [100]
    with pytest.raises(UserError):
        fetched(publisher, tmp_path / "out", sample(old), attempts=1)
    publisher.shelf.files[ARCHIVE] = old
    assert fetched(publisher, tmp_path / "out", sample(old), attempts=1).files


def test_a_partial_file_of_wrong_bytes_is_fetched_anew(publisher: Publisher, tmp_path: Path) -> None:
    (tmp_path / "out.part").mkdir()
    (tmp_path / "out.part" / "data.tar.bz2.part").write_bytes(b"?" * 100)
    fetched(publisher, tmp_path / "out")
    assert publisher.shelf.asked == ["bytes=100-", ""]


def test_a_partial_file_that_is_too_long_is_fetched_anew(publisher: Publisher, tmp_path: Path) -> None:
    publisher.shelf.fail_with = [416]
    (tmp_path / "out.part").mkdir()
    (tmp_path / "out.part" / "data.tar.bz2.part").write_bytes(b"?" * 100_000)
    fetched(publisher, tmp_path / "out")
    assert publisher.shelf.asked == ["bytes=100000-", ""]


def test_a_download_that_was_whole_is_not_fetched_again(publisher: Publisher, tmp_path: Path) -> None:
    (tmp_path / "out.part").mkdir()
    (tmp_path / "out.part" / "data.tar.bz2.part").write_bytes(publisher.shelf.files[ARCHIVE])
    fetched(publisher, tmp_path / "out")
    assert publisher.shelf.asked == []


def test_a_wrong_checksum_is_one_line_with_both(publisher: Publisher, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.tar.bz2: sha256 [0-9a-f]{64}; expected [0-9a-f]{64}; name a"):
        fetched(publisher, tmp_path / "out", sample(b"another file"))


def test_a_wrong_checksum_leaves_nothing(publisher: Publisher, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        fetched(publisher, tmp_path / "out", sample(b"another file"))
    assert names(tmp_path) == []


def test_a_server_error_is_tried_again(publisher: Publisher, tmp_path: Path) -> None:
    publisher.shelf.fail_with = [503, 500]
    assert fetched(publisher, tmp_path / "out").files


def test_a_server_error_that_stays_is_one_line(publisher: Publisher, tmp_path: Path) -> None:
    publisher.shelf.fail_with = [503] * 3
    with pytest.raises(UserError, match=r"data.tar.bz2: HTTP 503 .*; check the network and run"):
        fetched(publisher, tmp_path / "out")


def test_a_file_that_is_not_there_is_asked_for_once(publisher: Publisher, tmp_path: Path) -> None:
    wanted = sample(publisher.shelf.files.pop(ARCHIVE))
    with pytest.raises(UserError, match="HTTP 404 Not Found"):
        fetched(publisher, tmp_path / "out", wanted)
    assert len(publisher.shelf.asked) == 1


def test_a_server_that_is_gone_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^http://127.0.0.1:9/.*: no connection: .*refused"):
        install(sample(b""), tmp_path / "out", waits_seconds=[])


def test_an_address_that_is_not_http_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^file:///etc/sample/data.tar.bz2: not an HTTP address"):
        install(sample(b""), tmp_path / "out", "file:///etc")


@pytest.mark.parametrize("path", ["../outside", "/outside", "data/../../outside", "..\\outside"])
def test_an_archive_whose_path_leaves_the_folder_is_refused(publisher: Publisher, tmp_path: Path, path: str) -> None:
    publisher.shelf.files[ARCHIVE] = tar_of({path: b"evil", **CONTENT})
    with pytest.raises(UserError, match=r"member '.*outside' leaves the folder"):
        fetched(publisher, tmp_path / "out")
    assert names(tmp_path) == ["out.part"]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_an_archive_with_a_link_or_a_device_is_refused(publisher: Publisher, tmp_path: Path, kind: bytes) -> None:
    special = tarfile.TarInfo("data/way-out")
    special.type, special.linkname = kind, "/etc"
    publisher.shelf.files[ARCHIVE] = tar_of(CONTENT, special)
    with pytest.raises(UserError, match="'data/way-out' is a link or a device"):
        fetched(publisher, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_symlink_of_a_zip_file_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as container:
        link = zipfile.ZipInfo("way-out")
        link.external_attr = 0o120777 << 16
        container.writestr(link, "/etc")
    with pytest.raises(UserError, match="'way-out' is a link or a device"):
        unpack(tmp_path / "a.zip", {}, tmp_path)


def test_a_path_of_a_zip_file_that_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as container:
        container.writestr("../outside", "evil")
    with pytest.raises(UserError, match="leaves the folder"):
        unpack(tmp_path / "a.zip", {}, tmp_path)


def test_members_of_a_zip_file_are_unpacked(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as container:
        container.writestr("wikitext-2/", "")
        container.writestr("wikitext-2/wiki.train.tokens", " = Title = \n")
    unpack(tmp_path / "a.zip", {"wikitext-2/wiki.train.tokens": "train.txt"}, tmp_path)
    assert (tmp_path / "train.txt").read_text() == " = Title = \n"


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_an_archive_that_unpacks_to_too_much_is_refused(tmp_path: Path, kind: str) -> None:
    path, content = tmp_path / "bomb", {"zeros": bytes(2**20)}
    if kind == "tar":
        path.write_bytes(tar_of(content))
    else:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as container:
            container.writestr("zeros", content["zeros"])
    with pytest.raises(UserError, match="unpacks to more than 1000 bytes"):
        unpack(path, {}, tmp_path, limit_bytes=1_000)


def test_an_archive_without_a_member_is_refused(publisher: Publisher, tmp_path: Path) -> None:
    publisher.shelf.files[ARCHIVE] = tar_of({"data/train.jsonl": b"{}"})
    with pytest.raises(UserError, match=r"has no data/train\.tables\.jsonl"):
        fetched(publisher, tmp_path / "out")


@pytest.mark.parametrize("size", [10, 200])
def test_a_truncated_archive_is_one_line(publisher: Publisher, tmp_path: Path, size: int) -> None:
    publisher.shelf.files[ARCHIVE] = publisher.shelf.files[ARCHIVE][:size]
    with pytest.raises(UserError, match="broken archive"):
        fetched(publisher, tmp_path / "out")


def test_an_archive_of_noise_is_one_line(publisher: Publisher, tmp_path: Path) -> None:
    publisher.shelf.files[ARCHIVE] = b"<html>not an archive</html>"
    with pytest.raises(UserError, match="broken archive"):
        fetched(publisher, tmp_path / "out")


def test_a_failed_unpacking_leaves_no_half(publisher: Publisher, tmp_path: Path) -> None:
    publisher.shelf.files[ARCHIVE] = tar_of({"data/train.jsonl": b"{}"})
    with pytest.raises(UserError):
        fetched(publisher, tmp_path / "out")
    assert names(tmp_path / "out.part") == ["data.tar.bz2.part", "data.tar.bz2.part.etag"]


def test_an_interrupt_while_unpacking_leaves_no_half(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), staged(tmp_path / "unpacked") as folder:
        (folder / "train.jsonl").write_text("half")
        raise KeyboardInterrupt
    assert names(tmp_path) == []


def test_what_a_killed_unpacking_left_is_not_mixed_in(publisher: Publisher, tmp_path: Path) -> None:
    (tmp_path / "out.part" / "unpacked").mkdir(parents=True)
    (tmp_path / "out.part" / "unpacked" / "half").touch()
    fetched(publisher, tmp_path / "out")
    assert not (tmp_path / "out" / "half").exists()


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
