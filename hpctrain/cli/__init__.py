"""The `hpctrain` command: one file a command, each with its options and its output."""

from hpctrain.cli.parser import main

__all__ = ["main"]
