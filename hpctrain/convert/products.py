"""Linear layers and convolutions: a weight divided along its output features, or along its input features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from hpctrain.convert.boundary import gather, take
from hpctrain.convert.boundary_products import entering, leaving
from hpctrain.convert.gathering_again import gathering_again
from hpctrain.convert.hooks import check_global_hooks, check_hooks
from hpctrain.convert.linear import WeightAndBias, linear
from hpctrain.convert.sharded_activation import enter, whole
from hpctrain.convert.sharding import local
from hpctrain.convert.shared_input import SharedInput
from hpctrain.convert.unit_calls import UnitCalls
from hpctrain.convert.unit_module import enclose
from hpctrain.grid import Axis
from hpctrain.parameter import shard_of
from hpctrain.shard import split_sizes

if TYPE_CHECKING:
    from hpctrain.convert.plan import Plan


class SplitLinear(nn.Module):
    """Mixin for nn.Linear.

    Attributes:
        axis: the ranks that the layer is divided over.
        by_output: each rank computes its part of the output features from the whole input; otherwise a summand of the
            whole output from its part of the input features.
        counts: of the divided features, by rank.
        enters: the input is whole; otherwise the unit around has brought it inside.
        leaves: the output is made whole; otherwise it stays divided.
        shards: of what leaves a unit, each rank keeps some rows.
        between: what made the input of its part, in a unit that is no module of its own; `planned`, an object, the name
            of its attribute and what that has to be still; `zeros`, one by which nothing of it may be dropped.
        unit_calls: of its unit, within which alone it may be called where it takes or gives parts.
    """

    axis: Axis
    by_output: bool
    counts: tuple[int, ...]
    enters: bool
    leaves: bool
    weight: torch.Tensor
    feature_dim = -1  # of activations
    shards = False
    between: tuple[nn.Module, ...] = ()
    planned: Sequence[tuple[Any, str, Any]] = ()
    zeros: tuple[tuple[object, str], ...] = ()
    unit_calls: UnitCalls | None = None
    path: str

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not (self.enters and self.leaves):
            for module in (self, *self.between):
                check_hooks(module)
            if self.axis.size > 1:
                check_global_hooks()
                if self.unit_calls is not None:
                    self.unit_calls.check(self.path)
                for owner, name, value in self.planned:
                    if getattr(owner, name, None) is not value:
                        self._refuse_exchanged(owner, name)
                if self.zeros and self.training:
                    self._check_zeros()
        return self.run(input, self.enters, self.leaves)

    def _refuse_exchanged(self, owner, name):
        raise ValueError(
            f"{name} of {type(owner).__name__} was exchanged since ht.parallelize divided it together with others, and "
            f"would meet parts of activations; do it before, or list {self.path!r} in replicate"
        )

    def _check_zeros(self):
        for owner, name in self.zeros:
            if p := getattr(owner, name):
                raise ValueError(
                    f"{name}={p} of {type(owner).__name__} drops features before {self.path}; it was 0 when "
                    f"ht.parallelize divided them: set it before, or list {self.path!r} in replicate"
                )

    def run(self, x: torch.Tensor, enters: bool, leaves: bool) -> torch.Tensor:
        if enters and not self.by_output:
            x = whole(x)
        with local():
            return self._run(x, enters, leaves)

    def _run(self, x, enters, leaves):
        axis, bias = self.axis, self._parameters["bias"]
        if self.by_output:
            y = self.multiply(x, bias, enters)
            return gather(y, axis, self.counts, y.dim() + self.feature_dim) if leaves else y
        x = take(x, axis, self.counts, x.dim() - 1) if enters else x
        # each rank adds its part of the bias to its summand; of any tensor, as functional_call gives
        start = 0 if bias is None or axis.size == 1 else shard_of(bias).slices[0].start
        return self.multiply_leaving(x, bias, start, self.shards and not enters)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None, enters: bool):
        if not enters:
            return linear(x, self.matrix(), bias)
        return entering(x, [(self.matrix(), bias)], self.axis)[0]

    def multiply_leaving(self, x: torch.Tensor, bias: torch.Tensor | None, start: int, shards: bool):
        return leaving(x, self.matrix(), bias, start, self.axis, shards)

    def matrix(self) -> torch.Tensor:
        """The weight as (out, in)."""
        weight = self._parameters["weight"]
        assert weight is not None
        return weight


def channels_last(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The same numbers; those along `dim` lie side by side in memory."""
    return x.movedim(dim, -1).contiguous().movedim(-1, dim)


def _has_channels_last(weight) -> bool:
    """Of kernels of one element, which lie in either way, torch takes the other one for granted."""
    return weight.dim() > 3 and weight.stride(1) == 1 and weight[0, 0].numel() > 1


