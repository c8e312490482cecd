"""The section `[precision]` of the configuration as torch dtypes."""

from __future__ import annotations

import torch

from hpctrain.replicas import Precision

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def dtypes(options) -> tuple[torch.dtype, Precision]:
    """Of parameters as they are made, and of weights and gradients from there; `options` is `config.Precision`.

    fp64 is wider than master and sums in fp32, which then are fp64 too.
    """
    compute = DTYPES[options.compute]
    wide = torch.promote_types(compute, torch.float32)
    given = wide if options.master == "fp32" else compute
    reduce = wide if options.reduce == "fp32" else compute
    wire = torch.bfloat16 if options.wire == "bf16" else reduce
    return given, Precision(compute, reduce, wire, options.loss_scale)
