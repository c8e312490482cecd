"""On a CUDA device, which the ranks may share, what other tests show of the CPU: products, training and parallelize."""

import copy

import pytest
import torch
from matmul_checks import close, products, whole
from trained_here import losses, trainer_in

import hpctrain as ht
from hpctrain import comm, matmul
from hpctrain.grid_shape import all_grids

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    pytest.mark.gpu,
    pytest.mark.mpi,
]
MODELS = {
    "gpt2": ["model.kind=gpt2", "model.heads=3", "model.width=15", "model.dropout=0.2"],
    "llama": [
        "model.kind=llama", "model.heads=6", "model.kv_heads=3", "model.head_width=4", "model.width=15", "model.ffn=21",
        "model.qk_norm=true",
    ],
    "mixtral": [
        "model.kind=mixtral", "model.heads=6", "model.kv_heads=3", "model.head_width=4", "model.width=15",
        "model.experts=6", "model.top_k=3", "model.expert_ffn=7", "model.aux_loss=0.5",
    ],
}  # fmt: skip
TRAINING = [
    "model.context=16", "model.vocabulary=261", "train.batch=5", "train.microbatches=2", "train.lr=1e-2",
    "run.steps=4", "run.eval_batches=1", "train.warmup=1",
]  # fmt: skip


@pytest.fixture
def where(world):
    return comm.local_device("cuda", world)


@pytest.mark.parametrize("way", ["shared memory", "messages"])
def test_products(world, where, way):
    for grid, mm in products(world, way):
        A, B = (whole(*shape, seed=seed).to(where).requires_grad_() for seed, shape in enumerate(((7, 9), (9, 5))))
        C = mm.gather_c(mm(*mm.scatter(A, B)))
        close(C, A @ B)
        G = whole(7, 5, seed=9).to(where)
        for got, wanted in zip(torch.autograd.grad(C, (A, B), G / grid.size), torch.autograd.grad(A @ B, (A, B), G)):
            assert got.is_cuda
            close(torch.from_numpy(world.allreduce(got.cpu().numpy())), wanted.cpu())


def test_arrays_of_cupy(world, where):
    cupy = pytest.importorskip("cupy")
    with cupy.cuda.Device(where.index):
        A, B = (cupy.asarray(whole(*shape, seed=seed).numpy()) for seed, shape in enumerate(((7, 9), (9, 5))))
        mm = matmul.Agarwal(ht.Grid(tensor=world.size).tensor)
        got = mm.gather_c(mm(*mm.scatter(A, B)))
        close(torch.from_dlpack(cupy.from_dlpack(got)).cpu(), torch.from_numpy(cupy.asnumpy(A @ B)))


def places(world):
    return [
        [f"grid.data={data}", f"grid.pipeline={pipeline}", f"grid.tensor={list(tensor)}"]
        for data, pipeline, tensor in all_grids(world.size)
    ]


@pytest.mark.parametrize("model", MODELS)
def test_training(world, tmp_path, model):
    """Losses and gradient norms of every grid are those of the CPU."""
    common = [*MODELS[model], *TRAINING, f"model.layers={max(3, world.size + 1)}", "precision.compute=fp64"]
    run = trainer_in(world, tmp_path, common)
    grids = places(world)
    assert run(*grids[0], "run.device=cpu", "run.name=cpu") == 0
    for number, grid in enumerate(grids):
        assert run(*grid, "run.device=cuda", f"run.name=gpu-{number}") == 0
        for of in ("loss", "grad_norm"):
            expected = losses(run.folder / "cpu", of)
            assert losses(run.folder / f"gpu-{number}", of) == pytest.approx(expected, rel=1e-10), grid


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_checkpoint_of_the_gpu_goes_on(world, tmp_path, device):
    """There or on the CPU: fused optimizers take the number of steps from the device."""
    run = trainer_in(world, tmp_path, [*MODELS["llama"], *TRAINING, "model.layers=5", "precision.compute=fp64"])
    first, last = places(world)[0], places(world)[-1]
    assert run(*first, "run.device=cpu", "run.name=whole") == 0
    assert run(*first, "run.device=cuda", "run.name=both", "run.max_seconds=1e-9") == 85  # stopped after a step
    assert run(*last, f"run.device={device}", "run.name=both", "--resume") == 0
    assert losses(run.folder / "both") == pytest.approx(losses(run.folder / "whole"), rel=1e-10)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_bf16(world, tmp_path, model, zero):
    run = trainer_in(world, tmp_path, [*MODELS[model], *TRAINING, "model.layers=5", f"grid.data={world.size}"])
    assert run("run.device=cpu", "run.name=cpu", "precision.compute=fp32") == 0
    options = ["run.device=cuda", "precision.compute=bf16", f"data_parallel.method=zero{zero}", "run.name=gpu"]
    assert run(*options) == 0
    assert losses(run.folder / "gpu") == pytest.approx(losses(run.folder / "cpu"), rel=2e-2)


@pytest.mark.parametrize("zero", [None, 1, 2, 3])
def test_parallelize(world, where, zero):
    """Weights after three steps are those of one rank, and stay on the device."""
    grid = ht.Grid(data=world.size) if zero else ht.Grid(tensor=world.size)
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(24, 4, 50, dropout=0.0, batch_first=True)
    serial = torch.nn.Sequential(torch.nn.Embedding(31, 24), layer, torch.nn.LayerNorm(24), torch.nn.Linear(24, 31))
    serial = serial.double().to(where)
    model = ht.parallelize(copy.deepcopy(serial), grid, zero=zero)
    assert all(parameter.is_cuda for parameter in model.parameters())
    ids = torch.randint(31, (3, 10), device=where, generator=torch.Generator(where).manual_seed(1))
    for each in (model, serial):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(each(ids).flatten(0, 1), ids.flatten())
            loss.backward()
            if each is model:
                ht.clip_grad_norm_(model, 1.0)
            else:
                torch.nn.utils.clip_grad_norm_(serial.parameters(), 1.0)
            optimizer.step()
        if each is model:
            ours = loss
    assert ours.is_cuda
    torch.testing.assert_close(ours, loss, rtol=1e-12, atol=0)
    gathered = ht.gather_state_dict(model)
    if grid.rank == 0:
        for name, tensor in serial.state_dict().items():
            torch.testing.assert_close(gathered[name].cpu(), tensor.cpu(), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dropout_of_divided_features(world, where, dtype, inplace):
    """To the bit, also what it is scaled by: of ones, through weights that are 1 or 0."""
    torch.manual_seed(0)
    serial = torch.nn.Sequential(
        torch.nn.Linear(6, 10), torch.nn.ReLU(), torch.nn.Dropout(0.15, inplace), torch.nn.Linear(10, 10, bias=False)
    )
    with torch.no_grad():
        serial[0].weight.zero_()
        serial[0].bias.fill_(1)
        serial[3].weight.copy_(torch.eye(10))
    serial = serial.to(where, dtype)
    model = ht.parallelize(copy.deepcopy(serial), ht.Grid(tensor=world.size))
    made = []
    for each in (serial, model):
        torch.manual_seed(1)
        made.append(each(torch.ones(64, 6, dtype=dtype, device=where)))
    assert 0 < made[0].count_nonzero() < made[0].numel()
    assert torch.equal(*made)
