"""Figures for papers: spectra, readings, ranks, tokens, kept patches and trade-offs, as SVG, PDF and CSV.

A `Figure` contains numbers with their labels, or pictures. Matplotlib draws the figure, and a CSV file stores its
numbers. The registry `DRAWN` contains the kinds of results that can be drawn. Other packages may register their own
kinds of results.
"""

import csv
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from attnrx.decide.rules.metrics import directions_in
from attnrx.nouns.diagnosis import KIND as DIAGNOSIS
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.elastic import KIND as ELASTIC
from attnrx.nouns.elastic import ORIGINAL, Elastic
from attnrx.nouns.prescription import KIND as PRESCRIPTION
from attnrx.nouns.prescription import Prescription
from attnrx.show.reports.layers import ranks, readings_per_head
from attnrx.show.reports.samples import TokenSamples, as_colours, left_pictures
from attnrx.support import arguments as kinds
from attnrx.support.arguments import checked
from attnrx.support.atomic_writes import write_atomically
from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.support.optional import required_module
from attnrx.support.registry import Registry
from attnrx.support.shapes import Float, Tensor
from attnrx.support.storage import file_kind

FORMATS = ("svg", "pdf", "csv")
COLUMNS = ("panel", "series", "x", "y", "low", "high")
# The number of panels in a row, then sizes in inches: a panel, a figure with only one panel, and a cell of a grid.
IN_A_ROW, PANEL, ALONE, CELL = 4, (2.2, 1.8), (4.5, 3.2), 0.32
PICTURE = (1.5, 1.7)  # inches of one picture with its title
LAYER = "layer"  # an axis of whole numbers
# A strength below FLOOR times the largest is a rounding error, so the axis ends there.
FLOOR = 1e-6
MOST_LABELS = 12  # the most series for which a legend is drawn
# Text is stored as text, so readers can search it. Fonts are embedded, because conferences require it.
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "attnrx", "pdf.fonttype": 42, "font.size": 8, "axes.grid": True}
STYLE |= {"grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
# Files contain neither a date nor a path, so the same numbers always produce the same file.
UNDATED = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}


@dataclass(frozen=True)
class Series:
    """The points of one line, or one row of a grid. `low` and `high` are the ends of the intervals of `y`, if any."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


@dataclass(frozen=True)
class Panel:
    """One panel of a figure. It shows series on one pair of axes, or a `picture` with values in [0, 1]."""

    series: tuple[Series, ...]
    title: str = ""
    picture: Float[Tensor, "3 height width"] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Figure:
    """One figure: its name (also the name of its files), the labels of its axes, and its panels.

    `marks` is "lines", "steps", "points", "grid" or "pictures". A grid has one row per series, and the colour of a cell
    shows its `y`. `in_a_row` is the number of panels in a row. If `log_floor` is set, the y-axis is logarithmic and
    starts at this value, or higher if all values are larger.
    """

    name: str
    x: str
    y: str
    panels: tuple[Panel, ...]
    marks: str = "lines"
    log_floor: float | None = None
    in_a_row: int = IN_A_ROW

    @property
    def rows(self) -> Iterator[tuple[Any, ...]]:
        """The rows of the figure's CSV file, without the header COLUMNS."""
        for panel in self.panels:
            for series in panel.series:
                ends = series.low or ("",) * len(series.x), series.high or ("",) * len(series.x)
                for numbers in zip(series.x, series.y, *ends, strict=True):
                    yield panel.title, series.label, *numbers


@dataclass(frozen=True)
class Drawing:
    """The functions that load and draw the results of one class. `name` is the kind recorded in the results' files."""

    name: str
    result: type
    read: Callable[[Path], Any]
    figures: Callable[[Any], Iterator[Figure]]


