"""How many cores this process may use, and how the ranks of a node share them.

A core is a physical one, as Open MPI counts them: two hardware threads of a core compute no more than one. Only those
within the process's affinity count, and no more than the CPU quota of its container.

    python3 -IS hpctrain/cores.py [RANKS] [THREADS]     "CORES THREADS BINDING", for jobs/mpirun.sh; 0: a rank a core
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable


class Cores:
    """The cores of this node that a process may use.

    Attributes: `packages`: the number of cores in each package (socket) with any; `hardware_threads`; `quota`: CPUs
    that the container may keep busy, None where it has no limit; `pinned`: whether the process may run on some only of
    the cores that the system allows its container, as under `taskset`.
    """

    def __init__(
        self, packages: Iterable[int], hardware_threads: int, quota: float | None = None, pinned: bool = False
    ):
        self.packages = tuple(packages)
        self.hardware_threads = hardware_threads
        self.quota = quota
        self.pinned = pinned

    @property
    def count(self) -> int:
        """Cores that can be kept busy; at least 1."""
        cores = sum(self.packages)
        return cores if self.quota is None else min(cores, max(1, int(self.quota)))

    @property
    def free(self) -> bool:
        """Whether a launcher may choose cores for the ranks by itself.

        Open MPI takes the first cores that the container allows. Under a narrower affinity those are others' cores, and
        under a quota every container on the node would take the same ones.
        """
        return not self.pinned and self.count == sum(self.packages)

    def share(self, ranks: int, threads: int | None = None) -> tuple[int, str]:
        """How many threads each of the node's ranks runs, and how it is bound to cores.

        Args:
            threads: those that were asked for.

        Returns:
            (threads, "bound") where each rank is bound to as many cores as it has threads, all in one package, since
            Open MPI refuses others; (threads, "unbound") where they move freely; (threads, "oversubscribed") where
            there are more ranks than cores.

        >>> two_sockets = Cores([8, 8], 32)
        >>> [two_sockets.share(ranks) for ranks in (1, 2, 3, 16, 17)]
        [(16, 'unbound'), (8, 'bound'), (4, 'bound'), (1, 'bound'), (1, 'oversubscribed')]
        >>> two_sockets.share(2, threads=9), two_sockets.share(1, threads=1)
        ((9, 'unbound'), (1, 'bound'))
        """
        if ranks > self.count:
            return threads or 1, "oversubscribed"
        if threads is None:
            threads = self.count // ranks
            if self.free and ranks >= len(self.packages):  # fewer ranks use all packages only when they span them
                while not self._fit(ranks, threads):
                    threads -= 1
        return threads, "bound" if self.free and self._fit(ranks, threads) else "unbound"

    def _fit(self, ranks: int, threads: int) -> bool:
        return sum(cores // threads for cores in self.packages) >= ranks

    def describe(self) -> str:
        """
        >>> Cores([4], 8).describe()
        '4 cores (8 hardware threads)'
        >>> Cores([8], 16, quota=2.5).describe()
        '2 cores (the container may use 2.5 CPUs of 8 cores)'
        >>> Cores([3], 3, pinned=True).describe()
        '3 cores (3 hardware threads; its affinity keeps this process to them)'
        """
        cores = f"{self.count} core" + "s" * (self.count > 1)
        if self.count < sum(self.packages):
            return f"{cores} (the container may use {self.quota:g} CPUs of {sum(self.packages)} cores)"
        threads = f"{self.hardware_threads} hardware thread" + "s" * (self.hardware_threads > 1)
        return f"{cores} ({threads}" + "; its affinity keeps this process to them" * self.pinned + ")"


def find(root: str = "/", affinity: set[int] | None = None) -> Cores:
    """The cores of this process.

    Args:
        root: below which `proc` and `sys` lie.
        affinity: the hardware threads that it may run on; those of this process by default.
    """
    if affinity is None:
        affinity = os.sched_getaffinity(0)
    packages: dict[int, set[int]] = {}
    for core, package in identities(affinity, root):
        packages.setdefault(package, set()).add(core)
    allowed = _allowed(root)
    pinned = allowed is not None and not allowed <= affinity
    return Cores([len(cores) for _, cores in sorted(packages.items())], len(affinity), _quota(root), pinned)


def processor(root: str = "/") -> str:
    """Its name, as the kernel has it."""
    with contextlib.suppress(OSError), open(os.path.join(root, "proc/cpuinfo"), encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return os.uname().machine


def identities(affinity: set[int], root: str = "/") -> list[tuple[int, int]]:
    """(core, package) of each hardware thread, both named by their first. One that /sys does not know is a core."""
    named = []
    for thread in sorted(affinity):
        topology = os.path.join(root, f"sys/devices/system/cpu/cpu{thread}/topology")
        core = _numbers(os.path.join(topology, "thread_siblings_list")) or {thread}
        package = _numbers(os.path.join(topology, "core_siblings_list")) or {0}
        named.append((min(core), min(package)))
    return named


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="ascii") as file:
            return file.read().strip()
    except (OSError, UnicodeDecodeError):
        return None


def _numbers(path: str) -> set[int] | None:
    """Those of a list such as 0-3,8; None where there is no such file, or an empty one."""
    text = _read(path)
    numbers: set[int] = set()
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers or None


def _groups(root: str, controller: str) -> list[str]:
    """The folders of this process's control group and of those above it, the innermost first.

    In a container the path may be the host's, while the mount begins at the container: folders that there are not are
    the caller's to skip.
    """
    folders = []
    for line in (_read(os.path.join(root, "proc/self/cgroup")) or "").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            mounts = ["", "unified"]
        elif controller in controllers.split(","):
            mounts = [controllers, controller]
        else:
            continue
        while True:
            folders += [os.path.join(root, "sys/fs/cgroup", mount, path.lstrip("/")) for mount in mounts]
            if path in ("/", ""):
                break
            path = os.path.dirname(path)
    return folders


def _allowed(root: str) -> set[int] | None:
    """The hardware threads that are online and that the control group, if any, allows."""
    online = _numbers(os.path.join(root, "sys/devices/system/cpu/online"))
    for folder in _groups(root, "cpuset"):
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
            if threads := _numbers(os.path.join(folder, name)):
                return threads & online if online else threads
    return online


def _quota(root: str) -> float | None:
    """CPUs that the control group may keep busy: the least over it and those above."""
    quotas = []
    for folder in _groups(root, "cpu"):
        quota: str | None
        period: str | None
        if limit := _read(os.path.join(folder, "cpu.max")):  # version 2: "200000 100000", or "max 100000"
            quota, period = limit.split()
        else:
            quota, period = (_read(os.path.join(folder, f"cpu.cfs_{name}_us")) for name in ("quota", "period"))
        if quota and period and quota not in ("max", "-1"):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


if __name__ == "__main__":
    found = find()
    ranks, threads = (int(argument or 0) for argument in (sys.argv[1:] + [""] * 2)[:2])
    print(found.count, *found.share(ranks or found.count, threads or None))
