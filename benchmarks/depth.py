"""Divergence with whole sublayers removed: attentions or MLPs, those of the smallest divergence alone first, with a
constant or a linear map in their place, and the latter repaired.

python benchmarks/depth.py MODEL --weights FILE --data DATA
"""

import argparse
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import attnrx as rx
from attnrx.change.realization import realize_and_fit
from attnrx.change.realization.repair import Repair
from attnrx.cli.inputs import model_argument, splits_argument
from attnrx.cli.options import add_data, add_model
from attnrx.show.checks.statistics import mean_estimate
from attnrx.vit.costs import Conditions, LatencyProtocol
from attnrx.vit.costs.latency import compare_latencies
from attnrx.vit.maps import SUBLAYERS
from attnrx.vit.models import family_of
from attnrx.vit.outputs import output_kind_of

NEVER = 1e9  # a divergence that no rule removes
CONSTANT = {"attention": "heads", "MLP": "hidden"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    add_data(parser, "training images for calibration and repair, test images for the measurement")
    parser.add_argument("--calibration-images", type=int, default=256)
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--removed", type=int, nargs="+", default=(1, 2, 3, 4))
    parser.add_argument("--rounds", type=int, default=30, help="rounds of the timing; 0 times nothing")
    parser.add_argument("--steps", type=int, default=150, help="steps of the repair, on two images each")
    arguments = parser.parse_args()
    model = model_argument(arguments.model, "cpu", arguments.weights, arguments.trust).eval()
    splits = splits_argument(model, arguments)
    calibration = splits.train.take(arguments.calibration_images)
    images = torch.cat([batch.images for batch in splits.test.take(arguments.images).batches(50)])
    base, before = outputs(model, images), family_of(model).costs(model).macs
    diagnosis = rx.measure_sublayers(model, rx.diagnose(model, calibration, moments=True), calibration)
    print(f"{len(images)} images; torch {torch.__version__}")
    alone = torch.cat([layer.readings["sublayer_divergence"] for layer in diagnosis.layers])
    for part, column in zip(SUBLAYERS, alone.T.tolist(), strict=True):
        print(f"{part} alone, by layer, on calibration images: {' '.join(f'{each:.3f}' for each in column)}")
    smaller = {"unchanged": model}
    print("| removed | layers | MACs, % | constant, KL | linear map, KL | repaired, KL |\n|---|---|---|---|---|---|")
    for which, part in enumerate(SUBLAYERS):
        seen = tuple(
            replace(layer, readings={**layer.readings, "sublayer_divergence": masked})
            for layer in diagnosis.layers
            for masked in [layer.readings["sublayer_divergence"].where(torch.arange(2) == which, NEVER)]
        )
        for count in arguments.removed:
            kept = 2 * len(seen) - count
            given = rx.prescribe(replace(diagnosis, layers=seen), f"depth=total_rank:{kept}")
            gone = [index for index, layer in enumerate(given.layers) if layer.in_place_of(part) is not None]
            rules = ("top_rank:0" if index in gone else "uniform_rank:1.0" for index in range(len(seen)))
            constant = rx.prescribe(diagnosis, f"{CONSTANT[part]}=by_layer({'; '.join(rules)})")
            fit = Repair(steps=arguments.steps, images=2)
            models = (
                rx.realize(model, constant),
                rx.realize(model, given),
                realize_and_fit(model, given, calibration, (fit,)),
            )
            kind = output_kind_of(model)
            kl = [mean_estimate(kind.divergence(base, outputs(each, images)), seed=0) for each in models]
            cells = (f"{each.value:.3f} [{each.low:.3f}, {each.high:.3f}]" for each in kl)
            share = 100 * family_of(models[1]).costs(models[1]).macs / before
            names = ", ".join(str(index + 1) for index in gone)
            print(f"| {count} {part} | {names} | {share:.1f} | {' | '.join(cells)} |", flush=True)
            smaller[f"{count} {part}"] = models[1]
    if arguments.rounds:
        print_speeds(model, smaller, arguments.rounds)


def print_speeds(model: torch.nn.Module, smaller: dict[str, torch.nn.Module], rounds: int) -> None:
    """Times the models and their ONNX files in turns, one image on one thread."""
    noise, reference = torch.randn(1, *family_of(model).input_shape(model)), family_of(model).library_model(model)
    protocol = LatencyProtocol(Conditions(threads=1), rounds, kernels=False)
    with TemporaryDirectory() as folder:
        files = {
            name: rx.export(each, Path(folder) / f"{index}.onnx", batch=1)
            for index, (name, each) in enumerate(smaller.items())
        }
        for what, candidates in (("ONNX Runtime", files), ("eager", smaller)):
            timed = compare_latencies(candidates, reference, noise, protocol)
            unchanged = timed["unchanged"].faster.value
            speeds = (f"{name} {each.faster.value / unchanged:.2f}x" for name, each in timed.items())
            print(f"{what}, speed over the unchanged model: {', '.join(speeds)}")


def outputs(model: torch.nn.Module, images: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return torch.cat([model(part) for part in images.split(50)])


if __name__ == "__main__":
    main()
