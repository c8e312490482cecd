"""Modules that lie on other stages of a pipeline, and what they would compute: stand-ins without numbers.

Every stage runs the model's own forward, on the same microbatch. What others compute are `Absent` tensors there, which
have shapes alone; so is whatever depends on them, and that is found where it matters. The tensor that the stage before
sends takes the place of the one that stood for it, also where the forward goes on to use that.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# What torch raises where the numbers of fake tensors are asked for.
NO_NUMBERS = (DataDependentOutputException, DynamicOutputShapeException)


class Absent(torch.Tensor):
    """A tensor that another stage computes.

    Attributes: `fake`, of its shape; `received`, the tensor itself, once it is here.
    """

    fake: FakeTensor
    received: torch.Tensor | None

    @staticmethod
    def __new__(cls, fake: FakeTensor):
        made = torch.Tensor._make_wrapper_subclass(cls, fake.shape, dtype=fake.dtype, device=fake.device)
        made.fake, made.received = fake, None
        return made

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map(_bare, (args, kwargs or {}))
        with _Unwritten():
            return absent(func(*args, **kwargs))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]  # torch's stub has no cls
        raise ValueError(f"{func} is given what another stage of the pipeline computes")


def _bare(x):
    if not isinstance(x, Absent):
        return x
    return x.fake if x.received is None else x.received


def here(values: Any) -> Any:
    """Tuples and the like, with what has been received in the place of what stood for it."""
    return tree_map(lambda x: x.received if isinstance(x, Absent) and x.received is not None else x, values)


def absent(values: Any) -> Any:
    return tree_map(lambda x: Absent(x) if isinstance(x, FakeTensor) else x, values)


def absentees(values: Any) -> list[Absent]:
    """What is not here."""
    return [x for x in tree_leaves(values) if isinstance(x, Absent) and x.received is None]


class _Unwritten(TorchDispatchMode):
    """Refuses to write what has no numbers into what has some, where it would be lost."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, torch.Tensor)]
        written = func._schema.is_mutable and not isinstance(tensors[0], FakeTensor)
        if written and any(isinstance(x, FakeTensor) for x in tensors):
            raise ValueError(
                f"the forward writes activations of another stage of the pipeline into a tensor ({func}); between the "
                "blocks of a trunk, one tensor alone may go from one to the next"
            )
        return func(*args, **(kwargs or {}))


class Cut(BaseException):
    """The forward has come to the next stage. No Exception, which forwards may catch."""

    def __init__(self, hidden: torch.Tensor):
        super().__init__()
        self.hidden = hidden


class Progress:
    """How far this rank's forward is.

    Attributes:
        live: what is computed is this stage's; before, only shapes and what does not depend on weights are of use.
        place: of the block of the trunk that is to be called next.
        outputs: {key: {place: output}} of the blocks of earlier stages, as far as they are known.
        key: of this call: the shapes of its inputs.
    """

    def __init__(self):
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.live, self.place = False, 0
        self.outputs: dict[Any, dict[int, Any]] = {}
        self.key: Any = None

    def fake(self, tensor: torch.Tensor) -> FakeTensor:
        """Of its shape, dtype and device."""
        with self.mode:
            made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu" if tensor.is_meta else tensor.device)
        assert isinstance(made, FakeTensor)
        return made

    def come_to(self, place: int) -> None:
        if place != self.place:
            raise ValueError(
                f"the forward calls block {place} of the trunk where block {self.place} is to follow; a pipeline calls "
                "each block once, in the order of the list"
            )
        self.place += 1


class Elsewhere(torch.nn.Module):
    """In the place of a module of other stages, without memory. A block of the trunk has its `place` in it."""

    def __init__(self, module: torch.nn.Module, path: str, progress: Progress, place: int | None = None):
        super().__init__()
        held = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
        memo = {key: progress.fake(tensor) for key, tensor in held.items()}
        vars(self).update(stub=copy.deepcopy(module, memo), path=path, progress=progress, place=place)

    def forward(self, *arguments: Any, **options: Any):
        progress = self.progress
        if self.place is None:
            self._refuse_live("calls it")
            return self._run(arguments, options)
        progress.come_to(self.place)
        if progress.live:
            raise Cut(_hidden(arguments, options))
        known = progress.outputs.setdefault(progress.key, {})
        if self.place not in known:
            # All of it depends on what is elsewhere, for all that is known.
            fake = tree_map(
                lambda x: progress.fake(x) if isinstance(x, torch.Tensor) else x, self._run(arguments, options)
            )
            known[self.place] = fake
        return absent(known[self.place])

    def _run(self, arguments, options):
        arguments, options = tree_map(_bare, (arguments, options))
        with _Unwritten():
            return absent(self.stub(*arguments, **options))

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = getattr(vars(self)["stub"], name)
            if isinstance(found, torch.Tensor):
                self._refuse_live(f"reads its {name}")
            return absent(found)

    def _refuse_live(self, what) -> None:
        if self.progress.live:
            raise ValueError(
                f"the module {self.path!r} is on another stage of the pipeline than the forward that {what}: modules "
                "beside the trunk lie on the first stage where they are registered before it, otherwise on the last; "
                "register them in the order in which forward calls them"
            )

    def train(self, mode: bool = True):
        self.stub.train(mode)
        return super().train(mode)

    def __deepcopy__(self, memo):
        raise ValueError("a model that is cut into pipeline stages cannot be copied: copy it before ht.parallelize")

    def __reduce_ex__(self, protocol):
        raise ValueError("a model that is cut into pipeline stages cannot be saved whole: save ht.gather_state_dict")


def _floats(arguments, options) -> list[torch.Tensor]:
    leaves = tree_leaves((arguments, options))
    return [x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point()]


def _hidden(arguments, options) -> torch.Tensor:
    """What a block is given by the one before: the first tensor of floats."""
    found = _floats(*here((arguments, options)))
    if not found:
        raise ValueError("a block of the trunk is given no tensor of floats, which a pipeline could send")
    if absentees(found[0]):
        raise ValueError(
            "what a stage of the pipeline gives to the next depends on what others compute, beside the tensor that it "
            "was given"
        )
    return found[0]


def entering(arguments: tuple, options: dict, path: str) -> Absent:
    """Of the arguments of a stage's first block, what the stage before sends.

    Raises:
        ValueError: when that would have to send more.
    """
    found, missing = _floats(arguments, options), absentees((arguments, options))
    if len(missing) != 1 or found[0] is not missing[0]:
        raise ValueError(
            f"the block {path!r} is given {len(missing)} tensors that earlier stages of the pipeline compute; stages "
            "can be cut where one tensor goes from block to block, the first of floats among the arguments"
        )
    return missing[0]
