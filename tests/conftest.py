"""MPI tests run as `mpirun -n N python -m mpi4py -m pytest --only-mpi`; the others start no MPI, or jobs of their own.

`@pytest.mark.ranks(2, 8)` names the numbers of ranks that a test or a module is for; without it these are 1, 2 and 4. A
run collects the tests of its own number alone. Of the numbers above 1 a test takes every second one; with parameters
each value does, its neighbour the others, and of several parameters there are only so many combinations that every
value occurs. HPCTRAIN_TESTS=all runs them all on every number, more examples of hypothesis's, and what
`@pytest.mark.slow` is put at. jobs/test.sbatch starts a run for each number that is named, and checks afterwards that
every test passed where it was to run (`ranks_named.py`).

A failure on one rank ends the whole job at once: its report is printed with the rank, then MPI is aborted. Waiting
would hang, since the other ranks stand in a collective that the failed one never enters.
"""

import gc
import os
import signal
import sys

import hypothesis
import pytest
import ranks_named
import torch

RANKS = int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("PMI_SIZE") or 1)
RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or 0)

# The same examples in every run and on every rank; a soak draws other ones each time, from a seed that all ranks are
# given: --hypothesis-seed (`benchmarks/soak.py`).
# Ranks do not look for smaller examples, which a rank that fails alone would try alone.
PHASES = [hypothesis.Phase.explicit, hypothesis.Phase.generate, *([hypothesis.Phase.shrink] if RANKS == 1 else [])]
SLOW = [hypothesis.HealthCheck.too_slow]  # others may have the machine
COMMON = {
    "deadline": None, "database": None, "phases": PHASES, "report_multiple_bugs": False, "suppress_health_check": SLOW,
}  # fmt: skip
hypothesis.settings.register_profile("ci", derandomize=True, max_examples=20 if ranks_named.ALL else 10, **COMMON)
hypothesis.settings.register_profile("soak", max_examples=200, **COMMON)
PROFILE = os.environ.get("HPCTRAIN_HYPOTHESIS", "ci")
hypothesis.settings.load_profile(PROFILE)


def pytest_configure(config):
    gc.disable()  # until all tests are collected
    config.addinivalue_line("markers", "ranks(*numbers): the numbers of ranks that an MPI test is for; else 1, 2 and 4")
    if RANK:
        sys.stdout = open(os.devnull, "w")  # rank 0 speaks for all; failures go to stderr
    torch.set_num_threads(1)
    # A shell's background job ignores SIGINT, nohup SIGHUP, and so would the jobs that tests start and stop by them; a
    # handler is not inherited.
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    if config.getoption("--only-mpi"):
        config.option.doctestmodules = False
    if RANKS > 1:
        from mpi4py import MPI

        if MPI.COMM_WORLD.size != RANKS:
            pytest.exit(
                f"started as one of {RANKS} ranks, but MPI sees {MPI.COMM_WORLD.size}: launcher and MPI differ", 3
            )


def pytest_ignore_collect(collection_path, config):
    """An MPI run reads no doctests, and no file that has no test for its number of ranks; one of jobs no file without
    any; nobody those of conftest.py, of which there are several."""
    if collection_path.name == "conftest.py":
        return True
    if config.getoption("markexpr") == "job" and collection_path.suffix == ".py":
        return (
            not ({"faults", "jobs"} & {*collection_path.parts} or "mark.job" in collection_path.read_text("utf-8"))
            or None
        )
    if config.getoption("--only-mpi") and collection_path.suffix == ".py":
        return not ranks_named.may_have_tests(collection_path, RANKS) or None
    return None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    if not ranks_named.ALL:
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in {*slow}]
    mpi = {item: ranks_named.of(item) for item in items if item.get_closest_marker("mpi")}
    if not config.getoption("--only-mpi"):
        others = set(mpi)
    elif PROFILE == "soak":  # its examples are for any number of ranks between those
        others = {item for item in items if not (mpi.get(item) and min(mpi[item]) <= RANKS <= max(mpi[item]))}
    else:
        ranks_named.write(mpi, RANKS)
        others = {item for item in items if RANKS not in mpi.get(item, ())}
    config.hook.pytest_deselected(items=[item for item in items if item in others])
    items[:] = [item for item in items if item not in others]


def pytest_collection_finish():
    """The collector of cycles never looks again at what is there, and seldom at what follows: a fifth of the time."""
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


def pytest_sessionfinish(session):
    if session.config.getoption("--only-mpi") and RANK == 0:
        ranks_named.write_outcomes(RANKS)


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report):
    ranks_named.note(report)
    if report.failed and RANKS > 1:
        from mpi4py import MPI

        text = f"\n=== rank {MPI.COMM_WORLD.rank} of {RANKS}: {report.nodeid} ({report.when})\n{report.longreprtext}\n"
        print(text, file=sys.__stderr__, flush=True)
        MPI.COMM_WORLD.Abort(1)


@pytest.fixture(scope="session")
def world():
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture
def line(world):
    """All ranks along one axis."""
    from hpctrain import Grid

    return Grid(tensor=world.size).tensor.x


@pytest.fixture
def case(request):
    """A number that is another one for neighbouring cases of a test's parameters: such that take grids in turn."""
    return ranks_named.turn(request.node, RANKS)


@pytest.fixture
def config(tmp_path):
    """A configuration file that leaves everything at its default."""
    path = tmp_path / "job.toml"
    path.write_text("")
    return path
