"""Training on a grid against the independent serial program of `reference.py`: models, batches and the comparison."""

import dataclasses
import functools

import pytest
import ranks_named
import reference
import torch
from reference_experts import Mixtures

from hpctrain import Grid, RngKey
from hpctrain.choices import OVERLAPS
from hpctrain.config import DataParallelConfig
from hpctrain.data_parallel import make
from hpctrain.layers import Tokens, algorithm_of
from hpctrain.layers.whole_parameters import whole_parameters
from hpctrain.models.gpt2 import GPT2, GPT2Shape
from hpctrain.models.llama import Llama, LlamaShape
from hpctrain.models.mixtral import Mixtral, MixtralShape
from hpctrain.pipeline import schedule
from hpctrain.shard import split, subsplit
from hpctrain.train.batches import Microbatch
from hpctrain.train.optimizer import make_optimizer
from hpctrain.train.trainer import Trainer

# The second step needs the weights and the state of the optimizer that the first leaves; what follows is more of it.
STEPS, BATCH, LENGTH = 2, 5, 7  # the length of a sequence is the context less one
# Nothing divides: 9 layers over 2, 4, 8 stages; 3 heads, width 15, vocabulary 23 and batch 5 over 2, 4, 8 ranks.
UNEVEN = GPT2Shape(layers=9, width=15, heads=3, context=8, vocabulary=23)


END = 1  # ends documents, where sequences are of several


def batches(shape, steps=STEPS, documents=False):
    generator = torch.Generator().manual_seed(5)
    made = [torch.randint(shape.vocabulary, (BATCH, shape.context), generator=generator) for _ in range(steps)]
    return [with_documents(batch, step) for step, batch in enumerate(made)] if documents else made


