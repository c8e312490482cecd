"""ZeRO in a loop of one's own, with torch's optimizers: what happens as the loop reads `p.grad`, clips, steps and
begins anew.

The replicas share out the gradients, the optimizer's state and, with zero=3, the weights, as the strategies of
`data_parallel` do. Backwards are added up, and the mean over the replicas is taken when it is first needed. `p.grad` is
then this rank's range of it, flat and possibly empty, as a `PartialGradient`: norms are those of the whole gradient.
The optimizer's step is run on a stand-in for it, whose groups hold this rank's pieces of the weights. torch's
optimizers, which treat every element by itself, are given those that have elements, as ordinary tensors; any others all
of them, as `WeightPiece`s.
"""

from __future__ import annotations

import sys
from weakref import WeakSet

import torch

from hpctrain import comm
from hpctrain.convert.arriving_gradients import Marker
from hpctrain.convert.gradients import PartialGradient
from hpctrain.convert.part import Part
from hpctrain.convert.replicated_parameter import ReleasedParameter, ReplicatedParameter
from hpctrain.convert.sharded_parameter import ShardedParameter
from hpctrain.convert.sharding import ATTRIBUTES
from hpctrain.convert.weight_piece import WeightPiece, by_torch
from hpctrain.data_parallel import Zero1, Zero2, Zero3
from hpctrain.data_parallel.clipping import clipping_factor
from hpctrain.data_parallel.master_weights import cut_state
from hpctrain.data_parallel.optimizer_state import ParameterSlice
from hpctrain.grid import Grid
from hpctrain.parameter import annotate, shard_of
from hpctrain.rank_gradient import as_tensors
from hpctrain.shard import check_shards

_DATA, _GRAD = ATTRIBUTES["data"], ATTRIBUTES["grad"]


class SpreadGradient(torch.nn.Parameter):
    """Mixin for a parameter whose gradient is spread over the replicas. Code of ours sees the one of its backwards."""

    __slots__ = ()
    replicas: ZeroGradients

    @property
    def grad(self):
        if _is_ours(sys._getframe(1)) or "replicas" not in vars(self):
            with as_tensors():
                return _GRAD.__get__(self)
        return self.replicas.gradient(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None):
        if _is_ours(sys._getframe(1)) or "replicas" not in vars(self):
            with as_tensors():
                _GRAD.__set__(self, value)
        else:
            self.replicas.set_gradient(self, value)


class _Replicated(SpreadGradient, ReplicatedParameter):
    @property
    def data(self):
        """With zero=3, whose replicas share the memory, as `.detach()`, of which `check_memory` sees changes."""
        is_spread = "gathered" in vars(self) and not _is_ours(sys._getframe(1))
        return self.detach() if is_spread else _DATA.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor):
        _DATA.__set__(self, value)


class _Released(SpreadGradient, ReleasedParameter):
    pass


class _Sharded(SpreadGradient, ShardedParameter):
    pass


