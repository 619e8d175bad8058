"""attnrx compare: measures the costs and the quality of several ways of compressing a model."""

from argparse import Namespace

import attnrx as rx
from attnrx.cli.options import (
    COUNT,
    Outcome,
    Parser,
    add_data,
    add_model,
    add_out,
    add_running,
    add_split,
    chosen_images,
    command,
    model_argument,
    option,
    splits_argument,
)
from attnrx.support.progress import Log
from attnrx.support.tables import aligned_table
from attnrx_lab.commands.methods import add_methods, add_points

SHARES = (0.75, 0.5, 0.25)  # the default of --shares without --macs


def _options(parser: Parser) -> None:
    add_model(parser)
    add_data(parser, "calibration from its training images, measurement on --split")
    add_out(parser, "the comparison, one JSON file", kind="attnrx comparison")
    add_split(parser, "test")
    add_running(parser, 64)
    add_methods(parser)
    add_points(parser, SHARES)
    option(parser, "--calibration-images", COUNT, "training images to diagnose on", 96)


@command(
    "compress one model in several ways, and see what each costs and loses",
    "attnrx compare timm:vit_tiny_patch16_224 --data imagenette --methods 'truncatt=uniform_rank:{share}' "
    "'mix=total_rank:{share}' --shares 0.5,0.25 --out comparison.json",
    _options,
)
def compare(arguments: Namespace, log: Log) -> Outcome:
    """Diagnoses the model once, then compresses and measures it with every method at every share or MACs target."""
    from attnrx_lab import comparison

    macs = arguments.macs or ()
    shares = () if macs else arguments.shares or SHARES
    methods = comparison.parse_methods(arguments.methods)
    model = model_argument(arguments.model, arguments.device, arguments.weights, arguments.trust)
    splits = splits_argument(model, arguments, log)
    test = chosen_images(splits, arguments)
    comparison.require_comparable(model, test, methods)
    calibration = splits.train.take(min(arguments.calibration_images, len(splits.train)))
    diagnosis = comparison.diagnosed(model, methods, calibration, arguments.batch_size, arguments.seed, log)
    bench = comparison.MethodBench(model, diagnosis, calibration, test, arguments.seed, arguments.batch_size)
    trials = comparison.compare_methods(bench, methods, shares, log, arguments.out, macs)
    path = arguments.out
    tables = [aligned_table(trials.columns, trials.rows)]
    if trials.differences:
        rows = tuple(each.cells for each in trials.differences)
        title = "differences between methods, paired over the images; p-values are corrected for their number"
        tables.append(aligned_table(trials.difference_columns, rows, title))
    about = f"on {len(test):,} images; intervals are 95 %"
    return Outcome(rx.serialization.read_json(path), (*tables, about, f"comparison: {path}"))
