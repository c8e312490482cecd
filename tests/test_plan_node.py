"""What ranks of a node share: cores, caches and memory; and what is left over where work does not divide."""

import dataclasses

import pytest
from test_plan_learn import figures, written

from hpctrain.config import load_config
from hpctrain.plan import Machine, predict
from hpctrain.plan.estimator import Estimator
from hpctrain.plan.job import read
from hpctrain.plan.network import Network
from hpctrain.plan.passes import Box

BASE = ["model.layers=8", "model.width=512", "model.heads=8", "train.batch=32", "model.context=128"]
CPU = Machine.load("cpu-cluster")


def config(*overrides):
    return load_config(overrides=[*BASE, *overrides])


def box(*overrides, accumulates=False, **device):
    rates = {"bandwidth": 1e9, "state_bandwidth": 2.5e8, "cold_bandwidth": 1e9 / 3}
    device = rates | {"cache": 1e9, "launch": 0.0} | device
    made = dataclasses.replace(
        CPU, device=dataclasses.replace(CPU.device, **device),
        software=dataclasses.replace(CPU.software, accumulates=accumulates),
    )  # fmt: skip
    job, choice = read(config("train.microbatches=2", *overrides))
    return Box(job, made, Network(made), choice)


def test_weights_that_no_cache_holds():
    """Three products read or write 4, 4 and 8 bytes of each at the slow rate. A second microbatch's gradient is added,
    by three times 4 bytes, or by 4 where z ranks put its sum off."""
    weights = 4 * 512 * 2048
    cold, warm = (box(cache=cache).linear(512, 2048, True)[0] for cache in (0.0, 1e9))
    assert [a - b for a, b in zip(cold, warm)] == pytest.approx([3e-9 * weights, 3e-9 * weights, 6e-9 * weights])
    for over_z, times in (("grid.tensor=1", 3), ("grid.tensor=[1,1,2]", 1)):
        added, plain = (box(over_z, accumulates=each).linear(512, 2048, True)[0] for each in (True, False))
        assert [a - b for a, b in zip(added, plain)] == pytest.approx([0, 0, times * weights / 2 / 2.5e8])


def test_operands_of_products():
    """Go at the rate of elements where theirs is not measured."""
    by = box().product(64, 512, 2048), box(operands=1e8).product(64, 512, 2048)
    assert by[1] - by[0] == pytest.approx(4 * (64 * 512 + 512 * 2048 + 64 * 2048) * (1e-8 - 1e-9))


def test_a_norm_over_y_is_composed():
    """Of ten operations more in forward, and twice as many in backward; a block has two."""
    over_x, over_y = (box(f"grid.tensor={shape}", launch=1.0).block("none") for shape in ([2, 1, 1], [1, 2, 1]))
    assert over_y.forward.compute - over_x.forward.compute == pytest.approx(2 * 10, abs=0.1)
    assert over_y.input_gradient.compute - over_x.input_gradient.compute == pytest.approx(2 * 20, abs=0.1)


def test_gradients_of_tables():
    """Zeros in new memory; with the head's table that one's gradient is added, three times 4 bytes, and the first sum
    is copied; else those of further microbatches are. Of a sum over z each rank has its part."""

    def passes(*overrides, accumulates=True):
        made = box(*overrides, accumulates=accumulates, table_bandwidth=1e9)
        share = made.x * made.y
        return made.embedding().weight_gradient.compute * 1e9 / (4 * (257 + 128) * 512 / share)

    assert passes(accumulates=False) == 0
    assert passes() == pytest.approx(1 + 3 + 2 / 2)
    assert passes("train.microbatches=8") == pytest.approx(1 + 3 + 2 / 8)
    assert passes("model.tied=false") == pytest.approx(1 + 3 / 2)
    assert passes("grid.pipeline=2") == pytest.approx(1 + 3 / 2)
    assert passes("grid.tensor=[1,1,2]") == pytest.approx(1 + 4 / 2)


def test_clipping_is_a_pass_over_the_gradients():
    """Read and written once more: 40 bytes of a parameter rather than 32."""
    clips = dataclasses.replace(CPU, software=dataclasses.replace(CPU.software, clips=True))
    cases = (clips, 1), (clips, 0), (CPU, 1)
    found = [predict(config(f"train.clip={limit}"), machine).parts["optimizer"] for machine, limit in cases]
    assert found == pytest.approx([found[1] * 40 / 32, found[1], found[1]])


