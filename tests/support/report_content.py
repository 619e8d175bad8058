"""Content for reports: a small real model, diagnosed, prescribed and realized, with evidence of every kind."""

import copy
import json
from dataclasses import asdict, replace
from functools import cache

import torch
from torch import nn

from attnrx.change.realization import realize
from attnrx.decide import diagnostics
from attnrx.decide.rules import EnergyRetention, prescribe_maps
from attnrx.nouns.diagnosis import Diagnosis, LayerDiagnosis
from attnrx.nouns.evidence import Evidence, Finding, against_limit
from attnrx.nouns.prescription import Prescription
from attnrx.show.reports import ReportContent, TokenSamples, sample_tokens
from attnrx.support.estimate import Estimate
from attnrx.vit.costs import Conditions, LatencyComparison, Timing
from attnrx.vit.models import attach_tokens_, build_model, family_of, model_fingerprint
from attnrx.vit.spec import Spectrum
from attnrx.vit.tokens import AttentionReceived, TokenPolicy

HOSTILE = "<script>alert('x')</script> & \"quoted\""


@cache
def example(depth: int = 3, heads: int = 4) -> ReportContent:
    """Gives a report with every part, in float64 whatever the default is; one claim fails and one name is hostile."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return _example(depth, heads)
    finally:
        torch.set_default_dtype(before)


def _example(depth: int, heads: int) -> ReportContent:
    model = spread_model(depth, heads)
    diagnosis = diagnosed(model)
    prescription = prescribed(model)
    slim = realize(model, prescription, by="renormalized")
    return ReportContent(
        title="SVDA on digits, energy retention 0.90",
        about={"model": "svda:digits", "data": f"digits {HOSTILE}", "seed": 42, "versions": {"attnrx": "0.1.0"}},
        prescription=prescription,
        diagnosis=diagnosis,
        evidence=with_speed(with_costs(evidence(), model, slim), latency()),
        tokens=tokens(model),
    )


def spread_model(depth: int = 3, heads: int = 4) -> nn.Module:
    """Builds a small SVDA-ViT whose strengths have spread, as training makes them."""
    model = build_model("svda:digits", seed=3, depth=depth, width=16 * heads, heads=heads)
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for layer, attention in enumerate(family_of(model).attention(model)):
            strength = attention.scores.get_parameter("strength")
            noise = torch.randn(strength.shape, generator=draw)
            strength.copy_(60 * torch.exp((0.4 + 0.3 * layer) * noise))
            attention.scores.query.weight.normal_(std=0.3, generator=draw)
            attention.scores.key.weight.normal_(std=0.3, generator=draw)
    return model.eval()


def diagnosed(model: nn.Module) -> Diagnosis:
    """Reads off what needs no data, and invents what does."""
    layers = []
    for index, attention in enumerate(family_of(model).attention(model)):
        spectrum = attention.spectrum()
        layers.append(LayerDiagnosis(spectrum, readings(spectrum, index)))
    return Diagnosis(tuple(layers), model_fingerprint(model), {"data": "digits", "images": 512, "seed": 0})


def prescribed(model: nn.Module) -> Prescription:
    """Lets the paper's rule decide."""
    return prescribe_maps(diagnosed(model), EnergyRetention(0.9))


def readings(spectrum: Spectrum, layer: int) -> dict[str, torch.Tensor]:
    """Gives readings per head, and one per direction that maps must leave out."""
    strength, used = spectrum.strength, spectrum.used
    heads = torch.arange(strength.shape[0], dtype=torch.float64)
    return {
        "energy": diagnostics.energy(strength, used),
        "effective_rank": diagnostics.effective_rank(strength, used),
        "entropy": diagnostics.entropy(strength, used),
        "selectivity": 0.003 + 0.11 * layer + 0.07 * heads.sin().abs(),
        "alignment": 0.4 * (heads - 1.5).tanh() - 0.1 * layer,
        "perturbation_response": 1e-4 * (1 + heads + layer),
    }


def evidence() -> Evidence:
    """Gives findings of every check: claims that hold, one that fails, and quantities that are only reported."""
    about = {"candidate": "compressed", "reference": "svda:digits", "data": "digits/test", "images": 360}
    return Evidence((*_quality(), *_bounds(), *_controls(), *_robustness()), about)


def with_costs(evidence: Evidence, model: nn.Module, slim: nn.Module) -> Evidence:
    """Adds the counted costs of both models, as the check does."""
    costs = {"reference": family_of(model).costs(model), "candidate": family_of(slim).costs(slim)}
    findings = (
        Finding("costs", role, 0.0, details={"quantity": "counted costs", "model": role, **each.to_record()})
        for role, each in costs.items()
    )
    return replace(evidence, findings=(*evidence.findings, *findings))


