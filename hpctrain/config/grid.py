"""Options of the grid, and of what its axes do."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain import choices
from hpctrain.config.option import option
from hpctrain.pipeline.partitioners import METHODS as PARTITIONERS
from hpctrain.pipeline.registry import NAMES as SCHEDULES


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
    expert_tensor: int = option(
        1, "neighbours among the ranks of grid.expert that divide each of their experts between them: a divisor of it; "
        "1: whole experts", low=1,
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
        1, "gradients of microbatches of each update of a stage, but what is left for the last, for ampnet", low=1
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
