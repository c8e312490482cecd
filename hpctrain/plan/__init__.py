"""Planning: what a run will cost, before it runs."""

from hpctrain.plan.traffic import step_traffic

__all__ = ["step_traffic"]
