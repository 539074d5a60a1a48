"""Where the data sets are published, what proves each file, and which of its members are kept.

Every file is proven by a digest of its whole content, so it does not matter which server sent it:

* WikiSQL: the git blob hash of `data.tar.bz2` in the publisher's repository. The release also carries a
  SQLite copy of each split's tables; those are left out, since the tables are read from
  SPLIT.tables.jsonl.
* SQuAD v1.1 (87,599 train and 10,570 dev questions): SHA-256 as ParlAI and others pin it. That of dev
  was also computed from the file; that of train is taken from there.
* WikiText-2, word level with `<unk>`: SHA-256 of `wikitext-2-v1.zip` as several public loaders pin it
  (not computed from the archive itself). The bucket of its first publisher answers 403 since 2024; the
  address is that of the paper's first author.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zeropods.data.checksum import Checksum

SPLITS = ("train", "dev", "test")


@dataclass(frozen=True)
class Source:
    """One file at a publisher."""

    url: str
    checksum: Checksum
    members: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Path in the archive -> name in the folder; empty where the file is no archive and is kept as it is."""

    @property
    def filename(self) -> str:
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class Dataset:
    """A data set: its files, which together become one folder."""

    name: str
    sources: tuple[Source, ...]


def _wikisql_members() -> dict[str, str]:
    names = [f"{split}.{suffix}" for split in SPLITS for suffix in ("jsonl", "tables.jsonl")]
    return {f"data/{name}": name for name in names}


_SQUAD = "https://rajpurkar.github.io/SQuAD-explorer/dataset"

WIKISQL = Dataset(
    "wikisql",
    (
        Source(
            "https://github.com/salesforce/WikiSQL/raw/master/data.tar.bz2",
            Checksum("git-blob", "941de4cb2ad5fa7aeb2e37d314468636ce070af7"),
            _wikisql_members(),
        ),
    ),
)

SQUAD = Dataset(
    "squad",
    (
        Source(
            f"{_SQUAD}/train-v1.1.json",
            Checksum("sha256", "3527663986b8295af4f7fcdff1ba1ff3f72d07d61a20f487cb238a6ef92fd955"),
        ),
        Source(
            f"{_SQUAD}/dev-v1.1.json",
            Checksum("sha256", "95aa6a52d5d6a735563366753ca50492a658031da74f301ac5238b03966972c9"),
        ),
    ),
)

WIKITEXT_2 = Dataset(
    "wikitext-2",
    (
        Source(
            "https://wikitext.smerity.com/wikitext-2-v1.zip",
            Checksum("sha256", "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c"),
            {f"wikitext-2/wiki.{split}.tokens": f"{split}.txt" for split in ("train", "valid", "test")},
        ),
    ),
)

DATASETS = {dataset.name: dataset for dataset in (WIKISQL, SQUAD, WIKITEXT_2)}