@checked(source=kinds.ANY, formats=kinds.each(kinds.one_of(*FORMATS), "formats, e.g. ('svg', 'csv')", least=1))
def figures(source: Any, folder: Path | str, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Draws results as figures for a paper, and writes every figure in each format.

    What the figures show depends on the result:

    - A diagnosis: spectra, kept energy, and the readings in which heads differ.
    - A prescription: the kept ranks and tokens.
    - An elastic model, or a comparison of methods: the trade-off between cost and divergence.
    - A result of `shrink`: its diagnosis and its prescription.
    - A result of `rx.reports.sample_tokens(model, images)`: the patches that every stage of token pruning keeps.

    Files are named after their figure, and existing files are replaced. Colours are matplotlib's defaults. To draw
    figures yourself, use the numbers in the CSV files.

    Args:
        source: A `Diagnosis`, a `Prescription`, a `Shrunk`, an `Elastic`, a comparison, `TokenSamples`, or a list of
            these. You may also pass the path of a result's file or folder, except for `TokenSamples`.
        folder: The folder that the figures are written to.
        formats: One or more of svg, pdf and csv.

    Returns:
        The written files.

    Raises:
        InvalidInput: `source` is not one of these results, or has nothing to draw.
        NotSupported: Matplotlib is not installed.
        CheckpointError: A file is damaged, or cannot be written.

    Examples:
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=10)
        >>> diagnosis = rx.diagnose(rx.load(vit), torch.randn(8, 3, 32, 32))
        >>> files = rx.figures(diagnosis, "figures", formats=["csv"])
    """
    found: dict[str, Figure] = {}
    for figure in figures_of(source):
        # If there are several sources of one kind, a number makes the name of every figure unique.
        name = next(
            name
            for count in range(len(found) + 1)
            if (name := figure.name if not count else f"{figure.name}-{count + 1}") not in found
        )
        found[name] = figure
    if not found:
        raise InvalidInput(f"{_described(source)} has nothing to draw: it keeps everything.")
    drawn = [form for form in formats if form != "csv"]
    if drawn:
        required_module("matplotlib", "figures", "a figure")
    written = list[Path]()
    for name, figure in found.items():
        if "csv" in formats:
            written.append(write_atomically(Path(folder) / f"{name}.csv", lambda path, one=figure: _write(one, path)))
        written += _draw(figure, Path(folder) / name, drawn)
    return written


def figures_of(source: Any) -> list[Figure]:
    """Returns the figures of one or several results. A result may also be the path of its file or folder.

    Raises:
        InvalidInput: The source cannot be drawn.
        CheckpointError: A file is damaged.
    """
    if isinstance(source, list | tuple):
        return list(chain.from_iterable(map(figures_of, source)))
    if isinstance(source, str | Path):
        return list(chain.from_iterable(figures_of(result) for result in _read(Path(source))))
    if isinstance(source, TokenSamples):  # not in DRAWN, because samples have no files
        return [kept_patches(source)]
    for drawing in DRAWN.values():
        if isinstance(source, drawing.result):
            return list(drawing.figures(source))
    # A result of `shrink`.
    parts = [part for name in ("diagnosis", "prescription") if (part := getattr(source, name, None)) is not None]
    if parts:
        return figures_of(parts)
    raise InvalidInput(f"{_described(source)} cannot be drawn: give a {_kinds()}, or the path of one.")


def _described(source: Any) -> str:
    return repr(str(source)) if isinstance(source, str | Path) else f"an object of the class {type(source).__name__}"


def _kinds() -> str:
    return ", ".join(kind.removeprefix("attnrx ") for kind in DRAWN)


def _read(path: Path) -> Iterator[Any]:
    """Yields the result in a file, or the results in all files of a folder."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    known = [(file, kind) for file in files if (kind := file_kind(file)) in DRAWN]
    if not known:
        what = "has no file of" if path.is_dir() else "is no file of" if path.exists() else "does not exist; give"
        raise InvalidInput(f"{path} {what} a {_kinds()}, as attnrx writes them.")
    for file, kind in known:
        assert kind is not None
        yield DRAWN[kind].read(file)


