"""attnrx reproduce: the name of a recipe in, a table beside the paper's numbers out."""

from argparse import Namespace

import attnrx as rx
from attnrx.cli.outcome import Outcome, Say
from attnrx.cli.parser import Parser, UsageError, add_out

EXAMPLE = "attnrx reproduce svda/table1 --only cifar10 --seeds 42,43,44"


def add(parser: Parser) -> None:
    """Declares the options."""
    parser.add_argument("recipe", nargs="?", help="e.g. svda/table1; left out, all recipes are listed")
    parser.add_argument("--only", action="append", metavar="DATASET", help="only this dataset; may be repeated")
    parser.add_argument("--seeds", type=_seeds, default=(42, 43, 44), metavar="N,N", help="(42,43,44)")
    parser.add_argument("--tiny", action="store_true", help="on generated images, in seconds: shows that it runs")
    parser.add_argument("--epochs", type=int, metavar="N", help="instead of the paper's; is told in the table")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="seeds side by side, a process each (1)")
    parser.add_argument("--draws", type=int, metavar="N", help="random controls for each prescription")
    parser.add_argument("--test-images", type=int, metavar="N", help="measure on fewer test images")
    parser.add_argument("--control-images", type=int, metavar="N", help="measure the controls on fewer test images")
    add_out(parser, "the folder of all runs and tables", "runs")


def run(arguments: Namespace, say: Say) -> Outcome:
    """Trains what is not trained yet, and makes the table."""
    if arguments.recipe is None:
        names = rx.experiments.recipe_names()
        return Outcome({"recipes": list(names)}, ("\n".join(names),))
    table = rx.experiments.reproduce(
        arguments.recipe,
        say=say,
        only=tuple(arguments.only) if arguments.only else None,
        seeds=arguments.seeds,
        tiny=arguments.tiny,
        epochs=arguments.epochs,
        folder=arguments.out,
        jobs=arguments.jobs,
        draws=arguments.draws,
        test_images=arguments.test_images,
        control_images=arguments.control_images,
    )
    return Outcome(table.to_records(), (table.to_markdown(), f"also in {arguments.out}/{table.name}.md and .json"))


def _seeds(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(seed) for seed in text.split(","))
    except ValueError:
        raise UsageError(f"--seeds {text}: give whole numbers set apart by commas, e.g. 42,43,44.") from None
