"""Measures how far every realization is from the original model, and how this depends on the spread of strengths.

    python benchmarks/realizations.py --out runs/realizations

Small SVDA models are trained on scikit-learn's digits from different initial strengths (--starts START:FACTOR). FACTOR
multiplies the learning rate of the strengths. The models are pruned by energy retention at every value of --rhos, and
realized as the mask and by each compression. The compression `refit` fits on the training images. Distances are
measured on the test images. Each cell has two means over the seeds: the relative L2 distance of the logits, with its
95 % t interval, and the KL divergence in nats. The folder --out stores trained models and measurements, so another run
loads them. --tiny only shows that the command runs, with one short training and few images. A full run takes about 3
minutes on one core.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import attnrx as rx
from attnrx.decide.rules import EnergyRetention
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.support.errors import NoOpPrescription
from attnrx.support.modules import evaluating
from attnrx.support.storage import read_json, write_json
from attnrx.vit.models import build_model
from attnrx_lab.papers.table import t_interval

KINDS = ("mask", "exact", "renormalized", "refit")
PATCH = 4  # 16 tokens


@dataclass(frozen=True)
class Start:
    """The initial value of the strengths, and the factor on their learning rate."""

    strength: float
    factor: float

    @classmethod
    def of(cls, text: str) -> "Start":
        """Reads START:FACTOR."""
        strength, _, factor = text.partition(":")
        return cls(float(strength), float(factor or 1))

    def __str__(self) -> str:
        return f"{self.strength:g}:{self.factor:g}"


@dataclass(frozen=True)
class Measured:
    """The results of one prescription of one model, with every realization's relative L2 distance and KL divergence."""

    start: str
    seed: int
    rho: float
    effective_rank: float
    accuracy: float
    removed: float
    distance: dict[str, float]
    divergence: dict[str, float]


def logits(model: nn.Module, images: "rx.data.ImageSet") -> Tensor:
    """Returns a model's logits for all images."""
    with evaluating([model]), torch.no_grad():
        return torch.cat([model(batch.images) for batch in images.batches(128)])


def effective_rank(diagnosis: Diagnosis) -> float:
    """Returns exp(entropy) of the squared strengths (SVDA, Eqs. 22 to 24), averaged over the heads."""
    # The energies of a head are normalized to a distribution.
    energy = torch.cat([layer.spectrum.strength.double().square() for layer in diagnosis.layers])
    share = energy / energy.sum(-1, keepdim=True)
    return float(torch.special.entr(share).sum(-1).exp().mean())


