"""Planning: what a run will cost, before it runs, and the choice that costs the least."""

from hpctrain.plan.machine import Machine, names
from hpctrain.plan.prediction import Prediction, predict
from hpctrain.plan.traffic import step_traffic

__all__ = ["Machine", "Prediction", "names", "predict", "step_traffic"]
