"""Files that do not belong together are refused: prescriptions, outputs; and options without an effect."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import attnrx as rx
from attnrx.nouns.elastic import Elastic, Size
from attnrx.show.checks import Accuracy, Fidelity
from attnrx.support.errors import InvalidInput
from attnrx_lab.vision_transformer import VisionTransformer, ViTConfig, initialize_
from support.command_line import call, record
from support.pictures import rows, write_folder, write_parquet


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A model realized once and twice, another prescription, and another model of the same shape."""
    root = tmp_path_factory.mktemp("origin")
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    config = ViTConfig.uniform(
        "dense", width=16, depth=2, heads=2, image_size=16, patch_size=4, channels=3, classes=3, mlp_ratio=2.0
    )
    models = [initialize_(VisionTransformer(config), seed).float().eval() for seed in (0, 1)]
    torch.set_default_dtype(default)
    paths = SimpleNamespace(root=root, data=write_folder(root / "data", {"train": 4, "validation": 2, "test": 4}))
    paths.model, paths.stranger = (rx.save(model, root / f"model{i}") for i, model in enumerate(models))
    for name, model in (("diagnosis", paths.model), ("foreign", paths.stranger)):
        record("diagnose", model, "--data", paths.data, "--out", root / f"{name}.json")
    rules = {"rx": ("diagnosis", "qk=total_rank:0.5"), "other": ("diagnosis", "qk=total_rank:0.75")}
    for name, (diagnosis, rule) in {**rules, "foreign_rx": ("foreign", "qk=total_rank:0.5")}.items():
        record("prescribe", root / f"{diagnosis}.json", "--rules", rule, "--out", root / f"{name}.json")
        setattr(paths, name, root / f"{name}.json")
    paths.slim = root / "slim"
    record("realize", paths.model, "--prescription", paths.rx, "--out", paths.slim)
    record("prescribe", paths.slim, "--rules", "tokens=random:0.5@2", "--out", root / "second.json")
    paths.twice = root / "twice"
    record("realize", paths.slim, "--prescription", root / "second.json", "--out", paths.twice)
    return paths


def verify(made: SimpleNamespace, candidate: Path, *words: object) -> tuple[object, ...]:
    return "verify", candidate, "--reference", made.model, "--data", made.data, "--checks", "fidelity", *words


def test_without_checks_those_run_that_the_model_allows(made: SimpleNamespace, tmp_path: Path) -> None:
    """Embeddings have no calibration, whether or not the accuracy of their neighbours has a limit."""
    timm = pytest.importorskip("timm")
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
    rx.save(rx.load(timm.create_model("vit_tiny_patch16_224", **sizes, num_classes=0)), tmp_path / "model")
    words = ("verify", tmp_path / "model", "--reference", tmp_path / "model", "--data", made.data)
    reported = record(*words)
    assert {"accuracy", "fidelity"} <= {finding["check"] for finding in reported["findings"]}
    assert any("not checked: calibration" in note for note in reported["about"]["notes"])


def test_a_model_realized_twice_is_verified_against_the_first_original(made: SimpleNamespace) -> None:
    reported = record(*verify(made, made.twice))
    assert any("is not used" in note for note in reported["about"]["notes"])
    assert reported["about"]["rules"] is None and reported["about"]["realization"] is None
    assert {finding["details"]["base"] for finding in reported["findings"]} == {"reference"}
    # The prescription in its folder is for the model of the first step.
    second = record("verify", made.twice, "--reference", made.slim, "--data", made.data, "--checks", "fidelity")
    assert "tokens" in second["about"]["rules"] and not second["about"]["notes"]


def test_an_unrelated_prescription_is_refused(made: SimpleNamespace) -> None:
    assert record(*verify(made, made.slim, "--prescription", made.rx))["about"]["rules"]
    for words, message in (
        (("--prescription", made.foreign_rx), "and the reference is"),
        (("--prescription", made.other), "is not the one that"),
    ):
        done = call(*verify(made, made.slim, *words))
        assert done.code == 2 and message in done.err, done.err


