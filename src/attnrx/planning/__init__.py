"""Planning: allocates one budget to ranks and tokens."""

from attnrx.planning.budget import prescribed_costs
from attnrx.planning.measured_costs import TimingSettings
from attnrx.planning.plan import Plan, Point, PredictedQuantity
from attnrx.planning.plan_search import Search
from attnrx.planning.plan_settings import PlanSettings
from attnrx.planning.planner import plan, plan_each
from attnrx.planning.space import AXES
from attnrx.planning.target import Target

__all__ = [
    "AXES",
    "Plan",
    "PlanSettings",
    "Point",
    "PredictedQuantity",
    "Search",
    "Target",
    "TimingSettings",
    "plan",
    "plan_each",
    "prescribed_costs",
]
