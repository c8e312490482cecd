"""`ht.parallelize` on the models that people have: tiny ones of transformers, torchvision, timm and diffusers.

    python -m pip install --no-deps -t ZOO torchvision timm diffusers requests urllib3 certifi importlib_metadata zipp
    PYTHONPATH=ZOO $MPIRUN -n 2 python -m mpi4py benchmarks/zoo.py [--only WORD] [--out benchmarks/results/zoo.jsonl]
    PYTHONPATH=ZOO $MPIRUN -n 2 python -m mpi4py benchmarks/zoo.py --data 2 --zero 0 --out ...

The first takes 5 minutes on 2 cores; `--after MODEL` goes on where one was stopped. With `--shard-activations`, what
leaves blocks stays divided. With replicas, each is given the whole batch, and the mean of their gradients is that of
one rank. `bytes` are those of the weights that a rank holds, the most of any, and of all weights. With `--times`, which
wants a machine that does nothing else, `seconds_a_step` is the median of so many forwards and backwards, `plain` that
of the untouched model on one rank with as many threads as ranks; `received` are the bytes that reach a rank in a step,
the most of any.

Each in float64 and train mode, outputs and gradients of a forward and a backward beside the untouched model on one
rank. One JSON line a model: `divided`, the share of the weights that are; `whole`, elements that are not, by type of
module; `difference`, the largest, relative to the largest element of its tensor; or what it says where it `refused` or
`fails`. `wrong` is a tensor that differs by more than 1e-9 and than 100 times the `rounding` there, by which the
untouched model differs from itself when its weights change in their last bits. What models compute in float32 whatever
their weights are, in norms and routers, is computed in float64 here.
"""

import argparse
import copy
import json
import os
import statistics
import time
import warnings
from pathlib import Path

import torch
from mpi4py import MPI
from one_process import all_cores
from torch.overrides import TorchFunctionMode
from zoo_models import models

import hpctrain as ht

