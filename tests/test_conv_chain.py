"""A small residual network trains as the same network of torch's layers does on one rank."""

import pytest
import torch
from image_checks import DOUBLE, KEY, assembled, block, close, copied_weights, tensor_grids, whole

from hpctrain import layers as ht
from hpctrain.data_parallel import DataParallel
from hpctrain.shard import split

pytestmark = pytest.mark.mpi

CLASSES, BATCH, STEPS = 5, 6, 3
SIZE = 9, 7  # of which 5 rows, then 3, then 1 are left: fewer than ranks


class Residual(torch.nn.Module):
    """conv, norm, relu, conv, norm beside a shortcut; pooled, averaged, classified. Made of the layers it is given."""

    def __init__(self, conv, norm, pool, average, flatten, linear):
        super().__init__()
        self.stem, self.norm0, self.pool = conv(3, 6, 3, padding=1, bias=False), norm(6), pool(3, 2, 1)
        self.conv1, self.norm1 = conv(6, 7, 3, stride=2, padding=1, bias=False), norm(7)
        self.conv2, self.norm2 = conv(7, 7, 3, padding=1), norm(7)
        self.shortcut = conv(6, 7, 1, stride=2)
        self.average, self.flatten, self.head = average(1), flatten, linear(7, CLASSES)

    def features(self, x):
        x = self.pool(self.norm0(self.stem(x)).relu())
        y = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        return self.flatten(self.average((y + self.shortcut(x)).relu()))


def on(grid):
    def bound(layer):
        return lambda *args, **options: layer(grid, *args, key=KEY / str(args), **options, **DOUBLE)

    return Residual(
        bound(ht.Conv2d), bound(ht.BatchNorm2d),
        lambda *a: ht.MaxPool2d(grid, *a), lambda *a: ht.AdaptiveAvgPool2d(grid, *a), ht.Flatten(grid, 7),
        lambda *a: ht.Linear(grid, *a, to="inner", key=KEY / "head", **DOUBLE),
    )  # fmt: skip


def serial():
    nn = torch.nn
    return Residual(nn.Conv2d, nn.BatchNorm2d, nn.MaxPool2d, nn.AdaptiveAvgPool2d, nn.Flatten(), nn.Linear)


def test_training_equals_serial(world):
    targets = torch.arange(BATCH) * 3 % CLASSES
    for grid in tensor_grids(world):
        ours = on(grid)
        theirs = copied_weights(grid, ours, serial())
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (ours, theirs)]
        replicas = DataParallel(ours.parameters(), grid)
        criterion = ht.CrossEntropy(grid, CLASSES)
        tokens = ht.Tokens.of(grid, BATCH, 1)
        mine = targets[split(BATCH, grid.tensor.z.size, grid.tensor.z.rank)]
        for step in range(STEPS):
            x = whole((BATCH, 3, *SIZE), f"images {step}")
            optimizers[1].zero_grad()
            expected = torch.nn.functional.cross_entropy(theirs.head(theirs.features(x)), targets)
            expected.backward()
            replicas.zero_grad()
            replicas.enable_grad_sync()
            loss = criterion(ours.head(ours.features(block(grid, x)), tokens), mine, 1 / BATCH)
            loss.backward()
            replicas.finish_grad_sync()
            for optimizer in optimizers:
                optimizer.step()
            assert world.allreduce(loss.item()) == pytest.approx(expected.item(), rel=1e-12)
        for name, parameter in theirs.named_parameters():
            held = ours.get_parameter(name)
            owned = held.detach() if held.shard.owned(grid.coords) else torch.zeros_like(held)
            close(assembled(grid, held.shard, owned), parameter.detach())


@pytest.mark.ranks(1, 2)
def test_images_of_other_channels_are_not_flattened(world):
    for grid in tensor_grids(world):
        with pytest.raises(ValueError, match=r"Flatten is of images of 3 channels, .* got .; make it of the channels"):
            ht.Flatten(grid, 3)(block(grid, whole((BATCH, 6, *SIZE))))
