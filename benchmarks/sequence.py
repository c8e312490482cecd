"""Time attention of sequences that are cut over ranks, forward and backward, against others', in turn.

    $MPIRUN -n 2 python -m mpi4py benchmarks/sequence.py                     4k to 16k tokens; 10 minutes
    $MPIRUN -n 4 python -m mpi4py benchmarks/sequence.py --lengths 4096,8192
    $MPIRUN -n 2 python -m mpi4py benchmarks/sequence.py --lengths 32768 --pairs 2
    $MPIRUN -n 2 python -m mpi4py benchmarks/sequence.py --gpt --lengths 4096,8192   a whole step; 5 minutes
    $MPIRUN -n 4 python -m mpi4py benchmarks/sequence.py --memory ring --lengths 32768      then "ulysses"

One causal sequence, 8 heads of 32, float32. Peers: torch's ring attention (torch.distributed.tensor.experimental) over
gloo, whose ranks have contiguous parts or, head-tail, a part of both ends; DeepSpeed's DistributedAttention (Ulysses)
over gloo, where it is installed (see benchmarks/peers.py); torch's attention in one process, with a thread a rank
while the other ranks sleep; and "divided": the time of one process with one thread over the number of ranks, or of
cores where these are fewer. All use torch's fused CPU kernel. Prints one JSON object a line; `ratio` is the median over
the pairs of theirs / ours in seconds, above 1 ours is faster.

With --gpt it is a training step of a GPT with that attention: 2 layers, width 256, vocabulary 1,024, fused AdamW. The
peers have the model of benchmarks/peers_torch.py, and torch's DistributedDataParallel for its gradients.

With --memory one side of ours alone takes a step of attention: `peak_mib` is the most memory that a rank had of its
own, less what it had before, and an equal part of what all share; `formula_mib` is
`layers.context.formula.bytes_in_memory`.
"""

import argparse
import contextlib
import functools
import json
import os
import statistics
import sys
import threading
import time

import pairs
import sequence_gpt
import torch
import torch.distributed as dist
from gloo import gloo
from mpi4py import MPI

import hpctrain as ht
from hpctrain import cores
from hpctrain.comm import buffers
from hpctrain.layers.context.formula import bytes_in_memory

HEADS, WIDTH = 8, 32
OURS = {"ring": lambda ranks: (ranks, 1), "ulysses": lambda ranks: (1, ranks)}  # (ring, Ulysses ranks)
GOALS = {"divided": 0.9}
aten = torch.ops.aten


def tensors(length):
    """q, k, v and the gradient of the output, of the whole sequence, alike on every rank."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, length, HEADS, WIDTH, generator=generator).transpose(1, 2) for _ in range(4)]


def step_of(attention, q, k, v, grad):
    """A step, forward and backward, and the sum of the squares of what it gave."""
    q, k, v = (part.contiguous().requires_grad_() for part in (q, k, v))
    grad = grad.contiguous()

    def step():
        for part in (q, k, v):
            part.grad = None
        out = attention(q, k, v)
        out.backward(grad)
        return out

    def checksum():
        found = [step().detach(), q.grad, k.grad, v.grad]
        return [float(part.double().square().sum()) for part in found]

    return step, checksum


def local(whole, spans):
    return [torch.cat([part[:, :, span.start : span.stop] for span in spans], 2) for part in whole]


# Each side: attention of this rank's tokens, (sequences, heads, tokens, width), and their positions; None, None of one
# that sleeps.


def ours(data, length):
    grid = ht.Grid(data=(1, *data))

    def attention(q, k, v):
        return ht.layers.context_attention(q, k, v, grid, is_causal=True, length=length)

    return attention, ht.layers.sequence_spans(length, *data)[grid.sequence.rank]


def torch_ring(length, head_tail):
    """torch's ring, with the kernel that it would take on CPUs if it had a registration for it."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

    group, ring = dist.group.WORLD, MPI.COMM_WORLD.size

    class Ring(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            theirs._cp_options.enable_load_balance = head_tail
            op = aten._scaled_dot_product_flash_attention_for_cpu
            out, lse = theirs._templated_ring_attention(group, 2, op, q, k, v, is_causal=True)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx, grad):
            theirs._cp_options.enable_load_balance = head_tail
            q, k, v, out, lse = ctx.saved_tensors
            op = aten._scaled_dot_product_flash_attention_for_cpu_backward
            return theirs._templated_ring_attention_backward(
                group, 2, op, grad, "grad_out", q, k, v, out, lse, True, dropout_p=0.0
            )

    def attention(q, k, v):
        return Ring.apply(q.contiguous(), k.contiguous(), v.contiguous())

    balance = "zigzag" if head_tail else "none"  # the same tokens as ours
    return attention, ht.layers.sequence_spans(length, ring, 1, balance)[dist.get_rank()]


