"""Grid-parallel layers: each takes the grid it is split over, and every parameter carries its `Shard`.

Activations are matrices of tokens × features, spread over the tensor axes x, y, z so that each element lives on exactly
one rank; a gradient is therefore always a plain sum. They come in two layouts, between which the linear layers move
them, so that nothing is re-arranged in between:

    residual   rows over (z, x), columns over y       norms, dropout, residual sums, pipeline messages
    inner      rows over z, columns over (x, y)       attention heads, MLP, logits

Rows are cut over z at whole sequences, over x at any row. That is with Agarwal's product; layers take `algorithm=` for
others, of which some have but one layout: see `layers.algorithm`. Where ring and Ulysses ranks share sequences, the
rows are those of this rank's tokens.

Images are (batch, channels, height, width) with the batch over z, channels over x and height over y; see
`layers.spatial`. `Flatten` takes them to the residual layout.
"""

from hpctrain.layers.algorithm import algorithm_of
from hpctrain.layers.attention import Attention
from hpctrain.layers.batch_norm import BatchNorm2d
from hpctrain.layers.context.functional import context_attention
from hpctrain.layers.context.mask import Mask
from hpctrain.layers.context.spans import sequence_spans
from hpctrain.layers.conv import Conv2d
from hpctrain.layers.dropout import Dropout
from hpctrain.layers.embedding import Embedding
from hpctrain.layers.experts.balance import Load, LoadBalance
from hpctrain.layers.experts.experts import Experts
from hpctrain.layers.experts.mixture import Mixture
from hpctrain.layers.experts.router import Router
from hpctrain.layers.flatten import Flatten
from hpctrain.layers.linear import Linear
from hpctrain.layers.loss import CrossEntropy
from hpctrain.layers.mlp import MLP
from hpctrain.layers.norm import LayerNorm, RMSNorm
from hpctrain.layers.pool import AdaptiveAvgPool2d, AvgPool2d, MaxPool2d
from hpctrain.layers.spatial import image_block
from hpctrain.layers.split_backward import SplitBackward
from hpctrain.layers.tokens import Tokens

__all__ = [
    "AdaptiveAvgPool2d",
    "Attention",
    "AvgPool2d",
    "BatchNorm2d",
    "Conv2d",
    "CrossEntropy",
    "Dropout",
    "Embedding",
    "Experts",
    "Flatten",
    "algorithm_of",
    "context_attention",
    "image_block",
    "LayerNorm",
    "Linear",
    "Load",
    "LoadBalance",
    "Mask",
    "MaxPool2d",
    "Mixture",
    "MLP",
    "RMSNorm",
    "Router",
    "Tokens",
    "sequence_spans",
    "SplitBackward",
]
