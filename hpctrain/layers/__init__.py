"""Grid-parallel layers: each takes the grid it is split over, and every parameter carries its `Shard`.

Activations are matrices of tokens × features, spread over the tensor axes x, y, z so that each element lives on exactly
one rank; a gradient is therefore always a plain sum. They come in two layouts, between which the linear layers move
them, so that nothing is re-arranged in between:

    residual   rows over (z, x), columns over y       norms, dropout, residual sums, pipeline messages
    inner      rows over z, columns over (x, y)       attention heads, MLP, logits

Rows are cut over z at whole sequences, over x at any row. See `layers.linear` for the products.
"""

from hpctrain.layers.attention import Attention
from hpctrain.layers.conv import Conv2d
from hpctrain.layers.dropout import Dropout
from hpctrain.layers.embedding import Embedding
from hpctrain.layers.linear import Linear
from hpctrain.layers.loss import CrossEntropy
from hpctrain.layers.mlp import MLP
from hpctrain.layers.norm import LayerNorm, RMSNorm
from hpctrain.layers.tokens import Tokens

__all__ = [
    "Attention",
    "Conv2d",
    "CrossEntropy",
    "Dropout",
    "Embedding",
    "LayerNorm",
    "Linear",
    "MLP",
    "RMSNorm",
    "Tokens",
]
