"""The manifests above those of the ranks: of a group of them, and of the whole checkpoint. JSON, checked before use."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

import torch

from hpctrain.checkpoint import pieces
from hpctrain.checkpoint.pieces import FORMAT, VERSION, Corrupt, Tensors, natural

NAME, SUM, HOLDERS = "manifest.json", "manifest.sha256", "holders.bin"
GROUP = 100  # ranks
RANK, RANKS = r"rank-[0-9]{5,}\.json", r"ranks-[0-9]{5,}/manifest\.json"  # parts of a group's, of the checkpoint's


@dataclass
class ManifestPart:
    """A manifest one level below: its path from here, size and SHA-256, and how many files of shards, of how many bytes
    in all, are below it."""

    name: str
    bytes: int
    sha256: str
    files: int
    stored: int


@dataclass
class Manifest:
    """Attributes: `tensors`, dtype and global shape of each; `scalars`, dtype and value of tensors without dims;
    `parts`, the manifests below, and `holders`, the SHA-256 of the table that says which of them has what; `about`:
    grid, data position, random state, configuration, versions and whatever else the job keeps (of the checkpoint).
    """

    step: int
    tensors: Tensors
    scalars: dict[str, tuple[str, float | int | bool]]
    parts: list[ManifestPart]
    holders: str
    about: dict = field(default_factory=dict)
    format: str = FORMAT
    version: int = VERSION

    def text(self) -> str:
        return json.dumps(self, default=vars) + "\n"

    def member(self, *names: str) -> Any:
        """What `about` says under these names, one in the other.

        Raises:
            ValueError: where it says nothing, as of a checkpoint that `hpctrain train` did not save.
        """
        found = self.about
        for name in names:
            if not isinstance(found, dict) or name not in found:
                raise ValueError(
                    f"the checkpoint of step {self.step} does not say its {'.'.join(names)}, as those that "
                    "`hpctrain train` saves do"
                )
            found = found[name]
        return found

    @property
    def files(self) -> int:
        return sum(part.files for part in self.parts)

    @property
    def bytes(self) -> int:
        return sum(part.stored for part in self.parts)


def folder_name(step: int) -> str:
    return f"step-{step}"


def group_name(group: int) -> str:
    """The folder of a group of ranks, named after the first."""
    return f"ranks-{group * GROUP:05d}"


def rank_name(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def parse(text: str, parts: str) -> Manifest:
    """The manifest in `text`, every number and name in it checked before anybody computes or allocates by it.

    Args:
        parts: what the names of its parts must match, RANK or RANKS.

    Raises:
        Corrupt: for what no job writes.
    """
    with pieces.refused():
        values = json.loads(text)
        pieces.check_version(values)
        manifest = Manifest(parts=[ManifestPart(**part) for part in values.pop("parts")], **values)
        natural(manifest.step, "step")
        pieces.check_sha256(manifest.holders, HOLDERS)
        manifest.tensors = {name: pieces.check_tensor(name, *described) for name, described in manifest.tensors.items()}
        manifest.scalars = {name: _scalar(name, *described) for name, described in manifest.scalars.items()}
        if len({part.name for part in manifest.parts}) != len(manifest.parts):
            raise Corrupt("a part is named twice")
        if not isinstance(manifest.about, dict):
            raise Corrupt("`about` is no table")
        for part in manifest.parts:
            if not re.fullmatch(parts, part.name):
                raise Corrupt(f"{part.name!r} is not the name of a part")
            for count in (part.bytes, part.files, part.stored):
                natural(count, part.name)
            pieces.check_sha256(part.sha256, part.name)
    return manifest


def _scalar(name: str, dtype: str, value) -> tuple[str, float | int | bool]:
    pieces.check_name(name, dtype)
    if not isinstance(value, (bool, int, float)):
        raise Corrupt(f"{name} must be a number, is {value!r}")
    try:
        stored = torch.tensor(value, dtype=pieces.DTYPES[dtype]).item()
    except (RuntimeError, OverflowError) as error:
        raise Corrupt(f"{name} is {value!r}, which {dtype} cannot hold: {error}") from error
    if stored != value and not (math.isnan(value) and math.isnan(stored)):
        raise Corrupt(f"{name} is {value!r}, of which {dtype} holds {stored!r}")
    return dtype, value