CLOSE = 1e-9


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="models whose names have this in them; several with commas")
    parser.add_argument("--after", default="", help="leave out this model and those before it")
    parser.add_argument("--tensor", type=int, nargs=3, default=None, help="the grid's tensor axis")
    parser.add_argument("--data", type=int, default=1, help="replicas, with --zero")
    parser.add_argument("--zero", type=int, default=None)
    parser.add_argument("--shard-activations", action="store_true")
    parser.add_argument("--device", default="cpu", help="cpu or cuda, which the ranks share")
    parser.add_argument("--times", type=int, default=0, help="steps to be timed")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    world = MPI.COMM_WORLD
    grid = ht.Grid(data=options.data, tensor=tuple(options.tensor) if options.tensor else world.size // options.data)
    sizes = {"data": options.data if options.data > 1 else None, "zero": options.zero}
    sizes["tensor"] = "x".join(map(str, options.tensor)) if options.tensor else grid.tensor.size
    shape = " ".join(f"{name}={size}" for name, size in sizes.items() if size not in (None, 1))
    shape += " activations divided" * options.shard_activations + f" {options.device}" * (options.device != "cpu")
    device = ht.comm.local_device(options.device, world)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    names = list(models())
    names = names[names.index(options.after) + 1 :] if options.after else names
    for name in names:
        if not any(word in name for word in options.only.split(",")):
            continue
        start = time.perf_counter()
        found = tried(name, grid, options.zero, options.times, options.shard_activations, device)
        line = {"benchmark": "zoo", "model": name, "ranks": world.size, "grid": shape, **found}
        line["seconds"] = round(time.perf_counter() - start, 1)
        if world.rank == 0:
            text = json.dumps(line)
            print(text, flush=True)
            if options.out:
                with options.out.open("a", encoding="utf-8") as file:
                    print(text, file=file)


def tried(name, grid, zero=None, times=0, shard_activations=False, device="cpu"):
    torch.manual_seed(0)
    try:
        model, inputs = models()[name]()
        model = model.to(device).double().train()
        inputs = {key: (x.double() if x.is_floating_point() else x).to(device) for key, x in inputs.items()}
        serial = copy.deepcopy(model)
        expected = run(serial, inputs)
    except Exception as error:
        return {"unbuilt": said(error)}
    try:
        checks = {"check_steps": 0} if times else {}
        model = ht.parallelize(model, grid, zero=zero, shard_activations=shard_activations, **checks)
    except ValueError as error:
        return {"refused": said(error)}
    result = {"divided": round(share(model), 4), "whole": whole(model)}
    try:
        got = run(model, inputs)
    except Exception as error:
        return {**result, "fails": said(error)}
    if zero is not None:
        ht.clip_grad_norm_(model, float("inf"))  # of the means
    worst = {f"output {k}": difference(got[k], expected[k]) for k in expected}
    gradients = ht.gather_gradients(model)
    if grid.rank == 0:
        for path, parameter in serial.named_parameters():
            none = torch.zeros_like(parameter)
            worst[path] = difference(gradients.get(path, none), none if parameter.grad is None else parameter.grad)
    place, largest = max(worst.items(), key=lambda item: item[1])
    if not largest < CLOSE:
        result["rounding"] = float(f"{rounding(serial, inputs, place):.2g}")
        if not largest < 100 * result["rounding"]:
            result["wrong"] = place
    result["difference"] = float(f"{largest:.2g}")
    result["bytes"] = [grid.comm.allreduce(weight_bytes(model), MPI.MAX), weight_bytes(serial)]
    return {**result, **(cost(model, serial, inputs, grid, times) if times else {})}


def weight_bytes(model):
    """Bytes of the memory that the weights take here: those of `ht.parallelize` have the shape of the whole."""
    storages = (parameter.untyped_storage() for parameter in model.parameters())
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def cost(model, serial, inputs, grid, times):
    """Seconds and bytes of both; the other ranks sleep while one rank has all of their threads."""
    ours, plain = [], []
    before = grid.transport.traffic.moved()[1]
    for _ in range(times):
        grid.comm.barrier()
        start = time.perf_counter()
        run(model, inputs)
        if grid.data.size > 1:
            ht.clip_grad_norm_(model, float("inf"))  # of the means
        finish()
        ours.append(grid.comm.allreduce(time.perf_counter() - start, MPI.MAX))
        if grid.rank == 0:
            with all_cores():
                start = time.perf_counter()
                run(serial, inputs)
                finish()
                plain.append(time.perf_counter() - start)
        done = grid.comm.Ibarrier()
        while not done.Test():
            time.sleep(1e-3)
    received = (grid.transport.traffic.moved()[1] - before) // times
    return {
        "seconds_a_step": float(f"{statistics.median(ours):.3g}"),
        "plain": float(f"{statistics.median(plain or [0]):.3g}"),
        "received": grid.comm.allreduce(received, MPI.MAX),
    }


def finish():
    """Wait for what a GPU has to do."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def rounding(serial, inputs, place):
    """The difference that the same model makes there from itself, by weights that differ in their last bits.

    Batch norms of few samples divide by what is nearly nothing.
    """
    results = []
    for scale in (0, 1e-15):
        with torch.no_grad():
            for parameter in serial.parameters():
                parameter.mul_(1 + scale * torch.randn_like(parameter))
                parameter.grad = None
        results.append({f"output {k}": y for k, y in run(serial, inputs).items()})
        results[-1].update({path: p.grad.clone() for path, p in serial.named_parameters() if p.grad is not None})
    return difference(results[1][place], results[0][place])


def said(error):
    text = str(error) or type(error).__name__
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"


def run(model, inputs):
    """Outputs, after a backward of a weighted sum of all of them."""
    torch.manual_seed(1)
    with Doubles():
        outputs = dict(floats(model(**inputs)))
    chance = torch.Generator().manual_seed(2)
    differentiable = [y for y in outputs.values() if y.requires_grad]
    weights = (torch.randn(y.shape, dtype=y.dtype, generator=chance).to(y.device) for y in differentiable)
    sum((y * weight).sum() for y, weight in zip(differentiable, weights)).backward()
    return {key: y.detach() for key, y in outputs.items()}


class Doubles(TorchFunctionMode):
    """Within it, float32 is float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = [torch.float64 if x is torch.float32 else x for x in args]  # a type is an argument of its own
        kwargs = {key: torch.float64 if x is torch.float32 else x for key, x in (kwargs or {}).items()}
        return func(*args, **kwargs)


def floats(value, name=""):
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield name, value
    elif hasattr(value, "items"):
        for key, inner in value.items():
            yield from floats(inner, f"{name}.{key}")
    elif isinstance(value, (tuple, list)):
        for key, inner in enumerate(value):
            yield from floats(inner, f"{name}.{key}")


def difference(a, b):
    if a.shape != b.shape:
        return float("inf")
    largest = (a - b.to(a.device)).abs().max().item() if a.numel() else 0.0
    return largest / max(b.abs().max().item(), 1e-3) if largest == largest and a.numel() else largest


def share(model):
    whole = divided = 0
    for parameter in model.parameters():
        size = torch.Size(parameter.whole_shape).numel()
        whole += size
        divided += 0 if parameter.shard.replicated else size
    return divided / max(1, whole)


def whole(model):
    """The kinds of modules of which weights stay whole, {type: elements}."""
    found = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and parameter.shard.replicated:
                kind = type(module).__name__
                found[kind] = found.get(kind, 0) + parameter.numel()
    return dict(sorted(found.items(), key=lambda item: -item[1]))


if __name__ == "__main__":
    os.environ.setdefault("HPCTRAIN_WATCHDOG", "60")
    main()
