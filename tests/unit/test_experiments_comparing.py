"""Methods as text, and what is measured of them."""

import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch

from attnrx.change.realization import realize
from attnrx.decide.diagnosing import diagnose
from attnrx.decide.rules.prescribing import prescribe
from attnrx.nouns.prescription import Prescription
from attnrx.support.errors import CheckpointError, InvalidInput, NoOpPrescription, NotSupported, UnknownName
from attnrx.support.storage import read_json, write_json
from attnrx.vit.maps import LAYER_MAPS
from attnrx.vit.models import family_of
from attnrx.workflows.save import save
from attnrx_lab.comparison import Method, MethodBench, MethodComparison, compare_methods, require_comparable
from attnrx_lab.comparison.comparing import ImageResults, paired_differences
from support import cases
from support.comparisons import pixels

DENSE = cases.CONFIGS["dense"]


@pytest.mark.parametrize(
    ("text", "method"),
    [
        ("mix=total_rank:{share}", Method("mix", "total_rank:{share}")),
        ("two words=energy_retention:0.9,metric=mix", Method("two words", "energy_retention:0.9,metric=mix")),
        (
            "all=qk=top_rank:3,metric=mix vo=top_rank:2 repair=20 fc1=top_rank:5",
            Method("all", "qk=top_rank:3,metric=mix vo=top_rank:2 fc1=top_rank:5", 20),
        ),
        (
            "both=qk=top_rank:3 tokens=spot(mean=false):0.7@4,7",
            Method("both", "qk=top_rank:3 tokens=spot(mean=false):0.7@4,7"),
        ),
        ("svd-llm=baseline:svd_llm", Method("svd-llm", baseline="svd_llm")),
    ],
)
def test_methods_are_read(text: str, method: Method) -> None:
    assert Method.parse(text) == method


@pytest.mark.parametrize(
    "text",
    [
        "",
        "mix",
        "mix=top_rank:3 vo=top_rank:2",
        "mix=qk=a repair=many",
        "svd=baseline:svd vo=top_rank:3",
        "svd=baseline:svd repair=3",
        "pruned=baseline:torch_pruning maps=fc1",
    ],
)
def test_what_is_no_methods_is_refused(text: str) -> None:
    with pytest.raises((InvalidInput, UnknownName)):
        Method.parse(text)


def test_what_is_no_peer_is_refused() -> None:
    with pytest.raises(UnknownName, match="did you mean 'svd'"):
        Method.parse("mistyped=baseline:svdd")


def bench() -> MethodBench:
    model, images = cases.model(DENSE), pixels(DENSE, 24)
    return MethodBench(model, diagnose(model, images, batch_size=8), images, images, batch_size=8)


@pytest.mark.parametrize("reducer", ["halting_scores", "spvit(scores=halting_scores)", "spot"])
def test_tokens_that_need_training_are_refused_by_name(reducer: str) -> None:
    with pytest.raises(NotSupported, match=re.escape(f"the method own uses {reducer}, which needs training")):
        compare_methods(bench(), [Method("own", f"tokens={reducer}:0.5@2")], (0.5,))


def test_keeping_more_loses_less_and_costs_more(tmp_path: Path) -> None:
    own = bench()
    methods = [Method("mix", "total_rank:{share}"), Method("fixed", "uniform_rank:1")]
    trials = compare_methods(own, methods, (0.75, 0.25))
    most, least, fixed = trials.trials
    assert (most.share, least.share, fixed.share) == (0.75, 0.25, None)  # what does not vary is measured once
    assert [trial.cells[1] for trial in trials.trials] == ["75 %", "25 %", "-"]
    assert most.divergence.value < least.divergence.value
    assert most.macs_share > least.macs_share > 0
    before = family_of(own.model).costs(own.model)
    assert most.params == round(most.params_share * before.params)
    assert most.change.low <= most.change.value <= most.change.high
    record = read_json(trials.save(tmp_path / "comparison.json"))
    assert [trial["method"] for trial in record["trials"]] == ["mix", "mix", "fixed"]
    assert trials.to_markdown().count("\n") == 9  # "fixed" has the MACs of "mix" at one share
    assert trials.rows[0][:3] == ("the original", "-", f"{trials.accuracy.value:.1f} %")
    read = MethodComparison.load(tmp_path / "comparison.json")
    assert (read.trials, read.accuracy, read.rows) == (trials.trials, trials.accuracy, trials.rows)
    record["trials"][0]["macs_share"] = "half"
    write_json(tmp_path / "edited.json", record)
    with pytest.raises(CheckpointError, match=re.escape("trials[0].macs_share")):
        MethodComparison.load(tmp_path / "edited.json")


