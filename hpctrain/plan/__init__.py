"""Planning: what a run will cost, before it runs, and the layout that costs the least."""

from hpctrain.plan.machine import Machine, names
from hpctrain.plan.prediction import Prediction, planned, predict
from hpctrain.plan.search import changes, search
from hpctrain.plan.traffic import step_traffic

__all__ = ["Machine", "Prediction", "changes", "names", "planned", "predict", "search", "step_traffic"]
