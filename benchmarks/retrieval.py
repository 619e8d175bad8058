"""Measures how many neighbours a smaller image tower finds in an index of vectors that the original tower made.

    OMP_NUM_THREADS=1 python benchmarks/retrieval.py timm:vit_tiny_patch16_224 --data imagenette224.parquet \
        --weights vit_tiny_patch16_224.safetensors --index-data tiny_imagenet.parquet --out runs/retrieval-vit
    OMP_NUM_THREADS=1 python benchmarks/retrieval.py dinov2 --data imagenette224.parquet \
        --weights dinov2_vits14_saliency.safetensors --index-data tiny_imagenet.parquet --out runs/retrieval-dinov2

The tower is a timm model without its classifier, a DINOv2 ViT-S/14 from a file with transformers' names (with or
without the prefix `backbone.`), or anything that `attnrx.load` accepts. `shrink` runs with and without
`keep_index=True`, and sees only --data. The index contains the original's vectors of test images from --index-data, and
the queries are training images from --index-data. (--index and --queries set their numbers.) A neighbour counts if it
is among the k nearest that the original finds for the same query, by exact search with cosine similarity. Intervals are
over queries. The speed is relative to the unchanged tower. Both towers run in attnrx's kernels and are timed in turns.
The folder --out stores models, vectors and a JSON file per cell, so an interrupted run resumes. --targets recall=0.98
plans for a recall, which implies `keep_index`.
"""

import argparse
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import attnrx as rx
from attnrx.change.predictions import predict
from attnrx.show.checks.statistics import mean_change, mean_estimate, mean_share
from attnrx.support.errors import InvalidInput, NotSupported, ScaleWarning
from attnrx.support.estimate import Estimate
from attnrx.support.preprocessing import IMAGENET, Normalization
from attnrx.support.storage import read_json, read_tensors, write_json, write_tensors
from attnrx.support.tables import markdown_table
from attnrx.vit.costs.measured import interleave, ratio_of
from attnrx.vit.models import family_of
from attnrx.vit.outputs import KINDS, recalled

KS = (1, 10)  # numbers of neighbours
ROUNDS = {1: 60, 32: 12}  # the rounds of a timing, by batch size
# The published configuration of ViT-S/14.
DINOV2: dict[str, Any] = {"hidden_size": 384, "num_attention_heads": 6, "image_size": 518, "patch_size": 14}
SIDE = 224  # the side of images for DINOv2, whose position embeddings are interpolated


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def tower_of(source: str, weights: Path | None) -> nn.Module:
    """Returns the original model as a tower that maps images to embeddings."""
    if source.startswith("timm:"):
        import timm

        file = {} if weights is None else {"pretrained_cfg_overlay": {"file": str(weights)}}
        given: dict[str, Any] = {"pretrained": weights is not None, "num_classes": 0, **file}
        return rx.load(timm.create_model(source.removeprefix("timm:"), **given), outputs="embedding")
    if source != "dinov2":
        return rx.load(source, weights=weights, outputs="embedding")
    from transformers import Dinov2Config, Dinov2Model

    model = Dinov2Model(Dinov2Config(**DINOV2))
    if weights is not None:
        stored = read_tensors(weights)
        prefix = "backbone." if any(name.startswith("backbone.") for name in stored) else ""
        named = {name.removeprefix(prefix): each.float() for name, each in stored.items() if name.startswith(prefix)}
        # The mask token is used only in training.
        if unset := {*model.load_state_dict(named, strict=False).missing_keys} - {"embeddings.mask_token"}:
            raise InvalidInput(
                f"{weights} lacks {min(unset)}: give weights with the names of transformers' Dinov2Model."
            )
    return rx.load(model, outputs="embedding", image_size=SIDE)


