"""attnrx elastic: several sizes of one model in one folder, from which any budget in between is loaded."""

from argparse import Namespace

import attnrx as rx
from attnrx.cli.inputs import model_argument, splits_argument
from attnrx.cli.options import (
    BATCH,
    SEED,
    THREADS,
    add_data,
    add_device,
    add_mixed_data,
    add_model,
    add_out,
    option,
    several_shares,
    several_speeds,
)
from attnrx.cli.outcome import Outcome
from attnrx.cli.parser import Parser
from attnrx.support.progress import Log

SUMMARY = "make several sizes of a model in one folder, to load for any budget in between"
EXAMPLE = "attnrx elastic timm:vit_tiny_patch16_224 --data imagenette224.parquet --macs 0.8,0.6,0.4 --out runs/elastic"


def add(parser: Parser) -> None:
    add_model(parser, "the model to make smaller")
    add_data(parser, "the images to plan and to verify on")
    add_mixed_data(parser)
    budgets = parser.add_mutually_exclusive_group(required=True)
    option(budgets, "--faster", several_speeds, "speed-ups, e.g. 1.3,1.6,2, measured on this machine", metavar="TIMES")
    option(budgets, "--macs", several_shares, "shares of the MACs that stay, e.g. 0.8,0.6,0.4", metavar="SHARES")
    option(budgets, "--params", several_shares, "shares of the parameters that stay, e.g. 0.8,0.6", metavar="SHARES")
    add_out(parser, "the folder of the sizes; load PATH@macs=0.55 or PATH@faster=1.4", folder=True)
    option(parser, "--effort", ("quick", "normal", "thorough"), "how much is measured; thorough also distills", "quick")
    option(parser, "--batch", BATCH, "images per forward pass whose latency is measured", 32)
    option(parser, "--threads", THREADS, "CPU threads of that forward pass (torch's default)")
    option(parser, "--seed", SEED, "seeds every random draw", 0)
    add_device(parser)


def run(arguments: Namespace, log: Log) -> Outcome:
    from attnrx.verbs.preflight import preflight  # imports torch

    preflight(folder=arguments.out, plans=True, report=True)
    log(f"loading {arguments.model} and {arguments.data}")
    model = model_argument(arguments.model, arguments.device, arguments.weights, arguments.trust)
    made = rx.elastic(
        model,
        splits_argument(model, arguments),
        arguments.out,
        # One of the three was given; the others are None.
        faster=arguments.faster or (),
        macs=arguments.macs or (),
        params=arguments.params or (),
        batch=arguments.batch,
        threads=arguments.threads,
        effort=arguments.effort,
        seed=arguments.seed,
        log=log,
    )
    return Outcome(made.to_record(), (*map(str, made.sizes), f"sizes: {made.folder}"))
