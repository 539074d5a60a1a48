"""The page on a port of this machine, until SIGTERM or Ctrl-C, for those who may ask it."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from zeropods.demo.guard import OWN_NAMES, OwnPagesOnly
from zeropods.demo.page import CSS, Site
from zeropods.demo.tables import MAX_BYTES, tables_in
from zeropods.errors import UserError
from zeropods.files import DEMO, make_private_folder

if TYPE_CHECKING:
    from fastapi import FastAPI
    from uvicorn import Server


HOST = "127.0.0.1"
"""Never another: who can reach the page can ask, and CML's proxy looks here."""
USUAL_PORT = 7860
GRACE_SECONDS = 2
"""For an answer that is being written."""


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
    site = Site(tuple(folders), data)
    with listening(port) as listener, _own_files():
        count = _warmed(site, announce)
        server = _server(_application(site, names))
        address = f"http://{HOST}:{listener.getsockname()[1]}/"
        announce(f"{address} asks {count} trained model{'s' if count > 1 else ''}; Ctrl-C ends it")
        server.run(sockets=[listener])


@contextmanager
def listening(said: str | None) -> Iterator[socket.socket]:
    """A socket at the port that was asked for; who connects early waits until the page is ready."""
    if said is not None and (not said.isascii() or not said.isdigit() or not 0 < int(said[:6]) < 65_536):
        raise UserError(f"port {said}; expected a number from 1 to 65535")
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for port in [int(said)] if said else [USUAL_PORT, 0]:
            try:
                listener.bind((HOST, port))
                listener.listen()
                break
            except OSError as error:
                if said:
                    raise UserError(f"port {said}: {error.strerror}; give another with --port") from None
        yield listener


@contextmanager
def _own_files() -> Iterator[None]:
    """A folder of this page's for what visitors upload, gone with it; no word to anybody outside."""
    folder = make_private_folder(DEMO)
    os.environ["GRADIO_TEMP_DIR"] = str(folder)
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["HF_HUB_OFFLINE"] = "1"
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
        except UserError as error:
            site.passed_over.add(model.folder)
            if model is models[-1]:
                raise
            announce(f"{error}; passed over")
        else:
            break
    return len(site.models())


def _server(application: FastAPI) -> Server:
    """Ends what open pages wait for before it waits for them: each holds a connection for as long as it is open."""
    import uvicorn
    from gradio.routes import App
    from starlette.routing import Mount

    mounted = [route.app for route in application.routes if isinstance(route, Mount)]
    pages = [app for app in mounted if isinstance(app, App)]

    class EndsOpenPages(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            for page in pages:
                page.stop_event.set()
            await super().shutdown(sockets)

    return EndsOpenPages(
        uvicorn.Config(application, log_level="warning", timeout_graceful_shutdown=GRACE_SECONDS, ws="none")
    )


def _application(site: Site, names: Sequence[str]) -> FastAPI:
    import gradio as gr
    from fastapi import FastAPI
    from fastapi.middleware.trustedhost import TrustedHostMiddleware

    from zeropods.demo.page import build_page

    theme = gr.themes.Default(
        font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"], primary_hue="blue"
    )
    application = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    application.add_middleware(OwnPagesOnly)
    application.add_middleware(TrustedHostMiddleware, allowed_hosts=list(names), www_redirect=False)
    return gr.mount_gradio_app(
        application, build_page(site), path="/", server_name=HOST, footer_links=[], run_history=False,
        show_error=False, max_file_size=MAX_BYTES, ssr_mode=False, enable_monitoring=False, pwa=False,
        mcp_server=False, theme=theme, css=CSS,
    )  # fmt: skip