def test_a_trained_folder_is_a_method(tmp_path: Path) -> None:
    own = bench()
    small = realize(own.model, prescribe(own.diagnosis, "total_rank:0.5"))
    folder = save(small, tmp_path / "trained")
    texts = [f"trained={folder}", "same=total_rank:0.5", "mix=total_rank:{share}"]
    trained, same, _ = compare_methods(own, [Method.parse(text) for text in texts], (0.5,)).trials
    assert (trained.share, trained.macs) == (None, same.macs)
    # Files hold weights in their own precision, which the model of the case has, too.
    assert trained.divergence.value == pytest.approx(same.divergence.value, abs=1e-9)
    other = save(cases.model(replace(DENSE, classes=5)), tmp_path / "other")
    with pytest.raises(InvalidInput, match="outputs of 5, and the original of"):
        require_comparable(own.model, own.test, [Method.parse(f"other={other}")])
    with pytest.raises(InvalidInput, match="a trained model takes no rules"):
        Method("trained", "total_rank:0.5", folder=str(folder))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("own=tokens=spot:0.5@2", "needs training"),
        ("late=tokens=ward:0.5@9", "layers"),
        ("rule=qk=total_rnk:{share}", "did you mean 'total_rank'"),
    ],
)
def test_what_cannot_be_compared_is_refused_without_a_diagnosis(text: str, message: str) -> None:
    with pytest.raises((InvalidInput, NotSupported, UnknownName), match=message):
        require_comparable(cases.model(DENSE), pixels(DENSE, 8), [Method.parse(text)])


def test_methods_at_one_budget_are_compared_image_by_image() -> None:
    own = bench()
    texts = ["mix=total_rank:{share}", "equal=uniform_rank:{share}", "largest=largest_matched(total_rank:{share})"]
    fixed = [Method("one", "uniform_rank:1"), Method("two", "uniform_rank:2")]
    trials = compare_methods(own, [*(Method.parse(text) for text in texts), *fixed], (0.75, 0.5))
    pairs = [(each.first, each.second, each.share) for each in trials.differences]
    names = ("mix", "equal", "largest")
    expected = {(first, second, share) for first, second in combinations(names, 2) for share in (0.75, 0.5)}
    by_name = {(trial.method, trial.share): trial for trial in trials.trials}
    # A method with a fixed cost is also compared with methods of nearly the same MACs.
    near = {
        (name, one.name, share)
        for one in fixed
        for (name, share), trial in by_name.items()
        if share is not None and abs(trial.macs / by_name[one.name, None].macs - 1) <= 0.02
    }
    assert near and set(pairs) == expected | near | {("one", "two", None)} and len(pairs) == len(set(pairs))
    for each in trials.differences:
        first, second = (
            by_name.get((name, each.share), by_name.get((name, None))) for name in (each.first, each.second)
        )
        assert first is not None and second is not None
        assert each.divergence.value == pytest.approx(second.divergence.value - first.divergence.value)
        assert each.accuracy.value == pytest.approx(second.change.value - first.change.value)
        assert each.divergence.low <= each.divergence.value <= each.divergence.high
        assert 0 < each.divergence_p <= 1 and 0 < each.accuracy_p <= 1
    assert trials.to_markdown().count(" minus ") == len(pairs)


