"""Pipelines: the order of work on every stage, its lowering to messages, and the executor that runs it."""

from hpctrain.pipeline.executor import Executor
from hpctrain.pipeline.lowering import blocking_replay, lower
from hpctrain.pipeline.schedule import Action, forward_only, one_f_one_b

__all__ = ["Action", "Executor", "blocking_replay", "forward_only", "lower", "one_f_one_b"]
