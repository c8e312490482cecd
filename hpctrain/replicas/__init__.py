"""Keeping the replicas of a model alike."""

from hpctrain.replicas.data_parallel import DataParallel
from hpctrain.replicas.local_sgd import LocalSGD
from hpctrain.replicas.method import Method

__all__ = ["DataParallel", "LocalSGD", "Method", "make"]


def make(options, parameters, grid, optimizer) -> Method:
    """The method that the section `[replicas]` of the configuration asks for.

    Raises:
        ValueError: on every rank, when it does not work on this grid.
    """
    return _MAKERS[options.method](options, parameters, grid, optimizer)


# Every name in hpctrain.config.METHODS: function (options, parameters, grid, optimizer) -> Method.
_MAKERS = {
    "ddp": lambda options, *given: DataParallel(*given),
    "local_sgd": lambda options, *given: LocalSGD(*given, options.average_every, options.average_state),
}