def deepspeed(length):
    with contextlib.redirect_stdout(sys.stderr):
        import peers_deepspeed
        from deepspeed.sequence.layer import DistributedAttention

        peers_deepspeed.begin()

    def dense(q, k, v):
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    theirs = DistributedAttention(dense, dist.group.WORLD, scatter_idx=2, gather_idx=1)

    def attention(q, k, v):  # (sequences, tokens, heads, width)
        return theirs(*(part.transpose(1, 2).contiguous() for part in (q, k, v)), 0).transpose(1, 2)

    return attention, ht.layers.sequence_spans(length, 1, MPI.COMM_WORLD.size)[dist.get_rank()]


def one_process(length):
    """On rank 0; the others sleep."""

    def attention(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return (None, None) if MPI.COMM_WORLD.rank else (attention, (range(length),))


def attention_side(attention, spans, whole):
    """A step, and the sums of squares of what it gives."""
    if attention is None:
        return lambda: None, lambda: [0.0] * 4
    return step_of(attention, *local(whole, spans))


def threaded(side, threads):
    """Both functions of a side, with so many threads."""

    def with_threads(function):
        def call():
            torch.set_num_threads(threads)
            try:
                return function()
            finally:
                torch.set_num_threads(1)

        return call

    return tuple(map(with_threads, side))


def seconds(step):
    """Until the slowest rank is done."""
    buffers.wait(MPI.COMM_WORLD.Ibarrier())
    start = time.perf_counter()
    step()
    buffers.wait(MPI.COMM_WORLD.Ibarrier())  # which leaves its core to others
    return MPI.COMM_WORLD.allreduce(time.perf_counter() - start, MPI.MAX)


def sides(length, wanted, gpt):
    """Of each name a step and what tells whether it is right, the same for all."""
    ranks = MPI.COMM_WORLD.size
    made = {
        **{name: functools.partial(ours, data(ranks), length) for name, data in OURS.items()},
        "torch ring": lambda: torch_ring(length, False),
        "torch ring head-tail": lambda: torch_ring(length, True),
        "DeepSpeed Ulysses": lambda: deepspeed(length),
        "one process": lambda: one_process(length),
        "divided": lambda: one_process(length),
    }
    whole, found = tensors(length), {}
    for name in wanted or made:
        try:
            if gpt and name in OURS:
                found[name] = sequence_gpt.ours(OURS[name](ranks), length)
            elif gpt:
                found[name] = sequence_gpt.theirs(*made[name](), length, alone=name in ("one process", "divided"))
            else:
                found[name] = attention_side(*made[name](), whole)
        except ImportError as error:
            print(f"{name} is absent: {error}", file=sys.stderr)
    if "one process" in found:
        found["one process"] = threaded(found["one process"], ranks)
    return found


def compare(length, count, wanted, gpt):
    """Lines for both ways of ours and every peer."""
    ranks = MPI.COMM_WORLD.size
    made = sides(length, wanted, gpt)
    sums = {name: [MPI.COMM_WORLD.allreduce(part) for part in checksum()] for name, (_, checksum) in made.items()}
    for name, found in sums.items():
        for a, b in zip(found, next(iter(sums.values()))):
            assert abs(a - b) < 1e-4 * b, f"{name} gives {found}, not {sums}"
    times = {name: [] for name in made}
    for _ in range(count):
        for name, (step, _) in made.items():
            times[name].append(seconds(step))
    workers = min(ranks, cores.find().count)
    if "divided" in times:
        times["divided"] = [each / workers for each in times["divided"]]
    for mine in OURS:
        for peer in [name for name in made if name not in OURS]:
            yield {
                "benchmark": "sequence_gpt" if gpt else "sequence",
                "case": f"{mine}, {length} tokens, {ranks} ranks", "peer": peer,
                "ours": round(statistics.median(times[mine]), 4), "theirs": round(statistics.median(times[peer]), 4),
                "unit": "s", **pairs.compared(times[mine], times[peer]),
                "goal": GOALS.get(peer, 1.15 if ranks == 4 else 1.0),
            }  # fmt: skip


def peak_memory(side, length):
    """MiB of one rank, as members of the JSON object; one sample a millisecond or so. What ranks share Linux counts for
    those that have touched it, which is one rank at first, so that its size is divided here."""
    rank, data = MPI.COMM_WORLD.rank, OURS[side](MPI.COMM_WORLD.size)
    step, _ = attention_side(*ours(data, 1024), tensors(1024))
    step()  # what libraries take once
    spans = ht.layers.sequence_spans(length, *data)
    due = bytes_in_memory(spans, *data, rank, sequences=1, heads=HEADS, groups=HEADS, width=WIDTH)
    tokens = sum(map(len, spans[rank]))
    # the output, which is here beside the one that is kept; or q, which was there before
    due["kept"] += (1 if data[1] > 1 else -1) * 4 * HEADS * WIDTH * tokens
    grid = ht.Grid(data=(1, *data))
    q, k, v, grad = (torch.randn(1, HEADS, tokens, WIDTH) for _ in range(4))
    for part in (q, k, v):
        part.requires_grad_()

    def resident(kind):
        with open("/proc/self/smaps_rollup") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith(f"Pss_{kind}:")) / 1024

    before, peaks, over = resident("Anon"), [0.0], threading.Event()
    shared = -MPI.COMM_WORLD.allreduce(resident("Shmem"))

    def watch():
        while not over.wait(0.001):
            peaks[0] = max(peaks[0], resident("Anon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    ht.layers.context_attention(q, k, v, grid, is_causal=True, length=length).backward(grad)
    over.set()
    watcher.join()
    shared += MPI.COMM_WORLD.allreduce(resident("Shmem"))
    peak = MPI.COMM_WORLD.allreduce(peaks[0] - before, MPI.MAX) + shared / MPI.COMM_WORLD.size
    return {"side": side, "peak_mib": round(peak, 1), "formula_mib": round(sum(due.values()) / 2**20, 1)}


def use_all_cores():
    """Each rank may use the cores of all: mpirun binds it to its own, to which the threads of the one process would be
    bound as well."""
    os.sched_setaffinity(0, set().union(*MPI.COMM_WORLD.allgather(os.sched_getaffinity(0))))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="4096,8192,16384")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--sides", help="of those that there are, by comma")
    parser.add_argument("--gpt", action="store_true", help="a whole step of a GPT")
    parser.add_argument("--memory", choices=list(OURS))
    options = parser.parse_args()
    use_all_cores()
    torch.set_num_threads(1)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    rank = MPI.COMM_WORLD.rank
    wanted = options.sides.split(",") if options.sides else None
    with gloo():
        for length in map(int, options.lengths.split(",")):
            if options.memory:
                case = {"benchmark": "sequence_memory", "case": f"{length} tokens, {MPI.COMM_WORLD.size} ranks"}
                found = [case | peak_memory(options.memory, length)]
            else:
                found = compare(length, options.pairs, wanted, options.gpt)
            for line in found:
                if rank == 0:
                    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