def images_of(tower: nn.Module, data: str) -> rx.data.Splits:
    """Returns a dataset with the tower's preprocessing, in which no image has two roles."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ScaleWarning)
        splits = rx.adapt_preprocessing(rx.load_data(data), tower)
    if not family_of(tower).knows_normalization(tower):  # a transformers model without an image processor
        splits = splits.renormalized(Normalization(*IMAGENET))
    return rx.data.distinct_splits(splits)


@dataclass(frozen=True)
class Cell:
    """One smaller tower: its target, e.g. "macs=0.6", and whether it is fitted for the index."""

    target: str
    keep_index: bool

    @property
    def name(self) -> str:
        return f"{self.target}{'-keep-index' if self.keep_index else ''}"


class Retrieval:
    """The original, the images, and the folder of the results."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.out = options, options.out
        self.tower = tower_of(options.tower, options.weights).eval()
        self.data, others = images_of(self.tower, options.data), images_of(self.tower, options.index_data)
        self.index, self.queries = others.test.take(options.index), others.train.take(options.queries)
        self.out.mkdir(parents=True, exist_ok=True)
        about = {
            "tower": rx.models.model_fingerprint(self.tower),
            "data": self.data.train.fingerprint,
            "index": self.index.fingerprint,
            "queries": self.queries.fingerprint,
            "effort": options.effort,
            "seed": options.seed,
        }
        if self.kept("about.json", lambda: about) != about:
            raise InvalidInput(f"--out {self.out} has results of other images or settings: give a new folder.")

    def kept(self, name: str, make: Callable[[], Any]) -> Any:
        """Returns the content of a JSON file in the folder. If the file is missing, writes it first."""
        path = self.out / name
        if not path.exists():
            write_json(path, make())
        return read_json(path)

    def vectors(self, name: str, model: nn.Module, images: rx.data.ImageSet) -> Tensor:
        """Returns the vectors of a model [images, features], which are stored in the folder."""
        path = self.out / f"{name}.safetensors"
        if not path.exists():
            write_tensors(path, {"vectors": predict({name: model}, images, task=f"{name}: embedding").outputs[name]})
        return read_tensors(path)["vectors"]

    def smaller(self, cell: Cell) -> nn.Module:
        """Returns the smaller tower of a cell.

        Raises:
            NotSupported: No plan reaches the target.
        """
        folder = self.out / cell.name
        if not folder.is_dir():
            quantity, _, limit = cell.target.partition("=")
            how: dict[str, Any] = {quantity.replace("-", "_"): float(limit), "keep_index": cell.keep_index}
            how |= {"effort": self.options.effort, "seed": self.options.seed, "log": log}
            rx.shrink(self.tower, self.data, **how).save(folder, onnx=False)
        return rx.load(folder).eval()

    def quality(self, cell: Cell) -> dict[str, Any]:
        """Returns the costs of a smaller tower and, for every query, the share of the neighbours that it finds."""
        try:
            small = self.smaller(cell)
        except NotSupported as error:
            return {"refused": str(error)}
        stored = self.vectors("index", self.tower, self.index)
        old = self.vectors("queries", self.tower, self.queries)
        new = self.vectors(f"{cell.name}-queries", small, self.queries)
        shares = recalled((old, stored), (new, stored), KS)
        costs = [family_of(model).costs(model) for model in (small, self.tower)]
        return {
            "macs": costs[0].macs / costs[1].macs,
            "params": costs[0].params / costs[1].params,
            "recall": {str(k): column.tolist() for k, column in zip(KS, shares.unbind(1), strict=True)},
            "distance": KINDS["embedding"].divergence(old, new).tolist(),
        }

    def speed(self, cell: Cell, batch: int) -> dict[str, float]:
        """Returns a smaller tower's speed relative to the unchanged tower, both in attnrx's kernels."""
        images = torch.randn(batch, *family_of(self.tower).input_shape(self.tower))
        models = {"original": rx.accelerate(self.tower), "smaller": rx.accelerate(self.smaller(cell))}

        def call_of(model: nn.Module) -> Callable[[], object]:
            return lambda: model(images)

        with torch.inference_mode():
            runs = {name: call_of(model) for name, model in models.items()}
            rounds = self.options.rounds or ROUNDS.get(batch, 12)
            seconds = interleave(runs, rounds=rounds, warmup=3, clock=self.options.clock)
        return vars(ratio_of(seconds["original"], seconds["smaller"]))

    def row(self, cell: Cell, quality: Mapping[str, Any], plain: Mapping[str, Any] | None) -> list[str]:
        """Returns the table row of a cell. `plain` is the quality for the same target without `keep_index`."""
        named = [cell.target, "yes" if cell.keep_index else "no"]
        if "refused" in quality:
            log(f"{cell.name}: {quality['refused']}")
            return [*named, "no plan", *["-"] * (len(KS) + 2 + len(self.options.batches))]
        shares = {k: torch.tensor(quality["recall"][str(k)], dtype=torch.float64) for k in KS}
        seed, gain = self.options.seed, "-"
        if plain is not None and "refused" not in plain:
            before = torch.tensor(plain["recall"][str(KS[-1])], dtype=torch.float64)
            gain = mean_change(shares[KS[-1]] - before, seed).scaled(100).text(1)
        distance = mean_estimate(torch.tensor(quality["distance"], dtype=torch.float64), seed)
        suffix = f"{self.options.threads}-{self.options.clock}"
        speeds = [
            self.kept(f"{cell.name}-speed-{batch}-{suffix}.json", lambda batch=batch: self.speed(cell, batch))
            for batch in self.options.batches
        ]
        return [
            *named,
            f"{100 * quality['macs']:.0f} %",
            *(mean_share(shares[k], seed).scaled(100).text(1) for k in KS),
            gain,
            distance.text(4),
            *(f"{Estimate(**speed).text(2)}x" for speed in speeds),
        ]

    def table(self) -> str:
        """Measures the results that are not in the folder, and returns the table."""
        rows = []
        for target in self.options.targets:
            is_recall, plain = target.startswith("recall="), None
            for keep_index in (True,) if is_recall else (False, True):
                cell = Cell(target, keep_index)
                quality = self.kept(f"{cell.name}.json", lambda cell=cell: self.quality(cell))
                rows.append(self.row(cell, quality, plain))
                plain = None if keep_index else quality
        names = [f"recall@{k}, %" for k in KS] + [f"gain of recall@{KS[-1]}, points", "cosine distance"]
        speeds = [f"faster, batch {batch}" for batch in self.options.batches]
        return markdown_table(["target", "keep_index", "MACs", *names, *speeds], rows)


