"""Protocols, rows and columns shared by Tables 4 and 5 of the SPOT paper."""

from collections.abc import Mapping

from attnrx_lab.papers.recipe import Column, Recipe, Row
from attnrx_lab.papers.spot_transfer import ORIGINAL, SpotTransferExperiment

STAGES, DEEP_STAGES = "4,7,10", "5,9,13"

# A head on frozen features, as Section 6.2.2 has it; every training image of the dataset.
PROBE = "transfer"
# Every corruption of ImageNet-C at severity 3, on all images (Section 7.1).
CORRUPTED = "robustness(corruptions=all,severities=3,images=none)"

TITLES = {
    ORIGINAL: "baseline",
    "spot": "SPOT",
    "dynamicvit": "DynamicViT",
    "evit": "EViT",
    "class_attention": "class attention",
    "tome": "ToMe",
    "random": "random",
}
# Methods without training are measured with SPOT if a trained SPOT is given, otherwise alone.
OWN = tuple(
    f"{name}={name}:0.7@{STAGES}" for name in ("class_attention", "tome", "random", "spot", "dynamicvit", "evit")
)
SPOT, SPOT_DEEP = (f"spot=spot:0.7@{STAGES}",), (f"spot=spot:0.7@{DEEP_STAGES}",)
DEIT_TINY, DEIT_SMALL = "timm:deit_tiny_patch16_224", "timm:deit_small_patch16_224"
VIT_TINY = "timm:vit_tiny_patch16_224"

# Experiments by the title of their rows. Table 4: the paper's datasets, and two that ViT-Tiny is measured on here.
PROBED = {
    **{
        f"DeiT-T, {title}": SpotTransferExperiment(f"deit_tiny-{dataset}", DEIT_TINY, dataset, PROBE, SPOT)
        for dataset, title in (
            ("cifar100", "CIFAR-100"),
            ("food101", "Food-101"),
            ("dtd", "DTD"),
            ("eurosat", "EuroSAT"),
        )
    },
    **{
        f"ViT-Tiny, {title}": SpotTransferExperiment(f"vit_tiny-{dataset}", VIT_TINY, dataset, PROBE, OWN)
        for dataset, title in (("cifar10", "CIFAR-10"), ("tiny_imagenet", "Tiny-ImageNet"))
    },
}
# Table 5: the paper's models on ImageNet, and ViT-Tiny on ten of its classes.
ROBUST = {
    "DeiT-T": SpotTransferExperiment("deit_tiny-c", DEIT_TINY, "imagenet-1k", CORRUPTED, SPOT),
    "DeiT-S": SpotTransferExperiment("deit_small-c", DEIT_SMALL, "imagenet-1k", CORRUPTED, SPOT),
    "LV-ViT-T": SpotTransferExperiment("lvvit_t-c", "lvvit:t", "imagenet-1k", CORRUPTED, SPOT),
    "LV-ViT-S": SpotTransferExperiment("lvvit_s-c", "lvvit:s", "imagenet-1k", CORRUPTED, SPOT_DEEP),
    "ViT-Tiny": SpotTransferExperiment(
        "vit_tiny-c",
        VIT_TINY,
        "imagenette",
        CORRUPTED,
        OWN,
        label_column="imagenet1k_label",
        test_column="ilsvrc_val",
    ),
}

COLUMNS = (
    Column("accuracy", "Accuracy", "measured", "accuracy", "%", decimals=1),
    Column("change", "Δ accuracy", "measured", "accuracy_change", "pp", decimals=1),
    Column("gflops", "GFLOPS", "costs", "gflops", decimals=2),
)


def transfer_recipe(title: str, experiments: Mapping[str, SpotTransferExperiment]) -> Recipe:
    """Makes a table with a row for the original and for every candidate of the experiments, by title."""
    return Recipe(
        title=title,
        rows=tuple(
            Row(f"{own}, {TITLES[name]}", experiment.scenario, name)
            for own, experiment in experiments.items()
            for name in (ORIGINAL, *(text.partition("=")[0] for text in experiment.candidates))
        ),
        columns=COLUMNS,
        protocol=tuple(experiments.values()),
        seeds=(0,),  # the paper reports one run of each
    )
