"""Both axes in one prescription: mask == compress, priced == realized == counted, saved == loaded."""

import copy
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from attnrx.change.realization import prescribed_tokens, realize
from attnrx.decide.diagnosing import diagnose
from attnrx.decide.planning import PlanSettings
from attnrx.decide.planning.cost_table import prescribed_costs
from attnrx.decide.rules.prescribing import prescribe
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.prescription import Prescription, TokenPrescription
from attnrx.show.checks import Comparison
from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.support.modules import evaluating
from attnrx.vit.costs import count_params, count_product_macs
from attnrx.vit.models import attach_tokens_, counted_by_spec, family_of, load_model, model_fingerprint, save_model
from attnrx.vit.models.boundary.adoption import adopt
from attnrx.vit.tokens import TokenPolicy, parse_policy
from attnrx_lab.checks import Bounds
from attnrx_lab.rules import control_prescriptions
from attnrx_lab.tokens import HaltingScores
from support import cases
from support.cases import PATTERNS, REDUCTIONS, with_heads
from support.comparisons import pixels
from support.pretrained import TIMM, VIT, inputs, of_timm
from support.token_models import KINDS

DEEP = adopt(TIMM, of_timm(VIT, depth=4, img_size=32))  # three heads, sixteen patches
CLASSLESS = cases.model(replace(cases.CONFIGS["dense"], image_size=16))
# What is seen of keys is not the same in a mask; tested apart.
SAME = [kind for kind, reducer in REDUCTIONS.items() if "keys" not in reducer.needs]


def logits(model: nn.Module) -> torch.Tensor:
    with evaluating([model]):
        return model(inputs(model))


def predictors(policy: TokenPolicy, model: nn.Module) -> dict[str, torch.Tensor] | None:
    """Random ones that decide by what they see."""
    if not policy.reducer.learned:
        return None
    twin = copy.deepcopy(model)
    stages = attach_tokens_(twin, family_of(twin), policy).stages.state_dict()
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(each.shape, generator=generator, dtype=torch.float64) for name, each in stages.items()}


def both(model: nn.Module, pattern: str, policy: TokenPolicy) -> Prescription:
    ranks = cases.prescription(model, PATTERNS[pattern])  # type: ignore[arg-type]
    return replace(ranks, tokens=TokenPrescription(policy, predictors(policy, model)))


# Every reducer with one pattern, and every class of reducers with two or three.
PAIRS = [
    (pattern, kind)
    for row, pattern in enumerate(PATTERNS)
    for column, kind in enumerate(SAME)
    if pattern == "ragged" or (kind in KINDS and (row + column) % 3 == 0)
]


@pytest.mark.parametrize(("pattern", "kind"), PAIRS)
def test_mask_equals_compress_on_both_axes(pattern: str, kind: str) -> None:
    prescription = both(DEEP, pattern, TokenPolicy.staged(REDUCTIONS[kind], 0.6, (2, 4)))
    masked, small = (realize(DEEP, prescription, by=by) for by in ("mask", "compress"))
    torch.testing.assert_close(logits(masked), logits(small), rtol=1e-9, atol=1e-9)
    alone = realize(DEEP, replace(prescription, tokens=None))
    assert not torch.allclose(logits(small), logits(alone), rtol=1e-6)


def test_a_layer_without_heads_is_seen_as_its_mask_is() -> None:
    prescription = both(DEEP, "half", TokenPolicy.staged(REDUCTIONS["spot"], 0.6, (2, 4)))
    third = prescription.layers[2]
    gone = with_heads(third, [False] * 3)
    layers = (*prescription.layers[:2], gone, prescription.layers[3])
    masked, small = (realize(DEEP, replace(prescription, layers=layers), by=by) for by in ("mask", "compress"))
    torch.testing.assert_close(logits(masked), logits(small), rtol=1e-9, atol=1e-9)


def test_rewritten_directions_values_and_mlp_leave_with_tokens() -> None:
    found = diagnose(CLASSLESS, pixels(CLASSLESS.config, 16), batch_size=8)
    rules = "qk=total_rank:0.5 vo=total_rank:0.5 fc1=uniform_rank:0.5 fc2=uniform_rank:0.5"
    prescription = prescribe(found, f"{rules} tokens=attention_received:0.6@2")
    masked, small = (realize(CLASSLESS, prescription, by=by) for by in ("mask", "compress"))
    torch.testing.assert_close(logits(masked), logits(small), rtol=1e-9, atol=1e-9)
    assert prescribed_costs(CLASSLESS, prescription) == family_of(small).costs(small)


@pytest.mark.parametrize(
    ("pattern", "kind"),
    [*(("ragged", kind) for kind in REDUCTIONS), *zip(["full", "head-removed"] * len(KINDS), KINDS, strict=False)],
)
def test_priced_equals_realized_equals_counted(pattern: str, kind: str) -> None:
    prescription = both(DEEP, pattern, TokenPolicy.staged(REDUCTIONS[kind], 0.6, (2, 4)))
    small, family = realize(DEEP, prescription), family_of(DEEP)
    costs = family.costs(small)
    assert costs == prescribed_costs(DEEP, prescription)
    assert costs.params == count_params(small)
    with evaluating([small]), counted_by_spec(small, family):
        assert costs.product_macs == count_product_macs(small, inputs(small))
    assert costs.tokens[0] == 17 and costs.tokens[-1] == 1 + 5 + REDUCTIONS[kind].extra
    assert sum(part.macs for part in costs.parts.values()) == costs.macs


