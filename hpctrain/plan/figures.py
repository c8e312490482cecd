"""What is known of a machine's devices, links and software: the tables of its file."""

from __future__ import annotations

import math
from dataclasses import dataclass

LENGTHS = 256, 1024  # tokens of sequences that attention is measured with, short and long
PEAKS = "fp64", "fp32", "tf32", "bf16", "fp16"  # types of products
OPERATIONS = "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "message"  # that may be measured by size


@dataclass(frozen=True)
class Link:
    """A level of the network. Each of its units (a device, a node, a group of nodes) has `bandwidth` to the other
    units, up to those that make a unit of the next level.

    Attributes:
        unit: ranks of a unit, which share its bandwidth; 1 on the first level.
        latency: s of a message.
        bandwidth: B/s that a unit sends, and receives at the same time.
        direct: part of it that messages to one other unit get. 1 where all links lead to switches that everybody
            shares; less in a dragonfly, whose groups are linked in pairs: 1/2 by adaptive routing, which sends most of
            them through a third group, and 1/(groups - 1) by the shortest way.
    """

    name: str
    unit: int
    latency: float
    bandwidth: float
    direct: float = 1.0


@dataclass(frozen=True)
class Device:
    """What one rank computes with.

    Attributes:
        memory: B.
        reserved: B that are gone before the model is made: driver, libraries, the interpreter.
        slack: part of what is allocated that the allocator wastes.
        bandwidth: B/s that element-wise operations read and write.
        operands: B/s that products read their operands and write their results at; 0 for `bandwidth`.
        state_bandwidth: B/s that clipping and the optimizer read and write, of more than caches hold; 0 for
            `bandwidth`.
        table_bandwidth: B/s that gradients of tables are written and added at, each in new memory; 0 for the same as
            the optimizer.
        cold_bandwidth: B/s at which a product reads weights that no cache holds, besides what it takes with them in a
            cache; 0 where it takes no longer.
        norms, activations: B/s that norms with the sums around them, and operations between two products, read and
            write; 0 for `bandwidth`.
        cache: B of weights and gradients that a rank's cache holds from one microbatch to the next.
        delay: s that chance delays the ranks of a node in a step that has one exchange; √n times as long in one that
            has n of them.
        product: part of the peak that a product reaches whose operands cost nothing to read.
        attention: part of a product's rate that the products inside attention reach.
        score: s that a score which counts takes besides, forward, whatever its head's width.
        long_attention, long_score: the same of sequences of `LENGTHS[1]` tokens and more; 0 for those of `LENGTHS[0]`.
        launch: s that an operation takes besides.
        sample, reading: s that a sample takes to be read besides, and B/s of its tokens, 8 B each; 0 where reading them
            costs no more than copying them.
        ramp: s in which a product fills the device's units and empties them, besides.
        power: W, or 0 where it is not known.
    """

    memory: float
    bandwidth: float
    product: float
    attention: float
    launch: float
    ramp: float = 0.0
    sample: float = 0.0
    reading: float = 0.0
    reserved: float = 0.0
    slack: float = 0.05
    power: float = 0.0
    operands: float = 0.0
    state_bandwidth: float = 0.0
    table_bandwidth: float = 0.0
    cold_bandwidth: float = 0.0
    norms: float = 0.0
    activations: float = 0.0
    cache: float = 0.0
    delay: float = 0.0
    score: float = 0.0
    long_attention: float = 0.0
    long_score: float = 0.0

    @property
    def operand_rate(self) -> float:
        """B/s."""
        return self.operands or self.bandwidth

    @property
    def optimizer_rate(self) -> float:
        """B/s."""
        return self.state_bandwidth or self.bandwidth

    @property
    def table_rate(self) -> float:
        """B/s."""
        return self.table_bandwidth or self.optimizer_rate

    def attention_of(self, length: int) -> tuple[float, float]:
        """Part of a product's rate, and s of a score, in sequences of so many tokens, linear between logarithms."""
        if not self.long_attention:
            return self.attention, self.score
        short, long = LENGTHS
        part = min(1.0, max(0.0, math.log(length / short) / math.log(long / short)))
        between = self.attention + part * (self.long_attention - self.attention)
        return between, self.score + part * (self.long_score - self.score)

    def elementwise(self, residual: float, inner: float) -> float:
        """Seconds in which norms and sums, and what lies between two products, read and write so many bytes."""
        return residual / (self.norms or self.bandwidth) + inner / (self.activations or self.bandwidth)

    def cold(self, nbytes: float, weights: float) -> float:
        """Seconds that so many bytes of a rank's `weights` and gradients take beyond those of bytes in a cache."""
        return nbytes / self.cold_bandwidth if self.cold_bandwidth and weights > self.cache else 0.0


@dataclass(frozen=True)
class Software:
    """What the measured runs that a file was calibrated on did otherwise than a file of data sheets could say.

    Attributes:
        score_bytes: B that attention reads and writes a score in forward; 0 for flash attention.
        attended: part of a head's length² scores that are computed; 0.5 where the causal half is left out.
        whole_norms: values of train.recompute with which every tensor rank has whole norms and residual sums.
        hidden_data, hidden_tensor: part of the communication on these axes that the computation beside it hides.
        bucket: B of gradients or weights that a sum or gather over replicas takes at a time; 0 for all at once.
        asynchronous: operations are queued ahead, so that launching them costs nothing unless nothing else does.
        accumulates: gradients of microbatches after the first are added by an operation of their own.
        clips: gradients are scaled to a largest norm by an operation of their own, not by the optimizer.
    """

    score_bytes: float = 0.0
    attended: float = 1.0
    whole_norms: tuple[str, ...] = ()
    hidden_data: float = 0.0
    hidden_tensor: float = 0.0
    bucket: float = 0.0
    asynchronous: bool = True
    accumulates: bool = False
    clips: bool = False


@dataclass(frozen=True)
class Errors:
    """How far predictions are off.

    Attributes:
        noise: standard deviation of a rank's step, as a part of it: the slowest of N is sqrt(2 ln N) of them late.
        relative: half width of the interval of a prediction, as a part of it.
    """

    noise: float = 0.0
    relative: float = 0.15


@dataclass(frozen=True)
class Measured:
    """Seconds of one operation of neighbours on a node by size, to interpolate instead of the formula.

    Attributes:
        operation: of OPERATIONS.
        ranks: that took part.
        bytes, seconds: of the whole tensor; rising.
        at_once: ranks of the node that did so in groups of `ranks`; 0 for one group alone.
    """

    operation: str
    ranks: int
    bytes: tuple[float, ...]
    seconds: tuple[float, ...]
    at_once: int = 0


@dataclass(frozen=True)
class Occupied:
    """What one rank computes with where so many of a node compute at once; other figures are those of `Device`."""

    ranks: int
    memory: float
    bandwidth: float
    product: float
    launch: float
    state_bandwidth: float
    table_bandwidth: float
    cold_bandwidth: float
    norms: float
    activations: float
    cache: float
    delay: float
    attention: float
    score: float
    long_attention: float
    long_score: float
    operands: float = 0.0


@dataclass(frozen=True)
class Learned:
    """What runs have shown: measured over predicted seconds of each part, by `hpctrain plan --learn`."""

    compute: float = 1.0
    data: float = 1.0
    tensor: float = 1.0
    sequence: float = 1.0
    optimizer: float = 1.0
    memory: float = 1.0
    runs: int = 0
