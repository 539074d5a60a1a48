"""Whether the model hub answers, asked once and quickly."""

from __future__ import annotations

ANSWER_SECONDS = 10.0


def hub_options(name: str) -> dict[str, bool]:
    """Options for `from_pretrained(name)`: the local copy alone where the hub cannot be reached.

    transformers asks five times for each file, with growing pauses, before it gives up; that is most of
    a minute without a word.
    """
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        HfApi().model_info(name, timeout=ANSWER_SECONDS)
    except (httpx2.TransportError, OfflineModeIsEnabled):
        return {"local_files_only": True}
    except (HfHubHTTPError, HFValidationError):
        return {}  # It answered: what it has against the name, from_pretrained says better.
    return {}
