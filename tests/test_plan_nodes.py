"""Machines that were measured on several nodes, and those of which one node is known."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from test_plan_learn import figures, written

from hpctrain.cli import main
from hpctrain.config import load_config
from hpctrain.plan import Machine, predict
from hpctrain.plan.network import Group, Network

BETWEEN = [(256, 2e-6), (4096, 8e-6)]


def several(ranks, of_a_node):
    """Figures of a measurement on nodes of four cores."""
    return figures(ranks, cores=4) | {"ranks_of_a_node": of_a_node, "between": BETWEEN}


@pytest.fixture
def nodes(tmp_path):
    """As of 1, 2, 4 and 8 ranks, the latter on two nodes."""
    return Machine.load(written(tmp_path, *(figures(n, cores=4) for n in (1, 2, 4)), several(8, 4)))


def test_the_network_between_nodes(nodes):
    """Four ranks of a node sent at once; tables are of groups in full nodes."""
    near, between = nodes.link
    assert (nodes.node, near.unit, between.unit, nodes.occupied) == (4, 1, 4, ())
    assert (near.bandwidth, between.latency, between.bandwidth) == (4096 / 4e-6, 2e-6, 4 * 4096 / 8e-6)
    assert {(each.ranks, each.at_once) for each in nodes.measured} == {(2, 4), (4, 4)}


def test_more_nodes_do_the_same_work_a_rank_as_fast(nodes):
    four, eight, sixteen = (
        predict(load_config(overrides=[f"grid.data={n}", f"train.batch={4 * n}"]), nodes) for n in (4, 8, 16)
    )
    assert eight.parts["compute"] == sixteen.parts["compute"] == four.parts["compute"]
    assert [eight.seconds, sixteen.seconds] == pytest.approx([four.seconds] * 2, rel=0.1)
    assert nodes.crowded(16) is nodes


def test_tables_are_of_groups_within_a_node(nodes):
    """Two ranks of a node each with one of the next one's share its 2e9 B/s with the other two."""
    net, launches = Network(nodes), 3 * nodes.device.launch
    inside = {(each.operation, each.ranks): each.seconds[-1] for each in nodes.measured}
    assert net.all_gather(4096, Group(2)) == net.all_gather(4096, Group(2, 2)) == launches + inside["all_gather", 2]
    assert net.message(4096, 2) == launches + inside["message", 2]
    assert net.all_gather(4096, Group(2, 4)) == pytest.approx(launches + 2e-6 + 4096 / 2 * 8e-6 / 4096)
    assert net.message(4096, 4) == pytest.approx(launches + 2e-6 + 8e-6)
    plain = Network(replace(nodes, measured=()))
    for name in ("all_gather", "reduce_scatter", "all_reduce", "broadcasts"):
        near, far = ([getattr(by, name)(4096, Group(4, stride)) for by in (net, plain)] for stride in (1, 2))
        assert near[0] != near[1], name
        assert far[0] == far[1], name


def test_nodes_of_one_rank(tmp_path):
    """All that they exchange is between nodes, and they share no cores."""
    alone = figures(1, cores=1), figures(4, cores=1) | {"ranks_of_a_node": 1, "between": BETWEEN, "collectives": []}
    machine = Machine.load(written(tmp_path, *alone))
    assert [link.unit for link in machine.link] == [1, 1]
    assert machine.crowded(4) is machine
    assert Network(machine).message(4096, 1) == pytest.approx(3 * machine.device.launch + 2e-6 + 8e-6)


def test_nodes_that_were_not_filled_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"nothing was measured between nodes: 3 ranks did not fill .* --ntasks-per-n"):
        written(tmp_path, figures(1), several(3, 2) | {"between": []})


