"""An independent serial mixture of experts, token by token and expert by expert, for `reference.llama_logits`."""

import functools
import math

import reference
import torch


class Mixtures:
    """The mixtures of one model: what their routers did since the last step, and the losses that follow from it.

    Attributes:
        counts: {layer: tokens that chose each expert}.
        losses: those of all layers that are added to the model's.
        totals: {"aux_loss", "z_loss"}: their values in the last step.
        key_of: the random stream of a router, by its name.
    """

    def __init__(self, shape, key_of=None):
        self.shape, self.counts, self.losses, self.totals = shape, {}, [], {}
        self.step, self.key_of = 0, key_of

    def logits(self, w, ids, keep=lambda name, x: x, end=None):
        self.counts, self.losses, self.totals = {}, [], {"aux_loss": 0.0, "z_loss": 0.0}
        return reference.llama_logits(w, ids, self.shape, keep, end, mlp=self.mlp)

    def terms(self):
        return self.losses

    def after(self, weights):
        """DeepSeek-V3's balance: the bias of who had fewer than the mean rises, of who had more falls."""
        for name, counts in self.counts.items():
            if self.shape.balance_bias:
                step = torch.sign(counts.double().mean() - counts) * self.shape.balance_bias
                weights[name + ".router.bias"] += step
        self.step += 1

    def mlp(self, w, name, x):
        if name + ".router.weight" not in w:
            return reference.llama_mlp(w, name, x)
        self.counts[name], self.probabilities = torch.zeros(self.shape.experts, dtype=torch.int64), []
        routed = x * self.jitter(name, x) if self.shape.jitter else x
        mixed = torch.stack([self.sequence(w, name, *each, len(x)) for each in zip(x, routed)])
        if self.shape.aux_scope == "step":
            self.balance(self.counts[name], torch.cat(self.probabilities), 1)
        if self.shape.shared_experts:
            mixed = mixed + reference.llama_mlp(w, name + ".shared", x)
        return mixed

    def jitter(self, name, x):
        uniform = (self.key_of(name + ".router") / "jitter").uniform(0, x.numel(), self.step)
        return 1 - self.shape.jitter + 2 * self.shape.jitter * torch.as_tensor(uniform).view(x.shape)

    def sequence(self, w, name, rows, routed, sequences):
        shape, logits = self.shape, routed @ w[name + ".router.weight"].T
        scores = logits.softmax(-1) if shape.router == "softmax" else torch.sigmoid(logits)
        counts, out = torch.zeros(shape.experts, dtype=torch.int64), []
        all_chosen = [self.chosen((score + w.get(name + ".router.bias", 0)).tolist()) for score in scores]
        kept = self.kept(all_chosen, scores.tolist())
        for t, (x, score, chosen) in enumerate(zip(rows, scores, all_chosen)):
            weights = score[chosen]
            weights = weights / weights.sum() if shape.normalized else weights
            up, down = w[name + ".experts.up"], w[name + ".experts.down"]
            parts = [
                weight * shape.scale * reference.swiglu(*(up[e] @ x), down[e])
                for weight, e in zip(weights, chosen)
                if (t, e) in kept
            ]
            out.append(functools.reduce(torch.add, parts, torch.zeros_like(x)))
            counts[chosen] += 1
        self.counts[name] += counts
        self.probabilities.append(scores / scores.sum(-1, keepdim=True))
        if shape.aux_scope == "sequence":
            self.balance(counts, self.probabilities[-1], sequences)
        self.add("z_loss", shape.z_loss * logits.logsumexp(-1).square().mean() / sequences)
        return torch.stack(out)

    def balance(self, counts, probabilities, groups):
        """Switch's loss of one group of tokens among so many."""
        parts = counts.double() / (self.shape.top_k * len(probabilities))
        value = self.shape.experts * (parts * probabilities.mean(0)).sum()
        self.add("aux_loss", self.shape.aux_loss * value / groups)

    def add(self, term, value):
        if getattr(self.shape, term):
            self.losses.append(value)
            self.totals[term] += value.item()

    def kept(self, all_chosen, scores):
        """The (token, expert) for which there is capacity: those of the highest scores, or of the first tokens."""
        shape, found = self.shape, set()
        limit = math.ceil(shape.capacity * shape.top_k * len(scores) / shape.experts) if shape.capacity else len(scores)
        for e in range(shape.experts):
            tokens = [t for t, chosen in enumerate(all_chosen) if e in chosen]
            if shape.capacity_policy == "probability":
                tokens.sort(key=lambda t: -scores[t][e])
            found |= {(t, e) for t in tokens[:limit]}
        return found

    def chosen(self, scores):
        """The numbers of the experts with the highest scores, of equals the first, in those groups whose two highest
        scores add up to the most."""
        shape, each = self.shape, self.shape.experts // self.shape.groups
        groups = [range(first, first + each) for first in range(0, shape.experts, each)]
        best = sorted(groups, key=lambda group: -sum(sorted((scores[e] for e in group), reverse=True)[:2]))
        allowed = sorted(e for group in best[: shape.groups_kept] for e in group)
        return sorted(allowed, key=lambda e: -scores[e])[: shape.top_k]
