"""Options of a step: batch, optimizer, learning rate and precision."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain import choices
from hpctrain.config.option import option


@dataclass
class TrainConfig:
    batch: int = option(8, "sequences a step, over all replicas", low=1)
    microbatches: int = option(1, "parts that a replica's share of the batch is cut into", low=1)
    optimizer: str = option(
        "adamw", "one that treats every element by itself", choices=choices.OPTIMIZERS, check=choices.check_optimizer
    )
    momentum: float = option(0.9, "of sgd (Nesterov's) and rmsprop", low=0, below=1)
    betas: list[float] = option(
        [0.9, 0.95], "of Adam and its kin: decays of the first and second moments", check=choices.check_betas
    )
    eps: float = option(1e-8, "of Adam and its kin: what is added to the root of the second moment", above=0)
    lr: float = option(1e-3, "peak learning rate", low=0)
    warmup: int = option(10, "steps in which the learning rate rises to its peak", low=0)
    schedule: str = option(
        "cosine", "of the learning rate after the warm-up; wsd (warm-up, stable, decay) stays at the peak until the "
        "last decay_steps, in which it falls linearly", choices=choices.LR_SCHEDULES,
    )  # fmt: skip
    min_lr: float | str = option(
        "auto", "learning rate of the last step, of inverse_sqrt the least; auto: a tenth of lr", low=0,
        choices=("auto",),
    )  # fmt: skip
    decay_steps: int = option(0, "of wsd; 0: a tenth of run.steps", low=0)
    weight_decay: float = option(0.1, "of matrices; vectors (biases and norms) have none", low=0)
    label_smoothing: float = option(
        0.0, "part of the target that is spread over the whole vocabulary, in training", low=0, below=1
    )
    z_loss: float = option(
        0.0, "of PaLM: so many times the squared logarithm of the softmax's normaliser is added to each token's loss,"
        " in training", low=0,
    )  # fmt: skip
    ema_decay: float = option(
        0.0, "an exponential moving average of the weights is kept beside the optimizer's state, of which a step keeps "
        "this part; 0: none", low=0, below=1,
    )  # fmt: skip
    ema_use: list[str] = option(
        [], "what takes the average in place of the weights: validation, the export at the end, with the sample",
        choices=("validation", "export"),
    )  # fmt: skip
    clip: float = option(1.0, "largest norm of the gradient; 0: no clipping", low=0)
    recompute: str = option(
        "none", "activations that are computed again in backward instead of kept: of attention, or of every block",
        choices=choices.RECOMPUTE,
    )  # fmt: skip


@dataclass
class PrecisionConfig:
    compute: str = option("fp32", "of weights and activations in forward and backward", choices=choices.DTYPES)
    master: str = option("fp32", "of the weights that the optimizer updates", choices=("fp32", "compute"))
    reduce: str = option("fp32", "of gradients, over microbatches and ranks", choices=("fp32", "compute"))
    comm_dtype: str = option(
        "fp32", "in which gradients travel over the data axis; fp32: as they are", choices=("fp32", "bf16")
    )
    loss_scale: float = option(
        65536.0, "of the first step in fp16; then halved and doubled as gradients allow", above=0, below=1e30
    )
    matmul: str = option(
        "highest", "torch's precision of float32 matrix products", choices=("highest", "high", "medium")
    )
