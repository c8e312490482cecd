"""The points of a study: how one configuration grows with the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod, sqrt
from pathlib import Path

from hpctrain.config import Config, load_config, to_toml
from hpctrain.grid_shape import all_grids, describe_shape
from hpctrain.plan import Machine, predict
from hpctrain.scale.work import received

VARIED = ("data", "pipeline", "tensor", "auto")
MODES = ("weak", "strong")


@dataclass(frozen=True)
class Point:
    """One configuration on one number of ranks; `overrides` make it from the study's file."""

    ranks: int
    overrides: tuple[str, ...]
    config: Config

    def describe(self) -> str:
        g, m = self.config.grid_shape, self.config.model
        return f"{describe_shape(g)}: {m.layers} layers of width {m.width}, batch {self.config.train.batch}"

    @property
    def toml(self) -> str:
        return to_toml(self.config)


def points(
    path: str | Path,
    overrides: Sequence[str],
    ranks: Sequence[int],
    mode: str,
    vary: str,
    machine: Machine | None = None,
) -> list[Point]:
    """The points of a study on `ranks`.

    The configuration is the job of the first, smallest point, and its grid has that many ranks (where that is one, any
    grid of the file is set aside). From there the axis `vary` grows. In a weak study the work of a rank stays what it
    was: the batch grows with data, the layers with pipeline, the width with the root of tensor, to the next multiple of
    four times the heads, and with it the widths of MLPs, experts and heads that the configuration gives. In a strong
    one the job stays the same.

    Args:
        vary: "data", "pipeline", "tensor" (the box that moves the fewest bytes), or "auto": the grid that should be the
            fastest of those that fit, by the figures of `machine`.
        machine: for its figures; see `hpctrain.plan`.

    Raises:
        ValueError: for ranks that are no multiples of the first, and for what no run could do.
    """
    _check(ranks, mode, vary, machine)
    base = load_config(path, overrides)
    fixed = list(overrides)
    if base.boxes:
        raise ValueError(
            f"a study has one box, grid.tensor, in all stages, got pipeline.boxes = {base.pipeline.boxes}; leave it out"
        )
    if base.ranks != ranks[0]:
        if ranks[0] != 1:
            raise ValueError(
                f"the grid of {path} has {base.ranks} ranks, but the study begins with {ranks[0]}; give the grid of "
                f"the first point, as grid.data={ranks[0]}, or begin with --ranks 1 or {base.ranks}"
            )
        alone = ("data", "sequence", "pipeline", "expert", "expert_tensor")
        fixed += [*(f"grid.{axis}=1" for axis in alone), "grid.tensor=[1, 1, 1]"]
        base = load_config(path, fixed)
    fastest = []
    for count in ranks:
        candidates = _candidates(base, path, fixed, count // ranks[0], mode, vary, count)
        fastest.append(min(candidates, key=lambda point: _cost(point.config, machine)))
    return fastest


def _cost(config: Config, machine: Machine | None) -> tuple[bool, float]:
    """Whether the machine's memory is too small, and seconds of a step on it; without one, the bytes that the busiest
    rank receives."""
    if machine is not None:
        prediction = predict(config, machine)
        return not prediction.fits, prediction.seconds
    return False, max(sum(received(config, rank).values()) for rank in range(config.grid_shape["pipeline"]))


def _check(ranks, mode, vary, machine):
    if mode not in MODES:
        raise ValueError(f"mode must be weak or strong, got {mode!r}")
    if vary not in VARIED:
        raise ValueError(f"--vary must be one of {', '.join(VARIED)}, got {vary!r}")
    if vary == "auto" and machine is None:
        raise ValueError(
            "--vary auto chooses by measured figures; give --machine FILE, which `hpctrain machine` writes, or NAME"
        )
    if not ranks or list(ranks) != sorted(set(ranks)) or ranks[0] < 1:
        raise ValueError(f"--ranks must be rising positive numbers, such as 1,2,4, got {','.join(map(str, ranks))}")
    for count in ranks:
        if count % ranks[0]:
            raise ValueError(
                f"--ranks {count} cannot be factored: it is not a multiple of the first point's {ranks[0]} ranks; "
                f"{ranks[0] * max(1, count // ranks[0])} is"
            )


def _candidates(base, path, fixed, factor, mode, vary, ranks):
    """The points that `vary` allows for a grid `factor` times as large."""
    candidates, refused = [], None
    for data, pipeline, box in all_grids(factor):
        grown = {"data": data, "pipeline": pipeline, "tensor": prod(box)}
        if vary != "auto" and any(size > 1 for axis, size in grown.items() if axis != vary):
            continue
        extra = _overrides(base, data, pipeline, box, mode == "weak")
        try:
            candidates.append(Point(ranks, (*fixed, *extra), load_config(path, [*fixed, *extra])))
        except ValueError as error:
            refused = refused or error
    if not candidates:
        raise ValueError(f"{ranks} ranks by --vary {vary}: {refused}")
    return candidates


def _overrides(base, data, pipeline, box, weak):
    shape, model = base.grid_shape, base.model
    tensor = [shape[axis] * size for axis, size in zip("xyz", box)]
    overrides = [
        f"grid.data={[shape['replica'] * data, shape['ring'], shape['ulysses']]}",
        "grid.sequence=1",
        f"grid.pipeline={shape['pipeline'] * pipeline}",
        f"grid.tensor={tensor}",
    ]
    if weak:
        step = 4 * model.heads  # head sizes that are multiples of four
        width = model.width if prod(box) == 1 else max(1, round(model.width * sqrt(prod(box)) / step)) * step
        overrides += [
            f"train.batch={base.train.batch * data}",
            f"model.layers={model.layers * pipeline}",
            f"model.width={width}",
        ]
        for name in ("ffn", "head_width", "expert_ffn"):  # 0 follows the width by itself
            if (given := getattr(model, name)) and width != model.width:
                overrides.append(f"model.{name}={max(1, round(given * width / model.width / 4)) * 4}")
    return overrides
