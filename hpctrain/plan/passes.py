"""Seconds of one microbatch's forward and backward in the parts of a model, on one rank of a tensor box; and of the
update."""

from __future__ import annotations

import functools

from hpctrain.choices import PLANE_PRODUCTS
from hpctrain.plan.job import Choice, Job
from hpctrain.plan.machine import Machine
from hpctrain.plan.network import Group, Network
from hpctrain.plan.part import Mixed, Part, Pass

# How often element-wise operations read or write what a layer keeps: norms, sums and dropout in the residual layout
# (5.5 for the 2 numbers kept of each), biases and activations in the inner one; backward a quarter more.
RESIDUAL, INNER, BACKWARD = 2.75, 1.2, 1.25
# Operations of a block or of an end besides products, and of a norm whose features several ranks have, forward;
# backward twice as many.
OPERATIONS, NORM_OVER_Y = 16, 10


def update_seconds(job: Job, machine: Machine) -> float:
    """Of one parameter: the norm, clipping, as if needed in each step, and the optimizer read and write its gradient,
    weights and moments; and their average, with the weights read once more."""
    nbytes = (2 + 2 * (job.clips and machine.software.clips)) * job.reduce + 2 * (1 + job.moments) * job.master
    nbytes += job.itemsize if job.master != job.itemsize else 0
    nbytes += 2 * job.ema + job.master if job.ema else 0
    return nbytes / machine.device.optimizer_rate * machine.learned.optimizer


