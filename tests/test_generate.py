"""Generation draws the same text on every grid, and the text that the weights give."""

import functools

import pytest
import reference
import torch
from training_checks import fitting

from hpctrain import Grid, RngKey
from hpctrain.grid_shape import all_grids
from hpctrain.models.gpt2 import GPT2, GPT2Shape
from hpctrain.models.mixtral import Mixtral, MixtralShape
from hpctrain.train.generate import generate

pytestmark = pytest.mark.mpi

SHAPE = GPT2Shape(layers=9, width=15, heads=3, context=8, vocabulary=23)
PROMPT, COUNT, KNOWN = [3, 1], 10, 20  # longer than the context; the last three words of the vocabulary are padding


def grids(ranks):
    cut = {
        2: [((1, 2, 1), 1, (1, 1, 1)), ((1, 1, 2), 1, (1, 1, 1))],
        4: [((1, 2, 2), 1, (1, 1, 1)), ((1, 4, 1), 1, (1, 1, 1)), ((1, 1, 2), 2, (1, 1, 1)), ((1, 2, 1), 1, (1, 2, 1))],
        8: [((1, 2, 1), 2, (2, 1, 1))],
    }  # fmt: skip
    return all_grids(ranks)[:: 1 if ranks <= 4 else 6] + cut.get(ranks, [])


def sample(grid, shape, temperature):
    return generate(
        GPT2(grid, shape, key=RngKey(3), dtype=torch.float64), grid, PROMPT, COUNT, KNOWN, RngKey(8), temperature
    )


@functools.cache
def greedy(shape):
    """The likeliest words by the reference, one after the other."""
    from mpi4py import MPI

    weights = dict(GPT2(Grid(comm=MPI.COMM_SELF), shape, key=RngKey(3), dtype=torch.float64).named_parameters())
    ids = list(PROMPT)
    with torch.no_grad():
        for _ in range(COUNT):
            logits = reference.gpt2_logits(weights, torch.tensor([ids[-shape.context :]]), shape.layers, shape.heads)
            ids.append(int(logits.reshape(-1, shape.vocabulary)[-1, :KNOWN].argmax()))
    return ids[len(PROMPT) :]


def test_the_coldest_text_is_the_likeliest(world):
    for data, pipeline, tensor in grids(world.size):
        shape = fitting(SHAPE, pipeline)
        assert sample(Grid(data, pipeline, tensor), shape, temperature=1e-9) == greedy(shape)


def test_all_of_the_context_is_seen(world):
    """A window one short would lack a token: with weights this large, the likeliest word then is another one."""
    from mpi4py import MPI

    grid, prompt = Grid(comm=MPI.COMM_SELF), list(range(SHAPE.context))
    model = GPT2(grid, SHAPE, key=RngKey(3), dtype=torch.float64)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(30)

        def likeliest(ids):
            weights = dict(model.named_parameters())
            logits = reference.gpt2_logits(weights, torch.tensor([ids]), SHAPE.layers, SHAPE.heads)
            return int(logits.reshape(-1, SHAPE.vocabulary)[-1, :KNOWN].argmax())

        seen = []
        for first in range(8):  # the oldest token of the window decides now and then
            ids = [(first * 5 + token) % KNOWN for token in prompt]
            assert generate(model, grid, [9, *ids], 1, KNOWN, RngKey(8), 1e-9) == [likeliest(ids)]
            seen.append(likeliest(ids) != likeliest(ids[1:]))
    assert any(seen)


def test_warm_text_does_not_depend_on_the_grid(world):
    from mpi4py import MPI

    for pipeline in {pipeline for _, pipeline, _ in grids(world.size)}:
        shape = fitting(SHAPE, pipeline)
        alone = sample(Grid(comm=MPI.COMM_SELF), shape, temperature=1.0)
        assert set(alone) <= set(range(KNOWN))
        assert alone != greedy(shape)
        for data, _, tensor in [grid for grid in grids(world.size) if grid[1] == pipeline]:
            assert sample(Grid(data, pipeline, tensor), shape, temperature=1.0) == alone


MIXTRAL = MixtralShape(
    layers=3, width=15, heads=6, context=8, vocabulary=23, kv_heads=3, ffn=21, head_width=6, rope_base=10.0,
    experts=5, top_k=2, expert_ffn=7,
)  # fmt: skip


@pytest.mark.ranks(2, 4)
def test_experts_on_several_ranks(world, monkeypatch):
    """Ranks that would draw another token, as by rounding, and one that ends the text, take the first one's."""
    from mpi4py import MPI

    def text(grid, **options):
        model = Mixtral(grid, MIXTRAL, key=RngKey(3), dtype=torch.float64)
        return generate(model, grid, PROMPT, COUNT, KNOWN, RngKey(8), 1.0, **options)

    alone = text(Grid(comm=MPI.COMM_SELF))
    end = next(token for token in range(KNOWN) if token not in alone)
    for data, pipeline, tensor in [grid for grid in grids(world.size) if grid[1] <= MIXTRAL.layers][4::5]:
        ranks = world.size // pipeline
        with Grid(data, pipeline, tensor, ranks, 1 + (ranks == 4)) as grid, monkeypatch.context() as changed:
            assert text(grid) == alone
            if grid.pipeline.rank < pipeline - 1 or grid.expert.rank > 0:
                changed.setattr("hpctrain.train.generate.chosen_by", lambda *_: end)
            assert text(grid, end=end) == alone


END = 4
FEW = fitting(SHAPE, 2)  # no grid of these has more stages


@functools.cache
def greedy_in_documents(documents):
    """The likeliest words after prompts of two documents, of one that has ended, and of parts of one."""
    from mpi4py import MPI

    weights = dict(GPT2(Grid(comm=MPI.COMM_SELF), FEW, key=RngKey(3), dtype=torch.float64).named_parameters())
    return [continued(weights, prompt, documents) for prompt in PROMPTS]


PROMPTS = [[3, 1, END, 7], [3, END], [7, 5, 2]]


def continued(weights, prompt, documents):
    """Where documents see themselves alone, an end among the words begins another one."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(SHAPE.context - len(prompt)):
            logits = reference.gpt2_logits(
                weights, torch.tensor([ids]), FEW.layers, FEW.heads, end=END if documents else None
            )
            ids.append(int(logits.reshape(-1, SHAPE.vocabulary)[-1, :KNOWN].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("documents", [True, False])
def test_documents_of_a_prompt(world, documents):
    if world.rank == 0:
        assert greedy_in_documents(True) != greedy_in_documents(False)
    for data, pipeline, tensor in grids(world.size)[-2:]:
        grid = Grid(data, pipeline, tensor)
        model = GPT2(grid, FEW, key=RngKey(3), dtype=torch.float64)
        found = [
            generate(model, grid, prompt, SHAPE.context - len(prompt), KNOWN, RngKey(8), 0.0,
                     documents=END if documents else None)
            for prompt in PROMPTS
        ]  # fmt: skip
        assert found == greedy_in_documents(documents)
