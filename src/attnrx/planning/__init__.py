"""Plans: one budget over ranks and tokens."""

from attnrx.planning.measured_costs import TimingSettings
from attnrx.planning.plan import Expected, Plan, Point
from attnrx.planning.plan_search import Search
from attnrx.planning.planner import PlanSettings, plan
from attnrx.planning.space import AXES
from attnrx.planning.target import Target

__all__ = ["AXES", "Expected", "Plan", "PlanSettings", "Point", "Search", "Target", "TimingSettings", "plan"]