class Box:
    """A tensor box of x × y × z ranks with a microbatch, whose sequences ring × Ulysses such boxes share. Sizes are
    those of the fullest rank, or those of one without any row where the microbatch is `empty`."""

    def __init__(self, job: Job, machine: Machine, network: Network, choice: Choice, empty: bool = False):
        self.job, self.machine, self.network = job, machine, network
        x, y, z = self.x, self.y, self.z = choice.box
        self.ring, self.ulysses = choice.ring, choice.ulysses
        self.plane, self.broadcasts = choice.algorithm in PLANE_PRODUCTS, choice.algorithm == "summa"
        self.groups = {"x": Group(x, y * z), "y": Group(y, z), "z": Group(z, 1), "xy": Group(x * y, z)}
        self.groups["expert"] = Group(choice.expert, 1)
        self.groups["ulysses"] = Group(self.ulysses, x * y * z)
        self.groups["ring"] = Group(self.ring, x * y * z * self.ulysses * choice.pipeline)
        self.sequences = 0 if empty else -(-job.sequences(choice) // z)
        if self.plane:  # which x cuts at whole sequences
            self.sequences = x * -(-self.sequences // x)
        self.rows = self.sequences * -(-job.costs.context // (self.ring * self.ulysses))
        self.rate = machine.peak_of(job.compute, job.matmul) * machine.device.product
        costs, dense = job.costs, job.costs.dense_layers
        weights = (costs.layers - dense) * costs.block_weights() + dense * costs.block_weights(dense=True)
        weights += costs.vocabulary * costs.width
        self.weights = (job.itemsize + job.reduce) * weights / (choice.pipeline * x * y * z)  # and gradients
        again = 1 - 1 / choice.microbatches if machine.software.accumulates else 0.0
        self.added = again * (1 if z > 1 else 3)  # times that a weight gradient is read and written besides
        self.microbatches, self.tied = choice.microbatches, costs.tied and choice.pipeline == 1
        self.expert, self.expert_tensor = choice.expert, choice.expert_tensor
        heads = -(-job.groups // (y if self.plane else x * y)) * (job.heads // max(1, job.groups))
        self.heads = -(-heads // self.ulysses)  # of this rank

    # What operations take

    def product(self, m: float, k: float, n: float) -> float:
        """Operands and result pass through the memory besides, so that flat products are slow; of no rows a gradient
        is written nevertheless, of zeros."""
        device = self.machine.device
        if not m * k * n:
            return self.job.itemsize * m * n / device.operand_rate
        bytes_moved = self.job.itemsize * (m * k + k * n + m * n)
        return 2 * m * k * n / self.rate + bytes_moved / device.operand_rate + device.ramp

    def elements(self, nbytes: float) -> float:
        return nbytes / self.machine.device.bandwidth

    def cold(self, nbytes: float) -> float:
        """What weights take to be read besides where no cache holds them."""
        return self.machine.device.cold(nbytes, self.weights)

    def finished(
        self, seconds: float, operations: int, tensor: float, sequence: float = 0.0, expert: float = 0.0,
        exchanges: int = 0,
    ) -> Pass:  # fmt: skip
        """With the launches of the operations, and the communication that the computation does not hide."""
        launches = operations * self.machine.device.launch
        asynchronous = self.machine.software.asynchronous
        compute = max(seconds, launches) if asynchronous else seconds + launches
        hidden = min(self.machine.software.hidden_tensor * tensor, compute)
        learned = self.machine.learned
        compute, tensor = compute * learned.compute, (tensor - hidden) * learned.tensor
        return Pass(compute, tensor, sequence * learned.sequence, expert, exchanges)

    # What a linear layer takes

    def exchanges(self, to_inner: bool) -> tuple[int, int, int]:
        """Of forward, input gradient and weight gradient."""
        x, y, z = self.x > 1, self.y > 1, (self.z > 1) * (1 + self.plane)  # on a plane z gathers and sums
        return x + y + z, x + y + z, x + y + z if self.plane else x if to_inner else y

    def linear(self, n_in: int, n_out: int, to_inner: bool) -> tuple[list[float], list[float]]:
        """(compute, tensor) seconds, each of forward, input gradient and weight gradient."""
        x, y = self.x, self.y
        over_in, over_out = ("y", "x") if to_inner else ("x", "y")
        sizes = {"x": x, "y": y}
        k, n, m = -(-n_in // sizes[over_in]), -(-n_out // sizes[over_out]), self.rows
        weight = self.job.itemsize * k * n
        read, added = self.cold(weight), self.added * weight / self.machine.device.optimizer_rate
        gradient = self.product(k, m, n) + 2 * read + added
        once = read / self.z if m else 0.0  # its part of the weight; what is gathered has just been written
        computes = [self.product(m, k, n) + once, self.product(m, n, k) + once, gradient]
        if x * y * self.z == 1:
            return computes, [0.0, 0.0, 0.0]
        size, net, groups = self.job.itemsize, self.network, self.groups
        if self.plane:
            return computes, [self._plane(m, n_in, n_out)] * 3
        gather_in = net.all_gather(size * m * k, groups[over_out])
        gather_out = net.all_gather(size * m * n, groups[over_in])
        scatter_in = net.reduce_scatter(size * m * k, groups[over_out])
        scatter_out = net.reduce_scatter(size * m * n, groups[over_in])
        whole = net.all_gather(weight, groups["z"])
        # the weight's gradient over z is added by `weight_sum`
        return computes, [gather_in + whole + scatter_out, gather_out + whole + scatter_in, gather_in]

    def weight_sum(self, n_in: int, n_out: int) -> float:
        """Of one gradient over z; on a plane a product has the sum."""
        if self.plane:
            return 0.0
        return self.network.reduce_scatter(self.job.itemsize * n_in * n_out / (self.x * self.y), self.groups["z"])

    def _plane(self, m, n_in, n_out):
        """One of three products of the same volume: panels of input and output go round over x, of weights over y;
        over z inputs are gathered, and outputs are summed."""
        size, z = self.job.itemsize, self.z
        move = self.network.broadcasts if self.broadcasts else self.network.all_gather
        outputs = move(size * m * n_out / self.x, self.groups["y"])
        weights = move(size * n_in * n_out / (self.y * z), self.groups["x"])
        deep = self.network.all_gather(size * m * z * n_in / (self.x * self.y), self.groups["z"])
        summed = self.network.reduce_scatter(size * m * n_out / (self.x * self.y), self.groups["z"])
        return outputs + weights + deep + summed

    # The parts of a model

    @functools.cached_property
    def attention(self) -> float:
        """Seconds of the scores and their mixture, forward."""
        return self.attended(self.scores)

    def attended(self, scores: float) -> float:
        """The same of so many scores."""
        costs = self.job.costs
        return self.scored(scores, costs.attention_width / self.job.heads, costs.context)

    def scored(self, scores: float, head_width: float, length: int, causal: bool = True) -> float:
        """The same of heads of this width, in sequences of so many tokens."""
        software = self.machine.software
        counted = scores * (software.attended if causal else 1.0)
        rate, score = self.machine.device.attention_of(length)
        seconds = 4 * counted * head_width / (self.rate * rate) + score * counted
        return seconds + self.elements(scores * software.score_bytes)

    @property
    def attention_backward(self) -> float:
        """Of attention, in forwards: flash attention computes the scores once more."""
        return 2.0 if self.machine.software.score_bytes else 2.5

    @property
    def scores(self) -> float:
        """Of this rank's heads, whose queries the ring's ranks share evenly; on a plane, of its whole sequences."""
        costs, sequences = self.job.costs, self.sequences // self.x if self.plane else self.sequences
        return sequences * self.heads * costs.context * costs.keys / self.ring

    @functools.cached_property
    def exchange(self) -> tuple[float, float]:
        """Seconds of the ring's and the Ulysses axis' messages of a block, forward and backward."""
        columns = self.y if self.plane else self.x * self.y
        rows = self.rows / self.x if self.plane else self.rows
        ring, ulysses = self.job.costs.sequence_elements(rows, self.ring, self.ulysses, columns)
        size, net = self.job.itemsize, self.network
        # the network counts whole tensors, of which a rank receives all but its own part
        mean = (2 * size + max(4, size)) / 3  # sums of gradients, a third, are wide
        around = net.all_gather(mean * ring * self.ring / max(1, self.ring - 1), self.groups["ring"])
        across = net.all_to_all(size * ulysses * self.ulysses / max(1, self.ulysses - 1), self.groups["ulysses"])
        return around / 3 + across / 2, around * 2 / 3 + across / 2

    def norm(self) -> float:
        """Seconds of the sums over y of a norm, forward or backward."""
        return self.network.all_gather(2 * 4 * self.rows / self.x * self.y, self.groups["y"])

    @functools.cached_property
    def mixture(self) -> Mixed:
        """The router and the experts of a block that has them, where loads are even."""
        costs, size, net = self.job.costs, self.job.itemsize, self.network
        mixture, width = costs.mixture, costs.width
        if mixture is None:
            return Mixed()
        tokens = self.rows / (self.x * self.y)
        parts = self.expert_tensor  # ranks with some features of each expert, to all of which a token goes
        pairs, local = tokens * mixture.top_k, -(-mixture.experts * parts // self.expert)
        weights = size * local * costs.expert_weights / parts
        router = 2 * tokens * costs.router_weights / self.rate
        experts = 2 * pairs * costs.expert_weights / self.rate
        # every expert's weights are read, and rows are copied to their places and back
        moved = weights + size * pairs * (6 * parts * width + 5 * mixture.ffn)
        once = router + experts + self.elements(moved)
        # whole rows: in one all-to-all over y there and back; each pair to its expert and back
        rows = 2 * net.all_to_all(size * tokens * width, self.groups["y"])
        sent = 2 * net.all_to_all(size * parts * pairs * width, self.groups["expert"])
        kept = size * pairs * (parts * width + 2 * mixture.ffn)
        return Mixed(once, rows, sent, kept, size * pairs * (parts * width + 3 * mixture.ffn), 12 + 3 * local)

    def block(self, recompute: str, dense: bool = False) -> Part:
        """One block of the model; `dense`, of those without a mixture where others have one."""
        costs, size = self.job.costs, self.job.itemsize
        box = self.x * self.y
        computes, tensors, exchanges = [0.0] * 3, [0.0] * 3, [0] * 3
        mixed = Mixed() if dense else self.mixture
        linears = costs.linears_of(dense)
        for each in linears:
            values = zip(*self.linear(each.n_in, each.n_out, each.to_inner), self.exchanges(each.to_inner))
            for number, (computed, tensor, exchanged) in enumerate(values):
                computes[number] += computed
                tensors[number] += tensor
                exchanges[number] += exchanged
        residual = size * self.rows * costs.width * 2 * costs.norms / box
        inner = size * self.rows * sum(e.n_out if e.to_inner else e.n_in for e in linears) / box
        whole = self.x if recompute in self.machine.software.whole_norms else 1
        elementwise = self.machine.device.elementwise(RESIDUAL * residual * whole, INNER * inner)
        norms = costs.norms * self.norm()
        forward = computes[0] + elementwise + self.attention + mixed.seconds, tensors[0] + norms + mixed.rows
        scores = self.attention * self.attention_backward
        inputs = computes[1] + BACKWARD * elementwise + scores + mixed.seconds, tensors[1] + norms + mixed.rows
        operations = OPERATIONS + len(linears) + mixed.operations + costs.norms * NORM_OVER_Y * (self.y > 1)
        there, back = self.exchange
        again, passes, over_y = (0.0, 0.0, 0), 1, costs.norms * (self.y > 1)
        kept, working = residual + inner + mixed.kept, 2.0 * size * self.rows * max(e.n_out for e in linears) / box
        working = max(working, mixed.working)
        if self.machine.software.score_bytes:
            scores_kept = 2.5 * size * self.scores
            kept += 0.0 if recompute == "attention" else scores_kept
            working += scores_kept if recompute == "attention" else 0.0
        if recompute == "block":
            again, passes = (*forward, operations), 2
            kept, working = size * self.rows * costs.width / box, working + kept
        elif recompute == "attention":
            again = (self.attention, 0.0, 3)
        if self.z > 1:  # a weight is whole while it is used
            working += 2 * size * max(e.n_in * e.n_out for e in linears) / box
        return Part(
            self.finished(forward[0], operations, forward[1], there, mixed.sent, exchanges[0] + over_y),
            self.finished(
                inputs[0] + again[0], 2 * operations + again[2], inputs[1] + again[1],
                back + (there if recompute != "none" else 0.0), mixed.sent * passes, passes * (exchanges[1] + over_y),
            ),
            self.finished(
                computes[2] + mixed.seconds, len(linears) + mixed.operations // 4, tensors[2], exchanges=exchanges[2]
            ),
            kept, working,
        )  # fmt: skip

    def embedding(self) -> Part:
        """What the first stage has besides its blocks."""
        costs, size = self.job.costs, self.job.itemsize
        rows = size * self.rows * costs.width
        tables = size * (costs.vocabulary + costs.positions) * costs.width / (self.x * self.y)
        moved = self.network.reduce_scatter(rows / self.y, self.groups["x"])
        gathered = self.network.all_gather(tables, self.groups["z"])
        seconds = self.elements(3 * rows / (self.x * self.y))
        exchanges = (self.x > 1) + (self.z > 1)
        # A table's gradient is a whole one: zeros, to which the head's is added, in new memory and copied once more
        # for the first microbatch, or else that of the microbatches before. With the head, `linear` adds those.
        again = self.tied * (3 + 2 / self.microbatches) or 3 * (1 - 1 / self.microbatches)
        passes = (1 + again / self.z) * self.machine.software.accumulates
        dense = passes * tables / self.machine.device.table_rate
        return Part(
            self.finished(seconds, OPERATIONS // 2, moved + gathered, exchanges=exchanges),
            self.finished(2 * seconds, OPERATIONS // 2, moved + gathered, exchanges=exchanges),
            self.finished(dense, 0, 0.0),
            rows / (self.x * self.y), 2 * tables,  # a microbatch's gradient, and its sum with the head's
        )  # fmt: skip

    def head(self) -> Part:
        """What the last stage has besides its blocks: norm, projection onto the vocabulary and loss."""
        costs, size = self.job.costs, self.job.itemsize
        computes, tensors = self.linear(costs.width, costs.vocabulary, True)
        forward, inputs, weights = self.exchanges(True)
        logits = self.rows * -(-costs.vocabulary // (self.x * self.y))
        wide = max(size, 4)
        elementwise = self.elements(logits * (3 * wide + 2 * (size if size < 4 else 0)))
        losses = self.network.all_gather(2 * wide * self.rows * self.x * self.y, self.groups["xy"])
        return Part(
            self.finished(
                computes[0] + elementwise, OPERATIONS, tensors[0] + losses + self.norm(),
                exchanges=forward + (self.x * self.y > 1) + (self.y > 1),
            ),
            self.finished(
                computes[1] + elementwise, OPERATIONS, tensors[1] + self.norm(), exchanges=inputs + (self.y > 1)
            ),
            self.finished(computes[2], 1, tensors[2], exchanges=weights),
            logits * wide + 2 * size * self.rows * costs.width / (self.x * self.y), logits * (wide + size),
        )  # fmt: skip
