"""`zeropods data get`, against a real server on this machine."""

import hashlib
import io
import json
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest

from zeropods.data import download
from zeropods.data.download import DATASETS, RECORD, SourceFile, get
from zeropods.errors import UserError

MEMBERS = {"data/train.jsonl": "train.jsonl", "data/train.tables.jsonl": "train.tables.jsonl"}
CONTENT = {path: f"content of {path}\n".encode() * 2_000 for path in MEMBERS}


class Publisher(BaseHTTPRequestHandler):
    """Gives out `body` under every address; the class stands for one server."""

    url = ""
    body = b""
    faults: ClassVar[list[int]] = []
    """What goes wrong with each of the next answers: a status of 400 or more, or bytes after which it is cut."""
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        fault = self.faults.pop(0) if self.faults else len(self.body)
        if 400 <= fault < 600:
            self.send_error(fault)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body[:fault])

    def log_message(self, *arguments: object) -> None:
        """Nothing on stderr."""


@pytest.fixture
def publisher(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Publisher]]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    own = type("OwnPublisher", (Publisher,), {"body": tar_of(CONTENT), "faults": [], "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), own)
    own.url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("ZEROPODS_MIRROR", f"{own.url}/")
    monkeypatch.setattr(download, "WAITS_SECONDS", (0.0, 0.0))
    monkeypatch.setitem(DATASETS, "sample", ())
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield own
    server.shutdown()
    server.server_close()


def tar_of(content: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:bz2") as tar:
        for path, data in content.items():
            member = tarfile.TarInfo(path)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def fetched(
    publisher: type[Publisher],
    out: Path,
    members: dict[str, str] = MEMBERS,
    name: str = "data.tar.bz2",
) -> dict[str, Any]:
    """One file, pinned by the SHA-256 of what the server has."""
    digest = hashlib.sha256(publisher.body).hexdigest()
    DATASETS["sample"] = (SourceFile(f"http://127.0.0.1:9/nowhere/{name}", "sha256", digest, members),)
    return get("sample", out)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_checksums_are_those_of_git_and_of_the_published_file(shared_data: Path) -> None:
    assert SourceFile("", "git-blob", "").digest_of(b"hello\n") == "ce013625030ba8dba906f756967f9e9ca394464a"
    (source,) = (source for source in DATASETS["squad"] if source.filename == "dev-v1.1.json")
    assert source.digest_of((shared_data / "squad" / source.filename).read_bytes()) == source.digest


def test_the_folder_holds_the_members_under_their_names_and_a_record(
    publisher: type[Publisher], tmp_path: Path
) -> None:
    publisher.body = tar_of({"../outside": b"not asked for", **CONTENT})
    (tmp_path / "out").mkdir()
    download = fetched(publisher, tmp_path / "out")
    assert (names(tmp_path), publisher.asked) == (["out"], ["/sample/data.tar.bz2"])
    assert names(tmp_path / "out") == [RECORD, "train.jsonl", "train.tables.jsonl"]
    assert (tmp_path / "out" / "train.jsonl").read_bytes() == CONTENT["data/train.jsonl"]
    record = json.loads((tmp_path / "out" / RECORD).read_text())
    assert record["files"] == download["files"] == {name: len(CONTENT[path]) for path, name in MEMBERS.items()}
    assert record["checksums"] == [{"algorithm": "sha256", "value": hashlib.sha256(publisher.body).hexdigest()}]


def test_members_of_a_zip_file_are_unpacked_and_what_is_no_archive_is_kept(
    publisher: type[Publisher], tmp_path: Path
) -> None:
    fetched(publisher, tmp_path / "plain", members={}, name="train-v1.1.json")
    assert (tmp_path / "plain" / "train-v1.1.json").read_bytes() == publisher.body
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as container:
        container.writestr("wikitext-2/wiki.train.tokens", " = Title = \n")
    publisher.body = buffer.getvalue()
    fetched(publisher, tmp_path / "out", members={"wikitext-2/wiki.train.tokens": "train.txt"}, name="a.zip")
    assert (tmp_path / "out" / "train.txt").read_text() == " = Title = \n"


def test_a_complete_folder_is_not_fetched_again_and_other_bytes_are_refused(
    publisher: type[Publisher], tmp_path: Path
) -> None:
    fetched(publisher, tmp_path / "out")
    assert fetched(publisher, tmp_path / "out")["already_there"]
    assert len(publisher.asked) == 1
    with pytest.raises(UserError, match=r"/squad/train-v1.1.json: sha256 [0-9a-f]{64}; expected 35276639.*; set Z"):
        get("squad", tmp_path / "squad")
    assert names(tmp_path) == ["out"]
    (tmp_path / "out" / "train.jsonl").write_text("short")
    with pytest.raises(UserError, match=r"train.jsonl: not the \d+ bytes that were unpacked; remove"):
        fetched(publisher, tmp_path / "out")


def test_a_foreign_folder_or_file_is_refused_and_untouched(publisher: type[Publisher], tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    for out in (tmp_path, tmp_path / "thesis.tex"):
        with pytest.raises(UserError, match="holds something other than sample as fetched here; choose another folder"):
            fetched(publisher, out)
    assert names(tmp_path) == ["thesis.tex"]


@pytest.mark.parametrize(
    ("faults", "said", "attempts"),
    [
        ([503, 100], None, 3),
        ([503] * 3, r"data.tar.bz2: HTTP 503 .*; check the network and run", 3),
        ([404], r"data.tar.bz2: HTTP 404 Not Found; set ZEROPODS_MIRROR", 1),
        ([100] * 3, r"data.tar.bz2: connection lost after 100 of \d+ bytes; check the network", 3),
    ],
)
def test_what_may_pass_is_tried_again_and_what_stays_is_one_line_and_leaves_nothing(
    publisher: type[Publisher], tmp_path: Path, faults: list[int], said: str | None, attempts: int
) -> None:
    publisher.faults = faults
    with pytest.raises(UserError, match=said) if said else nullcontext():
        fetched(publisher, tmp_path / "out")
    assert (len(publisher.asked), names(tmp_path)) == (attempts, [] if said else ["out"])


@pytest.mark.parametrize(
    ("mirror", "said"),
    [
        ("", r"^http://127.0.0.1:9/.*: no connection: .*refused"),
        ("file:///etc", r"^file:///etc/sample/data: not an HTTP address"),
    ],
)
def test_an_address_that_cannot_be_asked_is_one_line(
    tmp_path: Path, mirror: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEROPODS_MIRROR", mirror)
    monkeypatch.setattr(download, "WAITS_SECONDS", ())
    monkeypatch.setitem(DATASETS, "sample", (SourceFile("http://127.0.0.1:9/data", "sha256", ""),))
    with pytest.raises(UserError, match=said):
        get("sample", tmp_path / "out")
