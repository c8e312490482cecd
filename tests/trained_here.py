"""`hpctrain train` on the ranks that run the test."""

import gc
import json

from running import write_text

from hpctrain.cli import main


def trainer_in(world, tmp_path, options):
    """Function (*more options) -> status of `hpctrain train` on all ranks; its attribute `folder` has the runs."""
    folder = world.bcast(tmp_path)
    text, empty = folder / "text.txt", folder / "empty.toml"
    if world.rank == 0:
        write_text(folder)
        empty.touch()
    world.Barrier()

    def run(*more):
        status = main(["train", str(empty), *options, f"run.out={folder}/runs", f"data.text={text}", *more])
        gc.collect()  # with the job goes its lease on the run folder
        world.Barrier()
        return status

    run.folder = folder / "runs"
    return run


def losses(folder, of="loss"):
    """{step: loss, or another member of the metrics} of the steps that have one."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record[of] for record in map(json.loads, lines) if of in record}
