"""The executor: runs one rank's program of any schedule, messages under way while it computes."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch

from hpctrain import comm
from hpctrain.data_parallel.buckets import HOLDERS_TAG
from hpctrain.grid import Axis
from hpctrain.pipeline.actions import (
    BACKWARD,
    FORWARD,
    FREE,
    INPUT_GRADIENT,
    RECEIVE,
    REDUCE,
    SEND,
    UPDATE,
    WEIGHT_GRADIENT,
    Action,
)
from hpctrain.pipeline.given_gradients import scalar_of
from hpctrain.pipeline.pool import Pool
from hpctrain.pipeline.schedules import COSTS, Schedule
from hpctrain.pipeline.simulate import Costs

MOST_EDGES = HOLDERS_TAG // 2  # two tags each, below those that data_parallel and hpctrain.comm use themselves


class StageWork(abc.ABC):
    """What the executor asks of a model. An action names replica, stage, microbatch, token slice and version."""

    @abc.abstractmethod
    def message_spec(self, action: Action) -> tuple[tuple[int, ...], torch.dtype, torch.device | None]:
        """Shape, dtype and device of the activation that a receive brings along `action.edge`."""

    @abc.abstractmethod
    def forward(self, action: Action, inputs: list[torch.Tensor]) -> torch.Tensor | Sequence[torch.Tensor]:
        """The stage's output from what came along its edges, in the order of `graph.into[stage]`.

        One tensor goes along every edge of `graph.out[stage]`; or there is one for each. Of a stage without edges to
        others it is the microbatch's loss. Inputs must not be changed in place: other stages of the rank see them too.
        """

    def carried(self, action: Action) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Only asked where microbatches are cut into slices: what else the forward of `action` gave to later slices,
        and the gradients that those have left for it."""
        raise NotImplementedError

    def reduce(self, action: Action) -> None:
        """Only called by schedules with several versions of the weights, as are the two below: the gradients of the
        stage's next update are complete on this rank."""
        raise NotImplementedError

    def update(self, action: Action) -> None:
        """Make version `action.version` of the stage's weights."""
        raise NotImplementedError

    def free(self, action: Action) -> None:
        """Version `action.version` is used no more."""
        raise NotImplementedError


class Executor:
    """Runs a schedule on the pipeline axis, any of `hpctrain.pipeline`.

    Messages do not block, but are started in an order that is proven to be safe if they did. With
    `grid.transport.synchronous` they do block, both ends, by MPI_Ssend.

    Of a schedule with a flush, the reduction and the update are the caller's, after `run`.

    Args:
        axis: the pipeline axis.
        schedule: is lowered and checked here, before anything is sent.
        split_backward: puts off weight gradients (`layers.SplitBackward`); for schedules that split backwards.
        costs: decide the order of messages.

    Attributes:
        pool: the buffers of arriving messages.

    Raises:
        ValueError: on every rank, for a schedule of another number of ranks, one that is not valid, or one that splits
            backwards where `split_backward` is missing.
    """

    def __init__(self, axis: Axis, schedule: Schedule, split_backward: Any = None, costs: Costs = COSTS):
        if schedule.ranks != axis.size:
            raise ValueError(
                f"schedule {schedule.name} is for {schedule.ranks} ranks, axis {axis.name} has {axis.size}"
            )
        if len(schedule.graph.edges) > MOST_EDGES:
            raise ValueError(f"a stage graph of {len(schedule.graph.edges)} edges; {MOST_EDGES} is the most")
        lowered = schedule.lower(costs)
        if schedule.splits and split_backward is None:
            raise ValueError(
                f"{schedule.name} splits backwards: give the executor split_backward=layers.SplitBackward(model), or "
                "use a schedule with whole backwards, such as 1f1b"
            )
        self.axis, self.schedule, self.split_backward, self.pool = axis, schedule, split_backward, Pool()
        program = lowered.programs[axis.rank]
        if not schedule.delayed:
            program = [action for action in program if action.kind not in (REDUCE, UPDATE, FREE)]
        self._steps = [_Step(action, schedule.graph, lowered) for action in program]
        self.last_backwards = self._mark_last()

    def _mark_last(self) -> list[tuple[int, int]]:
        """The (replica, stage) whose gradients a whole backward completes, in the order in which it does."""
        last: dict[tuple[int, int], _Step] = {}
        for step in self._steps:
            if step.action.kind in (BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT):
                last.pop(step.unit[:2], None)
                last[step.unit[:2]] = step
        whole = [place for place, step in last.items() if step.action.kind == BACKWARD]
        for place in whole:
            last[place].last = True
        return whole

    def run(
        self, work: StageWork, on_last_backward: Callable[[Action], None] = lambda action: None
    ) -> list[torch.Tensor]:
        """Carry out the program; returns what this rank's last stages gave (losses, in training), in program order.

        `on_last_backward` is called before a backward that completes the gradients of its stage.
        """
        run, trace = _Run(self, work, on_last_backward), self.axis.transport.trace
        for step in self._steps:
            if trace is None:
                step.do(run, step)
            else:
                run.began = perf_counter()
                step.do(run, step)
                trace.add("pipeline", f"{step.action.kind} {step.action.microbatch}", run.began, **_said(step.action))
        run.finish()
        return run.results


def _said(action: Action) -> dict[str, int | str]:
    """What a trace tells of an action."""
    return {"what": str(action), "stage": action.stage, "replica": action.replica, "slice": action.slice,
            "version": action.version}  # fmt: skip


