"""The configuration: its sections, each with the options of one file beside this one, and what follows of several."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain import choices, models
from hpctrain.config.data import DataConfig
from hpctrain.config.grid import (
    CommConfig,
    DataParallelConfig,
    ExpertsConfig,
    GridConfig,
    PipelineConfig,
    SequenceConfig,
    TensorConfig,
)
from hpctrain.config.model import ModelConfig
from hpctrain.config.run import CheckpointConfig, LogConfig, RunConfig, SanityConfig
from hpctrain.config.sequence import SequenceChoice
from hpctrain.config.training import PrecisionConfig, TrainConfig
from hpctrain.grid_shape import check_boxes, grid_shape


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