@pytest.mark.parametrize("kind", ["spot", "evit"])
def test_a_mask_costs_what_the_original_costs_and_its_predictors(kind: str) -> None:
    policy = TokenPolicy.staged(REDUCTIONS[kind], 0.6, (2, 4))
    masked, family = realize(DEEP, both(DEEP, "full", policy), by="mask"), family_of(DEEP)
    costs, before = family.costs(masked), family.costs(DEEP)
    assert (costs.tokens, costs.macs - costs.predictors.macs) == (before.tokens, before.macs)
    with evaluating([masked]), counted_by_spec(masked, family):
        assert costs.product_macs == count_product_macs(masked, inputs(masked))


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_saved_equals_loaded(kind: str, tmp_path: Path) -> None:
    prescription = both(DEEP, "ragged", TokenPolicy.staged(REDUCTIONS[kind], 0.6, (2, 4)))
    again = Prescription.load(prescription.save(tmp_path / "rx.json"))
    assert again.tokens is not None and prescription.tokens is not None
    assert again.tokens.policy == prescription.tokens.policy and again.tokens.reasons == prescription.tokens.reasons
    small = realize(DEEP, again)
    assert torch.equal(logits(small), logits(realize(DEEP, prescription)))
    assert torch.equal(logits(load_model(save_model(tmp_path / "slim", small))), logits(small))


def test_predictors_travel_from_one_model_to_another() -> None:
    policy = TokenPolicy.staged(REDUCTIONS["spot"], 0.6, (2, 4))
    taught = realize(DEEP, both(DEEP, "full", policy))
    taken = prescribed_tokens(taught)
    assert not taken.must_be_trained and "trained" in taken.reasons[0]
    again = realize(DEEP, replace(cases.prescription(DEEP, PATTERNS["full"]), tokens=taken))  # type: ignore[arg-type]
    assert torch.equal(logits(again), logits(taught))
    with pytest.raises(InvalidInput, match="prunes and merges no tokens"):
        prescribed_tokens(DEEP)


def test_fresh_predictors_are_those_of_their_seed_and_say_so() -> None:
    ranks = cases.prescription(DEEP, PATTERNS["full"])  # type: ignore[arg-type]
    policy = parse_policy("spot:0.6@2,4")
    tokens = [TokenPrescription(policy, seed=seed) for seed in (0, 0, 1)]
    assert tokens[0].must_be_trained and all("must be trained" in reason for reason in tokens[0].reasons)
    first, second, third = (model_fingerprint(realize(DEEP, replace(ranks, tokens=own))) for own in tokens)
    assert first == second != third


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_a_selection_that_means_nothing_before_a_training_says_so(kind: str) -> None:
    """Predictors with random weights, and features that nothing has made into halting scores, in any soft reducer."""
    policy = TokenPolicy.staged(REDUCTIONS[kind], 0.6, (2, 4))
    prescription = TokenPrescription(policy)
    inner = getattr(policy.reducer, "scores", policy.reducer)
    assert prescription.must_be_trained == (policy.reducer.learned or isinstance(inner, HaltingScores))
    assert all(("must be trained" in reason) == prescription.must_be_trained for reason in prescription.reasons)
    if prescription.must_be_trained:
        with pytest.raises(NotSupported, match=rf"^{re.escape(str(policy.reducer))} needs training, and planning"):
            PlanSettings(reducer=str(policy.reducer))


@pytest.fixture(scope="module")
def found() -> Diagnosis:
    return diagnose(CLASSLESS, pixels(CLASSLESS.config, 8), batch_size=8)


def test_tokens_alone_are_a_prescription(found: Diagnosis) -> None:
    prescription = prescribe(found, "tokens=attention_received:0.6@2")
    assert prescription.removed_share == 0 and str(prescription) == "tokens=attention_received:0.6@2"
    small = realize(CLASSLESS, prescription)
    assert family_of(small).costs(small).tokens == (16, 9)
    controls = control_prescriptions(found, prescription, draws=2)
    assert [str(each.tokens.policy) for each in controls["random"]] == [  # type: ignore[union-attr]
        "random:0.6@2",
        "random(seed=1):0.6@2",
    ]


def test_controls_of_the_scores_keep_the_tokens(found: Diagnosis) -> None:
    prescription = prescribe(found, "qk=top_rank:2,metric=mix tokens=attention_received:0.6@2")
    made = control_prescriptions(found, prescription, draws=1)
    assert {"random", "largest"} <= made.keys()
    assert all(each.tokens is prescription.tokens for kind in made.values() for each in kind)


def test_a_model_whose_tokens_leave_is_not_diagnosed_again(found: Diagnosis) -> None:
    prescription = prescribe(found, "tokens=attention_received:0.6@2")
    small = realize(CLASSLESS, prescription)
    for ask in (
        lambda: diagnose(small, pixels(CLASSLESS.config, 8)),
        lambda: realize(small, prescription),
        lambda: prescribed_costs(small, prescription),
        lambda: family_of(small).costs(small, tokens=parse_policy("random:0.5@2")),
        lambda: Bounds()(Comparison(small, small, pixels(CLASSLESS.config, 8))),
    ):
        with pytest.raises(NotSupported, match="the original, and apply the token policy last"):
            ask()