def test_a_function_takes_the_folders_that_the_command_takes(made: SimpleNamespace) -> None:
    splits = rx.adapt_preprocessing(rx.load_data(str(made.data), image_size=16), rx.load(made.model))
    evidence = rx.verify(made.slim, made.model, splits.test, "fidelity")
    reported = record(*verify(made, made.slim))
    assert [finding.claim for finding in evidence.findings] == [finding["claim"] for finding in reported["findings"]]
    assert {finding.details["base"] for finding in evidence.findings} >= {"masked"}
    for name in ("rules", "realization", "removed_share", "notes"):
        assert evidence.about[name] == reported["about"][name]
    inputs = {"diagnosis": rx.Diagnosis.load(made.root / "diagnosis.json"), "splits": splits}
    controls = rx.verify(made.slim, made.model, splits.test, "controls(draws=1)", **inputs)
    assert {finding.check for finding in controls.findings} == {"controls"}
    with pytest.raises(InvalidInput, match="prescribed from a diagnosis"):
        rx.verify(made.slim, made.model, splits.test, "controls")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("verify {slim} --reference {model} --data {data} --diagnosis {root}/diagnosis.json", "--diagnosis belongs to"),
        ("bench {model} --methods a=top_rank:2 a=top_rank:3 --out {root}/x", "the name 'a' was given to 2 methods"),
    ],
)
def test_options_without_an_effect_are_refused(made: SimpleNamespace, line: str, message: str) -> None:
    done = call(*(word.format(**vars(made)) for word in line.split()))
    assert done.code == 2 and message in done.err, done.err
    assert not (made.root / "x").exists()


def test_a_file_of_another_kind_is_never_replaced(made: SimpleNamespace, tmp_path: Path) -> None:
    evidence, page = tmp_path / "evidence.json", tmp_path / "report.html"
    record(*verify(made, made.slim, "--out", evidence))
    before = evidence.read_bytes()
    for words in (
        ("report", "--candidate", made.slim, "--out", evidence),
        ("prescribe", made.root / "diagnosis.json", "--rules", "qk=total_rank:0.5", "--out", evidence),
        ("diagnose", made.model, "--data", made.data, "--out", evidence),
    ):
        done = call(*words)
        assert done.code == 2 and "would replace an attnrx evidence by an attnrx" in done.err, done.err
        assert evidence.read_bytes() == before
    for _ in range(2):  # one of the same kind is replaced
        record("report", "--candidate", made.slim, "--evidence", evidence, "--out", page)
    assert call("verify", *verify(made, made.slim, "--out", page)[1:]).code == 2


def test_a_size_of_an_elastic_model_is_named_by_its_budget(made: SimpleNamespace, tmp_path: Path) -> None:
    folder, original = tmp_path / "elastic", rx.load(made.model)
    slim, prescription = rx.load(made.slim), rx.Prescription.load(made.slim / "prescription.json")
    images = rx.load_data(str(made.data), image_size=16).test
    evidence = rx.verify(slim, original, images, [Fidelity(), Accuracy(None)], prescription=prescription)
    rx.save(slim, folder / "small", prescription=prescription, evidence=evidence)
    rx.save(original, folder / "original")
    costs = [rx.models.family_of(model).costs(model) for model in (slim, original)]
    share = costs[0].params / costs[1].params
    marks = [rx.models.model_fingerprint(model) for model in (slim, original)]
    sizes = (Size("small", costs[0].macs / costs[1].macs, share, marks[0]), Size("original", 1.0, 1.0, marks[1]))
    Elastic(folder, sizes, {"macs": costs[1].macs, "params": costs[1].params}).write()
    source = f"{folder}@params={share + 0.001:.4f}"
    reported = record("report", "--candidate", source, "--out", tmp_path / "report.html")
    assert reported["outcome"] == evidence.outcome
    assert "fidelity" in (tmp_path / "report.html").read_text().lower()
    reported = record("prescribe", source, "--rules", "tokens=random:0.5@2", "--out", tmp_path / "rx.json")
    assert reported["tokens"]["policy"].startswith("random")
    reported = record(*verify(made, Path(source)))
    assert reported["about"]["rules"] == json.loads(json.dumps(dict(prescription.rules)))


@pytest.mark.slow
def test_a_table_without_labels_is_diagnosed_and_verified_by_outputs(made: SimpleNamespace, tmp_path: Path) -> None:
    content = [{"image": row["image"], "split": row["split"]} for split in ("train", "test") for row in rows(30, split)]
    data = write_parquet(tmp_path / "images.parquet", content, None)
    reported = record("diagnose", made.model, "--data", data, "--out", tmp_path / "diagnosis.json", "--moments")
    assert reported["images"] > 0
    words = ("verify", made.slim, "--reference", made.model, "--data", data)
    assert record(*words, "--checks", "fidelity,costs")["findings"]
    default = record(*words)
    assert not {finding["check"] for finding in default["findings"]} & {"accuracy", "calibration", "robustness"}
    assert any(note.startswith("not checked: accuracy") for note in default["about"]["notes"])
    refused = call(*words, "--checks", "accuracy")
    assert refused.code == 3 and "--label-column" in refused.err
    splits = rx.load_data(data, image_size=16)
    shrunk = rx.shrink(rx.load(made.model), splits, params=0.9)
    assert not shrunk.evidence.of("accuracy") and shrunk.evidence.of("fidelity")
