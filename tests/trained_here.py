"""`hpctrain train` on the ranks that run the test."""

import gc
import json

import torch
from running import write_text

from hpctrain.cli import main
from hpctrain.train.learning_rate import learning_rate


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


def losses_by_hand(weights, loss, batches, lr):
    """{step: loss} of AdamW in plain torch, as `hpctrain train` has it with a warm-up of one step and no clipping."""
    matrices, vectors = ([w for w in weights.values() if (w.dim() > 1) == large] for large in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer, found = torch.optim.AdamW(groups, betas=(0.9, 0.95)), {}
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, len(batches), lr, 1)
        value = loss(batch)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        found[step + 1] = value.item()
    return found
