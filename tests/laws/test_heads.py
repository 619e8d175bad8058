"""Laws of the map "heads": removal by any metric, alone and together with the other maps of the layer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnrx as rx
from attnrx.change.decompositions import elimination_losses
from attnrx.decide.planning.cost_table import prescribed_costs
from attnrx.decide.rules.prescribing import HEAD_METRICS
from attnrx.support.errors import InvalidRule, NoOpPrescription, UnknownName
from attnrx.vit.models import family_of, working_copy
from attnrx_lab.rules import control_prescriptions
from support import cases
from support.comparisons import pixels
from support.pretrained import VIT, of_timm

SHAPE: dict[str, Any] = {"width": 16, "depth": 3, "heads": 4, **cases.TINY}
FORMS = ("dense", "svda", "timm")
OTHERS = ("", "qk=total_rank:0.5", "vo=total_rank:0.5", "qk=uniform_rank:0.5 vo=uniform_rank:0.5,metric=weights")


@pytest.fixture(scope="module")
def subjects() -> dict[str, tuple[nn.Module, rx.Diagnosis, Tensor]]:
    own: dict[str, nn.Module] = {form: cases.model(cases.ViTConfig.uniform(form, **SHAPE)) for form in FORMS[:2]}
    own["timm"] = rx.load(of_timm(VIT, img_size=8, patch_size=4, depth=3, embed_dim=16, num_heads=4, num_classes=3))
    found = {}
    for form, model in own.items():
        config = cases.ViTConfig.uniform("dense", **{**SHAPE, "channels": 3 if form == "timm" else SHAPE["channels"]})
        data = pixels(config, 24)
        readings = (*rx.diagnostics.suited_diagnostics(()), rx.diagnostics.Moments())
        images = torch.cat([batch.images for batch in data.batches(24)])
        found[form] = (model.double().eval(), rx.diagnose(model, data, diagnostics=readings), images.double())
    return found


def rules(metric: str, others: str) -> str:
    return f"{others} heads=total_rank:0.5,metric={metric}".strip()


@pytest.mark.parametrize("others", OTHERS)
@pytest.mark.parametrize("metric", HEAD_METRICS)
@pytest.mark.parametrize("form", FORMS)
def test_mask_equals_compress_and_costs_are_exact(subjects, form: str, metric: str, others: str) -> None:
    model, diagnosis, images = subjects[form]
    if form == "svda" and "qk" in others:
        others = others.replace("qk=", "qk=top_rank:2 & ")
    given = rx.prescribe(diagnosis, rules(metric, others))
    masked, small = (rx.realize(model, given, by=by) for by in ("mask", "compress"))
    torch.testing.assert_close(masked(images), small(images), rtol=1e-9, atol=1e-9)
    specs = [attention.spec for attention in family_of(small).attention(small)]
    assert [len(spec.heads) for spec in specs] == [2] * 3
    if form != "svda":
        assert prescribed_costs(model, given) == family_of(small).costs(small)


@pytest.mark.parametrize("form", FORMS)
def test_text_and_file_give_the_same_decisions(subjects, form: str, tmp_path: Path) -> None:
    model, diagnosis, images = subjects[form]
    given = rx.prescribe(diagnosis, "vo=total_rank:0.5 heads=total_rank:0.5 & energy_retention:0.99")
    again = rx.prescribe(diagnosis, str(given))
    read = rx.Prescription.load(given.save(tmp_path / "prescription.json"))
    for other in (again, read):
        assert str(other) == str(given)
        torch.testing.assert_close(rx.realize(model, other)(images), rx.realize(model, given)(images), rtol=0, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_the_refit_minimizes_the_error_of_the_output(subjects, form: str) -> None:
    """The refitted output of the first layer equals the least-squares fit on the same tokens."""
    model, diagnosis, images = subjects[form]
    small = rx.realize(model, rx.prescribe(diagnosis, "heads=total_rank:0.5"))
    outputs = []
    for each in map(working_copy, (model, small)):
        attention, found = family_of(each).attention(each)[0], []
        handle = attention.register_forward_hook(lambda _, given, output, found=found: found.append((given[0], output)))
        each(images)
        handle.remove()
        outputs.append((found[0][0], found[0][1].flatten(0, 1), attention))
    (tokens, before, whole), (_, after, _) = outputs
    stays = [head for head in range(4) if diagnosis and head in family_of(small).attention(small)[0].spec.heads]
    features: list[Tensor] = []
    handle = whole.output.register_forward_pre_hook(lambda _, given: features.append(given[0].flatten(0, 1)))
    whole(tokens)
    handle.remove()
    kept = features[0].unflatten(1, (4, -1))[:, stays].flatten(1)
    inputs = torch.cat([kept, torch.ones(len(kept), 1, dtype=kept.dtype)], dim=1)
    best = inputs @ torch.linalg.lstsq(inputs, before, driver="gelsd").solution
    torch.testing.assert_close(after, best, rtol=1e-4, atol=1e-5)  # the moments are sums in float32


def test_losses_are_the_errors_of_least_squares() -> None:
    generator = torch.Generator().manual_seed(0)
    units, size, width = 4, 3, 5
    outputs = torch.randn(400, units * size, generator=generator, dtype=torch.float64)
    outputs = outputs @ torch.randn(units * size, units * size, generator=generator, dtype=torch.float64)
    outputs -= outputs.mean(0)
    weight = torch.randn(width, units * size, generator=generator, dtype=torch.float64)
    parts = weight.unflatten(1, (units, size)).transpose(0, 1)
    losses = elimination_losses(outputs.mT @ outputs / len(outputs), parts.mT @ parts)
    order = losses.argsort().tolist()
    removed, total = [], 0.0
    for unit in order:
        removed.append(unit)
        kept = [
            column
            for other in range(units)
            if other not in removed
            for column in range(other * size, other * size + size)
        ]
        error = 0.0
        for each in removed:
            own = outputs[:, each * size : each * size + size]
            fit = outputs[:, kept] @ torch.linalg.lstsq(outputs[:, kept], own).solution if kept else 0 * own
            error += float(((own - fit) @ parts[each].mT).square().sum(-1).mean())
        total += float(losses[unit])
        assert total == pytest.approx(error, rel=1e-5)


def test_a_duplicated_head_is_removed_at_no_cost(subjects) -> None:
    """Two equal heads: one goes first, and the refitted layer gives the same output."""
    model = cases.model(cases.ViTConfig.uniform("dense", **{**SHAPE, "depth": 1})).double()
    attention = family_of(model).attention(model)[0]
    with torch.no_grad():
        for part in (attention.scores.query, attention.scores.key, attention.value):
            part.weight[4:8] = part.weight[:4]
            assert part.bias is not None
            part.bias[4:8] = part.bias[:4]
    data = pixels(model.config, 24)
    diagnosis = rx.diagnose(model, data, diagnostics=(rx.diagnostics.Moments(),))
    given = rx.prescribe(diagnosis, "heads=total_rank:3")
    assert int(given.layers[0].heads[:2].sum()) == 1
    images = torch.cat([batch.images for batch in data.batches(24)]).double()
    torch.testing.assert_close(rx.realize(model, given)(images), model(images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("metric", HEAD_METRICS)
def test_controls_remove_as_many_other_heads(subjects, metric: str) -> None:
    model, diagnosis, _ = subjects["dense"]
    given = rx.prescribe(diagnosis, rules(metric, ""))
    found = control_prescriptions(diagnosis, given, draws=8)
    for control in (one for draws in found.values() for one in draws):
        costs = [[layer.parts for layer in prescribed_costs(model, each).layers] for each in (control, given)]
        assert costs[0] == costs[1]
    assert len({tuple(map(tuple, (layer.heads.tolist() for layer in one.layers))) for one in found["random"]}) > 4
    both = rx.prescribe(diagnosis, rules(metric, "qk=total_rank:0.5"))
    for control in control_prescriptions(diagnosis, both, ["random"], draws=2)["random"]:
        pairs = zip(control.layers, both.layers, strict=True)
        assert all(torch.equal(one.heads, other.heads) and one.qk.ranks == other.qk.ranks for one, other in pairs)


def test_bad_rules_are_refused(subjects) -> None:
    _, diagnosis, _ = subjects["dense"]
    for text in ("heads=norm_clip:0.5", "heads=remove_heads & contribution_energy:0.5", "qk=remove_heads"):
        with pytest.raises(InvalidRule, match="does not apply to"):
            rx.prescribe(diagnosis, text)
    with pytest.raises(UnknownName, match="unknown metric of heads 'mix'"):
        rx.prescribe(diagnosis, "heads=total_rank:0.5,metric=mix")
    with pytest.raises(NoOpPrescription, match="would change nothing"):
        rx.prescribe(diagnosis, "heads=total_rank:1.0")
