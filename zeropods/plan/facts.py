"""Facts about a model: shipped for the known names, else found by its configuration and kept in a
cache."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from functools import cache
from importlib.metadata import version
from pathlib import Path

from zeropods.errors import UserError
from zeropods.files import is_path, write_json
from zeropods.plan.known_models import known_models, known_name
from zeropods.plan.workload import Saved, Shape, Weight

SCHEMA = 5
"""Version of what is kept in the cache."""
CONFIG = "config.json"
FACTS = Path(__file__).with_name("facts.json")
"""File with the facts that `plan.meta_model` found about the known names; it is shipped."""


def shape_named(model: str) -> Shape:
    """The shape of a known name; `UserError` where the name is unknown."""
    name = known_name(model)
    return _shape(json.dumps(known_models()[name]), None, name)


# Other models: by their configuration.


def shape_for(model: str, trust_remote_code: bool = False) -> Shape:
    """The shape of a well-known name, a hub id, a run or model folder, or a `config.json`.

    A configuration from the hub is downloaded at the first call. A model that is not known by name
    is traced at the first call, and its facts are kept in the user's cache.

    Args:
        model: which of them; a file or folder that exists comes before a name.
        trust_remote_code: whether code that comes with the model may run.

    Raises:
        UserError: the model is none of them, cannot be read, or cannot be trained here.
    """
    file = _local_config(Path(model))
    source = model
    if file.is_file():
        source = str(file.parent)
    else:
        with contextlib.suppress(UserError):
            return shape_named(model)
        file = _from_hub(model)
    try:
        text = file.read_text(encoding="utf-8")
        config = json.loads(text)
        if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
            raise ValueError("no model_type")
    except (OSError, ValueError) as error:
        expected = f"expected a {CONFIG} as transformers writes it"
        raise UserError(f"--model {model}: {file}: {error}; {expected}") from None
    if config.get("quantization_config"):
        raise UserError(
            f"--model {model}: its weights are quantised and cannot be trained; "
            "name the original model"
        )
    folder_of_code = None
    has_own_code = "AutoConfig" in (config.get("auto_map") or ())
    if has_own_code:
        if trust_remote_code:
            folder_of_code = source
        elif not _transformers_knows(config["model_type"]):
            raise UserError(
                f"--model {model}: {config['model_type']} needs the model's own code, "
                "which is not run by default; give --trust-remote-code once you have read it"
            )
    try:
        return _shape(text, folder_of_code)
    except UserError as error:
        raise UserError(f"--model {model}: {error}") from None


def _local_config(path: Path) -> Path:
    """The file of the configuration that a path means: the path itself, or the one in a model's or
    a run's folder. It need not exist."""
    # First: a run folder's own `config.json` is that of the run.
    in_run = path / "model" / CONFIG
    if in_run.is_file():
        return in_run
    return path / CONFIG if path.is_dir() else path


def _transformers_knows(model_type: str) -> bool:
    """Whether transformers has code for models of this type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return model_type in CONFIG_MAPPING_NAMES


@cache
def shape_recorded(config: str) -> Shape | None:
    """The shape of the model that a run has recorded: that of a known model of the same sizes,
    whose facts are shipped, else as a pass of the model is traced.

    Args:
        config: its configuration, as JSON.

    Returns:
        The shape; None where no model is known and the configuration is no model's, or the model
        cannot be traced, for want of transformers too.
    """
    recorded = json.loads(config)
    for name, known in known_models().items():
        # Floats are rates, and dicts hold scales: neither changes a tensor's size.
        sizes = {key: value for key, value in known.items() if not isinstance(value, float | dict)}
        if all(recorded.get(key) == value for key, value in sizes.items()):
            return shape_named(name)
    if "model_type" not in recorded:
        return None
    # Whoever summarises a run goes on without its shape.
    with contextlib.suppress(UserError, ImportError):
        return _shape(config, folder=None)
    return None


def _from_hub(model: str) -> Path:
    """The `config.json` of a hub id: from the hub's cache on this machine, else downloaded.

    Raises:
        UserError: the name is no hub id, or the file cannot be fetched.
    """
    if "/" not in model or is_path(model):
        known = ", ".join(known_models())
        raise UserError(
            f"--model {model}: expected a hub id such as organisation/name, a {CONFIG}, "
            f"a folder with one, or one of {known}"
        )
    from httpx2 import TransportError
    from huggingface_hub import HfApi, try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(model, CONFIG)
        if isinstance(cached, str):
            return Path(cached)
        # Ask the hub first: a file is requested five times, with growing pauses, before it is given
        # up.
        HfApi().model_info(model, timeout=10.0)
        return Path(HfApi().hf_hub_download(model, CONFIG))
    except (OSError, ValueError, TransportError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"--model {model}: its {CONFIG} cannot be fetched from the hub ({reason[:120]}); "
            "give that file, or a folder that contains it"
        ) from None


# Facts about a model: shipped, or kept in the user's cache by configuration and versions.


@cache
def _shape(config: str, folder: str | None, known: str | None = None) -> Shape:
    """The shape of a configuration.

    Its facts are read from what is shipped or from the user's cache; else the model is traced, and
    they are written to the cache. A pass that is not stored yet is traced when it is asked for.

    Args:
        config: text of a `config.json`.
        folder: folder or hub id whose own code may run, if any.
        known: the model's known name, if its facts are shipped.

    Raises:
        UserError: the configuration makes no model that can be trained, or traced.
    """

    def write_cache() -> None:
        # Where no cache can be written, the model is traced each time.
        with contextlib.suppress(OSError):
            write_json(_cache_file(config, folder), document)

    def trace(pass_name: str) -> Saved:
        passes = document["saved"]
        if known and pass_name not in passes:
            # The usual passes are shipped; others are in the cache where they were traced. Without
            # a cache that can be read, they are traced below.
            with contextlib.suppress(OSError, ValueError):
                cached = json.loads(_cache_file(config, folder).read_text(encoding="utf-8"))
                passes.update({**cached["saved"], **passes})
        if pass_name not in passes:
            # Only here, and below: it loads torch and transformers, which takes seconds.
            from zeropods.plan import meta_model

            passes[pass_name] = meta_model.saved(config, folder, pass_name)
            write_cache()
        return Saved(**passes[pass_name])

    try:
        if known:
            document = json.loads(FACTS.read_text(encoding="utf-8"))[known]
        else:
            document = json.loads(_cache_file(config, folder).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        from zeropods.plan import meta_model

        document = meta_model.facts(config, folder)
        write_cache()
    weights = [Weight(size, kind) for size, kind in document["facts"]["weights"]]
    return Shape(**{**document["facts"], "weights": weights}, trace=trace)


def _cache_file(config: str, folder: str | None) -> Path:
    """The file in the user's cache for a configuration, with these versions of torch and
    transformers; it need not exist."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    key = json.dumps((config, folder, SCHEMA, version("torch"), version("transformers")))
    digest = hashlib.sha256(key.encode()).hexdigest()
    return root / "zeropods" / "plan" / f"{digest[:32]}.json"
