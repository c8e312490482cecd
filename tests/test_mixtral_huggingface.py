"""Mixtral, Qwen3-MoE and GLM-4.5 as transformers writes and reads them: the same logits, losses and gradients, and the
same bits both ways; what ours does not compute is refused by name."""

import dataclasses
import json
import re

import pytest
import torch
from export_checks import evaluate, llama_sizes, shared_folder
from test_llama_huggingface import their_logits, widened
from training_checks import CORNERS, batches, fitting, in_turn, made, microbatches

from hpctrain import Grid, models
from hpctrain.layers import Tokens
from hpctrain.layers.whole_parameters import whole_parameters
from hpctrain.models.export import export, to_hugging_face
from hpctrain.models.mixtral import MixtralShape
from hpctrain.models.pretrained import load
from hpctrain.train.optimizer import make_optimizer
from hpctrain.train.trainer import Trainer

pytestmark = pytest.mark.mpi

SPEC = models.get("mixtral")
MIXTRAL = MixtralShape(
    layers=2, width=12, heads=6, context=8, vocabulary=23, kv_heads=3, ffn=21, head_width=4, rope_base=10.0,
    norm_eps=1e-3, tied=False, experts=5, top_k=2, expert_ffn=7,
)  # fmt: skip
SCALED = (8.0, 0.7, 4.0, 40)
KINDS = {
    "Mixtral": dataclasses.replace(MIXTRAL, rope_scaling=SCALED),
    "Mixtral with a window": dataclasses.replace(MIXTRAL, window=3, tied=True),
    "Qwen3Moe": dataclasses.replace(MIXTRAL, qk_norm=True),
    "Qwen3Moe of other weights": dataclasses.replace(MIXTRAL, qk_norm=True, normalized=False, dense_layers=1, window=2),
    "Glm4Moe": dataclasses.replace(
        MIXTRAL, router="sigmoid", qk_norm=True, experts=6, top_k=3, groups=3, groups_kept=2, scale=2.5,
        shared_experts=2, dense_layers=1,
    ),
    "Glm4Moe with biases": dataclasses.replace(MIXTRAL, router="sigmoid", qkv_bias=True, shared_experts=1),
}  # fmt: skip


def theirs(kind, shape, **more):
    """A model of transformers' own in float64, in which no two weights are alike."""
    import transformers

    kind = kind.split()[0]
    sizes = llama_sizes(shape) | {"head_dim": shape.head_width, "num_experts_per_tok": shape.top_k}
    if kind == "Mixtral":
        sizes |= {
            "intermediate_size": shape.expert_ffn, "num_local_experts": shape.experts,
            "sliding_window": shape.window or None,
        }  # fmt: skip
    elif kind == "Qwen3Moe":
        sizes |= {
            "moe_intermediate_size": shape.expert_ffn, "num_experts": shape.experts,
            "norm_topk_prob": shape.normalized, "mlp_only_layers": list(range(shape.dense_layers)),
            "use_sliding_window": shape.window > 0, "sliding_window": shape.window,
        }  # fmt: skip
    else:
        sizes |= {
            "moe_intermediate_size": shape.expert_ffn, "n_routed_experts": shape.experts, "n_group": shape.groups,
            "topk_group": shape.groups_kept, "routed_scaling_factor": shape.scale,
            "n_shared_experts": shape.shared_experts, "first_k_dense_replace": shape.dense_layers,
            "use_qk_norm": shape.qk_norm, "attention_bias": shape.qkv_bias, "partial_rotary_factor": 1.0,
        }  # fmt: skip
    torch.manual_seed(1)
    with widened():
        config = getattr(transformers, kind + "Config")(**{**sizes, **more}, experts_implementation="eager")
        model = getattr(transformers, kind + "ForCausalLM")(config).double().eval()
    with torch.no_grad():
        for name, p in (*model.named_parameters(), *model.named_buffers()):
            if "inv_freq" not in name:
                p.add_(torch.randn_like(p) / 10)
    return model


def read_back(folder):
    import transformers

    with widened():
        found = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, experts_implementation="eager"
        )
        return found.eval()


