"""The operations of `collectives` as differentiable functions, each with its adjoint beside it.

An operation F takes the tensors x_r of all ranks to tensors y_r. Its backward applies the adjoint F*, defined by
sum_r <(F x)_r, y_r> = sum_r <x_r, (F* y)_r> over all ranks (Hewett and Grady, "A linear algebraic approach to model
parallelism in deep learning", 2020). A loss is understood as the sum of what the ranks compute from their outputs.
Backward is collective as well: x must require gradients on every rank, or on none, and so must the result be used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from hpctrain.comm import collectives, point_to_point, rooted
from hpctrain.comm.halo import Halo
from hpctrain.comm.objects import all_gather_object
from hpctrain.comm.out_of_place import rows_of_all, rows_of_sum, sum_of_all
from hpctrain.comm.repartition import repartitions
from hpctrain.grid import Axis, Grid
from hpctrain.layout import Layout


def with_adjoint(x: torch.Tensor, forward: Callable, adjoint: Callable, *arguments: Any) -> torch.Tensor:
    """`forward(x, *arguments)`, whose gradient g is `adjoint(g, *arguments)`.

    Raises:
        ValueError: as `check_followed`.
    """
    check_followed(x)
    return _WithAdjoint.apply(x, forward, adjoint, *arguments)


def check_followed(x: torch.Tensor) -> None:
    """Raise ValueError where torch would follow x by other means than a backward."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        way = "torch.func, as vmap, grad and jacrev do"
    elif forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        way = "forward-mode differentiation, as torch.autograd.forward_ad does"
    else:
        return
    raise ValueError(
        f"a tensor goes to other ranks within {way}, which cannot follow it there; use torch.autograd.grad, or the "
        "functions of torch.autograd.functional"
    )


class _WithAdjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward, adjoint, *arguments):
        ctx.forward_op, ctx.adjoint, ctx.arguments = forward, adjoint, arguments
        return forward(x.detach(), *arguments)

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():  # create_graph: the adjoint's adjoint is the operation itself
            grad_x = with_adjoint(grad, ctx.adjoint, ctx.forward_op, *ctx.arguments)
        else:
            grad_x = ctx.adjoint(grad, *ctx.arguments)
        return (grad_x, None, None, *[None] * len(ctx.arguments))


