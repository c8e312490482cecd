"""Checkpoints that never lie: checksummed, committed by a rename, readable on any grid. No pickle.

    RUN/checkpoints/step-20/rank-00000.h5 …     the shards that each rank wrote, in plain HDF5 datasets;
                                                rank-00000-1.h5 … where they are more than 64 MiB
    RUN/checkpoints/step-20/manifest.json       which slice is where, checksums of all bytes, grid, step, settings
    RUN/checkpoints/step-20/manifest.sha256     of the manifest; `sha256sum -c` reads it
    RUN/checkpoints/latest                      a link to the newest

A folder named step-N is complete. It is written as step-N.tmp, which a killed job leaves behind and nobody reads.
"""

from hpctrain.train.checkpoint.checkpointer import Checkpointer
from hpctrain.train.checkpoint.manifest import Corrupt
from hpctrain.train.checkpoint.state import TrainingState

__all__ = ["Checkpointer", "Corrupt", "TrainingState"]