def measure(start: Start, seed: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Trains one model, unless the folder contains it, and measures it at every rho."""
    folder = Path(arguments.out) / f"start-{start.strength:g}-{start.factor:g}" / f"seed-{seed}"
    path = folder / "measured.json"
    if path.exists():
        return read_json(path)["rows"]
    splits = rx.load_data("digits")
    scale = splits.normalization
    fresh = build_model("svda:digits", seed=seed, patch_size=PATCH, mean=scale.mean, std=scale.std)
    config = rx.TrainingConfig(
        epochs=arguments.epochs,
        batch_size=32,
        learning_rate=4e-3,
        weight_decay=0.0,
        losses=(rx.losses.Task(0.0),),
        augmentation=rx.data.Augmentation(padding=0, flip=False),  # a mirrored digit is not a digit
        strength_init=float(start.strength),
        strength_learning_rate=float(start.factor),
        precision="fp32",
        seed=seed,
    )
    rx.train(fresh, splits, config, folder / "train")
    model = rx.load(folder / "train")
    diagnosis = rx.diagnose(model, splits.validation)  # the test images are only for the distances
    calibration = splits.train.take(min(arguments.images, len(splits.train)))
    reference = logits(model, splits.test)
    labels = torch.cat([batch.labels for batch in splits.test.batches(128)])
    accuracy = 100 * float((reference.argmax(-1) == labels).double().mean())
    rows = []
    for rho in arguments.rhos:
        try:
            prescription = rx.prescribe(diagnosis, EnergyRetention(rho))
        except NoOpPrescription:  # retaining this share of the energy needs every direction
            continue
        logits_of = {
            kind: logits(
                rx.realize(model, prescription, by="compress" if kind == "exact" else kind, calibration=calibration),
                splits.test,
            )
            for kind in KINDS
        }
        removed = 100 * prescription.removed_share
        distances = {
            kind: float((candidate - reference).norm() / reference.norm()) for kind, candidate in logits_of.items()
        }
        divergences = {kind: divergence(reference, candidate) for kind, candidate in logits_of.items()}
        rank = effective_rank(diagnosis)
        rows.append(asdict(Measured(str(start), seed, rho, rank, accuracy, removed, distances, divergences)))
    write_json(path, {"rows": rows})  # written last, so that an interrupted training continues and is then measured
    return rows


def divergence(reference: Tensor, candidate: Tensor) -> float:
    """Returns the mean KL divergence between the reference's and the candidate's class probabilities, in nats."""
    old, new = reference.double().log_softmax(-1), candidate.double().log_softmax(-1)
    return float((old.exp() * (old - new)).sum(-1).mean())


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns one line for every start and rho."""
    lines = [
        "| strengths start:factor | effective rank | rho | removed | "
        + " | ".join(KINDS)
        + " | refit / renormalized |",
        "|" + "---|" * (len(KINDS) + 5),
    ]
    for start, rho in dict.fromkeys((row["start"], row["rho"]) for row in rows):
        group = [row for row in rows if (row["start"], row["rho"]) == (start, rho)]
        # The ratios are paired by seed, so both distances are for the same model and prescription.
        ratios = [row["distance"]["refit"] / row["distance"]["renormalized"] for row in group]
        cells = [start, f"{fmean(row['effective_rank'] for row in group):.1f}", f"{rho:.2f}"]
        cells += [f"{fmean(row['removed'] for row in group):.1f} %"]
        for kind in KINDS:
            distance = spread([row["distance"][kind] for row in group], 4)
            cells.append(f"{distance}; {fmean(row['divergence'][kind] for row in group):.1e}")
        lines.append("| " + " | ".join([*cells, spread(ratios, 2)]) + " |")
    return "\n".join(lines)


def spread(values: Sequence[float], decimals: int) -> str:
    """Returns the mean as text. With several values, adds the mean's 95 % t interval."""
    if len(values) < 2:
        return f"{values[0]:.{decimals}f}"
    over = t_interval(values)
    return f"{over.value:.{decimals}f} [{over.low:.{decimals}f}, {over.high:.{decimals}f}]"


def main(words: Sequence[str] | None = None) -> int:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=Start.of, nargs="+", default=[Start(1, 1), Start(8, 20), Start(8, 100)])
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    parser.add_argument("--rhos", type=float, nargs="+", default=[0.99, 0.95, 0.90, 0.80])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--images", type=int, default=256, help="for refit (256)")
    parser.add_argument("--out", default="runs/realizations", metavar="FOLDER")
    parser.add_argument("--tiny", action="store_true", help="one short training and few images: shows that it runs")
    arguments = parser.parse_args(words)
    if arguments.tiny:
        arguments.starts, arguments.seeds, arguments.rhos = [Start(4, 100)], arguments.seeds[:1], [0.9]
        arguments.epochs, arguments.images = 1, 16
    rows = []
    for start in arguments.starts:
        for seed in arguments.seeds:
            measured = measure(start, seed, arguments)
            accuracy = f"{measured[0]['accuracy']:.1f} % correct" if measured else "no rho removes a direction"
            print(f"start {start}, seed {seed}: {accuracy}", flush=True)
            rows += measured
    text = table(rows)
    write_json(Path(arguments.out) / "realizations.json", {"rows": rows, "tiny": arguments.tiny})
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
