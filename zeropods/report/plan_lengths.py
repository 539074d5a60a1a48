"""Plans of a causal model at several lengths: what grows with the length, and what with its square."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zeropods.plan.any_request import request_for
from zeropods.plan.causal_request import CausalRequest
from zeropods.plan.estimate import Estimate, plan
from zeropods.report.plan_tables import GIB, gib, name, rate
from zeropods.report.plot import Plot, drawn, new_axes
from zeropods.report.table import Table


@dataclass(frozen=True)
class LengthPlans:
    """The estimates of one request at each length, in the same order."""

    request: CausalRequest
    estimates: dict[int, tuple[Estimate, ...]]
    """By tokens a row."""

    @property
    def table(self) -> Table:
        """A line for each technique, way of training and length."""
        request = self.request
        title = f"{request.model}: {request.batch_size} rows a process, {request.precision}"
        return Table.of([self._line(*each) for each in self._each()], title)

    @property
    def plot(self) -> Plot:
        """Memory of one GPU over the length: a line for each technique and way of training, alike ones together."""
        figure, (axes,) = new_axes(8, 4.2)
        lengths = list(self.estimates)
        for sizes, names in self._curves().items():
            axes.plot(lengths, sizes, marker="o", label="\nor ".join(names))
        size = self.request.gpu_memory_bytes / GIB
        axes.axhline(size, color="black", linestyle="--", linewidth=1)
        axes.annotate(
            f"the GPU: {size:g} GiB", (lengths[0], size), (0, 3), textcoords="offset points", fontsize="small"
        )
        axes.set(xlabel="tokens a row", ylabel="GiB of one GPU", yscale="log", xticks=lengths)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize="small")
        figure.suptitle(f"{self.request.model}: planned memory by length")
        return drawn(figure, f"planned memory of one GPU at {', '.join(map(str, lengths))} tokens")

    def _repr_html_(self) -> str:
        return self.table.to_html()

    def __repr__(self) -> str:
        return str(self.table)

    def _curves(self) -> dict[tuple[float, ...], list[str]]:
        """Names by sizes in GiB, of each length."""
        found: dict[tuple[float, ...], list[str]] = {}
        for of_all in zip(*self.estimates.values(), strict=True):
            sizes = tuple(each.memory.device_bytes / GIB for each in of_all)
            found.setdefault(sizes, []).append(name(of_all[0].to_json()))
        return found

    def _each(self) -> Iterator[tuple[int, Estimate]]:
        for number in range(len(next(iter(self.estimates.values())))):
            yield from ((length, of_length[number]) for length, of_length in self.estimates.items())

    def _line(self, length: int, estimate: Estimate) -> dict[str, Any]:
        parts = estimate.memory.parts()
        states = sum(parts[part] for part in ("parameters", "gradients", "optimizer"))
        return {
            "way": name(estimate.to_json()),
            "tokens": f"{length:,}",
            "states": gib(states),
            "buffers": gib(parts["buffers"]),
            "activations": gib(parts["activations"]),
            "total (GiB)": gib(parts["total"]),
            "fits": "yes" if estimate.fits else "no",
            "tokens/s": rate(estimate.tokens_per_second),
        }


def length_plans(model: str, lengths: Sequence[int], **asked: Any) -> LengthPlans:
    """Plan a causal model at each of these lengths.

    Args:
        asked: fields of `CausalRequest`.

    Raises:
        UserError: a field is wrong, or the model is no causal one.
    """
    request = request_for(model, seq_length=lengths[0], **asked)
    assert isinstance(request, CausalRequest)
    plans = {length: plan(replace(request, seq_length=length)).estimates for length in lengths}
    return LengthPlans(request, plans)
