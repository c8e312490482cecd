"""Keeping the replicas of a model alike."""

from hpctrain.replicas.asynchronous import AsyncParameterServer
from hpctrain.replicas.data_parallel import DataParallel
from hpctrain.replicas.local_sgd import LocalSGD
from hpctrain.replicas.method import Method
from hpctrain.replicas.parameter_server import ParameterServer

__all__ = ["AsyncParameterServer", "DataParallel", "LocalSGD", "Method", "ParameterServer", "make"]


def make(options, parameters, grid, optimizer) -> Method:
    """The method that the section `[replicas]` of the configuration asks for.

    Raises:
        ValueError: on every rank, when it does not work on this grid.
    """
    return _MAKERS[options.method](options, parameters, grid, optimizer)


# Every name in hpctrain.config.METHODS: function (options, parameters, grid, optimizer) -> Method.
_MAKERS = {
    "ddp": lambda options, *given: DataParallel(*given),
    "parameter_server": lambda options, *given: (
        AsyncParameterServer(*given, options.servers, options.staleness)
        if options.staleness
        else ParameterServer(*given, options.servers)
    ),
    "local_sgd": lambda options, *given: LocalSGD(*given, options.average_every, options.average_state),
}
