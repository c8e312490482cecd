"""Bytes that mixtures of experts move: those that follow from which experts each token goes to."""

import pytest
import torch
from experts_checks import block_of, divided, grids, mixture, tokens_on
from layer_checks import whole

from hpctrain.layers.experts import dispatch_choice as ways
from hpctrain.shard import split

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3, 4)]

SEQUENCES, LENGTH, FEATURES, EXPERTS, TOP_K = 4, 5, 8, 6, 2  # features that y divides
ITEM = NUMBER = 8  # bytes of a float64, and of a count


def whole_row_grids(world, way):
    """Those whose ranks all have whole rows as they come, so that `block_of` says which."""
    found = [*grids(world.size, way), *divided(world.size, way)]
    return [g for g in found if g.tensor.y.size == 1 and g.expert.size > 1]


def expected(grid, chosen, dispatch, way):
    """{operation: bytes received along expert}, forward and backward, of the ranks' (tokens, top_k) experts."""
    n, me, parts = grid.expert.size, grid.expert.rank, grid.expert_tensor
    groups = [range(EXPERTS)[split(EXPERTS, n // parts, g)] for g in range(n // parts)]
    holders = [[r for r in range(n) if e in groups[r // parts]] for e in range(EXPERTS)]
    local, pairs_of_token = groups[me // parts], TOP_K * parts
    tokens = [len(each) for each in chosen]
    pairs = [[[r for e in token for r in holders[e]] for token in of_rank] for of_rank in chosen]
    here = sum(token.count(me) for r, of_rank in enumerate(pairs) if r != me for token in of_rank)
    away = sum(len(token) - token.count(me) for token in pairs[me])
    copies_here = sum(me in token for r, of_rank in enumerate(pairs) if r != me for token in of_rank)
    copies_away = sum(len(set(token) - {me}) for token in pairs[me])
    others = sum(tokens) - tokens[me]
    mine = len(local)
    row, weights = FEATURES * ITEM, ITEM
    # x and the output's gradient come here, the output and x's gradient come back; a weight comes, its gradient back
    by_pair = 2 * (here + away) * row + (here + away) * weights
    if dispatch == "all_to_all" and way == "messages":
        return {"all_to_all": by_pair + (n - 1) * mine * NUMBER}
    if dispatch == "all_to_all":
        return {"all_to_all": by_pair, "all_gather": others * pairs_of_token * 4 + (n - 1) * NUMBER}
    if dispatch == "once":
        by_copy = 2 * (copies_here + copies_away) * row + (here + away) * weights
        return {"all_to_all": by_copy + here * 4 + (n - 1) * (mine + 1) * NUMBER}
    gathered = others * (2 * row + pairs_of_token * (weights + 4)) + (n - 1) * NUMBER
    return {"all_gather": gathered, "reduce_scatter": (n - 1) * tokens[me] * (2 * row + pairs_of_token * weights)}


@pytest.mark.parametrize("way", ["shared memory", "messages"])
@pytest.mark.parametrize("dispatch", ["all_to_all", "once", "gather"])
def test_bytes_are_those_of_the_routing(world, way, dispatch):
    x = whole((SEQUENCES * LENGTH, FEATURES), "x", False)
    for grid in whole_row_grids(world, way):
        layer = mixture(grid, features=FEATURES, experts=EXPERTS, top_k=TOP_K, dispatch=dispatch)
        tokens = tokens_on(grid, SEQUENCES, LENGTH)
        block = block_of(grid, tokens, x).clone().requires_grad_()
        chosen = grid.expert.comm.allgather(layer.router(block, tokens).experts.tolist())
        grid.transport.traffic.clear()
        layer(block, tokens).sum().backward()
        moved = {
            name: each["received"] for (axis, name), each in grid.transport.traffic.table().items() if axis == "expert"
        }
        assert moved == expected(grid, chosen, dispatch, way), grid.describe()
        totals = [grid.transport.traffic.total(what, ("expert",)) for what in ("sent", "received")]
        assert len({sum(each) for each in zip(*grid.expert.comm.allgather(totals))}) == 1


@pytest.mark.ranks(2, 4)
def test_the_way_that_moves_least_is_taken(world):
    x = torch.zeros(1, 256)
    (shared,) = [g for g in grids(world.size) if g.replica.size == world.size == g.expert.size]
    (by_messages,) = [g for g in grids(world.size, "messages") if g.replica.size == world.size == g.expert.size]
    assert ways.choose(shared.expert, x, "auto", 2, 8) is ways.InPlace
    assert ways.choose(shared.copies, x, "once", 2, 8) is ways.Dispatch  # one rank
    assert ways.choose(by_messages.expert, x, "auto", 2, 8) is ways.Once
    assert ways.choose(by_messages.expert, x, "auto", 1, 8) is ways.AllToAll
    assert ways.choose(by_messages.expert, x, "auto", 8, 8) is ways.Gather
    assert ways.choose(by_messages.expert, x, "all_to_all", 8, 8) is ways.AllToAll


@pytest.mark.ranks(2)
def test_formula_in_cases_that_are_known(world):
    """All experts: every token goes to every rank once. One: once is all to all."""
    every = ways.elements_received(4, 8, 8, 100)
    assert every["once"] == 3 * (100 + 2 * 1.25)
    assert every["gather"] == 3 * (100 + 8 * 1.25)
    assert every["all_to_all"] == 6 * 101
    one = ways.elements_received(4, 1, 8, 100)
    assert one["once"] == pytest.approx(one["all_to_all"] + 3 / 4 / 4)
    halves = ways.elements_received(4, 1, 8, 100, 2)  # one expert, on two of the ranks
    assert halves["all_to_all"] == 2 * one["all_to_all"]
    assert halves["once"] == pytest.approx(2 * one["once"])
    assert ways.elements_received(4, 2, 8, 100, 4)["once"] == 3 * (100 + 2 * 1.25)  # each token goes to every rank once


@pytest.mark.ranks(2, 4)
def test_in_place_ranks_wait_for_each_other_five_times(world):
    """For who chose which experts; for tokens with their weights, and results; for the gradients of both."""
    (grid,) = [g for g in grids(world.size) if g.replica.size == world.size == g.expert.size]
    layer, tokens = mixture(grid), tokens_on(grid, SEQUENCES, LENGTH)
    block = block_of(grid, tokens, whole((SEQUENCES * LENGTH, 7), "x", False)).clone().requires_grad_()
    grid.transport.traffic.clear()
    layer(block, tokens).sum().backward()
    calls = {name: each["calls"] for (axis, name), each in grid.transport.traffic.table().items() if axis == "expert"}
    assert calls == {"all_gather": 1, "all_to_all": 4}
