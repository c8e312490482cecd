"""Kinds of models, each behind one `ModelSpec`; nothing outside this folder knows one of them by name.

To add a model, write a folder (or a file) with

    shape       a frozen dataclass of its sizes, among them `layers`, `width`, `context`, `vocabulary` and `tied`
    model       a `staged.StagedTransformer`: its blocks, its final norm, and what its embedding has beside the tokens'
    spec        a `ModelSpec`: `make_shape` from the section [model], `build`, and `costs` as `TransformerCosts`, from
                which floating-point operations, lower bounds and the traffic formula follow
    huggingface a `huggingface.Format`: config.json and how their tensors make up ours; may be left out

and name the spec in `registry.SPECS`, or call `ht.models.register("name", spec)`. The module of the spec does not
import torch at its top, as commands that only check a configuration start without it. `gpt2/` is the example; every
grid, schedule, ZeRO level, checkpoint, `hpctrain train`, `scale`, `export` and `model.init` then work for the new kind.
"""

from hpctrain.models import gpt2, llama, mixtral
from hpctrain.models.costs import LinearCosts, TransformerCosts
from hpctrain.models.registry import get, register
from hpctrain.models.spec import ModelSpec

__all__ = ["LinearCosts", "ModelSpec", "TransformerCosts", "get", "gpt2", "llama", "mixtral", "register"]
