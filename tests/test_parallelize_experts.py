"""Fused experts of Hugging Face's mixtures over `grid.expert`: equal to one rank that has all of them."""

import copy
import functools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from parallelize_checks import CLOSE, check_gradients, on_first, part_of
from training_checks import in_turn

import hpctrain as ht
from hpctrain.shard import split, split_sizes

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 4)]

BATCH = 5  # over 2 and 4 replicas, uneven
IDS = torch.arange(BATCH * 7).view(BATCH, 7) * 11 % 19
GRIDS = {
    2: [{"data": 2}, {"data": 2, "expert": 2}, {"tensor": 2, "expert": 2}],
    4: [
        {"data": 4, "expert": 4}, {"data": 4, "expert": 2}, {"data": 2, "tensor": 2, "expert": 4},
        {"data": 2, "tensor": 2, "expert": 2}, {"tensor": (2, 1, 2), "expert": 2},
    ],
}  # fmt: skip
SMALL = {
    "vocab_size": 19, "hidden_size": 8, "intermediate_size": 10, "moe_intermediate_size": 6, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2, "attn_implementation": "sdpa",
    "use_cache": False,
}  # fmt: skip
LATENT = {"q_lora_rank": 6, "kv_lora_rank": 6, "qk_rope_head_dim": 2, "qk_nope_head_dim": 2, "v_head_dim": 4}
MODELS = {
    "Mixtral": {"num_local_experts": 3},  # of four ranks, one has none
    "Qwen2Moe": {"num_experts": 5, "shared_expert_intermediate_size": 6},
    "Qwen3Moe": {"num_experts": 5, "head_dim": 4},
    "DeepseekV2": {"n_routed_experts": 5, **LATENT, "first_k_dense_replace": 1, "topk_method": "greedy"},
    "DeepseekV3": {
        "n_routed_experts": 6, **LATENT, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "head_dim": 2,
    },
    "GptOss": {"num_local_experts": 5, "head_dim": 4, "attn_implementation": "eager"},  # (in, out), biases, by turns
    "AriaText": {"moe_num_experts": 5, "pad_token_id": None},  # (in, out)
    "HYV4": {
        "n_routed_experts": 5, **LATENT, "index_topk": 5, "index_head_dim": 4, "index_n_heads": 2, "pad_token_id": None,
        "attn_implementation": "eager",
    },  # a gate of its own
}  # fmt: skip


@functools.cache  # a grid makes several communicators
def grid_of(data=1, tensor=1, expert=1):
    return ht.Grid(data=data, tensor=tensor, expert=expert)


@pytest.fixture
def doubles(monkeypatch):
    """Routers compute in float32 whatever the weights are; here not."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import zoo

    return zoo.Doubles


def made(name, **changes):
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **MODELS[name], **changes})
    config._experts_implementation = "eager"  # torch's grouped products take no float64
    model = getattr(transformers, f"{name}ForCausalLM")(config).double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)  # the router has opinions
    return model


def rows_of(grid):
    return split(BATCH, grid.data.size, grid.data.rank) if grid else slice(None)


def share_of(model, grid=None):
    """The loss of this replica's part of the batch, as it counts in the whole one."""
    rows = rows_of(grid)
    logits = model(IDS[rows]).logits
    return F.cross_entropy(logits.flatten(0, 1), IDS[rows].flatten(), reduction="sum") / IDS.numel()


def backward(loss):
    loss.backward()
    return loss.item()


def differentiate_alike(loss, serial, model, grid):
    """The summed gradients of a replica's share of the loss are those of the serial model."""
    for total in (loss(serial), loss(model, grid)):
        total.backward()
    ht.sync_gradients(model)
    check_gradients(model, serial, grid)


def spread(model):
    return {name for name, p in model.named_parameters() if p.shard.alike == "copies"}


