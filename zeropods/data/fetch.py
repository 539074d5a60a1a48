"""One file over HTTP: resumable, bounded in time and size, its progress shown on stderr."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Sequence
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from tqdm import tqdm

from zeropods import __version__
from zeropods.data.writing import writing
from zeropods.errors import UserError

TIMEOUT_SECONDS = 30
WAITS_SECONDS = (1.0, 2.0, 4.0, 8.0)
LIMIT_BYTES = 2**30
_CHUNK_BYTES = 2**16
_PASSING = (408, 416, 429)
_USER_AGENT = f"Mozilla/5.0 (compatible; zeropods/{__version__})"
"""Some publishers answer 403 to urllib's own name."""


class PassingError(Exception):
    """The transfer failed for a reason that may pass."""


def fetch(url: str, part: Path, waits_seconds: Sequence[float] = WAITS_SECONDS) -> None:
    """Download `url` into `part`, going on after the bytes that are already there.

    The server's validator is kept beside as `PART.etag`, so that bytes of two versions are not joined;
    where a server gives none, only the checksum of the whole can tell. What has arrived stays when this
    fails, and the next call goes on from there. `UserError` names the address, what happened and the
    remedy, after one attempt more than there are waits.
    """
    if not url.startswith(("http://", "https://")):
        raise UserError(f"{url}: not an HTTP address; expected http:// or https://")
    for wait in waits_seconds:
        try:
            return _attempt(url, part)
        except PassingError as error:
            print(f"{url}: {error}; next attempt in {wait:g} s", file=sys.stderr)
            time.sleep(wait)
    try:
        return _attempt(url, part)
    except PassingError as error:
        raise UserError(f"{url}: {error}; {_remedy(part)}") from None


def discard(part: Path) -> None:
    """Forget what was downloaded."""
    part.unlink(missing_ok=True)
    _validator_file(part).unlink(missing_ok=True)


def _remedy(part: Path) -> str:
    kept = part.stat().st_size if part.exists() else 0
    remedy = "check the network and run the command again, or name a mirror in ZEROPODS_MIRROR"
    return f"{kept} bytes are kept; {remedy}" if kept else remedy


def _attempt(url: str, part: Path) -> None:
    offset = part.stat().st_size if part.exists() else 0
    with _open(url, part, offset) as response:
        if response.status != 206:
            offset = 0
        elif _first_byte(response) != offset:
            discard(part)
            raise PassingError("the server sent another range than was asked for")
        length = response.headers.get("Content-Length")
        total = offset + int(length) if length else None
        if total is not None and total > LIMIT_BYTES:
            raise UserError(f"{url}: {total} bytes; expected at most {LIMIT_BYTES}; check the address")
        _keep_validator(response, part)
        _receive(response, part, offset, total)
    arrived = part.stat().st_size
    if total is not None and arrived != total:
        raise PassingError(f"the connection ended after {arrived} of {total} bytes")


def _open(url: str, part: Path, offset: int) -> HTTPResponse:
    headers = {"User-Agent": _USER_AGENT}
    if offset:
        headers["Range"] = f"bytes={offset}-"
        if _validator_file(part).exists():
            headers["If-Range"] = _validator_file(part).read_text("latin-1")
    try:
        return urlopen(Request(url, headers=headers), timeout=TIMEOUT_SECONDS)
    except HTTPError as error:
        error.close()
        if error.code == 416:
            discard(part)
        if error.code in _PASSING or error.code >= 500:
            raise PassingError(f"HTTP {error.code} {error.reason}") from None
        raise UserError(f"{url}: HTTP {error.code} {error.reason}; name a mirror in ZEROPODS_MIRROR") from None
    except ValueError as error:
        raise UserError(f"{url}: {error}; check the address") from None
    except URLError as error:
        raise PassingError(f"no connection: {error.reason}") from None
    except (OSError, HTTPException) as error:
        raise PassingError(_reason(error)) from None


def _first_byte(response: HTTPResponse) -> int | None:
    match = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    return int(match[1]) if match else None


def _keep_validator(response: HTTPResponse, part: Path) -> None:
    """Only a strong entity tag or a date may stand in If-Range (RFC 9110, 13.1.5)."""
    tag = response.headers.get("ETag", "")
    validator = tag if tag.startswith('"') else response.headers.get("Last-Modified", "")
    if validator:
        _validator_file(part).write_text(validator, "latin-1")
    else:
        _validator_file(part).unlink(missing_ok=True)


def _receive(response: HTTPResponse, part: Path, offset: int, total: int | None) -> None:
    """A disk that is full is not retried: only reading from the network ends in `PassingError`."""
    bar = tqdm(total=total, initial=offset, unit="B", unit_scale=True, desc=part.stem, disable=None)
    with bar, writing(part), open(part, "ab" if offset else "wb") as file:
        for chunk in _chunks(response):
            offset += len(chunk)
            if offset > LIMIT_BYTES:
                raise UserError(f"{response.url}: more than {LIMIT_BYTES} bytes; check the address")
            file.write(chunk)
            bar.update(len(chunk))


def _chunks(response: HTTPResponse) -> Iterator[bytes]:
    try:
        while chunk := response.read(_CHUNK_BYTES):
            yield chunk
    except (OSError, HTTPException) as error:
        raise PassingError(_reason(error)) from None


def _validator_file(part: Path) -> Path:
    return part.with_name(f"{part.name}.etag")


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
