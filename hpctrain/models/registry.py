"""Models by name: what `model.kind` of a configuration means."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable

from hpctrain.models.plain.spec import PlainSpec
from hpctrain.models.spec import ModelSpec

# Kinds and where their specs are; a spec's module is imported when it is asked for.
SPECS: dict[str, str | ModelSpec] = {
    "gpt2": "hpctrain.models.gpt2.spec:GPT2Spec",
    "llama": "hpctrain.models.llama.spec:LlamaSpec",
    "mixtral": "hpctrain.models.mixtral.spec:MixtralSpec",
}


def register(kind: str, spec: ModelSpec) -> None:
    """Give a model a name of its own for `model.kind`, on every rank, before the configuration is read.

    Raises:
        ValueError: for a name that is taken, or that is no plain name.
    """
    if kind in SPECS:
        raise ValueError(f"there is a model kind {kind!r} already; choose another name")
    if not kind or ":" in kind or "." in kind:
        raise ValueError(f"a model kind must be a plain name, got {kind!r}")
    if not isinstance(spec, ModelSpec):
        raise ValueError(f"model kind {kind!r} must be a ModelSpec, got {type(spec).__name__}")
    SPECS[kind] = spec


def get(kind: str) -> ModelSpec:
    """The spec of a kind of model: a registered name, or "package.module:function", which is imported from the working
    directory or, if it is not there, from the environment. What it names is

        a ModelSpec, a subclass of it, or a function without arguments that returns one
        a function of one argument, the section [model], that makes plain torch modules; see `plain.spec.PlainSpec`

    Raises:
        ValueError: for an unknown kind, a module that cannot be imported, and a function that is not of this form.

    >>> get("gpt2").kind
    'gpt2'
    """
    if ":" in kind:
        return _imported(kind)
    if kind not in SPECS:
        raise ValueError(
            f"model.kind must be {' or '.join(map(json.dumps, [*SPECS, 'package.module:function']))}, got {kind!r}"
        )
    spec = SPECS[kind]
    if isinstance(spec, str):
        module, name = spec.split(":")
        spec = SPECS[kind] = getattr(importlib.import_module(module), name)()
    return spec


def _imported(kind: str) -> ModelSpec:
    path, _, name = kind.partition(":")
    if not (name.isidentifier() and all(part.isidentifier() for part in path.split("."))):
        raise ValueError(f'model.kind must be a name or "package.module:function", got {kind!r}')
    here = os.getcwd()
    if here not in sys.path:  # `python -m` has it, the command hpctrain has not
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(path)
    except Exception as error:
        raise ValueError(
            f"model.kind = {kind}: cannot import {path} from {here} or the environment: {type(error).__name__}: {error}"
        ) from error
    found = getattr(module, name, None)
    if isinstance(found, ModelSpec):
        return found
    if not callable(found):
        raise ValueError(f"model.kind = {kind}: {module.__file__} has no function {name}")
    arguments = _required(found)
    if arguments == 1:
        return PlainSpec(kind, found)
    if arguments == 0 and isinstance(spec := found(), ModelSpec):
        return spec
    raise ValueError(
        f"model.kind = {kind} must take one argument, the section [model], and make a torch module, or take none and "
        f"return a ModelSpec, got {found!r:.100}"
    )


def _required(function: Callable) -> int:
    """How many arguments a function must be given by place."""
    needed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return sum(p.kind in needed and p.default is p.empty for p in parameters)
