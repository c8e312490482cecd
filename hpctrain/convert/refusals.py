"""The words of what cannot be done to a divided weight, with the line of the user's code that would."""

from __future__ import annotations

import sys
import types

import torch

_LIBRARIES = ("torch", "hpctrain", "transformers", "typing_extensions", "contextlib", "functools")  # not the user's


def refused(what: str, path: str) -> str:
    """Of what may not be done to a weight after parallelize."""
    return (
        f"{place()} would {what} the weight {path!r}, which is divided over ranks; do it before parallelize, and list"
        " its module in replicate where parallelize asks for it"
    )


def unpicklable(what: str) -> str:
    return (
        f"{what} is divided over ranks of a grid, which a file cannot hold: save ht.gather_state_dict(model), and load"
        " it into the model as it was before parallelize"
    )


def hook_refused(path: str) -> str:
    return (
        f"the weight {path!r} has a hook on its gradient, which would see that of one replica's batch; remove it, and"
        " change .grad after ht.sync_gradients(model)"
    )


def place() -> str:
    """The line of the user's code that led here, as "line 12 of train.py"."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if _library(frame) not in _LIBRARIES:
            return f"line {frame.f_lineno} of {frame.f_code.co_filename}"
        frame = frame.f_back
    return "torch"


def wants_whole(frame: types.FrameType | None) -> bool:
    """Whether code of the user's, in the forward of a module, led to this frame; not that of torch or ours. Or peft's,
    which adds to `.data` what it computed from whole weights."""
    if _library(frame) in ("torch", "hpctrain"):
        return False
    if _library(frame) == "peft":
        return True
    while frame is not None:
        code = frame.f_code
        of_module = code.co_name == "forward" and code.co_argcount > 0
        if of_module and isinstance(frame.f_locals.get(code.co_varnames[0]), torch.nn.Module):
            return True
        frame = frame.f_back
    return False


def by_user(frame: types.FrameType | None) -> bool:
    """Whether neither torch nor this package calls a torch function, by the frame that its handler is called from."""
    return caller(frame) not in ("torch", "hpctrain")


def caller(frame: types.FrameType | None) -> str:
    """The package that calls a torch function."""
    while frame is not None and frame.f_code.co_name == "__torch_function__":  # of a mode
        frame = frame.f_back
    if frame is not None and frame.f_globals.get("__name__") == "torch.overrides":  # of one that is written in Python
        frame = frame.f_back and frame.f_back.f_back
    return _library(frame)


def _library(frame) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0] if frame is not None else ""
