"""attnrx diagnose: measures a model on images and writes a diagnosis."""

from argparse import Namespace

import attnrx as rx
from attnrx.cli import options
from attnrx.cli.inputs import chosen_images, model_argument, splits_argument
from attnrx.cli.outcome import Outcome
from attnrx.support.progress import Log
from attnrx.support.tables import aligned_table

SUMMARY = "measure the spectra and indicators of every layer and head of a model"
EXAMPLE = "attnrx diagnose runs/cifar10 --data cifar10 --out diagnosis.json"

# The readings in the printed table; the file contains all.
SHOWN = (
    "effective_rank",
    "effective_rank_mix",
    "sparsity",
    "alignment",
    "selectivity",
)


def add(parser: options.Parser) -> None:
    options.add_model(parser)
    options.add_data(parser, "the images to run the model on")
    options.add_out(parser, "the diagnosis: a JSON file, and its tensors in a second file", kind="attnrx diagnosis")
    options.add_split(parser, "validation")
    options.add_running(parser, 64)
    options.add_arguments(parser, "diagnose", "moments")


def run(arguments: Namespace, log: Log) -> Outcome:
    model = model_argument(arguments.model, arguments.device, arguments.weights, arguments.trust)
    images = chosen_images(splits_argument(model, arguments), arguments)
    log(f"diagnosing {arguments.model} on {len(images):,} images")
    diagnosis = rx.diagnose(model, images, **options.given_arguments(arguments, "moments", "batch_size", "seed"))
    path = diagnosis.save(arguments.out)
    record = {
        "diagnosis": str(path),
        "fingerprint": diagnosis.fingerprint,
        "images": len(images),
        "notes": diagnosis.about.get("notes", []),
        "layers": rx.serialization.read_json(path)["layers"],
    }
    return Outcome(record, (_table(diagnosis), f"diagnosis: {path}"))


def _table(diagnosis: "rx.Diagnosis") -> str:
    # Which readings there are depends on the form of attention.
    names = [name for name in SHOWN if all(name in layer.readings for layer in diagnosis.layers)]
    rows = tuple(
        (
            f"layer {index}, head {head}",
            str(int(layer.spectrum.rank[row])),
            *(f"{float(layer.readings[name][row]):.3f}" for name in names),
        )
        for index, layer in enumerate(diagnosis.layers)
        for row, head in enumerate(layer.spectrum.heads)
    )
    return aligned_table(("", "rank", *(name.replace("_", " ") for name in names)), rows)
