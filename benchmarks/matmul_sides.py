"""The sides that benchmarks/matmul.py compares: the products of hpctrain.matmul, and of each peer.

A side makes, for n and a dtype, a function that computes a product; its ranks, which benchmarks/matmul_jobs.py starts,
call it together when they are asked.
"""

import contextlib
import ctypes
import os
import socket
import sys
import time
from multiprocessing.connection import Connection

GRIDS = {  # of our algorithms, by the number of ranks
    4: {"Cannon": (2, 2, 1), "Summa": (2, 2, 1), "TwoHalfD": (1, 1, 4), "Agarwal": (2, 1, 2)},
    2: {"Summa": (2, 1, 1), "Agarwal": (2, 1, 1)},
    8: {"TwoHalfD": (2, 2, 2), "Agarwal": (2, 2, 2)},  # on 2 cores for the bytes only
}
LENGTH = 64  # of the layer's sequences, of which a rank of z holds whole ones
BLOCK = 64  # of ScaLAPACK's block-cyclic layout; none of 128, 256, 512 and n / 2 was faster here


def ours(ranks):
    import torch
    from mpi4py import MPI

    import hpctrain as ht
    from hpctrain.shard import split

    torch.set_num_threads(1)
    grids = {box: ht.Grid(tensor=box) for box in set(GRIDS[ranks].values())}

    def layer(n, dtype, backward):
        grid = grids[GRIDS[ranks]["Agarwal"]]
        linear = ht.layers.Linear(grid, n, n, bias=False, to="inner", dtype=dtype)
        tokens = ht.layers.Tokens.of(grid, n // LENGTH, LENGTH)
        columns = split(n, grid.tensor.y.size, grid.tensor.y.rank)
        x = torch.rand(tokens.local_rows, columns.stop - columns.start, dtype=dtype)
        return forward_and_backward(lambda x, _: linear(x, tokens), x, linear.weight, backward)

    def forward_and_backward(product, a, b, backward):
        a.requires_grad_(backward)
        b.requires_grad_(backward)
        ones = torch.ones_like(product(a, b).detach())

        def run():
            c = product(a, b)
            if backward:
                torch.autograd.grad(c, (a, b), ones)

        return run

    def prepare(n, dtype, algorithm):
        algorithm, _, backward = algorithm.partition(", ")
        if algorithm == "layer":
            return layer(n, getattr(torch, dtype), bool(backward))
        grid = grids[GRIDS[ranks][algorithm]]
        mm = getattr(ht.matmul, algorithm)(grid.tensor)
        mm.bind(n, n, n)
        dtype = getattr(torch, dtype)
        a, b = (torch.rand(*[s.stop - s.start for s in mm.slices(name, n, n)], dtype=dtype) for name in "ab")
        if backward:
            return forward_and_backward(mm, a, b, True)
        volumes = []
        for name in ("Cannon", "Summa", "TwoHalfD", "Agarwal"):
            with contextlib.suppress(ValueError):  # not on such a grid
                volumes.append(getattr(ht.matmul, name)(grid.tensor).volume(n, n, n))

        def product():
            grid.transport.traffic.clear()
            mm(a, b)
            return grid.transport.traffic.total("received") // dtype.itemsize, min(volumes)

        return product

    return prepare, MPI.COMM_WORLD.Barrier


def one_process(ranks):
    import torch

    torch.set_num_threads(2)

    def prepare(n, dtype, _):
        a, b = (torch.rand(n, n, dtype=getattr(torch, dtype)) for _ in range(2))
        return lambda: torch.mm(a, b)

    return prepare, lambda: None


def dtensor(ranks):
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    torch.set_num_threads(1)
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    store = dist.FileStore(os.environ["MATMUL_STORE"], ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))

    def prepare(n, dtype, _):
        shape, dtype = (n // ranks, n), getattr(torch, dtype)
        a, b = (DTensor.from_local(torch.rand(shape, dtype=dtype), mesh, [Shard(0)]) for _ in range(2))
        # left to itself, DTensor splits k and takes 1.7 times as long
        return lambda: torch.matmul(a, b.redistribute(placements=[Replicate()]))

    return prepare, dist.barrier


def heat(ranks):
    import heat
    import torch

    torch.set_num_threads(1)

    def prepare(n, dtype, _):
        a, b = (heat.random.rand(n, n, dtype=getattr(heat, dtype), split=0) for _ in range(2))
        return lambda: heat.matmul(a, b)

    return prepare, heat.MPI.COMM_WORLD.Barrier


def scalapack(ranks):
    import numpy as np

    library = ctypes.CDLL("libscalapack-openmpi.so.2.2")
    context, rows, columns = ctypes.c_int(), 2, ranks // 2
    library.Cblacs_get(-1, 0, ctypes.byref(context))
    library.Cblacs_gridinit(ctypes.byref(context), b"R", rows, columns)
    one = ctypes.byref(ctypes.c_int(1))
    kinds = {"float32": (library.psgemm_, ctypes.c_float), "float64": (library.pdgemm_, ctypes.c_double)}

    def prepare(n, dtype, _):
        gemm, real = kinds[dtype]
        scale, none = (ctypes.byref(real(value)) for value in (1, 0))
        mine = n // rows, n // columns
        matrices = [np.asfortranarray(np.random.rand(*mine).astype(dtype)) for _ in range(3)]
        size = ctypes.byref(ctypes.c_int(n))
        descriptor = (ctypes.c_int * 9)(1, context.value, n, n, BLOCK, BLOCK, 0, 0, mine[0])
        a, b, c = ((matrix.ctypes.data_as(ctypes.c_void_p), one, one, descriptor) for matrix in matrices)

        def product(keep=matrices):
            gemm(b"N", b"N", size, size, size, scale, *a, *b, none, *c)

        return product

    return prepare, lambda: library.Cblacs_barrier(context, b"A")


SIDES = {"ours": ours, "one process": one_process, "DTensor": dtensor, "Heat": heat, "ScaLAPACK": scalapack}


def serve(side, ranks, address):
    """A rank: compute and time products as asked."""
    connection = Connection(socket.create_connection(address).detach())
    prepare, barrier = SIDES[side](ranks)
    connection.send("ready")
    products = {}
    while (asked := connection.recv()) is not None:
        if asked not in products:
            products.clear()
            products[asked] = prepare(*asked)
        barrier()
        start = time.perf_counter()
        elements = products[asked]()
        seconds = time.perf_counter() - start
        connection.send((seconds, elements if isinstance(elements, tuple) else (0, 0)))
    os._exit(0)  # the peers' own ways to end are theirs


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), ("127.0.0.1", int(sys.argv[3])))
