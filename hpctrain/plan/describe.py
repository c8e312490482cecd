"""Measured figures as a machine file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpctrain.plan.figures import LENGTHS
from hpctrain.plan.job import BYTES


def machine_toml(found: Sequence[dict], date: str, host: str) -> str:
    """The file of a machine of which `measure.measure` found these figures, with rising numbers of ranks.

    What ranks compute at is that of as many as there are cores, all at once. Products are taken to need their
    floating-point operations and the bytes of their operands, by least squares of the relative error. Where some of
    them were on several nodes, the file has the network between nodes, and says what full nodes do alone.

    Raises:
        ValueError: where ranks outnumber the cores in all of them, or were on several nodes, but filled none of them
            before the next.
    """
    own = [each["ranks_of_a_node"] for each in found if each["ranks_of_a_node"] <= each["cores"]]
    if not own:
        raise ValueError(
            f"a machine file is of ranks with a core or device of their own, got {found[0]['ranks_of_a_node']} or more "
            f"ranks on {found[0]['cores']} of them; use --ranks {found[0]['cores']}"
        )
    node = max(own)
    full = next(each for each in reversed(found) if each["ranks_of_a_node"] == node)
    by = f"measured on {host} on {date}, {full['ranks']} ranks at once, one thread each"
    peak = {kind: fitted(rows, BYTES[kind])[0] for kind, rows in full["products"].items()}
    operands = fitted(full["products"]["fp32"], BYTES["fp32"])[1]
    (attention, score), (long_attention, long_score) = (attended(rows, peak["fp32"]) for rows in full["attention"])
    lines = [
        f"# {by}.",
        f"# What is computed takes {full.get('slower', 1):.3f} times as long as it does alone: plan/in_training.py.",
        "# Units: bytes (B), seconds (s), flop/s.",
        "",
        f'description = "{host}, measured on {date}"',
        f"node = {node}  # ranks with a core or device of their own",
        "",
        "[device]",
        f"memory = {full['memory']:.4g}  # B; of a rank of {full['ranks_of_a_node']}: {by}",
        f"reserved = {full['reserved']:.4g}  # B; in training next to nothing: measured on {host} on {date}",
        f"slack = {full['slack']:.3g}  # of what is allocated, in holes between it: measured on {host} on {date}",
        f"bandwidth = {full['elements']:.4g}  # B/s; additions of 4 MiB: {by}",
        f"operands = {operands:.4g}  # B/s; of products, by least squares, or 0 for `bandwidth`: {by}",
        f"state_bandwidth = {full['state']:.4g}  # B/s; norm, clipping and AdamW of 64 MiB: {by}",
        f"table_bandwidth = {full['tables']:.4g}  # B/s; zeros, sum and copy of 8 MiB, in new memory: {by}",
        f"cold_bandwidth = {full['cold']:.4g}  # B/s, or 0; weights that are read in turn: {by}",
        f"norms = {full['norms']:.4g}  # B/s; norms and sums of 4 MiB, forward and backward: {by}",
        f"activations = {full['activations']:.4g}  # B/s; GELU of 4 MiB, biases, copies of heads: {by}",
        f"cache = {full['cache']:.4g}  # B; of weights that products read in turn as fast as one: {by}",
        f"delay = {full['delay']:.3g}  # s in a step by chance, times the root of the number of its exchanges: {by}",
        f"product = 1.0  # of `peak`, which is what products reach; {by}",
        f"attention = {attention:.3f}  # of a product's rate; 8 heads of {LENGTHS[0]} × 32 and 64: {by}",
        f"score = {score:.3g}  # s, forward; likewise: {by}",
        f"long_attention = {long_attention:.3f}  # of a product's rate; 8 heads of {LENGTHS[1]} × 32 and 64: {by}",
        f"long_score = {long_score:.3g}  # s, forward; likewise: {by}",
        f"launch = {full['launch']:.3g}  # s; of a block of width 8, forward and backward: {by}",
        *_reading(full["reading"], by),
        "",
        f"[peak]  # flop/s; {by}",
        *(f"{kind} = {rate:.4g}" for kind, rate in peak.items()),
        "",
        "[software]",
        "attended = 0.5  # of the scores; the causal half",
        f"bucket = {full['bucket']}  # B; at which sums and gathers over replicas close one: data_parallel/buckets.py",
        f"asynchronous = {str(full['asynchronous']).lower()}  # operations are queued ahead of the device",
        "clips = true  # the trainer multiplies gradients before the optimizer reads them",
        "accumulates = true  # torch adds the gradients of microbatches by an operation of their own",
        "",
        "[errors]",
        "noise = 0.01  # of a step; no more is known",
        "relative = 0.15  # of a prediction; no more is known",
        "",
        *_links(found, by),
    ]
    if any(each["ranks"] > each["ranks_of_a_node"] for each in found):
        lines += _between_nodes(found, node, by)
        found = [full]
    for each in found:
        if each is not full:
            lines += _occupied(each, peak["fp32"])
    for each in found:
        for size, tables in each["collectives"]:
            for operation, rows in tables.items():
                lines += [
                    "",
                    f"[[measured]]  # groups of {size} of a node's {each['ranks_of_a_node']} ranks",
                    f'operation = "{operation}"',
                    f"ranks = {size}",
                    f"at_once = {each['ranks_of_a_node']}",
                    f"bytes = {[nbytes for nbytes, _ in rows]}",
                    f"seconds = [{', '.join(f'{max(taken, 1e-9):.3g}' for _, taken in rows)}]",
                ]
    return "\n".join(lines) + "\n"


def _occupied(each: dict, peak: float) -> list[str]:
    """What a rank computes with where another number of a node's ranks compute at once."""
    rate, operands = fitted(each["products"]["fp32"], BYTES["fp32"])
    (attention, score), (long_attention, long_score) = (attended(rows, rate) for rows in each["attention"])
    return [
        "",
        f"[[occupied]]  # {each['ranks']} ranks at once",
        f"ranks = {each['ranks']}",
        f"memory = {each['memory']:.4g}",
        f"product = {rate / peak:.4g}",
        f"operands = {operands:.4g}",
        f"attention = {attention:.3f}",
        f"score = {score:.3g}",
        f"long_attention = {long_attention:.3f}",
        f"long_score = {long_score:.3g}",
        f"bandwidth = {each['elements']:.4g}",
        f"state_bandwidth = {each['state']:.4g}",
        f"table_bandwidth = {each['tables']:.4g}",
        f"cold_bandwidth = {each['cold']:.4g}",
        *(f"{name} = {each[name]:.4g}" for name in ("launch", "norms", "activations", "cache", "delay")),
    ]


