"""`prescribe`: rules and a diagnosis become a prescription."""

from collections.abc import Mapping

from torch import nn

from attnrx.decide.rules import Rule, RulesLike, parse_rules, require_remainder
from attnrx.decide.rules import prescribe_maps as prescribe_with
from attnrx.nouns.diagnosis import Diagnosis, LayerDiagnosis
from attnrx.nouns.prescription import Prescription
from attnrx.support.arguments import checked, instance
from attnrx.support.errors import InvalidInput
from attnrx.support.optional import installed_versions
from attnrx.support.storage import require_finite_tensors
from attnrx.vit.models import family_of, model_fingerprint, require_all_tokens, require_ordinary_weights
from attnrx.vit.models.verbs import verb

RULES = "rules: a text such as 'qk=total_rank:0.5', a Rule, or a mapping from maps to them"


@checked(rules=instance(RULES, str, Rule, Mapping))
@verb
def prescribe(diagnosis: Diagnosis | nn.Module, rules: RulesLike) -> Prescription:
    """Applies pruning rules to a diagnosis and returns the prescription.

    Args:
        diagnosis: The diagnosis of the model; or the model itself, for a prescription of tokens alone.
        rules: The rule of every map, as one text or a mapping: "qk=total_rank:0.5 vo=total_rank:0.75
            fc1=uniform_rank:0.5 tokens=ward:0.7@4,7,10". A rule without a map name applies to qk. Every rule may state
            its metric, e.g. `uniform_rank:0.5,metric=weights` for the plain SVD (see `rules.METRICS` for qk,
            `rules.OUTPUT_METRICS` for vo, fc1 and fc2). The rule for tokens is a token policy, or an earlier token
            prescription with trained predictors (`prescribed_tokens`).

    Returns:
        The prescription: for every map the directions that are kept, with the reasons.

    Raises:
        NoOpPrescription: The rules keep everything.
        InvalidInput: Rules with a model in place of a diagnosis.
        InvalidRule: A rule is outside its range, does not apply to its map, or removes a map in all layers.

    Examples:
        >>> diagnosis = rx.diagnose(rx.load("svda:digits"), torch.randn(64, 1, 16, 16))
        >>> prescription = rx.prescribe(diagnosis, "qk=total_rank:0.5")
        >>> [sum(ranks) for ranks in prescription.ranks]  # of 4 heads with 16 directions, in each layer
        [32, 32, 32]
    """
    read, tokens = parse_rules(rules)
    if isinstance(diagnosis, nn.Module):
        diagnosis = _without_readings(diagnosis, read)
    return require_remainder(prescribe_with(diagnosis, {**read, "tokens": tokens}))


def _without_readings(model: nn.Module, rules: Mapping[str, Rule]) -> Diagnosis:
    """Returns a diagnosis of the spectra alone: a token policy needs no readings, and its user need not diagnose."""
    if rules:
        raise InvalidInput(
            "prescribe was given a model, and rules need the readings of a diagnosis: diagnose the model on images and "
            "pass the diagnosis, or give a token policy alone."
        )
    require_all_tokens(model, "prescribe for")
    require_ordinary_weights(model)
    require_finite_tensors(model.state_dict(), "the model")
    family = family_of(model)
    layers = tuple(LayerDiagnosis(layer.spectrum(), {}) for layer in family.attention(model))
    about = {"family": family.name, "data": None, "versions": installed_versions("attnrx", "torch")}
    return Diagnosis(layers, model_fingerprint(model), about)
