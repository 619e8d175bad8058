"""Methods, protocols and columns shared by the tables and figures of the SPOT paper."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from attnrx_lab.papers.recipe import Column, Recipe, Row
from attnrx_lab.papers.spot import FineTuning, SpotExperiment, TokenMethod
from attnrx_lab.papers.spot_speed import SpeedExperiment

ORIGINAL = TokenMethod("all-tokens", trained=False)
DENSE = TokenMethod("all-tokens-tuned")
SPOT = TokenMethod("spot", "spot")

# Table 2: without the mean over the layers, without the variance over them, without both.
NO_MEAN = TokenMethod("spot-no-mean", "spot(mean=false)")
NO_VARIANCE = TokenMethod("spot-no-variance", "spot(variance=false)")
ONE_LAYER = TokenMethod("spot-one-layer", "spot(mean=false,variance=false)")
HEAD_AVERAGED = TokenMethod("spot-head-averaged", "spot(head_averaged=true)")
SHARED = TokenMethod("spot-shared", "spot(shared=true)")
AVERAGE = TokenMethod("attention-average", "attention_average")

RANDOM = TokenMethod("random", "random")
CLASS_ATTENTION = TokenMethod("class-attention", "class_attention")
EVIT = TokenMethod("evit", "evit")
HALTING_SCORES = TokenMethod("halting-scores", "halting_scores")  # the rule of A-ViT, untrained
DYNAMICVIT = TokenMethod("dynamicvit", "dynamicvit")

# Table 3: soft methods by their own scores, and by SPOT's without the mean and variance over the layers.
SPVIT = TokenMethod("spvit", "spvit")
SPVIT_SPOT = TokenMethod("spvit-spot", "spvit(scores=spot(mean=false,variance=false))")
DTPS = TokenMethod("dtps", "dtps")
DTPS_SPOT = TokenMethod("dtps-spot", "dtps(scores=spot(mean=false,variance=false))")


def untrained(method: TokenMethod) -> TokenMethod:
    return replace(method, name=f"{method.name}-untrained", trained=False)


def projected(features: int) -> TokenMethod:
    """SPOT with this many token features (Figure 5)."""
    return TokenMethod(f"spot-projected-{features}", f"spot(projected={features})")


def at(method: TokenMethod, ratio: float) -> TokenMethod:
    """The same method with another keep ratio."""
    # The default ratio keeps the plain name, so that its runs are shared by all recipes.
    return method if ratio == method.ratio else replace(method, name=f"{method.name}-{ratio:g}", ratio=ratio)


TOME = TokenMethod("tome", "tome", trained=False)
ZERO_TPRUNE = TokenMethod("zero-tprune", "zero_tprune", trained=False)

# The originals: the paper's four on ImageNet, a pre-trained ViT-Tiny on ten classes of it, distilled from the logits
# of the original alone, and a small model for a CPU.
_IMAGENETTE = FineTuning(1e-4, predictor_factor=20.0, weight_decay=0.0, task=False, distillation=1.0, precision="fp32")
_CIFAR = FineTuning(5e-4, precision="fp32", images=4800)
_ON_IMAGENET = {
    "deit_tiny": ("timm:deit_tiny_patch16_224", 0.0),
    "deit_small": ("timm:deit_small_patch16_224", 0.0),
    "lvvit_tiny": ("lvvit:t", 10.0),
    "lvvit_small": ("lvvit:s", 10.0),
}
SUBJECTS: Mapping[str, SpotExperiment] = {
    **{
        subject: SpotExperiment(subject, model, "imagenet-1k", SPOT, tuning=FineTuning(similarity=similarity))
        for subject, (model, similarity) in _ON_IMAGENET.items()
    },
    "vit_tiny": SpotExperiment(
        "vit_tiny",
        "timm:vit_tiny_patch16_224",
        "imagenette",
        SPOT,
        label_column="imagenet1k_label",
        test_column="ilsvrc_val",
        tuning=_IMAGENETTE,
        epochs=1,
        batch_size=64,
    ),
    "cifar10_small": SpotExperiment(
        "cifar10_small",
        None,
        "cifar10",
        SPOT,
        tuning=_CIFAR,
        epochs=1,
        batch_size=32,
        test_images=2000,
        validation_images=500,
    ),
}
# What the paper varies SPOT on, and the two originals that a CPU can measure.
ABLATED = ("deit_small", "vit_tiny", "cifar10_small")
TITLES = {
    "deit_tiny": "DeiT-T",
    "deit_small": "DeiT-S",
    "lvvit_tiny": "LV-ViT-T",
    "lvvit_small": "LV-ViT-S",
    "vit_tiny": "ViT-Tiny",
    "cifar10_small": "CIFAR-10",
}

ACCURACY = Column("accuracy", "Top-1", "measured", "accuracy", "%")
CHANGE = Column("change", "Δ top-1", "measured", "accuracy_change", "pp")
GFLOPS = Column("gmacs", "GFLOPS", "paper", "gmacs", decimals=1, exact=True)
PREDICTORS = Column("predictors", "GFLOPS of the predictors", "paper", "predictors", decimals=3, exact=True)
# Not in the paper: the distance of a model from the original, and the remaining tokens and MACs.
OWN_COLUMNS = (
    Column("agreement", "agrees with original", "measured", "agreement_to_original", "%"),
    Column("divergence", "KL to original (nats)", "measured", "divergence_to_original", decimals=3),
    Column("percent", "MACs", "paper", "percent", "%", decimals=1),
    *(
        Column(f"patches_{stage}", f"patches, stage {stage}", "paper", f"patches_{stage}", decimals=0)
        for stage in (1, 2, 3)
    ),
)
COLUMNS = (ACCURACY, CHANGE, PREDICTORS, GFLOPS, *OWN_COLUMNS)

THROUGHPUT = (
    Column("images", "images / s", "speed", "images", decimals=0),
    Column("ratio", "of the original's", "speed", "ratio", "x"),
)

Line = tuple[str, TokenMethod | None]

CONTROLS: tuple[Line, ...] = (
    ("all tokens, fine-tuned the same way", DENSE),
    ("random", RANDOM),
    ("class attention", CLASS_ATTENTION),
)
UNTRAINED: tuple[Line, ...] = (
    ("random, not fine-tuned", untrained(RANDOM)),
    ("class attention, not fine-tuned", untrained(CLASS_ATTENTION)),
    ("ToMe, not fine-tuned", TOME),
)


def line_rows(subject: str, lines: Sequence[Line]) -> tuple[Row, ...]:
    return tuple(
        Row(f"{TITLES[subject]}, {label}", subject, None if method is None else method.name) for label, method in lines
    )


def spot_recipe(title: str, parts: Mapping[str, Sequence[Line]], columns: Sequence[Column] = COLUMNS) -> Recipe:
    """Makes a table of some lines for every subject; a line without a method has the printed numbers only."""
    return Recipe(
        title=title,
        rows=tuple(row for subject, lines in parts.items() for row in line_rows(subject, lines)),
        columns=tuple(columns),
        protocol=tuple(
            replace(SUBJECTS[subject], method=method)
            for subject, lines in parts.items()
            for _, method in lines
            if method is not None
        ),
    )


def speed_recipe(title: str, parts: Mapping[str, Sequence[Line]]) -> Recipe:
    """Makes a table of throughputs of some lines for every subject; each subject is timed in one run."""
    return Recipe(
        title=title,
        rows=tuple(row for subject, lines in parts.items() for row in line_rows(subject, lines)),
        columns=(*THROUGHPUT, GFLOPS, PREDICTORS),
        protocol=tuple(
            SpeedExperiment(
                subject, SUBJECTS[subject].model, tuple(method for _, method in lines if method is not None)
            )
            for subject, lines in parts.items()
        ),
        seeds=(0,),  # the latency does not depend on it
    )
