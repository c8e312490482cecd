"""What is known of a plain torch module that is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class PlainShape:
    """What the trainer and the other ranks must know of a module.

    Attributes:
        layers: parts of a model that is given as a list of parts.
        width: features of the activations between such parts.
        context: tokens of a sequence.
        vocabulary: tokens that there are.
        options: the whole section [model].
    """

    layers: int
    width: int
    context: int
    vocabulary: int
    options: Mapping[str, Any] = field(default_factory=dict, compare=False)
