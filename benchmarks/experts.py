"""A layer of experts forward and backward, or a step of a Mixtral, ours and others' in turn, in the same processes.

    $MPIRUN -n 2 python -m mpi4py benchmarks/experts.py --peers transformers,dense
    PYTHONPATH=~/peers $MPIRUN -n 2 python -m mpi4py benchmarks/experts.py          all of them; 2 minutes
    PYTHONPATH=~/peers $MPIRUN -n 4 python -m mpi4py benchmarks/experts.py --peers megatron-alltoall --steps 40
    $MPIRUN -n 2 python -m mpi4py benchmarks/experts.py --step                      of transformers; 2 minutes

Every rank has 1,024 tokens of its own, other ones in each step. Its experts are its part of 8 of inner width 512
(SwiGLU), of which a token has 2, or of 64 of inner width 64, of which it has 6; width 256, float32, one thread. All
sides have the same weights and get the same tokens, and their outputs are compared first, but for the DeepSpeed that
drops tokens. Peers' messages go by gloo, ours by MPI and shared memory. How Megatron-core and DeepSpeed are installed
stands in peers.py. transformers has all experts on every rank and moves nothing. `dense` is no peer but our own MLP as
wide as an expert, held against a mixture of one such expert; and `hot` our mixture all of whose tokens choose the same
experts of one rank, without and with replicas of these on others. With --step: see mixtral_step.py; `losses_differ` is
the relative difference of the losses in the [first, last] step.

torch's float32 products are MKL's. On an AVX-512 processor that is not Intel's, ours are oneDNN's instead, which are
faster there (hpctrain/gemm.py); with --matmul medium all sides' are.

Prints one JSON object a line; `ratio` is the median over the pairs of theirs / ours in seconds.
"""

import argparse
import functools
import itertools
import json
import statistics
import time

import pairs
import torch
from gloo import gloo
from mpi4py import MPI

import hpctrain as ht
from hpctrain.layers import MLP, Tokens
from hpctrain.layers.experts.mixture import Mixture

WIDTH, TOKENS, WARM_UP = 256, 1024, 3
SHAPES = {"8 experts, top 2": (8, 2, 512), "64 experts, top 6": (64, 6, 64)}  # experts, of a token, inner width
GOAL = {"dense": 0.95, "hot": 1.0}  # else 1.2


def megatron(dispatcher, *arguments):
    from peers_experts import megatron_layer

    return megatron_layer(dispatcher, *arguments)


