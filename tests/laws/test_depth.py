"""Models that lost whole blocks: a mask and the smaller model are one, as are what is saved, exported and counted."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import attnrx as rx
from attnrx.change.realization.repair import Repair
from attnrx.decide.planning import least_needed_blocks, prescribed_costs
from attnrx.nouns.prescription import DepthPrescription
from attnrx.support.errors import AttnrxError, InvalidInput, NotSupported
from attnrx.vit.models import model_fingerprint, stock_form
from support import cases
from support.command_line import call
from support.stock_models import MODELS, images, stock_model, tensors

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.usefixtures("single_precision")]

DEPTH, REMOVED = 4, (1, 3)


def outputs(model: nn.Module) -> list[torch.Tensor]:
    with torch.no_grad():
        return tensors(model.eval()(images(3, 2)))


def blocks(model: nn.Module) -> list[nn.Module]:
    family = rx.models.family_of(model)
    return [model.get_submodule(path.removeprefix("source.")) for path in family.block_names(model)]


def skipped(model: nn.Module, removed: tuple[int, ...]) -> list[torch.Tensor]:
    """Returns the outputs of a model whose blocks with these numbers return their first input."""
    hooks = []
    for number in removed:
        module = blocks(model)[number - 1]

        def passed(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Any) -> Any:
            tokens = given[0] if given else named["hidden_states"]
            return tokens if isinstance(output, torch.Tensor) else (tokens, *output[1:])

        hooks.append(module.register_forward_hook(passed, with_kwargs=True))
    found = outputs(model)
    for hook in hooks:
        hook.remove()
    return found


def require_close(ones: list[torch.Tensor], others: list[torch.Tensor], limit: float = 1e-5) -> None:
    for one, other in zip(ones, others, strict=True):
        assert float((one - other).abs().max()) <= limit * float(other.abs().max())


@pytest.mark.parametrize("name", MODELS)
def test_a_removed_block_passes_its_tokens_in_every_form(name: str, tmp_path: Path) -> None:
    original = stock_model(name, DEPTH)
    model = rx.load(original)
    prescription = rx.prescribe(model, {"depth": f"without:{','.join(map(str, REMOVED))}"}, portable=True)
    small = rx.realize(model, prescription)
    expected = skipped(model, REMOVED)
    require_close(outputs(small), expected)
    require_close(outputs(rx.realize(model, prescription, by="mask")), expected)
    # Of the library's class, and what the library counts is what was predicted.
    assert type(small) is type(original) and len(blocks(small)) == DEPTH - len(REMOVED)
    counted = rx.models.family_of(small).costs(small)
    assert prescribed_costs(model, prescription) == counted
    assert counted.params == sum(weight.numel() for weight in small.parameters())
    assert not [part for part in small.modules() if type(part).__module__.startswith("attnrx")]
    # The library's checkpoint, by its own code and by attnrx; and the folder of attnrx.
    folder = rx.save(small, tmp_path / "portable", prescription=prescription, portable=True)
    names: dict[str, Any] = {}
    exec(rx.models.loading_code(small, folder), names)
    for again in (names["model"], rx.load(folder), rx.load(rx.save(small, tmp_path / "own"))):
        assert type(again) is type(original)
        for found, before in zip(outputs(again), outputs(small), strict=True):
            assert torch.equal(found, before)
    assert rx.Prescription.load(folder / "prescription.json").depth == prescription.depth


def test_units_and_ranks_of_the_other_blocks_go_too(tmp_path: Path) -> None:
    model = rx.load(stock_model("timm ViT", DEPTH))
    diagnosis = rx.diagnose(model, images(16), moments=True)
    text = "qk=total_rank:0.5 hidden=total_rank:0.5 depth=without:2"
    prescription = rx.prescribe(diagnosis, text)
    assert str(prescription).endswith("depth=without:2") and prescription.kept_blocks == (0, 2, 3)
    small, masked = (rx.realize(model, prescription, by=by) for by in ("compress", "mask"))
    require_close(outputs(small), outputs(masked))
    assert prescribed_costs(model, prescription).params == rx.models.family_of(small).costs(small).params
    again = rx.load(rx.save(small, tmp_path / "model", prescription=prescription))
    assert model_fingerprint(again) == model_fingerprint(small)
    file = rx.export(small, tmp_path / "model.pt2", to="program")
    require_close([file(images(3, 2))], outputs(small))
    units = rx.realize(model, rx.prescribe(diagnosis, "hidden=total_rank:0.5 depth=without:2", portable=True))
    assert stock_form(units)._model_args["depth"] == 3  # type: ignore[operator, index]


def test_modes_and_frozen_weights_stay_with_their_blocks() -> None:
    model = rx.load(stock_model("ViT", DEPTH))
    frozen = blocks(model)[2]
    frozen.requires_grad_(False)
    frozen.eval()
    small = rx.realize(model.train(), rx.prescribe(model, {"depth": "without:2"}))
    frozen.eval()
    small = rx.realize(model, rx.prescribe(model, {"depth": "without:2"}))
    found = [not any(weight.requires_grad for weight in block.parameters()) for block in blocks(small)]
    assert found == [False, True, False]
    assert [block.training for block in blocks(small)] == [True, False, True] and small.training
    addresses = {weight.data_ptr() for weight in model.parameters()}
    assert not addresses & {weight.data_ptr() for weight in small.parameters()}


def test_the_blocks_before_a_removed_one_are_fitted_to_its_output() -> None:
    model = rx.load(stock_model("timm ViT", DEPTH))
    prescription = rx.prescribe(model, {"depth": "without:1,3"})
    small, settings = rx.realize(model, prescription), Repair(steps=5, removed=(1, 3))
    fitted = rx.repair(small, model, images(64), settings)
    assert len(fitted.before) == 2 and fitted.after[0] < 0.9 * fitted.before[0]
    weights = fitted.model.named_parameters()
    changed = [name for name, weight in weights if not torch.equal(weight, small.get_parameter(name))]
    assert any(name.startswith("blocks.0.mlp") for name in changed)
    with pytest.raises(InvalidInput, match=r"the candidate has 2 MLPs.*names 0 removed blocks"):
        rx.repair(small, model, images(64), Repair(steps=5))


def test_the_least_needed_blocks_are_those_whose_removal_changes_least() -> None:
    model: Any = stock_model("timm ViT", DEPTH)
    for block, scale in ((1, 1e-3), (3, 1e-2)):
        for weight in (model.blocks[block].attn.proj.weight, model.blocks[block].mlp.fc2.weight):
            weight.data.mul_(scale)
        model.blocks[block].attn.proj.bias.data.zero_()
        model.blocks[block].mlp.fc2.bias.data.zero_()
    adopted = rx.load(model)
    assert least_needed_blocks(adopted, images(8)).removed == (2,)
    two = least_needed_blocks(adopted, images(8), 2)
    assert two.removed == (2, 4) and two.reasons[1].startswith("block 4, removed 2 of 2: divergence ")
    with pytest.raises(InvalidInput, match="count=4 of a model of 4 blocks"):
        least_needed_blocks(adopted, images(8), 4)


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ({"depth": "without:"}, "name the blocks to remove, counted from 1"),
        ({"depth": "2"}, "name the blocks to remove"),
        ({"depth": "without:0"}, "from 1 on"),
        ({"depth": "without:5"}, "of a model of 4 blocks"),
        ({"depth": "without:1,2,3,4"}, "of a model of 4 blocks"),
        ({"depth": 2}, "names no blocks to remove"),
        ({"depth": "without:2", "tokens": "ward:0.5@2"}, "Realize depth first"),
    ],
)
def test_other_depths_are_refused(rules: Any, text: str) -> None:
    with pytest.raises(AttnrxError, match=text):
        rx.prescribe(rx.load(stock_model("timm ViT", DEPTH)), rules)


def test_a_model_that_no_library_creates_is_refused() -> None:
    own = cases.model(cases.CONFIGS["dense"])
    with pytest.raises(NotSupported, match="cannot be portable"):
        rx.realize(own, rx.prescribe(own, {"depth": DepthPrescription((1,))}))


def test_the_command_and_the_report_say_which_blocks_go(tmp_path: Path) -> None:
    original = rx.load(stock_model("timm ViT", DEPTH))
    folder, path = rx.save(original, tmp_path / "model"), tmp_path / "prescription.json"
    done = call("prescribe", folder, "--rules", "depth=without:2", "--out", path)
    assert done.code == 0 and "block 2 is removed, as requested" in done.out
    assert call("realize", folder, "--prescription", path, "--out", tmp_path / "small").code == 0
    small, prescription = rx.load(tmp_path / "small"), rx.Prescription.load(path)
    evidence = rx.verify(small, original, images(8), [rx.checks.Fidelity()], prescription=prescription)
    page = rx.write_report(tmp_path / "report.html", evidence=evidence, prescription=prescription).read_text()
    assert "1 of 4 removed" in page and "block 2 is removed, as requested" in page