def test_chance_delays_exchanges():
    """Four exchanges twice as long as one; there is one at a step's end, where ranks have any."""

    def late(*overrides, delay):
        job, choice = read(load_config(overrides=["train.batch=4", "model.layers=2", *overrides]))
        machine = dataclasses.replace(CPU, device=dataclasses.replace(CPU.device, delay=delay))
        return Estimator(job, machine).estimate(choice).parts["stragglers"]

    def delays(*overrides):
        return late(*overrides, delay=0.1) - late(*overrides, delay=0.0)

    assert delays() == 0
    assert delays("grid.data=2") == delays("grid.pipeline=2") == pytest.approx(0.1)
    # of a block 4, 4 and 2; of embedding 1 and 1, and of the head 2, 1 and 1
    assert delays("grid.tensor=2") == pytest.approx(0.1 * (1 + 2 * 10 + 6) ** 0.5)
    assert delays("grid.tensor=2", "train.microbatches=2") == pytest.approx(0.1 * (1 + 2 * 26) ** 0.5)


def test_exchanges_of_a_block():
    """On x a gather or a sum for each of four layers forward, as many for the input, one for each weight into the inner
    layout; y the other way round, and two norms each way; z gathers weights, and adds their gradients up elsewhere.
    On a plane each product has panels over x and y, and over z a gather and a sum."""
    over_x, over_y = (box(f"grid.tensor={shape}") for shape in ([2, 1, 1], [1, 2, 1]))
    assert (over_x.exchanges(True), over_x.exchanges(False)) == ((1, 1, 1), (1, 1, 0))
    assert (over_y.exchanges(True), over_y.exchanges(False)) == ((1, 1, 0), (1, 1, 1))
    for plane, count in (([2, 2, 1], 2), ([2, 2, 2], 4)):
        assert box(f"grid.tensor={plane}", "tensor.algorithm=two_half_d").exchanges(True) == (count,) * 3
    found = {
        axis: [each.exchanges for each in (part.forward, part.input_gradient, part.weight_gradient)]
        for axis, shape in (("x", [2, 1, 1]), ("y", [1, 2, 1]), ("z", [1, 1, 2]))
        for part in [box(f"grid.tensor={shape}").block("none")]
    }
    assert found == {"x": [4, 4, 2], "y": [4 + 2, 4 + 2, 2], "z": [4, 4, 0]}


def test_scores_that_count():
    """Of 16 sequences' 128² scores of each of 8 heads the causal half takes a time besides, whatever the width."""
    software = dataclasses.replace(CPU.software, attended=0.5)

    def seconds(**figures):
        machine = dataclasses.replace(CPU, software=software, device=dataclasses.replace(CPU.device, **figures))
        job, choice = read(config("train.microbatches=2"))
        return Box(job, machine, Network(machine), choice).attention

    assert seconds(score=1e-6) - seconds() == pytest.approx(16 * 8 * 128**2 / 2 * 1e-6)
    assert seconds(long_attention=0.5, long_score=1.0) == seconds(long_attention=0.5)  # these are short


def test_ranks_that_wait_lend_their_cores(tmp_path):
    """What four ranks at once compute at is measured; of a pipeline on two cores nothing is idle, as one stage's ranks
    have the cores while the other's wait. Of four stages one alone works at both ends of a step, on one core."""
    four = figures(4) | {"elements": 9e8, "state": 4e8, "launch": 7e-6}
    machine = Machine.load(written(tmp_path, figures(1), figures(2), four))
    crowded = machine.crowded(4)
    device = crowded.device
    assert (crowded.share, device.memory, device.product, device.bandwidth) == (0.5, 2e9, 1.0, 9e8)
    assert (device.optimizer_rate, device.launch, device.delay) == (4e8, 7e-6, 0.4)
    assert machine.crowded(1).share == 1
    machine = Machine.load(written(tmp_path, figures(1), figures(2)))  # four take turns
    job = ["model.width=512", "train.batch=8", "train.microbatches=2"]
    two, cut, apart, four_stages = (
        predict(load_config(overrides=[*job, f"grid.data={data}", f"grid.pipeline={stages}", *more]), machine)
        for data, stages, *more in ((1, 2), (2, 2), (4, 1), (1, 4, "train.microbatches=4"))
    )
    assert two.parts["bubble"] > 0.3 * two.parts["compute"]
    assert cut.parts["bubble"] < 0.1 * cut.parts["compute"]
    assert cut.seconds == pytest.approx(apart.seconds, rel=0.15)  # which updates twice as many weights
    assert four_stages.parts["bubble"] > 0.08 * four_stages.parts["compute"]