def with_speed(evidence: Evidence, times: LatencyComparison) -> Evidence:
    """Adds one measurement of the latency, in place of another one."""
    others = (finding for finding in evidence.findings if finding.check != "latency")
    details = {"quantity": "speed", **json.loads(json.dumps(asdict(times)))}
    return replace(evidence, findings=(*others, Finding("latency", "speed", times.faster.value, "x", details=details)))


def tokens(model: nn.Module) -> TokenSamples:
    """Lets patches leave a copy of the model in two of its layers."""
    reduced = copy.deepcopy(model)
    layers = (2, 3) if len(family_of(model).attention(model)) > 2 else (2,)
    attach_tokens_(reduced, family_of(reduced), TokenPolicy.staged(AttentionReceived(), 0.7, layers))
    images = nn.functional.interpolate(torch.randn(2, 1, 5, 5), size=16, mode="bicubic").clamp(-1, 1)
    return sample_tokens(reduced, images, (HOSTILE, "eight"))


def latency() -> LatencyComparison:
    """Gives one measurement, with its factors."""
    return LatencyComparison(
        candidate=Timing(0.0412, 0.0405, 0.0441),
        reference=Timing(0.0437, 0.0429, 0.0480),
        faster=Estimate(1 / 0.943, 1 / 0.956, 1 / 0.931),
        batch=32,
        image_shape=(1, 16, 16),
        rounds=30,
        clock="wall",
        conditions=Conditions(),
        threads=2,
        hardware="a quiet machine",
        torch_version="2.11.0",
        unchanged=Timing(0.0424, 0.0418, 0.0450),
        by_runtime=Estimate(1.03, 1.02, 1.04),
        by_compression=Estimate(1.03, 1.02, 1.04),
    )


def _quality() -> tuple[Finding, ...]:
    before, after = ({"quantity": "accuracy", "model": role} for role in ("reference", "candidate"))
    return (
        Finding("accuracy", "top-1 accuracy of the reference", 96.39, "%", low=93.9, high=97.9, n=360, details=before),
        Finding("accuracy", "top-1 accuracy of the candidate", 95.83, "%", low=93.2, high=97.5, n=360, details=after),
        Finding(
            "accuracy",
            "the candidate loses at most 1 points of accuracy",
            -0.5556,
            "points",
            limit=-1.0,
            outcome="fails",
            low=-2.0139,
            high=0.8333,
            n=360,
            seed=0,
            details={"quantity": "accuracy change", "lost": 4, "gained": 2, "mcnemar_p": 0.6875},
        ),
        Finding(
            "fidelity",
            "relative logit discrepancy, compressed",
            0.01234,
            "",
            0.05,
            "holds",
            0.0119,
            0.0128,
            360,
            seed=0,
        ),
        Finding("fidelity", f"prediction agreement, {HOSTILE}", 98.61, "%", low=96.8, high=99.4, n=360),
        Finding("fidelity", "mean KL divergence, compressed against original", 2.13e-6, "nats", n=360),
    )


def _bounds() -> tuple[Finding, ...]:
    claims = {
        "no score moves by more than Theorem 1 says (Eq. 12)": 0.81,
        "attention rows move within Proposition 1": 0.27,
    }
    return tuple(
        Finding("bounds", claim, worst, "of the bound", 1.0, "holds", n=360, seed=0, details={"slack": 1 - worst})
        for claim, worst in claims.items()
    )


def _controls() -> tuple[Finding, ...]:
    found = []
    for kind, value, limit in (("random", 0.0061, None), ("largest", 0.0162, 0.0), ("uniform", 0.0008, None)):
        low, high = value - 0.0011, value + 0.0012
        draws = [0.0123 + value + 0.0004 * (step - 4.5) for step in range(10)] if kind == "random" else [0.0123 + value]
        details = {"quantity": "discrepancy", "kind": kind, "candidate": 0.0123, "draws": draws}
        claim = f"the candidate is nearer to the reference than the {kind}-matched control"
        verdict = against_limit(value, limit, (low, high), 360, at_least=True, strict=True)
        found.append(Finding("controls", claim, value, "", seed=0, details=details, **verdict))
    better = "the candidate is more accurate than the random-matched control"
    return (*found, Finding("controls", better, 0.31, "points", low=-0.4, high=1.1, n=360, seed=0))


def _robustness() -> tuple[Finding, ...]:
    return tuple(
        Finding(
            "robustness",
            f"change of accuracy under {name} of severity {severity}, candidate minus reference",
            -0.1 * severity,
            "points",
            low=-0.1 * severity - 0.9,
            high=-0.1 * severity + 0.8,
            n=360,
            seed=0,
            details={"quantity": "accuracy change", "corruption": name, "severity": severity},
        )
        for name in ("noise", "blur")
        for severity in (1, 3, 5)
    )
