"""All options as a TOML file of their defaults, each below what it means (and its type, bounds or choices)."""

from __future__ import annotations

import dataclasses
import textwrap

from hpctrain.config.loading import find_option, section_options, toml_value
from hpctrain.config.option import Option
from hpctrain.config.sections import Config

WIDTH = 120


def template(name: str = "") -> str:
    """The template of the whole configuration, of a section or of the option section.key.

    Raises:
        ValueError: for an unknown or renamed section or key.

    >>> print(template("train.momentum"), end="")
    [train]
    # of sgd (Nesterov's) and rmsprop (float, at least 0 and below 1)
    momentum = 0.9
    """
    section, dot, key = name.partition(".")
    if dot:
        return _section(section, {key: find_option(section, key)})
    names = [section] if section else [field.name for field in dataclasses.fields(Config)]
    return "\n".join(_section(name, section_options(name)) for name in names)


def _section(name: str, options: dict[str, Option]) -> str:
    return "\n".join([f"[{name}]", *("\n".join(_lines(key, option)) for key, option in options.items()), ""])


def _lines(key: str, option: Option) -> list[str]:
    of_type = f"{option.type_name}, {option.allowed}" if option.allowed else option.type_name
    if option.aliases:
        of_type += "; " + ", ".join(f"{alias} is {choice}" for alias, choice in option.aliases.items())
    comment = textwrap.wrap(f"{option.help} ({of_type})", WIDTH, initial_indent="# ", subsequent_indent="# ")
    return [*comment, f"{key} = {toml_value(option.default)}"]
