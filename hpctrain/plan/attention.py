"""Who attends to what, and when: the work of each ring rank at each hop, and the heads of each Ulysses rank."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from hpctrain import models
from hpctrain.config import Config
from hpctrain.grid_shape import size_of
from hpctrain.layers.context.heads import kv_heads, query_heads
from hpctrain.layers.context.mask import Mask
from hpctrain.layers.context.spans import Spans, sequence_spans
from hpctrain.layers.context.tiles import tiles

MASK = Mask()  # of the models whose sequences can be cut: causal
LETTERS = {"causal": "c", "full": "f", "masked": "m"}
NOTE = (
    "hop by hop, the ring rank whose keys are there and the work with them: c causal tiles, f full, m masked; . waits"
)


@dataclass(frozen=True)
class Hop:
    """What a ring rank computes at one hop.

    Attributes: `owner` of the keys and values, a ring rank; `pairs` of query and key by kind of tile; `tiles`, their
    number by kind.
    """

    owner: int
    pairs: dict[str, int]
    tiles: dict[str, int]

    @property
    def work(self) -> int:
        return sum(self.pairs.values())


@dataclass(frozen=True)
class AttentionPlan:
    """Causal attention of one sequence, on the ranks that share it.

    Attributes:
        length: tokens of the sequence.
        choice: why there are so many ring and Ulysses ranks.
        balance: how the ring cuts the sequence.
        spans: positions that each ring rank's queries have.
        hops: [ring rank][hop].
        heads: query heads, and key and value heads, of each Ulysses rank, of those that a tensor rank has.
    """

    length: int
    choice: str
    balance: str
    spans: tuple[Spans, ...]
    hops: tuple[tuple[Hop, ...], ...]
    heads: tuple[tuple[slice, slice], ...]


def attention_plan(config: Config) -> AttentionPlan:
    """Of a configuration whose ranks share sequences.

    Raises:
        ValueError: where they do not.
    """
    shape = config.grid_shape
    if size_of(shape, "sequence") == 1:
        raise ValueError(
            f"attention is shown of ranks that share sequences, got grid.data = {config.grid.data} and grid.sequence = "
            "1; use grid.data = [replica, ring, ulysses], or grid.sequence = 2"
        )
    ring, ulysses = shape["ring"], shape["ulysses"]
    choice = config.sequence_choice(shape)
    spec = models.get(config.model.kind)
    costs = spec.costs(spec.shape(vars(config.model)))
    if not costs.heads:
        raise ValueError(f"model.kind = {config.model.kind} has no attention to show; leave out --show attention")
    groups = -(-costs.kv_heads // config.head_ranks(shape))
    heads = groups * (costs.heads // costs.kv_heads)
    spans = tuple(sequence_spans(costs.context, ring, 1, config.sequence.balance, [MASK]))
    return AttentionPlan(
        costs.context,
        choice.describe() if choice else f"ring {ring} × Ulysses {ulysses}, as grid.data says",
        config.sequence.balance,
        spans,
        hops(spans, MASK, costs.context),
        tuple(zip(query_heads(heads, ulysses), kv_heads(heads, groups, ulysses))),
    )


def hops(spans: tuple[Spans, ...], mask: Mask, length: int) -> tuple[tuple[Hop, ...], ...]:
    """[ring rank][hop], where rank r has the keys of rank r - hop.

    >>> for rank in hops(((range(0, 2), range(6, 8)), (range(2, 6),)), Mask(), 8):
    ...     print([(hop.owner, hop.pairs) for hop in rank])
    [(0, {'causal': 10}), (1, {'full': 8})]
    [(1, {'causal': 10}), (0, {'full': 8})]
    """
    return tuple(
        tuple(_hop(queries, spans, (rank - hop) % len(spans), mask, length) for hop in range(len(spans)))
        for rank, queries in enumerate(spans)
    )


def _hop(queries, spans, owner, mask, length):
    pairs, count = Counter[str](), Counter[str]()
    for tile in tiles(queries, spans[owner], mask, length):
        pairs[tile.kind] += tile.pairs
        count[tile.kind] += 1
    return Hop(owner, dict(pairs), dict(count))


def text(plan: AttentionPlan, width: int = 100) -> str:
    """A line a ring rank, whose hops follow each other in `width` characters in proportion to their work, and the same
    as numbers; then the heads of the Ulysses ranks."""
    most = [max(rank[hop].work for rank in plan.hops) for hop in range(len(plan.hops))]
    share = max(1, sum(most)) / width
    lines = [plan.choice, f"causal attention of {plan.length:,} tokens, sequence.balance = {plan.balance}:", ""]
    for rank, (spans, row) in enumerate(zip(plan.spans, plan.hops)):
        bar = (_cell(hop, round(hop.work / share), round(longest / share)) for hop, longest in zip(row, most))
        lines.append(f"ring {rank:<3}" + "|".join(bar) + "  positions " + _positions(spans))
    lines += [f"  {NOTE}", ""]
    mean = sum(hop.work for row in plan.hops for hop in row) / len(plan.hops)
    cells = [[f"{hop.owner}: {hop.work:,} {_tiles(hop)}" for hop in row] for row in plan.hops]
    column = max(len(cell) for row in cells for cell in row)
    lines.append("pairs   " + "  ".join(f"{f'hop {number}':{column}}" for number in range(len(cells))) + "  all")
    for rank, row in enumerate(plan.hops):
        work = sum(hop.work for hop in row)
        parts = "  ".join(f"{cell:{column}}" for cell in cells[rank])
        lines.append(f"ring {rank:<3}{parts}  {work:,}, {work / max(1, mean):.3f} of the mean")
    lines.append("")
    for rank, (queries, keys) in enumerate(plan.heads):
        lines.append(f"Ulysses {rank:<3}query heads {_numbers(queries)}, key and value heads {_numbers(keys)}")
    return "\n".join(lines)


def _cell(hop, length, width):
    """The owner, and for each of `length` characters the kind of work; `width` with the time in which it waits."""
    filled = "".join(LETTERS[kind] * round(length * pairs / hop.work) for kind, pairs in hop.pairs.items())
    return (str(hop.owner) + filled[: max(0, width - len(str(hop.owner)))]).ljust(width, ".")


def _tiles(hop):
    return " ".join(f"{count}{LETTERS[kind]}" for kind, count in sorted(hop.tiles.items()))


def _positions(spans):
    return " ".join(f"{span.start}-{span.stop - 1}" for span in spans) or "none"


def _numbers(part):
    return {0: "none", 1: f"{part.start}"}.get(part.stop - part.start, f"{part.start}-{part.stop - 1}")


def picture(plan: AttentionPlan, path: str | Path) -> None:
    """Write the work of each ring rank, hop by hop, as an image; the file's ending names the format."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ranks = range(len(plan.hops))
    figure = Figure(figsize=(9, 1.6 + 0.45 * len(plan.hops)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    before = [0] * len(plan.hops)
    for number in ranks:
        row = [plan.hops[rank][number] for rank in ranks]
        work = [hop.work for hop in row]
        colour = colormaps["viridis"](0.25 + 0.75 * number / len(plan.hops))
        bars = axes.barh(ranks, work, left=before, color=colour, edgecolor="white", label=f"hop {number}")
        axes.bar_label(bars, [str(hop.owner) if hop.work else "" for hop in row], label_type="center", fontsize=8)
        before = [start + part for start, part in zip(before, work)]
    axes.axvline(sum(before) / len(before), color="black", linestyle="--", linewidth=1, label="mean")
    axes.set(
        ylim=(len(plan.hops) - 0.45, -0.55), ylabel="ring rank", xlabel="pairs of query and key; numbers: whose keys",
        title=f"{plan.length:,} tokens, sequence.balance = {plan.balance}", yticks=ranks,
    )  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=min(9, len(plan.hops) + 1), frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
