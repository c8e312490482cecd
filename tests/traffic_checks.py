"""Training steps whose bytes the ledger counts."""

import dataclasses

import torch

from hpctrain import RngKey
from hpctrain.choices import OVERLAPS
from hpctrain.config import DataParallelConfig, PrecisionConfig
from hpctrain.data_parallel import make
from hpctrain.layers import Tokens, algorithm_of
from hpctrain.models.gpt2 import GPT2, GPT2Shape
from hpctrain.models.llama import Llama, LlamaShape
from hpctrain.models.mixtral import Mixtral, MixtralShape
from hpctrain.pipeline import one_f_one_b
from hpctrain.train.batches import Microbatch
from hpctrain.train.dtypes import dtypes
from hpctrain.train.optimizer import make_optimizer
from hpctrain.train.time_split import PART
from hpctrain.train.trainer import Trainer

KINDS = {GPT2Shape: GPT2, LlamaShape: Llama, MixtralShape: Mixtral}
EVEN = GPT2Shape(layers=8, width=32, heads=8, context=8, vocabulary=64)


def counted(
    grid,
    shape,
    batch,
    order,
    algorithm="agarwal",
    overlap=OVERLAPS,
    slices=(),
    method="ddp",
    precision=None,
    recompute="none",
    **options,
):
    """One training step's ledger: bytes received and sent, {axis: bytes}. The options are those of the method."""
    dtype, precision = dtypes(precision or PrecisionConfig())
    made = algorithm_of(grid, algorithm, overlap)
    order = one_f_one_b(grid.pipeline.size, order) if isinstance(order, int) else order
    count = order.microbatches
    how = {"algorithm": made, "recompute": recompute, "key": RngKey(0), "dtype": dtype}
    model = KINDS[type(shape)](grid, shape, placement=order.placement, **how)
    optimizer = make_optimizer(model.parameters(), 0.1)
    options = DataParallelConfig(method, **options)
    replicas = make(options, model, grid, optimizer, precision)
    trainer = Trainer(model, grid, optimizer, order, slices=slices, strategy=replicas)
    workers = grid.replica.size - options.idle
    each = batch // (workers * count) if grid.replica.rank < workers else 0
    first = min(grid.replica.rank * batch // workers, batch)
    tokens = [Tokens.of(grid, each, shape.context, first + m * each, 0, algorithm) for m in range(count)]
    tokens = [dataclasses.replace(each, share=1 / batch) for each in tokens]
    ids = [torch.zeros(t.sequences * t.length, dtype=torch.int64) for t in tokens]
    targets = [torch.zeros(len(t.inner) * t.length, dtype=torch.int64) for t in tokens]
    scale = 1 / (batch * shape.context)
    grid.transport.traffic.clear()
    trainer.step([Microbatch(*parts, scale) for parts in zip(tokens, ids, targets)])
    tables = []
    for what in ("received", "sent"):
        table = dict.fromkeys(("data", "sequence", "expert", "pipeline", "tensor"), 0)
        for (axis, _), cell in grid.transport.traffic.table().items():
            if axis == "world":
                continue  # the load of experts, which is no tensor of the training
            axis = PART.get(axis, axis)
            table[axis if axis in table else "tensor"] += cell[what]
        tables.append(table)
    return tables
