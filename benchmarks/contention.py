"""Check `plan.network`'s seconds of collectives against SimGrid's, on fat trees and dragonflies of 1,024 hosts.

    apt-get download python3-simgrid libsimgrid3.32 libboost-context1.74.0 libboost-stacktrace1.74.0 libns3.37 \\
        libgsl27 libgslcblas0 libgfortran5           of Debian 12, Python 3.11; or "pip install simgrid" builds it
    for each in *.deb; do dpkg -x $each simgrid; done
    LD_LIBRARY_PATH=simgrid/usr/lib/x86_64-linux-gnu PYTHONPATH=simgrid/usr/lib/python3/dist-packages \\
        python benchmarks/contention.py > benchmarks/results/contention.jsonl          3 minutes on one core

SimGrid takes every message as a flow through the links of its route; flows share each link by max-min fairness.
`plan.network` knows two levels of bandwidth and no routes. A link has 1 µs; a host has 12.5 GB/s and is a rank. All
groups of a kind communicate at once. Of rounds that are alike one is simulated, of an all-to-all a part.

SimGrid's dragonfly routes by the shortest way. Adaptive routing, which machines have, is shown by sending a message
between two groups in two parts, each by a host of another third group (Valiant's way).

Prints one JSON object a line; `ratio` is plan / SimGrid in seconds.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from hpctrain.plan import Machine
from hpctrain.plan.machine import Device, Link
from hpctrain.plan.network import Group, Network

HOSTS, BANDWIDTH, LATENCY = 1024, 12.5e9, 1e-6
PARTS = 2  # of a message that goes by third groups


class Platform(NamedTuple):
    """SimGrid's topology, and ours: ranks of the second level's units, links that a message passes on each level,
    bandwidth of a unit in those of a host, and the part of it that goes to one other unit. `capacity` is what a link
    of SimGrid's has in bandwidths of a host; `relayed`, whether messages go by third groups."""

    topology: str
    parameters: str
    unit: int
    links: tuple[int, int]
    uplinks: int
    direct: float = 1.0
    capacity: int = 1
    relayed: bool = False


# the dragonflies have 16 groups of 16 routers, 4 hosts a router, and between two groups one link of twice a host's
# bandwidth. Hosts that pass on the messages of others have twice the bandwidth, of which they use half for their own.
PLATFORMS = {
    "fat tree": Platform("FAT_TREE", "2;32,32;1,32;1,1", 32, (2, 4), 32),
    "fat tree, 2:1": Platform("FAT_TREE", "2;32,32;1,16;1,1", 32, (2, 4), 16),
    "dragonfly, shortest way": Platform("DRAGONFLY", "16,2;1,1;16,4;4", 64, (3, 5), 30, 1 / 15),
    "dragonfly, third groups": Platform("DRAGONFLY", "16,1;1,1;16,2;4", 64, (3, 5), 30, 0.5, 2, True),
}


def network(platform):
    """Ours."""
    near, far = (count * LATENCY for count in platform.links)
    links = (
        Link("host", 1, near, BANDWIDTH),
        Link("unit", platform.unit, far, platform.uplinks * BANDWIDTH, platform.direct),
    )
    return Network(Machine("", "", HOSTS, Device(1e9, 1e9, 1.0, 1.0, 0.0), {}, links))


# Collectives of all groups of `size` ranks, `stride` apart: rounds as (how often, messages as (from, to, bytes)) ------


def shift(rank, by, size, stride):
    """The rank `by` places further in the group of this one."""
    span = size * stride
    return rank - rank % span + (rank + by * stride) % span


def everybody(by, nbytes, size, stride):
    return [(rank, shift(rank, by, size, stride), nbytes) for rank in range(HOSTS)]


def ring(nbytes, size, stride):
    """Reduce-scatter and all-gather. Of small parts in rings with short hops and long, the way of one part round the
    ring, as nothing holds it up and it makes few of the long ones."""
    if nbytes / size > 1 << 16 or size <= 32:
        return [(2 * (size - 1), everybody(1, nbytes / size, size, stride))]
    return [(2, [(stride * i, stride * ((i + 1) % size), nbytes / size)]) for i in range(size - 1)]


def halving(nbytes, size, stride):
    """Reduce-scatter by halves, with the nearest first, and all-gather back (Rabenseifner)."""
    powers = [1 << power for power in range(size.bit_length() - 1)]
    return [(2, [(rank, rank ^ (each * stride), nbytes / (2 * each)) for rank in range(HOSTS)]) for each in powers]


def two_level(nbytes, size, stride):
    """Rings of `stride` neighbours, and between them rings of those that have the same part."""
    return ring(nbytes, stride, 1) + ring(nbytes / stride, size, stride)


def bruck(nbytes, size, stride):
    """All-to-all in log2(size) rounds, of half the bytes each."""
    return [(1, everybody(1 << power, nbytes / 2, size, stride)) for power in range(size.bit_length() - 1)]