class ZeroGradients:
    """What `parallelize(model, grid, zero=1, 2 or 3)` does for replicas.

    Raises:
        ValueError: when weights have been given other memory, or thawed, since; for what no rank can do with its range.
    """

    divided = True

    def __init__(self, model: torch.nn.Module, grid: Grid, level: int):
        self.model, self.grid, self.level = model, grid, level
        trained = [p for p in model.parameters() if p.requires_grad]
        for p in trained:
            p.register_post_accumulate_grad_hook(_arrives)  # before the strategy's
        self.strategy = Zero3(model, grid, None) if level == 3 else {1: Zero1, 2: Zero2}[level](trained, grid, None)
        self._pieces: dict[torch.nn.Parameter, ParameterSlice] = {}
        self._views: dict[torch.nn.Parameter, torch.Tensor] = {}
        for bucket in self.strategy.buckets:
            for piece, view in bucket.masters.of_pieces(bucket.gradient):
                self._pieces[piece.parameter], self._views[piece.parameter] = piece, view
        self._parts: dict[torch.nn.Parameter, Part] = {}
        self._memory: dict[torch.nn.Parameter, tuple] = {}
        for name, p in model.named_parameters():
            if p.requires_grad:
                by_messages = comm.path_of(grid.alike(shard_of(p)), p) is comm.Path.MESSAGES
                whole = _Released if level == 3 and by_messages else _Replicated
                p.__class__ = _Sharded if isinstance(p, ShardedParameter) else whole
                divided = (p.sharding.axis,) if isinstance(p, ShardedParameter) else ()
                self._parts[p] = Part(name, grid, (*divided, grid.alike(shard_of(p))), dims=len(vars(p)["whole_shape"]))
                of_copies = Marker(Part(name, grid, divided, sharding=vars(p).get("sharding")), summed=False)
                if p not in self._pieces:
                    self._views[p] = p.detach().new_empty(0)
                    self._pieces[p] = ParameterSlice(p, 0, 0, torch.nn.Parameter(self._views[p].clone()))
                vars(self._pieces[p].local).update(part=self._parts[p], whole_shape=vars(p)["whole_shape"])
                self._memory[p] = _memory(p, level)
                annotate(p, replicas=self, unmanaged=of_copies)
            else:
                annotate(p, replicas=self)  # a step asks whether it was thawed
        # As of the last mean: which parameters have a gradient. Since then: whether a backward came, and a step.
        self._present: set[torch.nn.Parameter] = set()
        self._came, self._stepped = False, True
        self._earlier: dict[torch.nn.Parameter, torch.Tensor] = {}  # means that backwards are added to
        self._seen: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._loads = False
        if level == 3:
            model.register_state_dict_pre_hook(_refuse_state_dict)
            model.register_load_state_dict_pre_hook(_refuse_load)

    # Gradients -------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """The first gradient of a backward is here."""
        if not self._came:
            self._came = True
            self._remember()

    def _remember(self) -> None:
        self._earlier = {p: self._views[p].clone() for p in self._present}

    def complete(self, step: bool = False) -> None:
        """Average what has come since the last time, if anything; collective over the data axis.

        Args:
            step: a step is about to be made, of replicas of which some may have had no backward.
        """
        if not self._came and not (step and self._stepped):
            return
        if not self._came:
            self._remember()
        check_shards(self.model)
        if any(p.requires_grad and p not in self._parts for p in self.model.parameters()):
            raise ValueError(
                "a weight that was frozen in ht.parallelize(zero=...) requires its gradient now, which nobody would "
                "sum; call parallelize after freezing and unfreezing"
            )
        self.strategy.finish_grad_sync()
        unused = set(self.strategy.unused())
        self.strategy.zero_grad()
        for bucket in self.strategy.buckets:
            bucket.gradient.div_(self.grid.replica.size)
        for p, mean in self._earlier.items():
            self._views[p].add_(mean)
        self._present = {p for p in self._parts if p not in unused or p in self._earlier}
        self._stepped = self._stepped and len(unused) == len(self._parts)  # alike on all replicas
        self._earlier, self._came = {}, False

    def gradient(self, parameter: torch.nn.Parameter) -> PartialGradient | None:
        """This rank's range, flat; None where no replica's loss depends on the parameter."""
        if self._came:
            self.complete()
        if parameter not in self._present:
            return None
        return self._marked(parameter)

    def _marked(self, parameter) -> PartialGradient:
        gradient = self._views[parameter].as_subclass(PartialGradient)
        gradient.part = self._parts[parameter]
        return gradient

    def gradients(self) -> list[tuple[ParameterSlice, torch.Tensor]]:
        """This rank's pieces, and the mean gradients of them, flat."""
        return [(self._pieces[p], self._views[p]) for p in self._present]

    def set_gradient(self, parameter: torch.nn.Parameter, value: torch.Tensor | None) -> None:
        """To None, as zero_grad() does."""
        if self._came:
            self.complete()
        if value is not None:
            raise ValueError(
                f"the gradient of {self._parts[parameter].name!r} is spread over the replicas by ht.parallelize"
                f"(zero={self.level}): change .grad in place, or use zero=0"
            )
        self._present.discard(parameter)
        self._views[parameter].zero_()

    def clip(self, max_norm: float) -> torch.Tensor:
        """The norm of the whole gradient, float64, which is scaled to at most `max_norm`; see `complete`."""
        norm = self.strategy.loss_and_grad_norm(torch.zeros((), dtype=torch.float64))[1]
        if not (factor := clipping_factor(norm, max_norm)) >= 1:
            for bucket in self.strategy.buckets:
                bucket.gradient.mul_(factor)
        return torch.tensor(norm, dtype=torch.float64)

    # Steps -----------------------------------------------------------------------------------------------------------

    def in_pieces(self, optimizer: torch.optim.Optimizer, groups: list[dict]) -> list[dict]:
        """An optimizer's groups with this rank's pieces of the weights in the place of these, with their gradients."""
        self.check_memory()
        self.pieces_of(optimizer)
        elementwise = by_torch(optimizer)
        found = []
        for group in groups:
            found.append({**group, "params": []})
            for p in group["params"]:
                if p not in self._parts:
                    found[-1]["params"].append(p)
                    continue
                piece = self._pieces[p]
                with as_tensors():
                    piece.local.__class__ = torch.nn.Parameter if elementwise else WeightPiece
                    view = self._views[p] if elementwise else self._marked(p)
                    piece.local.grad = view if p in self._present else None
                if piece.stop > piece.start or not elementwise:
                    found[-1]["params"].append(piece.local)
        return found

    def pieces_of(self, optimizer: torch.optim.Optimizer) -> dict[torch.nn.Parameter, ParameterSlice]:
        """What this rank has of the weights that are spread: their pieces, possibly empty, of which the optimizer keeps
        its state from now on."""
        if optimizer not in self._seen:
            self._seen.add(optimizer)
            optimizer.register_state_dict_pre_hook(self._refuse_state)
            optimizer.register_load_state_dict_pre_hook(self._refuse_state)
        for group in optimizer.param_groups:
            for p in group["params"]:
                self._cut_state(optimizer, p)
        return self._pieces

    def load_state(self, optimizer: torch.optim.Optimizer, state: dict) -> None:
        """`optimizer.load_state_dict` of states of this rank's pieces."""
        self._loads = True
        try:
            optimizer.load_state_dict(state)
        finally:
            self._loads = False
        for p, piece in self._pieces.items():
            if p in optimizer.state:
                optimizer.state[piece.local] = optimizer.state.pop(p)

    def _refuse_state(self, *_) -> None:
        if not self._loads:
            raise ValueError(
                f"the state of the optimizer is spread over the replicas by ht.parallelize(zero={self.level}): save "
                "ht.gather_optimizer_state(model, optimizer), and load it by ht.load_optimizer_state"
            )

    def _cut_state(self, optimizer, parameter) -> None:
        """What was loaded before the first step; what is empty was made by a look at `optimizer.state[parameter]`."""
        state = optimizer.state.pop(parameter, None) if parameter in self._parts else None
        if not state:
            return
        piece = self._pieces[parameter]
        with as_tensors():
            size = parameter.detach().numel()
        if any(isinstance(value, torch.Tensor) and value.dim() and value.numel() != size for value in state.values()):
            raise ValueError(
                f"the optimizer's state of {self._parts[parameter].name!r} is not that of the part of the weight that "
                "this rank holds"
            )
        optimizer.state[piece.local] = cut_state(state, piece)

    def after_step(self) -> None:
        """The optimizer has changed the pieces: bring them to the others. Collective over the data axis."""
        self.strategy.weights_changed()
        self.grid.data.comm.barrier()  # what others read may be changed from now on
        self._stepped = True

    def check_memory(self) -> None:
        """Raises ValueError where the weights are not those that were spread."""
        for p, part in self._parts.items():
            if _memory(p, self.level) != self._memory[p]:
                raise ValueError(
                    f"the weight {part.name!r} was replaced or, with zero=3, changed by other code than an optimizer's "
                    f"step, since ht.parallelize(zero={self.level}) spread the weights over the replicas; call .to(), "
                    "load_state_dict and the like before parallelize, or use zero=0"
                )

    def __deepcopy__(self, memo):
        return None  # a copy is no replica that anybody trains


def _arrives(parameter) -> None:
    parameter.replicas.begin()


def _memory(parameter, level) -> tuple:
    with as_tensors():
        where = parameter.untyped_storage()._cdata, parameter.storage_offset(), parameter.shape
        return (*where, parameter._version) if level == 3 else where


def _is_ours(frame) -> bool:
    return frame.f_globals.get("__name__", "").startswith("hpctrain.")


def _refuse_state_dict(model, prefix, keep_vars) -> None:
    if not keep_vars:  # which our own ht.gather_state_dict asks for
        raise ValueError("zero=3 spreads the weights over the replicas: save ht.gather_state_dict(model)")


def _refuse_load(*_) -> None:
    raise ValueError("zero=3 spreads the weights over the replicas: call load_state_dict before ht.parallelize")
