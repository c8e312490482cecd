"""What a kind of model states about Hugging Face's format, for export and for `model.init`."""

from __future__ import annotations

import abc
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Source:
    """How one parameter of ours is made up of tensors of theirs.

    Attributes:
        names: of their tensors, whose rows one after another are `order`ed into ours.
        rows: of each of these tensors; () where there is one.
        order: row i of ours is row order[i] of theirs; None for the same order. Rows of a weight of experts, (experts,
            …, columns), are those of one expert after the other.
        transposed: their matrices are (in, out), as of GPT-2's Conv1D; their rows are then those of the transpose.
    """

    names: tuple[str, ...]
    rows: tuple[int, ...] = ()
    order: np.ndarray | None = None
    transposed: bool = False


class Format(abc.ABC):
    """A kind of model in Hugging Face's format.

    Attributes:
        defaults: of the keys of config.json that a file may leave out.
        required: keys that an export leaves out, and the value that a folder's config.json must have.
        free: keys of `config` that a model.init folder may have as it likes.
        known: all tensors that a folder may have; others are refused.
        model_types: of the config.json that `options` takes.
        prefix: of the names, which files of a model without the projection onto the vocabulary leave out.
    """

    defaults: Mapping[str, Any]
    required: Mapping[str, Any] = {}
    free: tuple[str, ...] = ("architectures", "bos_token_id", "eos_token_id")
    known: re.Pattern[str]
    model_types: tuple[str, ...] = ()
    prefix: str

    @abc.abstractmethod
    def config(self, shape: Any, end_of_document: int | None) -> dict[str, Any] | None:
        """config.json of a model of this shape; None where there is none, and no model starts from a folder."""

    def options(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The section [model] for a config.json of one of `model_types`; what that says beside is for `differences`.

        Raises:
            ValueError: naming a key that is missing.
        """
        raise ValueError("a model of this kind has no config.json")

    @abc.abstractmethod
    def source(self, name: str, shape: Any) -> Source:
        """Of the parameter of ours of this name."""

    def differences(self, settings: Mapping[str, Any], shape: Any) -> list[str]:
        """What a folder's config.json says otherwise than this shape; one text each."""
        wanted = {key: value for key, value in (self.config(shape, None) or {}).items() if key not in self.free}
        wanted |= self.required
        found = {key: settings.get(key, self.defaults.get(key)) for key in wanted}
        return [f"{key} = {found[key]}, not {value}" for key, value in wanted.items() if found[key] != value]


def taken(settings: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """{our key: the setting of theirs}; raises ValueError for one that is missing."""
    if missing := [theirs for theirs in keys.values() if settings.get(theirs) is None]:
        raise ValueError(f"config.json has no {missing[0]}")
    return {ours: settings[theirs] for ours, theirs in keys.items()}


class OwnNames(Format):
    """Weights alone, under the names that they have in the model, or in the user's module if there is one."""

    def config(self, shape: Any, end_of_document: int | None) -> None:
        return None

    def source(self, name: str, shape: Any) -> Source:
        """
        >>> OwnNames().source("module.head.weight", None).names, OwnNames().source("layers.2.bias", None).names
        (('head.weight',), ('2.bias',))
        """
        return Source((re.sub(r"^(module|layers)\.", "", name),))