def in_turns(nbytes, size, stride):
    """All-to-all, everybody's message of the same distance at a time; of the distances, about 20."""
    chosen = range(1, size, size // 16 - 3)
    return [((size - 1) / len(chosen), everybody(by, nbytes / size, size, stride)) for by in chosen]


def at_once(nbytes, size, stride):
    """All-to-all, where messages of all distances are under way together; of the distances, 16."""
    chosen = range(1, size, size // 16)
    messages = [message for by in chosen for message in everybody(by, nbytes / size, size, stride)]
    return [((size - 1) / len(chosen), messages)]


def planned(algorithm, net, nbytes, size, stride):
    """Our seconds."""
    group = Group(size, stride)
    if algorithm is ring:
        return net.reduce_scatter(nbytes, group) + net.all_gather(nbytes, group)
    if algorithm is halving:
        rounds = ((often, *messages[0]) for often, messages in halving(nbytes, size, stride))
        return sum(often * net.message(sent, to - rank) for often, rank, to, sent in rounds)
    if algorithm is two_level:
        return planned(ring, net, nbytes, stride, 1) + planned(ring, net, nbytes / stride, size, stride)
    return net.all_to_all(nbytes, group)


def cases(platform):
    """(algorithm, bytes, ranks of a group, stride)"""
    small, large, unit = 1 << 16, 1 << 28, platform.unit
    for nbytes in (large,) if platform.relayed else (small, large):
        yield from ((ring, nbytes, 1024, 1), (ring, nbytes, 128, 8), (ring, nbytes, 1024 // unit, unit))
        yield from ((halving, nbytes, 1024, 1), (halving, nbytes, 1024 // unit, unit))
        yield two_level, nbytes, 1024 // unit, unit
    if platform.relayed:  # for what goes to one other group; SimGrid takes minutes for each all-to-all in this way
        return
    for algorithm, nbytes in ((bruck, small), (in_turns, large), (at_once, large)):
        yield from ((algorithm, nbytes, 1024, 1), (algorithm, nbytes, 128, 8))


# SimGrid --------------------------------------------------------------------------------------------------------------


def flows(messages, unit, relayed):
    """Messages as the flows that SimGrid has."""
    groups = HOSTS // unit
    for source, target, nbytes in messages:
        near, far = source // unit, target // unit
        if not relayed or near == far:
            yield source, target, nbytes
            continue
        thirds = [(near + by) % groups for by in range(1, groups) if (near + by) % groups != far]
        for part in range(PARTS):
            third = thirds[(PARTS * (source % unit) + part) % len(thirds)] * unit + source % unit
            yield from ((source, third, nbytes / PARTS), (third, target, nbytes / PARTS))


def alone(messages):
    """Seconds that the messages of the busiest host take at least, which has half of its links for them."""
    sent = Counter()
    for source, _, nbytes in messages:
        sent[source] += nbytes
    return max(sent.values()) / BANDWIDTH


def simulated(platform, found):
    """Seconds of each list of rounds."""
    import simgrid

    settings = ("network/model:CM02", "network/TCP-gamma:0", "network/weight-S:0", "network/crosstraffic:0")
    engine = simgrid.Engine(["contention", "--log=root.thres:error", *(f"--cfg={each}" for each in settings)])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "platform.xml"
        path.write_text(
            "<?xml version='1.0'?>\n"
            '<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">\n'
            '<platform version="4.1"><cluster id="all" prefix="" suffix="" speed="1Gf" sharing_policy="SPLITDUPLEX" '
            f'radical="0-{HOSTS - 1}" bw="{platform.capacity * BANDWIDTH}Bps" lat="{LATENCY}s" '
            f'topology="{platform.topology}" topo_parameters="{platform.parameters}"/></platform>'
        )
        engine.load_platform(str(path))
    hosts = {int(host.name): host for host in engine.all_hosts}
    seconds = []

    def main():
        for rounds in found:
            total = 0.0
            for often, messages in rounds:
                begin = engine.clock
                started = [
                    simgrid.Comm.sendto_async(hosts[source], hosts[target], max(1, round(nbytes)))
                    for source, target, nbytes in flows(messages, platform.unit, platform.relayed)
                ]
                simgrid.Comm.wait_all(started)
                total += often * max(engine.clock - begin, alone(messages))
            seconds.append(total)

    simgrid.Actor.create("main", hosts[0], main)
    engine.run()
    return seconds


def lines(name):
    """Of one platform; SimGrid has one in a process."""
    platform = PLATFORMS[name]
    made = list(cases(platform))
    theirs = simulated(platform, [algorithm(*rest) for algorithm, *rest in made])
    for (algorithm, nbytes, size, stride), their in zip(made, theirs):
        ours = planned(algorithm, network(platform), nbytes, size, stride)
        yield {
            "benchmark": "contention", "network": name, "algorithm": algorithm.__name__, "bytes": nbytes, "ranks": size,
            "stride": stride, "simgrid": float(f"{their:.4g}"), "plan": float(f"{ours:.4g}"),
            "ratio": round(ours / their, 3),
        }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=PLATFORMS)
    options = parser.parse_args()
    if options.network:
        for line in lines(options.network):
            print(json.dumps(line), flush=True)
        return 0
    return max(subprocess.run([sys.executable, __file__, "--network", name]).returncode for name in PLATFORMS)


if __name__ == "__main__":
    sys.exit(main())