def main(words: Sequence[str] | None = None) -> None:
    """Measures the results that are not in the folder, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tower", help="timm:NAME, dinov2, or what attnrx.load reads")
    parser.add_argument("--weights", type=Path, metavar="FILE", help="the weights of a tower that is given by its name")
    parser.add_argument("--data", required=True, help="the images that the tower is shrunk with")
    parser.add_argument("--index-data", required=True, metavar="DATA", help="other images, of index and queries")
    parser.add_argument("--targets", nargs="+", default=["macs=0.7", "macs=0.5"], metavar="TARGET")
    parser.add_argument("--index", type=int, default=10_000, metavar="N", help="images of the index")
    parser.add_argument("--queries", type=int, default=2_000, metavar="N")
    parser.add_argument("--effort", default="quick", choices=["quick", "normal", "thorough"])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 32], help="of the speed; none for no speed")
    parser.add_argument("--rounds", type=int, metavar="N", help="of every timing (60 or 12 by batch size)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", default="wall", choices=["wall", "cpu"], help="cpu: of one thread on a busy machine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/retrieval"), metavar="FOLDER")
    options = parser.parse_args(words)
    torch.set_num_threads(options.threads)
    run = Retrieval(options)
    print(run.table())
    print(f"\n{len(run.queries):,} queries in an index of {len(run.index):,} images; effort {options.effort}")


if __name__ == "__main__":
    main()
