"""Metrics also to TensorBoard and to Weights & Biases, where the configuration asks for it. Of rank 0 alone."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from hpctrain.config import Config, to_toml

log = logging.getLogger("hpctrain")


class MetricLogger(Protocol):
    def __init__(self, config: Config, folder: Path, step: int):
        """Go on after `step`: what was logged of later steps is forgotten."""

    def log(self, step: int, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in runs/NAME/tensorboard."""

    def __init__(self, config: Config, folder: Path, step: int):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        if step == 0:
            self._writer.add_text("configuration", "".join(f"    {line}\n" for line in to_toml(config).splitlines()))

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of the project `log.wandb`. A training that is resumed goes on with its own, named by runs/NAME/wandb-run.

    By WANDB_MODE=offline all stays in runs/NAME/wandb, for `wandb sync`.
    """

    def __init__(self, config: Config, folder: Path, step: int):
        import wandb

        file = folder / "wandb-run"
        known = file.read_text(encoding="utf-8").strip() if file.exists() else None
        self._run = wandb.init(
            project=config.log.wandb, name=config.run.name, dir=str(folder), config=dataclasses.asdict(config),
            id=known, resume="allow", settings=wandb.Settings(silent=True),
        )  # fmt: skip
        file.write_text(f"{self._run.id}\n", encoding="utf-8")
        # its own steps cannot go back, as after a rollback
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


class MetricLoggers:
    """Those that the configuration names. One that fails is left out from then on, with a warning: training goes on."""

    def __init__(self, config: Config, folder: Path):
        self._config, self._folder = config, folder
        self._kinds = [kind for kind, (_, asked) in _wanted(config).items() if asked]
        self._open: list[MetricLogger] = []

    def begin(self, step: int) -> None:
        """Go on after this step."""
        self.close()
        for kind in self._kinds:
            with _Survived(kind):
                self._open.append(kind(self._config, self._folder, step))

    def log(self, record: dict[str, Any]) -> None:
        """A line of metrics."""
        values = dict(flat(record))
        step = int(values.pop("step"))
        for logger in list(self._open):
            survived = _Survived(type(logger))
            with survived:
                logger.log(step, values)
            if survived.failed:
                self._open.remove(logger)

    def close(self) -> None:
        for logger in self._open:
            with _Survived(type(logger)):
                logger.close()
        self._open = []


class _Survived:
    """Around what others have written, which may raise anything: it becomes a warning."""

    def __init__(self, kind: type):
        self.kind, self.failed = kind, False

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.failed = isinstance(error, Exception)
        if self.failed:
            log.warning("WARNING: no more metrics to %s: %s: %s", self.kind.__name__, type(error).__name__, error)
        return self.failed


def check_installed(config: Config) -> None:
    """Raise ValueError where the configuration asks for a package that is not there."""
    for option, (package, asked) in zip(("log.tensorboard", "log.wandb"), _wanted(config).values(), strict=True):
        if asked and importlib.util.find_spec(package) is None:
            raise ValueError(
                f"{option} needs the package {package}, which is not installed: pip install {package} (with the jobs: "
                f"HPCTRAIN_EXTRAS={package}), or leave {option} out"
            )


def flat(record: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a line of metrics, by names that join those of its tables.

    >>> dict(flat({"step": 2, "loss": None, "time": {"compute": 0.5}, "job": "7", "idle": [1.0]}))
    {'step': 2, 'time/compute': 0.5}
    """
    for name, value in record.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield prefix + name, value


def _wanted(config: Config) -> dict[type, tuple[str, bool]]:
    """{kind: (the package that it needs, whether it is asked for)}"""
    return {TensorBoard: ("tensorboard", config.log.tensorboard), WeightsAndBiases: ("wandb", bool(config.log.wandb))}
