"""The data of a job: what cannot be used is refused on all ranks, in the same words."""

import pytest

from hpctrain import RngKey
from hpctrain.config import load_config
from hpctrain.data import pack
from hpctrain.train.training_data import open_data

pytestmark = pytest.mark.mpi


@pytest.fixture
def folder(world, tmp_path_factory):
    path = tmp_path_factory.mktemp("data") if world.rank == 0 else None
    if path:
        (path / "a.txt").write_text("hello world\n" * 20)
        (path / "b.txt").write_text("something else\n" * 20)
        pack([str(path / "a.txt")], path / "a.h5")
    return world.bcast(path)


def opened(world, folder, *overrides):
    config = load_config(overrides=[f"run.out={folder}", "model.context=8", *overrides])
    return open_data(config, world, RngKey(0))


def test_refused_on_all_ranks(world, folder):
    cases = {
        (f"data.path={folder}/typo.h5",): "typo.h5 does not exist",
        (f"data.path={folder}/a.h5", f"data.text={folder}/b.txt"): "was not packed from data.text",
        (f"data.path={folder}/a.h5", f"data.text={folder}/typo.txt"): "typo.txt does not exist",
        (f"data.path={folder}/a.h5", "model.vocabulary=256"): "use model.vocabulary=257 or more",
        (f"data.text={folder}/b.txt", f"run.out={folder}/a.txt"): "b.txt cannot be packed into .*a.txt/data",
        (f"data.path={folder}/a.h5", "model.context=239"): "too few for a training and a validation sample",
    }
    for overrides, message in cases.items():
        with pytest.raises(ValueError, match=message) as error:
            opened(world, folder, *overrides)
        assert len(set(world.allgather(str(error.value)))) == 1


def test_text_that_changes_is_packed_anew_unless_it_has_a_path(world, folder):
    """The same text, by whichever path it is named, is what it was packed from."""
    text, path = f"data.text={folder}/a.txt", f"data.path={folder}/a.h5"
    assert opened(world, folder, text, path).tokens.tokens == 241
    assert opened(world, folder, text).tokens.tokens == 241
    if world.rank == 0:
        (folder / "a.txt").write_text("hello new world\n" * 20)
    world.barrier()
    assert opened(world, folder, text).tokens.tokens == 321
    with pytest.raises(ValueError, match="was not packed from data.text"):
        opened(world, folder, text, path)
    assert opened(world, folder, path).tokens.tokens == 241
