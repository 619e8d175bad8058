"""Plans: one budget over ranks and tokens."""

from attnrx.planning.clock import Clock
from attnrx.planning.plan import Expected, Plan, Point
from attnrx.planning.planning import Ways, plan
from attnrx.planning.refining import Search
from attnrx.planning.space import AXES
from attnrx.planning.target import Target

__all__ = ["AXES", "Clock", "Expected", "Plan", "Point", "Search", "Target", "Ways", "plan"]
