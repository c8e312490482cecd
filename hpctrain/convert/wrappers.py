"""What is put around a parallelized model: torch's DistributedDataParallel and weights of other models are refused,
torch.compile is left to the rest.

The first, as accelerate puts it there, would overwrite every rank's shards of the weights by those of rank 0, and sum
their gradients. Of other weights, as torch.func.functional_call puts them there, nobody knows which part a tensor is.
torch.compile compiles code between sharded modules, and calls these as they are: communication and gathered weights
cannot be traced.
"""

from __future__ import annotations

import functools

import torch

from hpctrain.convert.refusals import place
from hpctrain.convert.sharded_parameter import ShardedParameter

_TEXT = (
    "torch's DistributedDataParallel would take the parts of weights that the ranks hold for replicas of one model, "
    "but ht.parallelize divided them; for replicas use the data axis of the grid, as in "
    "ht.parallelize(model, ht.Grid(data=2, tensor=4), zero=0). accelerate, Hugging Face's Trainer and Lightning put it "
    "there where MASTER_ADDR or WORLD_SIZE are set: unset them, or run one device"
)


class _Refusal:
    """In the place of the names that DistributedDataParallel is to ignore, which it reads first."""

    def __iter__(self):
        raise ValueError(_TEXT)


def refuse_ddp(model: torch.nn.Module) -> None:
    """Around the model or one of its modules when it is made; around what holds the model, when that is called."""
    for module in model.modules():
        vars(module)["_ddp_params_and_buffers_to_ignore"] = _Refusal()
    model.register_forward_pre_hook(_check_ddp)


def refuse_other_weights(model: torch.nn.Module) -> None:
    """In the place of divided ones, when the model is called. Costs 0.1 microseconds a weight and call."""
    vars(model)["divided_weights"] = [
        (module, name)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if isinstance(parameter, ShardedParameter)
    ]
    model.register_forward_pre_hook(_check_weights)


def _check_weights(model, arguments) -> None:
    if model.divided_weights and (torch.compiler.is_exporting() or torch.jit.is_tracing()):
        raise ValueError(
            "torch.export, torch.onnx and torch.jit.trace would make a program of the parts of weights that one rank "
            "has; export the model as it was before parallelize, with the weights of ht.gather_state_dict(model)"
        )
    if torch.compiler.is_compiling():
        return
    for module, name in model.divided_weights:
        if "sharding" not in vars(module._parameters[name]):
            raise ValueError(
                f"{place()} gives another tensor for the weight {name!r} of {module.path}, which is divided over ranks,"
                " as torch.func.functional_call does; that takes the model's own parameters, and those of its copies. "
                "Whole weights are for load_state_dict"
            )
    if model.hpctrain_grid.comm.size > 1 and torch._C._functorch.peek_interpreter_stack() is not None:
        raise ValueError(
            f"{place()} calls a parallelized model within torch.func, as vmap, grad and jacrev do, which cannot follow "
            "tensors to other ranks; use torch.autograd, whose functions can, or replicate=[...] of ht.parallelize"
        )


def _check_ddp(model, arguments) -> None:
    if not torch.compiler.is_compiling() and torch.nn.parallel.DistributedDataParallel._active_ddp_module is not None:
        raise ValueError(_TEXT)


@functools.cache
def leave_out_of_graphs() -> None:
    """torch.compile breaks its graphs where a sharded module is called."""
    from torch._dynamo import trace_rules  # an import of a second, which every optimizer of torch's needs as well

    trace_rules.add("hpctrain")
