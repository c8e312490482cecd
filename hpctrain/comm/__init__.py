"""Tensors over MPI: the only place that moves tensor data.

`collectives`, `reductions`, `rooted` and `point_to_point` change tensors in place or return new ones; `functional` has
the same operations for autograd.
"""

from hpctrain.comm import functional
from hpctrain.comm.agree import agree, check_started_alike, together
from hpctrain.comm.algorithms import choose_all_reduce
from hpctrain.comm.all_reduce_buffer import AllReduceBuffer
from hpctrain.comm.buffers import Work, accumulation_dtype, done
from hpctrain.comm.collective_checker import CollectiveChecker, Mismatch
from hpctrain.comm.collectives import (
    all_gather,
    all_gather_start,
    all_to_all,
    all_to_all_start,
    reduce_scatter,
    reduce_scatter_start,
)
from hpctrain.comm.device import decide_cuda_aware, local_device
from hpctrain.comm.halo import Halo
from hpctrain.comm.mailbox import Letter, Mailbox
from hpctrain.comm.objects import all_gather_object
from hpctrain.comm.path import Path, path_of
from hpctrain.comm.point_to_point import probe, recv, recv_start, send, send_start
from hpctrain.comm.reductions import all_reduce, all_reduce_start
from hpctrain.comm.repartition import Repartition
from hpctrain.comm.replicated_buffer import ReplicatedBuffer
from hpctrain.comm.rooted import broadcast, broadcast_start, gather, reduce, scatter
from hpctrain.comm.script_watchdog import start_watchdog
from hpctrain.comm.sharded_buffer import ShardedBuffer
from hpctrain.comm.watchdog import Watchdog, WatchedComm
from hpctrain.comm.workspace import reduce_rows, workspace

__all__ = [
    "CollectiveChecker",
    "Mismatch",
    "Watchdog",
    "WatchedComm",
    "ShardedBuffer",
    "ReplicatedBuffer",
    "Halo",
    "Letter",
    "Mailbox",
    "Path",
    "Repartition",
    "AllReduceBuffer",
    "Work",
    "accumulation_dtype",
    "agree",
    "all_gather",
    "all_gather_object",
    "all_gather_start",
    "all_reduce",
    "all_reduce_start",
    "all_to_all",
    "all_to_all_start",
    "broadcast",
    "broadcast_start",
    "check_started_alike",
    "choose_all_reduce",
    "decide_cuda_aware",
    "done",
    "functional",
    "gather",
    "local_device",
    "path_of",
    "probe",
    "recv",
    "recv_start",
    "reduce",
    "reduce_rows",
    "reduce_scatter",
    "reduce_scatter_start",
    "scatter",
    "send",
    "send_start",
    "start_watchdog",
    "together",
    "workspace",
]
