"""Who writes a run folder: a file beside it that one job has made, and refreshes for as long as it lives.

No lock of the file system's, as parallel ones are often mounted without (Lustre: `flock`), or lock within a node only
(`localflock`), and keep the locks of nodes that have died. That of two jobs one makes a file (O_EXCL) holds everywhere.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import subprocess
import threading
import time
import uuid
import weakref
from pathlib import Path

REFRESH, STALE = 30.0, 300.0  # seconds

log = logging.getLogger("hpctrain")


class Lease:
    """The right to write a folder, until it is `free`d, garbage, or this process ends.

    The file is .NAME.lease.N beside the folder; the largest N counts, and the next holder makes N + 1, so that of two
    who take over one succeeds. One that its holder gave back, or can no longer refresh, is taken over:

        the holder was a process on this node, and is no more                     at once
        it was this job of the batch system, which has been requeued              at once
        it was another job of Slurm's, which Slurm says has ended                 at once
        it has not been refreshed for STALE seconds, by the file system's clock   then

    Raises:
        ValueError: when another job has it; says who, since when, and what to do.
        OSError: when the file cannot be made, or one that is there not read.
    """

    def __init__(self, folder: Path):
        self.folder, self._token = folder, uuid.uuid4().hex
        self._checked = 0.0
        self.path = self._take()
        stop = threading.Event()
        self.free = weakref.finalize(self, _free, self.path, self._token, stop)
        threading.Thread(target=_refresh, args=(self.path, stop), name="hpctrain lease", daemon=True).start()

    def check(self) -> None:
        """Raise RuntimeError where another job has taken over: what it writes must not be mixed with ours. Looks at
        most once in REFRESH seconds; a lease that cannot be read, which says nothing of whose it is, is a warning."""
        now = time.monotonic()
        if now < self._checked + REFRESH:
            return
        try:
            newest = _newest(self.folder)
            holder = _read(newest[1]) if newest else None
        except OSError as error:
            log.warning("WARNING: %s: its lease is looked at again in %.0f s: %s", self.folder, REFRESH, error)
            holder = {}
        if holder is None or holder.get("token", self._token) != self._token:
            other = _describe(holder) if holder else "somebody deleted its lease"
            raise RuntimeError(
                f"{self.folder} was taken over ({other}), as this job had not refreshed its lease for {STALE:.0f} s"
            )
        self._checked = now

    def _take(self) -> Path:
        while True:
            newest = _newest(self.folder)
            number = newest[0] + 1 if newest else 1
            if newest:
                self._judge(newest[1])
            path = self.folder.with_name(f".{self.folder.name}.lease.{number}")
            draft = path.with_name(f"{path.name}.{self._token}")
            draft.write_text(json.dumps({"token": self._token, **_self()}) + "\n", encoding="utf-8")
            try:
                os.link(draft, path)  # complete at once, and an error where it exists
            except FileExistsError:
                continue
            except OSError:  # a file system without links
                if not _made_exclusively(path, draft.read_text(encoding="utf-8")):
                    continue
            finally:
                draft.unlink()
            latest = _newest(self.folder)
            if latest is not None and latest[1] == path:
                for other, old in _leases(self.folder):
                    if other < number:
                        old.unlink(missing_ok=True)
                return path
            path.unlink(missing_ok=True)

    def _judge(self, path: Path) -> None:
        """Return where the lease may be taken over; says why, but where it was given back."""
        with contextlib.suppress(FileNotFoundError):
            holder = _read(path)
            if holder.get("free"):
                return
            age = self._age(path)
            if reason := _ended(holder) or (age > STALE and f"not refreshed for {age:.0f} s"):
                log.warning("WARNING: %s: taken over from %s: %s", self.folder, _describe(holder), reason)
                return
            raise ValueError(
                f"another job is writing {self.folder} ({_describe(holder)}, seen {max(0, age):.0f} s ago); wait for "
                f"it, choose another run.name, or, if it has died, wait until its lease is {STALE:.0f} s old, or "
                f"delete {path}"
            )

    def _age(self, path: Path) -> float:
        """Seconds since the lease was refreshed, by one clock: the file system's."""
        probe = path.with_name(f"{path.name}.{self._token}")
        probe.touch()
        try:
            return probe.stat().st_mtime - path.stat().st_mtime
        finally:
            probe.unlink()


def batch_job() -> str | None:
    """What the batch system calls this job, the same when it is requeued."""
    environ = os.environ
    if "SLURM_ARRAY_TASK_ID" in environ and "SLURM_ARRAY_JOB_ID" in environ:
        return f"Slurm job {environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    names = {"SLURM_JOB_ID": "Slurm", "PBS_JOBID": "PBS", "LSB_JOBID": "LSF"}
    return next((f"{system} job {environ[name]}" for name, system in names.items() if environ.get(name)), None)


def _leases(folder: Path) -> list[tuple[int, Path]]:
    pattern = re.compile(re.escape(f".{folder.name}.lease.") + r"(\d+)")
    found = ((pattern.fullmatch(name), folder.with_name(name)) for name in os.listdir(folder.parent))
    return sorted((int(match[1]), path) for match, path in found if match)


def _newest(folder: Path) -> tuple[int, Path] | None:
    return next(reversed(_leases(folder)), None)


def _made_exclusively(path: Path, text: str) -> bool:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        return False
    return True


def _read(path: Path) -> dict:
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return {}  # not yet written
    return holder if isinstance(holder, dict) else {}


def _self() -> dict:
    pid = os.getpid()
    return {
        "host": socket.gethostname(), "pid": pid, "node": _node(), "started": _started(pid), "job": batch_job(),
        "restarts": int(os.environ.get("SLURM_RESTART_COUNT") or 0),
    }  # fmt: skip


def _node() -> str | None:
    """Names the processes among which a process id means one: this boot of this machine, this container."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + " " + os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def _started(pid: int) -> str | None:
    """When a process was started, in ticks; None where there is none of that id."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _ended(holder: dict) -> str:
    """Why the holder is known to have ended, if it is."""
    if holder.get("node") and holder["node"] == _node():
        gone = _started(holder.get("pid", 0)) != holder.get("started")
        return "its process has ended" if gone else ""
    job = holder.get("job")
    if job and job == batch_job():
        return "it was this job, before it was requeued" if holder.get("restarts", 0) < _self()["restarts"] else ""
    if job and job.startswith("Slurm job "):
        try:
            listed = subprocess.run(
                ["squeue", "--noheader", "--format=%T", f"--jobs={job.split()[-1]}"], capture_output=True, text=True,
                timeout=20,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired):
            return ""
        if (listed.returncode == 0 and not listed.stdout.strip()) or "Invalid job id" in listed.stderr:
            return "Slurm says that it has ended"
    return ""


def _describe(holder: dict) -> str:
    job = f", {holder['job']}" if holder.get("job") else ""
    return f"process {holder.get('pid', 'unknown')} on {holder.get('host', 'an unknown host')}{job}"


def _refresh(path: Path, stop: threading.Event) -> None:
    while not stop.wait(REFRESH):
        with contextlib.suppress(OSError):  # seen by `check`
            os.utime(path)


def _free(path: Path, token: str, stop: threading.Event) -> None:
    stop.set()
    with contextlib.suppress(OSError):
        holder = _read(path)
        if holder.get("token") == token:
            draft = path.with_name(f"{path.name}.{token}")
            draft.write_text(json.dumps(holder | {"free": True}) + "\n", encoding="utf-8")
            draft.replace(path)
