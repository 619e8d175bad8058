"""Texts that users write, edited: what is read is read the same once it is written, and can be used."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

import attnrx as rx
from attnrx.cli.options import parse_losses
from attnrx.data import Columns
from attnrx.data.loading import locate
from attnrx.decide.planning import Target
from attnrx.decide.rules import RULES, parse_rule
from attnrx.exporting import FORMATS
from attnrx.show.checks import CHECKS
from attnrx.training.losses import LOSSES
from attnrx.vit.tokens import REDUCERS
from support.sweep.case import Case, finite
from support.sweep.draws import edited, generator
from support.sweep.workshop import WORKSHOP, small_model

Law = Callable[[Any], str | None]

RULE_TEXTS = (
    "qk=total_rank:0.5 vo=total_rank:0.75", "energy_retention:0.9 & top_rank:3",
    "fc1=uniform_rank:8 fc2=uniform_rank:8",
    "qk=by_layer(total_rank:0.5; uniform_rank:4)", "heads=uniform_rank:0.5", "hidden=uniform_rank:0.5",
    "vo=total_rank:0.5,metric=weights,minimum=2", "tokens=tome:2@every", "qk=random_matched(top_rank:3):seed=3",
    "(shrinkage:0.3 | top_rank:3) & uniform_heads:0.2", "tokens=ward(relevance=0.3):0.7@2",
)  # fmt: skip
POLICIES = ("evit:0.7@2", "tome:3@every", "spot(projected=5,mean=false):0.8@2", "class_attention:0.8@2", "pitome:0.5@2")
NAMES = (
    "svda:digits", "dense:cifar10", "timm:vit_tiny_patch16_224", "hf:google/vit-base-patch16-224", "hub:owner/name",
    "torchvision:vit_b_16", "open_clip:ViT-B-32", "runs/model", "lvvit:s", "runs/sizes@macs=0.6",
)  # fmt: skip
DATASETS = ("t-{00..09}.tar", "hf:owner/name", "cifar10", "a/*.tar", "digits", "imagenette224.parquet", "data/train")


def same_text(read: Callable[[str], Any]) -> Law:
    """The law of texts with a value of their own: it is finite, and its text gives an equal value."""

    def law(value: Any) -> str | None:
        return finite(value) or (None if read(str(value)) == value else f"{value} reads otherwise")

    return law


def prescribed(text: str) -> rx.Prescription:
    return rx.prescribe(WORKSHOP.diagnosis, text)


def kept(prescription: rx.Prescription) -> str | None:
    """The law of prescriptions: no map keeps more than it has, and the file gives it again."""
    for layer in prescription.layers:
        if any(not 0 <= rank <= layer.qk.keep.shape[1] for rank in layer.qk.ranks):
            return f"keeps {layer.qk.ranks} of {layer.qk.keep.shape[1]} directions"
    return finite(prescription) or (None if 0 <= prescription.removed_share <= 1 else "removes more than there is")


def counted(text: str) -> Any:
    """Costs of a model with a policy, which is then run."""
    model = small_model()
    policy = rx.tokens.parse_policy(text)
    costs = rx.models.family_of(model).costs(model, tokens=policy)
    tokens = rx.realize(model, rx.prescribe(model, {"tokens": policy}))
    return costs, tokens(WORKSHOP.images[:2])


def cheaper(result: Any) -> str | None:
    costs, logits = result
    model = WORKSHOP.model
    whole = rx.models.family_of(model).costs(model)
    return finite(logits) or (None if costs.total.macs <= 2 * whole.total.macs else "costs more than the whole")


def built(name: str) -> Any:
    """A model built without weights; a name that needs the network is refused where there is none."""
    with torch.device("meta"):
        return rx.models.build_model(name)


def elastic_size(text: str) -> Any:
    return rx.load(f"{WORKSHOP.elastic_folder}@{text}")


@cache
def languages() -> dict[str, tuple[Callable[[str], Any], Law, tuple[str, ...]]]:
    """What reads a text, the law of what was read, and valid texts."""
    return {
        "rules": (prescribed, kept, RULE_TEXTS),
        "rule": (parse_rule, same_text(parse_rule), tuple(f"{each}:0.5" for each in RULES if each != "by_layer")),
        "policy": (counted, cheaper, POLICIES),
        "reducer": (rx.tokens.parse_reducer, finite, tuple(f"{each}(scores=spot)" for each in REDUCERS)),
        "target": (
            Target.parse, same_text(Target.parse),
            ("faster=1.6", "latency=0.6x", "macs=50%", "size=4MB", "max-kl=0.05", "recall=0.98", "max-drop=1pt"),
        ),
        "format": (rx.exporting.parse_format, finite, tuple(f"{each}(images=9)" for each in FORMATS)),
        "checks": (rx.checks.parse_checks, finite, tuple(f"costs,{each}(most_drop=0.5)" for each in CHECKS)),
        "losses": (lambda text: parse_losses([text]), finite, tuple(f"{each}:weight=0.1" for each in LOSSES)),
        "dataset": (lambda text: locate(text, Columns()), lambda found: None, DATASETS),
        "model": (built, lambda found: None, NAMES),
        "size": (elastic_size, finite, ("macs=0.9", "params=0.9", "macs=95%")),

    }  # fmt: skip


def draw(number: int, folder: Path) -> Case:
    names = list(languages())
    language = names[number % len(names)]
    read, law, texts = languages()[language]
    random = generator("texts", number)
    text = edited(random.choice(texts), random)
    return Case(f"{language} {text!r}"[:120], lambda: read(text), law)
