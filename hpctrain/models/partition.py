"""Which blocks of a model each pipeline stage gets, by what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from hpctrain import comm
from hpctrain.grid import Grid
from hpctrain.layers import Linear, SplitBackward, Tokens
from hpctrain.models.spec import ModelSpec
from hpctrain.pipeline import LayerCosts, partition
from hpctrain.pipeline.profile import Layer, profile
from hpctrain.randomness import RngKey

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpctrain.layers.algorithm import Algorithm


def profile_blocks(
    spec: ModelSpec, shape: Any, sequences: int, *, algorithm: str | Algorithm = "agarwal",
    dtype: torch.dtype = torch.float32, device: torch.device | None = None, repeats: int = 5,
) -> LayerCosts:  # fmt: skip
    """Costs of a model's blocks on a microbatch of `sequences`, measured by this process alone.

    The first block has the embeddings' costs besides its own, the last those of the projection onto the vocabulary and
    the loss; one block is measured for all others like it. A tensor grid would spread all of them: what counts for a
    partition are the ratios.
    """
    from mpi4py import MPI  # starts MPI, so not at import

    grid = Grid(comm=MPI.COMM_SELF)
    shorter, like = spec.shorter(shape)
    pieces = shorter.layers
    here = {(0, stage): 0 for stage in range(pieces)}
    model = spec.build(grid, shorter, placement=here, algorithm=algorithm, key=RngKey(0), dtype=dtype, device=device)
    tokens = Tokens.of(grid, sequences, shape.context, algorithm=algorithm, share=0.0)  # here are no steps
    ids = torch.randint(shape.vocabulary, (sequences * shape.context,), generator=torch.Generator().manual_seed(0))
    ids = ids.to(device)

    def piece(stage: int) -> Layer:
        def forward(x):
            y = model(x, tokens, stage)
            return model.loss(y, ids, 1 / len(ids)) if stage == model.last else y

        return forward

    # plain torch modules put off no weight gradients
    split = SplitBackward(model) if any(isinstance(module, Linear) for module in model.modules()) else None
    measured = profile([piece(stage) for stage in range(pieces)], lambda: ids, repeats, split)
    return LayerCosts(**{name: [values[i] for i in like] for name, values in vars(measured).items()})


def layers_per_stage(
    world: MPI.Intracomm, spec: ModelSpec, shape: Any, method: str | Sequence[int], sequences: int, ranks: int,
    microbatches: int, *, algorithm: str | Algorithm = "agarwal", dtype: torch.dtype = torch.float32,
    device: torch.device | None = None, **options: Any,
) -> list[int]:  # fmt: skip
    """How many blocks each stage gets, for `ModelSpec.build`; the same on all ranks of `world`.

    The first rank of this communicator (mpi4py) measures and decides for all, since neither clocks nor exponentials are
    the same everywhere. Nothing is measured where costs do not matter.

    Args:
        sequences: of a microbatch.
        options: of `pipeline.partition`.

    Raises:
        ValueError: on all ranks, as `pipeline.partition`.
    """
    counts = None
    with comm.together(world):
        if world.rank == 0:
            costs = LayerCosts([1.0] * shape.layers)
            if method in ("dp", "lp", "rl") or options.get("memory") is not None:
                costs = profile_blocks(spec, shape, sequences, algorithm=algorithm, dtype=dtype, device=device)
            counts = partition(method, costs, ranks, microbatches, **options)
    return world.bcast(counts)
