"""Options of a run as a whole: its name, length, folder and checkpoints, and what is done about a bad step."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain import choices
from hpctrain.config.option import option

BAD_STEP = ("stop", "skip", "rollback")  # what is done about a step that went wrong


def check_run_name(name: str) -> None:
    if not name or "/" in name or name in (".", ".."):
        raise ValueError(f"run.name must be a plain folder name, got {name!r}")
    if name == "data":
        raise ValueError(
            'run.name must not be "data", as packed text is kept in the folder data of run.out; choose another'
        )


def check_profile(steps: list[int]) -> None:
    if steps and not (len(steps) == 2 and 1 <= steps[0] <= steps[1]):
        raise ValueError(
            f"run.profile must be the first and the last of the steps to trace, such as [10, 12], got {steps}"
        )


@dataclass
class RunConfig:
    name: str = option("run", "the run folder is run.out/run.name", check=check_run_name)
    out: str = option("runs", "folder of the run folders, and of text that is packed on first use")
    seed: int = option(0, "of weights, sample order and dropout", low=0)
    steps: int = option(100, "optimizer steps", low=1)
    eval_every: int = option(0, "steps between validations; 0: only at the end", low=0)
    eval_batches: int = option(4, "validation batches, each of train.batch sequences", low=1)
    device: str = option("auto", "where tensors are; auto: a CUDA device where there is one", choices=choices.DEVICES)
    sample: int = option(0, "tokens to generate at the end", low=0)
    checkpoint_every: int = option(
        0, "steps between checkpoints, with one after the last step; 0: none by their number", low=0
    )
    checkpoint_minutes: float = option(
        10.0, "a checkpoint is also saved so long after the last one; 0: never. One is saved at every stop", low=0
    )
    machine: str = option(
        "",
        "a machine's name or file, as of `hpctrain plan`: what it predicts of a step is shown beside what was measured",
    )
    profile: list[int] = option(
        [], "the first and the last step to trace: every rank's MPI operations, pipeline actions and kernels, in "
        "trace.json for https://ui.perfetto.dev; []: none", check=check_profile,
    )  # fmt: skip
    max_seconds: float = option(0.0, "save and stop after so long, as on SIGUSR1; 0: never", low=0)


@dataclass
class CheckpointConfig:
    keep: int = option(2, "older ones are deleted once a newer one has been read back", low=1)
    background: bool = option(True, "write while training goes on")
    on_failure: str = option(
        "continue", "when one cannot be written: go on without it, or stop", choices=("continue", "stop")
    )


@dataclass
class SanityConfig:
    nonfinite: str = option(
        "stop", "a loss or gradient norm that is not finite: stop, skip the step, or roll back to a checkpoint",
        choices=BAD_STEP,
    )  # fmt: skip
    spike: str = option(
        "skip", "likewise for a loss above spike_factor times the median of the last 32 steps", choices=BAD_STEP
    )
    spike_factor: float = option(0.0, "0: no loss is a spike", low=0)
    limit: int = option(10, "steps skipped or rolled back in one job, after which it stops", low=0)
    check_every: int = option(
        100, "steps between comparisons of what several ranks hold, and of their speeds; 0: never", low=0
    )
    straggler: float = option(
        2.0, "a rank whose own work takes this many times that of its peers is named; 0: none is", low=0
    )


@dataclass
class LogConfig:
    tensorboard: bool = option(False, "metrics also as TensorBoard's event files, in the run folder's tensorboard")
    wandb: str = option("", "metrics also to this project of Weights & Biases; WANDB_MODE=offline keeps them here")
