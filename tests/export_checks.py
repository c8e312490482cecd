"""Losses of exported models, by transformers and by ours."""

import torch
from training_checks import BATCH, LENGTH, microbatches


def shared_folder(world, tmp_path):
    return world.bcast(tmp_path)


def evaluate(model, grid, batch):
    from hpctrain.train.optimizer import make_optimizer
    from hpctrain.train.trainer import Trainer

    return Trainer(model, grid, make_optimizer(model.parameters(), 0.0)).evaluate([microbatches(grid, batch, 0, 1)])


def transformers_loss(folder, batch):
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float64).eval()
    assert batch.shape == (BATCH, LENGTH + 1)
    with torch.no_grad():
        logits = model(batch[:, :-1]).logits
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())), model.config


def llama_sizes(shape):
    """What transformers' configurations of Llama and its kin call a shape's sizes."""
    rope = {"rope_type": "default", "rope_theta": shape.rope_base}
    if shape.rope_scaling:
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        rope = {**rope, "rope_type": "llama3", **dict(zip(names, shape.rope_scaling))}
    return dict(
        vocab_size=shape.vocabulary, hidden_size=shape.width, intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        max_position_embeddings=64, rms_norm_eps=shape.norm_eps, tie_word_embeddings=shape.tied, rope_parameters=rope,
    )  # fmt: skip
