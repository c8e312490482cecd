"""What training, evaluation and generation ask of a model that is cut into pipeline stages."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


class StagedModel(torch.nn.Module, abc.ABC, Generic[T]):
    """This rank's pipeline stages of a model of sequences of tokens. `T` says which tokens of a microbatch are here:
    `layers.Tokens`, or what a model of other modules has in its place.

    Attributes:
        shape: the sizes of the whole model; see `ModelSpec`.
        stages: {stage: range of its blocks}, of this rank.
        placement: {(replica, stage): rank of the pipeline axis}.
        last: the last stage of the whole model.
        device: where the model is; None for torch's default.
        recompute: what backward computes once more: "none", "attention" or "block"; see `models.staged`.
    """

    shape: Any
    stages: Mapping[int, range]
    placement: Mapping[tuple[int, int], int]
    last: int
    device: torch.device | None
    recompute: str = "none"

    @abc.abstractmethod
    def parameters_of(self, stage: int) -> Iterator[torch.nn.Parameter]:
        """Those that a stage of this rank computes with."""

    @abc.abstractmethod
    def tokens(self, sequences: int, length: int, documents: Sequence[Sequence[int]] = ()) -> T:
        """This rank's part of a batch of sequences; `documents` as of `layers.Tokens.of`."""

    @abc.abstractmethod
    def forward(self, x: torch.Tensor, tokens: T, stage: int | None = None) -> torch.Tensor:
        """One stage of this rank, which may be left out where there is one. Stage 0 takes ids, (sequences × length,)
        int64, and the last returns what `loss` and `last_logits` take."""

    @abc.abstractmethod
    def message_spec(self, tokens: T, stage: int) -> tuple[tuple[int, ...], torch.dtype, torch.device | None]:
        """Shape, dtype and device of what a stage gives to this rank's next one."""

    @abc.abstractmethod
    def loss(self, output: torch.Tensor, targets: torch.Tensor, scale: float) -> torch.Tensor:
        """This rank's share of the sum of the losses of the targets, times `scale`."""

    @abc.abstractmethod
    def last_logits(self, output: torch.Tensor, tokens: T) -> torch.Tensor:
        """Those of the last position of one sequence, (vocabulary,), on every rank of the tensor axis and of those that
        share the sequence; collective."""

    def check_draws(self) -> None:
        """After the first step, before an update that is the caller's: refuse random numbers that depend on the grid.

        Raises:
            ValueError: on every rank. Collective the first time, and nothing later.
        """