def fitted(rows: Sequence[Sequence[float]], itemsize: int) -> tuple[float, float]:
    """flop/s and B/s of products (m, k, n, seconds); of the latter 0 where bytes take no time.

    >>> fitted([(100, 100, 100, 3.2e-3), (10, 100, 1000, 6.44e-3)], 1)
    (1000000000.0, 25000000.0)
    """
    table = np.array(rows, dtype=float)
    m, k, n, seconds = table.T
    terms = np.stack([2 * m * k * n, itemsize * (m * k + k * n + m * n)], 1) / seconds[:, None]
    flop, byte = np.linalg.lstsq(terms, np.ones(len(table)), rcond=None)[0]
    if flop <= 0 or byte <= 0:  # operands cost nothing to read, or the clock was disturbed
        flop, byte = float(np.median(seconds / (2 * m * k * n))), 0.0
    return float(f"{1 / flop:.4g}"), float(f"{1 / byte:.4g}") if byte else 0.0


def attended(rows: Sequence[Sequence[float]], peak: float) -> tuple[float, float]:
    """Part of `peak` of the products in attention, and seconds of a score besides, forward, by flop/s of heads of two
    widths: 4 flop of each feature, and in backward 2.5 times as many.

    >>> part, score = attended([(32, 14 * 32 / 11.2e-9), (64, 14 * 64 / 18.2e-9)], 1e11)
    >>> round(part, 3), round(score * 1e9, 3)
    (0.64, 1.2)
    """
    (narrow, wide), (few, many) = zip(*((width, 14 * width / rate) for width, rate in rows))
    flops = min(peak, 14 * (wide - narrow) / (many - few)) if many > few else peak
    return flops / peak, max(0.0, (few + many) / 2 - 14 * (narrow + wide) / 2 / flops) / 3.5


def _reading(rows: Sequence[Sequence[float]], by: str) -> list[str]:
    """Of a short and a long sample."""
    (few, short), (many, long) = rows
    rate = 8 * (many - few) / (long - short) if long > short else 0.0
    return [
        f"sample = {max(0.0, short - 8 * few / rate if rate else short):.3g}  # s; of a packed corpus: {by}",
        f"reading = {rate:.4g}  # B/s; 0 where long samples take no longer: {by}",
    ]


def _links(found: Sequence[dict], by: str) -> list[str]:
    """Within a node; what is not in the tables is taken from the messages, or from a copy where there are none."""
    for each in found:
        if rows := dict(each["collectives"]).get(2, {}).get("message"):
            latency, bandwidth = rows[0][1], max(nbytes / taken for nbytes, taken in rows)
            source = f"messages: {by}"
            break
    else:
        latency, bandwidth, source = 1e-6, found[-1]["elements"] / 3, "one rank: a third of an addition's bytes"
    return [
        "[[link]]",
        'name = "here"',
        "unit = 1",
        f"latency = {latency:.3g}  # s; {source}",
        f"bandwidth = {bandwidth:.4g}  # B/s; {source}",
    ]


def _between_nodes(found: Sequence[dict], node: int, by: str) -> list[str]:
    """The level above, by what crosses nodes of which the most ranks sent, each with a core of its own."""
    crossing = [each for each in found if each["between"] and each["ranks_of_a_node"] <= node]
    if not crossing:
        raise ValueError(
            f"nothing was measured between nodes: {found[-1]['ranks']} ranks did not fill one node after another, with "
            "as many on each; allocate as many tasks on each node (salloc --ntasks-per-node), in blocks (export "
            "SLURM_DISTRIBUTION=block), and use --ranks of whole nodes"
        )
    full = max(crossing, key=lambda each: (each["ranks_of_a_node"], each["ranks"]))
    rows, ranks = full["between"], full["ranks_of_a_node"]
    source = f"messages of {ranks} ranks of a node to another node at once: {by}"
    return [
        "",
        "[[link]]",
        'name = "between nodes"',
        f"unit = {node}  # ranks of a node",
        f"latency = {rows[0][1]:.3g}  # s; {source}",
        f"bandwidth = {ranks * max(nbytes / taken for nbytes, taken in rows):.4g}  # B/s of a node; {source}",
    ]
