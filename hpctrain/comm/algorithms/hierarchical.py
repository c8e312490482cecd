"""All-reduce in two levels: shared memory inside a node, messages between nodes."""

from __future__ import annotations

from collections import Counter

import torch

from hpctrain.comm.algorithms.by_messages import Link, direct
from hpctrain.comm.buffers import wait
from hpctrain.comm.message_workspace import MessageWorkspace
from hpctrain.comm.shared_memory_workspace import SharedMemoryWorkspace
from hpctrain.comm.workspace import new_workspace
from hpctrain.grid import Axis
from hpctrain.reclaim import free_comm
from hpctrain.shard import split


class Hierarchy:
    """The nodes of an axis, as `axis.nodes` tells them, and all-reduce over them. Its creation is collective.

    The ranks of a node copy their tensors into shared memory and each adds up a part of all of them. Then `lanes` ranks
    of each node, as many as the smallest node has, sum a part each with their like on the other nodes (`direct`), so
    that all of a node's network adapters are in use. Then everybody copies the sum.

    With m ranks on each of v nodes a rank moves 2 (m-1)/m n bytes through memory and 2 (v-1)/v n/m through the network.
    """

    def __init__(self, axis: Axis):
        from mpi4py import MPI

        node, lanes = axis.nodes[axis.rank], min(Counter(axis.nodes).values())
        mine = MPI.Intracomm(axis.comm.Split(node, axis.rank))
        self.node = Axis(axis.name, mine, [node] * mine.size, axis.transport)
        lane = self.node.rank if self.node.rank < lanes else MPI.UNDEFINED
        comm = MPI.Intracomm(axis.comm.Split(lane, axis.rank))
        self.lane = Axis(axis.name, comm, comm.allgather(node), axis.transport) if comm != MPI.COMM_NULL else None
        self.lanes, self.nodes = lanes, len(set(axis.nodes))
        memory = new_workspace(self.node, torch.empty(0))
        assert not isinstance(memory, MessageWorkspace)  # its ranks share memory
        self._memory = memory
        for made in (self.node.comm, comm):
            axis.transport.holdings.add(free_comm(made))

    def free(self) -> None:
        """Give back the shared memory; the next call makes new. Collective."""
        if isinstance(self._memory, SharedMemoryWorkspace):
            self._memory.free()

    def all_reduce(self, x: torch.Tensor, tag: int) -> tuple[int, int]:
        """Replace the flat CPU tensor, of a type that MPI can add, by the sum; returns bytes sent and received."""
        node, memory = self.node, self._memory
        buffer = memory.buffer(x.numel(), x)
        buffer.copy_(x)
        total = memory.add_up(buffer)
        sent = received = 2 * (node.size - 1) * x.nbytes // node.size
        if self.nodes > 1:
            if self.lane is not None:
                link = Link(self.lane, tag)
                for requests in direct(total[split(x.numel(), self.lanes, node.rank)], link):
                    for request in requests:
                        wait(request)
                sent, received = sent + link.sent, received + link.received
            memory.barrier()
        x.copy_(total)
        return sent, received
