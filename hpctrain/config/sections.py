"""The sections of the configuration and their options: the one place for their types, defaults, bounds and help."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain import choices, models
from hpctrain.config.option import option
from hpctrain.config.sequence import SequenceChoice
from hpctrain.grid_shape import check_boxes, grid_shape
from hpctrain.models.registry import SPECS as KINDS
from hpctrain.pipeline.partitioners import METHODS as PARTITIONERS
from hpctrain.pipeline.registry import NAMES as SCHEDULES

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
class ModelConfig:
    kind: str = option("gpt2", f"the architecture: {', '.join(KINDS)} or package.module:function of one's own")
    layers: int = option(4, "transformer blocks", low=1)
    width: int = option(128, "features of a token between blocks, a multiple of heads", low=1)
    heads: int = option(4, "attention heads", low=1)
    context: int = option(128, "tokens of a sequence", low=1)
    vocabulary: int = option(257, "rows of the embedding, at least the vocabulary of the data", low=1)
    dropout: float = option(0.0, "probability that an activation is dropped", low=0, below=1)
    tied: bool = option(True, "input and output embeddings share one table")
    kv_heads: int = option(0, "key and value heads, a divisor of heads; 0: the kind's own", low=0)
    ffn: int = option(0, "inner width of the MLP; 0: the kind's own", low=0)
    head_width: int = option(0, "features of a head; 0: width / heads", low=0)
    rope_base: float = option(0.0, "base of the rotary position embedding; 0: the kind's own", low=0)
    rope_scaling: list[float] = option(
        [],
        "Llama 3's change of the rotary frequencies: factor, low_freq_factor, high_freq_factor and original context,"
        " such as [8, 1, 4, 8192]; []: none",
        check=choices.check_rope_scaling,
    )
    window: int = option(0, "keys that a query sees, its own the last, as Mistral's sliding window; 0: all", low=0)
    norm_eps: float = option(0.0, "what RMS norms add to the mean square; 0: the kind's own", low=0)
    qkv_bias: bool = option(False, "the projection to queries, keys and values has a bias")
    qk_norm: bool = option(False, "queries and keys are normed, each head by itself")
    experts: int = option(0, "of a layer, of which each token passes through top_k; 0: the kind's own", low=0)
    top_k: int = option(0, "experts of a token; 0: the kind's own", low=0)
    expert_ffn: int = option(0, "inner width of an expert; 0: ffn", low=0)
    shared_experts: int = option(0, "experts besides that every token passes through", low=0)
    dense_layers: int = option(0, "the first layers, which have an MLP of width ffn in place of experts", low=0)
    router: str = option(
        "", "what a token's scores of the experts are of their logits; sigmoid: with a bias that chooses, but does not "
        'weigh, as in DeepSeek-V3; "": the kind\'s own', choices=("", *choices.ROUTERS),
    )  # fmt: skip
    router_groups: list[int] = option(
        [],
        "[groups, kept]: a token's experts are of the groups whose two best scores add up to the most; []: of all",
        check=choices.check_router_groups,
    )
    router_scale: float = option(0.0, "what weights of experts are multiplied by; 0: 1", low=0)
    router_unnormalized: bool = option(False, "the weights of a token's experts are not divided by their sum")
    router_jitter: float = option(
        0.0, "half the width of the range around 1 of random factors of the router's input, in training", low=0, below=1
    )
    aux_loss: float = option(0.0, "coefficient of the Switch loss, which balances the experts", low=0)
    aux_scope: str = option(
        "", "what it balances: the tokens of each sequence (sequence, the default), or all of a step (step), for which "
        "no backward may come before the last forward: one microbatch, or gpipe", choices=("", *choices.AUX_SCOPES),
    )  # fmt: skip
    z_loss: float = option(0.0, "coefficient of the squared logarithm of the router's normaliser", low=0)
    balance_bias: float = option(
        0.0,
        "by how much an expert's bias rises or falls after a step in which it had fewer or more tokens than the mean",
        low=0,
    )
    capacity: float = option(
        0.0,
        "tokens that an expert takes of a sequence, as a multiple of the mean; those beyond it are dropped; 0: all",
        low=0,
    )
    capacity_policy: str = option(
        "", 'which tokens it keeps: those with the highest scores (probability, the default), or the first ones',
        choices=("", *choices.DROP_POLICIES),
    )  # fmt: skip
    init: str = option(
        "", "start from this folder in Hugging Face's format (config.json, model.safetensors), of the same sizes"
    )


@dataclass
class DataConfig:
    path: str = option("", "the index that `hpctrain pack` wrote; with data.text, where to pack to")
    text: list[str] = option(
        [],
        'files, directories or "python-stdlib" (the default without data.path), packed on first use; the text that a '
        "file names does not count where data.path is an override",
    )
    mixture: list[list] = option(
        [], 'in place of them several packed sources and their weights, as [["code.h5", 0.7], ["text.h5", 0.3]]: each '
        "batch is of all, in this proportion; metrics tell the epochs of each", check=choices.check_mixture,
    )  # fmt: skip
    validation_path: str = option("", "packed data to validate on, in place of a part that is held out")
    documents: str = option(
        "packed",
        "packed: tokens attend to all before them in the sequence; masked: to those of their own document alone, where "
        "learned positions start, and what follows its end counts in no loss",
        choices=choices.DOCUMENTS,
    )
    tokenizer: str = option("bytes", '"bytes" or a Hugging Face tokenizers JSON file; only for packing')
    validation: float = option(0.05, "part of the samples of each source that is held out", above=0, below=1)


@dataclass
class GridConfig:
    data: int | list[int] = option(
        1,
        "replicas of the model, which share the batch; [replica, ring, ulysses] where ring × ulysses ranks share every "
        "sequence",
        low=1,
    )
    pipeline: int = option(1, "ranks that the model's layers are spread over", low=1)
    tensor: int | list[int] = option([1, 1, 1], "ranks that share each layer: [x, y, z], or t for [t, 1, 1]", low=1)
    sequence: int = option(
        1, "ranks that share every sequence of each of grid.data replicas, by sequence.method; ranks are their product",
        low=1,
    )  # fmt: skip
    expert: int = option(
        1, "ranks that the experts of a mixture are spread over: a divisor of data × tensor, of whose ranks each then "
        "holds only some of the experts; 1: all of them on every rank", low=1,
    )  # fmt: skip


@dataclass
class SequenceConfig:
    method: str = option(
        "auto",
        "how grid.sequence ranks share a sequence: Ulysses exchanges tokens for heads, a ring passes keys and values "
        "around; auto: the Ulysses × ring that moves the fewest bytes",
        choices=choices.SEQUENCE_METHODS,
    )
    balance: str = option(
        "zigzag", "how ring ranks cut a sequence: two chunks each, by the work of the mask, or one part each",
        choices=choices.SEQUENCE_BALANCES,
    )  # fmt: skip


@dataclass
class PipelineConfig:
    schedule: str = option("1f1b", "order of the actions; see `hpctrain schedule --compare`", choices=SCHEDULES)
    virtual_stages: int = option(0, "stages a rank, for interleaved; 0: as many as the schedule has by itself", low=0)
    slices: int | list[int] = option(
        0, "token slices of a sequence, for terapipe: how many (0: as many as ranks), or their lengths", low=0
    )
    partition: str | list[int] = option(
        "even",
        "how layers are cut into stages: evenly, by their cost, or a list of each stage's",
        choices=PARTITIONERS,
    )
    boxes: list[str] = option(
        [], "tensor boxes of the pipeline's ranks, one for each, as 2x2x1, of as many ranks as grid.tensor; []: that"
    )
    max_active_keys: int = option(
        0, "microbatches under way at most, for ampnet; 1: serial SGD; 0: as many as ranks of the pipeline", low=0
    )
    min_update_frequency: int = option(
        1, "gradients of microbatches, at least, of each update of a stage, for ampnet", low=1
    )
    staleness_correction: bool = option(
        False, "for ampnet: divide a stage's learning rate by the staleness of its gradients, in updates"
    )
    record: bool = option(False, "for ampnet: keep the order of messages in messages.jsonl of the run folder")
    replay: str = option("", "for ampnet: folder of a run with pipeline.record, whose order of messages is repeated")


@dataclass
class TensorConfig:
    algorithm: str = option("agarwal", "the parallel matrix product that layers are built on", choices=choices.PRODUCTS)
    overlap: list[str] = option(
        list(choices.DEFAULT_OVERLAP), "what runs beside the products; [] for nothing", choices=choices.OVERLAPS
    )


@dataclass
class ExpertsConfig:
    dispatch: str = option(
        "auto", "how tokens travel to the ranks of their experts: a row for each of a token's experts, all tokens to "
        "all ranks, or a row for each rank that has some of its experts; auto: what moves the fewest bytes",
        choices=choices.DISPATCHES,
    )  # fmt: skip
    replicate_hot: int = option(
        0, "experts with the most tokens, at most, whose weights go along to ranks that have less to do, in each layer "
        "and microbatch; the results are the same", low=0,
    )  # fmt: skip


@dataclass
class CommConfig:
    all_reduce: str = option(
        "shared", "how sums over the data axis are taken", choices=choices.ALL_REDUCE,
        aliases=choices.ALL_REDUCE_ALIASES,
    )  # fmt: skip
    watchdog: float = option(
        600.0, "seconds in one operation after which a rank says where it is and ends the job; 0: never", low=0
    )
    check: bool = option(False, "before every collective its ranks compare operation, shape, type and caller: slow")


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
class DataParallelConfig:
    method: str = option("ddp", "how the replicas' gradients, states and weights are kept", choices=choices.STRATEGIES)
    servers: int = option(
        1, "parameter_server: so many ranks of the data axis hold the weights and take no part of the batch", low=1
    )
    staleness: int = option(
        0, "parameter_server: steps that a worker may be ahead of the slowest; 0: synchronous", low=0
    )
    average_every: int = option(
        1, "local_sgd: steps between averages of the weights; 0: only at the end (ParallelSGD)", low=0
    )
    average_state: bool = option(
        False, "local_sgd: average the optimizer's state too; otherwise each replica keeps its own"
    )

    @property
    def idle(self) -> int:
        """The last ranks of the data axis, which compute no gradients."""
        return self.servers if self.method == "parameter_server" else 0


@dataclass
class PrecisionConfig:
    compute: str = option("fp32", "of weights and activations in forward and backward", choices=choices.DTYPES)
    master: str = option("fp32", "of the weights that the optimizer updates", choices=("fp32", "compute"))
    reduce: str = option("fp32", "of gradients, over microbatches and ranks", choices=("fp32", "compute"))
    comm_dtype: str = option(
        "fp32", "in which gradients travel over the data axis; fp32: as they are", choices=("fp32", "bf16")
    )
    loss_scale: float = option(
        65536.0, "of the first step in fp16; then halved and doubled as gradients allow", above=0
    )
    matmul: str = option(
        "highest", "torch's precision of float32 matrix products", choices=("highest", "high", "medium")
    )


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


@dataclass
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    grid: GridConfig = field(default_factory=GridConfig)
    sequence: SequenceConfig = field(default_factory=SequenceConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    tensor: TensorConfig = field(default_factory=TensorConfig)
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    data_parallel: DataParallelConfig = field(default_factory=DataParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    sanity: SanityConfig = field(default_factory=SanityConfig)
    log: LogConfig = field(default_factory=LogConfig)

    @property
    def ranks(self) -> int:
        return math.prod(self.grid_shape.values())

    @property
    def grid_shape(self) -> dict[str, int]:
        """Sizes of the axes, as of `Grid.shape`."""
        grid = self.grid
        data = tuple(grid.data) if isinstance(grid.data, list) else grid.data
        shape = grid_shape(data, grid.pipeline, tuple(grid.tensor) if isinstance(grid.tensor, list) else grid.tensor)
        if choice := self.sequence_choice(shape):
            shape |= {"ring": choice.size // choice.ulysses, "ulysses": choice.ulysses}
        return shape

    @property
    def boxes(self) -> tuple[tuple[int, int, int], ...] | None:
        """The tensor boxes of the pipeline's ranks where they are not that of the grid.

        Raises:
            ValueError: for what is no box, and boxes of other numbers of ranks.
        """
        names = self.pipeline.boxes
        if not names:
            return None
        sizes = [name.split("x") for name in names]
        if not all(len(each) == 3 and all(size.isdecimal() for size in each) for each in sizes):
            raise ValueError(f'pipeline.boxes must be as ["2x2x1", "4x1x1"], got {names}')
        return check_boxes(self.grid_shape, [tuple(map(int, each)) for each in sizes], "pipeline.boxes")

    def sequence_choice(self, shape: dict[str, int]) -> SequenceChoice | None:
        """Of ring × Ulysses for grid.sequence ranks beside the tensor axes of `shape`; None where that is 1."""
        size, data = self.grid.sequence, self.grid.data
        if size == 1:
            return None
        if isinstance(data, list):
            raise ValueError(
                f"grid.sequence = {size} is for grid.data = N, got {data}, which says it already; leave one of them out"
            )
        spec = models.get(self.model.kind)
        if not spec.sequence_axes:
            raise ValueError(
                f"grid.sequence = {size} has ranks share sequences, which model.kind = {spec.kind} needs whole; "
                "use grid.sequence=1"
            )
        costs = spec.costs(spec.shape(vars(self.model)))
        return SequenceChoice(size, self.sequence.method, costs, self.head_ranks(shape))

    def head_ranks(self, shape: dict[str, int]) -> int:
        """Tensor ranks, of a grid of these sizes, that divide the heads of attention."""
        return shape["y"] if self.tensor.algorithm in choices.PLANE_PRODUCTS else shape["x"] * shape["y"]

    @property
    def folder(self) -> Path:
        return Path(self.run.out) / self.run.name
