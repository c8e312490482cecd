"""One option of the configuration. Its type, default, bounds, choices and help stand together, on a dataclass field."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hpctrain.choices import check_choice


def option(
    default: typing.Any,
    help: str,
    *,
    low: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: Sequence[str] = (),
    aliases: Mapping[str, str] = types.MappingProxyType({}),
    check: Callable[[typing.Any], None] | None = None,
) -> typing.Any:
    """A dataclass field that is an option.

    Args:
        default: its value where none is given; a list is copied.
        help: what it is, its unit, and what its special values mean.
        low: the least that a number may be.
        above, below: what a number must be above or below.
        choices: of a text, or of each text in a list.
        aliases: {other name: choice}. A configuration that was read has the choice.
        check: raises ValueError, naming the option, for what the bounds and choices cannot express.
    """
    metadata = {
        "help": help, "low": low, "above": above, "below": below, "choices": tuple(choices), "aliases": aliases,
        "check": check,
    }  # fmt: skip
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Option:
    """An option as declared by `option`.

    Attributes:
        name: "section.key".
        types: those that a value may have: int, float, bool, str, list[int], list[float] or list[str].
    """

    name: str
    types: tuple
    default: typing.Any
    help: str
    low: float | None
    above: float | None
    below: float | None
    choices: tuple[str, ...]
    aliases: Mapping[str, str]
    check: Callable[[typing.Any], None] | None

    @property
    def type_name(self) -> str:
        """As "int or list[int]"."""
        return " or ".join(kind.__name__ if isinstance(kind, type) else str(kind) for kind in self.types)

    @property
    def allowed(self) -> str:
        """The choices and bounds in words; "" where there are none.

        >>> from hpctrain.config.sections import RunConfig, TrainConfig
        >>> options(RunConfig, "run")["steps"].allowed, options(TrainConfig, "train")["min_lr"].allowed
        ('at least 1', '"auto" or at least 0')
        """
        limits = {"at least": self.low, "above": self.above, "below": self.below}
        bounds = " and ".join(f"{word} {bound}" for word, bound in limits.items() if bound is not None)
        return " or ".join([*map(json.dumps, self.choices), *filter(None, [bounds])])

    def convert(self, value: typing.Any, text: str | None = None) -> typing.Any:
        """The value as one of the option's types; whole numbers will do for reals, and one string for a list of them.

        Args:
            text: what the value was read from where TOML would have quotes around a string: run.name=2024.

        Raises:
            ValueError: for another type, and for what no TOML file or path can hold.
        """
        if self.types == (str,) and text is not None and not isinstance(value, str):
            value = text
        for item in value if isinstance(value, list) else [value]:
            if type(item) is int and not -(2**63) <= item < 2**63:
                raise ValueError(f"{self.name} must fit into 64 bits, got an integer of {item.bit_length()}")
            if isinstance(item, str) and not _storable(item):
                raise ValueError(f"{self.name} must be UTF-8 without zero bytes, got {item!r:.100}")
        for kind in self.types:
            if type(value) is kind:
                return self.aliases.get(value, value) if kind is str else value
            if kind is float and type(value) is int:
                return float(value)
            if typing.get_origin(kind) is list:
                (item_type,) = typing.get_args(kind)
                if type(value) is str and item_type is str:
                    return [value]
                if isinstance(value, list) and all(type(item) is item_type for item in value):
                    return value
                if item_type is float and isinstance(value, list) and all(type(item) in (int, float) for item in value):
                    return [float(item) for item in value]
        raise ValueError(f"{self.name} must be {self.type_name}, got {value!r}")

    def validate(self, value: typing.Any) -> None:
        """Raise ValueError unless the value, of the right type, is among the choices and within the bounds."""
        if self.check:
            self.check(value)
        if isinstance(value, list):
            for item in value:
                if self.choices and isinstance(item, str) and item not in self.choices:
                    raise ValueError(f"{self.name} must list some of {', '.join(self.choices)}, got {item!r}")
        elif isinstance(value, str):
            if self.choices:
                check_choice(self.name, value, self.choices)
        elif not self._within(value):
            finite = " and finite" if isinstance(value, float) and self.below is None else ""
            raise ValueError(f"{self.name} must be {self.allowed}{finite}, got {value}")

    def _within(self, number: float) -> bool:
        return (
            math.isfinite(number)
            and (self.low is None or number >= self.low)
            and (self.above is None or number > self.above)
            and (self.below is None or number < self.below)
        )


@functools.cache
def options(section: type, name: str) -> dict[str, Option]:
    """{key: option} of the dataclass of the section called `name`."""
    hints = typing.get_type_hints(section)
    return {
        field.name: Option(
            f"{name}.{field.name}",
            typing.get_args(hint) if isinstance(hint := hints[field.name], types.UnionType) else (hint,),
            field.default if field.default_factory is dataclasses.MISSING else field.default_factory(),
            **field.metadata,
        )
        for field in dataclasses.fields(section)
    }


def _storable(text: str) -> bool:
    """No operating system takes a path with a zero, and no TOML file a byte that is not UTF-8."""
    return "\0" not in text and not any("\ud800" <= letter <= "\udfff" for letter in text)