def with_documents(batch, step):
    """The first sequence of two documents; one of a part of a document; of many of one token; of one that just fits;
    and of one token and the rest. Other steps have them in other sequences."""
    batch = batch.where(batch != END, END + 1)
    length = batch.shape[1] - 1
    two, _, short, fits, rest = (batch[(number + step) % BATCH] for number in range(BATCH))
    two[length // 3] = short[: length // 2 + 1] = fits[length - 1] = rest[0] = END
    return batch


def microbatches(grid, batch, step, count, algorithm="agarwal", idle=0, balance="zigzag", documents=False):
    """This rank's part of a global batch, cut by hand; none for the last `idle` ranks of the replica axis."""
    following, counted, lengths = batch[:, 1:], batch[:, 1:].numel(), []
    if documents:
        following = following.masked_fill(batch[:, :-1] == END, -100)
        counted = int((following != -100).sum())
        lengths = [document_lengths(row) for row in batch[:, :-1].tolist()]
    working, rank, length = grid.replica.size - idle, grid.replica.rank, batch.shape[1] - 1
    mine = split(len(batch), working, rank) if rank < working else slice(0, 0)
    made = []
    for m in range(count):
        part = subsplit(mine, count, m)
        tokens = Tokens.of(
            grid, part.stop - part.start, length, part.start, step, algorithm, balance=balance, documents=lengths[part]
        )
        here = [position for span in tokens.spans for position in span]
        tokens = dataclasses.replace(tokens, share=1 / len(batch))
        ids = batch[tokens.first : tokens.first + tokens.sequences, here].reshape(-1)
        targets = following[tokens.inner.start : tokens.inner.stop, here].reshape(-1)
        made.append(Microbatch(tokens, ids, targets, 1 / counted))
    return made


def document_lengths(row, end=END):
    """Of one sequence's documents, one token after the other.

    >>> document_lengths([5, 6, 1, 1, 7]), document_lengths([5, 1])
    ([3, 1, 1], [2])
    """
    lengths = [0]
    for token in row:
        lengths[-1] += 1
        lengths += [0] if token == end else []
    return lengths if lengths[-1] else lengths[:-1]


KINDS = {MixtralShape: Mixtral, LlamaShape: Llama, GPT2Shape: GPT2}


def made(grid, shape, *arguments, **options):
    """A model of the shape's kind, in float64, with the initial weights of all tests."""
    kind = next(kind for known, kind in KINDS.items() if isinstance(shape, known))
    return kind(grid, shape, *arguments, key=RngKey(3), dtype=torch.float64, **options)


def logits_of(shape, end=None):
    """The reference's function of weights, ids and `keep`."""
    if isinstance(shape, LlamaShape):
        return functools.partial(reference.llama_logits, shape=shape, end=end)
    return functools.partial(reference.gpt2_logits, layers=shape.layers, heads=shape.heads, end=end)


def train_on(
    grid, shape, count, clip, steps=STEPS, algorithm="agarwal", overlap=OVERLAPS, pipeline="1f1b", slices=(),
    layers_per_stage=None, recompute="none", balance="zigzag", documents=False, momentum=None,
):  # fmt: skip
    products = algorithm_of(grid, algorithm, overlap)
    order = schedule(pipeline, grid.pipeline.size, count, slices=len(slices) or None)
    model = made(grid, shape, layers_per_stage, order.placement, algorithm=products, recompute=recompute)
    optimizer = make_optimizer(model.parameters(), 0.1)
    if momentum is not None:
        optimizer = torch.optim.SGD(optimizer.param_groups, lr=1e-2, momentum=momentum)
    trainer = Trainer(model, grid, optimizer, order, max_norm=clip, slices=slices)
    for group in trainer.optimizer.param_groups:
        group["lr"] = 1e-2
    results = [
        trainer.step(microbatches(grid, batch, step, count, algorithm, balance=balance, documents=documents))
        for step, batch in enumerate(batches(shape, steps, documents))
    ]
    return model, [loss for loss, _ in results], [norm for _, norm in results]


@functools.cache
def serial(shape, clip, documents=False, **how):
    """Weights, losses and norms of the reference, which rank 0 computes for all."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    return world.bcast(computed(shape, clip, documents, **how) if world.rank == 0 else None)


def computed(shape, clip, documents=False, steps=STEPS, momentum=None):
    """By the reference, from the whole weights of a grid of one rank."""
    from mpi4py import MPI

    alone = Grid(comm=MPI.COMM_SELF)
    model = made(alone, shape)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    keep = masks(model, shape)
    end, how = END if documents else None, {}
    if isinstance(shape, MixtralShape):
        mixtures = Mixtures(shape, lambda name: model.get_submodule(name).key)
        logits = functools.partial(mixtures.logits, end=end)
        how = {"terms": mixtures.terms, "after": mixtures.after}
    else:
        logits = logits_of(shape, end)
    losses, norms = reference.train(
        weights, batches(shape, steps, documents), logits, lr=1e-2, clip=clip, weight_decay=0.1, keep=keep, end=end,
        momentum=momentum, **how,
    )  # fmt: skip
    return weights, losses, norms


def masks(model, shape):
    """Dropout of the reference: the masks by (sequence, position) of the whole batch, from the named streams."""

    def at(step):
        def keep(name, x):
            if not shape.dropout:
                return x
            key = model.get_submodule(name).key
            mask = key.mask(0, x.numel(), shape.dropout, step).view(x.shape)
            return x * mask / (1 - round(shape.dropout * 65536) / 65536)

        return keep

    return at


def check(grid, shape, count, clip, documents=False, steps=STEPS, **how):
    weights, losses, norms = serial(shape, clip, documents, steps=steps)
    model, *got = train_on(grid, shape, count, clip, documents=documents, steps=steps, **how)
    assert got[0] == pytest.approx(losses, rel=1e-12)
    assert got[1] == pytest.approx(norms, rel=1e-11)
    for name, whole in whole_parameters(model, grid):
        if grid.rank == 0:
            torch.testing.assert_close(whole, weights[name], rtol=1e-10, atol=1e-12)


def every(step, places, case):
    """Of a list each `step`-th place, other ones for the next case of a test; all with HPCTRAIN_TESTS=all."""
    step = 1 if ranks_named.ALL else min(step, len(places))
    return places[case % step :: step]


def fitting(shape, pipeline):
    """The shape with as few layers as leave the stages of the pipeline unequal."""
    return dataclasses.replace(shape, layers=max(3, pipeline + 1))


def by_messages(grid):
    """As if the ranks of every axis shared no memory."""
    for axis in grid.axes():
        axis.one_node = False


# Each of these on grids that split every axis at least once.
CORNERS = {
    1: [(1, 1, 1)],
    2: [(2, 1, 1), (1, 2, 1), (1, 1, (2, 1, 1)), (1, 1, (1, 2, 1)), (1, 1, (1, 1, 2))],
    4: [(2, 2, 1), (1, 2, (1, 2, 1)), (2, 1, (1, 1, 2)), (1, 1, (2, 2, 1)), (1, 1, (4, 1, 1))],
    8: [(2, 2, 2), (1, 1, (2, 2, 2)), (1, 2, (2, 1, 2)), (8, 1, 1)],
}


def in_turn(places, ranks, case, of_8=4):
    """Of {ranks: places} all for one and two ranks, which divide one axis; for four every second one, for eight every
    fourth (`of_8`), other ones for the next case of a test."""
    return every({1: 1, 2: 1, 4: 2}.get(ranks, of_8), places[ranks], case)


# Every form of tensor grid that each algorithm works on, alone and with the other axes.
PLANES = {
    "megatron": {1: [(1, 1, 1)], 2: [(1, 1, (2, 1, 1))], 4: [(2, 1, (2, 1, 1)), (1, 1, (4, 1, 1))]},
    "cannon": {1: [(1, 1, 1)], 4: [(1, 1, (2, 2, 1))], 8: [(1, 2, (2, 2, 1))]},
    "summa": {
        2: [(1, 1, (2, 1, 1)), (1, 1, (1, 2, 1))],
        3: [(1, 1, (1, 3, 1))],
        4: [(1, 1, (2, 2, 1)), (2, 1, (1, 2, 1))],
        6: [(1, 1, (3, 2, 1)), (1, 1, (2, 3, 1))],
        8: [(1, 1, (2, 4, 1)), (2, 2, (2, 1, 1))],
    },
    "two_half_d": {2: [(1, 1, (1, 1, 2))], 4: [(1, 1, (2, 2, 1)), (1, 2, (1, 1, 2))], 8: [(1, 1, (2, 2, 2))]},
}


def check_equal(got, strategy, model, grid, expected):
    """The (loss, norm) of each step, and the weights at the end, are those that `serial` found."""
    weights, losses, norms = expected
    assert [loss for loss, _ in got] == pytest.approx(losses, rel=1e-12)
    assert [norm for _, norm in got] == pytest.approx(norms, rel=1e-11)
    with strategy.full_weights():
        for name, whole in whole_parameters(model, grid):
            if grid.rank == 0:
                torch.testing.assert_close(whole, weights[name], rtol=1e-10, atol=1e-12)


def check_strategy(method, model, grid, shape, count, expected, order=None):
    """Steps of `count` microbatches with a strategy of the data axis give the losses, norms and weights of `serial`;
    in the `order` of a schedule, by default Trainer's."""
    optimizer = make_optimizer(model.parameters(), 0.1)
    strategy = make(DataParallelConfig(method), model, grid, optimizer)
    trainer = Trainer(model, grid, optimizer, order or count, max_norm=1.0, strategy=strategy)
    for group in optimizer.param_groups:
        group["lr"] = 1e-2
    got = [trainer.step(microbatches(grid, batch, step, count)) for step, batch in enumerate(batches(shape))]
    check_equal(got, strategy, model, grid, expected)