def in_files(name, tensor):
    """One of their parameters as files have it: experts one by one, gate and up by themselves."""
    mixtral = "block_sparse_moe" in name
    if not (match := re.fullmatch(r"(.*\.experts)\.(gate_up|down)_proj", name)):
        return {name: tensor}
    prefix, part = match.groups()
    parts = {
        "gate_up": ("w1", "w3") if mixtral else ("gate_proj", "up_proj"),
        "down": ("w2" if mixtral else "down_proj",),
    }[part]
    return {
        f"{prefix}.{expert}.{own}.weight": piece
        for expert, weight in enumerate(tensor)
        for own, piece in zip(parts, weight.chunk(len(parts)))
    }


def their_gradients(model, batch):
    """Loss and {name in files: gradient} of their model in training, which drops nothing here."""
    with widened():
        model.train()
        logits = model(batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
    found = {}
    for name, p in model.named_parameters():
        if type(model).__name__.startswith("Mixtral"):
            name = name.replace(".mlp.", ".block_sparse_moe.")
        found |= in_files(name, p.grad)
    return loss.item(), found


@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", KINDS)
def test_logits(kind, tmp_path):
    """Of theirs in our model, and of ours, with weights of its own, in theirs."""
    shape = KINDS[kind]
    model, ids = theirs(kind, shape), batches(shape)[0][:, :-1]
    model.save_pretrained(tmp_path / "theirs")
    grid = Grid()
    ours, tokens = made(grid, shape).eval(), Tokens.of(grid, *ids.shape)
    load(SPEC, ours, tmp_path / "theirs")
    with torch.no_grad():
        found = ours(ids.flatten(), tokens).view(*ids.shape, -1)
        torch.testing.assert_close(found, their_logits(model, ids), rtol=1e-12, atol=1e-12)
        for p in ours.parameters():
            p.add_(torch.randn_like(p) / 10)
        export(SPEC, ours, grid, tmp_path / "ours", end_of_document=7)
        found = ours(ids.flatten(), tokens).view(*ids.shape, -1)
    again = read_back(tmp_path / "ours")
    torch.testing.assert_close(found, their_logits(again, ids), rtol=1e-12, atol=1e-12)
    assert type(again).__name__ == kind.split()[0] + "ForCausalLM"
    assert (again.config.eos_token_id, again.config.max_position_embeddings) == (7, shape.context)


@pytest.mark.ranks(*CORNERS)
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients(world, case, kind, tmp_path):
    """Every gradient is theirs, on grids that split every axis, experts among them; and the bits come back."""
    folder = shared_folder(world, tmp_path)
    for number, (data, pipeline, tensor) in enumerate(in_turn(CORNERS, world.size, case), case // 4 % 2):
        shape = fitting(KINDS[kind], pipeline)
        batch, model = batches(shape)[0], None
        if world.rank == 0:
            model = theirs(kind, shape)
            model.save_pretrained(folder / f"{number}-theirs")
        world.Barrier()
        expert = world.size // pipeline
        with Grid(data, pipeline, tensor, expert, 1 + (number % 2 == expert % 2 == 0)) as grid:
            ours = made(grid, shape)
            load(SPEC, ours, folder / f"{number}-theirs")
            assert evaluate(ours, grid, batch) > 0
            export(SPEC, ours, grid, folder / f"{number}-ours")
            trainer = Trainer(ours, grid, make_optimizer(ours.parameters(), 0.0), 1)
            loss, _, _ = trainer.forward_backward(microbatches(grid, batch, 0, 1))
            for p in ours.parameters():  # their gradients travel as weights do
                p.data = torch.zeros_like(p) if p.grad is None else p.grad.view(p.shape)
            found = dict(whole_parameters(ours, grid))
        if world.rank == 0:
            expected, gradients = their_gradients(model, batch)
            assert loss == pytest.approx(expected, rel=1e-12)
            for name, whole in found.items():
                for their_name, part in to_hugging_face(name, whole, SPEC.huggingface, shape).items():
                    if their_name.endswith("e_score_correction_bias"):
                        continue
                    torch.testing.assert_close(part, gradients.pop(their_name), rtol=1e-11, atol=1e-13)
            assert not gradients
            again = read_back(folder / f"{number}-ours").state_dict()
            assert again.keys() == model.state_dict().keys()
            assert all(torch.equal(again[name], weight) for name, weight in model.state_dict().items())
        world.Barrier()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("sequences", [1, 3])
def test_auxiliary_loss(sequences, tmp_path):
    """transformers sums f and P over all tokens of all layers before it multiplies them, and f over a token's experts
    adds up to top_k: of one sequence through one layer it is top_k times the Switch loss, of more another number."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    shape = dataclasses.replace(MIXTRAL, layers=1, aux_loss=0.7)
    model, batch = theirs("Mixtral", shape), batches(shape)[0][:sequences]
    model.save_pretrained(tmp_path)
    with widened():
        logits = model(batch[:, :-1], output_router_logits=True).router_logits
        whole = load_balancing_loss_func(logits, shape.experts, shape.top_k).item()
        each = [
            load_balancing_loss_func((part,), shape.experts, shape.top_k).item() for part in logits[0].chunk(sequences)
        ]
    grid = Grid()
    ours = made(grid, shape)
    load(SPEC, ours, tmp_path)
    trainer = Trainer(ours, grid, make_optimizer(ours.parameters(), 0.0), 1)
    trainer.step(microbatches(grid, batch, 0, 1))
    found = trainer.report()["aux_loss"] * shape.top_k / shape.aux_loss
    assert found == pytest.approx(sum(each) / sequences, rel=1e-6)  # theirs are counted in float32
    assert (found == pytest.approx(whole, rel=1e-6)) == (sequences == 1)


def changed(folder, **keys):
    """config.json with other values; a key that is given ... is left out."""
    told = json.loads((folder / "config.json").read_text()) | keys
    (folder / "config.json").write_text(json.dumps({key: value for key, value in told.items() if value is not ...}))


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("kind", "keys", "message"),
    [
        ("Mixtral", {"model_type": "llama"}, r"model_type = llama, not one of mixtral, qwen3_moe, glm4_moe$"),
        ("Mixtral", {"model_type": "qwen3_moe"}, r"model_type = qwen3_moe, not mixtral, which"),
        ("Mixtral", {"num_local_experts": 4}, r"num_local_experts = 4, not 5$"),
        ("Mixtral", {"num_experts_per_tok": 1}, r"num_experts_per_tok = 1, not 2$"),
        ("Mixtral", {"num_local_experts": ...}, r"num_local_experts = 8, not 5$"),
        ("Mixtral with a window", {"sliding_window": None}, r"sliding_window = None, not 3$"),
        ("Qwen3Moe", {"norm_topk_prob": ...}, r"norm_topk_prob = False, not True$"),
        ("Qwen3Moe", {"mlp_only_layers": [1]}, r"mlp_only_layers = \[1\], not \[\]$"),
        ("Qwen3Moe", {"decoder_sparse_step": 2}, r"decoder_sparse_step = 2, not 1$"),
        ("Qwen3Moe", {"use_sliding_window": True, "sliding_window": 4}, r"sliding_window = 4, not None$"),
        ("Glm4Moe", {"topk_group": ...}, r"topk_group = 1, not 2$"),
        ("Glm4Moe", {"routed_scaling_factor": 1.0}, r"routed_scaling_factor = 1.0, not 2.5$"),
        ("Glm4Moe", {"rope_parameters": {"rope_theta": 10.0}}, r"partial_rotary_factor = 0.5, not 1.0$"),
        ("Glm4Moe", {"use_qk_norm": ...}, r"use_qk_norm = False, not True$"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(kind, keys, message, tmp_path):
    shape = KINDS[kind]
    theirs(kind, shape).save_pretrained(tmp_path)
    changed(tmp_path, **keys)
    with pytest.raises(ValueError, match="another model than the section .model. says: " + message):
        load(SPEC, made(Grid(), shape), tmp_path)


@pytest.mark.ranks(1)
def test_what_a_file_leaves_out(world):
    """Is what transformers takes for it."""
    import transformers

    theirs = transformers.MixtralConfig()
    sizes = {key: getattr(theirs, key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")}
    sizes |= {key: getattr(theirs, key) for key in ("max_position_embeddings", "vocab_size", "intermediate_size")}
    found = SPEC.huggingface.options({"model_type": "mixtral", **sizes})
    theta = getattr(theirs, "rope_theta", None) or theirs.rope_parameters["rope_theta"]
    assert found["rope_base"] == theta == 1e6
    assert found["experts"] == theirs.num_local_experts
