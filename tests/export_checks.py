"""Losses of exported models, by transformers and by ours."""

import torch
from training_checks import BATCH, LENGTH, microbatches


def shared_folder(world, tmp_path):
    return world.bcast(tmp_path)


def evaluate(model, grid, batch):
    from hpctrain.train.optimizer import adamw
    from hpctrain.train.trainer import Trainer

    return Trainer(model, grid, adamw(model.parameters(), 0.0)).evaluate([microbatches(grid, batch, 0, 1)])


def transformers_loss(folder, batch):
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float64).eval()
    assert batch.shape == (BATCH, LENGTH + 1)
    with torch.no_grad():
        logits = model(batch[:, :-1]).logits
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())), model.config
