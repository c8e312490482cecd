"""The section `[precision]` of the configuration as torch dtypes."""

from __future__ import annotations

import torch

from hpctrain import comm
from hpctrain.config import PrecisionConfig
from hpctrain.data_parallel import Precision

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def dtypes(options: PrecisionConfig) -> tuple[torch.dtype, Precision]:
    """Of parameters as they are made, and of weights and gradients from there.

    fp64 is wider than master and sums in fp32, which then are fp64 too.
    """
    compute = DTYPES[options.compute]
    wide = comm.accumulation_dtype(compute)
    given = wide if options.master == "fp32" else compute
    reduce = wide if options.reduce == "fp32" else compute
    comm_dtype = torch.bfloat16 if options.comm_dtype == "bf16" else reduce
    return given, Precision(compute, reduce, comm_dtype, options.loss_scale)