def test_p_values_are_corrected_for_the_number_of_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(40, generator=generator)
    correct = torch.ones(40, dtype=torch.bool)
    results = [
        ImageResults(name, (0.5, None), noise + offset, correct, 1e9)
        for name, offset in (("a", 0.0), ("b", 0.1), ("c", 0.1 + 1e-3 * torch.randn(40, generator=generator)))
    ]
    alone = paired_differences(results[:2], 0)
    all_three = paired_differences(results, 0)
    assert alone[0].divergence_p == pytest.approx(1e-4)
    assert all_three[0].divergence_p == pytest.approx(3e-4)
    assert all_three[2].divergence_p > 0.05  # b and c differ by noise
    assert [each.accuracy_p for each in all_three] == [1.0, 1.0, 1.0]


def test_a_method_with_a_fixed_cost_is_compared_with_methods_of_the_same_macs() -> None:
    noise, correct = torch.rand(40, generator=torch.Generator().manual_seed(0)), torch.ones(40, dtype=torch.bool)
    budgets = {"near": (None, 0.6, 6.0e9), "far": (None, 0.5, 5.0e9), "trained": (None, None, 6.1e9)}
    results = [ImageResults(name, (a, b), noise, correct, macs) for name, (a, b, macs) in budgets.items()]
    for order in (results, results[::-1]):
        (found,) = paired_differences(order, 0)
        assert {found.first, found.second} == {"near", "trained"} and found.target == 0.6


def test_a_share_that_keeps_everything_is_a_row_and_rules_without_effect_are_refused() -> None:
    own = bench()
    full, _ = compare_methods(own, [Method("mix", "total_rank:{share}")], (1.0, 0.5)).trials
    assert (full.share, full.macs_share, full.change.value, full.agreement.value) == (1.0, 1.0, 0.0, 100.0)
    assert full.divergence.value == pytest.approx(0, abs=1e-12)
    with pytest.raises(NoOpPrescription):
        compare_methods(own, [Method("fixed", "total_rank:1.0")], (0.5,))


CONTROLS = ("random_matched({}):seed=3", "largest_matched({})", "uniform_matched({})")


@pytest.mark.parametrize("name", [name for name in LAYER_MAPS if name != "depth"])
@pytest.mark.parametrize("control", CONTROLS)
def test_controls_keep_as_much_of_a_dense_model_as_the_rule_and_something_else(name: str, control: str) -> None:
    own, rule = bench(), "total_rank:0.5"
    texts = {"rule": rule, "control": control.format(rule)}
    made = {kind: prescribe(own.diagnosis, {name: text}) for kind, text in texts.items()}
    ranks = {kind: _ranks(prescription, name) for kind, prescription in made.items()}
    assert [sum(layer) for layer in ranks["control"]] == [sum(layer) for layer in ranks["rule"]]
    if not control.startswith("uniform"):
        assert ranks["control"] == ranks["rule"]
    images = next(iter(own.test.batches(24))).images.double()
    with torch.no_grad():
        answers = {kind: realize(own.model, prescription)(images) for kind, prescription in made.items()}
        lost = {kind: float((answer - own.model(images)).square().mean()) for kind, answer in answers.items()}
    if control.startswith("uniform") and ranks["control"] == ranks["rule"]:
        assert lost["control"] == lost["rule"]  # the same choice: a map of the MLP is a single unit
    elif name == "heads":  # removal minimizes the error of each layer; the logits of a model with few heads may differ
        assert lost["control"] != lost["rule"]
    else:
        assert lost["control"] > lost["rule"]


def _ranks(prescription: Prescription, name: str) -> list[tuple[int, ...]]:
    if name == "heads":
        return [(int(layer.heads.sum()),) for layer in prescription.layers]
    return [layer.outputs[name].ranks if name in layer.outputs else layer.qk.ranks for layer in prescription.layers]
