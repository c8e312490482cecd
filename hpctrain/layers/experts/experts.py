"""The experts of a mixture, spread over ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from hpctrain import comm
from hpctrain.choices import DISPATCHES, DROP_POLICIES
from hpctrain.comm import Work
from hpctrain.grad_sync import grad_sync_of_backward
from hpctrain.grid import Grid
from hpctrain.layers.experts.activations import ACTIVATIONS
from hpctrain.layers.experts.capacity import kept_pairs
from hpctrain.layers.experts.dispatch import Dispatch
from hpctrain.layers.experts.dispatch_choice import choose
from hpctrain.layers.experts.grouped import products, weight_gradients
from hpctrain.layers.experts.replicas import Replicas, chosen_replicas
from hpctrain.layers.experts.routing import Routing
from hpctrain.layers.parameter import (
    Factory,
    Layer,
    ProductQueue,
    check_sizes,
    drawn_key,
    parameter,
    put_off,
    refuse_autocast,
)
from hpctrain.once_differentiable import once_differentiable
from hpctrain.randomness import RngKey
from hpctrain.shard import expert_shard, split_sizes


class Experts(Layer):
    """MLPs without biases, of which each token goes through those that the routing names: for each of these, its weight
    times down · activation(up · x), summed.

    The experts are spread over `grid.expert`, the first ranks holding one more where they do not divide, the last ones
    none where there are fewer than ranks. A rank of `grid.copies` holds the same ones. Tokens travel to their experts
    and back; see `dispatch`.

    With `grid.expert_tensor` = T, each T neighbours along `grid.expert` have the same experts, and some hidden features
    of each: a part of an expert is one of T × experts, to all of which a token travels. Their results are summed as
    those of a token's experts are.

    Gradients of tokens travel back while those of the weights are computed.

    Args:
        activation: "swiglu", silu(gate) · up with `up` (experts, {gate, up}, ffn, features), or "gelu", with `up`
            (experts, ffn, features). `down` is (experts, features, ffn).
        capacity: in training an expert takes ⌈capacity · top_k · length / experts⌉ tokens of each sequence at most, and
            the other pairs count nothing; 0 for no limit. All grids drop the same, as a sequence is one group on each.
        capacity_policy: which pairs are kept; see `capacity`.
        dispatch: how tokens travel, "all_to_all", "gather" or "once"; "auto" for what moves least.
        replicate_hot: in each microbatch so many of the experts with the most tokens, at most, have a replica on ranks
            with fewer, which takes some of them; see `replicas`. No effect but on time, and memory for their weights.
            Of whole experts alone.
        std, std_out: standard deviations of the initial weights of `up` and `down`; by default as of `Linear`.

    Shapes: x (tokens, features), whole rows; see `WholeRows`.

    Raises:
        ValueError: for options that are none of these; from forward when capacity is asked for of parts of sequences,
            and replicas of parts of experts.

    Source of parts of experts: Liu et al., "MoE parallel folding" (2025), as Megatron-LM's expert tensor parallelism.
    """

    def __init__(
        self, grid: Grid, features: int, ffn: int, experts: int, *, activation: str = "swiglu", capacity: float = 0.0,
        capacity_policy: str = "probability", dispatch: str = "auto", replicate_hot: int = 0,
        std: float | None = None, std_out: float | None = None, key: RngKey | None = None,
        dtype: torch.dtype | None = None, device: torch.device | str | None = None,
    ):  # fmt: skip
        super().__init__()
        check_sizes(features=features, ffn=ffn, experts=experts)
        for name, value, known in (
            ("activation", activation, ACTIVATIONS),
            ("dispatch", dispatch, DISPATCHES),
            ("capacity_policy", capacity_policy, DROP_POLICIES),
        ):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        if not capacity >= 0:
            raise ValueError(f"capacity must be positive, or 0 for no limit, got {capacity}")
        self.axis, self.experts, self.features, self.ffn = grid.expert, experts, features, ffn
        self.parts = grid.expert_tensor
        self.activation, self.dispatch, self.replicate_hot = activation, dispatch, replicate_hot
        self.capacity, self.capacity_policy = capacity, capacity_policy
        self.split_backward: ProductQueue | None = None  # of a model whose backwards are split
        key, factory = drawn_key(grid, key), Factory(dtype=dtype, device=device)

        def made(name, shape, hidden, std):
            shard = expert_shard((experts, *shape), grid.expert.size, grid.expert.rank, self.parts, hidden)
            return parameter(grid, shard, key / name, (3 * shape[-1]) ** -0.5 if std is None else std, **factory)

        unit = ACTIVATIONS[activation].unit
        self.up = made("up", (ffn, features) if unit == 1 else (unit, ffn, features), -2, std)
        self.down = made("down", (features, ffn), -1, std_out)

    def forward(self, x: torch.Tensor, routing: Routing, meanwhile: Callable[[], None] | None = None) -> torch.Tensor:
        """`meanwhile` is called while results travel back to their tokens; its backward comes while gradients travel to
        the experts."""
        refuse_autocast(x)
        (dispatch, replicas), first = routing.rows.tokens.decide(lambda: self._dispatch(x, routing))
        if first and self.training and self.capacity:
            routing.record.add_dropped(routing.experts.numel() - dispatch.kept // self.parts)
        flight = _Flight(dispatch, replicas, direct=meanwhile is None)
        weights = routing.weights
        if self.parts > 1:
            weights = weights[:, :, None].expand(-1, -1, self.parts).flatten(1)
        out = _Experts.apply(x, weights, self.up, self.down, flight, self)
        if meanwhile is None:
            return out
        meanwhile()
        return _Returned.apply(out, flight)

    def _dispatch(self, x, routing) -> tuple[Dispatch, Replicas | None]:
        chosen, axis, replicas, top_k = routing.experts, self.axis, None, routing.experts.shape[1]
        counts: torch.Tensor | None = routing.counts
        of_rank: Sequence[int] = split_sizes(self.experts, axis.size // self.parts)
        if self.capacity and self.training:
            counts = None
            chosen = chosen.where(kept_pairs(routing, self.experts, self.capacity, self.capacity_policy), self.experts)
        if self.parts > 1:
            if self.replicate_hot:
                raise ValueError(
                    f"replicate_hot sends whole experts along, got {self.replicate_hot} where grid.expert_tensor = "
                    f"{self.parts} divides them; use 0"
                )
            chosen = parts_of_experts(of_rank, self.parts).to(chosen.device)[chosen].flatten(1)
            of_rank, counts = [count for count in of_rank for _ in range(self.parts)], None
        if self.replicate_hot and axis.size > 1:
            if counts is None:
                counts = torch.bincount(chosen.flatten(), minlength=self.experts + 1)[: self.experts]
            table = comm.all_gather(counts[None], axis)
            if listed := chosen_replicas(table.sum(0).tolist(), of_rank, self.replicate_hot):
                replicas = Replicas(axis, of_rank, listed)
                chosen, of_rank, counts = replicas.numbered(chosen, table), replicas.of_rank, None
        kind = choose(axis, x, self.dispatch, top_k, self.experts, self.parts)
        return kind(axis, chosen, of_rank, counts), replicas

    def extra_repr(self):
        return f"{self.experts} × ({self.features}, {self.ffn}), {self.activation}, dispatch={self.dispatch}"


def parts_of_experts(of_group: Sequence[int], parts: int) -> torch.Tensor:
    """(experts + 1, parts): the numbers of each expert's parts, rank by rank, where each `parts` ranks have so many
    experts; of an expert for what is dropped, the number of them all.

    >>> parts_of_experts([2, 1], 2).tolist()
    [[0, 2], [1, 3], [4, 5], [6, 6]]
    """
    numbers: list[list[int]] = []
    first = 0
    for count in of_group:
        numbers += [[first + number + part * count for part in range(parts)] for number in range(count)]
        first += parts * count
    return torch.tensor([*numbers, [first] * parts])


class _Flight:
    """The rows of a call that are under way between `_Experts` and `_Returned`: results, or their gradients. A `direct`
    one has nothing in between."""

    def __init__(self, dispatch: Dispatch, replicas: Replicas | None, direct: bool):
        self.dispatch, self.replicas, self.direct = dispatch, replicas, direct
        self.work: Work[torch.Tensor]


class _Experts(torch.autograd.Function):
    """f(D x), on its way back; see `dispatch`. Keeps the rows that came, the first products, and the weights of the
    experts that this rank has a replica of, which come after its own.

    The weight of a row multiplies between the two products, so that what comes back need but be summed, and its
    gradient is known where the row is.
    """

    @staticmethod
    def forward(ctx, x, weights, up, down, flight, experts):
        dispatch, replicas = flight.dispatch, flight.replicas
        activation, counts = ACTIVATIONS[experts.activation], dispatch.counts
        more = replicas.weights(_matrices(up), _matrices(down)) if replicas else (None, None)
        rows, weight = dispatch.both_to_experts(x, weights).wait()
        hidden = products(rows, _both(up, more[0]), counts, transposed=True)
        act = activation.forward(hidden, weight)
        ctx.save_for_backward(rows, weight, hidden, up, down, *more)
        ctx.up, ctx.down = up, down  # as in layers.box
        ctx.flight, ctx.experts = flight, experts
        flight.work = dispatch.to_tokens(
            products(act, _both(down, more[1]), counts, transposed=True, out=dispatch.buffer(rows))
        )
        if flight.direct:
            return flight.work.wait()
        return x.new_empty(()).expand(x.shape)  # nothing yet

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        rows, weight, hidden, _, _, *more = ctx.saved_tensors
        up, down = ctx.up, ctx.down
        dispatch, replicas = ctx.flight.dispatch, ctx.flight.replicas
        activation, counts = ACTIVATIONS[ctx.experts.activation], dispatch.counts
        if ctx.flight.direct:
            ctx.flight.work = dispatch.to_experts(grad.contiguous())
        grad = ctx.flight.work.wait()
        grad_act = products(grad, _both(down, more[1]), counts, transposed=False)
        act, grad_hidden, grad_weight = activation.backward(hidden, weight, grad_act)
        grad_rows = products(grad_hidden, _both(up, more[0]), counts, transposed=False, out=dispatch.buffer(rows))
        returning = dispatch.both_to_tokens(grad_rows, grad_weight)
        home = None
        if replicas:
            own, of_others = counts[: len(up)], counts[len(up) :]
            here = sum(own)
            home = replicas.gradients_home(
                weight_gradients(grad_hidden[here:], rows[here:], of_others, torch.empty_like(more[0])),
                weight_gradients(grad[here:], act[here:], of_others, torch.empty_like(more[1])),
            )
            grad_hidden, rows, grad, act, counts = grad_hidden[:here], rows[:here], grad[:here], act[:here], own
        grad_up = functools.partial(_weight_gradient, up, grad_hidden, rows, counts, home and home[:2])
        grad_down = functools.partial(_weight_gradient, down, grad, act, counts, home and home[::2])
        gradients = []
        for matrix, gradient in ((up, grad_up), (down, grad_down)):
            late = put_off(ctx.experts.split_backward, matrix, gradient)
            gradients.append(gradient() if matrix.requires_grad and not late else None)
        return *returning.wait(), *gradients, None, None


class _Returned(torch.autograd.Function):
    """Dᵀ of what `_Experts` gave: made after all else that is to be computed meanwhile, so that its backward is the
    first."""

    @staticmethod
    def forward(ctx, out, flight):
        ctx.flight = flight
        ctx.save_for_backward(out.new_empty(0))  # what is computed once more goes on to here, not to leave it under way
        return flight.work.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        _ = ctx.saved_tensors  # what is computed once more is so now, not while the gradients travel
        ctx.flight.work = ctx.flight.dispatch.to_experts(grad.contiguous())
        return grad, None


def _matrices(weight: torch.Tensor) -> torch.Tensor:
    """(experts, out, in)."""
    return weight.flatten(1, -2)


def _both(own: torch.Tensor, of_others: torch.Tensor | None) -> torch.Tensor:
    return _matrices(own) if of_others is None else torch.cat([_matrices(own), of_others])


def _weight_gradient(weight, grad, rows, counts, from_replicas):
    """In its bucket, where that can be; with those of the replicas that some of the experts have elsewhere."""
    sync = grad_sync_of_backward(weight)
    out = None if sync is None else sync.out()
    total = torch.empty_like(weight) if out is None else out
    matrices = weight_gradients(grad, rows, counts, _matrices(total))
    if from_replicas is not None:
        matrices.index_add_(0, *from_replicas)
    return total
