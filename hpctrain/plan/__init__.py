"""Planning: what a run will cost, before it runs, and the layout that costs the least."""

from hpctrain.plan.between_stages import between_stages
from hpctrain.plan.for_model import ModelPlan, for_model
from hpctrain.plan.inside_module import inside_module
from hpctrain.plan.inside_stage import inside_stage
from hpctrain.plan.machine import Machine, names
from hpctrain.plan.prediction import Prediction, planned, predict
from hpctrain.plan.search import changes, search
from hpctrain.plan.traffic import step_traffic

__all__ = [
    "Machine",
    "ModelPlan",
    "Prediction",
    "between_stages",
    "changes",
    "for_model",
    "inside_module",
    "inside_stage",
    "names",
    "planned",
    "predict",
    "search",
    "step_traffic",
]
