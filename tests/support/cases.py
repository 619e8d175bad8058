"""Every interchangeable part, listed once, at sizes that take milliseconds; the laws run over all of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from attnrx.change.realization import realize
from attnrx.data import LoadedImages, Normalization, from_tensors
from attnrx.decide.rules import EnergyRetention, Rule, TotalRank, UniformRank
from attnrx.nouns.prescription import HeadDecision, LayerPrescription, Prescription, ScoreDecision
from attnrx.show.checks import (
    Accuracy,
    Calibration,
    Check,
    Costs,
    Features,
    Fidelity,
    Index,
    Latency,
    Promises,
    Retrieval,
)
from attnrx.training.losses import Loss, Task
from attnrx.vit.costs import LatencyProtocol
from attnrx.vit.models import family_of, model_fingerprint
from attnrx.vit.tokens import AttentionReceived, ClassAttention, Reducer, ToMe, Ward
from attnrx_lab.checks import Controls, Robustness, Transfer
from attnrx_lab.lvvit import LVViT, LVViTConfig
from attnrx_lab.perturbation import PerturbationRobustness, TargetRank
from attnrx_lab.rules import (
    ContributionEnergy,
    EffectiveRank,
    FusionRank,
    LargestMatched,
    MedianThreshold,
    NormClip,
    RandomMatched,
    SharedRank,
    Shrinkage,
    Threshold,
    TopRank,
    UniformHeads,
    UniformMatched,
)
from attnrx_lab.tokens import (
    ATS,
    DTPS,
    AttentionAverage,
    DynamicViT,
    EViT,
    EvoViT,
    HaltingScores,
    HeadSelector,
    PiToMe,
    Random,
    Spot,
    SPViT,
    ZeroTPrune,
)
from attnrx_lab.vision_transformer import (
    Model,
    Transformer,
    TransformerConfig,
    VisionTransformer,
    ViTConfig,
    initialize_,
)

TINY = {"image_size": 8, "patch_size": 4, "channels": 1, "classes": 3, "mlp_ratio": 2.0}

# name -> configuration: one head, several, wide heads, heads of one direction, SVDA and dense.
CONFIGS: dict[str, ViTConfig] = {
    "svda": ViTConfig.uniform("svda", width=12, depth=2, heads=3, **TINY),
    "svda-one-head": ViTConfig.uniform("svda", width=8, depth=1, heads=1, **TINY),
    "svda-deep": ViTConfig.uniform("svda", width=16, depth=3, heads=2, **TINY),
    "svda-one-direction": ViTConfig.uniform("svda", width=4, depth=1, heads=4, **TINY),
    "dense": ViTConfig.uniform("dense", width=12, depth=2, heads=3, **TINY),
}

LVVITS: dict[str, LVViTConfig] = {
    "lvvit": LVViTConfig.uniform("dense", width=12, depth=2, heads=3, stem_channels=4, divisor=2.0, **TINY),
    "lvvit-svda": LVViTConfig.uniform(
        "svda", width=12, depth=2, heads=3, stem_channels=4, classifies_patches=False, **TINY
    ),
}

# Every model of ours.
OWN: dict[str, TransformerConfig] = {**CONFIGS, **LVVITS}

BY = ("renormalized", "compress", "refit")  # the compressions

# name -> rule with knobs that bite on strengths of about one.
RULES: dict[str, Rule] = {
    "threshold": Threshold(0.6),
    "energy_retention": EnergyRetention(0.8),
    "energy_retention-all": EnergyRetention(1.0),
    "effective_rank": EffectiveRank(),
    "median_threshold": MedianThreshold(1.2),
    "top_rank": TopRank(2),
    "top_rank-none": TopRank(0),
    "total_rank": TotalRank(0.6, metric="own"),
    "total_rank-model": TotalRank(2, scope="model", metric="own", minimum=0),
    "uniform_rank": UniformRank(0.5, metric="own"),
    "contribution_energy": ContributionEnergy(0.8),
    "shrinkage": Shrinkage(0.4),
    "norm_clip": NormClip(0.7),
    "uniform_heads": UniformHeads(0.2),
    "random_matched": RandomMatched(EnergyRetention(0.8), seed=3),
    "largest_matched": LargestMatched(EnergyRetention(0.8)),
    "uniform_matched": UniformMatched(EnergyRetention(0.8)),
    "both": EnergyRetention(0.9) & TopRank(5),
    "either": (Shrinkage(0.3) & TopRank(3)) | UniformHeads(0.2),
}

# Rules that combine the rows of heads, which only forms without norms allow.
REWRITING: dict[str, Rule] = {
    "fusion_rank": FusionRank(6, sweeps=20),
    "shared_rank": SharedRank(5, form="literal", joint="centered", sweeps=20),
}

# name -> reducer of tokens; learned ones get random predictors where they are used.
REDUCTIONS: dict[str, Reducer] = {
    "random": Random(seed=2),
    "class_attention": ClassAttention(),
    "attention_average": AttentionAverage(),
    "attention_received": AttentionReceived(),
    "evit": EViT(),
    "tome": ToMe(),
    "ward": Ward(),
    "ward-means": Ward(lengths=False),
    "ward-relevance": Ward(relevance=0.3),
    "dynamicvit": DynamicViT(),
    "spot": Spot(),
    "spot-no-tokens": Spot(projected=0, variance=False),
    "spot-head-averaged": Spot(projected=5, mean=False, head_averaged=True),
    "spot-shared": Spot(shared=True),
    "spot-standardized": Spot(standardized=True),
    "zero_tprune": ZeroTPrune(),
    "zero_tprune-alike": ZeroTPrune(iterations=2, similar=1.0, least=0.0, most=1e3),
    "halting_scores": HaltingScores(gamma=0.5, beta=-1.0),
    "head_selector": HeadSelector(),
    "spvit": SPViT(),
    "spvit-dynamicvit": SPViT(DynamicViT()),
    "spvit-spot": SPViT(Spot(variance=False, mean=False)),
    "spvit-halting": SPViT(HaltingScores(gamma=0.5, beta=-2.0)),
    "dtps": DTPS(),
    "dtps-spot": DTPS(Spot(shared=True)),
    "etps": DTPS(ClassAttention()),
    "pitome": PiToMe(),
    "ats": ATS(),
    "evo_vit": EvoViT(),
}

# name -> loss; Distillation needs a saved teacher, which its own test makes.
LOSSES: dict[str, Loss] = {
    "task": Task(label_smoothing=0.1),
    "target_rank": TargetRank(2.0, weight=0.1),
    "perturbation_robustness": PerturbationRobustness(0.2, weight=0.5),
}


def model(config: ViTConfig, seed: int = 0, spread: float = 1.0) -> VisionTransformer:
    """A model whose scores matter: weights far from their initial values, strengths spread out, both signs."""
    return shaken(VisionTransformer(config), seed, spread)


def own(config: TransformerConfig) -> Transformer:
    """The same of any kind."""
    if isinstance(config, LVViTConfig):
        return shaken(LVViT(config), 0, 1.0)
    assert isinstance(config, ViTConfig)
    return model(config)


def shaken(vit: Model, seed: int, spread: float) -> Model:
    """Draws weights whose scores matter."""
    initialize_(vit, seed).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in vit.parameters():
            parameter.add_(spread * 0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
        for name, parameter in vit.named_parameters():
            if name.endswith("strength"):
                parameter.copy_(4 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
        for name, buffer in vit.named_buffers():
            if "running" in name:  # as after training
                buffer.add_(torch.rand(buffer.shape, generator=generator, dtype=buffer.dtype))
    return vit.eval()


def images(config: TransformerConfig, count: int = 5, seed: int = 1) -> torch.Tensor:
    """Random images of the size that the model wants."""
    generator = torch.Generator().manual_seed(seed)
    shape = (count, config.channels, config.image_size, config.image_size)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def pixels(config: ViTConfig, count: int, seed: int = 3) -> LoadedImages:
    """Random pictures with random labels."""
    generator = torch.Generator().manual_seed(seed)
    shape = (count, config.channels, config.image_size, config.image_size)
    raw = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    labels = torch.randint(config.classes, (count,), generator=generator)
    return from_tensors("random", raw, labels, Normalization(config.mean, config.std))


@dataclass(frozen=True)
class Pattern:
    """A pattern of kept ranks: how many directions each head keeps, and which heads stay."""

    ranks: Callable[[int, int], list[int]]
    removes_head: bool = False


PATTERNS: dict[str, Pattern] = {
    "full": Pattern(lambda heads, directions: [directions] * heads),
    "half": Pattern(lambda heads, directions: [max(1, directions // 2)] * heads),
    "ragged": Pattern(lambda heads, directions: [(h * directions) // max(heads - 1, 1) for h in range(heads)]),
    "ragged-falling": Pattern(lambda heads, directions: [directions - min(h, directions) for h in range(heads)]),
    "one": Pattern(lambda heads, directions: [1] * heads),
    "zero": Pattern(lambda heads, directions: [0] * heads),
    "head-removed": Pattern(lambda heads, directions: [max(1, directions - 1)] * heads, removes_head=True),
}


def prescription(vit: Transformer, pattern: Pattern, seed: int = 0) -> Prescription:
    """A prescription with that pattern, keeping random directions."""
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for attention in family_of(vit).attention(vit):
        spectrum = attention.spectrum()
        heads, directions = spectrum.strength.shape
        keep = torch.zeros(heads, directions, dtype=torch.bool)
        for row, rank in zip(keep, pattern.ranks(heads, directions), strict=True):
            row[torch.randperm(directions, generator=generator)[:rank]] = True
        layer = LayerPrescription({"qk": ScoreDecision(keep, spectrum.strength, ("because",) * heads)})
        removes = pattern.removes_head and heads > 1
        layers.append(with_heads(layer, [False, *[True] * (heads - 1)]) if removes else layer)
    return Prescription(tuple(layers), {"qk": "top_rank:1"}, model_fingerprint(vit), {})


def with_heads(layer: LayerPrescription, stays: Sequence[bool]) -> LayerPrescription:
    """The layer with these heads only."""
    keep = torch.tensor(stays)
    scores = replace(layer.qk, keep=layer.qk.keep & keep[:, None])
    heads = HeadDecision(keep, torch.ones(len(keep), dtype=torch.float64), ("because",))
    return LayerPrescription({**layer.decisions, "qk": scores, "heads": heads})


def with_strength(given: Prescription, factor: float) -> Prescription:
    """The same prescription with every strength multiplied."""
    layers = (layer.with_scores(replace(layer.qk, strength=layer.qk.strength * factor)) for layer in given.layers)
    return replace(given, layers=tuple(layers))


# What a plan may promise of any quantity.
EXPECTED = {"value": 0.5, "spread": 0.2, "images": 12}
PROMISED = {"expected": dict.fromkeys(("divergence", "agreement", "change"), EXPECTED), "measured": None}


# name -> the check, for a reference with a prescription.
CHECKS: dict[str, Callable[[VisionTransformer, Prescription], Check]] = {
    "accuracy": lambda vit, given: Accuracy(),
    "fidelity": lambda vit, given: Fidelity(most_discrepancy=0.5),
    "calibration": lambda vit, given: Calibration(bins=5),
    "costs": lambda vit, given: Costs(),
    "latency": lambda vit, given: Latency(batch=2, protocol=LatencyProtocol(rounds=2, warmup=1)),
    "controls": lambda vit, given: Controls({"random": (given, given)}, partial(realize, vit)),
    "features": lambda vit, given: Features(most_error=0.5),
    "retrieval": lambda vit, given: Retrieval(ks=(1,)),
    "index": lambda vit, given: Index(ks=(1,)),
    "transfer": lambda vit, given: Transfer(pixels(vit.config, 18), vit.config.classes, seeds=(0, 1), epochs=2),
    "robustness": lambda vit, given: Robustness(("gaussian_noise", "jpeg_compression"), (1, 5)),
    "promises": lambda vit, given: Promises(promised=PROMISED),
}
