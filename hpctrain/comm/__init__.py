"""Tensors over MPI: the only place that moves tensor data.

`collectives` changes tensors in place or returns new ones; `functional` holds the same operations for autograd.
"""

from hpctrain.comm import functional
from hpctrain.comm.agree import agree, together
from hpctrain.comm.algorithms import choose_all_reduce
from hpctrain.comm.buffers import Work, done
from hpctrain.comm.check import Checks, Mismatch
from hpctrain.comm.collectives import (
    all_gather,
    all_gather_start,
    all_reduce,
    all_reduce_start,
    all_to_all,
    broadcast,
    broadcast_start,
    gather,
    probe,
    recv,
    recv_start,
    reduce,
    reduce_scatter,
    reduce_scatter_start,
    scatter,
    send,
    send_start,
)
from hpctrain.comm.common import Common
from hpctrain.comm.copies import Copies
from hpctrain.comm.device import decide_cuda_aware, local_device
from hpctrain.comm.halo import Halo
from hpctrain.comm.summed import Summed
from hpctrain.comm.watch import Watch, Watched
from hpctrain.comm.watchdog import start_watchdog
from hpctrain.comm.workspaces import workspace

__all__ = [
    "Checks",
    "Mismatch",
    "Watch",
    "Watched",
    "Common",
    "Copies",
    "Halo",
    "Summed",
    "Work",
    "agree",
    "all_gather",
    "all_gather_start",
    "all_reduce",
    "all_reduce_start",
    "all_to_all",
    "broadcast",
    "broadcast_start",
    "choose_all_reduce",
    "decide_cuda_aware",
    "done",
    "functional",
    "gather",
    "local_device",
    "probe",
    "recv",
    "recv_start",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_start",
    "scatter",
    "send",
    "send_start",
    "start_watchdog",
    "together",
    "workspace",
]
