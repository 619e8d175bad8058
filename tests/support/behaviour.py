"""The recorded behaviour of the public functions: prescriptions, costs, logits and KL divergences of fixed settings.

    (cd tests; python -m support.behaviour)              # compares with behaviour.json, and lists what differs
    (cd tests; python -m support.behaviour --write)    # records anew

A change of the architecture must leave every value as it is, to rounding: `test_behaviour.py` compares them. The
settings of "vit-tiny" need the pre-trained ViT-Tiny and the images of ImageNette beside the checkout.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import attnrx as rx
from attnrx.data import Columns
from attnrx.decide.planning.cost_table import prescribed_costs
from attnrx.nouns.prescription import LayerPrescription
from attnrx.vit.maps import LINEAR_MAPS
from attnrx.vit.models import family_of
from attnrx_lab.baselines.compressor import largest_share
from attnrx_lab.comparison.methods import Template, costs_at
from attnrx_lab.rules import JointMoments
from support import cases, pretrained

RECORD = Path(__file__).with_name("behaviour.json")
REAL_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
IMAGES = 8
TOLERANCE = 1e-6  # relative, in float64: sums run in another order on other machines
SHOWN = 2  # images whose logits are recorded


@dataclass(frozen=True)
class Setting:
    """One model, the rule of every map as text, and how the prescription is realized."""

    model: str
    rules: Mapping[str, str]
    by: str = "renormalized"
    macs: float | None = None
    """With a share of the MACs, `{share}` in the rules becomes the largest that fits."""

    @property
    def name(self) -> str:
        rules = " ".join(f"{name}={rule}" for name, rule in self.rules.items())
        how = ["exact" if self.by == "compress" else self.by]
        how += [] if self.macs is None else [f"macs={self.macs}"]
        return f"{self.model}: {rules} ({', '.join(how)})"


EVERY = {"qk": "total_rank:0.6", "vo": "total_rank:0.75", "fc1": "total_rank:0.4", "fc2": "total_rank:0.4"}

SETTINGS = [
    *(Setting("svda", {"qk": "energy_retention:0.8"}, by=by) for by in ("compress", "renormalized", "refit")),
    Setting("svda", {"qk": "energy_retention:0.8"}, by="mask"),
    Setting("svda", {"qk": "shrinkage:0.4"}, by="compress"),
    Setting("svda", {"qk": "energy_retention:0.9", "heads": "remove_heads:spectral=0.9,output=0.9"}, by="compress"),
    Setting("svda", {"qk": "shrinkage:0.3 & top_rank:3 | uniform_heads:selectivity=0.2"}),
    Setting("svda", {"qk": "random_matched(energy_retention:0.8):seed=3"}),
    Setting(
        "svda",
        {"qk": "effective_rank", "vo": "uniform_rank:0.75,metric=weights", "tokens": "attention_received:0.5@2"},
        by="compress",
    ),
    Setting("timm", {"tokens": "spot:0.5@2"}),
    Setting("dense", {"qk": "total_rank:0.6"}),
    Setting("dense", {"qk": "uniform_rank:0.5,metric=weights"}),
    Setting("dense", {"qk": "total_rank:0.5,metric=softmax"}),
    Setting("dense", {"qk": "contribution_energy:0.8,metric=centered"}),
    Setting("dense", {"qk": "shared_rank:5,form=literal,joint=centered,sweeps=20"}),
    Setting("dense", {"qk": "shared_rank:5,form=cp,sweeps=20"}),
    Setting("dense", {"qk": "fusion_rank:6,sweeps=20"}),
    Setting("dense", {"vo": "uniform_rank:0.5,metric=weights"}),
    Setting("dense", {"fc1": "total_rank:0.4", "fc2": "total_rank:0.4"}),
    Setting("dense", {**EVERY, "tokens": "tome:0.5@2"}),
    Setting("dense", {**EVERY, "tokens": "tome:0.5@2"}, by="mask"),
    Setting("lvvit", {"qk": "total_rank:0.6", "tokens": "class_attention:0.5@2"}),
    *(
        Setting(model, {**EVERY, "tokens": "ward:0.5@2"}, by=by)
        for model in ("timm", "transformers")
        for by in ("renormalized", "mask")
    ),
    Setting("timm", {"tokens": "zero_tprune:0.5@2"}),
    Setting(
        "timm",
        {
            "qk": "total_rank:{share}",
            "vo": "total_rank:{share}",
            "fc1": "total_rank:{share}",
            "fc2": "total_rank:{share}",
        },
        macs=0.7,
    ),
    Setting("vit-tiny", {"qk": "total_rank:0.5"}),
    Setting("vit-tiny", {**EVERY, "qk": "uniform_rank:0.5", "fc1": "uniform_rank:0.6", "fc2": "uniform_rank:0.6"}),
    Setting("vit-tiny", {"tokens": "tome:0.7@4,7,10"}),
    Setting("vit-tiny", {"qk": "total_rank:0.75", "tokens": "ward:0.7@4,7,10"}),
    Setting("vit-tiny", {"tokens": "tome:{share}@4,7,10", "qk": "total_rank:{share}"}, macs=0.6),
]


@dataclass(frozen=True)
class Subject:
    """A model, its images, and its diagnosis."""

    model: nn.Module
    images: Any
    diagnosis: rx.Diagnosis = field(repr=False)


@cache
def subject(name: str) -> Subject:
    """Builds a model with fixed weights and diagnoses it on fixed images."""
    model, images = (real if name == "vit-tiny" else small)(name)
    spectra = tuple(layer.spectrum() for layer in family_of(model).attention(model))
    diagnostics = rx.diagnostics.suited_diagnostics(spectra)
    if name == "dense":
        diagnostics = (*diagnostics, JointMoments())
    return Subject(model, images, rx.diagnose(model, images, diagnostics=diagnostics, batch_size=IMAGES))


def small(name: str) -> tuple[nn.Module, Any]:
    """A model of one of the four kinds in float64, and random images."""
    if name in ("timm", "transformers"):
        family, original = pretrained.CASES[{"timm": "vit", "transformers": "hf dinov2, registers"}[name]]
        model = rx.load(original())
        config = cases.ViTConfig.uniform(
            "dense", width=12, depth=2, heads=3, image_size=16, patch_size=8, channels=3, classes=5
        )
        mean, std = family.normalization(model)
        return model, cases.pixels(config, IMAGES).renormalized(cases.Normalization(mean, std))
    config = {"svda": cases.CONFIGS["svda-deep"], "dense": cases.CONFIGS["dense"], "lvvit": cases.LVVITS["lvvit"]}[name]
    return cases.own(config), cases.pixels(config, IMAGES)  # type: ignore[arg-type]


def real(name: str) -> tuple[nn.Module, Any]:
    """The pre-trained ViT-Tiny, and images of ImageNette."""
    model = rx.load("timm:vit_tiny_patch16_224", weights=REAL_DATA / "vit_tiny_patch16_224.safetensors")
    columns = Columns(label_column="imagenet1k_label", test_column="ilsvrc_val")
    splits = rx.load_data(REAL_DATA / "imagenette224.parquet", columns=columns, image_size=224)
    # As they are stored, of the size of the model: timm's transform would enlarge them and cut a rim.
    splits = replace(splits, geometry=None)
    return model, rx.adapt_preprocessing(splits, model).test.take(IMAGES)


def prescribed(setting: Setting) -> rx.Prescription:
    """Prescribes what the setting states."""
    given = subject(setting.model)
    if setting.macs is not None:
        template, most = Template(setting.rules), setting.macs * family_of(given.model).costs(given.model).macs
        share = largest_share(lambda share: costs_at(given.model, given.diagnosis, template, share).macs <= most)
        assert share is not None
        return rx.prescribe(given.diagnosis, template.at(share))
    return rx.prescribe(given.diagnosis, setting.rules)


def measured(setting: Setting) -> dict[str, Any]:
    """Returns what is recorded of one setting."""
    given, prescription = subject(setting.model), prescribed(setting)
    calibration = given.images if setting.by == "refit" else None
    small = rx.realize(given.model, prescription, by=setting.by, calibration=calibration)
    before, after = logits(given.model, given.images), logits(small, given.images)
    costs = family_of(small).costs(small)
    found = {
        "ranks": [list(ranks) for ranks in prescription.ranks],
        "kept": [[torch.nonzero(row).flatten().tolist() for row in layer.qk.keep] for layer in prescription.layers],
        "strength": [float(layer.qk.strength.abs().sum()) for layer in prescription.layers],
        "value_ranks": [ranks(layer, "vo") for layer in prescription.layers],
        "mlp_ranks": [[ranks(layer, name) for name in LINEAR_MAPS] for layer in prescription.layers],
        "tokens": None if prescription.tokens is None else str(prescription.tokens.policy),
        "removed_share": prescription.removed_share,
        "macs": costs.macs,
        "params": costs.params,
        "logits": after[:SHOWN, :5].tolist(),
        "logits_norm": float(after.norm()),
        "kl": float((before.softmax(-1) * (before.log_softmax(-1) - after.log_softmax(-1))).sum(-1).mean()),
    }
    if setting.by != "mask":
        priced = prescribed_costs(given.model, prescription, setting.by)
        assert (priced.macs, priced.params) == (costs.macs, costs.params)
    return found


def ranks(layer: LayerPrescription, name: str) -> list[int] | None:
    """Returns the ranks of a map, None where it stays whole."""
    return list(layer.outputs[name].ranks) if name in layer.outputs else None


def logits(model: nn.Module, images: Any) -> Tensor:
    """All logits of a model in float64."""
    weight = next(model.parameters())
    with torch.no_grad():
        answers = [model(batch.images.to(weight.dtype)) for batch in images.batches(IMAGES)]
    return torch.cat([one[0] if isinstance(one, tuple) else getattr(one, "logits", one) for one in answers]).double()


def differences(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """Describes every value that differs: numbers by more than TOLERANCE, the rest at all."""
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        for name in old:
            yield from differences(old[name], new[name], f"{where}.{name}" if where else name)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from differences(one, other, f"{where}[{index}]")
    elif isinstance(old, float) and isinstance(new, float):
        if abs(old - new) > TOLERANCE * max(1e-3, abs(old)):
            yield f"{where} was {old!r}, and is {new!r}"
    elif old != new:
        yield f"{where} was {old!r}, and is {new!r}"


def main() -> int:
    """Compares, or records anew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the record")
    given = parser.parse_args()
    found = {setting.name: measured(setting) for setting in SETTINGS}
    if given.write:
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(values)}" for name, values in found.items())
        RECORD.write_text("{\n" + lines + "\n}\n", encoding="utf-8")
        return 0
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    different = [
        f"{setting.name}: {line}"
        for setting in SETTINGS
        for line in differences(record[setting.name], found[setting.name])
    ]
    print("\n".join(different) or f"{len(found)} settings, nothing differs")
    return 1 if different else 0


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)  # as in the tests
    torch.use_deterministic_algorithms(True)
    raise SystemExit(main())
