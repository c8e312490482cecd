"""ZeRO-3: weights are spread over the data parallel ranks too, and gathered while a layer computes."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from torch.utils.module_tracker import ModuleTracker

from hpctrain import comm
from hpctrain.data_parallel.buckets import BUCKET_BYTES, grouped
from hpctrain.data_parallel.master_weights import MasterWeights
from hpctrain.data_parallel.model_layers import is_called, layers_of, outside
from hpctrain.data_parallel.precision import AS_GIVEN, Precision
from hpctrain.data_parallel.zero2 import ShardedGradBucket, Zero2
from hpctrain.grid import Axis, Grid
from hpctrain.parameter import annotate, shard_of
from hpctrain.shard_entries import Entry

STEP_END, EVALUATION_END = "the end of a step", "the end of an evaluation"


class Zero3(Zero2):
    """ZeRO-3, also known as fully sharded data parallelism: each rank holds its range of the weights, and what belongs
    to them. A layer's weights are gathered before its forward, and freed after; so before its backward, and when its
    gradients have come. The gather of the next layer, backward of the one before, is started at the same time.

    On one node the ranks have one copy of the weights in shared memory, in which a gather moves nothing.

    The layers are the items of the model's `ModuleList`s and `ModuleDict`s, in each other too; each must compute in its
    `forward`, and backward must reach the first tensor that it returns. What is in none of them, in several, or in one
    and outside, is gathered as long as the whole model computes. Elsewhere, parameters have no memory to be read: use
    `with parameter.gathered:`, which is collective over the data axis.

    Where weights travel by messages a gather is a collective: all replicas must compute the same layers in the same
    order, forward and backward, of which they may use different parameters. A number before each layer says whether
    they do. Sums are then started where a backward comes to a layer, of those after it, which all replicas do at the
    same place among the gathers.

    Args:
        model: whose `parameters()` the optimizer has; the other arguments are as of `Zero1`.

    Raises:
        ValueError: on every rank, for parameters in the place of a model, when the model's linear layers gather their
            weights ahead over z, and when the model has weights outside of its layers and no forward, and weights
            travel by messages; from forward, backward, `finish_grad_sync()` or at the end of `full_weights()`, when
            replicas compute different layers and weights travel by messages.
    """

    alike = False  # ranks hold different parts of the weights
    buckets: Sequence[_FullyShardedBucket]
    _bucket_of: Mapping[torch.nn.Parameter, _FullyShardedBucket]

    def __init__(
        self,
        model: torch.nn.Module,
        grid: Grid,
        optimizer: torch.optim.Optimizer | None,
        bucket_bytes: int = BUCKET_BYTES,
        precision: Precision = AS_GIVEN,
    ):
        if not isinstance(model, torch.nn.Module):
            raise ValueError(
                f"{type(self).__name__} takes the model, of which it gathers layer by layer, got a "
                f"{type(model).__name__}; write Zero3(model, grid, optimizer)"
            )
        modules = layers_of(model)
        uses = Counter(p for module in modules for p in set(module.parameters()))
        uses.update({*outside(model, {*modules})})
        trained = [p for p in model.parameters() if p.requires_grad]
        inside = {module: [p for p in module.parameters() if uses[p] == 1 and p.requires_grad] for module in modules}
        gathered = {p for parameters in inside.values() for p in parameters}
        self._parameters_of = {**inside, model: [p for p in trained if p not in gathered]}
        with comm.together(grid.world):
            self._check_parallelized(trained)
        by_messages = any(comm.path_of(grid.alike(shard_of(p)), p) is comm.Path.MESSAGES for p in trained)
        # Of all, as copies may be on one node where data is not.
        self._by_messages = any(comm.all_gather_object(by_messages, grid.world))
        if self._by_messages and self._parameters_of[model] and not is_called(model):
            raise ValueError(
                f"zero3 between nodes gathers weights before a module's forward; {type(model).__name__} has no "
                f"forward, and {len(self._parameters_of[model])} weights that are in no layer or in several: give it a "
                "forward that computes all, or choose zero2"
            )
        super().__init__(model.parameters(), grid, optimizer, bucket_bytes, precision)
        self._tracker = ModuleTracker()
        self._backwards = 0  # that came to what is outside of the layers, in this step
        self._reached: list[_Layer] = []  # by the backward that is under way, and not left
        names = {module: name or "the whole model" for name, module in model.named_modules()}
        self._layers = [
            _Layer(self, names[module], self._buckets_of(parameters))
            for module, parameters in self._parameters_of.items()
        ]
        passes = (p for layer in self._layers for p in (layer.forward, layer.backward))
        self._places = [STEP_END, EVALUATION_END, *passes]
        self._layer_of = {p: layer for layer in self._layers for b in layer.buckets for p in b.parameters}
        order = self._layers[:-1]  # the last one is what the model has outside of them
        after: list[_Layer | None] = [*order[1:], None, order[0]] if order else [None]
        before: list[_Layer | None] = [None, *order] if order else [None]
        self._hooks: list[RemovableHandle] = []
        for module, layer, following, preceding in zip(self._parameters_of, self._layers, after, before):
            if layer.buckets:
                self._hooks.append(module.register_forward_pre_hook(layer.forward_hook(following)))
                self._hooks.append(module.register_forward_hook(layer.output_hook(preceding)))
        for p, layer in self._layer_of.items():
            annotate(p, gathered=layer)
        self.loaded()  # ranks that share the weights wrote all of them, which nobody may do when others have gone on

    def hand_over(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._release()  # where the last backward failed on its way
        super().hand_over()

    def _groups(self, bucket_bytes: int) -> Iterator[list[torch.nn.Parameter]]:
        *layers, rest = self._parameters_of.values()  # the rest has gradients from both ends of backward
        for parameters in [*reversed(layers), rest]:
            yield from grouped(reversed(parameters), self.grid, bucket_bytes)

    def _buckets_of(self, parameters: Iterable[torch.nn.Parameter]) -> list[_FullyShardedBucket]:
        return list(dict.fromkeys(self._bucket_of[p] for p in parameters))

    def _bucket(
        self, parameters: Sequence[torch.nn.Parameter], plane: Axis | None, precision: Precision
    ) -> _FullyShardedBucket:
        return _FullyShardedBucket(parameters, plane, self.grid.alike(shard_of(parameters[0])), precision)

    def _arrived(self, parameter):
        super()._arrived(parameter)
        self._layer_of[parameter].arrived(parameter)

    def zero_grad(self) -> None:
        super().zero_grad()
        self._backwards = 0
        self._release()  # where the last backward failed on its way

    def in_backward(self) -> bool:
        """Forward may run inside backward, where activations are computed once more."""
        return self._tracker.is_bw

    def forward_reaches(self) -> None:
        """A forward that is no part of a backward comes to a layer: backwards are over."""
        for layer in self._reached:
            layer.release()
        self._reached = []

    def backward_reaches(self, layer: _Layer) -> None:
        """Leave the layer before; start the sums of all that come before this layer's, on all ranks at the same place
        among the gathers."""
        around = self._layers[-1]
        # What is around the layers is reached before or after the last of them, which may return the same tensor; what
        # is reached again, is so by another backward.
        left = [other for other in self._reached if other is layer or around not in (other, layer)]
        for other in left:
            other.release()
        self._reached = [other for other in self._reached if other not in left] + [layer]
        if not self._by_messages:
            return
        if layer is around:  # another backward begins
            while self.buckets[-1].launches < self._backwards:
                self._launch_next()
            self._backwards += 1
        else:
            while self.buckets[self._turn] is not layer.first:
                self._launch_next()

    def _advance(self) -> None:
        if not self._by_messages:
            super()._advance()

    def finish_grad_sync(self) -> None:
        self.come_to(STEP_END)
        super().finish_grad_sync()
        self._release()

    def come_to(self, place: str) -> None:
        """Make sure that all replicas do, where what follows is a collective: of weights of one size, those of
        different layers would be mixed."""
        if not self._by_messages:
            return
        reported = comm.all_gather(torch.tensor([self._places.index(place)]), self.grid.data).tolist()
        if len(set(reported)) > 1:
            self._settle()  # what is under way is so on all replicas
            self._release()
            first = {place: reported.index(place) for place in dict.fromkeys(reported)}
            where = ", ".join(f"replica {rank} comes to {self._places[place]}" for place, rank in first.items())
            raise ValueError(
                "zero3 between nodes needs replicas that compute the same layers in the same order, equally often; "
                f"{where}: compute every layer on all replicas, its output times 0 where it is not used, or choose "
                "zero2, where replicas may differ"
            )

    @contextlib.contextmanager
    def full_weights(self) -> Iterator[None]:
        """Every layer gathers its weights as it computes: within it, all replicas must compute the same layers."""
        yield
        self.come_to(EVALUATION_END)  # where a replica that has fewer batches meets those that still gather

    def _release(self) -> None:
        self._reached = []
        for layer in self._layers:
            layer.awaited.clear()
            layer.release()

    def loaded(self) -> None:
        for bucket in self.buckets:  # where ranks read each other's ranges in place, all must have filled theirs
            bucket.weights.changed_start().wait()

    def weights_changed(self) -> None:
        self._release()  # what was gathered since is of before
        super().weights_changed()

    def _weights_to_load(self, names: dict[torch.nn.Parameter, str]) -> list[Entry]:
        return [entry for bucket in self.buckets for entry in bucket.masters.entries(names)]


class _Layer:
    """The weights of a layer, gathered and freed together.

    Attributes: `forward` and `backward`, what they are called; `first`, the first of its buckets to be summed;
    `awaited`, how many gradients of each parameter are to come from backwards that have begun.
    """

    def __init__(self, owner: Zero3, name: str, buckets: list[_FullyShardedBucket]):
        self.owner, self.buckets = owner, buckets
        self.forward, self.backward = f"the forward of {name}", f"the backward of {name}"
        self.first = next((bucket for bucket in owner.buckets if bucket in buckets), None)
        self.awaited: Counter = Counter()
        # A gather is a collective: whether there is to be one depends on the layers that forward and backward came to,
        # alike on all ranks, and not on gradients that a rank still waits for.
        self._in_use = False
        self._computing = False
        self._entered = 0  # how many `with parameter.gathered:` the caller is in
        self._gathers: list[comm.Work] = []  # none where the weights are not there

    @property
    def readers_need_copy(self) -> bool:
        """Whether what is read outside of the layer's own forward must be copied: by messages the weights are freed
        after use."""
        return self.owner._by_messages and not self._computing

    def gather_start(self) -> None:
        if not self._in_use:
            self._gathers = [bucket.weights.gather_start() for bucket in self.buckets]
            self._in_use = True

    def gather(self) -> None:
        self.gather_start()
        for work in self._gathers:
            work.wait()

    def release(self) -> None:
        self._in_use = self._computing = False
        self._free()

    def _free(self) -> None:
        if self._in_use or self._entered or any(count > 0 for count in self.awaited.values()):
            return
        for work, bucket in zip(self._gathers, self.buckets):
            work.wait()
            bucket.weights.release()
        self._gathers = []

    def __enter__(self) -> None:
        self._entered += 1
        self.gather()

    def __exit__(self, *_) -> None:
        self._entered -= 1
        self.release()

    def arrived(self, parameter) -> None:
        self.awaited[parameter] -= 1
        self._free()

    def forward_hook(self, after: _Layer | None):
        def before_forward(module, arguments):
            self.owner.come_to(self.forward)
            if not self.owner.in_backward():
                self.owner.forward_reaches()
            self.gather()
            self._computing = True
            if after is not None and not self.owner.in_backward():
                after.gather_start()

        return before_forward

    def output_hook(self, before: _Layer | None):
        def before_backward(gradient):
            self.owner.come_to(self.backward)
            self.owner.backward_reaches(self)
            self.gather()
            self.awaited.update(p for bucket in self.buckets for p in bucket.parameters)
            if before is not None:
                before.gather_start()

        def after_forward(module, arguments, output):
            self._computing = False
            given = (leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad)
            if (first := next(given, None)) is not None:
                first.register_hook(before_backward)
            if not self.owner.in_backward():
                self.release()

        return after_forward


class _FullyShardedBucket(ShardedGradBucket):
    """A bucket whose weights are not always there."""

    def _make_masters(self, dtype: torch.dtype | None) -> MasterWeights:
        self.weights = comm.ShardedBuffer(self.alike, sum(self._sizes), self.parameters[0], dtype)
        masters = MasterWeights(self.parameters, self.weights.whole, self.weights.own, self.weights.local)
        self.weights.release()
        return masters

    def spread_start(self) -> comm.Work:
        return self.weights.changed_start()
