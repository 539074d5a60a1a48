"""GPUs as they are published: which card a name means, its peaks, memory and BLAS workspace.

`gpus.csv` holds the figures, and says where each is from; docs/sources.md lists these sources.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, lru_cache
from pathlib import Path

from zeropods.tables import GIB, MIB

GIGA, TERA = 1e9, 1e12
FILE = Path(__file__).with_name("gpus.csv")
PRECISIONS = ("fp32", "fp16", "bf16")
MAKERS = frozenset({"nvidia", "geforce", "tesla", "amd", "instinct", "generation", "gpu"})
"""Words that a name may have or lack without meaning another card."""
VARIANTS = frozenset({"mig", "laptop", "d", "ti", "super", "fhhl", "3e", "ws"})
"""Words that mark another card than the one named: a slice, a mobile or a cut-down variant."""
SLICE = re.compile(r"\b\d+g\.(?P<mig>\d+)gb\b|-(?P<vgpu>\d+)[abcq]$", re.IGNORECASE)
"""Part of a name that says how many GB a slice of a GPU has: a MIG profile, `1g.10gb`, or that of a
vGPU, `A40-8Q`."""
SIZE = re.compile(r"(\d+)(?:gib|gb|g)?")
"""A word that may be a size in GB: `80`, `80GB`, `144G`."""
NEAR, MOST_NEAR = 0.6, 6
"""Least likeness of a name that is near to another, as `difflib` counts it; most names that a
message lists."""
AMPERE = (8, 0)
"""Compute capability of the first GPUs with BF16 arithmetic and FlashAttention-2."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """A GPU with its published figures, those of a whole one."""

    name: str
    """Name by which people know it, `RTX 3090`; where several have it with a size, `A100-80GB`."""
    words: tuple[str, ...]
    """Words of that name in lower case, without a size."""
    sizes: tuple[int, ...]
    """Numbers of GB that a name of this card may have in it. Not all are sizes of the GPU's memory:
    `GH200 480GB` names that of its processor."""
    capability: tuple[int, int] | None
    """CUDA's compute capability; None for a GPU of AMD."""
    memory_bytes: int
    """Bytes of memory as NVML and `nvidia-smi` show them, with drivers from R510 on. Earlier ones
    left out what they reserve for themselves, up to 2 %."""
    bandwidth: float
    """Bytes per second between the GPU and its memory."""
    host_link: float | None
    """Bytes per second between the GPU and its host, each way, as published: PCIe with 16 lanes, or
    NVLink to a processor on the same board; None where the data sheet does not say."""
    flops: dict[str, float]
    """Dense FLOP/s by precision, where the GPU has it: without sparsity, FP32 outside the tensor
    cores (what PyTorch does by default, without TF32), FP16 and BF16 in them, added up in FP32."""


@cache
def cards() -> tuple[Card, ...]:
    """All GPUs, in the order of `gpus.csv`. The order counts: a name that contains the words of
    several cards means the first of them."""
    with FILE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    all_names = [row["name"] for row in rows]
    all_cards = list[Card]()
    for row in rows:
        name = row["name"]
        sizes = tuple(int(size) for size in row["sizes"].split())
        has_namesakes = all_names.count(name) > 1
        flops = {
            precision: float(row[precision]) * TERA for precision in PRECISIONS if row[precision]
        }
        capability = None
        if row["capability"]:
            major, minor = row["capability"].split(".")
            capability = (int(major), int(minor))
        all_cards.append(
            Card(
                name=f"{name}-{sizes[0]}GB" if has_namesakes else name,
                words=_words(name),
                sizes=sizes,
                capability=capability,
                memory_bytes=int(row["mib"]) * MIB,
                bandwidth=float(row["terabytes_per_second"]) * TERA,
                host_link=float(row["host_link"]) * GIGA if row["host_link"] else None,
                flops=flops,
            )
        )
    return tuple(all_cards)


# The figures of the GPU that a name means.
#
# A name is one that torch and NVML give, `NVIDIA A100-SXM4-40GB`, or a short one: `A100-40GB`,
# `a100_40gb`, `3090`.


