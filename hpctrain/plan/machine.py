"""A machine: what its processors and links can do, from a TOML file whose lines give units and sources."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import tomllib
import typing
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path

from hpctrain import files
from hpctrain.choices import RECOMPUTE, check_choice
from hpctrain.plan.figures import OPERATIONS, PEAKS, Device, Errors, Learned, Link, Measured, Occupied, Software

LARGEST = 1 << 20  # bytes of a file


@dataclass(frozen=True)
class Machine:
    """A machine.

    Attributes:
        name, description: for messages.
        node: ranks of a node.
        peak: flop/s of a device by type, of figures.PEAKS.
        link: levels of the network, the nearest first: within a node, where that is the only one, and between nodes.
        share: of a core that a rank has where all compute, of a `crowded` machine.

    >>> Machine.load("dgx-h100").node
    8
    """

    name: str
    description: str
    node: int
    device: Device
    peak: dict[str, float]
    link: tuple[Link, ...]
    software: Software = field(default_factory=Software)
    errors: Errors = field(default_factory=Errors)
    measured: tuple[Measured, ...] = ()
    occupied: tuple[Occupied, ...] = ()
    share: float = 1.0
    learned: Learned = field(default_factory=Learned)

    @classmethod
    def load(cls, name: str | Path) -> Machine:
        """A machine that is shipped, by its name, or one from a file.

        Raises:
            ValueError: for an unknown name, and a file that lacks a figure, has one too many or a wrong one.
            OSError: where the file cannot be read.
        """
        path = Path(name)
        if str(name) in names():
            path = Path(str(resources.files("hpctrain.plan"))) / "machines" / f"{name}.toml"
        elif path.suffix != ".toml" and not files.regular(path):
            near = difflib.get_close_matches(str(name), names(), 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ValueError(
                f"there is no machine {str(name)!r}; {hint}known are {', '.join(names())}, or give a file.toml, which "
                "`hpctrain machine -o file.toml` writes for this machine"
            )
        if files.regular(path) is None:
            raise FileNotFoundError(
                f"there is no machine file {path}: `hpctrain machine -o {path}` measures this machine, or give a name: "
                f"{', '.join(names())}"
            )
        try:
            tables = tomllib.loads(files.read_bounded(path, LARGEST).decode())
        except (ValueError, RecursionError) as error:
            if isinstance(error, ValueError) and "longer than" in str(error):
                raise
            raise ValueError(f"{path} is not valid TOML: {error}") from error
        try:
            return cls.of_tables({"name": path.stem, **tables})
        except ValueError as error:
            raise ValueError(f"machine file {path}: {error}") from error

    @classmethod
    def of_tables(cls, tables: dict) -> Machine:
        """That of a file's tables, and its name.

        Raises:
            ValueError: as `load`.
        """
        machine = _read(cls, tables, "")
        _check(machine)
        return machine

    @property
    def on_host(self) -> bool:
        """Whether devices are processors, whose memory is the host's: they queue nothing, and have no peak of fp16."""
        return not self.software.asynchronous and "fp16" not in self.peak

    def check_nodes(self, ranks: int, nodes: int = 1) -> None:
        """Refuse ranks on several nodes where the file is of one node.

        Raises:
            ValueError: for ranks on more nodes than the one that the file is of, or so many that several must be meant.
        """
        if len(self.link) > 1:
            return
        about = f"machine {self.name} is one node of {self.node} ranks, and nothing is known between nodes"
        several = "run `hpctrain machine` in an allocation of two nodes or more"
        if nodes > 1:
            raise ValueError(f"{about}, got {ranks} ranks on {nodes} nodes: {several}, or plan for one node")
        most = max([self.node, *(each.ranks for each in self.occupied)])
        if ranks > 2 * most:
            raise ValueError(
                f"{about}, got {ranks} ranks, more than twice the {most} that were measured at once: for several nodes "
                f"{several}, for {ranks} ranks on the cores of one node `hpctrain machine --ranks` up to {ranks}"
            )

    def crowded(self, ranks: int) -> Machine:
        """The machine where so many ranks share its only node, and its cores where they are more: as measured with as
        many, else each in its turn at the rates of fewer."""
        if len(self.link) > 1:
            return self
        share, device = min(1.0, self.node / ranks), self.device
        measured = self._tables(ranks, share)
        for each in self.occupied:
            if each.ranks == ranks:
                figures = {name: value for name, value in vars(each).items() if name != "ranks"}
                return replace(self, device=replace(device, **figures), share=share, measured=measured)
        if share == 1:
            return replace(self, measured=measured)
        rates = (
            "product", "bandwidth", "operands", "state_bandwidth", "table_bandwidth", "cold_bandwidth", "norms",
            "activations",
        )  # fmt: skip
        slower = {name: getattr(device, name) * share for name in (*rates, "cache")}
        memory = device.memory * share  # of the node's, which is measured as that of a rank where there are `node`
        device = replace(device, launch=device.launch / share, memory=memory, **slower)
        return replace(self, device=device, share=share, measured=measured)

    def _tables(self, ranks: int, share: float) -> tuple[Measured, ...]:
        """Of each operation and size of group one: that of groups of so many ranks in all, else the first, slower where
        its ranks had a core of their own and share them now."""
        found: dict[tuple[str, int], Measured] = {}
        for table in self.measured:
            key, at_once = (table.operation, table.ranks), table.at_once or table.ranks
            if at_once == ranks:
                found[key] = table
            elif key not in found:
                slower = share if at_once <= self.node else 1.0
                found[key] = replace(table, seconds=tuple(taken / slower for taken in table.seconds))
        return tuple(found.values())

    def peak_of(self, compute: str, matmul: str) -> float:
        """flop/s of products in this precision, of the configuration's [precision].

        Raises:
            ValueError: where the file lacks it.
        """
        kind = "tf32" if compute == "fp32" and matmul != "highest" and "tf32" in self.peak else compute
        if kind not in self.peak:
            raise ValueError(
                f"machine {self.name} has no peak.{kind} (flop/s), which precision.compute = {compute} needs; it has "
                f"{', '.join(self.peak)}"
            )
        return self.peak[kind]


