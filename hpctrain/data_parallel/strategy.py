"""The interface between the trainer and a data parallel strategy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from hpctrain import comm
from hpctrain.choices import check_by_elements
from hpctrain.data_parallel import optimizer_state
from hpctrain.data_parallel.alike import differing
from hpctrain.data_parallel.clipping import clip, local_squares, replica_totals
from hpctrain.given import check_types
from hpctrain.grid import Grid
from hpctrain.parameter import annotate, forget_strategy, on_arrival, shard_of
from hpctrain.rank_gradient import as_tensors
from hpctrain.shard_entries import Described, Entry


class DataParallelStrategy:
    """A way to train on the data axis. The trainer calls, in the order of a step:

        strategy.zero_grad()  # forget the gradients of the last step
        strategy.enable_grad_sync()  # the next backward is the last of the step, for all or some parameters
        strategy.finish_grad_sync()  # the gradients are complete
        loss, norm = strategy.loss_and_grad_norm(loss)  # alike on all ranks; the trainer stops unless finite
        strategy.step(norm, max_norm)  # clip, and let the optimizer step

    and `with strategy.full_weights()` around what uses the trained model: evaluation, generation, export.

    Args:
        parameters: of this rank's stage, in the same order on all ranks of the data axis; each carries its `Shard`.
            Those that are frozen are left as they are. Where an earlier strategy has them, it hands them over.
        grid: the process grid.
        optimizer: over these parameters; its learning rate may be set before each step. None where the caller updates.

    Raises:
        ValueError: on every rank, for what is no parameter, for parameters without a `Shard`, for weights that differ
            between ranks that hold the same slice, and when the optimizer has other weights, as those that an earlier
            ZeRO strategy gave it, or mixes the elements of a weight of which it is given parts; from `zero_grad()`,
            when a later strategy has the parameters, or one of them was frozen or unfrozen since.
        RuntimeError: from backward or `step()`, when a step was not begun by `zero_grad()` of the strategy; from
            `step()`, or that of the optimizer, without `finish_grad_sync()`, or when the optimizer should have parts of
            weights and was given others since.
    """

    alike = True  # after an update all replicas have the same weights, to the bit
    # When a rank has the gradient of a step, all have had that of the step so many before, and nobody waits for it; 0
    # where all take the same step at about the same time.
    lag = 0
    uses_grad = True  # `step` uses `.grad` as `finish_grad_sync` leaves it
    divides = False  # the optimizer is given parts of the weights, flat, whose gradients `step` sets
    _summed = True  # whatever gradients have come since `zero_grad()`
    _stepped = False  # since `zero_grad()`
    _optimized = 0  # how many weights the optimizer has, or parts of them

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], grid: Grid, optimizer: torch.optim.Optimizer | None = None
    ):
        given: list[Any] = [parameters] if isinstance(parameters, torch.nn.Module) else list(parameters)
        if others := [type(p).__name__ for p in given if not isinstance(p, torch.Tensor)]:
            raise ValueError(f"{type(self).__name__} takes weights, model.parameters(), got a {others[0]}")
        self.parameters = [parameter for parameter in given if parameter.requires_grad]
        self._frozen = [parameter for parameter in given if not parameter.requires_grad]
        check_types(grid=(grid, Grid))
        self.grid, self._optimizer = grid, optimizer
        with comm.together(grid.world):  # ranks differ in what they hold
            self._check_parallelized(self.parameters)
            self._check_optimizer()
        with comm.together(grid.world):
            self._check_alike(given)
        for earlier in dict.fromkeys(vars(p)["strategy"] for p in given if "strategy" in vars(p)):
            earlier.hand_over()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """What updates the weights, where it is not the caller."""
        if self._optimizer is None:
            kind = type(self).__name__
            raise ValueError(
                f"{kind} was made without the optimizer that is to update the weights; use {kind}(parameters, grid, "
                "optimizer)"
            )
        return self._optimizer

    def _check_parallelized(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        if plain := [p for p in parameters if not hasattr(p, "shard")]:
            raise ValueError(
                f"{type(self).__name__} got {len(plain)} weights of a plain module, the first of shape "
                f"{tuple(plain[0].shape)}: call model = ht.parallelize(model, grid) before the strategy is made"
            )

    def _check_alike(self, given: Iterable[torch.nn.Parameter]) -> None:
        # Those that an earlier strategy has are its own to keep alike, and may differ between its steps.
        new = {p: n for n, p in enumerate(given) if hasattr(p, "shard") and "strategy" not in vars(p)}
        names = {p: f"weight {n} of shape {tuple(p.shape)}" for p, n in new.items()}
        if wrong := differing(names, self.grid):
            raise ValueError(
                f"{wrong[0]}: begin with the same weights on every rank, as ht.layers do by themselves, or by "
                "torch.manual_seed with one seed"
            )

    def _check_optimizer(self) -> None:
        known = set(self.parameters)
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        if others := [p for group in groups for p in group["params"] if p.requires_grad and p not in known]:
            raise ValueError(
                f"{type(self).__name__} got an optimizer over {len(others)} weights that are not among its parameters, "
                f"the first of shape {tuple(others[0].shape)}: make a new optimizer over model.parameters(), as an "
                "earlier ZeRO strategy has put its parts of the weights into this one"
            )
        if self.divides and self._optimizer is not None:
            check_by_elements(self._optimizer)

    def _take_parameters(self) -> None:
        """From now on gradients go to this strategy."""
        for parameter in self.parameters:
            on_arrival(parameter, self._arrived)
            annotate(parameter, strategy=self)

    def _take_optimizer(self) -> None:
        """From now on it steps as `_check_step` lets it."""
        if self._optimizer is not None:
            self._optimized = _count(self._optimizer)
            self._hook = self._optimizer.register_step_pre_hook(lambda *_: self._check_step())

    def _check_step(self) -> None:
        """Raise RuntimeError where the optimizer would change weights by other gradients than those of all ranks."""
        kind = type(self).__name__
        if not self._summed:
            raise RuntimeError(
                f"{kind} got gradients that are of this rank's batch alone: call strategy.finish_grad_sync() after the "
                "last backward of a step, before the optimizer's"
            )
        if self.divides and not self._stepped:
            raise RuntimeError(
                f"{kind} gave the optimizer parts of the weights, which have no gradients but in "
                "strategy.step(norm, max_norm): call that, not optimizer.step()"
            )
        if self.divides and self._optimizer is not None and _count(self._optimizer) != self._optimized:
            raise RuntimeError(
                f"{kind} gave the optimizer parts of the weights, and its groups were changed since, as by "
                "add_param_group: make a new optimizer over the model's parameters, and a new strategy"
            )

    def hand_over(self) -> None:
        """A later strategy takes the parameters: leave them as they would be without this one, with the weights of the
        trained model. Collective."""
        if self._optimizer is not None:
            self._hook.remove()
        for parameter in self.parameters:
            forget_strategy(parameter)

    def zero_grad(self) -> None:
        """Forget the gradients of the last step."""
        self._check_parameters()
        self._summed, self._stepped = True, False
        for parameter in self.parameters:
            parameter.grad = None

    def _check_parameters(self) -> None:
        """Raise ValueError where gradients go to another strategy, whose buckets these are not, or would not come."""
        kind = type(self).__name__
        if any(vars(p)["arrival"] != self._arrived for p in self.parameters):
            raise ValueError(
                f"{kind} was given weights that a later strategy has now: use one strategy, or Trainer, of a model at "
                f"a time, or make {kind}, its optimizer and its Trainer anew"
            )
        with as_tensors():  # a parallelized weight takes long to be asked
            frozen = not all(p.requires_grad for p in self.parameters)
            thawed = any(p.requires_grad for p in self._frozen)
        after = "make the strategy, or the Trainer, and its optimizer, after freezing and unfreezing"
        if frozen:
            raise ValueError(
                f"a weight that was trained when {kind} was made is frozen now, and would still decay and move by its "
                f"momentum; {after}"
            )
        if thawed:
            raise ValueError(
                f"a weight that was frozen when {kind} was made requires its gradient now, which nobody would sum; "
                f"{after}"
            )

    def _arrived(self, parameter: torch.nn.Parameter) -> None:
        """A backward has added to the parameter's gradient."""
        raise NotImplementedError

    def enable_grad_sync(self, parameters: Iterable[torch.nn.Parameter] | None = None) -> None:
        """The next backward completes the gradients of these parameters, by default of all."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards within it are added up; the one after it is the last of the step. As that of torch's DDP."""
        yield
        self.enable_grad_sync()

    def unused(self) -> list[torch.nn.Parameter]:
        """The parameters from which no replica's loss of this step was computed; after `finish_grad_sync()`. Their
        gradient is taken as zero, where torch's optimizers would pass over them. Collective over the data axis."""
        mine = {i for i, p in enumerate(self.parameters) if self._is_unused(p)}
        everyone = comm.all_gather_object(mine, self.grid.data)
        return [self.parameters[i] for i in sorted(set.intersection(*everyone))]

    def _is_unused(self, parameter) -> bool:
        """On this rank."""
        return False

    @property
    def loss_scale(self) -> float:
        """What the loss is to be multiplied by; `loss_and_grad_norm` are those without."""
        return 1.0

    def overflows(self, loss: float, norm: float) -> bool:
        """Whether these say that the step is to be left out, as the gradient overflowed; called once a step."""
        return False

    def finish_grad_sync(self) -> None:
        raise NotImplementedError

    def loss_and_grad_norm(self, loss: torch.Tensor) -> tuple[float, float]:
        """The loss over all ranks, of which this rank's share is given as float64, and the norm of the gradient."""
        with as_tensors():
            totals = replica_totals(loss, local_squares(self.parameters, self.grid.coords), self.grid)
        comm.all_reduce(totals[:1], self.grid.data)
        total, square = totals.tolist()
        return total, square**0.5

    def step(self, norm: float, max_norm: float) -> None:
        """Change the weights by the gradient, scaled down to `max_norm` where that is not 0."""
        self._check_step()
        if max_norm:
            with as_tensors():
                clip(self.parameters, norm, max_norm)
        self.optimizer.step()

    def full_weights(self) -> contextlib.AbstractContextManager:
        """Within it, every rank's weights are those of the trained model. Collective."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Within it, what the optimizer updates is the moving average of the weights that it keeps, if it does, and so
        is what every rank computes with. Collective, but where what is done within it fails: other ranks may not."""
        averages = {p: state["ema"] for p, state in self.optimizer.state.items() if "ema" in state}
        own = [p.detach().clone() for p in averages]
        self._replace(averages, averages.values())
        try:
            yield
        except BaseException:
            _copy(averages, own)  # and weights held elsewhere follow with the next update
            raise
        self._replace(averages, own)

    def _replace(self, parameters: Iterable[torch.Tensor], values: Iterable[torch.Tensor]) -> None:
        """Of the optimizer."""
        self.grid.comm.barrier()  # others may compute with them, in shared memory
        _copy(parameters, values)
        self.weights_changed()

    def weights_changed(self) -> None:
        """The optimizer's parameters have changed: bring them to wherever else weights are held. Collective."""

    def report(self) -> dict:
        """Members for the step's line of metrics."""
        return {}

    def to_save(self, names: dict[torch.nn.Parameter, str]) -> list[Entry]:
        """What this rank writes to a checkpoint; see `shard_entries.State`. Parameters are `names` in it. Communicates
        nothing: another rank may have failed."""
        return optimizer_state.to_save(names, self.optimizer, self.grid)

    def to_load(self, names: dict[torch.nn.Parameter, str], saved: dict[str, Described]) -> list[Entry]:
        """Memory to be filled from a checkpoint, of any grid and any method, that holds the tensors `saved`.

        Raises:
            ValueError: when that is of another model.
        """
        return optimizer_state.to_load(names, self.optimizer, saved)

    def _divided(self, names):
        """Names of what is trained, and of what is not or has no elements, which every replica has whole."""
        trained = {p for p in self.parameters if 0 not in shard_of(p).global_shape}
        return [{p: name for p, name in names.items() if (p in trained) is which} for which in (True, False)]

    def loaded(self) -> None:
        """What `to_load` gave has been filled: bring it to wherever else it is held. Collective."""


def _count(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


@torch.no_grad()
def _copy(parameters: Iterable[torch.Tensor], values: Iterable[torch.Tensor]) -> None:
    for parameter, value in zip(parameters, values):
        parameter.copy_(value)
