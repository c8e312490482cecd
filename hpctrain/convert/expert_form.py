"""How experts keep their matrices: in stacks, (experts, out, in) or (experts, in, out), of any class.

What divides by hidden features is recognised by what it computes. A tiny twin, of few hidden features, is run whole and
in two parts of them; where the parts add up to the whole, the features do not meet each other in between.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from hpctrain.convert.plain import altered, arguments, is_hooked
from hpctrain.convert.twins import Kept, with_children

_PARTS = (slice(0, 3), slice(3, 7))  # of the twin's hidden features
FEATURES = _PARTS[-1].stop


class ExpertForm(NamedTuple):
    """
    Attributes:
        up, down: names of the stacks, to hidden features and back.
        transposed: each matrix is (in, out).
        fused: matrices one after the other along the hidden features: 2 for gate and up.
        unit: neighbours along them that belong to one: 2 for gate and up by turns.
        biased: each stack has a bias for each expert.
    """

    up: str
    down: str
    transposed: bool
    fused: int
    unit: int
    biased: bool

    @property
    def names(self) -> tuple[str, ...]:
        return (self.up, self.down, f"{self.up}_bias", f"{self.down}_bias")[: 4 if self.biased else 2]

    def hidden_dim(self, name: str) -> int:
        """Of a stack, or of the bias of `up`."""
        return 2 if name == (self.up if self.transposed else self.down) else 1

    def random(self, experts: int, width: int, hidden: int, out: int) -> dict[str, torch.Tensor]:
        """Stacks of float64."""
        shapes = (experts, self.fused * self.unit * hidden, width), (experts, out, hidden)
        found = [numbers(*shape, seed=seed) for seed, shape in enumerate((*shapes, *(shape[:2] for shape in shapes)))]
        if self.transposed:
            found[:2] = [stack.mT.contiguous() for stack in found[:2]]
        return dict(zip(self.names, found))

    def part(self, stacks: dict[str, torch.Tensor], part: slice) -> dict[str, torch.Tensor]:
        """Of some of the hidden features; the last bias goes with the first of them."""
        cut = dict(stacks)
        for name in self.names[:3]:
            dim, times = self.hidden_dim(name), (1, 1) if name == self.down else (self.fused, self.unit)
            by_feature = cut[name].unflatten(dim, (times[0], -1, times[1]))
            cut[name] = by_feature.narrow(dim + 1, part.start, part.stop - part.start).flatten(dim, dim + 2)
        if self.biased:
            cut[self.names[3]] = cut[self.names[3]] * (part.start == 0)
        return cut


def numbers(*shape: int, seed: int) -> torch.Tensor:
    """Random ones of float64; large enough to go past the limits of activations that are clamped."""
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def twin(module: nn.Module, stacks: dict[str, torch.Tensor], training: bool, **attributes: Any) -> Any:
    """The module with other parameters."""
    children = {name: copy.deepcopy(child) for name, child in module.named_children()}
    parameters = {name: nn.Parameter(stack) for name, stack in stacks.items()}
    return with_children(module, children, training, _parameters=parameters, **attributes)


def has_nothing_else(module: nn.Module, names: tuple[str, ...]) -> bool:
    """Whether these are all of the weights and buffers that are in it, and nobody looks into it."""
    found = [name for name, _ in module.named_parameters()] + [name for name, _ in module.named_buffers()]
    return sorted(found) == sorted(names) and not altered(module) and not any(map(is_hooked, module.children()))


def adds_up(form: ExpertForm, stacks: dict[str, torch.Tensor], make: Callable, *inputs: torch.Tensor) -> bool:
    """Whether a module, `make` of stacks and of whether it trains, gives the sum of what those of parts give."""
    kept = Kept()

    def of(part):
        made = [make(form.part(stacks, part), training) for training in (False, True)]
        return [kept.call(module, *(x.clone() for x in inputs)) for module in made]

    found = tried(lambda: (of(slice(0, FEATURES)), [sum(pair) for pair in zip(*map(of, _PARTS))]))
    return found is not None and all(map(same, *found)) and kept.are_alike()


def sorted_form(module: nn.Module) -> ExpertForm | None:
    """Of a module whose forward takes as many tokens for each of its experts, one expert after the other, alone."""
    weights = {name: weight.shape for name, weight in module._parameters.items() if weight is not None}
    stacks = [name for name, shape in weights.items() if len(shape) == 3]
    if len(stacks) != 2 or len(arguments(module)) != 1:
        return None
    for (up, down), transposed, (fused, unit) in itertools.product(
        itertools.permutations(stacks), (False, True), ((1, 1), (2, 1), (1, 2))
    ):
        form = ExpertForm(up, down, transposed, fused, unit, len(weights) == 4)
        (experts, *first), (others, *last) = weights[up], weights[down]
        rows, width = reversed(first) if transposed else first
        out, hidden = reversed(last) if transposed else last
        if others != experts or rows != fused * unit * hidden or not has_nothing_else(module, form.names):
            continue
        stacks_of_twin, x = form.random(experts, width, FEATURES, out), numbers(2 * experts, width, seed=4)
        if adds_up(form, stacks_of_twin, functools.partial(twin, module), x):
            return form
    return None


def stack_dim(module: nn.Module) -> int | None:
    """Of a module of one stack that takes rows and how many of them each expert has: the dim of output features."""
    weights = [(name, weight) for name, weight in module._parameters.items() if weight is not None]
    arguments = list(inspect.signature(type(module).forward).parameters.values())[1:]
    if len(weights) != 1 or weights[0][1].dim() != 3 or not has_nothing_else(module, (weights[0][0],)):
        return None
    if len(arguments) != 2 or any(each.kind is not each.POSITIONAL_OR_KEYWORD for each in arguments):
        return None
    (name, weight), experts = weights[0], len(weights[0][1])
    counts = [number % 3 for number in range(experts)]

    def run(part, dim, of_each):
        width = weight.shape[3 - dim]
        stack = numbers(experts, FEATURES, width, seed=0)[:, part]
        made = twin(module, {name: stack if dim == 1 else stack.mT.contiguous()}, True)
        return made.forward(numbers(sum(counts), width, seed=1), of_each(counts))

    for dim, of_each in itertools.product((1, 2), (list, torch.tensor)):  # releases differ in which they take
        found = tried(
            lambda dim=dim, n=of_each: (
                run(slice(0, FEATURES), dim, n),
                torch.cat([run(p, dim, n) for p in _PARTS], -1),
            )
        )
        if found is not None and found[0].shape[-1] == FEATURES and same(*found):
            return dim
    return None


def same(a: Any, b: Any) -> bool:
    """Whether both are the same tensor, to rounding."""
    tensors = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    return tensors and a.shape == b.shape and torch.allclose(a, b, rtol=1e-9, atol=1e-9)


def tried(run: Callable) -> Any:
    """What it gives, without a gradient, or None; draws of random numbers are forgotten."""
    state = torch.get_rng_state()
    with torch.no_grad():
        try:
            return run()
        except Exception:  # whatever the module does with its weights, it is not this
            return None
        finally:
            torch.set_rng_state(state)
