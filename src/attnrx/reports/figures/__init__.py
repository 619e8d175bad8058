"""Pictures for reports: plain values to SVG or PNG, independent of diagnoses and prescriptions."""

from attnrx.reports.figures.curves import STYLES, Chart, Curve, CurvePoint
from attnrx.reports.figures.drawing import GAP_WIDTH, as_uri, colour, colour_ramp, mosaic, overlay, span
from attnrx.reports.figures.pictures import LEVELS, HeatMap, IntervalRow, axis_picture, patch_picture, spectrum_bars

__all__ = [
    "GAP_WIDTH",
    "LEVELS",
    "STYLES",
    "Chart",
    "Curve",
    "CurvePoint",
    "HeatMap",
    "IntervalRow",
    "as_uri",
    "axis_picture",
    "colour",
    "colour_ramp",
    "mosaic",
    "overlay",
    "patch_picture",
    "span",
    "spectrum_bars",
]
