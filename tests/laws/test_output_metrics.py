"""Metrics of values and MLP: plain SVD is the truncated SVD of the weights, and what does not exist is refused."""

import pytest
import torch
from torch import Tensor, nn

import attnrx as rx
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.support.errors import InvalidRule, NoOpPrescription
from attnrx.vit.attention import Attention
from attnrx.vit.maps import LINEAR_MAPS, OUTPUT_MAPS
from attnrx.vit.models import family_of
from attnrx_lab.vision_transformer import VisionTransformer
from support import cases
from support.comparisons import pixels

DENSE = cases.CONFIGS["dense"]  # three heads of four directions, an MLP of 12 and 24 features
RANK = 2


@pytest.fixture(scope="module")
def model() -> VisionTransformer:
    return cases.model(DENSE)


@pytest.fixture(scope="module")
def found(model: VisionTransformer) -> Diagnosis:
    return rx.diagnose(model, pixels(DENSE, 16), batch_size=8)


@pytest.fixture(scope="module")
def unwatched(model: VisionTransformer) -> Diagnosis:
    return rx.diagnose(model, pixels(DENSE, 4), diagnostics=(rx.diagnostics.SpectralShape(),))


def truncated(matrix: Tensor, rank: int) -> Tensor:
    left, strength, right = torch.linalg.svd(matrix)
    return left[:, :rank] * strength[:rank] @ right[:rank]


@pytest.mark.parametrize("by", ["mask", "compress"])
def test_plain_svd_of_the_mlp_is_the_truncated_svd_of_its_weights(
    by: str, model: VisionTransformer, unwatched: Diagnosis
) -> None:
    prescription = rx.prescribe(unwatched, dict.fromkeys(LINEAR_MAPS, f"uniform_rank:{RANK},metric=weights"))
    small = rx.realize(model, prescription, by=by)
    family = family_of(model)
    for before, after in zip(family.mlp(model), family.mlp(small), strict=True):
        for full, reduced in zip(before, after, strict=True):
            assert isinstance(full, nn.Linear)
            unit_vectors = torch.eye(full.in_features, dtype=torch.float64)
            bias = reduced(torch.zeros_like(unit_vectors))[0]
            weight = (reduced(unit_vectors) - bias).mT
            torch.testing.assert_close(weight, truncated(full.weight, RANK), rtol=0, atol=1e-12)
            torch.testing.assert_close(bias, full.bias, rtol=0, atol=1e-12)


@pytest.mark.parametrize("by", ["mask", "compress"])
def test_plain_svd_of_the_values_is_the_truncated_svd_of_every_heads_product(
    by: str, model: VisionTransformer, unwatched: Diagnosis
) -> None:
    prescription = rx.prescribe(unwatched, f"vo=uniform_rank:{RANK},metric=weights")
    small = rx.realize(model, prescription, by=by)
    layers = (family_of(each).attention(each) for each in (model, small))
    for before, after in zip(*layers, strict=True):
        for head, (full, reduced) in enumerate(zip(products(before), products(after), strict=True)):
            torch.testing.assert_close(reduced, truncated(full, RANK), rtol=0, atol=1e-12, msg=f"head {head}")
        assert before.value.bias is not None and before.output.bias is not None and after.output.bias is not None
        constant = before.output.weight @ before.value.bias + before.output.bias  # softmax rows sum to one
        torch.testing.assert_close(after.output.bias, constant, rtol=0, atol=1e-12)


def products(attention: Attention) -> list[Tensor]:
    value_dims = attention.spec.value_dims
    rows, columns = attention.value.weight.split(value_dims), attention.output.weight.split(value_dims, dim=1)
    return [column @ row for row, column in zip(rows, columns, strict=True)]


def test_plain_svd_and_the_metric_of_the_data_are_different_prescriptions(found: Diagnosis) -> None:
    for name in OUTPUT_MAPS:
        plain, data = (rx.prescribe(found, {name: f"uniform_rank:{RANK},metric={m}"}) for m in ("weights", "centered"))
        default = rx.prescribe(found, {name: f"uniform_rank:{RANK}"})
        for one, other, unstated in zip(plain.layers, data.layers, default.layers, strict=True):
            outputs = [layer.outputs[name] for layer in (one, other, unstated)]
            assert not torch.allclose(outputs[0].encode, outputs[1].encode, atol=1e-3)
            assert torch.equal(outputs[1].encode, outputs[2].encode)
            assert [output.reasons[0].rpartition("; metric ")[2] for output in outputs] == [
                "weights",
                "centered",
                "centered",
            ]


@pytest.mark.parametrize("name", OUTPUT_MAPS)
def test_a_prescription_states_the_metric_that_it_decided_in(name: str, found: Diagnosis) -> None:
    for stated, metric in (("", "centered"), (",metric=centered", "centered"), (",metric=weights", "weights")):
        prescription = rx.prescribe(found, f"{name}=uniform_rank:{RANK}{stated}")
        assert str(prescription) == f"{name}=uniform_rank:{RANK},metric={metric}"


@pytest.mark.parametrize("by", ["mask", "compress"])
def test_a_map_reduced_on_the_data_keeps_the_mean_of_its_outputs(
    by: str, model: VisionTransformer, found: Diagnosis
) -> None:
    """Of the first layer, whose inputs stay the same."""
    small = rx.realize(model, rx.prescribe(found, f"fc1=uniform_rank:{RANK}"), by=by)
    torch.testing.assert_close(mean_of_first_map(small), mean_of_first_map(model), rtol=0, atol=1e-10)


def mean_of_first_map(model: nn.Module) -> Tensor:
    outputs: list[Tensor] = []

    def store(module: nn.Module, given: object, output: Tensor) -> None:
        outputs.append(output)

    hook = family_of(model).mlp(model)[0][0].register_forward_hook(store)
    with torch.no_grad():
        for batch in pixels(DENSE, 16).batches(8):
            model(batch.images.double())
    hook.remove()
    return torch.cat(outputs).flatten(0, 1).mean(0)


@pytest.mark.parametrize("name", OUTPUT_MAPS)
def test_the_metric_of_the_data_needs_the_moments(name: str, unwatched: Diagnosis) -> None:
    with pytest.raises(InvalidRule, match=r"moments.*metric=weights"):
        rx.prescribe(unwatched, {name: f"uniform_rank:{RANK}"})


def test_weight_readings_survive_the_disk(tmp_path, unwatched: Diagnosis) -> None:
    loaded = Diagnosis.load(unwatched.save(tmp_path / "diagnosis.json"))
    rules = "vo=total_rank:0.5,metric=weights fc1=uniform_rank:3,metric=weights fc2=uniform_rank:3,metric=weights"
    for one, other in zip(rx.prescribe(unwatched, rules).layers, rx.prescribe(loaded, rules).layers, strict=True):
        assert tuple(one.outputs) == tuple(other.outputs) == OUTPUT_MAPS
        for name in OUTPUT_MAPS:
            assert torch.equal(one.outputs[name].encode, other.outputs[name].encode)


def test_rules_that_change_no_value_and_no_mlp_are_refused_in_terms_of_those_maps(found: Diagnosis) -> None:
    with pytest.raises(NoOpPrescription) as refusal:
        rx.prescribe(found, "vo=uniform_rank:1.0")
    assert "vo=uniform_rank:1.0 would change nothing" in str(refusal.value)
    with pytest.raises(NoOpPrescription) as refusal:
        rx.prescribe(found, "fc1=uniform_rank:1.0")
    assert "fc1=uniform_rank:1.0 would change nothing" in str(refusal.value)
    assert "head" not in str(refusal.value) and "direction" not in str(refusal.value)