def pair_pays(up: Any, down: Any) -> bool:
    """Whether ranks receive less for each token where two linear layers, one after the other, are divided together.

    Alone, a layer with more outputs than inputs is divided by output, which it gathers; backward it sums the gradient
    of its input. Another one is divided by input: it sums its output, and gathers the gradient of its input. Of a pair,
    `down` sums its output, and `up` the gradient of its input.
    """
    into, hidden, out = up.in_features, down.in_features, down.out_features
    return 2 * (into + out) < _received_alone(into, hidden) + _received_alone(hidden, out)


def _received_alone(into: int, out: int) -> int:
    return out + 2 * into if out >= into else 2 * out + into


class SharedEntry(SplitLinear):
    """Mixin for one of several layers of a unit that take the same input.

    Attributes: `entered`, of all of these layers; see `Unit`.
    """

    entered: SharedInput

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None, enters: bool):
        return self.entered.multiply(x, self) if enters else super().multiply(x, bias, enters)

    def matrix_and_bias(self) -> WeightAndBias:
        return self.matrix(), self._parameters["bias"]


class SplitConv1D(SplitLinear):
    """Mixin for Hugging Face's Conv1D: a linear layer whose weight is (in, out)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)

    def matrix(self) -> torch.Tensor:
        return super().matrix().t()


class SplitConv(SplitLinear, nn.modules.conv._ConvNd):
    """Mixin for nn.Conv1d, nn.Conv2d and nn.Conv3d, divided by output channels; of a grouped one, by groups.

    Attributes:
        local_groups: those of this rank.
        input_counts: input channels by rank where there are groups, else None.
        channels_last: whether those of the weight lay last in memory, so that torch puts those of the output there.
    """

    by_output, enters, leaves = True, True, True
    local_groups: int
    input_counts: tuple[int, ...] | None
    channels_last: bool

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return SplitLinear.forward(self, input)  # which stands behind nn.Conv1d where an heir's forward calls this

    def _run(self, x, enters, leaves):
        inside = self.enter(x)
        with gathering_again(inside):
            y = self.convolve(inside, self._parameters["bias"])
        return self.leave(y, inside)

    def enter(self, x: torch.Tensor):
        if self.input_counts is None:
            inside = enter(x, self.axis)
        else:
            x = whole(x)
            inside = take(x, self.axis, self.input_counts, x.dim() + self.feature_dim)
        return channels_last(inside, self.feature_dim) if self.channels_last else inside

    def leave(self, y: torch.Tensor, inside: torch.Tensor):
        """The whole output. Its channels lie last in memory where torch puts them there, as masks of dropout follow the
        memory; a rank that makes none goes by its input."""
        made = gather(y, self.axis, self.counts, y.dim() + self.feature_dim)
        last = (y if y.numel() else inside).stride(self.feature_dim) == 1
        return channels_last(made, self.feature_dim) if last else made

    def convolve(self, x: torch.Tensor, bias: torch.Tensor | None):
        groups, self.groups = self.groups, self.local_groups
        try:
            if len(self.weight):
                return self._conv_forward(x, self.weight, bias)
            return self._no_channels(x, lambda one, kernel: self._conv_forward(one, kernel, None))
        finally:
            self.groups = groups  # which an heir's forward reads beside the whole weight

    def _no_channels(self, x, convolve):
        # torch refuses to make no channels: make one, which gives the shape and the place in the graph, and drop it.
        # Its kernel, sums of nothing, depends on the parameters: backward must pass here on all ranks, or on none.
        sums = (parameter.sum() for parameter in self._parameters.values() if parameter is not None)
        zero = sum(sums, start=x.new_zeros(()))
        kernel = zero.to(x.dtype).expand(1, 1, *self.kernel_size)
        one = convolve(x.sum(self.feature_dim, keepdim=True), kernel)
        return one.narrow(self.feature_dim, 0, 0)


class SplitConvTranspose(SplitConv, nn.modules.conv._ConvTransposeNd):
    """Mixin for nn.ConvTranspose1d, 2d and 3d, divided in the same way."""

    def forward(self, input: torch.Tensor, output_size: list[int] | None = None):
        with local():
            dims, inside, weight = len(self.kernel_size), self.enter(input), self.weight
            assert not isinstance(self.padding, str)
            stride, padding, dilation = list(self.stride), list(self.padding), list(self.dilation)
            more = self._output_padding(inside, output_size, stride, padding, list(self.kernel_size), dims, dilation)
            apply = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1]

            def convolve(x, kernel, bias=None):
                return apply(x, kernel, bias, stride, padding, more, self.local_groups, dilation)

            if weight.numel():
                y = convolve(inside, weight, self._parameters["bias"])
            else:
                y = self._no_channels(inside, convolve)
            return self.leave(y, inside)


class SplitBilinear(nn.Bilinear):
    """Mixin for nn.Bilinear: each rank computes its part of the output features.

    Attributes: `axis`; `counts`, of output features by rank.
    """

    axis: Axis
    counts: tuple[int, ...]

    def forward(self, input1: torch.Tensor, input2: torch.Tensor):
        with local():
            first, second = (enter(x, self.axis) for x in (input1, input2))
            y = F.bilinear(first, second, self.weight, self._parameters["bias"])
            return gather(y, self.axis, self.counts, y.dim() - 1)


def split_linear(plan: Plan, module: torch.nn.Module, **how: Any) -> None:
    """As `split_matrix`."""
    split_matrix(plan, module, SplitLinear, 0, 1, **how)


def share_entry(plan: Plan, module: torch.nn.Module, groups: list[list[Any]]) -> None:
    """Of the layers of a unit, in groups that take the same input; its mixin inherits from Unit, theirs from
    SharedEntry."""
    entered, layers = SharedInput(groups), [layer for group in groups for layer in group]
    for layer in layers:
        plan.change(layer, entered=entered)
    enclose(plan, module, entered, layers)


def split_conv1d(plan: Plan, module: torch.nn.Module, **how: Any) -> None:
    split_matrix(plan, module, SplitConv1D, 1, 0, **how)


def split_matrix(
    plan: Plan, module: torch.nn.Module, mixin: type, out_dim: int, in_dim: int, *, by_output: bool | None = None,
    parts: list[slice] | None = None, fused: int = 1, enters: bool = True, leaves: bool = True,
) -> None:  # fmt: skip
    """Divide a matrix: by default its longer side, which moves less data and leaves fewer ranks without any.

    Args:
        parts: every rank's part of the divided features; balanced by default.
        fused: matrices stacked along the output features, of each of which a rank keeps the same part.
    """
    shape = module.get_parameter("weight").shape
    if by_output is None:
        by_output = shape[out_dim] >= shape[in_dim]
    dim = out_dim if by_output else in_dim
    parts = parts or plan.parts(shape[dim] // fused)
    plan.split(module, "weight", dim, parts, fused)
    if by_output:
        plan.split(module, "bias", 0, parts, fused)
    else:
        plan.split(module, "bias", 0)
    plan.swap_class(
        module, mixin, axis=plan.axis, by_output=by_output, counts=tuple(p.stop - p.start for p in parts),
        enters=enters, leaves=leaves, shards=plan.shards,
    )  # fmt: skip


def split_convolution(plan: Plan, module: nn.modules.conv._ConvNd) -> None:
    size, groups = plan.axis.size, module.groups
    unit = module.out_channels // groups if groups > 1 else 1
    parts = plan.parts(module.out_channels, unit)
    part = parts[plan.axis.rank]
    plan.split(module, "weight", 0, parts)
    plan.split(module, "bias", 0, parts)
    plan.swap_class(
        module, SplitConv, axis=plan.axis, counts=tuple(p.stop - p.start for p in parts),
        local_groups=max(1, (part.stop - part.start) // unit) if groups > 1 else 1,
        input_counts=split_sizes(module.in_channels, size, module.in_channels // groups) if groups > 1 else None,
        feature_dim=-1 - len(module.kernel_size), channels_last=_has_channels_last(module.weight),
    )  # fmt: skip


def split_transposed_convolution(plan: Plan, module: nn.modules.conv._ConvTransposeNd) -> None:
    """By output channels, which are dim 1 of its weight; of a grouped one by groups, which are in dim 0."""
    size, groups = plan.axis.size, module.groups
    unit = module.out_channels // groups if groups > 1 else 1
    inputs = module.in_channels // groups
    parts = plan.parts(module.out_channels, unit)
    part = parts[plan.axis.rank]
    if groups > 1:
        plan.split(module, "weight", 0, plan.parts(module.in_channels, inputs))
    else:
        plan.split(module, "weight", 1, parts)
    plan.split(module, "bias", 0, parts)
    plan.swap_class(
        module, SplitConvTranspose, axis=plan.axis, counts=tuple(p.stop - p.start for p in parts),
        local_groups=max(1, (part.stop - part.start) // unit) if groups > 1 else 1,
        input_counts=split_sizes(module.in_channels, size, inputs) if groups > 1 else None,
        feature_dim=-1 - len(module.kernel_size), channels_last=_has_channels_last(module.weight),
    )  # fmt: skip


def split_bilinear(plan: Plan, module: nn.Bilinear) -> None:
    plan.split(module, "weight", 0)
    plan.split(module, "bias", 0)
    plan.swap_class(module, SplitBilinear, axis=plan.axis, counts=split_sizes(module.out_features, plan.axis.size))
