"""Divergence of prescriptions of rotary attention, on the twin that `rotary_twin.py` distils, and of its teacher.

    python benchmarks/rotary.py --data DATA --weights W --twin runs/rotary_twin/twin.safetensors [--label-column L] ...

Of the twin: all directions that `total_rank` keeps, slow pairs without rotation; whole rotated pairs by their energy;
token merging. Of the teacher, which has no rotation, the same rules. KL in nats, mean over the test images, with the
standard error.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import timm
import torch
from rotary_twin import ARGUMENTS, NAME
from safetensors.torch import load_file
from torch import nn

import attnrx as rx
from attnrx.cli.options import add_data, splits_argument
from attnrx.decide.rules.metrics import COHERENCE
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.vit.models import family_of
from attnrx.vit.models.libraries.timm_family import TimmFamily

CALIBRATION = 48  # images of the diagnosis


def twin_of(file: Path) -> nn.Module:
    """Returns the adopted twin, normalized as its teacher."""
    model = timm.create_model(NAME, **ARGUMENTS)
    model.load_state_dict(load_file(file))
    # It was distilled on images normalized for its teacher; timm's configuration of the architecture has other
    # statistics.
    return TimmFamily().adopt(model.eval(), mean=(0.5,) * 3, std=(0.5,) * 3).eval()


def without_slow_pairs(diagnosis: Diagnosis) -> Diagnosis:
    """Returns the diagnosis as if every pair rotated fast, so that pairs are kept or removed whole."""
    # Pairs below the least coherence are never stored without rotation (`attnrx.decide.rules.metrics`).
    layers = (
        replace(layer, readings={**layer.readings, COHERENCE: torch.zeros_like(layer.reading(COHERENCE))})
        for layer in diagnosis.layers
    )
    return replace(diagnosis, layers=tuple(layers))


def logits(model: nn.Module, images: rx.data.ImageSet) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(batch.images) for batch in images.batches(50)])


def score_macs(model: nn.Module) -> int:
    # The projections of queries and keys, and their products: what prescriptions of `qk` change.
    return sum(layer.query_key.macs + layer.scores.macs for layer in family_of(model).costs(model).layers)


def models(model: nn.Module, images: rx.data.ImageSet, rotary: bool) -> Iterator[tuple[str, nn.Module]]:
    diagnosis = rx.diagnose(model, images.take(CALIBRATION), batch_size=16, moments=True)
    for share in (0.75, 0.5):
        yield f"qk=total_rank:{share}", rx.realize(model, rx.prescribe(diagnosis, f"qk=total_rank:{share}"))
        if rotary:
            for metric in ("activation", "mix"):
                rule = f"qk=total_rank:{share},metric={metric}"
                yield f"whole pairs, {rule}", rx.realize(model, rx.prescribe(without_slow_pairs(diagnosis), rule))
    for policy in ("ward:13@every", "tome:13@every"):
        yield policy, rx.realize(model, rx.prescribe(diagnosis, f"tokens={policy}"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--twin", type=Path, required=True)
    add_data(parser, "training images for the calibration, test images for the measurement")
    arguments = parser.parse_args()
    teacher = rx.load("timm:vit_tiny_patch16_224", weights=arguments.weights)
    splits = splits_argument(teacher, arguments)
    pair = {"teacher": teacher, "twin": twin_of(arguments.twin)}
    outputs = {name: logits(model, splits.test) for name, model in pair.items()}
    same = (outputs["twin"].argmax(1) == outputs["teacher"].argmax(1)).double().mean()
    print(f"the twin agrees with its teacher on {100 * same:.1f} % of {len(splits.test)} images", flush=True)
    print("| model | prescription | score MACs | KL | same class |\n|---|---|---|---|---|", flush=True)
    for name, model in pair.items():
        for rule, small in models(model, splits.train, rotary=name == "twin"):
            answer, whole = logits(small, splits.test), outputs[name]
            kl = (whole.softmax(-1) * (whole.log_softmax(-1) - answer.log_softmax(-1))).sum(-1)
            error, same_class = kl.std() / len(kl) ** 0.5, (answer.argmax(1) == whole.argmax(1)).double().mean()
            share = score_macs(small) / score_macs(model)
            print(f"| {name} | {rule} | {share:.3f} | {kl.mean():.4f} ± {error:.4f} | {same_class:.3f} |", flush=True)


if __name__ == "__main__":
    main()
