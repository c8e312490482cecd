"""The run folder: configuration, metrics, plot and final weights. Written by rank 0 alone."""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path

from hpctrain import files
from hpctrain.checkpoint import folder as checkpoints
from hpctrain.config import Config, to_toml
from hpctrain.train import expert_load
from hpctrain.train.lease import Lease, batch_job
from hpctrain.train.loss_plot import plot_losses
from hpctrain.train.metric_loggers import MetricLoggers, check_installed
from hpctrain.train.progress import in_words

METRICS, RANKS, PLAN = "metrics.jsonl", "ranks.json", "plan.json"
JOBS = "jobs"  # a line for each job of the batch system that has written here

log = logging.getLogger("hpctrain")


class RunFolder:
    """runs/NAME. An older folder of the same name is kept as NAME.1, NAME.2, …, unless the job resumes it.

    A lease keeps other jobs out until this object is no more.

    Args:
        resume: "" begins anew; "must" goes on with what is there; "auto", for a requeued job, with what this job of the
            batch system left, and begins anew where that has no checkpoint. Outside of a batch job the folder's name
            has to do.

    Attributes:
        path: of the folder.
        moved: where an older run went, or None.
        resumes: whether the job goes on with what was there.
        history: the metrics of all steps.
        ranks: what `write_ranks` was told.

    Raises:
        ValueError: when another job has the folder, nothing can be written beside it, there is nothing to go on with,
            or a package that metrics are to be logged by is not there.
    """

    def __init__(self, config: Config, resume: str = ""):
        self.path = config.folder
        self.moved = None
        check_installed(config)
        if resume == "must":
            check_resumable(self.path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lease = Lease(self.path)
        except OSError as error:
            raise ValueError(f"run.out = {config.run.out} cannot be written: {error}; use another") from error
        jobs = jobs_of(self.path)
        self.resumes = goes_on(self.path, resume)
        if files.status(self.path) and not self.resumes:
            self.moved = self.path.rename(files.free_name(self.path))
            jobs = []
        self.path.mkdir(exist_ok=self.resumes)
        files.sync(self.path.parent)
        if batch_job() and batch_job() not in jobs:
            files.replace(self.path / JOBS, "".join(f"{job}\n" for job in [*jobs, batch_job()]))
        self._config, self._steps = to_toml(config), config.run.steps
        self.history: list[dict] = []
        self.ranks: list[dict] = []
        self._metrics: int | None = None  # until `begin`
        self._lacking = False
        self._loggers = MetricLoggers(config, self.path)

    def begin(self, step: int) -> None:
        """Go on after `step`, with this configuration: what the metrics say of later steps is forgotten."""
        path = self.path / METRICS
        lines = path.read_text(encoding="utf-8").splitlines() if files.status(path) else []
        self.history = kept_records(lines, step)
        exported = self.path / "model"
        if self._steps > step and files.status(exported):  # at an earlier end: of other weights than this job's
            exported.rename(files.free_name(exported))
        files.replace(self.path / "config.toml", self._config)
        self._rewrite()
        self._loggers.begin(step)

    def go_back(self, step: int) -> None:
        """Go on after an earlier step, in the middle of a job, which a full disk must not end: metrics that could not
        be written are written with a later step."""
        self.history = [record for record in self.history if record["step"] <= step]
        try:
            self._rewrite()
        except OSError as error:
            self._lack(error)
        self._loggers.begin(step)

    def _rewrite(self) -> int:
        """The metrics anew, from memory; returns their file."""
        if self._metrics is not None:
            os.close(self._metrics)
            self._metrics = None
        files.replace(self.path / METRICS, "".join(json.dumps(record) + "\n" for record in self.history))
        files.sync(self.path)
        self._metrics = os.open(self.path / METRICS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._lacking = False
        return self._metrics

    def log(self, record: dict) -> None:
        """Add a step, with the job of the batch system that took it. A full disk must not end the training: what could
        not be written is written with a later step.

        Raises:
            RuntimeError: when another job has taken the folder over.
        """
        self._lease.check()
        if job := batch_job():
            record["job"] = job
        self.history.append(record)
        self._loggers.log(record)
        try:
            if self._lacking or self._metrics is None:
                self._rewrite()
            else:
                line = (json.dumps(record) + "\n").encode()
                if os.write(self._metrics, line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._lack(error)

    def sync(self) -> None:
        """The metrics, on disk: a checkpoint is of steps that are all in them."""
        self._lease.check()
        try:
            os.fsync(self._rewrite() if self._lacking or self._metrics is None else self._metrics)
        except OSError as error:
            self._lack(error)

    def _lack(self, error: OSError) -> None:
        if not self._lacking:
            log.warning("WARNING: %s is not up to date: %s", self.path / METRICS, error)
        self._lacking = True

    def close(self) -> None:
        self._loggers.close()
        if self._lacking:
            self.sync()
        if self._metrics is not None:
            os.close(self._metrics)

    def plot(self) -> None:
        """The pictures. A full disk must not end the job, which has still to say why it stopped."""
        try:
            expert_load.plot(self.history, self.path / "experts.png")
            plot_losses(self.history, self.path / "loss.png", self.path.name)
        except OSError as error:
            log.warning("WARNING: %s has no picture of the losses: %s", self.path, error)

    def write_ranks(self, about: dict, ranks: list[dict]) -> None:
        """What `RankTotals` say of every rank, and `about` the job."""
        self.ranks = ranks
        self.write(RANKS, json.dumps({**about, "ranks": ranks}))

    def write(self, name: str, text: str) -> None:
        """A file of one line about the job. A full disk must not end the training."""
        try:
            files.replace(self.path / name, text + "\n")
        except OSError as error:
            log.warning("WARNING: %s is not written: %s", self.path / name, error)


def goes_on(run: Path, resume: str) -> bool:
    """Whether a job goes on with what is there; `resume` as `RunFolder` takes it."""
    mine = batch_job() is None or batch_job() in jobs_of(run)
    return resume == "must" or (resume == "auto" and mine and has_checkpoints(run))


def jobs_of(run: Path) -> list[str]:
    """The jobs of the batch system that have written there."""
    path = run / JOBS
    return path.read_text(encoding="utf-8").splitlines() if files.status(path) else []


def has_checkpoints(run: Path) -> bool:
    """Whether the run has any, good or bad."""
    root = run / "checkpoints"
    return bool(checkpoints.steps(root) or checkpoints.bad(root))


def check_resumable(run: Path) -> None:
    if not has_checkpoints(run):
        raise ValueError(
            f"--resume: there are no checkpoints in {run}; {known_runs(run.parent)}. Choose one by run.name, or begin "
            "anew without --resume"
        )


def known_runs(out: Path) -> str:
    """In words, which runs there are to go on with, the newest first.

    >>> known_runs(Path("nowhere"))
    'no run in nowhere has any'
    """
    runs = [path for path in out.iterdir() if path.is_dir() and has_checkpoints(path)] if out.is_dir() else []
    if not runs:
        return f"no run in {out} has any"
    newest = sorted(runs, key=lambda path: path.stat().st_mtime, reverse=True)
    steps = ((path.name, checkpoints.steps(path / "checkpoints")) for path in newest)
    said = [f"{name} (step {found[0]})" if found else f"{name} (damaged ones)" for name, found in steps]
    more = f", and {len(said) - 10} more" if len(said) > 10 else ""
    return f"runs in {out} that have some are {', '.join(said[:10])}{more}"


def kept_records(lines: list[str], step: int) -> list[dict]:
    """The records of steps up to `step`, the last of each; a line that was cut short is none.

    >>> kept_records(['{"step": 1}', '{"step": 2}', '{"step": 3}', '{"st'], 2)
    [{'step': 1}, {'step': 2}]
    """
    records = {}
    for line in lines:
        try:
            record = json.loads(line)
            if record["step"] <= step:
                records[record["step"]] = record
        except (ValueError, KeyError, TypeError):
            continue
    return [records[key] for key in sorted(records)]


def last_losses(history: list[dict]) -> str:
    """In words; a run that stopped early and is resumed with fewer steps than it had taken was never validated.

    >>> last_losses([{"loss": 2.0, "val_loss": 3.0}, {"loss": None}])
    'final training loss 2.0000, validation loss 3.0000 (nats a token)'
    >>> last_losses([{"loss": 2.0, "val_loss": 3.0}, {"loss": 1.0, "val_loss": None}])
    'final training loss 1.0000, validation loss not finite (nats a token)'
    >>> last_losses([{"loss": 2.0}]), last_losses([])
    ('final training loss 2.0000 (nats a token)', 'no losses')
    """
    training = [record["loss"] for record in history if record["loss"] is not None]
    validation = [record["val_loss"] for record in history if "val_loss" in record]
    named = {"final training loss": training, "validation loss": validation}
    said = ", ".join(f"{name} {in_words(losses[-1])}" for name, losses in named.items() if losses)
    return f"{said} (nats a token)" if said else "no losses"
