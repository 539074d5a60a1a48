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
        given = json.loads(text)
        if not isinstance(given, dict) or not isinstance(given.get("model_type"), str):
            raise ValueError("no model_type")
    except (OSError, ValueError) as error:
        place = f"--model {model}: {file}"
        raise UserError(
            f"{place}: {error}; expected a {CONFIG} as transformers writes it"
        ) from None
    if given.get("quantization_config"):
        raise UserError(
            f"--model {model}: its weights are quantised and cannot be trained; "
            "name the original model"
        )
    own_code = None
    if "AutoConfig" in (given.get("auto_map") or ()):
        if trust_remote_code:
            own_code = source
        elif not _transformers_knows(given["model_type"]):
            raise UserError(
                f"--model {model}: {given['model_type']} needs the model's own code, "
                "which is not run by default; give --trust-remote-code once you have read it"
            )
    try:
        return _shape(text, own_code)
    except UserError as error:
        raise UserError(f"--model {model}: {error}") from None


def _local_config(path: Path) -> Path:
    """The configuration that a path means: a file, or the one in a model's or a run's folder."""
    in_run = path / "model" / CONFIG
    # A run folder's own `config.json` is that of the run.
    if in_run.is_file():
        return in_run
    return path / CONFIG if path.is_dir() else path


def _transformers_knows(model_type: str) -> bool:
    """Whether transformers has code for models of this type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return model_type in CONFIG_MAPPING_NAMES


@cache
def shape_recorded(config: str) -> Shape | None:
    """The shape of a recorded model, whose configuration is given as JSON; None where it is not
    available here."""
    given = json.loads(config)
    for name, known in known_models().items():
        # Rates and scales change no tensor.
        sizes = {key: size for key, size in known.items() if not isinstance(size, float | dict)}
        if all(given.get(key) == size for key, size in sizes.items()):
            return shape_named(name)
    # A configuration that names no type is no model's.
    if "model_type" not in given:
        return None
    with contextlib.suppress(UserError, ImportError):
        return _shape(config, None)
    return None


def _from_hub(model: str) -> Path:
    """The `config.json` of a hub id: from the local cache, else from the hub."""
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
    """The shape of a configuration; a pass that is not stored yet is traced when it is asked for.

    Args:
        folder: folder or hub id whose own code may run, if any.
        known: the model's known name, if its facts are shipped.
    """

    def cached() -> Path:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        key = json.dumps((config, folder, SCHEMA, version("torch"), version("transformers")))
        return root / "zeropods" / "plan" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"

    def keep() -> None:
        # Where no cache can be written, the model is traced each time.
        with contextlib.suppress(OSError):
            write_json(cached(), found)

    def saved(pass_name: str) -> Saved:
        if known and pass_name not in found["saved"]:
            # The usual passes are shipped; others were kept where they were traced.
            with contextlib.suppress(OSError, ValueError):
                kept = json.loads(cached().read_text(encoding="utf-8"))
                found["saved"] = {**kept["saved"], **found["saved"]}
        if pass_name not in found["saved"]:
            from zeropods.plan import meta_model

            found["saved"][pass_name] = meta_model.saved(config, folder, pass_name)
            keep()
        return Saved(**found["saved"][pass_name])

    try:
        if known:
            found = json.loads(FACTS.read_text(encoding="utf-8"))[known]
        else:
            found = json.loads(cached().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        from zeropods.plan import meta_model

        found = meta_model.facts(config, folder)
        keep()
    weights = [Weight(size, kind) for size, kind in found["facts"]["weights"]]
    return Shape(**{**found["facts"], "weights": weights}, trace=saved)
