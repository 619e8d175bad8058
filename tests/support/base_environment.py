"""The six verbs and `shrink` on a user's own DataLoader; test_base_environment.py runs it with base dependencies.

python tests/support/base_environment.py FOLDER
"""

import importlib.util
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import attnrx as rx

OPTIONAL = ("accelerate", "datasets", "PIL", "rich", "scipy", "sklearn", "timm", "torchvision", "transformers")


def main(folder: Path) -> None:
    found = [name for name in OPTIONAL if importlib.util.find_spec(name) is not None]
    assert not found, f"more than the base dependencies is installed: {found}"
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(32, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (32,), generator=generator)
    loader = DataLoader(TensorDataset(images, labels), batch_size=8)
    for name, rules in {
        "svda:cifar10": "qk=energy_retention:0.9 vo=uniform_rank:0.75,metric=weights",
        "dense:cifar10": "qk=total_rank:0.5 vo=total_rank:0.75 fc1=uniform_rank:0.5 tokens=tome:0.7@2,3",
    }.items():
        model = rx.load(name)
        diagnosis = rx.diagnose(model, loader)
        prescription = rx.prescribe(diagnosis, rules)
        slim = rx.realize(model, prescription)
        evidence = rx.verify(slim, model, loader, prescription=prescription)
        saved = rx.save(slim, folder / name.replace(":", "-"), prescription=prescription, evidence=evidence)
        with torch.no_grad():
            assert torch.equal(rx.load(saved)(images), slim(images)), "save == load"
        print(f"{name}: {len(evidence.findings)} findings")
    for macs, faster in ((0.7, None), (None, 1.1)):
        model = rx.load("dense:cifar10")
        shrunk = rx.shrink(model, loader, macs=macs, faster=faster, effort="quick", folder=folder / "state")
        print(f"macs={macs}, faster={faster}: {len(shrunk.evidence.findings)} findings")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
