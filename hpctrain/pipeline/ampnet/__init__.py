"""AMPNet: pipelines driven by messages, over a static graph whose messages choose their own way."""

from hpctrain.pipeline.ampnet.control import Condition, Join, Restate, loop_counter
from hpctrain.pipeline.ampnet.engine import Engine
from hpctrain.pipeline.ampnet.grouping import Broadcast, Group, Ungroup
from hpctrain.pipeline.ampnet.message_graph import MessageGraph
from hpctrain.pipeline.ampnet.network import MessageNetwork
from hpctrain.pipeline.ampnet.placement import place
from hpctrain.pipeline.ampnet.ready import Record
from hpctrain.pipeline.ampnet.source import Source
from hpctrain.pipeline.ampnet.staged import chain_of
from hpctrain.pipeline.ampnet.transform import Loss, Transform, concat, split
from hpctrain.pipeline.ampnet.weights import Weights

__all__ = [
    "Broadcast",
    "Condition",
    "Engine",
    "Group",
    "Join",
    "Loss",
    "MessageGraph",
    "MessageNetwork",
    "Record",
    "Restate",
    "Source",
    "Transform",
    "Ungroup",
    "Weights",
    "chain_of",
    "concat",
    "loop_counter",
    "place",
    "split",
]
