"""Planning: distributes one budget, e.g. a latency or a number of MACs, over the ranks and tokens of all layers."""

from attnrx.decide.planning.cost_table import prescribed_costs
from attnrx.decide.planning.depth import least_needed_blocks
from attnrx.decide.planning.planner import plan, plan_sharing
from attnrx.nouns.effort import AXES, PlanSettings
from attnrx.nouns.plan import Plan, PredictedQuantity
from attnrx.nouns.target import Target

__all__ = [
    "AXES",
    "Plan",
    "PlanSettings",
    "PredictedQuantity",
    "Target",
    "least_needed_blocks",
    "plan",
    "plan_sharing",
    "prescribed_costs",
]