def names() -> list[str]:
    """The machines that are shipped."""
    folder = resources.files("hpctrain.plan") / "machines"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def _read(kind: type, table: dict, where: str):
    """A dataclass from a TOML table."""
    if not isinstance(table, dict):
        raise ValueError(f"[{where}] must be a table, got {table!r:.100}")
    hints = typing.get_type_hints(kind)
    known = {f.name: f for f in dataclasses.fields(kind)}
    prefix = f"{where}." if where else ""
    if unknown := [key for key in table if key not in known]:
        raise ValueError(f"unknown figure {prefix}{unknown[0]}; known are {', '.join(known)}")
    required = [
        name
        for name, f in known.items()
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing := [prefix + name for name in required if name not in table]:
        meant = "; ".join(f"{name}: {text}" for name, text in _meanings(kind).items() if prefix + name in missing)
        raise ValueError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing{f' ({meant})' if meant else ''}; "
            f"{resources.files('hpctrain.plan') / 'machines/cpu-cluster.toml'} has every figure"
        )
    return kind(**{key: _value(hints[key], value, prefix + key) for key, value in table.items()})


def _meanings(kind: type) -> dict[str, str]:
    """{attribute: what its class says of it}"""
    found = re.findall(r"^    (\w+(?:, \w+)*): (.*(?:\n {8}.*)*)", inspect.getdoc(kind) or "", re.MULTILINE)
    return {name: " ".join(text.split()).rstrip(".") for names, text in found for name in names.split(", ")}


def _value(hint, value, where):
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _read(hint, value, where)
    if typing.get_origin(hint) is tuple:
        item, *_ = typing.get_args(hint)
        if not isinstance(value, list):
            raise ValueError(f"{where} must be a list, got {value!r:.100}")
        return tuple(_value(item, each, where) for each in value)
    if typing.get_origin(hint) is dict:
        if not isinstance(value, dict):
            raise ValueError(f"[{where}] must be a table, got {value!r:.100}")
        return {key: _value(float, each, f"{where}.{key}") for key, each in value.items()}
    right = isinstance(value, (int, float)) if hint is float else isinstance(value, hint)
    if not right or (isinstance(value, bool) and hint is not bool):
        raise ValueError(f"{where} must be {hint.__name__}, got {value!r:.100}")
    if hint in (float, int) and not 0 <= value < float("inf"):
        raise ValueError(f"{where} must be finite and at least 0, got {value}")
    return float(value) if hint is float else value


def resolved(name: str | Path) -> str:
    """A machine's name, or the whole path of its file, for those who read it from another folder."""
    return str(name) if str(name) in names() else str(Path(name).resolve())


def _check(machine: Machine) -> None:
    """Raise ValueError for figures by which nothing can be divided, and names that nothing would read."""
    positive = {
        "node": machine.node,
        "device.memory": machine.device.memory,
        "device.bandwidth": machine.device.bandwidth,
        "device.product": machine.device.product,
        "device.attention": machine.device.attention,
        **{f"peak.{kind}": rate for kind, rate in machine.peak.items()},
        **{f"learned.{part}": factor for part, factor in vars(machine.learned).items() if part != "runs"},
        **{
            f"occupied of {each.ranks} ranks: {name}": getattr(each, name)
            for each in machine.occupied
            for name in ("memory", "bandwidth", "product", "attention")
        },
        **{
            f"link.{link.name}.{key}": getattr(link, key)
            for link in machine.link
            for key in ("unit", "bandwidth", "direct")
        },
    }
    for name, value in positive.items():
        if not value > 0:
            hint = "; delete the line in [learned]" if name.startswith("learned.") else ""
            raise ValueError(f"{name} must be above 0, got {value}{hint}")
    if not machine.peak or not machine.link:
        raise ValueError(f"{'link' if machine.peak else 'peak'} is empty; see Machine")
    units = [link.unit for link in machine.link]
    levels = units[1:] if units[:2] == [1, machine.node] else units  # nodes of one rank are a level of their own
    if units[0] != 1 or levels != sorted(set(levels)):
        raise ValueError(f"link.unit must be 1 on the first level and rise from there, got {units}")
    parts = {
        **{f"link.{link.name}.direct": link.direct for link in machine.link},
        "software.attended": machine.software.attended,
        "software.hidden_data": machine.software.hidden_data,
        "software.hidden_tensor": machine.software.hidden_tensor,
        "device.slack": machine.device.slack,
        "errors.relative": machine.errors.relative,
    }
    for name, value in parts.items():
        if value > 1:
            raise ValueError(f"{name} must be at most 1, got {value}")
    for kind in machine.peak:
        check_choice("a figure of [peak]", kind, PEAKS)
    for value in machine.software.whole_norms:
        check_choice("software.whole_norms", value, RECOMPUTE)
    for table in machine.measured:
        check_choice("measured.operation", table.operation, OPERATIONS)
        rising = all(a < b for a, b in zip(table.bytes, table.bytes[1:]))
        even = len(table.bytes) == len(table.seconds) >= 2
        if not even or not rising or table.bytes[0] <= 0 or min(table.seconds) <= 0:
            raise ValueError(
                f"measured.{table.operation} on {table.ranks} ranks needs two or more rising bytes above 0 and as many "
                "seconds"
            )
