"""Text of a data set at the hub, streamed: nothing is downloaded before it is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from zeropods.data.articles import articles
from zeropods.data.corpus_splits import SPLITS, WORDS, split_by_hash
from zeropods.data.hub import ANSWER_SECONDS
from zeropods.data.json_lines import encodable
from zeropods.errors import UserError

if TYPE_CHECKING:
    from datasets import IterableDataset

BY_LINE = "wikitext"
"""The data set whose rows are lines, blank ones without their ` \\n`, as they stood in the published files."""


def hub_name(name: str, config: str | None) -> str:
    """What a manifest calls a data set at the hub."""
    return f"{name} {config or ''}".strip()


def open_hub(name: str, config: str | None, field: str) -> HubCorpus:
    """The data set as it is at the hub now; `UserError` where the hub does not answer or has none of that name."""
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        revision = HfApi().dataset_info(name, timeout=ANSWER_SECONDS).sha
    except (httpx2.TransportError, OfflineModeIsEnabled, OSError) as error:
        raise UserError(f"{_nowhere(name)} cannot be reached ({_first_line(error)}); name a folder of text") from None
    except (HfHubHTTPError, HFValidationError) as error:
        raise UserError(f"{_nowhere(name)} did not give it ({_first_line(error)}); name a folder of text") from None
    return HubCorpus(name, config, field, revision)


class HubCorpus:
    """Documents of a data set by split: rows, or articles where rows are lines."""

    def __init__(self, name: str, config: str | None, field: str, revision: str | None) -> None:
        self._name, self._config, self._field, self._revision = name, config, field, revision
        self.hashes = {hub_name(name, config): revision or "local"}
        self._theirs = self._split_names()
        if "train" not in self._theirs:
            raise UserError(f"data set {name!r}: has no split train, but {', '.join(self._theirs)}; name another")
        self._shared = list(self._theirs) == ["train"]
        self.splits = ["train", "dev"] if self._shared else [split for split in SPLITS if split in self._theirs]

    def documents(self, split: str) -> Iterator[str]:
        """The documents of a split as they are streamed."""
        import httpx2
        from huggingface_hub.errors import HfHubHTTPError

        try:
            for text in self._documents("train" if self._shared else split):
                if text.strip() and (not self._shared or split == split_by_hash(text)):
                    yield text
        except (httpx2.HTTPError, HfHubHTTPError, ConnectionError, TimeoutError) as error:
            raise UserError(
                f"data set {self._name!r}: the hub stopped answering ({_first_line(error)}); try again"
            ) from None

    def _documents(self, split: str) -> Iterator[str]:
        from datasets import load_dataset

        rows = load_dataset(
            self._name, self._config, split=self._theirs[split], streaming=True, revision=self._revision
        )
        texts = self._texts(split, rows)
        return articles(text or " \n" for text in texts) if self._by_line else texts

    @property
    def _by_line(self) -> bool:
        return self._name.rpartition("/")[2] == BY_LINE

    def _texts(self, split: str, rows: IterableDataset) -> Iterator[str]:
        for number, row in enumerate(rows, 1):
            place, text = f"data set {self._name!r}, {split}, row {number}", row.get(self._field)
            if not isinstance(text, str):
                raise UserError(
                    f"{place}: no text in {self._field!r}; name the field that holds it (--text-field), "
                    f"of {', '.join(map(repr, row))}"
                )
            yield encodable(place, self._field, text)

    def _split_names(self) -> dict[str, str]:
        """Their name of each split that we know."""
        import datasets

        try:
            names: list[Any] = datasets.get_dataset_split_names(self._name, self._config, revision=self._revision)
        except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
            raise UserError(
                f"data set {self._name!r}, configuration {self._config!r}: {_first_line(error)}; "
                "name a configuration that it has (--dataset-config)"
            ) from None
        return {WORDS[name]: name for name in map(str, names) if name in WORDS}


def _nowhere(name: str) -> str:
    return f"data {name!r}: no such folder, and the hub of data sets"


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200]
