"""Measure what the ranks of this MPI job can do; `hpctrain machine` starts it with several numbers of ranks.

    mpirun -n N python -m mpi4py -m hpctrain.plan.measure OUT.json

Samples are read from a corpus that is packed beside OUT.json, which all ranks must see; most often from the page cache.

All ranks work at the same time, as they do in training; a figure is the lower quartile of its calls, as what others do
to the machine only adds to a time, each of the slowest rank. What ranks of a CPU compute is of CPU seconds, times the
ranks of a core; exchanges and reading take the clock's. Where ranks outnumber the cores, a call is repeated until all
have had several turns: a short one would have a core of its own.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from hpctrain import comm
from hpctrain.data import ShardedTokens, pack
from hpctrain.data_parallel.buckets import BUCKET_BYTES
from hpctrain.grid import Axis, Grid
from hpctrain.launch import abort, check_launcher
from hpctrain.plan.computing import (
    activations,
    attention,
    elements,
    in_turn,
    launch,
    norms,
    product,
    seconds,
    tables,
    types,
    update,
    weights,
)
from hpctrain.plan.figures import LENGTHS

PRODUCTS = (  # (m, k, n); of few rows as well, whose time is that of their weights
    (1024, 1024, 1024), (512, 512, 2048), (2048, 256, 256), (256, 1024, 256), (1024, 64, 1024), (128, 256, 512),
    (64, 512, 2048), (64, 2048, 512), (512, 64, 2048), (32, 512, 512),
)  # fmt: skip
SIZES = tuple(4**k for k in range(4, 13))  # bytes of a collective: 256 to 16 MiB
WIDTHS = 32, 64  # of heads
CORPUS, SAMPLES = 1 << 20, (128, 8192)  # bytes of text, and tokens that are read of it at once
_CPU = torch.device("cpu")


def main() -> int:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    try:
        check_launcher(world.size)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
        with Grid(world.size, comm=world) as grid:
            found = measure(grid, Path(sys.argv[1]).parent)
        if world.rank == 0:
            Path(sys.argv[1]).write_text(json.dumps(found))
    except BaseException:
        abort(world)
    return 0


def measure(grid: Grid, folder: Path) -> dict:
    """The figures, the same on every rank. Collective over the grid's data axis, which has all its ranks. Writes a
    corpus into `folder`."""
    device = comm.local_device("auto", grid.comm)
    nodes = max(Counter(grid.world.nodes).values())
    found = {
        "ranks": grid.size,
        "ranks_of_a_node": nodes,
        "memory": memory(device, nodes),
        "products": {
            name: [(*shape, seconds(grid, product(shape, dtype, device), device)) for shape in PRODUCTS]
            for name, dtype in types(device).items()
        },
        "elements": elements(grid, device, 4 * 2**20),  # as large as activations
        "state": update(grid, device),
        "tables": tables(grid, device),
        "norms": norms(grid, device),
        "activations": activations(grid, device),
        **weights(grid, device),
        "launch": launch(grid, device),
        "attention": [[(width, attention(grid, device, length, width)) for width in WIDTHS] for length in LENGTHS],
        "reading": reading(grid, folder),
        "collectives": [(size, collectives(grid, device, size)) for size in groups(grid.world.nodes)],
        "between": between_nodes(grid, device),
        "bucket": BUCKET_BYTES,
        "asynchronous": device.type == "cuda",
    }
    return grid.comm.bcast(found)


def groups(nodes: Sequence[int]) -> list[int]:
    """Numbers of ranks that groups of neighbours may have which all lie within a node.

    Args:
        nodes: of each rank, the first rank of its node.

    >>> groups((0, 0, 0, 0)), groups((0, 0, 0, 0, 4, 4, 4, 4)), groups((0, 1, 0, 1))
    ([2, 4], [2, 4], [])
    """
    ranks = len(nodes)
    sizes = (size for size in range(2, ranks + 1) if ranks % size == 0)
    return [size for size in sizes if all(nodes[rank] == nodes[rank - rank % size] for rank in range(ranks))]


def collectives(grid: Grid, device: torch.device, size: int) -> dict[str, list[tuple[int, float]]]:
    """{operation: [(bytes of the whole tensor, seconds)]} over groups of so many ranks, all of them at once, and of
    messages between two. As layers gather and add up activations, and replicas gradients: what is gathered lies
    with the others, from whom it is read; it takes what that takes beyond reading as much of one's own."""
    found: dict[str, list[tuple[int, float]]] = {}
    with Grid(data=grid.size // size, tensor=(size, 1, 1), comm=grid.comm) as cut:
        axis = cut.tensor
        for nbytes in SIZES:
            part = torch.zeros(max(1, nbytes // 4 // size), device=device)
            own = torch.zeros(size * len(part), device=device)
            workspace, buffer = comm.workspace(axis, part), comm.AllReduceBuffer(axis, size * len(part), part)
            counts, whole = (len(part),) * size, size * len(part)

            def gathered(part=part, workspace=workspace, counts=counts):
                return workspace.gather(part, counts).sum()

            def added_up(part=part, workspace=workspace, counts=counts, whole=whole):
                return workspace.reduce(workspace.buffer(whole, part), counts)

            calls: dict[str, Callable[[], object]] = {
                "all_gather": gathered,
                "reduce_scatter": added_up,
                "all_reduce": buffer.all_reduce,
                "own": own.sum,
            }
            if size == 2:
                calls["message"] = functools.partial(there_and_back, part.new_zeros(whole), axis)
            taken = dict(zip(calls, in_turn(grid, list(calls.values()), device)))
            taken["all_gather"] = max(1e-9, taken["all_gather"] - taken.pop("own"))  # no figure may be 0
            for name, each in taken.items():
                found.setdefault(name, []).append((size * part.nbytes, each / (2 if name == "message" else 1)))
    return found


def between_nodes(grid: Grid, device: torch.device) -> list[tuple[int, float]]:
    """(bytes, seconds) of a message from every rank of the first node to one of the second, all at once, by size; none
    on one node, and where the ranks do not fill one node after another with as many."""
    nodes = grid.world.nodes
    of_a_node = max(Counter(nodes).values())
    filled = all(first == rank - rank % of_a_node for rank, first in enumerate(nodes))
    if of_a_node == grid.size or grid.size % of_a_node or not filled:
        return []
    with Grid(data=grid.size // of_a_node, tensor=(of_a_node, 1, 1), comm=grid.comm) as cut:
        messages = [torch.zeros(nbytes // 4, device=device) for nbytes in SIZES]
        taken = in_turn(grid, [functools.partial(there_and_back, each, cut.data) for each in messages], device)
    return [(nbytes, each / 2) for nbytes, each in zip(SIZES, taken)]


def there_and_back(message: torch.Tensor, axis: Axis) -> None:
    """From the first rank of the axis to the second, and back; others have no part in it."""
    for sender in (0, 1):
        if axis.rank == sender:
            comm.send(message, axis, 1 - sender)
        elif axis.rank == 1 - sender:
            comm.recv(message, axis, sender)


def reading(grid: Grid, folder: Path) -> list[tuple[int, float]]:
    """(tokens of a sample, seconds to read it): from anywhere in the corpus, as training does, its chunks checked."""
    path = folder / f"corpus-{grid.size}.h5"
    with comm.together(grid.world):
        if grid.rank == 0:
            text = folder / "corpus.txt"
            text.write_text("All ranks read from it at the same time.\n" * (CORPUS // 41))
            pack([str(text)], path)
    tokens, found = ShardedTokens(path, grid.comm), []
    places = np.random.default_rng(grid.rank)
    for count in SAMPLES:

        def sample(count: int = count) -> object:
            return tokens.read(int(places.integers(tokens.tokens - count)), count)

        found.append((count, in_turn(grid, [sample], _CPU)[0]))
    tokens.close()
    return found


def memory(device: torch.device, ranks: int) -> float:
    """Bytes that a rank may have: the device's, or its share of the node's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        most = min(most, int(text))
    return most / ranks


if __name__ == "__main__":
    sys.exit(main())
