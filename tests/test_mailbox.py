"""Letters between ranks that do not know what comes, buffered by MPI or not at all."""

import pytest
import torch

from hpctrain import Grid
from hpctrain.comm import Mailbox

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 4)]

PAYLOADS = [
    None, torch.arange(6.0).view(2, 3), torch.tensor(7, dtype=torch.int64), torch.zeros(0, 5, dtype=torch.bfloat16),
    torch.ones(300_000, dtype=torch.float64), torch.tensor([[[True]]]),
]  # fmt: skip


@pytest.mark.parametrize("synchronous", [False, True])
def test_all_write_to_all_before_anybody_reads(world, synchronous):
    grid = Grid(tensor=world.size)
    grid.transport.synchronous = synchronous
    axis = grid.tensor.x
    mailbox, got = Mailbox(axis), []
    for number in range(3 * len(PAYLOADS)):
        for other in range(world.size):
            if other != world.rank:
                mailbox.post(other, (world.rank, number, -5), PAYLOADS[number % len(PAYLOADS)])
    expected = 3 * len(PAYLOADS) * (world.size - 1)
    while len(got) < expected:
        got += mailbox.recv_any()
    mailbox.finish()
    assert mailbox.poll() == []
    for source in set(range(world.size)) - {world.rank}:
        mine = sorted((letter for letter in got if letter.numbers[0] == source), key=lambda letter: letter.numbers)
        assert [letter.numbers for letter in mine] == [(source, n, -5) for n in range(3 * len(PAYLOADS))]
        for number, letter in enumerate(mine):
            sent = PAYLOADS[number % len(PAYLOADS)]
            assert (letter.payload is None) == (sent is None)
            if sent is not None:
                assert letter.payload.dtype == sent.dtype
                assert torch.equal(letter.payload, sent)


def test_a_payload_lives_until_it_has_left(world):
    """Not received before it is posted, freed and its memory used again."""
    if world.size == 1:
        return
    grid = Grid(tensor=world.size)
    grid.transport.synchronous = True
    mailbox, axis = Mailbox(grid.tensor.x), grid.tensor.x
    if axis.rank == 0:
        for number in range(20):
            mailbox.post(1, (number,), torch.full((200_000,), float(number)))
            mailbox.poll()
        world.Barrier()
        mailbox.finish()
    else:
        world.Barrier()
        got = []
        while axis.rank == 1 and len(got) < 20:
            got += mailbox.recv_any()
        assert all((letter.payload == letter.numbers[0]).all() for letter in got)


def test_what_cannot_be_sent(line):
    mailbox = Mailbox(line)
    with pytest.raises(ValueError, match="at most 20 numbers, got 21"):
        mailbox.post(0, range(21))
    with pytest.raises(ValueError, match="complex64 with 1 dims cannot be sent"):
        mailbox.post(0, (), torch.zeros(1, dtype=torch.complex64))
