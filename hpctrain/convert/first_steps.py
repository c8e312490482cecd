"""The first calls of a parallelized model: what the ranks of the tensor axis do must be the same, and is compared.

So is what the ranks do that share sequences.

They run the same script. Where they read other batches, or draw other random numbers, or call other modules, every rank
would go on with numbers of no model at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from hpctrain.digest import digest
from hpctrain.grid import Axis, Grid
from hpctrain.randomness import generator_states

NAMED = 8  # ranks in an error
SAMPLED = 1 << 22  # elements of a large tensor of floats that are looked at
LARGEST = 1e100  # of which the square has a sum still; masks have the lowest number of their type


class FirstSteps:
    """Compares the inputs of the model's first `steps` calls, the order of the calls of its modules, the generators
    that it draws from, and the gradients that reach its outputs, over the tensor axis and the sequence axis.

    Costs a message a call of each divided module, and nothing after the first steps.
    """

    def __init__(self, model: torch.nn.Module, grid: Grid, modules: Iterable[torch.nn.Module], steps: int):
        self._axes, self._left = (grid.tensor, grid.sequence), steps
        self._model: torch.nn.Module | None = model
        self._paths = {
            module: path or "the model itself" for path, module in model.named_modules() if module in modules
        }
        self._hook = model.register_forward_pre_hook(self._begin, with_kwargs=True)
        self._within = contextlib.ExitStack()
        self._generators: dict[str, int] | None = None  # their states as the call began

    def _begin(self, model, arguments, options):
        if torch.compiler.is_compiling() or self._generators is not None:
            return
        self._generators = generator_states()
        self._within.callback(register_module_forward_pre_hook(self._call).remove)
        self._within.callback(register_module_forward_hook(self._end, always_call=True).remove)
        reported = {f"argument {name}": _fingerprint(x) for given in (arguments, options) for name, x in _named(given)}
        reported["the mode"] = f"training={model.training}, gradients={torch.is_grad_enabled()}"
        try:
            compare(self._axes, "calls the model", reported)
        except ValueError:
            self._close()
            raise

    def _call(self, module, arguments):
        if module in self._paths:
            compare(self._axes, f"calls {self._paths[module]}", {})

    def _end(self, module, arguments, output):
        if module is not self._model:
            return
        before = self._generators
        self._close()
        if output is None or before is None:  # it failed
            return
        after = generator_states()
        compare(self._axes, "ends the call", {f"the generator of {k}": v for k, v in before.items() if after[k] != v})
        for name, tensor in _named(output):
            if tensor.requires_grad:
                tensor.register_hook(_Gradient(self._axes, name))
        self._left -= 1
        if self._left == 0:
            self._hook.remove()
            self._paths, self._model = {}, None

    def _close(self):
        self._within.close()
        self._generators = None


class _Gradient:
    """A hook on an output."""

    def __init__(self, axes: tuple[Axis, Axis], name: str):
        self._axes, self._name = axes, name

    def __call__(self, gradient) -> None:
        compare(self._axes, "runs backward", {f"the gradient of output {self._name}": _fingerprint(gradient)})


def compare(axes: tuple[Axis, Axis], what: str, reported: dict) -> None:
    """Raise ValueError on every rank of the tensor and the sequence axis where one does something else than the first,
    or has another of what it `reported`."""
    different = ""
    for axis, name in zip(axes, ("tensor", "sequence")):
        if axis.size > 1:
            # What was found along tensor axes is told along the sequence: either all of these ranks raise, or none.
            different = _difference(axis, name, what, reported, different)
    if different:
        raise ValueError(different)


def _difference(axis, name, what, reported, before) -> str:
    watch = axis.transport.watchdog
    with watch.during(axis, "comparison of the first steps") if watch else contextlib.nullcontext():
        everyone = axis.comm.allgather((what, reported, before))
    for *_, found in everyone:
        if found:
            return found
    first, mine, _ = everyone[0]
    differ: dict[str, list[int]] = {}  # what differs: the ranks
    for rank, (other, theirs, _) in enumerate(everyone):
        names = [key for key in {**mine, **theirs} if not _alike(mine.get(key), theirs.get(key))]
        if other != first:
            differ.setdefault(f"{other}, where rank 0 {first}", []).append(rank)
        elif names:
            text = f"{other} with {_said(names[0], theirs)}, where rank 0 has {_said(names[0], mine)}"
            differ.setdefault(text, []).append(rank)
    if not differ:
        return ""
    text, ranks = next(iter(differ.items()))
    return (
        f"rank {', '.join(map(str, ranks[:NAMED]))} of the {name} axis {text}; its ranks must run the same script "
        "with the same batches and seeds (each replica of the data axis has batches of its own). check_steps=0 of "
        "ht.parallelize leaves this comparison out"
    )


def _said(name, reported) -> str:
    value = reported.get(name)
    if isinstance(value, int):
        return f"{name} in state {value:08x}"
    if isinstance(value, tuple):
        return f"{name} = {value[0]}, checksum {value[1]:.17g}"
    return f"{name} unused" if value is None else f"{name} = {value}"


def _alike(a, b) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple) and a[0] == b[0] and len(a) == len(b) == 3:
        return abs(a[1] - b[1]) <= max(a[2], b[2]) or a[1:] == b[1:]
    return a == b


def _fingerprint(x):
    """Of whole numbers a checksum; of others a sum with random signs, and by how much rounding may change it: where
    kernels are not deterministic, ranks may differ by that."""
    kind = f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"
    if x.is_meta or x.is_nested or x.layout != torch.strided or x.numel() == 0:
        return kind
    if not x.dtype.is_floating_point:
        return kind, int(digest(x))
    sampled = x.detach().reshape(-1)[:: -(-x.numel() // SAMPLED)].double()
    flat = sampled.clamp(-LARGEST, LARGEST).nan_to_num_(nan=LARGEST / 10)
    weights = torch.arange(len(flat), dtype=torch.float64, device=flat.device).add_(1).mul_(2.399963).cos_()
    return kind, float(flat @ weights), torch.finfo(x.dtype).eps ** 0.5 * float(flat.norm())


def _named(value, name: str = ""):
    """(name, tensor) of all tensors in tuples, lists and mappings, and those alone."""
    if isinstance(value, torch.Tensor):
        yield name or "0", value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _named(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (tuple, list)):
        for place, inner in enumerate(value):
            yield from _named(inner, f"{name}.{place}" if name else str(place))
