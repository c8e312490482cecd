"""A module whose weights are read outside of it, trained beside a serial copy."""

import torch
import torch.nn.functional as F
from parallelize_checks import CLOSE
from torch import nn

import hpctrain as ht

IDS = torch.arange(12).view(3, 4) * 5 % 7


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.first, self.second = nn.Embedding(7, 5), nn.Linear(5, 6), nn.Linear(6, 5)
        self.filter, self.norm = nn.Conv1d(4, 3, 2), nn.LayerNorm(5)
        self.attention = nn.MultiheadAttention(6, 3, bias=False, batch_first=True)
        self.kept = [self.first.weight, self.norm.bias]  # a plain list

    def body(self, ids):
        h = self.norm(self.table(ids))
        h = self.second(self.attention(*[self.first(h).tanh()] * 3)[0])
        return self.filter(h)


class Tied(Body):
    def forward(self, ids):
        weight = self.table.weight.to(torch.float64)
        return F.linear(self.body(ids)[..., :1].expand(-1, -1, 5), weight) / weight.shape[1] ** 0.5


def made(kind):
    torch.manual_seed(3)
    return kind().double()


def train(model, optimizer, steps=3):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(IDS).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def check_weights(model, serial, grid, **close):
    gathered = ht.gather_state_dict(model)
    if grid.rank == 0:
        for name, tensor in serial.state_dict().items():
            torch.testing.assert_close(
                gathered[name], tensor, **(close or CLOSE), msg=lambda text, n=name: f"{n}: {text}"
            )
