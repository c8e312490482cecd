"""The configuration: TOML and `section.key=value` overrides into dataclasses. Brings neither torch nor MPI."""

from hpctrain.config.loading import load_config, to_toml
from hpctrain.config.sections import (
    CheckpointConfig,
    CommConfig,
    Config,
    DataConfig,
    DataParallelConfig,
    GridConfig,
    ModelConfig,
    PipelineConfig,
    PrecisionConfig,
    RunConfig,
    SanityConfig,
    TensorConfig,
    TrainConfig,
)

__all__ = [
    "CheckpointConfig",
    "CommConfig",
    "Config",
    "DataConfig",
    "DataParallelConfig",
    "GridConfig",
    "ModelConfig",
    "PipelineConfig",
    "PrecisionConfig",
    "RunConfig",
    "SanityConfig",
    "TensorConfig",
    "TrainConfig",
    "load_config",
    "to_toml",
]
