"""ranks.json: what every rank of a job spent and moved."""

import json

import pytest
from trained_here import losses, trainer_in

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 4)]

OPTIONS = [
    "model.layers=2", "model.heads=2", "model.width=8", "model.context=16", "model.vocabulary=257", "train.batch=4",
    "train.warmup=1", "run.steps=5", "run.eval_batches=1", "run.checkpoint_minutes=0", "run.name=job",
]  # fmt: skip
GRID = {1: [], 2: ["grid.data=2"], 4: ["grid.data=2", "grid.pipeline=2"]}


def test_every_rank_is_told(world, tmp_path, monkeypatch):
    """Of a job that stopped after its first step, and of one that took the other four; and as often as ranks are
    compared, for a job that is killed."""
    from hpctrain.train.run_folder import RunFolder

    written = []
    write = RunFolder.write_ranks

    def noted(self, about, ranks):
        written.append([rank["steps"] for rank in ranks])
        write(self, about, ranks)

    monkeypatch.setattr(RunFolder, "write_ranks", noted)
    train = trainer_in(world, tmp_path, [*OPTIONS, *GRID[world.size]])
    assert train("run.max_seconds=0.001") == 85
    assert train("--resume", "sanity.check_every=3") == 0
    if world.rank:
        assert not written
        return
    assert {tuple(steps) for steps in written} == {(1,) * world.size, (2,) * world.size, (4,) * world.size}
    content = json.loads((train.folder / "job/ranks.json").read_text())
    ranks = content["ranks"]
    assert [rank["rank"] for rank in ranks] == list(range(world.size))
    assert [rank["steps"] for rank in ranks] == [4] * world.size
    assert len({tuple(rank["coords"].values()) for rank in ranks}) == world.size
    for of in ("time", "bytes_sent", "bytes_received"):
        lines = losses(train.folder / "job", of)
        assert ranks[0][of].keys() == lines[5].keys()
        for axis, total in ranks[0][of].items():
            assert total == pytest.approx(sum(lines[step][axis] for step in range(2, 6)), rel=1e-12)
    sent, received = (sum(sum(rank[of].values()) for rank in ranks) for of in ("bytes_sent", "bytes_received"))
    assert sent == received
    assert (sent > 0) == (world.size > 1)
    assert all(rank["memory"] > 2**26 for rank in ranks)
    assert "MPI" in content["mpi"]
    assert content["grid"].startswith("data ")
