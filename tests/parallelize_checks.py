"""A parallelized model beside the untouched one: outputs, gradients and weights must be the same."""

import copy
import functools

import torch

import hpctrain as ht

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def tensor_grids(world):
    """The ranks as a box where they make one, which is a line to models whose activations are whole."""
    return _grids(world.size)[-1:]


def boxes(world):
    """The ranks in one line, and as a box; of many, only the box."""
    return _grids(world.size)


@functools.cache  # a grid makes several communicators
def _grids(ranks):
    boxes = {1: [(1, 1, 1)], 2: [(2, 1, 1), (1, 1, 2)], 4: [(4, 1, 1), (2, 1, 2)], 8: [(2, 2, 2)]}
    return [ht.Grid(tensor=box) for box in boxes.get(ranks, [(ranks, 1, 1)])]


def numbers(*shape, seed=1):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def compare(make, grid, inputs, run=None, replicate=(), **options):
    """Outputs, gradients of inputs and of weights, buffers: all equal, of a fresh model and of its parallelized copy.

    Args:
        make: () -> model, initialised from torch's generator.
        inputs: tensors; those of floats get gradients.
        run: (model, *inputs) -> tensor or tuple of them; by default the model itself.
        options: more of parallelize.

    Returns the parallelized model.
    """
    run = run or (lambda model, *inputs: model(*inputs))
    torch.manual_seed(3)
    serial = make().double()
    names = list(serial.state_dict())
    model = ht.parallelize(copy.deepcopy(serial), grid, replicate=replicate, **options)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in serial.named_parameters()]
    gathered = ht.gather_state_dict(model)
    if grid.rank == 0:
        assert list(gathered) == names
        for name, tensor in serial.state_dict().items():
            assert torch.equal(gathered[name], tensor), name
    results, serial_buffers = on_first(grid, lambda: (_run(serial, inputs, run), dict(serial.named_buffers())))
    for expected, got in zip(results, _run(model, inputs, run), strict=True):
        torch.testing.assert_close(got, expected, **CLOSE)
    state = torch.get_rng_state()
    assert all(torch.equal(state, other) for other in grid.comm.allgather(state))
    check_gradients(model, serial, grid)
    buffers = dict(model.named_buffers())
    for name, buffer in serial_buffers.items():
        torch.testing.assert_close(buffers[name], buffer, **CLOSE)
    return model


def _run(model, inputs, run):
    held = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
    torch.manual_seed(4)  # of dropout
    outputs = run(model, *held)
    outputs = [y for y in (outputs if isinstance(outputs, tuple) else (outputs,)) if y is not None]
    sum((y * numbers(*y.shape, seed=5)).sum() for y in outputs).backward()
    return [y.detach() for y in outputs] + [x.grad for x in held if x.is_floating_point()]


def on_first(grid, compute):
    """What rank 0 computes alone, on all ranks."""
    return grid.comm.bcast(compute() if grid.rank == 0 else None)


def check_gradients(model, serial, grid):
    """The gathered gradients are those of the serial model."""
    gathered = ht.gather_gradients(model)
    if grid.rank == 0:
        for name, parameter in serial.named_parameters():
            if parameter.grad is None:
                assert name not in gathered
                continue
            torch.testing.assert_close(
                gathered[name], parameter.grad, msg=lambda text, name=name: f"{name}: {text}", **CLOSE
            )


def part_of(parameter):
    """What this rank has of it, whose shape is its own."""
    return parameter.detach().as_subclass(torch.Tensor)


def is_norm(module):
    return "Norm" in type(module).__name__ or isinstance(module, torch.nn.PReLU)


def held_once(model, grid):
    """Every element of every weight lies on one rank of the tensor axis; the vectors of norms lie on all."""
    vectors = {p for module in model.modules() if is_norm(module) for p in module.parameters() if p.dim() == 1}
    for parameter in model.parameters():
        whole = parameter.whole_shape
        times = grid.tensor.size if parameter in vectors else 1
        assert grid.tensor.comm.allreduce(part_of(parameter).numel()) == times * torch.Size(whole).numel()
        assert parameter.dim() == len(whole)
        assert tuple(parameter.shape) == whole