@pytest.mark.parametrize("name", MODELS)
def test_two_steps(world, doubles, case, name):
    """Loss, gradients, norm of all of them, and the weights after it; by ours and by torch's clipping."""
    for sizes in in_turn(GRIDS, world.size, case):
        grid, serial = grid_of(**sizes), made(name)
        model = ht.parallelize(copy.deepcopy(serial), grid)
        stacks = {n for n, _ in serial.named_parameters() if ".experts." in n}
        assert stacks
        assert spread(model) == (stacks if "expert" in sizes else set())
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in (serial, model)]
        for clip in (ht.clip_grad_norm_, lambda m, limit: torch.nn.utils.clip_grad_norm_(m.parameters(), limit)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            with doubles():
                expected = on_first(grid, lambda serial=serial: backward(share_of(serial)))
                got = backward(share_of(model, grid))
            ht.sync_gradients(model)
            assert grid.data.comm.allreduce(got) == pytest.approx(expected, rel=1e-12)
            check_gradients(model, serial, grid)
            limit = 0.1
            norm = grid.comm.bcast(float(torch.nn.utils.clip_grad_norm_(serial.parameters(), limit)))
            # of parts over other axes in one call, as on a GPU
            together = torch.nn.utils.get_total_norm(
                [p.grad for p in model.parameters() if p.grad is not None], foreach=True
            )
            assert float(together) == pytest.approx(norm, rel=1e-12)
            assert float(clip(model, limit)) == pytest.approx(norm, rel=1e-12)
            for optimizer in optimizers:
                optimizer.step()
        gathered = ht.gather_state_dict(model)
        if grid.rank == 0:
            torch.testing.assert_close(gathered, dict(serial.state_dict()), rtol=1e-11, atol=1e-11)


def test_a_rank_whose_experts_get_nothing(world, doubles):
    """The bias of the choice sends all tokens to the first two experts of six."""
    for sizes in GRIDS[world.size]:
        grid, serial = grid_of(**sizes), made("DeepseekV3", n_group=1)
        for module in serial.modules():
            if "e_score_correction_bias" in module._buffers:
                module.e_score_correction_bias[:2] = 100.0
        model = ht.parallelize(copy.deepcopy(serial), grid)
        with doubles():
            differentiate_alike(share_of, serial, model, grid)


def test_experts_of_each_rank(world):
    for sizes in GRIDS[world.size]:
        grid = grid_of(**sizes)
        down = part_of(ht.parallelize(made("Mixtral"), grid).model.layers[0].mlp.experts.down_proj)
        tensor = grid.tensor.size if grid.expert.size == 1 else 1
        assert down.shape == (split_sizes(3, grid.expert.size)[grid.expert.rank], 8, 10 // tensor)


def test_ranks_wait_for_each_other_five_times_a_layer(world):
    """As in `layers.Experts`: for who chose which; tokens with their weights, and results; the gradients of both."""
    grid = grid_of(data=world.size, expert=world.size)
    model = ht.parallelize(made("Mixtral"), grid)
    grid.transport.traffic.clear()
    share_of(model, grid).backward()
    calls = {name: each["calls"] for (axis, name), each in grid.transport.traffic.table().items() if axis == "expert"}
    assert calls == {"all_gather": len(model.model.layers), "all_to_all": 4 * len(model.model.layers)}


def test_gradients_that_are_not_summed(world):
    """Copies of experts on the ranks of one tensor axis are replicas too."""
    for sizes in GRIDS[world.size]:
        grid = grid_of(**sizes)
        model = ht.parallelize(made("Mixtral"), grid)
        share_of(model, grid).backward()
        if grid.copies.size == 1 and grid.data.size == 1:
            ht.clip_grad_norm_(model, 1.0)
            continue
        with pytest.raises(ValueError, match=r"not summed yet; call ht.sync_gradients\(model\) after the last"):
            ht.clip_grad_norm_(model, 1.0)
        experts = model.model.layers[0].mlp.experts.down_proj
        if grid.copies.size > 1:
            with pytest.raises(ValueError, match="not summed yet"):
                experts.grad.norm()


def test_weights_read_outside(world, doubles):
    """A penalty on the experts' weights: the whole ones, and each rank's part of the gradient, once."""

    def loss(model, grid=None):
        stacks = [layer.mlp.experts.down_proj for layer in model.model.layers]
        return share_of(model, grid) + len(IDS[rows_of(grid)]) / BATCH * sum(stack.norm() for stack in stacks)

    for sizes in GRIDS[world.size]:
        grid, serial = grid_of(**sizes), made("Mixtral")
        model = ht.parallelize(copy.deepcopy(serial), grid)
        with doubles():
            differentiate_alike(loss, serial, model, grid)


def test_balance_loss(world, doubles):
    """Of one batch it is the model's own; that of replicas is refused, asked for by call or by configuration."""
    for sizes in GRIDS[world.size]:
        grid, serial = grid_of(**sizes), made("Mixtral", output_router_logits=True)
        model = ht.parallelize(copy.deepcopy(serial), grid)
        if grid.data.size == 1:
            with doubles():
                losses = [m(IDS, labels=IDS).loss for m in (serial, model)]
            torch.testing.assert_close(losses[1], losses[0], **CLOSE)
            for loss in losses:
                loss.backward()
            ht.sync_gradients(model)
            check_gradients(model, serial, grid)
            continue
        for options in ({}, {"output_router_logits": True}):
            with pytest.raises(ValueError, match="MixtralForCausalLM got output_router_logits = True, whose auxiliary"):
                model(IDS, labels=IDS, **options)
        for each in (model, copy.deepcopy(model)):
            each(IDS, output_router_logits=False)


def test_generation_that_ends_at_different_steps(world, doubles):
    """Replicas with other prompts, of which the later ones want more tokens."""
    for sizes in GRIDS[world.size]:
        grid, serial = grid_of(**sizes), made("Mixtral").eval()
        model = ht.parallelize(copy.deepcopy(serial), grid)
        prompt = IDS[rows_of(grid), : 3 + grid.data.rank % 2]
        how = {"max_new_tokens": 1 + 2 * grid.data.rank, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        with doubles():
            expected, got = (m.generate(prompt, use_cache=True, **how) for m in (serial, model))
        assert torch.equal(got, expected)


def test_experts_of_parts_are_refused(world):
    message = "its experts are spread whole, got expert_tensor=2; use 1, or expert=1"
    with ht.Grid(data=world.size, expert=2, expert_tensor=2) as grid, pytest.raises(ValueError, match=message):
        ht.parallelize(made("Mixtral"), grid)


def test_trainer_and_checkpoint(world, doubles, tmp_path):
    """Saved on one grid, taken up on another."""
    tmp_path = world.bcast(tmp_path)
    first, second = (grid_of(**GRIDS[world.size][place]) for place in (1, 2))
    serial = made("Mixtral")
    plain = torch.optim.AdamW(serial.parameters(), lr=0.01)

    def trainer_of(grid):
        model = ht.parallelize(made("Mixtral"), grid)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return ht.Trainer(model, grid, optimizer, loss=lambda m, _: share_of(m, grid), max_norm=0.5)

    one = trainer_of(first)
    for step, trainer in enumerate((one, None)):
        if trainer is None:
            ht.checkpoint.save(tmp_path, 1, one.model, one.strategy)
            trainer = trainer_of(second)
            ht.checkpoint.load(tmp_path, trainer.model, trainer.strategy)
        plain.zero_grad()
        with doubles():
            expected = share_of(serial)
            expected.backward()
            norm = torch.nn.utils.clip_grad_norm_(serial.parameters(), 0.5)
            plain.step()
            got = trainer.step([None])
        assert got == pytest.approx((expected.item(), float(norm)), rel=1e-10), step
        gathered = ht.gather_state_dict(trainer.model)
        if world.rank == 0:
            torch.testing.assert_close(gathered, dict(serial.state_dict()), rtol=1e-8, atol=1e-8)


def test_refused(world):
    """Replicas by the line average over all of them."""
    for sizes in GRIDS[world.size]:
        if "expert" in sizes and "data" in sizes:
            with pytest.raises(
                ValueError, match="zero = 0 averages over replicas, and the ranks that have the same exp"
            ):
                ht.parallelize(made("Mixtral"), grid_of(**sizes), zero=0)
