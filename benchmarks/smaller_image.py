"""Compares a model on smaller images with pruned models on full-size images.

    python benchmarks/smaller_image.py MODEL --data DATA [--weights W] [--sizes 208 192 176 160] [--rules RULES ...]

The test images are resized from the model's image size (bicubic, antialiased), and the library interpolates the
position embeddings. Nothing is trained. Predictions are compared with the original's predictions at full size. For the
speed, attnrx writes files for ONNX Runtime. The files are timed in turns on one thread, at every size in --batches.
--data and the options for its columns are the same as in the command `attnrx`.
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import onnxruntime
import torch
from torch import nn
from torch.nn.functional import interpolate

import attnrx as rx
from attnrx.change.predictions import predict
from attnrx.cli.options import add_data, add_model, model_argument, splits_argument
from attnrx.show.checks.statistics import mean_estimate, paired_change, proportion
from attnrx.support.tables import markdown_table
from attnrx.vit.costs.measured import interleave, ratio_of
from attnrx.vit.models import family_of

ORIGINAL = "original"
RULES = ("tokens=ward(relevance=0.3):0.8@4,7,10", "tokens=ward(relevance=0.3):0.7@4,7,10")


class Resizing(nn.Module):
    """A model for smaller images that takes full-size images and resizes them."""

    def __init__(self, model: nn.Module, size: int):
        super().__init__()
        self.model, self.size = model, size

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.model(interpolate(images, (self.size, self.size), mode="bicubic", antialias=True))


def opened(path: Path, shape: Sequence[int]) -> Callable[[], object]:
    """Returns a function that runs a file once on a batch [batch, channels, height, width], on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    options.add_free_dimension_override_by_name("batch", shape[0])
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return partial(session.run, None, {"images": torch.randn(shape).numpy()})


def main(words: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    add_data(parser, "the images")
    parser.add_argument("--sizes", type=int, nargs="+", default=[208, 192, 176, 160], metavar="PIXELS")
    parser.add_argument("--rules", nargs="*", default=RULES, metavar="RULES", help="prescriptions beside them")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--rounds", type=int, default=20, metavar="N")
    parser.add_argument("--clock", default="wall", choices=["wall", "cpu"], help="cpu: on a busy machine")
    parser.add_argument("--images", type=int, metavar="N", help="test images (all)")
    arguments = parser.parse_args(words)
    original = model_argument(arguments.model, "cpu", arguments.weights, arguments.trust)
    splits = splits_argument(original, arguments)
    images = splits.test if arguments.images is None else splits.test.take(arguments.images)
    models = {ORIGINAL: original}
    for size in arguments.sizes:
        models[f"{size} x {size} pixels"] = rx.load(arguments.model, weights=arguments.weights, image_size=size)
    diagnosis = rx.diagnose(original, splits.train, images=min(64, len(splits.train)))
    for rule in arguments.rules:
        models[rule] = rx.realize(original, rx.prescribe(diagnosis, rule))
    shapes = {name: family_of(model).input_shape(model) for name, model in models.items()}
    whole = {name: Resizing(model, shapes[name][-1]) if "pixels" in name else model for name, model in models.items()}
    found = predict(whole, images, 50)
    speeds: dict[str, list[str]] = {name: [] for name in models}
    with tempfile.TemporaryDirectory() as folder:
        numbered = enumerate(models.items())
        files = {name: rx.export(model, Path(folder) / f"{number}.onnx").path for number, (name, model) in numbered}
        for batch in arguments.batches:
            runs = {name: opened(path, (batch, *shapes[name])) for name, path in files.items()}
            seconds = interleave(runs, rounds=arguments.rounds, warmup=3, clock=arguments.clock)
            for name, times in seconds.items():
                speeds[name].append(f"{ratio_of(seconds[ORIGINAL], times).text(2)}")
    base, rows = found.outputs[ORIGINAL], []
    for name, outputs in found.outputs.items():
        is_kept = outputs.argmax(1) == base.argmax(1)
        change = paired_change(base.argmax(1) == found.labels, outputs.argmax(1) == found.labels, seed=0)
        cells = (
            change.scaled(100).text(1),
            proportion(int(is_kept.sum()), len(images)).scaled(100).text(1),
            mean_estimate(found.kind.divergence(base, outputs), seed=0).text(3),
        )
        rows.append((name, *speeds[name], *cells))
    batches = (f"batch {batch}" for batch in arguments.batches)
    print(markdown_table(("model", *batches, "top-1, points", "answers unchanged, %", "KL"), rows))


if __name__ == "__main__":
    main()