class _Step:
    """An action with all that can be known of it beforehand.

    A message is named by (tag, replica, microbatch, slice); the tag tells edge and direction.
    """

    __slots__ = ("action", "do", "gives", "last", "message", "output", "takes", "unit", "users")

    def __init__(self, action: Action, graph, lowered):
        kind, (replica, stage, m, part) = action.kind, action.unit
        self.action, self.unit, self.last = action, action.unit, False
        self.do = _Run.DO[kind]
        activations = [(2 * edge, replica, m, part) for edge, _ in graph.into[stage]]
        outputs = [(2 * edge, replica, m, part) for edge, _ in graph.out[stage]]
        self.takes = self.gives = self.message = self.output = None
        if kind == FORWARD:
            self.takes, self.gives = activations, outputs
        elif kind in (BACKWARD, INPUT_GRADIENT):
            self.takes, self.gives = (
                [(tag + 1, *rest) for tag, *rest in messages] for messages in (outputs, activations)
            )
            # autograd adds up a tensor's gradients in the reverse order of its users, and so do stages
            places = [graph.sorted.index(target) for _, target in graph.out[stage]]
            self.users = sorted(range(len(places)), key=places.__getitem__, reverse=True)
            self.takes = [self.takes[i] for i in self.users]
        elif action.peer is not None and action.edge is not None:
            gradient = lowered.is_gradient(action)
            self.message = 2 * action.edge + gradient, replica, m, part
            if gradient and kind == RECEIVE:  # has the shape of what the receiver gave along the edge
                source = graph.edges[action.edge].source
                self.output = (replica, source, m, part), [edge for edge, _ in graph.out[source]].index(action.edge)


class _Run:
    """The state of one pass through a program."""

    def __init__(self, executor: Executor, work: StageWork, on_last_backward):
        self.axis, self.pool, self.split_backward = executor.axis, executor.pool, executor.split_backward
        self.training, self.sliced = executor.schedule.training, executor.schedule.slices > 1
        self.synchronous = executor.axis.transport.synchronous
        self.work, self.on_last_backward = work, on_last_backward
        self.messages: dict[tuple, torch.Tensor | comm.Work] = {}  # to be sent, under way here, or between stages here
        self.saved: dict[tuple, tuple] = {}  # unit -> (inputs, outputs), from its forward to its gradients
        self.products: dict[tuple, list] = {}  # unit -> weight gradients to be computed
        self.leaving: list[comm.Work] = []
        self.results: list[torch.Tensor] = []
        self.began = 0.0  # the action under way

    def receive(self, step):
        action = step.action
        if step.output is None:
            shape, dtype, device = self.work.message_spec(action)
        else:
            unit, number = step.output
            y = self.saved[unit][1]
            y = y if isinstance(y, torch.Tensor) else y[number]
            shape, dtype, device = y.shape, y.dtype, y.device
        buffer = self.pool.take(tuple(shape), dtype, device)
        work = comm.recv_start(buffer, self.axis, action.peer, step.message[0])
        self.messages[step.message] = work.wait() if self.synchronous else work

    def send(self, step):
        tensor, peer, tag = self.take(step.message), step.action.peer, step.message[0]
        if self.synchronous:
            comm.send(tensor, self.axis, peer, tag)
        else:
            self.leaving = [work for work in self.leaving if not work.test()]
            self.leaving.append(comm.send_start(tensor, self.axis, peer, tag))

    def take(self, message) -> torch.Tensor:
        found = self.messages.pop(message)
        if isinstance(found, comm.Work):
            found = found.wait()
            self.began = perf_counter()  # to a trace, waiting is no part of the work
        return found

    def forward(self, step):
        inputs = [self.take(message) for message in step.takes]
        if self.training:
            for x in inputs:
                x.requires_grad_()
        y = self.work.forward(step.action, inputs)
        if self.training:
            self.saved[step.unit] = inputs, y
        if not step.gives:
            assert isinstance(y, torch.Tensor)
            self.results.append(y.detach())
        elif isinstance(y, torch.Tensor):
            for message in step.gives:
                self.messages[message] = y.detach()
        else:
            for message, part in zip(step.gives, y, strict=True):
                self.messages[message] = part.detach()

    def backward(self, step):
        if step.last:
            self.on_last_backward(step.action)
        inputs, y = self.saved.pop(step.unit)
        grads: list[torch.Tensor | None] = [self.take(message) for message in step.takes]
        roots = [y if isinstance(y, torch.Tensor) else y[i] for i in step.users] or [y]
        if self.sliced:
            more, of_more = self.work.carried(step.action)
            roots, grads = roots + more, [*(grads or [None]), *of_more]
        # a stage without parameters or inputs has nothing to differentiate
        wanted = [(y, grad) for y, grad in zip(roots, grads or [None]) if y.requires_grad]
        if wanted:
            scalar_of(*zip(*wanted)).backward()
        for message, x in zip(step.gives, inputs):
            self.messages[message] = torch.zeros_like(x) if x.grad is None else x.grad

    def input_gradient(self, step):
        with self.split_backward as self.products[step.unit]:
            self.backward(step)

    def weight_gradient(self, step):
        with torch.no_grad():
            for product in self.products.pop(step.unit):
                product()

    def reduce(self, step):
        self.work.reduce(step.action)

    def update(self, step):
        self.work.update(step.action)

    def free(self, step):
        self.work.free(step.action)

    def finish(self):
        for work in self.leaving:
            work.wait()

    DO = {
        FORWARD: forward, BACKWARD: backward, INPUT_GRADIENT: input_gradient, WEIGHT_GRADIENT: weight_gradient,
        SEND: send, RECEIVE: receive, REDUCE: reduce, UPDATE: update, FREE: free,
    }  # fmt: skip
