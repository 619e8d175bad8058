"""Tokens on the command line: priced, prescribed, realized, compared and verified over files."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import attnrx as rx
from attnrx.vit.models import build_model, save_model
from support.command_line import call, record
from support.pictures import write_folder

POLICY = "attention_received:0.5@2,3"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A model whose scores matter, data, and the chain that lets tokens leave it."""
    root = tmp_path_factory.mktemp("tokens")
    data = write_folder(root / "images", {"train": 8, "validation": 2, "test": 4})
    model = build_model("dense:digits", channels=3, classes=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    with torch.no_grad():
        for layer in rx.models.family_of(model).attention(model):
            for parameter in layer.parameters():
                parameter.mul_(8)
    run, slim = save_model(root / "run", model.eval()), root / "slim"
    files = {name: root / f"{name}.json" for name in ("diagnosis", "rx", "drop")}
    steps = {
        "diagnose": record("diagnose", run, "--data", data, "--out", files["diagnosis"]),
        "prescribe": record(
            "prescribe", files["diagnosis"], "--rules", "qk=total_rank:0.4", f"tokens={POLICY}", "--out", files["rx"]
        ),
        "drop": record("prescribe", files["diagnosis"], "--rules", "tokens=dynamicvit:0.5@2,3", "--out", files["drop"]),
        "realize": record("realize", run, "--prescription", files["rx"], "--out", slim),
    }
    return SimpleNamespace(root=root, data=data, run=run, slim=slim, **files, steps=steps)


def test_the_policy_is_in_the_prescription_and_in_its_price(made: SimpleNamespace) -> None:
    written = json.loads(made.rx.read_text())
    assert written["rules"]["tokens"] == POLICY and len(written["tokens"]["reasons"]) == 2
    assert made.steps["prescribe"]["tokens"]["must_be_trained"] is False
    assert made.steps["realize"]["macs_down_percent"] > 40
    assert record("costs", made.run)["tokens"] == [64, 64, 64]
    assert record("costs", made.slim)["tokens"] == [64, 32, 16]
    assert "tokens, layer by layer: 64 32 16" in call("costs", made.slim).out


def test_fresh_predictors_must_be_trained_and_trained_ones_are_taken_along(made: SimpleNamespace) -> None:
    assert made.steps["drop"]["tokens"]["must_be_trained"] and made.steps["drop"]["removed_share"] == 0
    out = made.root / "fresh"
    record("realize", made.run, "--prescription", made.drop, "--out", out)
    trained = rx.realization.prescribed_tokens(rx.load(out))
    taken = rx.prescribe(rx.Diagnosis.load(made.diagnosis), {"qk": "total_rank:0.4", "tokens": trained})
    assert taken.tokens is not None and taken.tokens.must_be_trained is False
    small = rx.realize(rx.load(made.run), taken)
    mine, theirs = (rx.realization.prescribed_tokens(each).predictors or {} for each in (small, rx.load(out)))
    assert mine and mine.keys() == theirs.keys() and all(mine[name].equal(theirs[name]) for name in mine)
    assert taken.rules["tokens"] == "dynamicvit:0.5@2,3"


def test_verify_checks_a_model_whose_tokens_leave(made: SimpleNamespace) -> None:
    words = ("--reference", made.run, "--data", made.data, "--diagnosis", made.diagnosis)
    names = "accuracy(most_drop=100),fidelity,calibration,costs,controls(draws=1)"
    done = call("verify", made.slim, *words, "--checks", names, "--json")
    found = json.loads(done.out)["findings"]
    counted = {each["claim"]: each for each in found if each["details"].get("quantity") == "counted costs"}
    assert len(counted) == 2 and all(each["outcome"] == "holds" for each in counted.values())
    masked = [each for each in found if each["check"] == "fidelity" and "candidate against masked" in each["claim"]]
    assert masked and all(each["value"] < 1e-4 or each["unit"] == "%" for each in masked)


@pytest.mark.slow
def test_methods_may_let_tokens_leave(made: SimpleNamespace) -> None:
    out = made.root / "comparison.json"
    texts = (
        "both=qk=total_rank:{share} tokens=attention_received:0.8@2",
        "drop=tokens=attention_received:{share}@2,3",
        "control=tokens=random:{share}@2,3",
        "fine=qk=total_rank:0.5 repair=2 tokens=attention_received:0.5@2",
    )
    words = ("compare", made.run, "--data", made.data, "--calibration-images", 16, "--methods", *texts)
    trials = record(*words, "--macs", "0.6,0.01", "--out", out)
    spent = {(each["method"], each["target"]): each["macs_share"] for each in trials["trials"]}
    assert 0.5 < spent["drop", 0.6] <= 0.6 and spent["control", 0.6] == spent["drop", 0.6]
    assert set(spent) == {("drop", 0.6), ("control", 0.6), ("fine", None)}
    least = {(each["method"], each["target"]): each["least"] for each in trials["unreached"]}
    assert least["both", 0.6] > 0.6 and 0.3 < least["drop", 0.01] == least["control", 0.01] < 0.5


def test_tokens_alone_are_prescribed_for_a_model(made: SimpleNamespace) -> None:
    """A folder or a name stands where the diagnosis stands, and gives the same prescription but for what was read."""
    out, other = made.root / "from_model.json", made.root / "from_diagnosis.json"
    record("prescribe", made.run, "--rules", f"tokens={POLICY}", "--out", out)
    record("prescribe", made.diagnosis, "--rules", f"tokens={POLICY}", "--out", other)
    mine, theirs = (json.loads(path.read_text()) for path in (out, other))
    assert mine["tokens"] == theirs["tokens"]
    assert [layer["qk"] for layer in mine["layers"]] == [layer["qk"] for layer in theirs["layers"]]
    slim = record("realize", made.run, "--prescription", out, "--out", made.root / "dropped")
    assert slim["macs_down_percent"] > 0
    named = record("prescribe", "dense:digits", "--rules", f"tokens={POLICY}", "--out", made.root / "named.json")
    assert named["tokens"]["policy"] == POLICY


TRAINING = ("--epochs", 1, "--batch-size", 8, "--precision", "fp32", "--seed", 5)


@pytest.mark.slow
def test_a_policy_is_put_into_a_dense_model_and_trained(made: SimpleNamespace) -> None:
    policy, losses = "dynamicvit:0.5@2,3", ("--losses", "keep_ratio")
    words = ("train", made.run, "--tokens", policy, "--data", made.data, *TRAINING, *losses)
    first, second = (record(*words, "--out", made.root / name) for name in ("taught", "again"))
    models = [rx.load(made.root / name) for name in ("taught", "again")]
    assert first["accuracy"] == second["accuracy"]
    ours, theirs = (model.state_dict() for model in models)
    assert all(ours[name].equal(theirs[name]) for name in ours)
    reported = json.loads((made.root / "taught" / "training.json").read_text())["identity"]["tokens"]
    assert reported["policy"]["reducer"]["type"] == "DynamicViT" and reported["policy"]["layers"]["tuple"] == [2, 3]
    assert record("costs", made.root / "taught")["tokens"] == [64, 32, 16]
    other = record(*words[:-2], "--seed", 6, *losses, "--out", made.root / "other_seed")
    assert other["steps"] == first["steps"]
    drawn = rx.load(made.root / "other_seed").state_dict()
    assert any(not drawn[name].equal(ours[name]) for name in ours if name.startswith("tokens."))
    again = record(*words, "--out", made.root / "taught")  # a finished run is read back
    assert again["accuracy"] == first["accuracy"]


def test_a_learned_policy_without_its_loss_is_warned_about(made: SimpleNamespace) -> None:
    words = ("train", made.run, "--data", made.data, *TRAINING)
    done = call(*words, "--tokens", "dynamicvit:0.5@2", "--out", made.root / "unheld")
    assert done.code == 0 and "add --losses keep_ratio" in done.err
    done = call(*words, "--tokens", POLICY, "--out", made.root / "unlearned")
    assert done.code == 0 and "keep_ratio" not in done.err


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("costs {run} --tokens spot:0.7@2", "class token"),
        ("costs {slim} --tokens random:0.7@2", "the original"),
        ("diagnose {slim} --data {data} --out x.json", "diagnose the original"),
        ("train {slim} --data {data} --tokens random:0.5@2 --out x", "apply the token policy last"),
        ("prescribe {run} --rules qk=total_rank:0.4 tokens=random:0.5@2 --out x.json", "diagnose the model on images"),
        ("prescribe {slim} --rules tokens=random:0.5@2 --out x.json", "the original"),
    ],
)
def test_bad_input_is_told_and_leaves_nothing(
    made: SimpleNamespace, command: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = {**vars(made), "share": "{share}"}
    done = call(*(word.format(**names) for word in command.split()))
    assert done.code == 2 and said in done.err, done.err
    assert not list(tmp_path.iterdir())


def test_a_policy_is_priced_without_a_prescription() -> None:
    found = record("costs", "dense:digits", "--tokens", "dynamicvit:0.5@2,3")
    after = found["compressed"]
    assert found["policy"] == "dynamicvit:0.5@2,3" and after["tokens"] == [64, 32, 16]
    assert 0 < after["predictor_macs"] < after["macs"] < found["macs"]


@pytest.mark.slow
def test_a_plan_is_realized_and_its_promises_are_verified(made: SimpleNamespace) -> None:
    folder, slim = made.root / "plan", made.root / "planned"
    model = rx.load(made.run)
    splits = rx.adapt_preprocessing(rx.load_data(made.data), model)
    images, others = splits.train.take(16), splits.validation.take(6)
    settings = rx.planning.PlanSettings.preset("normal", trials=2, axes=("qk", "tokens"), batch_size=8)
    plan = rx.plan(model, rx.diagnose(model, images, moments=True), "macs=0.8x", images, others, settings=settings)
    plan.save(folder)
    assert plan.cost <= 0.8 and plan.explained
    file = folder / "prescription.json"
    realized = record("realize", made.run, "--prescription", file, "--out", slim)
    assert realized["macs_down_percent"] == pytest.approx(100 * (1 - plan.cost), abs=0.1)
    words = ("verify", slim, "--reference", made.run, "--data", made.data, "--checks", "promises")
    verified = json.loads(call(*words, "--prescription", file, "--json").out)
    assert {finding["details"]["quantity"] for finding in verified["findings"]} >= {"promised_divergence"}


@pytest.mark.slow
def test_sizes_are_made_and_loaded_by_their_budget(made: SimpleNamespace, tmp_path: Path) -> None:
    found = record(
        "elastic", made.run, "--data", made.data, "--macs", "0.8,0.5", "--effort", "quick", "--out", tmp_path / "all"
    )
    assert [size["name"] for size in found["sizes"]] == ["original", "macs-0.8", "macs-0.5"]
    whole, half = (record("costs", source)["macs"] for source in (made.run, f"{tmp_path / 'all'}@macs=0.65"))
    assert 0.4 * whole < half <= 0.65 * whole
