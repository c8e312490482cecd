"""The measurements of a study, as they are kept."""

from __future__ import annotations

import json
import os
from pathlib import Path


class Results:
    """FOLDER/results.jsonl: one object a measurement. Complete lines are used again; a torn last line is ignored."""

    def __init__(self, folder: Path):
        self.path = folder / "results.jsonl"
        folder.mkdir(parents=True, exist_ok=True)

    def read(self) -> list[dict]:
        if not self.path.exists():
            return []
        measurements = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                measurements.append(json.loads(line))
            except json.JSONDecodeError:
                continue  # torn: the disk was full, or the job was ended, in the middle of it
        return measurements

    def add(self, result: dict) -> None:
        """
        Raises:
            OSError: when it cannot be written; the older ones stay as they are.
        """
        torn = self.path.exists() and not self.path.read_bytes().endswith(b"\n")
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" * torn + json.dumps(result) + "\n")
            file.flush()
            os.fsync(file.fileno())
