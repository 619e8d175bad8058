"""Latency at batch 1 of token policies of fixed numbers and by image, beside the divergence on the same test images.

Every test image is run once by every model, in turns that start with another model each time; the printed latency is
the median over the images of the CPU time. The ratio of two models is the median over images of their ratio, with a
bootstrap interval.

python benchmarks/by_image.py MODEL --weights FILE --data DATA --policies 'ward:0.7@4,7,10' 'ward:mean=0.7@4,7,10'
"""

import argparse
import time

import numpy as np
import torch
from torch import nn

import attnrx as rx
from attnrx.cli.inputs import model_argument, splits_argument
from attnrx.cli.options import add_data, add_model
from attnrx.vit.models import costs_by_image, family_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    add_data(parser, "training images for calibration, test images for the measurement")
    parser.add_argument("--policies", nargs="+", required=True)
    parser.add_argument("--calibration-images", type=int, default=256)
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    reference = model_argument(arguments.model, "cpu", arguments.weights, arguments.trust).eval()
    splits = splits_argument(reference, arguments)
    calibration = splits.train.take(arguments.calibration_images)
    models = {"original": reference}
    for policy in arguments.policies:
        prescription = rx.prescribe(reference, f"tokens={policy}")
        models[policy] = rx.realize(reference, prescription, calibration=calibration).eval()
    images = torch.cat([batch.images for batch in splits.test.take(arguments.images).batches(50)])
    # A first pass over other images: a policy by image has other numbers of tokens for other images, and for each of
    # them the attention is planned and weights are padded once.
    warm = torch.cat([batch.images for batch in calibration.take(min(100, len(calibration))).batches(50)])
    measure(models, warm)
    logits, seconds = measure(models, images)
    report(models, images, logits, seconds)


@torch.no_grad()
def measure(models: dict[str, nn.Module], images: torch.Tensor) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    """Returns the logits and the CPU seconds [model, image] of every model."""
    seconds, logits = np.zeros((len(models), len(images))), {name: [] for name in models}
    names = list(models)
    for index, image in enumerate(images):
        # Another model is first for every image: what the one before leaves in the caches affects all of them.
        for turn in range(len(names)):
            name = names[(index + turn) % len(names)]
            # CPU time, which other processes of the machine hardly change.
            started = time.process_time()
            output = models[name](image[None])
            seconds[names.index(name), index] = time.process_time() - started
            logits[name].append(output)
    # float64: the divergence of nearly equal models is a small difference of logarithms.
    return {name: torch.cat(parts).double() for name, parts in logits.items()}, seconds


def report(
    models: dict[str, nn.Module], images: torch.Tensor, logits: dict[str, torch.Tensor], seconds: np.ndarray
) -> None:
    reference, generator = logits["original"].log_softmax(-1), np.random.default_rng(0)
    whole = family_of(models["original"]).costs(models["original"]).macs
    print(f"{len(images)} images, {torch.get_num_threads()} thread(s), torch {torch.__version__}")
    print("| policy | mean MACs (sd) | KL (nats) | median ms | speed over the original |")
    print("|---|---|---|---|---|")
    for row, (name, model) in enumerate(models.items()):
        divergence = (reference.exp() * (reference - logits[name].log_softmax(-1))).sum(-1).numpy()
        macs = np.array([each.macs / whole for each in costs_by_image(model, family_of(model), images)])
        draws = generator.integers(0, len(images), (2000, len(images)))  # bootstrap over the images
        low, high = np.quantile(divergence[draws].mean(1), [0.025, 0.975])
        ratios = seconds[0] / seconds[row]  # of every image, paired; the original has row 0
        slow, fast = np.quantile(np.median(ratios[draws], axis=1), [0.025, 0.975])
        print(
            f"| `{name}` | {100 * macs.mean():.1f} % ({100 * macs.std():.1f}) | {divergence.mean():.4f} "
            f"[{low:.4f}, {high:.4f}] | {1000 * np.median(seconds[row]):.2f} | {np.median(ratios):.2f}x "
            f"[{slow:.2f}, {fast:.2f}] |"
        )


if __name__ == "__main__":
    main()