def _write(figure: Figure, path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(figure.rows)


def _draw(figure: Figure, path: Path, formats: Sequence[str]) -> Iterator[Path]:
    """Draws a figure, writes it in every format, and yields the files."""
    if not formats:
        return
    matplotlib, library = (required_module(name, "figures", "a figure") for name in ("matplotlib", "matplotlib.figure"))
    count = len(figure.panels)
    columns = min(count, figure.in_a_row)
    rows = -(-count // columns)
    width, height = PICTURE if figure.marks == "pictures" else ALONE if count == 1 else PANEL
    if figure.marks == "grid":
        sides = [(max(len(row.x) for row in panel.series), len(panel.series)) for panel in figure.panels]
        width, height = (CELL * max(side) + 1.2 for side in zip(*sides, strict=True))
    with matplotlib.rc_context(STYLE):
        sheet = library.Figure(figsize=(columns * width, rows * height), layout="constrained")
        axes = sheet.subplots(rows, columns, squeeze=False, sharex=count > 1, sharey=count > 1)
        for panel, axis in zip(figure.panels, axes.flat, strict=False):
            _draw_panel(figure, panel, axis, sheet)
        for axis in axes.flat[count:]:
            axis.set_axis_off()
        if count > 1 and figure.marks != "pictures":
            sheet.supxlabel(figure.x)
            sheet.supylabel(figure.y)
        for form in formats:
            save = {"format": form, "metadata": UNDATED[form]}
            yield write_atomically(
                path.with_name(f"{path.name}.{form}"), lambda file, save=save: sheet.savefig(file, **save)
            )


def _draw_panel(figure: Figure, panel: Panel, axis: Any, sheet: Any) -> None:
    if panel.picture is not None:
        axis.set_title(panel.title, fontsize="small")
        # Pixels are not interpolated, because that would blur the patches.
        axis.imshow(panel.picture.movedim(0, -1).clamp(0, 1).numpy(), interpolation="none")
        axis.set_axis_off()
        return
    axis.set_title(panel.title, fontsize="medium")
    if len(figure.panels) == 1:
        axis.set_xlabel(figure.x)
        axis.set_ylabel("" if figure.marks == "grid" else figure.y)
    if figure.marks == "grid":
        image = axis.imshow([row.y for row in panel.series], aspect="equal", interpolation="nearest")
        axis.set_yticks(range(len(panel.series)), [row.label for row in panel.series])
        axis.set_xticks(range(len(panel.series[0].x)), [f"{x:g}" for x in panel.series[0].x])
        axis.grid(False)
        sheet.colorbar(image, ax=axis, label=figure.y)
        return
    for each in panel.series:
        if figure.marks == "steps":
            axis.step(each.x, each.y, where="mid", label=each.label, linewidth=1)
            continue
        lines = axis.plot(
            each.x,
            each.y,
            marker="o" if figure.marks == "points" else None,
            markersize=3,
            label=each.label,
            linewidth=1,
        )
        if each.low:
            error = [[y - low for y, low in zip(each.y, each.low, strict=True)]]
            error.append([high - y for y, high in zip(each.y, each.high, strict=True)])
            axis.errorbar(each.x, each.y, error, fmt="none", color=lines[0].get_color(), linewidth=0.8, capsize=2)
    if figure.x == LAYER:
        axis.xaxis.get_major_locator().set_params(integer=True)
    if figure.log_floor is None:
        axis.set_ylim(bottom=0)
    else:
        axis.set_yscale("log")
        axis.set_ylim(bottom=max(axis.get_ylim()[0], figure.log_floor))
    if 1 < len(panel.series) <= MOST_LABELS and (len(figure.panels) == 1 or panel is figure.panels[0]):
        axis.legend(fontsize="small")


# What is drawn --------------------------------------------------------------------------------------------------------


def _of_diagnosis(diagnosis: Diagnosis) -> Iterator[Figure]:
    metric, strengths = _strengths(diagnosis)
    panels, energies = list[Panel](), list[Panel]()
    for index, (layer, strength) in enumerate(zip(diagnosis.layers, strengths, strict=True), 1):
        lines, kept = list[Series](), list[Series]()
        for row, head in enumerate(layer.spectrum.heads):
            values = strength[row][: int(layer.spectrum.used[row].sum())]
            if not len(values) or not float(values[0]):
                continue
            directions = tuple(map(float, range(1, len(values) + 1)))
            energy = values.square().cumsum(0) / values.square().sum()
            lines.append(Series(f"head {head + 1}", directions, tuple((values / values[0]).tolist())))
            kept.append(Series(f"head {head + 1}", directions, tuple(energy.tolist())))
        panels.append(Panel(tuple(lines), f"layer {index}"))
        energies.append(Panel(tuple(kept), f"layer {index}"))
    yield Figure("spectra", "direction", f"strength / largest ({metric})", tuple(panels), log_floor=FLOOR)
    yield Figure("energy", "kept directions", f"kept energy ({metric})", tuple(energies))
    for name in sorted(readings_per_head(diagnosis)):
        grid = _grid(name, name.replace("_", " "), diagnosis, name)
        # A head that was pruned has no reading. In dense attention, all directions have the same strength, so some
        # readings are equal in all heads.
        values = [value for row in grid.panels[0].series for value in row.y if not math.isnan(value)]
        if values and not math.isclose(min(values), max(values), rel_tol=1e-6, abs_tol=1e-6):
            yield grid


def _strengths(diagnosis: Diagnosis) -> tuple[str, list[Float[Tensor, "heads directions"]]]:
    """Returns a metric's name, and the strengths of all score directions in this metric, from largest to smallest.

    The metric is "mix", which plans use. If the diagnosis does not support "mix", the metric is "weights". If neither
    metric can be computed for all layers, the strengths are the model's own strengths.
    """
    for metric in ("mix", "weights"):
        with suppress(NotSupported, InvalidInput):
            found = [directions_in(metric, layer).strength.double() for layer in diagnosis.layers]
            return f"metric {metric}", found
    own = [layer.spectrum.strength.double().abs() * layer.spectrum.used for layer in diagnosis.layers]
    return "the model's own", [strength.sort(-1, descending=True).values for strength in own]


def _grid(name: str, label: str, diagnosis: Diagnosis, reading: str) -> Figure:
    """Returns a figure of one reading as a grid, with a row per layer and a column per head of the original model."""
    heads = range(1 + max(head for layer in diagnosis.layers for head in layer.spectrum.heads))
    rows = list[Series]()
    for index, layer in enumerate(diagnosis.layers, 1):
        values = dict(zip(layer.spectrum.heads, layer.readings[reading].tolist(), strict=True))
        rows.append(_row(index, [values.get(head, math.nan) for head in heads]))
    return Figure(name, "head", label, (Panel(tuple(rows)),), marks="grid")


def _row(layer: int, values: Sequence[float]) -> Series:
    return Series(f"layer {layer}", tuple(map(float, range(1, len(values) + 1))), tuple(values))


def _of_prescription(prescription: Prescription) -> Iterator[Figure]:
    lines = list[Series]()
    for title, (_, rows) in ranks(prescription).items():
        # The kept share of a layer's directions or units.
        shares = list[float]()
        for row in rows:
            parts = [part for part in row if part is not None]
            full = sum(full for _, full in parts)
            shares.append(sum(kept or 0 for kept, _ in parts) / full if full else 0.0)
        if min(shares, default=1.0) < 1:
            lines.append(Series(title, tuple(map(float, range(1, len(shares) + 1))), tuple(shares)))
    if lines:
        yield Figure("ranks", LAYER, "share that is kept", (Panel(tuple(lines)),), marks="points")
    if (tokens := prescription.tokens) is not None and tokens.policy.layers:
        stages, share, shares = dict(zip(tokens.policy.layers, tokens.policy.keep, strict=True)), 1.0, list[float]()
        for layer in range(1, len(prescription.layers) + 1):
            share = stages.get(layer, share)
            shares.append(share)
        layers = tuple(map(float, range(1, len(shares) + 1)))
        series = Series(str(tokens.policy.reducer), layers, tuple(shares))
        yield Figure("tokens", LAYER, "share of the patches", (Panel((series,)),), marks="steps")


def kept_patches(samples: TokenSamples) -> Figure:
    """Returns a figure of images with the patches that every stage keeps, one image per row (SPOT, Figures 3 and 6).

    The numbers in the CSV file are 1 for a kept patch, and 0 for a patch that was pruned or merged into another.
    """
    rows, columns = samples.grid
    across = tuple(map(float, range(1, columns + 1)))
    panels = list[Panel]()
    for index, image in enumerate(samples.images):
        name = f"image {index + 1}"
        stages = left_pictures(samples, index)
        label = f"{name}, {samples.labels[index]}" if samples.labels else name
        panels.append(Panel((), label, as_colours(image)))
        for layer, left, picture in zip(samples.policy.layers, samples.left[index], stages, strict=True):
            lines = enumerate(left.view(rows, columns).double().tolist(), 1)
            series = tuple(Series(f"row {row}", across, tuple(line)) for row, line in lines)
            title = f"{name}, layer {layer}: {int(left.sum())} of {left.numel()} left"
            panels.append(Panel(series, title, picture))
    in_a_row = 1 + len(samples.policy.layers)
    return Figure("kept-patches", "column", "patch is left", tuple(panels), marks="pictures", in_a_row=in_a_row)


def _of_elastic(elastic: Elastic) -> Iterator[Figure]:
    measured = [size for size in elastic.sizes if size.divergence is not None or size.name == ORIGINAL]
    by_macs = sorted(measured, key=lambda size: size.macs)
    if len(by_macs) > 1:
        yield trade_off("sizes", "MACs, share of the original", [(size.macs, size) for size in by_macs])
    timed = sorted((1 / size.latency, size.name) for size in measured if size.latency)
    if len(timed) > 1:
        named = {size.name: size for size in measured}
        yield trade_off("speeds", "speed, relative to the original", [(speed, named[name]) for speed, name in timed])


def trade_off(name: str, label: str, sizes: Sequence[tuple[float, Any]]) -> Figure:
    """Returns a figure that plots the divergence of every model size against its cost or its speed."""
    points = tuple(x for x, _ in sizes), tuple(size.divergence or 0.0 for _, size in sizes)
    return Figure(name, label, "divergence", (Panel((Series("sizes", *points),)),), marks="points")


DRAWN: Registry[Drawing] = Registry(
    "result to draw",
    Drawing(DIAGNOSIS, Diagnosis, Diagnosis.load, _of_diagnosis),
    Drawing(PRESCRIPTION, Prescription, Prescription.load, _of_prescription),
    Drawing(ELASTIC, Elastic, lambda path: Elastic.read(path.parent), _of_elastic),
)