def all_reduce(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Sum over all ranks, on every rank. Adjoint: the same."""
    return with_adjoint(x, sum_of_all, sum_of_all, axis)


def all_gather(x: torch.Tensor, axis: Axis, counts: Sequence[int] | None = None) -> torch.Tensor:
    """All ranks' rows on every rank; without `counts`, which ranks then tell each other. Adjoint: reduce-scatter."""
    counts = counts or all_gather_object(len(x), axis)
    return with_adjoint(x, _new(rows_of_all), _new(rows_of_sum), axis, counts)


def reduce_scatter(x: torch.Tensor, axis: Axis, counts: Sequence[int] | None = None) -> torch.Tensor:
    """This rank's rows of the sum over all ranks. Adjoint: all-gather."""
    counts = counts or collectives.even_rows(len(x), axis.size)
    return with_adjoint(x, _new(rows_of_sum), _new(rows_of_all), axis, counts)


def broadcast(x: torch.Tensor, axis: Axis, root: int = 0) -> torch.Tensor:
    """The root's tensor on every rank. Adjoint: the sum over all ranks on the root, zeros elsewhere."""
    return with_adjoint(x, _copied(rooted.broadcast), _new(rooted.reduce), axis, root)


def reduce(x: torch.Tensor, axis: Axis, root: int = 0) -> torch.Tensor:
    """The sum over all ranks on the root, zeros elsewhere. Adjoint: broadcast."""
    return with_adjoint(x, _new(rooted.reduce), _copied(rooted.broadcast), axis, root)


def gather(x: torch.Tensor, axis: Axis, counts: Sequence[int] | None = None, root: int = 0) -> torch.Tensor:
    """All ranks' rows on the root, no rows elsewhere; `counts` as of `all_gather`. Adjoint: scatter."""
    counts = counts or all_gather_object(len(x), axis)
    return with_adjoint(x, _new(rooted.gather), _new(rooted.scatter), axis, counts, root)


def scatter(x: torch.Tensor, axis: Axis, counts: Sequence[int], root: int = 0) -> torch.Tensor:
    """This rank's rows of the root's tensor; elsewhere x gives only dtype, device and the shape of a row. Adjoint:
    gather, zeros elsewhere."""
    x = x if axis.rank == root else x[:0]
    return with_adjoint(x, _new(rooted.scatter), _new(rooted.gather), axis, counts, root)


def all_to_all(
    x: torch.Tensor, axis: Axis, send_counts: Sequence[int] | None = None, recv_counts: Sequence[int] | None = None
) -> torch.Tensor:
    """Rows `send_counts[r]` go to rank r, equally many where they are not given. Adjoint: the rows go back, counts
    exchanged."""
    if send_counts is None and recv_counts is not None:
        send_counts = collectives.even_rows(len(x), axis.size)
    return with_adjoint(x, _new(collectives.all_to_all), _send_back, axis, send_counts, recv_counts or send_counts)


def halo(x: torch.Tensor, plan: Halo) -> torch.Tensor:
    """The rows that this rank needs, from the ranks that hold them. Adjoint: they go back and are summed."""
    return with_adjoint(x, plan.exchange, plan.adjoint)


def reshard(x: torch.Tensor, source: Layout, target: Layout, grid: Grid) -> torch.Tensor:
    """This rank's part of a tensor in the layout `target`, from the parts that the ranks have in the layout `source`.

        rows, columns = Layout.of((m, n), {0: ("z", "x")}), Layout.of((m, n), {0: "z", 1: "x"})
        y = reshard(x, rows, columns, grid)

    Ranks receive what they lack, once, and nothing else: `layout.elements_received`. Summands (`source.partial`) are
    added; where several ranks are to have a sum, each first makes its part. Adjoint: what was sent goes back and is
    summed, so that the gradient of a part that several ranks have is a partial sum on each. Collective over the
    smallest axis of the grid along which something moves. Any sizes.

    Raises:
        ValueError: as `Layout.of`; for layouts of different shapes, a target of summands, and, on the rank alone, a
            block that is not of its layout.
    """
    for move in repartitions(grid, source, target):
        x = with_adjoint(x, move.exchange, move.adjoint)
    return x


def send(x: torch.Tensor, axis: Axis, dest: int, tag: int = 0) -> torch.Tensor:
    """Send x to rank `dest`, which must call `recv`. Adjoint: the gradient is received from there.

    Returns a zero that depends on x: backward through it (`zero.backward()`, or adding it to a loss) receives.
    """
    return with_adjoint(x, _send, _recv_like(x), axis, dest, tag)


def recv(like: torch.Tensor, axis: Axis, source: int, tag: int = 0) -> torch.Tensor:
    """The tensor sent by `send` on rank `source`, of the shape and dtype of `like`. Adjoint: the gradient is sent.

    `like` must require gradients if the gradient is to be sent back; its values do not matter.
    """
    return with_adjoint(like, _recv, _send_gradient, axis, source, tag)


def _new(operation: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The collectives return their input on an axis of size 1; autograd wants a tensor of its own."""

    def call(x: torch.Tensor, axis: Axis, *arguments: object) -> torch.Tensor:
        y = operation(x, axis, *arguments)
        return y.view_as(y) if axis.size == 1 else y

    return call


def _copied(operation: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def call(x: torch.Tensor, axis: Axis, *arguments: object) -> torch.Tensor:
        return operation(x.clone(memory_format=torch.contiguous_format), axis, *arguments)

    return call


def _send_back(
    grad: torch.Tensor, axis: Axis, send_counts: Sequence[int] | None, recv_counts: Sequence[int] | None
) -> torch.Tensor:
    return collectives.all_to_all(grad, axis, recv_counts, send_counts)


def _send(x: torch.Tensor, axis: Axis, dest: int, tag: int) -> torch.Tensor:
    point_to_point.send(x, axis, dest, tag)
    return x.new_zeros(())


def _recv_like(x: torch.Tensor) -> Callable[..., torch.Tensor]:
    shape, dtype, device = x.shape, x.dtype, x.device

    def receive(_: torch.Tensor, axis: Axis, dest: int, tag: int) -> torch.Tensor:
        return point_to_point.recv(torch.empty(shape, dtype=dtype, device=device), axis, dest, tag)

    return receive


def _recv(like: torch.Tensor, axis: Axis, source: int, tag: int) -> torch.Tensor:
    return point_to_point.recv(torch.empty_like(like, memory_format=torch.contiguous_format), axis, source, tag)


def _send_gradient(grad: torch.Tensor, axis: Axis, source: int, tag: int) -> torch.Tensor:
    point_to_point.send(grad, axis, source, tag)
    return torch.zeros_like(grad)  # `like` gave only its shape
