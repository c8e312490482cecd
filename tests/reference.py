"""An independent serial GPT-2 and Llama in plain torch, and their training loop: what every grid must reproduce.

Shares nothing with the package but the names and values of the initial weights.
"""

import math

import torch
import torch.nn.functional as F


def gpt2_logits(w, ids, layers, heads, keep=lambda name, x: x, end=None):
    """Logits (sequences, length, vocabulary) of whole weights `w` by name. `keep` applies dropout at a named place.
    Where token `end` ends a document, the next one starts at position 0 and sees nothing of those before."""
    unseen, places = unseen_keys(ids, end), places_in_documents(ids, end)
    x = keep("drop", w["wte.weight"][ids] + w["wpe.weight"][places])
    width = x.shape[-1]

    def norm(x, name):
        return F.layer_norm(x, (width,), w[name + ".weight"], w[name + ".bias"], 1e-5)

    def linear(x, name):
        return x @ w[name + ".weight"].T + w[name + ".bias"]

    for i in range(layers):
        p = f"blocks.{i}."
        qkv = linear(norm(x, p + "ln_1"), p + "attention.qkv").unflatten(-1, (heads, 3, width // heads))
        q, k, v = qkv.permute(3, 0, 2, 1, 4)
        scores = (q @ k.mT / math.sqrt(width // heads)).masked_fill(unseen, -math.inf)
        mixed = (keep(p + "attention", scores.softmax(-1)) @ v).transpose(1, 2).flatten(2)
        x = x + keep(p + "drop_1", linear(mixed, p + "attention.proj"))
        hidden = linear(norm(x, p + "ln_2"), p + "mlp.up")
        hidden = 0.5 * hidden * (1 + torch.tanh(math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)))
        x = x + keep(p + "drop_2", linear(hidden, p + "mlp.down"))
    return norm(x, "ln_f") @ w.get("head.weight", w["wte.weight"]).T


def swiglu(gate, up, down):
    return (gate / (1 + torch.exp(-gate)) * up) @ down.T


def llama_mlp(w, name, x):
    """Of (sequences, length, width), whose gates and ups are one after the other."""
    gate, up = (x @ w[name + ".up.weight"].T).unflatten(-1, (-1, 2)).unbind(-1)
    return swiglu(gate, up, w[name + ".down.weight"])


def llama_logits(w, ids, shape, keep=lambda name, x: x, end=None, mlp=llama_mlp):
    """The same of a Llama of the sizes of `shape`, with biases and norms of heads where there are weights for them, and
    what it has after each attention."""
    length, width = ids.shape[1], shape.head_width
    groups, queries = shape.kv_heads, shape.heads // shape.kv_heads
    unseen = unseen_keys(ids, end, shape.window)
    turns = torch.polar(*torch.broadcast_tensors(torch.ones((), dtype=torch.float64), rotary_angles(shape, length)))
    x = keep("drop", w["wte.weight"][ids])

    def norm(x, name):
        return x * (x.square().mean(-1, keepdim=True) + shape.norm_eps) ** -0.5 * w[name + ".weight"]

    def turned(x, name):
        """Heads (sequence, head, length, feature) at their positions; features i and i + width/2 are one number."""
        x = norm(x, name) if name + ".weight" in w else x
        x = torch.complex(*x.chunk(2, -1)) * turns
        return torch.cat([x.real, x.imag], -1)

    for i in range(shape.layers):
        p = f"blocks.{i}."
        qkv = norm(x, p + "ln_1") @ w[p + "attention.qkv.weight"].T + w.get(p + "attention.qkv.bias", 0)
        q, k, v = qkv.unflatten(-1, (groups, queries + 2, width)).split([queries, 1, 1], 3)
        q = turned(q.flatten(2, 3).transpose(1, 2), p + "attention.q_norm")
        k = turned(k.squeeze(3).transpose(1, 2), p + "attention.k_norm").repeat_interleave(queries, 1)
        v = v.squeeze(3).transpose(1, 2).repeat_interleave(queries, 1)
        scores = (q @ k.mT / math.sqrt(width)).masked_fill(unseen, -math.inf)
        mixed = (keep(p + "attention", scores.softmax(-1)) @ v).transpose(1, 2).flatten(2)
        x = x + keep(p + "drop_1", mixed @ w[p + "attention.proj.weight"].T)
        x = x + keep(p + "drop_2", mlp(w, p + "mlp", norm(x, p + "ln_2")))
    return norm(x, "ln_f") @ w.get("head.weight", w["wte.weight"]).T


def unseen_keys(ids, end, window=0):
    """Of each sequence's queries and keys, for all heads: (sequences, 1, length, length)."""
    length = ids.shape[1]
    back = torch.arange(length)[:, None] - torch.arange(length)  # how far back a key is
    unseen = ((back < 0) | (back >= (window or length))).expand(len(ids), 1, length, length).clone()
    for sequence, row in enumerate(ids.tolist()):
        for last in (position for position, token in enumerate(row) if token == end):
            unseen[sequence, :, last + 1 :, : last + 1] = True
    return unseen


def places_in_documents(ids, end):
    places = torch.empty_like(ids)
    for sequence, row in enumerate(ids.tolist()):
        place = 0
        for position, token in enumerate(row):
            places[sequence, position] = place
            place = 0 if token == end else place + 1
    return places


def rotary_angles(shape, length):
    """By how much each pair of features turns at each position, (length, head width / 2)."""
    frequencies = [shape.rope_base ** (-2 * i / shape.head_width) for i in range(shape.head_width // 2)]
    if shape.rope_scaling:
        factor, low, high, original = shape.rope_scaling
        turns = [original * frequency / (2 * math.pi) for frequency in frequencies]
        kept = [min(1, max(0, (t - low) / (high - low))) for t in turns]
        frequencies = [f * part + f / factor * (1 - part) for f, part in zip(frequencies, kept)]
    return torch.outer(torch.arange(length, dtype=torch.float64), torch.tensor(frequencies, dtype=torch.float64))


def train(
    weights, batches, logits, *, lr, clip, weight_decay, keep=lambda step: lambda name, x: x, end=None, momentum=None,
    terms=list, after=lambda weights: None,
):  # fmt: skip
    """Losses and gradient norms of AdamW, or SGD with a momentum, on whole batches of (sequences, length + 1) ids;
    weights change in place.

    `logits` is a function of weights, ids and `keep`. What follows token `end` counts in no loss. `terms` tells, after
    them, what is added to the loss that is differentiated; `after` is called after each step.
    """
    parameters = {name: torch.nn.Parameter(w) for name, w in weights.items()}
    groups = [
        {"params": [p for p in parameters.values() if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    if momentum is None:
        optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))
    else:
        optimizer = torch.optim.SGD(groups, lr=lr, momentum=momentum)
    losses, norms = [], []
    for step, batch in enumerate(batches):
        scores = logits(parameters, batch[:, :-1], keep=keep(step))
        targets = batch[:, 1:] if end is None else batch[:, 1:].masked_fill(batch[:, :-1] == end, -100)
        loss = F.cross_entropy(scores.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        sum(terms(), loss).backward()
        norm = torch.nn.utils.clip_grad_norm_(list(parameters.values()), clip or math.inf)
        optimizer.step()
        after(weights)
        losses.append(loss.item())
        norms.append(norm.item())
    return losses, norms
