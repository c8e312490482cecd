"""What a step's line of metrics says of a model's experts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.layers.experts.balance import Load


def metrics(loads: Mapping[str, Load]) -> dict[str, Any]:
    """The terms of the loss beside the model's own, and by layer of experts, in order,

        load        of each expert, its part of all pairs of a token and an expert
        imbalance   the largest load over the mean
        entropy     of the loads, over that of equal ones
        dropped     part of the pairs that found no place

    >>> found = metrics({"blocks.0.mlp.router": Load((6, 2), 1, 0.5, 0.25)})
    >>> found["aux_loss"], found["z_loss"], found["experts"]
    (0.5, 0.25, {'load': [[0.75, 0.25]], 'imbalance': [1.5], 'entropy': [0.811278], 'dropped': [0.125]})
    """
    if not loads:
        return {}
    found: dict[str, list] = {"load": [], "imbalance": [], "entropy": [], "dropped": []}
    for load in loads.values():
        pairs, experts = max(1, sum(load.counts)), len(load.counts)
        parts = [count / pairs for count in load.counts]
        entropy = -sum(part * math.log(part) for part in parts if part)
        found["load"].append([round(part, 6) for part in parts])
        found["imbalance"].append(round(max(parts) * experts, 6))
        found["entropy"].append(round(entropy / math.log(experts), 6) if experts > 1 else 1.0)
        found["dropped"].append(round(load.dropped / pairs, 6))
    terms = {term: sum(getattr(load, term) for load in loads.values()) for term in ("aux_loss", "z_loss")}
    return {**terms, "experts": found}


def plot(history: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Imbalance, entropy and drop rate of each layer over the steps, as a PNG, where the records tell of experts."""
    records = [record for record in history if "experts" in record]
    if not records:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 9), layout="constrained")
    steps = [record["step"] for record in records]
    for axes, name in zip(figure.subplots(3, sharex=True), ("imbalance", "entropy", "dropped")):
        for layer in range(len(records[-1]["experts"][name])):
            axes.plot(steps, [record["experts"][name][layer] for record in records], label=str(layer), linewidth=1)
        axes.set(ylabel=name)
        axes.grid(alpha=0.3)
    axes.set(xlabel="step")
    figure.legend(*axes.get_legend_handles_labels(), title="layer of experts", loc="outside right upper")
    figure.savefig(path, dpi=120)