def hot(grid, experts, top_k, ffn):
    """A mixture whose router finds all experts alike, with replicas of the first ones, and without."""
    made = {"std": 0.0, "std_out": 0.05, "key": ht.RngKey(0), "dtype": torch.float32}
    tokens = Tokens.of(grid, TOKENS // 256, 256, grid.data.rank * (TOKENS // 256))
    sides = [
        Mixture(grid, WIDTH, ffn, experts, top_k, replicate_hot=count, **made) for count in (top_k * (grid.size - 1), 0)
    ]
    return [functools.partial(side, tokens=tokens) for side in sides]


def deepspeed(drops, *arguments):
    from peers_experts import deepspeed_layer

    return deepspeed_layer(drops, *arguments)


def transformers(*arguments):
    from peers_experts import transformers_layer

    return transformers_layer(*arguments)


PEERS = {
    "megatron-alltoall": functools.partial(megatron, "alltoall"),
    "megatron-allgather": functools.partial(megatron, "allgather"),
    "deepspeed": functools.partial(deepspeed, False),
    "deepspeed-dropping": functools.partial(deepspeed, True),
    "transformers": transformers,
    "dense": None,
    "hot": None,
}
STEPS = {"transformers-ep": "ep", "transformers-ddp": "ddp"}  # of whole models


def ours(grid, experts, top_k, ffn, dispatch):
    """The layer, its tokens, and the whole weights of its router and experts."""
    made = {"std": 0.05, "std_out": 0.05, "key": ht.RngKey(0), "dtype": torch.float32}
    layer = Mixture(grid, WIDTH, ffn, experts, top_k, dispatch=dispatch, **made)
    alone = Mixture(ht.Grid(comm=MPI.COMM_SELF), WIDTH, ffn, experts, top_k, **made)
    weights = {name: p.detach().clone() for name, p in alone.named_parameters()}
    tokens = Tokens.of(grid, TOKENS // 256, 256, grid.data.rank * (TOKENS // 256))
    return functools.partial(layer, tokens=tokens), weights


def dense(grid, ffn):
    """An MLP as wide as one expert, and a mixture of that one expert, which every token passes."""
    made = {"std": 0.05, "std_out": 0.05, "key": ht.RngKey(0), "dtype": torch.float32}
    tokens = Tokens.of(grid, TOKENS // 256, 256, grid.data.rank * (TOKENS // 256))
    mixture = Mixture(grid, WIDTH, ffn, 1, 1, **made)
    mlp = MLP(grid, WIDTH, ffn, "swiglu", bias=False, **made)
    return functools.partial(mixture, tokens=tokens), functools.partial(mlp, tokens=tokens)


def timed(call, *arguments):
    """Seconds that it takes on the slowest rank, and what it returned."""
    MPI.COMM_WORLD.Barrier()
    start = time.perf_counter()
    result = call(*arguments)
    return MPI.COMM_WORLD.allreduce(time.perf_counter() - start, MPI.MAX), result


def forward_backward(layer, x, grad):
    layer(x.detach().requires_grad_()).backward(grad)


def layers(peer, shape, steps, dispatch):
    """What one peer's layer gives on one shape, as members of the JSON object."""
    experts, top_k, ffn = SHAPES[shape]
    world = MPI.COMM_WORLD
    generator = torch.Generator().manual_seed(world.rank)
    if peer == "dense":
        sides = dense(ht.Grid(data=world.size), ffn)
    elif peer == "hot":
        sides = hot(ht.Grid(data=world.size, expert=world.size), experts, top_k, ffn)
    else:
        layer, weights = ours(ht.Grid(data=world.size, expert=world.size), experts, top_k, ffn, dispatch)
        try:
            sides = layer, PEERS[peer](weights, experts, top_k, ffn)
        except ImportError as error:
            return {"absent": str(error)}
        if peer != "deepspeed-dropping":
            x = torch.randn(TOKENS, WIDTH, generator=generator)
            torch.testing.assert_close(sides[1](x), sides[0](x), rtol=1e-4, atol=1e-4)
    times = []
    for _ in range(WARM_UP + steps):
        x, grad = (torch.randn(TOKENS, WIDTH, generator=generator) for _ in range(2))
        times.append([timed(forward_backward, side, x, grad)[0] for side in sides])
    return in_turn(times[WARM_UP:])


def models(peer, steps, dispatch):
    """The same of steps of whole models."""
    import mixtral_step

    sides = mixtral_step.ours(dispatch), mixtral_step.transformers(STEPS[peer])
    times, losses = [], []
    for number in range(WARM_UP + steps):
        found = [timed(side, number) for side in sides]
        times.append([seconds for seconds, _ in found])
        losses.append([MPI.COMM_WORLD.allreduce(float(loss)) / MPI.COMM_WORLD.size for _, loss in found])
    differ = [abs(theirs - mine) / mine for mine, theirs in (losses[0], losses[-1])]
    return {**in_turn(times[WARM_UP:]), "losses_differ": [float(f"{value:.1e}") for value in differ]}


def in_turn(times):
    mine, theirs = zip(*times)
    return {
        "ours": round(1e3 * statistics.median(mine), 2),
        "theirs": round(1e3 * statistics.median(theirs), 2),
        "unit": "ms",
        **pairs.compared(mine, theirs),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", help="of: " + ", ".join([*PEERS, *STEPS]))
    parser.add_argument("--shapes", default=";".join(SHAPES), help="of: " + "; ".join(SHAPES))
    parser.add_argument("--steps", type=int, default=20, help="of each side (20)")
    parser.add_argument("--dispatch", default="auto", help="of ours (auto)")
    parser.add_argument("--matmul", default="highest", choices=["highest", "medium"], help="float32 products (highest)")
    parser.add_argument("--step", action="store_true", help="whole models")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision(options.matmul)
    peers = options.peers.split(",") if options.peers else STEPS if options.step else PEERS
    world, by = MPI.COMM_WORLD, "" if options.matmul == "highest" else f", matmul {options.matmul}"
    with gloo():
        for shape, peer in itertools.product(["Mixtral"] if options.step else options.shapes.split(";"), peers):
            if options.step:
                found = models(peer, options.steps, options.dispatch)
            else:
                found = layers(peer, shape, options.steps, options.dispatch)
            case = f"{shape}, {world.size} ranks{by}"
            line = {"benchmark": "experts", "case": case, "peer": peer, **found, "goal": GOAL.get(peer, 1.2)}
            if world.rank == 0:
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
