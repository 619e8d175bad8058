"""Pages of pictures for the figures of the IrrAtt paper: ranks over the heads, and fusion matrices before and after."""

from collections.abc import Sequence
from html import escape
from itertools import count

from attnrx.errors import InvalidInput
from attnrx.reports.drawing import as_uri, colour, colour_ramp
from attnrx.reports.figures import Chart, Curve, CurvePoint
from attnrx.reports.page import TEMPLATES
from attnrx_lab.papers.experiment import Run
from attnrx_lab.papers.fusion import FusionExperiment, Mix, fusion_of, fusions_at, rule_of

KINDS = {"fusion": "from the fusion matrix (Algorithm 1)", "best": "the best on the weights alone (water-filling)"}


def ranks_page(runs: Sequence[Run], shares: Sequence[float]) -> str:
    """Draws the ranks of the heads of every run, sorted in each layer: their mean over the layers, and their ends."""
    parts = []
    for run, share in _pairs(runs, shares):
        curves = tuple(_curve(run, share, kind, place) for place, kind in enumerate(KINDS))
        heads = "heads of a layer, smallest rank first"
        chart = Chart(f"{run.experiment.scenario}, ranks of the heads", heads, "directions", curves, band=True)
        legend = "".join(f"<li>{picture} {escape(name)}</li>" for picture, name in chart.legend)
        words = "Lines are means over the layers, bands reach from the least to the most."
        picture = f'<div class="picture">{chart.draw()}</div><ul class="legend">{legend}</ul>'
        parts.append(_section(run, share, f"{picture}<p>{words}</p>"))
    return _page("Ranks of the heads", parts)


def fusions_page(runs: Sequence[Run], shares: Sequence[float]) -> str:
    """Draws every fusion matrix as fitted, and with its columns rescaled and sorted by owner."""
    parts = []
    for run, share in _pairs(runs, shares):
        maps = []
        for layer, mix in enumerate(fusions_at(run, share)):
            after = fusion_of(mix).reordered.abs()
            pictures = (("as fitted", mix.abs() / mix.abs().max()), ("sorted and rescaled", after))
            images = "".join(_image(f"layer {layer}, {words}", values) for words, values in pictures)
            inside = run.measure(rule_of(share, f"layer-{layer}"), "fusion", "rescaled")
            energy = "" if inside is None else f": {inside['value']:.1f} % of the energy in the blocks"
            maps.append(f"<h4>layer {layer}{energy}</h4>{images}")
        ramp = f'<p class="ramp">0 <img src="{colour_ramp()}" alt=""> 1, absolute values</p>'
        words = "Rows are heads, columns are directions; above as fitted, below sorted by head and rescaled."
        parts.append(_section(run, share, f"<p>{words}</p>{ramp}{''.join(maps)}"))
    return _page("Fusion matrices", parts)


def _curve(run: Run, share: float, kind: str, place: int) -> Curve:
    points = []
    for head in count(1):
        found = run.record["rules"].get(rule_of(share, f"head-{head}"))
        if found is None:
            break
        points.append(CurvePoint(head, *(found[kind][quantity]["value"] for quantity in ("mean", "least", "most"))))
    return Curve(KINDS[kind], tuple(points), f"style-{place}", place)


def _image(words: str, values: Mix) -> str:
    picture = as_uri(colour(values, 0.0, 1.0))
    size = f'style="width: 100%; height: {14 * len(values)}px"'
    return f'<p style="max-width: none"><img class="pixels" src="{picture}" alt="{escape(words)}" {size}></p>'


def _pairs(runs: Sequence[Run], shares: Sequence[float]) -> list[tuple[Run, float]]:
    """Returns every run with each of the shares that it has."""
    pairs = []
    for run in runs:
        if not isinstance(run.experiment, FusionExperiment):
            raise InvalidInput("pictures of fusion matrices are drawn of runs of FusionExperiment; found other runs.")
        pairs += [(run, share) for share in run.experiment.shares if share in shares]
    return pairs


def _section(run: Run, share: float, content: str) -> str:
    title = f"{run.experiment.name}, {100 * share:.3g} % of the directions"
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _page(title: str, parts: Sequence[str]) -> str:
    style = (TEMPLATES / "style.css").read_text(encoding="utf-8")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{style}</style></head>\n'
        f"<body><main><header><h1>{escape(title)}</h1></header>{''.join(parts)}</main></body></html>\n"
    )
