"""An independent serial GPT-2 in plain torch, and its training loop: what every grid must reproduce.

Shares nothing with the package but the names and values of the initial weights.
"""

import math

import torch
import torch.nn.functional as F


def gpt2_logits(w, ids, layers, heads, keep=lambda name, x: x):
    """Logits (sequences, length, vocabulary) of whole weights `w` by name. `keep` applies dropout at a named place."""
    length = ids.shape[1]
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    x = keep("drop", w["wte.weight"][ids] + w["wpe.weight"][:length])
    width = x.shape[-1]

    def norm(x, name):
        return F.layer_norm(x, (width,), w[name + ".weight"], w[name + ".bias"], 1e-5)

    def linear(x, name):
        return x @ w[name + ".weight"].T + w[name + ".bias"]

    for i in range(layers):
        p = f"blocks.{i}."
        qkv = linear(norm(x, p + "ln_1"), p + "attention.qkv").unflatten(-1, (heads, 3, width // heads))
        q, k, v = qkv.permute(3, 0, 2, 1, 4)
        scores = (q @ k.mT / math.sqrt(width // heads)).masked_fill(later, -math.inf)
        mixed = (keep(p + "attention", scores.softmax(-1)) @ v).transpose(1, 2).flatten(2)
        x = x + keep(p + "drop_1", linear(mixed, p + "attention.proj"))
        hidden = linear(norm(x, p + "ln_2"), p + "mlp.up")
        hidden = 0.5 * hidden * (1 + torch.tanh(math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)))
        x = x + keep(p + "drop_2", linear(hidden, p + "mlp.down"))
    return norm(x, "ln_f") @ w.get("head.weight", w["wte.weight"]).T


def train(weights, batches, layers, heads, *, lr, clip, weight_decay, keep=lambda step: lambda name, x: x):
    """Losses and gradient norms of AdamW on whole batches of (sequences, length + 1) ids; weights change in place."""
    parameters = {name: torch.nn.Parameter(w) for name, w in weights.items()}
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters.values() if p.dim() == 2], "weight_decay": weight_decay},
            {"params": [p for p in parameters.values() if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=lr,
        betas=(0.9, 0.95),
    )
    losses, norms = [], []
    for step, batch in enumerate(batches):
        logits = gpt2_logits(parameters, batch[:, :-1], layers, heads, keep(step))
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(list(parameters.values()), clip or math.inf)
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())
    return losses, norms
