"""Who may ask the page, and with what: programs on this machine by its own name, values and the files they uploaded."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradio import Blocks


OWN_NAMES = ("127.0.0.1", "localhost")
"""Of the page's host: a foreign name that leads to this machine (DNS rebinding) would make its pages ours."""
ANY_NAME = ("*",)
"""Behind a proxy that has a name of its own and asks who comes, as CML's."""
OWN_SITES = (b"same-origin", b"none")
"""What browsers say in Sec-Fetch-Site about a request that no foreign page has made."""
POLICY = (
    "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; connect-src 'self'; object-src 'none'; "
    "base-uri 'self'; form-action 'self'"
)
"""What a browser may load for this page: nothing from another host."""

Receive = Callable[[], Awaitable[dict]]
Send = Callable[[dict], Awaitable[None]]


class OwnPagesOnly:
    """Refuses what a page of another origin sends, and tells browsers with every answer to ask no other host."""

    def __init__(self, app: Callable) -> None:
        self.app = app

    async def __call__(self, scope: dict, receive: Receive, send: Send) -> None:
        async def sent(message: dict) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (b"content-security-policy", POLICY.encode())]
                message = {**message, "headers": headers}
            await send(message)

        site = dict(scope.get("headers", ())).get(b"sec-fetch-site", b"none")
        if scope.get("method") == "POST" and site not in OWN_SITES:
            await sent({"type": "http.response.start", "status": 403})
            await sent({"type": "http.response.body", "body": b"sent by a page of another origin"})
        else:
            await self.app(scope, receive, sent)


def blocks_of_own_files() -> type[Blocks]:
    """Gradio's blocks, whose inputs name no file but those that were uploaded.

    Any input that has the form of a file is copied to where it can be fetched, that of a text box too, and is
    downloaded where it names an address. Gradio itself looks which file it is only in pages that `launch` serves.
    """
    import gradio as gr
    from gradio.utils import get_upload_folder
    from gradio_client.utils import is_file_obj_with_meta, traverse

    def check(file: dict) -> None:
        if not Path(file["path"]).resolve().is_relative_to(Path(get_upload_folder()).resolve()):
            raise gr.Error("a file that was not uploaded here; upload it", print_exception=False)

    class OwnFilesOnly(gr.Blocks):
        async def preprocess_data(self, block_fn: Any, inputs: list[Any], *others: Any, **more: Any) -> list[Any]:
            traverse(inputs, check, is_file_obj_with_meta)
            return await super().preprocess_data(block_fn, inputs, *others, **more)

    return OwnFilesOnly
