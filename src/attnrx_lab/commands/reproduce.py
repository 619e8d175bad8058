"""attnrx reproduce: reproduces tables of papers. You select tables by the names of their recipes."""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from attnrx.cli.options import BATCH, COUNT, Number, Outcome, Parser, add_out, command, option
from attnrx.support.progress import Log

SEEDS = Number(
    int,
    lambda kinds: kinds.Kind(
        "different seeds from 0 on, e.g. 42,43,44",
        lambda seeds: len(set(seeds)) == len(seeds) and all(map(kinds.SEED.accepts, seeds)),
    ),
    "N,N",
    several=True,
)

# Each of these options changes the experiment's setting with the same name. Other settings keep the recipe's values.
KNOBS: Mapping[str, tuple[Any, str]] = {
    "epochs": (COUNT, "epochs of training or fine-tuning"),
    "precision": (("bf16", "fp32"), "of the training"),
    "strength_init": (Number(float, metavar="X"), "first value of every strength"),
    "strength_learning_rate": (Number(float, metavar="X"), "factor on the learning rate of the strengths"),
    "draws": (Number(int, lambda kinds: kinds.whole(1, 1_000_000)), "random controls for each prescription"),
    "train_images": (COUNT, "train on fewer images"),
    "test_images": (COUNT, "validate and measure on fewer images"),
    "control_images": (COUNT, "measure the controls on fewer test images"),
    "factors": (("weights", "data"), "values and MLP by the SVD of the weights, or on the calibration images"),
    "calibration_images": (COUNT, "diagnose on so many training images"),
    "accumulate": (COUNT, "parts of a process's images in a step, in less memory; changes rounding only"),
    "batch_size": (BATCH, "images in a step of training, or in a timed pass"),
    "rounds": (Number(int, lambda kinds: kinds.whole(2, 100_000)), "rounds of timed passes"),
    "model": ("MODEL", "a pre-trained model: timm:NAME, hf:ID or a saved folder"),
    "weights": ("FILE", "the weights of timm:NAME, instead of those that timm loads"),
    "dataset": ("NAME", "a known name, hf:owner/name, or a path"),
    "corrupted": ("FOLDER", "ImageNet-C; left out, corruptions are drawn here"),
    "transfer": ("FOLDER", "the images of the dataset that models are transferred to, with --only"),
    "tuned": ("FOLDER", "a fine-tuned model with a token policy, instead of training one"),
    "label_column": ("COLUMN", "the column that holds the labels, in tables"),
    "test_column": ("COLUMN", "test only on rows that this column marks as true"),
}


def _options(parser: Parser) -> None:
    parser.add_argument("recipe", nargs="*", help="e.g. svda/table1; left out, all recipes are listed")
    option(parser, "--only", "SCENARIO", "only this dataset or model; may be repeated", action="append")
    option(parser, "--seeds", SEEDS, "instead of the recipe's, e.g. 42,43,44")
    tiny = "on generated images, in seconds: shows that it runs, and compares closed forms alone with the paper"
    option(parser, "--tiny", bool, tiny)
    dry = "say what would be trained, in how many operations and hours of one H100, and do nothing"
    option(parser, "--dry-run", bool, dry)
    add_out(parser, "the folder of all runs and tables", "runs", folder=True)
    knobs = parser.add_argument_group("instead of the paper's protocol, listed in the table; not every recipe has each")
    for name, (value, purpose) in KNOBS.items():
        flag = "--data" if name == "dataset" else f"--{name.replace('_', '-')}"  # all commands call it --data
        option(knobs, flag, value, purpose, dest=name)


@command(
    "make tables of the paper again, from training to numbers",
    "attnrx reproduce svda/table1 --only cifar10 --seeds 42,43,44",
    _options,
)
def reproduce(arguments: Namespace, log: Log) -> Outcome:
    """Trains the models that are not trained yet, then writes the tables."""
    from attnrx_lab import papers

    if not arguments.recipe:
        names = papers.recipe_names()
        return Outcome({"recipes": list(names)}, ("\n".join(names),))
    options: dict[str, Any] = {
        "only": tuple(arguments.only) if arguments.only else None,
        "seeds": arguments.seeds,
        "tiny": arguments.tiny,
        **{knob: getattr(arguments, knob) for knob in KNOBS},
    }
    if arguments.dry_run:
        planned = papers.plan_recipes(arguments.recipe, folder=arguments.out, **options)
        return Outcome(planned.to_records(), (str(planned),))
    tables = papers.reproduce(arguments.recipe, log=log, folder=arguments.out, **options)
    shown: list[str] = []
    for table in tables:
        off = (
            f"off: {cell.row}, {cell.column}: {cell.value:.6g}, the paper {cell.expected.printed}"
            for cell in table.off
            if cell.expected
        )
        shown += [table.to_markdown(), *off, f"also in {arguments.out}/{table.recipe.name}.md and .json"]
    records = [table.to_records() for table in tables]
    record = records[0] if len(arguments.recipe) == 1 else {"tables": records}
    return Outcome(record, tuple(shown), 1 if any(table.off for table in tables) else 0)
