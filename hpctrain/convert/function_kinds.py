"""Names of torch's functions, by what they do to a tensor of which this rank has a part."""

import math

from hpctrain.convert.sharding import POINTWISE


def _forms(*names: str) -> set[str]:
    """As torch calls functions of these names: also those in place, those of lists and operators."""
    forms = ("{}", "{}_", "_foreach_{}", "_foreach_{}_", "__{}__", "__i{}__")
    return {form.format(name) for name in names for form in forms}


NORMS = ("norm", "linalg_norm", "linalg_vector_norm", "_foreach_norm")
# Of all elements: what every rank's own is combined by, and what a part without elements counts for.
COMPLETED = {
    "sum": ("sum", 0.0), "any": ("max", 0.0), "all": ("min", 1.0), "max": ("max", -math.inf), "min": ("min", math.inf),
}  # fmt: skip
MIXING = {
    "mean", "std", "var", "std_mean", "var_mean", "median", "nanmedian", "mode", "quantile", "prod", "nansum",
    "nanmean", "amax", "amin", "aminmax", "argmax", "argmin", "logsumexp", "count_nonzero", "dist", "histc",
    "histogram", "cumsum", "cumprod", "cummax", "cummin", "unique", "_unique2", "unique_dim", "unique_consecutive",
    "sort", "argsort", "topk", "kthvalue", "softmax", "log_softmax", "normalize",
    "dot", "vdot", "inner", "mv", "mm", "bmm", "matmul", "__matmul__", "__rmatmul__", "addmm", "addmm_", "addmv",
    "addbmm", "baddbmm", "einsum", "tensordot", "chain_matmul", "linalg_multi_dot", "linalg_matmul",
    "cosine_similarity", "svd", "linalg_svd", "qr", "linalg_qr", "lu", "linalg_lu_factor", "linalg_matrix_norm",
    "linalg_eigh", "numpy", "__array__", "__dlpack__", "tolist", "item", "__bool__", "__float__", "__int__",
    "__contains__", "__iter__", "__getitem__", "unbind", "split", "chunk", "tensor_split", "split_with_sizes",
    "bernoulli", "dropout", "multinomial",
}  # fmt: skip
COMPARED = {"equal", "allclose"}
# Of the sum of the replicas' gradients they give something else than the sum of what they give of each.
NOT_LINEAR = _forms(
    "abs", "absolute", "ceil", "clamp", "clamp_max", "clamp_min", "clip", "copysign", "cos", "eq", "erf", "erfinv",
    "exp", "exp2", "expm1", "fix", "float_power", "floor", "floor_divide", "floordiv", "fmax", "fmin", "fmod", "frac",
    "ge", "gt", "hypot", "le", "log", "log10", "log1p", "log2", "lt", "maximum", "minimum", "mod", "nan_to_num", "ne",
    "pow", "rdiv", "reciprocal", "relu", "remainder", "round", "rpow", "rsqrt", "rtruediv", "sgn", "sigmoid", "sign",
    "sin", "sqrt", "square", "tanh", "trunc",
)  # fmt: skip
# So do these, where several operands are gradients.
PRODUCTS = _forms(
    "addcdiv", "addcmul", "div", "divide", "masked_fill", "mul", "multiply", "true_divide", "truediv", "where"
)
# They ask nothing of the numbers, so that the replicas' need not be there.
UNREAD = {"zero_", "_foreach_zero_", "detach_", "requires_grad_", "__get__", "__set__", "size", "dim", "numel"}
SIZED = {"new", "new_empty", "new_zeros", "new_ones", "new_full"}  # by their caller, who knows the whole's size
# What torch makes the states of its optimizers of.
PLAIN = {
    "clone", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", *SIZED,
}  # fmt: skip
UNTYPED = {"as_subclass", "__deepcopy__", "new_tensor"}
# Beside what is pointwise: they leave the elements where they are, where they leave the shape.
UNMOVED = {
    "detach", "view_as", "contiguous", "to", "cpu", "cuda", "pin_memory", "type", "type_as", "float", "double",
    "half", "bfloat16", "gt", "lt", "ge", "le", "eq", "ne", "isnan", "isinf", "isfinite", "logical_not", "logical_and",
    "logical_or", "relu", "erf", "log1p", "expm1", "exp2", "log2", "log10", "sin", "cos", "trunc", "frac", "remainder",
    "fmod", "float_power", "copysign", "hypot", "rsub", *PLAIN,
}  # fmt: skip
# The elements of the argument in its order, in another shape.
RESHAPED = {"view", "reshape", "flatten", "ravel", "squeeze", "unsqueeze"}
# What makes something of each element by itself, or moves none of them to another rank.
BY_ELEMENTS = {
    *POINTWISE, *UNMOVED, *RESHAPED, "get", "t", "transpose", "permute", "swapaxes", "movedim",
}  # fmt: skip
