"""Costs of a pipeline's stages for the simulator, measured on all ranks at once, and the bytes that a step holds."""

import dataclasses
import functools
import time

import torch
from mpi4py import MPI
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain import comm
from hpctrain.layers import SplitBackward
from hpctrain.pipeline import Costs, Executor, StageGraph
from hpctrain.pipeline.profile import profile
from hpctrain.train.stages import Stages

REPEATS = 5


def stage_costs(side):
    """The side's schedule with the bytes of its messages, and the costs of its stages, the same on all ranks."""
    world, model = MPI.COMM_WORLD, side.model
    batch = side.microbatches[0]
    (rows, width), dtype, _ = model.message_spec(batch.tokens, 0)
    mine = {}
    for stage in model.stages:
        split_backward = SplitBackward(model)

        def forward(x, stage=stage):
            y = model(x, batch.tokens, stage)
            return model.loss(y, batch.targets, batch.scale) if stage == model.last else y

        def make_input(stage=stage):
            return torch.randn(rows, width, dtype=dtype).requires_grad_() if stage else batch.ids

        world.Barrier()
        side.trainer.strategy.zero_grad()  # the profile's backwards are not those of the step that is over
        costs = profile([forward], make_input, REPEATS, split_backward)
        # the output is held too, to start the backward from
        output = costs.message[0] if stage < model.last else 0
        mine[stage] = {
            "forward": costs.forward[0],
            "input_gradient": costs.input_gradient[0],
            "weight_gradient": costs.weight_gradient[0],
            "activation": costs.activation[0] + output,
            "kept": kept(forward, make_input(), split_backward),
        }
    for stage, seconds in _after_a_step(side).items():
        mine[stage] |= seconds
    told = {stage: costs for part in world.allgather(mine) for stage, costs in part.items()}
    latency, bandwidth = _message(side.trainer.grid.pipeline, rows * width)
    stages = side.schedule.graph.stages
    tables = {name: [told[stage][name] for stage in range(stages)] for name in told[0]}
    made = dataclasses.replace(side.schedule, graph=StageGraph.chain(stages, (rows, width)))
    return made, Costs(**tables, latency=latency, bandwidth=bandwidth)


def kept(forward, x, split_backward):
    """Bytes that the weight gradients hold which the input gradient has put off."""
    with Census() as census:
        y = forward(x)
        with split_backward as products:
            y.backward(torch.ones_like(y))
    del y
    x.grad = None  # of the input, which what is put off leads to
    before = census.bytes()
    products.clear()
    return before - census.bytes()


def _after_a_step(side):
    """Seconds of reduction and update, a stage."""
    side.step()
    replicas, stages = side.trainer.strategy, side.model.stages

    def reduce():
        replicas.finish_grad_sync()

    def update():
        replicas.loss_and_grad_norm(torch.zeros((), dtype=torch.float64))
        replicas.step(0.0, 0.0)

    seconds = {"reduce": _least(reduce) / len(stages), "update": _least(update) / len(stages)}
    return dict.fromkeys(stages, seconds)


def _message(axis, numel):
    """Latency, and bytes a second of a large message, from one rank to the next and back."""

    def trip(tensor):
        for rank in range(2):
            if axis.rank == rank:
                comm.send(tensor, axis, 1 - rank)
            elif axis.rank == 1 - rank:
                comm.recv(tensor, axis, rank)

    small, large = torch.zeros(1), torch.zeros(numel)
    latency, whole = (_least(functools.partial(trip, tensor)) / 2 for tensor in (small, large))
    return MPI.COMM_WORLD.bcast((latency, large.nbytes / max(whole - latency, 1e-9)))


def _least(work):
    times = []
    for _ in range(REPEATS):
        MPI.COMM_WORLD.Barrier()
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


class Census(TorchDispatchMode):
    """The storages of all tensors made since it began; `peak`: bytes of those alive together at any `count`."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak = {}, 0
        self.old = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        known = {
            t.untyped_storage()._cdata for t in torch.utils._pytree.tree_leaves((args, kwargs)) if torch.is_tensor(t)
        }
        result = function(*args, **kwargs)
        for t in torch.utils._pytree.tree_leaves(result):
            if torch.is_tensor(t) and t.untyped_storage()._cdata not in known:
                storage = t.untyped_storage()
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def bytes(self):
        """Of those that are alive."""
        self.alive = {key: each for key, each in self.alive.items() if not each[0].expired()}
        return sum(size for _, size in self.alive.values())

    def count(self):
        self.peak = max(self.peak, self.bytes())


class Counted(Stages):
    """Counts at the end of every forward, where a rank holds most."""

    def __init__(self, model, microbatches, census):
        super().__init__(model, microbatches)
        self.census = census

    def forward(self, action, inputs):
        y = super().forward(action, inputs)
        self.census.count()
        return y


def peak_bytes(side):
    """The most that this rank holds at the end of a forward, of what a pass through the schedule made."""
    split_backward = SplitBackward(side.model) if side.schedule.splits else None
    side.step()  # gradients and all else that is kept from step to step
    side.trainer.strategy.zero_grad()
    executor = Executor(side.trainer.grid.pipeline, side.schedule, split_backward)
    with Census() as census:
        executor.run(Counted(side.model, side.microbatches, census))
    return census.peak
