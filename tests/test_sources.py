"""What the source of a module says of two of its layers, where it is written in other ways than most."""

import functools
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hpctrain.convert.own_pairs import between
from hpctrain.convert.sources import each_once, methods_of

act = F.gelu


def found(module, up="up", down="down"):
    methods = methods_of(module)
    way = between(module, methods, up, down) if each_once(methods, up, down) else None
    return way and (way.method.name, tuple(way.between))


def softmax(x):
    return x.softmax(-1)


def outside(layer, x):
    return layer.up(x).mean()


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(4, 9), nn.Linear(9, 4), nn.LayerNorm(9)
        nn.init.zeros_(self.up.bias)


class Pair(Base):
    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class AtTheMargin(Base):
    def forward(self, x):
        """A text that begins
        at the margin."""
        return self.down(F.gelu(self.up(x)))


class InContext(Base):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            y = act(self.up(x))
            return self.down(y)


class OfAnother(Base):
    def forward(self, x):
        return self.down(softmax(self.up(x)))


class AskedByAnHeir(OfAnother):
    def forward(self, x):
        if self.training:
            return super().forward(x)
        return self.down(F.gelu(self.up(x)))


class AskedByName(OfAnother):
    def forward(self, x):
        return OfAnother.forward(self, x) + self.down(F.gelu(self.up(x)))


class TwoNames(Base):
    def forward(self, x):
        y = F.gelu(self.up(x))
        out = self.last = self.down(y)
        return out


class OwnFunction(Base):
    def forward(self, x):
        def act(y):
            return y.softmax(-1)

        return self.down(act(self.up(x)))


class OwnImport(Base):
    def forward(self, x):
        from test_sources import softmax as act

        return self.down(act(self.up(x)))


def closure(act):
    class Closure(Base):
        def forward(self, x):
            return self.down(act(self.up(x)))

    return Closure


class AProperty(Pair):
    @property
    def gate(self):
        return self.up(torch.ones(4)).mean()


class AStaticMethod(Pair):
    @staticmethod
    def score(layer, x):
        return layer.up(x).mean()


class PartOfAMethod(Pair):
    score = functools.partialmethod(lambda self, n, x: self.up(x).mean() * n, 2)


class AnotherSelf(Pair):
    def score(this, x):  # noqa: N805
        return this.up(x).mean()


class ByString(Pair):
    def score(self, x):
        return getattr(self, "up")(x).mean()  # noqa: B009


class ByComputedString(Pair):
    def score(self, x):
        return getattr(self, f"{'u'}p")(x).mean()


class AmongChildren(Pair):
    def score(self, x):
        return next(self.children())(x).mean()


class Given(Pair):
    def score(self, x):
        return outside(self, x)


class InAList(Pair):
    def __init__(self):
        super().__init__()
        self.layers = [self.up]


class InALambda(Pair):
    def __init__(self):
        super().__init__()
        self.score = lambda x: self.up(x).mean()


class Bound(Pair):
    def __init__(self):
        super().__init__()
        self.score = types.MethodType(outside, self)


class Exchanged(Base):
    def __init__(self):
        super().__init__()
        self.run = functools.partial(outside, self)

    def forward(self, x):
        return self.run(x)

    def run(self, x):
        return self.down(F.gelu(self.up(x)))


class InTwoNames(Base):
    def forward(self, x):
        return self.down(F.gelu(self.up(x)))

    decode = forward


class AskedOfABase(Base):
    def run(self, x):
        return self.down(F.gelu(self.up(x)))


class AskingABase(AskedOfABase):
    def forward(self, x):
        return super().run(x)


class OfAProperty(Base):
    @property
    def made(self):
        return self.down(F.gelu(self.up(self.given)))

    def forward(self, x):
        self.given = x
        return self.made


class OfAGenerator(Base):
    def run(self, x):
        y = F.gelu(self.up(x))
        yield 1
        yield self.down(y)


class RaisingProperty(Base):
    @property
    def act(self):
        raise NotImplementedError

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class ModalProperty(Base):
    @property
    def act(self):
        return F.gelu if self.training else softmax

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Comprehension(Base):
    def forward(self, xs):
        y = self.up(xs[0])  # noqa: F841
        return [self.down(y) for y in xs]


class Walrus(Base):
    def forward(self, x, z):
        y = self.up(x)
        return [(y := z), self.down(y)]


class Generator(Base):
    def forward(self, x):
        means = (y.mean() for _ in range(1))  # noqa: F821
        y = self.up(x)
        z = self.down(y)
        return z * sum(means)


class Swallowed(Base):
    def forward(self, x):
        try:
            x = self.up(x)
            x = self.down(x)
        except RuntimeError:
            pass
        return x


class Wrapped(Base):
    forward = functools.wraps(Pair.forward)(lambda self, x: self.down(self.up(x).softmax(-1)))


def weighed(method):
    @functools.wraps(method)
    def call(self, x):
        return method(self, x) * self.up(x).mean()

    return call


class Weighed(Base):
    @weighed
    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class InnerSelf(Base):
    def forward(self, x):
        def run(self, x):
            return self.down(F.gelu(self.up(x)))

        return run(self.norm, x)


class DroppedByTensors(Base):
    def forward(self, x):
        return self.down(F.dropout(self.up(x), self.scale))

    scale = torch.tensor([0.5, 0.0])


class Global(Base):
    def forward(self, x):
        global hidden
        hidden = F.gelu(self.up(x))
        return self.down(hidden)


LEFT = [
    OfAnother, AskedByAnHeir, AskedByName, OwnFunction, OwnImport, closure(softmax), AProperty, AStaticMethod,
    PartOfAMethod, AnotherSelf, ByString, ByComputedString, AmongChildren, Given, InAList, InALambda, Bound, Exchanged,
    InTwoNames, AskingABase, OfAProperty, OfAGenerator,
    RaisingProperty, ModalProperty, Comprehension, Walrus, Generator, Swallowed, Wrapped, Weighed, InnerSelf,
    DroppedByTensors, Global,
]  # fmt: skip


@pytest.mark.parametrize("kind", [Pair, AtTheMargin, InContext, TwoNames])
def test_what_is_read(kind):
    assert found(kind()) == ("forward", ())


@pytest.mark.parametrize("kind", LEFT)
def test_what_is_not_seen_through(kind):
    """Each uses what lies between the layers in another way, or may."""
    assert found(kind()) is None


def test_a_class_without_source():
    space = {"nn": nn, "F": F}
    exec("class Made(nn.Module):\n    def forward(self, x):\n        return self.down(F.gelu(self.up(x)))", space)
    made = space["Made"]()
    made.up, made.down = nn.Linear(4, 9), nn.Linear(9, 4)
    assert found(made) is None


FAMILIES = {
    "albert": ("AlbertLayer", "ffn", "ffn_output"),
    "bart": ("BartDecoderLayer", "fc1", "fc2"),
    "convnext": ("ConvNextLayer", "pwconv1", "pwconv2"),
    "opt": ("OPTDecoderLayer", "fc1", "fc2"),
    "whisper": ("WhisperEncoderLayer", "fc1", "fc2"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    """Of Hugging Face's layers, as they are written and decorated there."""
    transformers = pytest.importorskip("transformers")
    name, up, down = FAMILIES[family]
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(family))
    layers = [module for module in model.modules() if type(module).__name__ == name]
    assert layers
    for layer in layers:
        method, modules = found(layer, up, down)
        assert method == ("ff_chunk" if family == "albert" else "forward")
        assert len(modules) == 1  # the activation
