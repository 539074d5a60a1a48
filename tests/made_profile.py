"""Reports of the flops profiler in the form of deepspeed 0.19.8, of a small language model whose figures are known."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

SCALES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K"), (1.0, ""), (1e-3, "m"), (1e-6, "u"))
UNIX_SECONDS = 1_795_000_000.0
NOTES = (
    "Each module profile is listed after its name in the following order: \n"
    "params, percentage of total params, MACs, percentage of total MACs, fwd latency, ...\n\n"
    "Note: 1. A module can have torch.nn.module or torch.nn.functional to compute logits ...\n"
    "2. Number of floating-point operations is a theoretical estimation ...\n"
    "3. The fwd latency listed in the top module's profile is directly captured ...\n"
)
NOTATIONS = (
    "Notations:\ndata parallel size (dp_size), model parallel size(mp_size),\n"
    "step (weights update latency), iter latency (sum of fwd, bwd and step latency)\n"
)


@dataclass(frozen=True, kw_only=True)
class Made:
    """A module of a made report."""

    name: str
    class_name: str
    parameters: float = 0.0
    macs: float = 0.0
    seconds: float = 0.001
    details: str = ""
    children: tuple[Made, ...] = ()
    silent: bool = False
    """Prints no figures, as a `ModuleList`."""

    def text(self, root: Made, indent: str = "") -> str:
        """As torch prints it."""
        name = f"({self.name}): " if self.name else ""
        figures = ", ".join(part for part in (self._figures(root), self.details) if part)
        if not self.children:
            return f"{indent}{name}{self.class_name}({figures})\n"
        own = "" if self.silent else f"{indent}  {figures}\n"
        below = "".join(child.text(root, indent + "  ") for child in self.children)
        return f"{indent}{name}{self.class_name}(\n{own}{below}{indent})\n"

    def _figures(self, root: Made) -> str:
        if self.silent:
            return ""
        percents = (
            f"{round(100 * part / whole, 2):g}%"
            for part, whole in (
                (self.parameters, root.parameters), (self.macs, root.macs), (self.seconds, root.seconds)
            )
        )  # fmt: skip
        params, macs, latency = percents
        return (
            f"{printed(self.parameters).strip()} = {params} Params, {printed(self.macs)}MACs = {macs} MACs, "
            f"{printed(self.seconds)}s = {latency} latency, {printed(2 * self.macs / self.seconds)}FLOPS"
        )


@dataclass(frozen=True, kw_only=True)
class Model:
    """A language model of one width: `layers` blocks of attention and feed-forward, the output tied to the input."""

    rows: int = 2
    tokens: int = 4
    """A row."""
    width: int = 8
    vocabulary: int = 16
    layers: int = 1
    twice: bool = False
    """Linear layers counted twice, as under ZeRO-3."""
    sharded: bool = False
    """The embedding's parameters lie on other ranks."""
    clock: bool = True
    """The root's latency is the time of day."""
    world_size: int = 1
    lines: dict[str, str] = field(default_factory=dict)
    """Lines of the summary to change, by their label; left out where empty."""

    def report(self, detailed: bool = True) -> str:
        """The whole report."""
        root = self.tree()
        summary = "".join(f"{label + ': ':<70}  {text:<8}\n" for label, text in self.summary(root).items() if text)
        depth = "\n".join(
            f"    {name:<11} - {{'{root.class_name}': '{text}'}}"
            for name, text in (
                ("params", printed(root.parameters).strip()),
                ("MACs", f"{printed(root.macs)}MACs"),
                ("fwd latency", f"{printed(root.seconds)}s"),
            )
        )
        tree = f"\n{' Detailed Profile per GPU ':-^80}\n{NOTES}\n{root.text(root)}" if detailed else ""
        return (
            f"\n{' DeepSpeed Flops Profiler ':-^78}\nProfile Summary at step 2:\n{NOTATIONS}\n{summary}\n"
            f"{' Aggregated Profile per GPU ':-^84}\n"
            "Top 1 modules in terms of params, MACs or fwd latency at different model depths:\n"
            f"depth 0:\n{depth}\n{tree}{'-' * 78}\n"
        )

    def tree(self) -> Made:
        """The modules with their figures."""
        blocks = tuple(self._block(number) for number in range(self.layers))
        table = Made(
            name="table",
            class_name="Embedding",
            parameters=0 if self.sharded else self.vocabulary * self.width,
            details=f"{self.vocabulary}, {self.width}",
        )
        head = replace(self._linear("head", self.width, self.vocabulary), parameters=table.parameters)
        listed = _above("blocks", "ModuleList", blocks)
        root = _above("", "TinyLM", (table, replace(listed, silent=True, seconds=listed.seconds - 0.0005), head))
        seconds = UNIX_SECONDS if self.clock else root.seconds
        return replace(root, parameters=root.parameters - table.parameters, seconds=seconds)

    def summary(self, root: Made) -> dict[str, str]:
        """The summary's lines: 20 ms forward, 20 ms backward, 10 ms step."""
        flops = 2 * root.macs
        lines = {
            "world size": f"{self.world_size}",
            "data parallel size": f"{self.world_size}",
            "model parallel size": "1",
            "batch size per GPU": f"{self.rows}",
            "params per GPU": printed(root.parameters).strip(),
            "params of model = params per GPU * mp_size": printed(root.parameters).strip(),
            "fwd MACs per GPU": f"{printed(root.macs)}MACs",
            "fwd flops per GPU": printed(flops),
            "fwd flops of model = fwd flops per GPU * mp_size": printed(flops),
            "fwd latency": "20 ms",
            "fwd FLOPS per GPU = fwd flops per GPU / fwd latency": f"{printed(flops / 0.02)}FLOPS",
            "bwd latency": "20 ms",
            "bwd FLOPS per GPU = 2 * fwd flops per GPU / bwd latency": f"{printed(2 * flops / 0.02)}FLOPS",
            "fwd+bwd FLOPS per GPU = 3 * fwd flops per GPU / (fwd+bwd latency)": f"{printed(3 * flops / 0.04)}FLOPS",
            "step latency": "10 ms",
            "iter latency": "50 ms",
            "FLOPS per GPU = 3 * fwd flops per GPU / iter latency": f"{printed(3 * flops / 0.05)}FLOPS",
            "samples/second": f"{round(self.rows * self.world_size / 0.05, 2)}",
        }
        return lines | self.lines

    def _block(self, number: int) -> Made:
        layers = tuple(self._linear(name, self.width, self.width) for name in "qkvo")
        attention = _above("attention", "Attention", layers)
        products = 2 * self.rows * self.tokens**2 * self.width
        norm = Made(name="norm", class_name="Norm", parameters=self.width)
        wide = (self._linear("up", self.width, 4 * self.width), self._linear("down", 4 * self.width, self.width))
        parts = (
            norm,
            replace(attention, macs=attention.macs + products),
            replace(norm, name="norm2"),
            _above("mlp", "Mlp", wide),
        )
        return _above(str(number), "Block", parts)

    def _linear(self, name: str, wide: int, narrow: int) -> Made:
        macs = self.rows * self.tokens * wide * narrow * (2 if self.twice else 1)
        details = f"in_features={wide}, out_features={narrow}, bias=False"
        return Made(name=name, class_name="Linear", parameters=wide * narrow, macs=macs, details=details)


def printed(number: float) -> str:
    """`number_to_string` of DeepSpeed's profiler: two decimals and a prefix."""
    size, prefix = next((each for each in SCALES if number >= each[0] or (number == 0 and each[0] == 1.0)), SCALES[-1])
    return f"{round(number / size, 2):g} {prefix}"


def _above(name: str, class_name: str, children: tuple[Made, ...]) -> Made:
    """A module of these, half a millisecond slower than they are."""
    return Made(
        name=name,
        class_name=class_name,
        parameters=sum(child.parameters for child in children),
        macs=sum(child.macs for child in children),
        seconds=sum(child.seconds for child in children) + 0.0005,
        children=children,
    )