def published_flops(gpu: str, precision: str) -> float | None:
    """Dense FLOP/s of a whole GPU; None where unknown, or where it does not have the precision.

    Args:
        precision: `fp32` (what a run uses: without TF32), `bf16` or `fp16`.
    """
    card = find_card(gpu)
    return None if card is None else card.flops.get(precision)


def memory_bytes(gpu: str) -> int | None:
    """Bytes of a GPU's memory; None where unknown. Of a GPU at hand NVML knows them better.

    They are those of the card that is named. A slice has the GB of its profile, `1g.10gb`, of 10^9
    bytes each: NVML shows 2 to 5 % more of most profiles, and up to 11 % less of some
    (NVIDIA/mig-parted#139 and #166, NVIDIA/gpu-operator#900 and #1303). A card that is not known
    here has the GiB in its name, `A100-SXM-64GB`.
    """
    profile = SLICE.search(gpu)
    if profile is not None:
        return round(GIGA * int(profile["mig"] or profile["vgpu"]))
    card = find_card(gpu)
    if card is not None:
        return card.memory_bytes
    gib = re.search(r"(\d+) ?GI?B", gpu, re.IGNORECASE)
    return None if gib is None else int(gib[1]) * GIB


def memory_bandwidth(gpu: str) -> float | None:
    """Bytes per second between a GPU and its memory, as published; None for an unknown GPU."""
    card = find_card(gpu)
    return None if card is None else card.bandwidth


def published_host_link(gpu: str) -> float | None:
    """Bytes per second between a GPU and its host, each way, as published; None where unknown. A
    variant or a slice has the link of its card."""
    card = _relative(gpu)
    return None if card is None else card.host_link


def is_before_ampere(gpu: str) -> bool:
    """Whether a GPU is known to be older than Ampere: without BF16 arithmetic and FlashAttention-2.

    Variants of a card are of its generation. A GPU of AMD, or one that is not known, is not older.
    """
    card = _relative(gpu)
    return card is not None and card.capability is not None and card.capability < AMPERE


# Memory that PyTorch gives to cuBLAS to work in.
#
# Source: PyTorch 2.13, aten/src/ATen/cuda/CublasHandlePool.cpp, `parseChosenWorkspaceSize`, and the
# map of workspaces by handle and stream in its CUDAContextLight.h. They come from PyTorch's own
# allocator at the first matrix product, and stay. cuBLASLt works in the same memory
# (TORCH_CUBLASLT_UNIFIED_WORKSPACE, on since pull requests 168175 and 175879; before, it had 1 MiB
# of its own). CUBLAS_WORKSPACE_CONFIG changes the size.

USUAL_WORKSPACE = 2 * 4096 * 1024 + 8 * 16 * 1024
"""Bytes of `:4096:2:16:8`, 8.1 MiB."""
LARGE_WORKSPACE = 8 * 4096 * 1024
"""Bytes for Hopper, 32 MiB, and for Blackwell since PyTorch's pull request 175344 (2026-02)."""
LARGE_GENERATIONS = (9, 10, 12)
"""Major compute capabilities of Hopper and Blackwell."""
AMD_WORKSPACE = (128 + 76) * MIB
"""Bytes of hipBLAS on MI300X (gfx942), and of hipBLASLt, which under ROCm has memory of its own."""


def workspace_bytes(gpu: str) -> int:
    """Bytes of the workspace that PyTorch keeps for each thread that multiplies matrices on a GPU.

    On a GPU that is not known here, the size is that of most.
    """
    card = _relative(gpu)
    if card is None:
        return USUAL_WORKSPACE
    if card.capability is None:
        return AMD_WORKSPACE
    return LARGE_WORKSPACE if card.capability[0] in LARGE_GENERATIONS else USUAL_WORKSPACE


# Which card a name means.


def find_card(gpu: str) -> Card | None:
    """The card that a name means; None where it means none of `gpus.csv`, several, or a variant.

    Of cards that differ only in their sizes it is the first.
    """
    meant = _meant(gpu)
    different_words = {card.words for card in meant}
    return meant[0] if len(different_words) == 1 else None


def known_gpus(precision: str = "fp32") -> str:
    """Names of the GPUs that have a precision, as text for people."""
    return ", ".join(card.name for card in cards() if precision in card.flops)


