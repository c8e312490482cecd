"""What a rank sees of MPI and its devices; `hpctrain doctor` starts two of them in a job of their own."""

from __future__ import annotations

import json
import os


def main() -> None:
    from mpi4py import MPI

    from hpctrain.comm import decide_cuda_aware, local_device
    from hpctrain.grid import Grid

    world = MPI.COMM_WORLD
    levels = {
        MPI.THREAD_SINGLE: "single", MPI.THREAD_FUNNELED: "funneled", MPI.THREAD_SERIALIZED: "serialized",
        MPI.THREAD_MULTIPLE: "multiple",
    }  # fmt: skip
    import torch

    from hpctrain import cores

    transport = decide_cuda_aware(Grid(data=world.size), local_device("auto", world))
    facts = {
        "size": world.size,
        "library": MPI.Get_library_version().split("\n")[0].strip("\0 "),
        "thread_level": levels[MPI.Query_thread()],
        "devices": torch.cuda.device_count(),
        "transport": transport,
        "cupy": None,
        "cores": [len(set(named)) for named in world.allgather(cores.identities(os.sched_getaffinity(0)))],
        "threads": os.environ.get("OMP_NUM_THREADS"),
    }
    try:
        import cupy

        facts["cupy"] = cupy.__version__
    except Exception:  # a broken CuPy is reported as none
        pass
    if world.rank == 0:
        print("hpctrain" + json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
