"""Defines the recipes for the tables and figures of the SPOT paper: their methods, protocols, rows and columns."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from attnrx_lab.clutter import STAGES
from attnrx_lab.cluttered_digits import CLUTTERED
from attnrx_lab.papers.corrupted import CorruptedExperiment
from attnrx_lab.papers.datasets import DatasetCounts
from attnrx_lab.papers.kept import KeptPatchesExperiment
from attnrx_lab.papers.recipe import Column, Recipe, Row
from attnrx_lab.papers.spot import ORIGINAL, FineTuning, SpotExperiment, TokenMethod
from attnrx_lab.papers.throughput import ThroughputExperiment
from attnrx_lab.papers.transferred import TransferExperiment

PAPER = "SPOT: Sparsification with Attention Dynamics via Token Relevance in Vision Transformers"

Line = tuple[str, TokenMethod | None]

SPOT = TokenMethod("spot", "spot")
RANDOM = TokenMethod("random", "random")
CLASS_ATTENTION = TokenMethod("class-attention", "class_attention")
EVIT = TokenMethod("evit", "evit")
DYNAMICVIT = TokenMethod("dynamicvit", "dynamicvit")
HALTING_SCORES = TokenMethod("halting-scores", "halting_scores")  # A-ViT's rule, untrained
ATTENTION_AVERAGE = TokenMethod("attention-average", "attention_average")
ZERO_TPRUNE = TokenMethod("zero-tprune", "zero_tprune", trained=False)
NO_MEAN = TokenMethod("spot-no-mean", "spot(mean=false)")
NO_VARIANCE = TokenMethod("spot-no-variance", "spot(variance=false)")
ONE_LAYER = TokenMethod("spot-one-layer", "spot(mean=false,variance=false)")


def untrained(method: TokenMethod) -> TokenMethod:
    return replace(method, name=f"{method.name}-untrained", trained=False)


def projected(features: int) -> TokenMethod:
    """Returns the SPOT method whose predictor uses `features` projected token features (Figure 5)."""
    return TokenMethod(f"spot-projected-{features}", f"spot(projected={features})")


def projections(width: int) -> tuple[Line, ...]:
    """Returns the table lines for SPOT's Figure 5 and the controls, for a model of this width."""
    return (
        ("as many token features as the width", SPOT),
        *((f"1/{divisor}", projected(width // divisor)) for divisor in (2, 4, 8, 16)),
        ("no token features", projected(0)),
        *CONTROLS,
    )


def at(method: TokenMethod, ratio: float) -> TokenMethod:
    """Returns the same method with another keep ratio."""
    # With the default ratio the method keeps its plain name, so that all recipes share its runs.
    same = method.reducer is None or ratio == method.ratio
    return method if same else replace(method, name=f"{method.name}-{ratio:g}", ratio=ratio)


def lines_by_subject(lines: Sequence[Line], subjects: Sequence[str] | None = None) -> dict[str, tuple[Line, ...]]:
    """Returns the table lines for each subject (by default in ABLATED). On cluttered digits the keep ratio is lower."""
    testbed = tuple((label, method and at(method, TESTBED_RATIO)) for label, method in lines)
    return {subject: testbed if subject == TESTBED else tuple(lines) for subject in subjects or ABLATED}


# The tables use three kinds of original models: the paper's four models on ImageNet, a pre-trained ViT-Tiny on ten
# ImageNet classes, and small models for a CPU. ViT-Tiny is distilled only from the original's logits. The paper trains
# 80 epochs on eight GPUs for each line. On one CPU core, CIFAR-10 takes 16 minutes for the original, which all recipes
# share, and 1.5 minutes per line and seed. On digits among clutter (`attnrx_lab.clutter`), it matters which tokens are
# kept, because the digit covers 4 of 100 patches, and 12 patches remain. Its original takes 3 minutes on one CPU core,
# and each line and seed takes 8 to 30 seconds.
TESTBED, TESTBED_RATIO = "cluttered_digits", 0.5
DEIT_TINY, DEIT_SMALL, VIT_TINY = (f"timm:{size}_patch16_224" for size in ("deit_tiny", "deit_small", "vit_tiny"))
# For models that are not in the paper: its losses, but few steps on a CPU, smoothed labels and clipped gradients.
OWN_TUNING = FineTuning(precision="fp32", label_smoothing=0.1, gradient_clip=1.0)
IMAGENETTE: dict[str, Any] = {"label_column": "imagenet1k_label", "test_column": "ilsvrc_val"}
SUBJECTS: Mapping[str, SpotExperiment] = {
    **{
        subject: SpotExperiment(
            subject, model, "imagenet-1k", SPOT, tuning=FineTuning(similarity=similarity), held_out=0.0
        )
        for subject, model, similarity in (
            ("deit_tiny", DEIT_TINY, 0.0),
            ("deit_small", DEIT_SMALL, 0.0),
            ("lvvit_tiny", "lvvit:t", 10.0),
            ("lvvit_small", "lvvit:s", 10.0),
        )
    },
    "vit_tiny": SpotExperiment(
        "vit_tiny",
        VIT_TINY,
        "imagenette",
        SPOT,
        tuning=replace(
            OWN_TUNING, learning_rate=1e-4, predictor_factor=20.0, weight_decay=0.0, task=False, distillation=1.0
        ),
        epochs=1,
        batch_size=64,
        **IMAGENETTE,
    ),
    TESTBED: SpotExperiment(
        TESTBED,
        None,
        CLUTTERED,
        SPOT,
        tuning=replace(OWN_TUNING, images=2560),
        epochs=1,
        batch_size=32,
        test_images=1440,
        validation_images=320,
    ),
    "cifar10_small": SpotExperiment(
        "cifar10_small",
        None,
        "cifar10",
        SPOT,
        tuning=replace(OWN_TUNING, learning_rate=5e-4, images=4800),
        epochs=1,
        batch_size=32,
        test_images=2000,
        validation_images=500,
    ),
}
TITLES = {
    "deit_tiny": "DeiT-T",
    "deit_small": "DeiT-S",
    "lvvit_tiny": "LV-ViT-T",
    "lvvit_small": "LV-ViT-S",
    "vit_tiny": "ViT-Tiny",
    "cifar10_small": "CIFAR-10",
    TESTBED: "digits among clutter",
}
PRETRAINED = ("deit_tiny", "deit_small", "lvvit_tiny", "lvvit_small")  # the paper's models
# The original on which the paper ablates SPOT, and the originals that a CPU can measure.
ABLATED = ("deit_small", "vit_tiny", "cifar10_small", TESTBED)

ACCURACY = Column("accuracy", "Top-1", "measured", "accuracy", "%")
CHANGE = Column("change", "Δ top-1", "measured", "accuracy_change", "pp")
GFLOPS = Column("gmacs", "GFLOPS", "paper", "gmacs", decimals=1, exact=True)
GFLOPS_CHANGE = Column("gmacs_change", "Δ GFLOPS", "paper", "gmacs_change", decimals=1, exact=True)
CORRUPTED = Column("corrupted", "Top-1, corrupted", "measured", "corrupted_accuracy", "%")
CORRUPTED_CHANGE = Column("corrupted_change", "Δ top-1, corrupted", "measured", "corrupted_change", "pp")
PREDICTORS = Column("predictors", "GFLOPS of the predictors", "paper", "predictors", decimals=3, exact=True)
# Columns that the paper does not have: a model's distance from the original, and the remaining tokens and MACs.
OWN_COSTS = (
    Column("percent", "MACs", "paper", "percent", "%", decimals=1),
    *(Column(f"patches_{n}", f"patches, stage {n}", "paper", f"patches_{n}", decimals=0) for n in (1, 2, 3)),
)
OWN_COLUMNS = (
    Column("agreement", "agrees with original", "measured", "agreement_to_original", "%"),
    Column("divergence", "KL to original (nats)", "measured", "divergence_to_original", decimals=3),
    *OWN_COSTS,
)
OVER_RANDOM, OVER_DYNAMICVIT = (
    Column(f"over_{line}".lower(), f"Δ to {line}", "measured", "accuracy_by_group", "pp", against=line)
    for line in ("random", "DynamicViT")
)
# SPOT's Table 3 prints how much a soft method changes if SPOT's scores replace the method's scores.
OVER_SOFT = tuple(
    Column(f"over_{line}".lower(), f"Δ to {line}", "measured", "accuracy_by_group", "pp", decimals=1, against=line)
    for line in ("SPViT", "dTPS")
)
OBJECTS = tuple(
    Column(f"objects_{stage}", f"object patches, {stage} stage", "measured", f"object_patches_{stage}", "%", decimals=1)
    for stage in STAGES
)
COLUMNS = (ACCURACY, CHANGE, OVER_RANDOM, PREDICTORS, GFLOPS, GFLOPS_CHANGE, *OWN_COLUMNS)


def spot_recipe(
    title: str, table: str, not_stated: str, parts: Mapping[str, Iterable[Line]], columns: Sequence[Column] = COLUMNS
) -> Recipe:
    """Returns a recipe with one row per subject and line. A line without a method shows only printed numbers."""
    lines = [(subject, label, method) for subject, subject_lines in parts.items() for label, method in subject_lines]
    rows = (
        Row(f"{TITLES[subject]}, {label}", subject, method and method.name, label) for subject, label, method in lines
    )
    protocol = (replace(SUBJECTS[subject], method=method) for subject, _, method in lines if method)
    return Recipe(title, tuple(rows), tuple(columns), tuple(protocol), table, not_stated)


def on_corrupted(recipe: Recipe) -> Recipe:
    """Returns a recipe with the same rows, in which the models are measured on corrupted images."""
    return replace(
        recipe,
        protocol=tuple(CorruptedExperiment.of(each) for each in recipe.protocol if isinstance(each, SpotExperiment)),
    )


CONTROLS: tuple[Line, ...] = (
    ("all tokens, fine-tuned the same way", TokenMethod("all-tokens-tuned")),
    ("random", RANDOM),
    ("class attention", CLASS_ATTENTION),
)

# SPOT, Table 1. Keep ratios are 0.7. If the paper prints other GFLOPS, the keep ratio comes closest to them.
HALTING = "the halting rule of A-ViT, untrained"
# attnrx cannot train these methods, so the table shows only their printed numbers.
PRINTED: Mapping[str, Line] = {name: (name, None) for name in ("A-ViT", "IA-RED2", "RL4EViT", "METR")}
FIRST: tuple[Line, ...] = (("original", ORIGINAL), ("DynamicViT", DYNAMICVIT))
LAST: tuple[Line, ...] = (
    ("SPOT", SPOT),
    *CONTROLS,
    ("random, not fine-tuned", untrained(RANDOM)),
    ("class attention, not fine-tuned", untrained(CLASS_ATTENTION)),
    ("ToMe, not fine-tuned", TokenMethod("tome", "tome", trained=False)),
)
OWN = (*FIRST, (HALTING, HALTING_SCORES), ("EViT", EVIT), ("Zero-TPrune", ZERO_TPRUNE), *LAST)

# SPOT, Table 6, by the names of `load_data`.
DATASETS = {
    "imagenet-1k": "ImageNet-1K",
    "cifar100": "CIFAR-100",
    "food101": "Food-101",
    "dtd": "DTD",
    "eurosat": "EuroSAT",
}
# The number of classes of each target in SPOT, Table 4.
TARGETS = {"cifar100": 100, "food101": 101, "dtd": 47, "eurosat": 10}

# SPOT, Figures 4 and 5.
RATIOS = (0.5, 0.6, 0.7, 0.8, 0.9)
OVER_RATIOS: tuple[Line, ...] = (
    ("original", ORIGINAL),
    *((f"SPOT, {ratio:g}", at(SPOT, ratio)) for ratio in RATIOS),
    *((f"class attention, {ratio:g}", at(CLASS_ATTENTION, ratio)) for ratio in RATIOS[::2]),
    *((f"random, {ratio:g}", at(RANDOM, ratio)) for ratio in RATIOS[::2]),
)
MOMENTS: tuple[Line, ...] = (
    ("SPOT", SPOT),
    ("without the mean over layers", NO_MEAN),
    ("without the variance over layers", NO_VARIANCE),
    ("without both", ONE_LAYER),
)
SOFT: tuple[Line, ...] = (
    ("SPViT", TokenMethod("spvit", "spvit")),
    ("SPViT with DynamicViT's predictor", TokenMethod("spvit-dynamicvit", "spvit(scores=dynamicvit)")),
    ("SPViT + SPOT", TokenMethod("spvit-spot", f"spvit(scores={ONE_LAYER.reducer})")),
    ("dTPS", TokenMethod("dtps", "dtps")),
    ("dTPS + SPOT", TokenMethod("dtps-spot", f"dtps(scores={ONE_LAYER.reducer})")),
)
COARSER: tuple[Line, ...] = (
    ("head-averaged attention", TokenMethod("spot-head-averaged", "spot(head_averaged=true)")),
    ("one predictor for all stages", TokenMethod("spot-shared", "spot(shared=true)")),
)
COMPARED: tuple[Line, ...] = (
    ("original", ORIGINAL),
    ("oracle: the object first", TokenMethod("oracle", "oracle")),
    *CONTROLS,
    ("attention average", ATTENTION_AVERAGE),
    ("EViT", EVIT),
    ("DynamicViT", DYNAMICVIT),
    ("ATS", TokenMethod("ats", "ats")),
    ("Evo-ViT", TokenMethod("evo-vit", "evo_vit")),
    (HALTING, HALTING_SCORES),
    ("Zero-TPrune", replace(ZERO_TPRUNE, trained=True, name="zero-tprune-tuned")),
    ("ToMe", TokenMethod("tome-tuned", "tome")),
    ("ward", TokenMethod("ward", "ward")),
    *SOFT,
    *MOMENTS,
    ("SPOT without token features", projected(0)),
    *COARSER,
    ("SPOT, attention features standardized", TokenMethod("spot-standardized", "spot(standardized=true)")),
    (
        "the same without token features",
        TokenMethod("spot-standardized-projected-0", "spot(standardized=true,projected=0)"),
    ),
)
# SPOT, Figure 7, times the variants of Section 4.3 at several keep ratios.
TIMED: tuple[tuple[str, TokenMethod], ...] = (
    ("original", ORIGINAL),
    *(
        (f"{label}, {ratio:g}", at(method, ratio))
        for label, method in (*MOMENTS, ("without token features", projected(0)))
        if method is not None
        for ratio in RATIOS[::2]
    ),
)
TIMINGS = tuple(
    ThroughputExperiment(subject, model, tuple(method for _, method in TIMED))
    for subject, model in (("deit_small", DEIT_SMALL), ("vit_tiny", VIT_TINY))
)
THROUGHPUT_COLUMNS = (
    Column("throughput", "images/s", "measured", "throughput", decimals=1),
    Column("faster", "times as fast", "measured", "faster", "x", null=1.0),
    GFLOPS,
    PREDICTORS,
)
NOT_STATED = "what spot/table1 lists"


def kept_patches_recipe(title: str, figure: str, subjects: Sequence[str]) -> Recipe:
    """Returns a recipe that draws the patches that SPOT keeps. Its table shows the share of patches that remain."""
    methods = lines_by_subject((("SPOT", SPOT),), subjects)
    lines = [(subject, method) for subject in subjects for _, method in methods[subject] if method is not None]
    left = tuple(Column(f"left_{n}", f"left by stage {n}", "measured", f"left_{n}", "%", decimals=1) for n in (1, 2, 3))
    return Recipe(
        title,
        tuple(Row(f"{TITLES[subject]}, SPOT", subject, method.name, "SPOT") for subject, method in lines),
        (*OWN_COSTS[1:], *left),
        tuple(KeptPatchesExperiment.of(replace(SUBJECTS[subject], method=method)) for subject, method in lines),
        figure,
        f"{NOT_STATED}, and which images are drawn (here six of the test)",
        seeds=(42,),
    )


RECIPES = {
    # GFLOPS follow in closed form, with these exceptions. LV-ViT-T at a keep ratio of 0.7 costs 2.3 (printed: 2.0, the
    # cost at 0.5). LV-ViT-S costs 4.7 (printed: 4.5, the cost without predictors). DynamicViT on DeiT-S costs 3.0
    # (printed: 2.9, the cost without predictors). EViT costs 2.9 on DeiT-S (printed: 3.0) and 4.6 on LV-ViT-S (printed:
    # 4.7), because the published EViT prunes inside a layer. All trained lines use the same losses. LV-ViT needs its
    # published weights (--weights), one model at a time.
    "table1": spot_recipe(
        "SPOT and other reducers",
        "1",
        "weight decay, schedule, warm-up, augmentation, precision, label smoothing and gradient clipping (none here), "
        "seeds, and how the rows of other methods were made (every trained line learns by the same losses here)",
        {
            "deit_tiny": (*FIRST, PRINTED["A-ViT"], *OWN[2:4], ("Zero-TPrune", at(ZERO_TPRUNE, 0.8)), *LAST),
            "deit_small": (
                *(*FIRST, PRINTED["A-ViT"], (HALTING, at(HALTING_SCORES, 0.85)), ("EViT", EVIT)),
                *(PRINTED[name] for name in ("IA-RED2", "RL4EViT", "METR")),
                *(("Zero-TPrune", at(ZERO_TPRUNE, 0.75)), ("SPOT, keep ratio 0.65", at(SPOT, 0.65)), *LAST),
            ),
            "lvvit_tiny": (*FIRST, *LAST),
            "lvvit_small": (*FIRST, ("EViT", EVIT), *LAST),
            "vit_tiny": OWN,
            "cifar10_small": OWN,
        },
        (ACCURACY, CHANGE, GFLOPS, GFLOPS_CHANGE, PREDICTORS, *OWN_COLUMNS),
    ),
    "table2": spot_recipe(
        "SPOT with less of the attention",
        "2",
        f"{NOT_STATED}, and which of the first two lines is without the mean",
        lines_by_subject((*MOMENTS, *CONTROLS)),
    ),
    # Soft methods with their own scores, and with SPOT's scores without mean and variance over the layers. The paper
    # prints 2.9 for SPViT on DeiT-S.
    "table3": spot_recipe(
        "Soft methods with SPOT's scores",
        "3",
        f"{NOT_STATED}, and the training of the methods that SPOT is combined with",
        lines_by_subject(
            (*SOFT, ("class attention, the rest packaged (EViT)", EVIT), *CONTROLS), ("deit_tiny", *ABLATED)
        ),
        (*COLUMNS, *OVER_SOFT),
    ),
    # The trained models come from SPOT's Table 1. GFLOPS are printed once per model.
    "table4": Recipe(
        "SPOT transferred to other datasets",
        tuple(
            Row(f"DeiT-T on {DATASETS[target]}, {label}", target, method.name, label)
            for target in TARGETS
            for label, method in (("original", ORIGINAL), ("SPOT", SPOT))
        ),
        (ACCURACY, CHANGE, GFLOPS, GFLOPS_CHANGE),
        tuple(
            TransferExperiment.of(SUBJECTS["deit_tiny"], target=target, classes=classes)
            for target, classes in TARGETS.items()
        ),
        "4",
        f"{NOT_STATED}; of the heads the optimizer (AdamW here), batch size (512), weight decay (0.01), schedule "
        "(a cosine to zero) and start, the augmentation (none: features are computed once) and size of the images (the "
        "model's own), which images of EuroSAT are tested on (a fifth of each class), and the division of DTD (the "
        "first; its validation images are trained on)",
    ),
    # The trained models come from SPOT's Table 1.
    "table5": on_corrupted(
        spot_recipe(
            "SPOT on corrupted images",
            "5",
            f"{NOT_STATED}, and how the baselines were trained",
            {
                **dict.fromkeys(PRETRAINED, (("original", ORIGINAL), ("SPOT", SPOT))),
                **dict.fromkeys(("vit_tiny", "cifar10_small"), (("original", ORIGINAL), ("SPOT", SPOT), *CONTROLS)),
            },
            (CORRUPTED, CORRUPTED_CHANGE, GFLOPS, GFLOPS_CHANGE, *OWN_COSTS),
        )
    ),
    # If a dataset is not found by its name, give --only NAME --data FOLDER.
    "table6": Recipe(
        "The datasets",
        (*(Row(title, name, "images") for name, title in DATASETS.items()), Row("ImageNet-C", "imagenet-1k")),
        tuple(
            Column(key, title, "measured", key, decimals=0)
            for key, title in (("train", "training images"), ("test", "test images"), ("classes", "categories"))
        ),
        tuple(DatasetCounts(name) for name in DATASETS),
        "6",
        "which images of EuroSAT are tested on (here a fifth of each class), and the division of DTD (here the first)",
        seeds=(0,),
    ),
    "table7": spot_recipe(
        "SPOT and an average of attention",
        "7",
        NOT_STATED,
        lines_by_subject(
            (
                ("original", ORIGINAL),
                ("averaging across layers", ATTENTION_AVERAGE),
                ("SPOT without token features", projected(0)),
                *CONTROLS,
            )
        ),
    ),
    # By the paper's description (18 features) the predictor with head-averaged attention costs 0.1075. With 12 features
    # it costs the printed 0.106, but the paper does not state which six features are omitted.
    "table8": spot_recipe(
        "SPOT with coarser information",
        "8",
        f"{NOT_STATED}, and which features the mean over the heads leaves out",
        lines_by_subject((("SPOT", SPOT), *COARSER, *CONTROLS)),
    ),
    # Takes ten minutes per seed on one CPU core, after the original is trained.
    "testbed": spot_recipe(
        "Token reducers where tokens matter",
        "none; digits among clutter are not in it",
        "everything: original, data and training are this package's own. Every reducer runs before layers 2, 3 and 4",
        lines_by_subject(COMPARED, (TESTBED,)),
        (ACCURACY, CHANGE, *OBJECTS, OVER_RANDOM, OVER_DYNAMICVIT, PREDICTORS, *OWN_COLUMNS),
    ),
    "figure3": kept_patches_recipe("Patches that SPOT keeps, DeiT-S", "Figure 3", ("deit_small", TESTBED)),
    "figure6": kept_patches_recipe("Patches that SPOT keeps, DeiT-T", "Figure 6", ("deit_tiny",)),
    "figure4": spot_recipe(
        "SPOT and its controls over the keep ratio",
        "Figure 4",
        f"{NOT_STATED}, and the numbers behind the drawn points",
        dict.fromkeys(SUBJECTS, OVER_RATIOS),
        (ACCURACY, CHANGE, GFLOPS, *OWN_COLUMNS),
    ),
    # Takes minutes on a GPU. On a CPU use a smaller --batch-size.
    "figure7": Recipe(
        "Throughput of SPOT's variants",
        tuple(
            Row(f"{TITLES[each.subject]}, {label}", each.subject, method.name, label)
            for each in TIMINGS
            for label, method in TIMED
        ),
        THROUGHPUT_COLUMNS,
        TIMINGS,
        "Figure 7",
        "batch size, precision and runtime (eager PyTorch here), the numbers behind the drawn points, and the variant "
        "that reaches the printed 3,880 images/s",
        seeds=(0,),
    ),
    "figure5": spot_recipe(
        "SPOT with fewer token features",
        "Figure 5",
        f"{NOT_STATED}, and the numbers behind the drawn points",
        {
            subject: lines_by_subject(projections(width), (subject,))[subject]
            for subject, width in zip(ABLATED, (384, 192, 64, 32), strict=True)
        },
    ),
}
