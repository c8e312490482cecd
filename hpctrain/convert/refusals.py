"""The words of what cannot be done to a divided weight, with the line of the user's code that would."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

import torch
from torch.utils.checkpoint import CheckpointFunction

_APPLY = torch.autograd.Function.apply.__code__
_LIBRARIES = (
    "torch", "tensorboard", "prune", "hpctrain", "transformers", "typing_extensions", "contextlib", "functools",
)  # fmt: skip
# Parts of torch that count as user code: one writes numbers to a file, the other compares elements of whole weights.
_AS_USERS = {"torch.utils.tensorboard": "tensorboard", "torch.nn.utils.prune": "prune"}


def refused(what: str, path: str) -> str:
    """Of what may not be done to a weight after parallelize."""
    return (
        f"{place()} would {what} the weight {path!r}, which is divided over ranks; do it before parallelize, and list"
        " its module in replicate where parallelize asks for it"
    )


def unpicklable(what: str, instead: str | None = None) -> str:
    instead = instead or "save ht.gather_state_dict(model), and load it into the model as it was before parallelize"
    return f"{what} is divided over ranks of a grid, which a file cannot hold: {instead}"


def hook_refused(path: str) -> str:
    return (
        f"the weight {path!r} has a hook on its gradient, which would see that of one replica's batch; remove it, and"
        " change .grad after ht.sync_gradients(model)"
    )


def place() -> str:
    """The line of the user's code that led here, as "line 12 of train.py"."""
    for frame in _calling(sys._getframe(1)):
        if _library(frame) not in _LIBRARIES:
            return f"line {frame.f_lineno} of {frame.f_code.co_filename}"
    return "torch"


def wants_whole(frame: types.FrameType | None) -> bool:
    """Whether code of the user's, in the forward of a module, led to this frame; not that of torch or ours. Or peft's,
    which adds to `.data` what it computed from whole weights."""
    if _library(frame) in ("torch", "hpctrain"):
        return False
    if _library(frame) == "peft":
        return True
    for each in _calling(frame):
        code = each.f_code
        of_module = code.co_name == "forward" and code.co_argcount > 0
        if of_module and isinstance(each.f_locals.get(code.co_varnames[0]), torch.nn.Module):
            return True
    return False


def check_function(weight: torch.Tensor, path: str) -> None:
    """Raise ValueError where an autograd.Function of the user's reads a weight: backward would give the gradient of the
    whole to this rank's part."""
    if (reader := function_given(weight)) is not None:
        raise ValueError(
            f"{place()}: {reader} is given the weight {path!r}, which is divided over ranks, and would give its part "
            "the gradient of the whole; give it weight * 1, which is the whole one, or list its module in replicate"
        )


def function_given(x: torch.Tensor) -> str | None:
    """The autograd.Function in whose forward a divided tensor is read, if any; backward would know of one part."""
    if torch.is_grad_enabled():
        return None
    with torch._C.DisableTorchFunctionSubclass():
        if not x.requires_grad:
            return None
    for frame in _calling(sys._getframe(1)):
        if frame.f_code is _APPLY and any(given is x for given in frame.f_locals["args"]):
            name = frame.f_locals["cls"].__name__
            return "a full backward hook" if name == "BackwardHookFunction" else name
    return None


def check_recomputed() -> None:
    """Raise ValueError within torch's checkpoint of the kind that knows of no parts."""
    if torch.is_grad_enabled():
        return
    for frame in _calling(sys._getframe(1)):
        if frame.f_code is CheckpointFunction.forward.__code__:
            raise ValueError(
                f"{place()}: torch.utils.checkpoint(use_reentrant=True) cannot give back activations of which every"
                " rank has some rows, for shard_activations=True of ht.parallelize; use use_reentrant=False, as in"
                ' model.gradient_checkpointing_enable({"use_reentrant": False})'
            )


def by_user(frame: types.FrameType | None) -> bool:
    """Whether neither torch nor this package calls a torch function, by the frame that its handler is called from."""
    return caller(frame) not in ("torch", "hpctrain")


def by_package(frame: types.FrameType | None) -> bool:
    """Whether this package itself does, which gathers a weight before it reads one."""
    return caller(frame) == "hpctrain"


def offloaded(frame: types.FrameType | None) -> bool:
    """Whether torch.autograd.graph.save_on_cpu gives backward what a forward saved, under `local()`."""
    return frame is not None and frame.f_code.co_name == "unpack_from_cpu"


def compared(frame: types.FrameType | None) -> bool:
    """Whether torch.utils.checkpoint asks, of what the first forward saved (under `local()`) and the second one."""
    return frame is not None and frame.f_code.co_name == "_default_meta_extractor"


def caller(frame: types.FrameType | None) -> str:
    """The package that calls a torch function."""
    while frame is not None and frame.f_code.co_name == "__torch_function__":  # of a mode
        frame = frame.f_back
    if frame is not None and frame.f_globals.get("__name__") == "torch.overrides":  # of one that is written in Python
        frame = frame.f_back and frame.f_back.f_back
    return _library(frame)


def _calling(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """The frame, its caller, and so on."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _library(frame) -> str:
    name = frame.f_globals.get("__name__", "") if frame is not None else ""
    return next((its for module, its in _AS_USERS.items() if name.startswith(module)), name.partition(".")[0])
