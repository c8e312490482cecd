"""The gradient of a layer's weight in a loop of one's own: of this rank's part, and at first of its own tokens alone.

What treats elements by themselves, as most optimizers do, needs no more than the part. What needs all of a gradient,
as torch.nn.utils.clip_grad_norm_ and LBFGS do, would take the part for it, and is refused.
"""

from __future__ import annotations

import copy
import sys

import torch

from hpctrain.parameter import shard_of

as_tensors = torch._C.DisableTorchFunctionSubclass  # `with as_tensors():` such gradients are ordinary tensors

_OF_ALL = {
    "norm", "linalg_norm", "linalg_vector_norm", "linalg_matrix_norm", "_foreach_norm", "sum", "nansum", "mean",
    "nanmean", "var", "std", "var_mean", "std_mean", "prod", "amax", "amin", "aminmax", "cat", "dot", "vdot", "inner",
    "linalg_vecdot", "dist", "cosine_similarity", "normalize", "mv", "mm", "bmm", "addmm", "matmul", "__matmul__",
    "__rmatmul__", "tensordot", "einsum", "_amp_foreach_non_finite_check_and_unscale_", "median", "nanmedian", "mode",
    "quantile", "nanquantile", "kthvalue", "topk", "sort", "argsort", "msort", "argmax", "argmin", "count_nonzero",
    "logsumexp", "trace", "histc", "stack", "svd", "linalg_svd", "linalg_svdvals", "linalg_qr",
}  # fmt: skip
_WITHOUT_NUMBERS = {  # of the gradient
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "new_tensor",
    "new_empty", "new_zeros", "new_ones", "new_full",
}  # fmt: skip
_TIMES = {"fill_", "mul_", "__imul__", "_foreach_mul_"}
_DATA = vars(torch._C.TensorBase)["data"].__get__
_VIEWS = {"__getitem__", "chunk", "split", "tensor_split", "unbind", "narrow", "select"}
_SAME = {"view", "reshape", "flatten", "ravel", "detach", "contiguous", "to", "float", "double"}
# What a loop that sums by its own means does, by MPI say: whether the sum is right is its own affair.
_HANDED_OUT = {"data_ptr", "numpy", "__array__", "__dlpack__", "untyped_storage"}


class RankGradient(torch.Tensor):
    """What backward leaves on a weight, where other ranks have other parts of it, or the same part from other tokens.

    What is computed from one is a `RankGradient` too, where it is not summed, has as many elements as the part, or is a
    view of it.

    Attributes:
        summed: over the ranks that hold the same part.
        of_sum: that it was such a sum, to which a backward may have added since.
        seen_by: the gradient that `.data` or `.detach()` of it is.
        of_shape: the shape of the gradient of which this is a part; None where it is all of it.

    Raises:
        ValueError: when something is computed from it that is of the whole gradient, or when it changes something else,
            such as a weight, before it is summed.
    """

    summed = True
    of_sum = False
    seen_by: RankGradient | None = None
    of_shape: tuple[int, ...] | None = None

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        name, options = function.__name__, options or {}
        zeroed = mark_zeroed(name, arguments)
        in_place = name[-1] == "_" and name[-2:] != "__"
        if name in _HANDED_OUT:
            for gradient in _gradients(arguments[:1], {}):
                gradient.summed = True
        elif name in _OF_ALL or (name in ("max", "min") and not _are_two(arguments, options)):
            _check_whole(name, arguments, options)
        elif in_place and _is_own(arguments):
            _mark_changed(arguments, options, zeroed or name in ("copy_", "_foreach_copy_"))
        elif in_place and name != "copy_":  # which a loop that sums by its own means fills its buffers by
            _check_summed(name, arguments, options)
        with as_tensors():
            result = function(*arguments, **options)
        if in_place or not (isinstance(result, torch.Tensor) or type(result) in (list, tuple)):
            return result
        if (name in _SAME or function == _DATA) and _is_own(arguments):
            return _another(result, arguments[0])
        gradients = _gradients(arguments, options)
        if name in _WITHOUT_NUMBERS or (name == "clone" and gradients[0].summed and _by_optimizer(sys._getframe(1))):
            return result
        return _computed(name, result, gradients)

    def __deepcopy__(self, memo):
        with as_tensors():
            copied = copy.deepcopy(self.as_subclass(torch.Tensor), memo).as_subclass(RankGradient)
        copied.summed, copied.of_sum, copied.of_shape = self.summed, self.of_sum, self.of_shape
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol):
        with as_tensors():
            return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


