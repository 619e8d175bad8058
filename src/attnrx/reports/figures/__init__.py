"""Pictures for reports: plain values to SVG or PNG, independent of diagnoses and prescriptions."""

from attnrx.reports.figures.curves import Chart, Curve, CurvePoint, marker_picture
from attnrx.reports.figures.drawing import GAP_WIDTH, as_uri, colour, colour_ramp, mosaic, overlay, span
from attnrx.reports.figures.heatmap import LEVELS, HeatMap
from attnrx.reports.figures.interval_row import IntervalRow, axis_picture
from attnrx.reports.figures.patches import PatchPicture
from attnrx.reports.figures.spectrum_bars import SpectrumBars

__all__ = [
    "GAP_WIDTH",
    "LEVELS",
    "Chart",
    "Curve",
    "CurvePoint",
    "HeatMap",
    "IntervalRow",
    "PatchPicture",
    "SpectrumBars",
    "as_uri",
    "axis_picture",
    "colour",
    "colour_ramp",
    "marker_picture",
    "mosaic",
    "overlay",
    "span",
]