def test_a_file_of_one_node_makes_no_plan_of_several(tmp_path, capsys, monkeypatch):
    """In an allocation, or where so many ranks cannot be meant to share its cores; four on two cores can."""
    path, job, out = written(tmp_path, figures(1), figures(2)), tmp_path / "job.toml", tmp_path / "plan.toml"
    job.write_text("[train]\nbatch = 8\n[model]\nlayers = 1\n")
    monkeypatch.delenv("SLURM_NTASKS", raising=False)

    def status(*words):
        return main(["plan", str(job), "--machine", str(path), *words])

    assert status("--predict", "grid.data=4") == 0
    for words in (["--ranks", "5", "-o", str(out)], ["--predict", "grid.data=5"]):
        assert status(*words) == 2
        said = capsys.readouterr().err
        assert "machine here is one node of 2 ranks" in said
        assert "got 5 ranks, more than twice the 2 that were measured at once" in said
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    show = ["--show", "boxes", "grid.pipeline=4", "model.layers=4"]
    for words in (["-o", str(out)], ["--predict", "grid.data=4"], show):
        assert status(*words) == 2
        assert "got 4 ranks on 2 nodes: run `hpctrain machine` in an allocation of two" in capsys.readouterr().err
    assert not out.exists()
    assert status("--predict", "grid.data=2") == 0  # which is not that allocation's
    study = ["--ranks=1,4", "--weak", "--vary=auto", "--only=3", "--machine", str(path)]
    assert main(["scale", str(job), *study]) == 2
    assert "got 4 ranks on 2 nodes" in capsys.readouterr().err


def test_ranks_on_several_nodes_are_not_planned_by_a_file_of_one(tmp_path):
    from hpctrain.plan.for_model import _best

    path = written(tmp_path, figures(1), figures(2))
    grid = SimpleNamespace(size=4, world=SimpleNamespace(nodes=(0, 0, 2, 2), one_node=False))
    with pytest.raises(ValueError, match="machine here is one node of 2 ranks, .* got 4 ranks on 2 nodes"):
        _best(torch.nn.Linear(2, 2), grid, torch.ones(2), path, ())


def test_a_plan_names_its_machine_for_every_folder(tmp_path, monkeypatch):
    """Jobs run in that of the checkout; machines that are shipped keep their names."""
    written(tmp_path, figures(1), figures(2))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_NTASKS", raising=False)
    (tmp_path / "job.toml").write_text("[model]\nlayers = 1\n")
    for given, named in (("here.toml", str(tmp_path / "here.toml")), ("frontier", "frontier")):
        assert main(["plan", "job.toml", "--machine", given, "--ranks", "1"]) == 0
        assert load_config("plan.toml").run.machine == named


def test_groups_of_neighbours_within_a_node():
    from hpctrain.plan import measure

    assert measure.groups((0, 0, 0, 0)) == [2, 4]
    assert measure.groups((0, 0, 3, 3, 3, 3, 3, 3)) == [2]
    assert measure.groups((0, 1, 0, 1)) == []


@pytest.mark.parametrize("nodes", [(0, 0), (0, 1, 0, 1), (0, 0, 0, 3), (0, 0, 2, 2, 4)])
def test_ranks_between_whose_nodes_nothing_is_measured(nodes):
    """Of one node, dealt out in turn, or with a node that is not full."""
    from hpctrain.plan import measure

    grid = SimpleNamespace(size=len(nodes), world=SimpleNamespace(nodes=nodes))
    assert measure.between_nodes(grid, torch.device("cpu")) == []


@pytest.mark.mpi
@pytest.mark.ranks(4)
def test_messages_between_nodes(world, monkeypatch):
    """Both ranks of a node send at once, each to the one in its place on the other, and get an answer."""
    from hpctrain import Grid
    from hpctrain.plan import measure

    monkeypatch.setattr(measure, "SIZES", (1024, 65536))
    monkeypatch.setattr(measure, "in_turn", lambda grid, calls, device: [call() or 1.0 for call in calls])
    peers = []
    for name in ("send", "recv"):
        monkeypatch.setattr(measure.comm, name, lambda part, axis, other: peers.append((part.nbytes, axis, other)))
    with Grid(4) as grid:
        grid.world.nodes = (0, 0, 2, 2)
        assert measure.between_nodes(grid, torch.device("cpu")) == [(1024, 0.5), (65536, 0.5)]
    other = 1 - world.rank // 2
    assert [(nbytes, axis.size, to) for nbytes, axis, to in peers] == [(1024, 2, other)] * 2 + [(65536, 2, other)] * 2


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_messages_between_two_nodes_take_time(world, monkeypatch):
    from hpctrain import Grid
    from hpctrain.plan import computing, measure

    monkeypatch.setattr(measure, "SIZES", (1024, 65536))
    monkeypatch.setattr(computing, "CALLS", 2)
    with Grid(2) as grid:
        grid.world.nodes = (0, 1)
        found = measure.between_nodes(grid, torch.device("cpu"))
    assert [nbytes for nbytes, taken in found if taken > 0] == [1024, 65536]
