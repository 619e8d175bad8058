"""What the cases of the sweep start from: small models, images, and a file of every kind, made once when needed."""

import atexit
import shutil
import sys
import tempfile
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

import attnrx as rx
from attnrx.data.model_data import splits_for
from attnrx.nouns.elastic import Elastic, Size
from attnrx.nouns.plan import Plan, PredictedQuantity
from attnrx_lab.vision_transformer import VisionTransformer, ViTConfig, initialize_
from support import tiny_runs
from support.exported_files import planted
from support.pictures import write_folder
from support.pretrained import VIT, of_timm

RULES = "qk=total_rank:0.5 vo=total_rank:0.5 fc1=uniform_rank:4 fc2=uniform_rank:4 tokens=ward:0.5@2"
SIZE, CLASSES = 16, 3


def small_model(seed: int = 0, **changes: Any) -> nn.Module:
    shape: dict[str, Any] = {"width": 16, "depth": 2, "heads": 2, "image_size": SIZE, "patch_size": 4}
    config = ViTConfig.uniform("dense", **shape | {"channels": 3, "classes": CLASSES, "mlp_ratio": 2.0} | changes)
    return initialize_(VisionTransformer(config), seed=seed).float().eval()


class Workshop:
    """Every attribute is made when it is first read; files are in one folder, which nothing may write to."""

    @cached_property
    def root(self) -> Path:
        folder = tempfile.mkdtemp(prefix="sweep-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return Path(folder)

    @cached_property
    def model(self) -> nn.Module:
        return small_model()

    @cached_property
    def timm_model(self) -> nn.Module:
        return of_timm(VIT).float()

    @cached_property
    def loaded(self) -> nn.Module:
        return rx.load(self.timm_model)

    @cached_property
    def images(self) -> torch.Tensor:
        return torch.randn(24, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(3))

    @cached_property
    def others(self) -> torch.Tensor:
        return torch.randn(24, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(4))

    @cached_property
    def labels(self) -> torch.Tensor:
        return torch.arange(24) % CLASSES

    @cached_property
    def splits(self) -> rx.data.Splits:
        both = self.images, self.labels
        return splits_for(self.model, {"train": both, "validation": (self.others, self.labels)})

    @cached_property
    def diagnosis(self) -> rx.Diagnosis:
        return rx.diagnose(self.model, self.images)

    @cached_property
    def prescription(self) -> rx.Prescription:
        return rx.prescribe(self.diagnosis, RULES)

    @cached_property
    def slim(self) -> nn.Module:
        return rx.realize(self.model, self.prescription)

    @cached_property
    def evidence(self) -> rx.Evidence:
        checks = [rx.checks.Costs(), rx.checks.Fidelity(), rx.checks.Accuracy()]
        return rx.verify(self.slim, self.model, (self.images, self.labels), checks)

    @cached_property
    def plan(self) -> Plan:
        expected = {name: PredictedQuantity(0.1, 0.1, 8) for name in ("divergence", "agreement")}
        return Plan(self.prescription, "macs=0.7x", "macs", 0.7, expected, ())

    # Files, by their names below `root`.

    @cached_property
    def diagnosis_file(self) -> Path:
        return self.diagnosis.save(self.root / "diagnosis" / "diagnosis.json")

    @cached_property
    def prescription_file(self) -> Path:
        return self.prescription.save(self.root / "prescription" / "prescription.json")

    @cached_property
    def evidence_file(self) -> Path:
        return self.evidence.save(self.root / "evidence" / "evidence.json")

    @cached_property
    def plan_file(self) -> Path:
        return self.plan.save(self.root / "plan")

    @cached_property
    def own_folder(self) -> Path:
        """A smaller model of attnrx's own layers, with its prescription and evidence."""
        return rx.save(self.slim, self.root / "own", prescription=self.prescription, evidence=self.evidence)

    @cached_property
    def original_folder(self) -> Path:
        return rx.save(self.model, self.root / "original")

    @cached_property
    def timm_folder(self) -> Path:
        """A smaller model of timm."""
        images = torch.randn(24, 3, 16, 16, generator=torch.Generator().manual_seed(5))
        rules = "qk=total_rank:0.5 hidden=uniform_rank:0.5 tokens=tome:1@2"
        return rx.save(
            rx.realize(self.loaded, rx.prescribe(rx.diagnose(self.loaded, images, moments=True), rules)),
            self.root / "timm",
        )

    @cached_property
    def portable_folder(self) -> Path:
        """A smaller model that timm itself can create."""
        images = torch.randn(24, 3, 16, 16, generator=torch.Generator().manual_seed(5))
        diagnosis = rx.diagnose(self.loaded, images, moments=True)
        given = rx.prescribe(diagnosis, "hidden=uniform_rank:0.5", portable=True, multiple=8)
        return rx.save(rx.realize(self.loaded, given), self.root / "portable", portable=True)

    @cached_property
    def elastic_folder(self) -> Path:
        costs = [rx.models.family_of(each).costs(each) for each in (self.model, self.slim)]
        shares = [(each.macs / costs[0].macs, each.params / costs[0].params) for each in costs]
        folder = self.root / "elastic"
        for name, each in (("original", self.model), ("macs-0.5", self.slim)):
            rx.save(each, folder / name)
        named = zip(("original", "macs-0.5"), shares, (self.model, self.slim), strict=True)
        sizes = tuple(Size(name, *share, rx.models.model_fingerprint(each)) for name, share, each in named)
        Elastic(folder, sizes, {"macs": costs[0].macs, "params": costs[0].params}).write()
        return folder

    @cached_property
    def export_file(self) -> Path:
        """A file with facts that fit it, which no runtime can open."""
        (self.root / "export").mkdir()
        return planted(self.root / "export", "onnx")

    @cached_property
    def run_folder(self) -> Path:
        tiny_runs.run(self.root / "run")
        return self.root / "run"

    @cached_property
    def stopped_folder(self) -> Path:
        try:
            tiny_runs.run(self.root / "stopped", tiny_runs.at(5, sys.exit))
        except SystemExit:
            return self.root / "stopped"
        raise AssertionError("the run was not stopped")

    @cached_property
    def report_file(self) -> Path:
        return rx.write_report(self.root / "report" / "report.html", evidence=self.evidence)

    @cached_property
    def data_folder(self) -> Path:
        return write_folder(self.root / "data", {"train": 6, "validation": 2, "test": 2})


WORKSHOP = Workshop()