def mark_gradient(parameter: torch.nn.Parameter, summed: bool) -> None:
    """Make the parameter's gradient, if it has one, a `RankGradient` of the same memory."""
    with as_tensors():
        gradient = parameter.grad
        if gradient is None:
            return
        if type(gradient) is not RankGradient:
            gradient = gradient.as_subclass(RankGradient)
            if (shard := shard_of(parameter)).divided:
                gradient.of_shape = shard.global_shape
            parameter.grad = gradient
    gradient.summed = summed


def mark_zeroed(name: str, arguments: tuple) -> bool:
    """Where a function makes gradients zeros, of which any number add up to zeros: they are no sum any more. Returns
    whether it does."""
    if name in _TIMES:
        if len(arguments) < 2 or isinstance(arguments[1], (torch.Tensor, list, tuple)) or arguments[1] != 0:
            return False
    elif name not in ("zero_", "_foreach_zero_"):
        return False
    for gradient in _gradients(arguments, {}):
        seen: RankGradient | None = gradient
        while seen is not None:
            seen.of_sum, seen = False, seen.seen_by
    return True


def _mark_changed(arguments, options, overwritten) -> None:
    """A gradient that one which is not summed is added to, say, is not summed any more; what is overwritten is as its
    source, and other tensors and zeros are taken for sums."""
    summed = all(gradient.summed for gradient in _gradients(arguments[1:], options))
    for gradient in _gradients(arguments[:1], {}):
        gradient.summed = summed and (overwritten or gradient.summed)


def _are_two(arguments, options) -> bool:
    """Whether the larger elements of two tensors are asked for, and not the largest of one."""
    return any(isinstance(value, torch.Tensor) for value in (*arguments[1:], *options.values()))


def _by_optimizer(frame) -> bool:
    """Whether the caller is torch.optim: what it clones is kept as its state (SGD's momentum), which stays an ordinary
    tensor."""
    return frame.f_globals.get("__name__", "").startswith("torch.optim.")


def _computed(name, result, gradients):
    """What is computed from gradients is as little summed and, a view or of as many elements as a part of one, such a
    part."""
    summed = all(gradient.summed for gradient in gradients)
    with as_tensors():
        shapes = {each.numel(): each.of_shape for each in gradients if each.of_shape is not None}
    of_view = gradients[0].of_shape if name in _VIEWS else None
    return _marked(result, summed, shapes, of_view) if shapes or not summed else result


def _marked(result, summed, shapes, of_view):
    if type(result) in (list, tuple):
        return type(result)(_marked(each, summed, shapes, of_view) for each in result)
    if not isinstance(result, torch.Tensor) or isinstance(result, (RankGradient, torch.nn.Parameter)):
        return result
    shape = shapes.get(result.numel(), of_view)
    if summed and shape is None:
        return result
    result = result.as_subclass(RankGradient)
    result.summed, result.of_shape = summed, shape
    return result


def _another(result, gradient):
    """The same numbers, in another tensor."""
    result = result.as_subclass(RankGradient)
    result.of_shape, result.summed, result.seen_by = gradient.of_shape, gradient.summed, gradient
    return result


def _is_own(arguments) -> bool:
    """Whether what is changed in place is a gradient itself, or a list of them."""
    target = arguments[0] if arguments else None
    return isinstance(target[0] if isinstance(target, (list, tuple)) and target else target, RankGradient)


def _check_summed(name, arguments, options) -> None:
    for gradient in _gradients(arguments, options):
        check_summed(name, gradient)


def check_summed(name: str, gradient: RankGradient) -> None:
    """Raises ValueError unless it is the sum over all ranks that hold the same part; `name` is of what would use it."""
    if not gradient.summed:
        raise ValueError(
            f"{name} would use a gradient of ht.layers that is of this rank's tokens alone; call "
            "ht.sync_gradients(model, grid) after the last backward of a step. With a strategy of "
            "hpctrain.data_parallel, call its finish_grad_sync(); those that spread the sums over the ranks, as ZeRO, "
            "clip in step(norm, max_norm)"
        )


def _check_whole(name, arguments, options) -> None:
    for gradient in _gradients(arguments, options):
        if gradient.of_shape is not None:
            raise ValueError(
                f"{name} would be that of this rank's {tuple(gradient.shape)} of a gradient of shape "
                f"{gradient.of_shape}; ht.clip_grad_norm_(model, max_norm, grid) clips by the norm of the whole, "
                "ht.gather_gradients(model, grid) has it, and .as_subclass(torch.Tensor) is this rank's part"
            )
    _check_summed(name, arguments, options)


def _gradients(arguments, options) -> list[RankGradient]:
    """Those among its arguments, in lists too."""
    values = [*arguments, *options.values()]
    inner = [x for value in values if isinstance(value, (list, tuple)) for x in value]
    return [value for value in (*values, *inner) if isinstance(value, RankGradient)]
