"""The bytes that the ledger counts equal the formula for local SGD and parameter servers as well."""

import dataclasses

import pytest
from traffic_checks import EVEN, counted
from training_checks import in_turn

from hpctrain import Grid, models
from hpctrain.choices import DEFAULT_OVERLAP
from hpctrain.plan import step_traffic

COSTS = models.get("gpt2").costs

AVERAGED = {
    2: [(2, 1, 1), ((1, 2, 1), 1, 1)],
    4: [(4, 1, 1), (2, 2, 1), (2, 1, (1, 1, 2)), (2, 1, (2, 1, 1)), ((2, 1, 2), 1, 1)],
    8: [((2, 2, 1), 2, 1)],
}  # fmt: skip


@pytest.mark.mpi
@pytest.mark.ranks(*AVERAGED)
@pytest.mark.parametrize(("every", "state"), [(1, False), (1, True), (2, True), (0, False)])
def test_ledger_equals_formula_with_local_sgd(world, case, every, state):
    """Adam's two moments are averaged with the weights; of more steps than one, the first averages nothing."""
    averaged = (3 if state else 1) if every == 1 else 0
    for data, pipeline, tensor in in_turn(AVERAGED, world.size, case):
        grid, shape = Grid(data, pipeline, tensor), dataclasses.replace(EVEN, layers=2)
        received, sent = counted(
            grid, shape, 16, 2, overlap=DEFAULT_OVERLAP, method="local_sgd", average_every=every, average_state=state
        )
        expected = step_traffic(
            COSTS(shape), grid.shape, 16, 2, rank=grid.pipeline.rank, method="local_sgd", averaged=averaged
        )
        assert received == pytest.approx(expected, abs=0), grid.shape
        assert sent["data"] == received["data"]


SERVED = {
    2: [(2, 1, 1, 1)], 4: [(4, 1, 1, 2), (2, 2, 1, 1), (2, 1, (1, 1, 2), 1), (2, 1, (2, 1, 1), 1)],
    8: [(4, 2, 1, 2), (8, 1, 1, 4)],
}  # fmt: skip


@pytest.mark.mpi
@pytest.mark.ranks(*SERVED)
@pytest.mark.parametrize("staleness", [0, 1])
def test_ledger_equals_formula_with_parameter_servers(world, staleness):
    """Of workers and of servers, who have no rows."""
    alone = [place for place in SERVED[world.size] if place[1:3] == (1, 1)]
    for data, pipeline, tensor, servers in alone if staleness else SERVED[world.size]:
        grid, shape = Grid(data, pipeline, tensor), dataclasses.replace(EVEN, layers=2)
        how = {"method": "parameter_server", "servers": servers, "staleness": staleness}
        received, _ = counted(grid, shape, 16, 2, overlap=DEFAULT_OVERLAP, **how)
        serves = grid.replica.rank >= data - servers
        expected = step_traffic(COSTS(shape), grid.shape, 16, 2, rank=grid.pipeline.rank, serves=serves, **how)
        assert received == pytest.approx(expected, abs=0), (grid.shape, serves)