def names_near(gpu: str) -> list[str]:
    """Names of at most `MOST_NEAR` cards: those that a name means, where it means any; else those
    that share a word with it; else those that are spelled much like it."""
    near = list(_meant(gpu))
    distinctive = [word for word in _words(gpu) if word not in MAKERS | VARIANTS | {"rtx"}]
    if not near:
        near = [card for card in cards() if not set(distinctive).isdisjoint(card.words)]
    if not near:
        compact = "".join(distinctive).removeprefix("rtx")
        spellings = {card.name: "".join(card.words).removeprefix("rtx") for card in cards()}
        # The most alike come first.
        likely = get_close_matches(compact, set(spellings.values()), cutoff=NEAR)
        for spelling in likely:
            near += [card for card in cards() if spellings[card.name] == spelling]
    return [card.name for card in near[:MOST_NEAR]]


def is_ambiguous(gpu: str) -> bool:
    """Whether a name means several cards, as `6000` does."""
    return len({card.words for card in _meant(gpu)}) > 1


def words(gpu: str) -> frozenset[str]:
    """The words by which a GPU's name is recognised, however it is written."""
    return frozenset(_words(gpu))


@lru_cache(maxsize=256)
def _meant(gpu: str) -> tuple[Card, ...]:
    """The cards that a name may mean: the first one all of whose words it has, else all that have
    its words, else all with its spelling. Empty for a variant or a slice, which is another card."""
    words_of_name = words(gpu)
    if words_of_name & VARIANTS or SLICE.search(gpu):
        return ()
    for card in cards():
        if words_of_name.issuperset(card.words) and _allows_sizes(card, words_of_name):
            return (card,)
    return tuple(_with_words(words_of_name) or _spelled_like(gpu))


def _with_words(words_of_name: frozenset[str]) -> list[Card]:
    """The cards that have all words of a short name, makers and sizes left out, and that come in
    these sizes; without those that have all words of another of them and more: `PRO 6000` does not
    mean its Server or its Max-Q variant."""
    sizes = {word for word in words_of_name if re.fullmatch(r"\d+gi?b", word)}
    short_name = words_of_name - MAKERS - sizes
    if not short_name:
        return []
    candidates = [card for card in cards() if short_name.issubset(card.words)]
    plain = list[Card]()
    for card in candidates:
        is_longer = any(set(other.words) < set(card.words) for other in candidates)
        if not is_longer and _allows_sizes(card, sizes):
            plain.append(card)
    return plain


def _spelled_like(gpu: str) -> list[Card]:
    """The cards whose names are this one where it is written in one word: `rtx4090`, `a10040gb`."""
    compact = _compact(gpu)
    alike = list[Card]()
    for card in cards():
        spelling = "".join(card.words)
        for beginning in (spelling, spelling.removeprefix("rtx")):
            if not compact.startswith(beginning):
                continue
            ending = compact.removeprefix(beginning)
            size = SIZE.fullmatch(ending)
            has_its_size = size is not None and int(size[1]) in card.sizes
            if (ending == "" or has_its_size) and card not in alike:
                alike.append(card)
    return alike


def _relative(gpu: str) -> Card | None:
    """A card of a GPU's generation: itself, or the one of which it is a variant or a slice; None
    for an unknown GPU."""
    card = find_card(gpu)
    if card is not None:
        return card
    words_of_name = words(gpu)
    return next((card for card in cards() if words_of_name.issuperset(card.words)), None)


def _allows_sizes(card: Card, words_of_name: frozenset[str] | set[str]) -> bool:
    """Whether all numbers of GB in a name are numbers that a name of this card may have."""
    for word in words_of_name.difference(card.words):
        size = SIZE.fullmatch(word)
        if size is not None and int(size[1]) not in card.sizes:
            return False
    return True


def _words(gpu: str) -> tuple[str, ...]:
    """The words of a name in lower case, in their order: runs of letters and digits."""
    return tuple(re.findall(r"[a-z0-9]+", gpu.lower()))


def _compact(gpu: str) -> str:
    """A name as one word, without its makers'."""
    compact = "".join(_words(gpu))
    makers = "|".join(sorted(MAKERS))
    return re.sub(f"^(?:{makers})+", "", compact)
