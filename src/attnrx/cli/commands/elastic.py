"""attnrx elastic: several sizes of one model in one folder, from which the best one within a budget is loaded."""

from argparse import Namespace

import attnrx as rx
from attnrx.cli import options
from attnrx.cli.inputs import model_argument, splits_argument
from attnrx.cli.outcome import Outcome
from attnrx.support.progress import Log

SUMMARY = "make several sizes of a model in one folder, to load the best one within a budget"
EXAMPLE = "attnrx elastic timm:vit_tiny_patch16_224 --data imagenette224.parquet --macs 0.8,0.6,0.4 --out runs/elastic"

SETTINGS = ("batch", "threads", "seed")


def add(parser: options.Parser) -> None:
    options.add_model(parser, "the model to make smaller")
    options.add_data(parser, "the images to plan and to verify on")
    budgets = parser.add_mutually_exclusive_group(required=True)
    options.add_arguments(budgets, "elastic", faster="TIMES", macs="SHARES", params="SHARES")
    options.add_out(parser, "the folder of the sizes; load PATH@macs=0.65 or PATH@faster=1.4", folder=True)
    options.add_arguments(parser, "elastic", *SETTINGS, effort=options.EFFORTS)
    options.add_device(parser)


def run(arguments: Namespace, log: Log) -> Outcome:
    from attnrx.verbs.load import preflight  # imports torch

    preflight(folder=arguments.out, report=True)
    log(f"loading {arguments.model} and {arguments.data}")
    model = model_argument(arguments.model, arguments.device, arguments.weights, arguments.trust)
    settings = options.given_arguments(arguments, "faster", "macs", "params", *SETTINGS, "effort")
    sizes = rx.elastic(model, splits_argument(model, arguments), arguments.out, **settings, log=log)
    return Outcome(sizes.to_record(), (*map(str, sizes.sizes), f"sizes: {sizes.folder}"))
