"""Names of torch's functions, by what they do to a tensor of which this rank has a part."""

import math

from hpctrain.convert.sharding import POINTWISE

NORMS = ("norm", "linalg_norm", "linalg_vector_norm", "_foreach_norm")
# Of all elements: what every rank's own is combined by, and what a part without elements counts for.
COMPLETED = {
    "sum": ("sum", 0.0), "any": ("max", 0.0), "all": ("min", 1.0), "max": ("max", -math.inf), "min": ("min", math.inf),
}  # fmt: skip
MIXING = {
    "mean", "std", "var", "std_mean", "var_mean", "median", "nanmedian", "mode", "quantile", "prod", "nansum",
    "nanmean", "amax", "amin", "aminmax", "argmax", "argmin", "logsumexp", "count_nonzero", "dist", "histc",
    "histogram", "cumsum", "cumprod", "sort", "argsort", "topk", "kthvalue", "softmax", "log_softmax", "normalize",
    "dot", "vdot", "inner", "mv", "mm", "bmm", "matmul", "__matmul__", "__rmatmul__", "addmm", "addmm_", "addmv",
    "addbmm", "baddbmm", "einsum", "tensordot", "chain_matmul", "linalg_multi_dot", "linalg_matmul",
    "cosine_similarity", "svd", "linalg_svd", "qr", "linalg_qr", "linalg_matrix_norm", "linalg_eigh", "numpy",
    "__array__", "tolist", "item", "__bool__", "__float__", "__int__", "__iter__", "__getitem__", "unbind", "split",
    "chunk", "tensor_split", "split_with_sizes", "bernoulli", "dropout", "multinomial",
}  # fmt: skip
COMPARED = {"equal", "allclose"}
# Of sums over the replicas they give something else than the sum of what they give of each.
NOT_LINEAR = {
    "clamp_", "clamp_min_", "clamp_max_", "clip_", "sign_", "_foreach_clamp_min_", "_foreach_clamp_max_",
    "_foreach_sign_",
}  # fmt: skip
# They ask nothing of the numbers, so that the replicas' need not be there.
UNREAD = {"zero_", "_foreach_zero_", "detach_", "requires_grad_", "__get__", "__set__", "size", "dim", "numel"}
SIZED = {"new", "new_empty", "new_zeros", "new_ones", "new_full"}  # by their caller, who knows the whole's size
# What torch makes the states of its optimizers of.
PLAIN = {
    "clone", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", *SIZED,
}  # fmt: skip
UNTYPED = {"as_subclass", "__deepcopy__", "new_tensor"}
# Beside what is pointwise.
UNMOVED = {"__get__", "detach", "view_as", "contiguous", "to", "cpu", "float", "double", "half", "bfloat16", *PLAIN}
# What makes something of each element by itself, or moves none of them to another rank.
BY_ELEMENTS = {
    *POINTWISE, *UNMOVED, "view", "reshape", "flatten", "ravel", "t", "transpose", "permute", "squeeze", "unsqueeze",
    "swapaxes", "movedim", "type", "type_as", "cuda", "pin_memory", "get", "gt", "lt", "ge", "le", "eq", "ne", "isnan",
    "isinf", "isfinite", "logical_not", "logical_and", "logical_or", "relu", "erf", "log1p", "expm1", "exp2", "log2",
    "log10", "sin", "cos", "trunc", "frac", "remainder", "fmod", "float_power", "copysign", "hypot", "rsub",
}  # fmt: skip
