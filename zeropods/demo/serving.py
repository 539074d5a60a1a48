"""The page on a port of this machine, until SIGTERM or Ctrl-C, for those who may ask it.

The page listens on 127.0.0.1 only. Requests under a foreign host name or from a page of another origin are refused, and
no input may name a file but those that were uploaded.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from zeropods.demo.page import Site, build_page
from zeropods.demo.tables import MAX_BYTES, tables_in
from zeropods.errors import UserError
from zeropods.files import DEMO, make_private_folder
from zeropods.programs import free_port

if TYPE_CHECKING:
    from gradio import Blocks
    from starlette.requests import Request
    from starlette.responses import Response

HOST = "127.0.0.1"
"""Never another: who can reach the page can ask, and CML's proxy looks here."""
USUAL_PORT = 7860
OWN_NAMES = ("127.0.0.1", "localhost")
"""Names of the page's host: a foreign name that leads to this machine (DNS rebinding) would make its pages ours."""
ANY_NAME = ("*",)
"""For a proxy that has a name of its own and asks who comes, as CML's."""
OWN_SITES = ("same-origin", "none")
"""What browsers say in Sec-Fetch-Site about a request that no foreign page has made."""
POLICY = (
    "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; connect-src 'self'; object-src 'none'; "
    "base-uri 'self'; form-action 'self'"
)
"""What a browser may load for this page: nothing from another host."""


def serve(
    folders: Sequence[Path],
    data: Path | None,
    port: str | None,
    announce: Callable[[str], object] = lambda line: None,
    names: Sequence[str] = OWN_NAMES,
) -> None:
    """Open the page and keep it open; SIGTERM and SIGINT end it in good order, as `KeyboardInterrupt`.

    Args:
        port: where to listen; the usual port, or any free one, if not given.
        announce: takes the line with the address, once the page can be opened.
        names: the hosts that a browser may know this machine by; requests to others are refused.

    Raises:
        UserError: a port that cannot be listened on, folders or data that cannot be shown.
    """
    site, number = Site(tuple(folders), data), usable_port(port)
    with _own_files():
        count = _warmed(site, announce)
        page = _opened(site, number, names)
        try:
            announce(f"{page.local_url} asks {count} trained model{'s' if count > 1 else ''}; Ctrl-C ends it")
            Event().wait()
        finally:
            page.close(verbose=False)


def usable_port(port: str | None) -> int:
    """The port that was asked for, where nothing listens; without one the usual port, or any free one."""
    if port is not None and (not port.isascii() or not port.isdigit() or not 0 < int(port[:6]) < 65_536):
        raise UserError(f"port {port}; expected a number from 1 to 65535")
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, int(port or USUAL_PORT)))
        except OSError as error:
            if port is None:
                return free_port(HOST)
            raise UserError(f"port {port}: {error.strerror}; give another with --port") from None
        return int(port or USUAL_PORT)


@contextmanager
def _own_files() -> Iterator[None]:
    """A folder of this page's for what visitors upload, gone with it; no word to anybody outside."""
    folder = make_private_folder(DEMO)
    os.environ |= {"GRADIO_TEMP_DIR": str(folder), "GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_OFFLINE": "1"}
    # Gradio asks its own page whether it can be opened.
    os.environ["NO_PROXY"] = HOST
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _warmed(site: Site, announce: Callable[[str], object]) -> int:
    """The best model in memory and its tables read, so that the first answer comes at once; returns how many there are.

    A model that cannot be loaded is passed over and named, unless it is the only one.
    """
    from transformers.utils.logging import disable_progress_bar

    from zeropods.demo.answering import loaded

    disable_progress_bar()
    if site.data:
        tables_in(site.data)
    models = list(site.models().values())
    for model in models:
        try:
            site.tables(model.label)
            loaded(model)
            break
        except UserError as error:
            site.passed_over.add(model.folder)
            if model is models[-1]:
                raise
            announce(f"{error}; passed over")
    return len(site.models())


def _opened(site: Site, port: int, names: Sequence[str]) -> Blocks:
    """The page, served by a thread of this process."""
    import gradio as gr
    from starlette.middleware import Middleware
    from starlette.middleware.base import BaseHTTPMiddleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    guards = [
        Middleware(TrustedHostMiddleware, allowed_hosts=list(names), www_redirect=False),
        Middleware(BaseHTTPMiddleware, dispatch=_own_pages_only),
    ]
    theme = gr.themes.Default(
        font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"], primary_hue="blue"
    )
    page = build_page(site, _blocks_of_uploads())
    page.launch(
        server_name=HOST, server_port=port, prevent_thread_lock=True, quiet=True, inbrowser=False, share=False,
        footer_links=[], run_history=False, show_error=False, max_file_size=MAX_BYTES, ssr_mode=False,
        enable_monitoring=False, pwa=False, mcp_server=False, theme=theme,
        css_paths=Path(__file__).with_name("page.css"),
        app_kwargs={"middleware": guards, "docs_url": None, "redoc_url": None, "openapi_url": None},
    )  # fmt: skip
    return page


async def _own_pages_only(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
    """Refuse what a page of another origin sends, and tell browsers with every answer to ask no other host."""
    from starlette.responses import PlainTextResponse

    if request.method == "POST" and request.headers.get("sec-fetch-site", "none") not in OWN_SITES:
        return PlainTextResponse("sent by a page of another origin", status_code=403)
    response = await answer(request)
    response.headers["content-security-policy"] = POLICY
    return response


def _blocks_of_uploads() -> type[Blocks]:
    """Gradio's blocks, whose inputs name no file but those that were uploaded.

    Any input that has the form of a file is copied to where it can be fetched, that of a text box too, and Gradio
    downloads it where it names an address.
    """
    import gradio as gr
    from gradio.utils import get_upload_folder
    from gradio_client.utils import is_file_obj_with_meta, traverse

    def check(file: dict[str, Any]) -> None:
        if not Path(file["path"]).resolve().is_relative_to(Path(get_upload_folder()).resolve()):
            raise gr.Error("a file that was not uploaded here; upload it", print_exception=False)

    class OwnFilesOnly(gr.Blocks):
        async def preprocess_data(self, block_fn: Any, inputs: list[Any], *others: Any, **more: Any) -> list[Any]:
            traverse(inputs, check, is_file_obj_with_meta)
            return await super().preprocess_data(block_fn, inputs, *others, **more)

    return OwnFilesOnly
