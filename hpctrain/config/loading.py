"""From a TOML file and `section.key=value` overrides to a checked configuration, and back. Unknown keys are errors."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import os
import tomllib
import typing
from collections.abc import Iterator, Sequence

from hpctrain import files
from hpctrain.config.checks import check
from hpctrain.config.option import Option, options
from hpctrain.config.sections import Config, DataConfig
from hpctrain.given import check_types

LARGEST = 1 << 20  # bytes of a file
# Sections and keys that had other names.
RENAMED = {
    "replicas": "data_parallel",
    "pipeline.chunks": "pipeline.virtual_stages",
    "precision.wire": "precision.comm_dtype",
}


def load_config(path: str | os.PathLike | None = None, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file, if one is given, apply `section.key=value` overrides, and check the result.

    Raises:
        ValueError: naming the key, what it got and what would do.

    >>> load_config(overrides=["run.steps=7", "grid.tensor=[2, 1, 1]"]).grid
    GridConfig(data=1, pipeline=1, tensor=[2, 1, 1], sequence=1, expert=1, expert_tensor=1)
    >>> load_config(overrides=["run.stesp=7"])
    Traceback (most recent call last):
    ValueError: unknown key run.stesp; did you mean run.steps?
    """
    config = Config()
    if not isinstance(path, (str, os.PathLike, type(None))):
        raise ValueError(f'path must be a file\'s, got {path!r}; settings are overrides=["section.key=value"]')
    if path is not None:
        tables = _read(path)
        with _in(path):
            for section, table in tables.items():
                if not isinstance(table, dict):
                    raise ValueError(f"{section} stands outside a section; sections are {_names(config)}")
                for key, value in table.items():
                    _set(config, section, key, value)
    for override in overrides:
        check_types(override=(override, str))
        name, equals, text = override.partition("=")
        section, dot, key = name.strip().partition(".")
        if not (equals and dot and key):
            raise ValueError(f"an override must read section.key=value, got {override!r}")
        _set(config, section, key, _parsed(text.strip()), text.strip())
    overridden = {override.partition("=")[0].strip() for override in overrides}
    if config.data.path and "data.path" in overridden and "data.text" not in overridden:
        config.data.text = []  # the file's text is not what a mistyped path should be packed from
    if overridden & {"data.path", "data.text"} and "data.mixture" not in overridden:
        config.data.mixture = []
    if config.data.mixture and "data.mixture" in overridden:
        config.data.path, config.data.text = _kept(config.data, overridden)
    if not (config.data.path or config.data.text or config.data.mixture):
        config.data.text = ["python-stdlib"]
    with _in(None if overrides else path):  # with overrides it may be them
        check(config)
    return config


def to_toml(config: Config) -> str:
    """The whole configuration, as `load_config` reads it."""
    lines = []
    for section in dataclasses.fields(config):
        lines.append(f"[{section.name}]")
        table = dataclasses.asdict(getattr(config, section.name))
        lines += [f"{key} = {toml_value(value)}" for key, value in table.items()]
        lines.append("")
    return "\n".join(lines)


def toml_value(value: str | float | list) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # the only difference for what is in use


def section_options(section: str) -> dict[str, Option]:
    """{key: option} of a section.

    Raises:
        ValueError: for an unknown or renamed section, with the one that was probably meant.
    """
    if now := RENAMED.get(section):
        raise ValueError(f"{section} is called {now} now")
    types = typing.get_type_hints(Config)
    if section not in types:
        raise ValueError(f"unknown section {section}{_hint(section, list(types))}")
    return options(types[section], section)


def find_option(section: str, key: str) -> Option:
    """The option section.key; errors as `section_options`."""
    if now := RENAMED.get(section) or RENAMED.get(f"{section}.{key}"):
        raise ValueError(f"{section}.{key} is called {now if '.' in now else f'{now}.{key}'} now")
    known = section_options(section)
    if key not in known:
        raise ValueError(f"unknown key {section}.{key}{_hint(key, list(known), f'{section}.')}")
    return known[key]


def _kept(data: DataConfig, overridden: set[str]) -> tuple[str, list[str]]:
    """Path and text that stand beside a mixture of the command line: those of the command line."""
    return data.path if "data.path" in overridden else "", data.text if "data.text" in overridden else []


def _set(config: Config, section: str, key: str, value: object, text: str | None = None) -> None:
    option = find_option(section, key)
    setattr(getattr(config, section), key, option.convert(value, text))


def _read(path: str | os.PathLike) -> dict:
    try:
        return tomllib.loads(files.read_bounded(path, LARGEST).decode())
    except OSError as error:
        hint = "; a file comes first, then what is section.key=value" if "=" in str(path) else ""
        raise ValueError(f"the configuration cannot be read: {error}{hint}") from error
    except (ValueError, RecursionError) as error:  # integers of more than 4,300 digits among them
        raise ValueError(f"{path} is not valid TOML: {error}") from error


def _parsed(text: str) -> object:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


@contextlib.contextmanager
def _in(path: str | os.PathLike | None) -> Iterator[None]:
    """Errors name the file, if there is one."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}" if path is not None else str(error)) from error


def _names(config: Config) -> list[str]:
    return [section.name for section in dataclasses.fields(config)]


def _hint(word: str, known: list[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {prefix}{close[0]}?" if close else f"; known are {', '.join(prefix + k for k in known)}"
