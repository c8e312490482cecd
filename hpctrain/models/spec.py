"""The one seam between a kind of model and the rest of hpctrain."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpctrain.grid import Grid
from hpctrain.models.costs import TransformerCosts

if TYPE_CHECKING:
    import torch

    from hpctrain.layers import Tokens
    from hpctrain.layers.algorithm import Algorithm
    from hpctrain.models.huggingface import Format
    from hpctrain.models.staged_model import StagedModel
    from hpctrain.randomness import RngKey

# Keys of [model] that every kind has; of the others a spec names those that it has.
COMMON = ("kind", "layers", "width", "heads", "context", "vocabulary", "tied", "init")


class ModelSpec(abc.ABC):
    """Everything that hpctrain asks of a kind of model.

    A shape is a dataclass of the kind's own that states the sizes of a whole model, with at least the attributes
    `layers`, `width`, `context` and `vocabulary`.

    Attributes:
        kind: the name in messages and in exported folders.
        keys: the keys of [model] that this kind has beside the common ones. 0 or false is the kind's own default.
        sequence_axes: whether ring and Ulysses ranks may share a sequence.
        experts: whether the model has a mixture's experts, which grid.expert ranks divide.
        own_loss: whether the model computes its loss otherwise than by `layers.CrossEntropy`.
        documents: whether tokens attend to their own document alone where `tokens` are given `documents`.
        token_slices: whether a sequence may pass through the stages in slices, as the schedule "terapipe" has it.
        recomputes: whether backward may compute activations once more, as train.recompute has it.
        huggingface: how a model is written and read in Hugging Face's format. Without it, weights are exported under
            their own names, and no model starts from a folder.
    """

    kind: str
    keys: frozenset[str] = frozenset()
    sequence_axes: bool = True
    experts: bool = False
    own_loss: bool = False
    documents: bool = True
    token_slices: bool = True
    recomputes: bool = True

    def shape(self, options: Mapping[str, Any]) -> Any:
        """The sizes that the section [model] of a configuration states.

        Raises:
            ValueError: for a key that this kind does not have, and for sizes that do not fit together.
        """
        foreign = [key for key, value in options.items() if value and key not in COMMON and key not in self.keys]
        if foreign:
            raise ValueError(
                f"model.kind = {self.kind} has no model.{foreign[0]}, got {options[foreign[0]]!r}; leave it out"
                + (f", it has {', '.join(f'model.{key}' for key in sorted(self.keys))}" if self.keys else "")
            )
        return self.make_shape(options)

    def check_recompute(self, recompute: str) -> None:
        """Raise ValueError for what this kind cannot compute once more in backward."""
        if recompute != "none" and not self.recomputes:
            raise ValueError(
                f"train.recompute = {recompute} is for the models of hpctrain, got model.kind = {self.kind}; use "
                "train.recompute=none"
            )

    @abc.abstractmethod
    def make_shape(self, options: Mapping[str, Any]) -> Any:
        """`shape` without foreign keys."""

    @abc.abstractmethod
    def build(
        self, grid: Grid, shape: Any, layers_per_stage: Sequence[int] | None = None,
        placement: Mapping[tuple[int, int], int] | None = None, *, algorithm: str | Algorithm = "agarwal",
        recompute: str = "none", key: RngKey, dtype: torch.dtype | None = None, device: torch.device | None = None,
    ) -> StagedModel:  # fmt: skip
        """This rank's pipeline stages; arguments as of `models.staged.StagedTransformer`."""

    def tokens(
        self, grid: Grid, sequences: int, length: int, first: int = 0, step: int = 0,
        algorithm: str | Algorithm = "agarwal", balance: str = "zigzag",
        documents: Sequence[Sequence[int]] = (), window: int = 0,
    ) -> Tokens:  # fmt: skip
        """This rank's part of a microbatch of `sequences` that starts at sequence `first` of the global batch, which
        ring ranks cut as `balance` says. Other arguments as of `Tokens.of`."""
        from hpctrain.layers import Tokens

        return Tokens.of(
            grid, sequences, length, first, step, algorithm, balance=balance, documents=documents, window=window
        )

    @abc.abstractmethod
    def costs(self, shape: Any) -> TransformerCosts:
        """Sizes of the layers, for the formulas of floating-point operations, traffic and lower bounds."""

    def shorter(self, shape: Any) -> tuple[Any, list[int]]:
        """The shape of a model of fewer blocks, each of which stands for some of this one's that cost as much; and of
        each of this one's the number of that block. The first and the last stand for themselves."""
        layers = shape.layers
        pieces = min(3, layers)
        return dataclasses.replace(shape, layers=pieces), [0, *[1] * (layers - 2), pieces - 1][:layers]

    @property
    def huggingface(self) -> Format:
        from hpctrain.models.huggingface import OwnNames

        return OwnNames()

    def describe(self, shape: Any) -> str:
        """One line for people."""
        parts = [f"{shape.layers} layers", f"width {shape.width}", f"context {shape.context}"]
        return f"{self.kind}: {', '.join(parts)}, vocabulary {shape.vocabulary}"
