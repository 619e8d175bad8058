"""Comparisons of methods on one model at equal shares or MACs: quality, paired by image, and latency, side by side."""

from attnrx_lab.comparison.comparing import compare_methods, require_comparable
from attnrx_lab.comparison.methods import Method, MethodBench, parse_methods
from attnrx_lab.comparison.record import MethodComparison, MethodTrial
from attnrx_lab.comparison.speeds import SPEED_COLUMNS, Rates, Speed, Speeds, compare_speeds, noise_bench

__all__ = [
    "SPEED_COLUMNS",
    "Method",
    "MethodBench",
    "MethodComparison",
    "MethodTrial",
    "Rates",
    "Speed",
    "Speeds",
    "compare_methods",
    "compare_speeds",
    "noise_bench",
    "parse_methods",
    "require_comparable",
]