def test_ranks_that_share_cores_update_at_once(tmp_path):
    """A step of four stages takes the mean update longer on two cores, and on four the first one, which ends last."""
    job, choice = read(config("model.layers=4", "model.vocabulary=4096", "grid.pipeline=4", "train.microbatches=1"))

    def step(cores, rate):
        machine = Machine.load(written(tmp_path, *(figures(ranks, cores) for ranks in (1, 2, 4)))).crowded(4)
        device = dataclasses.replace(machine.device, state_bandwidth=rate)
        made = Estimator(
            job, dataclasses.replace(machine, device=device, errors=dataclasses.replace(machine.errors, noise=0))
        )
        return made.estimate(choice).seconds, [stage.update for stage in made.stages(choice)]

    for cores in (2, 4):
        (quick, little), (slow, much) = step(cores, 1e9), step(cores, 5e8)
        added = [b - a for a, b in zip(little, much)]
        assert max(added) > 1.2 * min(added)
        assert slow - quick == pytest.approx(sum(added) / 4 if cores == 2 else added[0])


def test_microbatches_without_sequences():
    """Four replicas of four sequences have one each, whatever the number of microbatches: of the others a rank adds
    gradients of zeros, with the launches of all operations."""
    job = ["grid.data=4", "train.batch=4"]
    device = dataclasses.replace(CPU.device, launch=0.0, operands=0.0)
    for machine, most in ((CPU, 0.5), (dataclasses.replace(CPU, device=device), 0.2)):
        each = [predict(config(*job, f"train.microbatches={m}"), machine) for m in (1, 2, 4)]
        one, two, four = (prediction.parts["compute"] for prediction in each)
        assert 0 < two - one < most * one
        assert four - one == pytest.approx(3 * (two - one), rel=0.1)
        assert each[2].seconds - each[0].seconds == pytest.approx(four - one, rel=0.1)


def test_gradients_of_zeros_are_summed_over_z():
    """Of four microbatches two have no sequence; each is summed over z nevertheless, where that is not put off."""

    def tensor(method, microbatches):
        overrides = "grid.data=2", "grid.tensor=[1,1,2]", "train.batch=4", f"train.microbatches={microbatches}"
        job, choice = read(config(*overrides, f"data_parallel.method={method}"))
        made = Estimator(job, CPU)
        block, _, head = made.parts(choice).z_sums
        return made.estimate(choice).parts["tensor"], 8 * block + head

    for method, times in (("zero2", 4), ("zero1", 1)):
        (one, sums), (four, _) = (tensor(method, microbatches) for microbatches in (1, 4))
        assert 0 < sums < one
        assert four == pytest.approx(4 * (one - sums) + times * sums)


def test_ranks_without_rows_lend_their_cores(tmp_path):
    """Of two sequences on four ranks of z, two have none: the others compute as if they were two, but for launches and
    gradients of zeros."""
    machine = Machine.load(written(tmp_path, figures(1), figures(2)))
    job = ["model.context=256", "train.batch=2", "train.microbatches=1", "train.clip=0"]
    two, four = (predict(config(*job, f"grid.tensor=[1,1,{z}]"), machine).parts["compute"] for z in (2, 4))
    assert two < four < 1.1 * two
    figure = dataclasses.replace(machine.device, launch=0.0, operands=1e15, cold_bandwidth=0.0, table_bandwidth=1e15)
    link = dataclasses.replace(machine.link[0], latency=0.0, bandwidth=1e15)
    machine = dataclasses.replace(machine, device=figure, occupied=(), measured=(), link=(link,))
    two, four = (predict(config(*job, f"grid.tensor=[1,1,{z}]"), machine).parts["compute"] for z in (2, 4))
    assert four == pytest.approx(two, rel=0.05)


def test_gradients_whose_sums_over_z_are_put_off():
    """Each rank keeps its part of the gradient for both, from a second microbatch on."""

    def memory(*overrides):
        return predict(config("grid.tensor=[1,1,2]", "train.microbatches=2", *overrides), CPU).memory_bytes

    weights = 8 * 12 * 512**2 + 257 * 512
    assert memory() - memory("tensor.overlap=[]") == pytest.approx(1.05 * 4 * weights)
    once = "train.microbatches=1"
    assert memory(once) == memory(once, "tensor.overlap=[]")
