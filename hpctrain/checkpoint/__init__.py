"""Checkpoints that never lie: checksummed, committed by a rename, readable on any grid. No pickle.

    RUN/checkpoints/step-20/manifest.json                 step, grid, settings, tensors' types and shapes, groups
    RUN/checkpoints/step-20/manifest.sha256               of the manifest; `sha256sum -c` reads it
    RUN/checkpoints/step-20/holders.bin                   which group has what part of which tensor
    RUN/checkpoints/step-20/ranks-00000/manifest.json     of a group of 100 ranks
    RUN/checkpoints/step-20/ranks-00000/holders.bin       which of its ranks has what
    RUN/checkpoints/step-20/ranks-00000/rank-00007.json   what lies where in a rank's files, checksums of all bytes
    RUN/checkpoints/step-20/ranks-00000/rank-00007.h5     a rank's shards, in plain HDF5 datasets; rank-00007-1.h5 …
                                                          where they are more than 64 MiB, about 4 files at most
    RUN/checkpoints/latest                                a link to the newest

A folder named step-N is complete. It is written as step-N.tmp, which a killed job leaves behind and nobody reads. A
manifest has the SHA-256 of its table, of each manifest below it and, of a rank, of each file. holders.bin is as
`holders.py` says. Whoever loads follows the tables to the ranks' manifests that it needs.
"""

from hpctrain.checkpoint.checkpointer import Checkpointer
from hpctrain.checkpoint.pieces import Corrupt
from hpctrain.checkpoint.scripts import load, save
from hpctrain.checkpoint.training_state import TrainingState
from hpctrain.checkpoint.verify import verify

__all__ = ["Checkpointer", "Corrupt", "TrainingState", "load", "save", "verify"]
