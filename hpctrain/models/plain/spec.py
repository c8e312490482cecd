"""A function that makes plain torch modules, as a kind of model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hpctrain.grid import Grid
from hpctrain.models.plain.shape import PlainShape
from hpctrain.models.spec import ModelSpec

if TYPE_CHECKING:
    import torch

    from hpctrain.layers.algorithm import Algorithm
    from hpctrain.randomness import RngKey


class PlainSpec(ModelSpec):
    """Models that `factory(model)` makes, where `model` has the keys of the section [model] as attributes.

        def build(model):
            return torch.nn.Sequential(torch.nn.Embedding(model.vocabulary, model.width), ...)

    The function returns

        module            called with ids, (sequences, length) int64; gives logits, (sequences, length, vocabulary)
        [part, part, …]   model.layers modules, or functions without arguments that make them: the first is called with
                          ids, each further one with what the one before gave, (sequences, length, model.width), and the
                          last gives logits. Only such a model is cut into pipeline stages, and then tensor must be 1
        either, loss      with a loss of its own: loss(output, targets) -> mean over targets, (sequences, length) int64,
                          where output is what the module or the last part gives; without it, the cross-entropy

    A tensor axis divides the module by `hpctrain.parallelize`; its attribute `replicate`, if it has one, names the
    modules to leave whole. Weights are drawn from torch's generator, seeded by run.seed, the same on all ranks. Random
    numbers drawn in training, as by dropout, and buffers that change in training, would be others on another grid, and
    are refused.

    Args:
        kind: "package.module:function".
    """

    sequence_axes = False
    own_loss = True
    documents = False
    token_slices = False
    recomputes = False

    def __init__(self, kind: str, factory: Callable[[SimpleNamespace], Any]):
        self.kind, self.factory = kind, factory

    def shape(self, options: Mapping[str, Any]):
        """Every key of [model] is the function's own matter."""
        return self.make_shape(options)

    def make_shape(self, options: Mapping[str, Any]):
        sizes = {key: options[key] for key in ("layers", "width", "context", "vocabulary")}
        return PlainShape(**sizes, options=dict(options))

    def build(
        self, grid: Grid, shape: PlainShape, layers_per_stage: Sequence[int] | None = None,
        placement: Mapping[tuple[int, int], int] | None = None, *, algorithm: str | Algorithm = "agarwal",
        recompute: str = "none", key: RngKey, dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ):  # fmt: skip
        from hpctrain.models.plain.model import PlainModel

        self.check_recompute(recompute)
        options = SimpleNamespace(**{**shape.options, "layers": shape.layers})
        return PlainModel(
            grid, shape, lambda: self.factory(options), layers_per_stage, placement, kind=self.kind, key=key,
            dtype=dtype, device=device,
        )  # fmt: skip

    def tokens(
        self,
        grid: Grid,
        sequences: int,
        length: int,
        first: int = 0,
        step: int = 0,
        algorithm: str | Algorithm = "agarwal",
        balance: str = "zigzag",
        documents: Sequence[Sequence[int]] = (),
        window: int = 0,
    ):
        from hpctrain.models.plain.model import WholeSequences

        return WholeSequences(sequences, length, first, step)

    def costs(self, shape: PlainShape):
        raise ValueError(
            f"model.kind = {self.kind} makes plain torch modules, of which no formula tells the costs; give a ModelSpec"
        )

    def describe(self, shape: PlainShape):
        return f"{self.kind}: context {shape.context}, vocabulary {shape.vocabulary}"
