"""The command line as a user and as a script sees it: the whole chain over files, exit codes, JSON, and its speed."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import attnrx as rx
from attnrx.change.realization.distillation import Distill, distill
from attnrx.cli.commands import COMMANDS, failure, is_target
from attnrx.cli.options import parse_losses
from attnrx.nouns.evidence import Finding
from attnrx.training.losses import Distillation, Task
from attnrx_lab.perturbation import TargetRank
from support.command_line import call, record
from support.pictures import write_folder


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The whole way over files, each step as a command; the records are what each printed."""
    root = tmp_path_factory.mktemp("chain")
    data = write_folder(root / "images", {"train": 8, "validation": 2, "test": 4})
    run, slim, files = root / "run", root / "slim", {name: root / f"{name}.json" for name in ("diagnosis", "rx")}
    training = ("--epochs", 1, "--batch-size", 8, "--precision", "fp32", "--strength-init", 3, "--seed", 1)
    steps = {
        "train": record("train", "svda:digits", "--data", data, "--out", run, *training),
        "diagnose": record("diagnose", run, "--data", data, "--out", files["diagnosis"]),
        "prescribe": record("prescribe", files["diagnosis"], "--rules", "top_rank:6", "--out", files["rx"]),
        "realize": record(
            "realize", run, "--prescription", files["rx"], "--by", "refit", "--data", data, "--out", slim
        ),
    }
    checks = ("--checks", "accuracy(most_drop=100),fidelity,costs,controls(draws=2)")
    verify = ("verify", slim, "--reference", run, "--data", data, "--diagnosis", files["diagnosis"], *checks)
    verify = (*verify, "--out", slim / "evidence.json")
    steps["verify"] = json.loads(call(*verify, "--json").out)
    page = root / "report.html"
    steps["report"] = record("report", "--candidate", slim, "--diagnosis", files["diagnosis"], "--out", page)
    return SimpleNamespace(root=root, data=data, run=run, slim=slim, page=page, **files, steps=steps)


def test_the_chain_leaves_files_that_belong_together(chain: SimpleNamespace) -> None:
    steps = chain.steps
    assert steps["diagnose"]["images"] == 6
    assert {rank for layer in steps["prescribe"]["ranks"] for rank in layer} == {6}
    assert steps["prescribe"]["removed_share"] == pytest.approx(10 / 16)
    assert steps["realize"]["params_down_percent"] > 0
    quantities = {finding["check"] for finding in steps["verify"]["findings"]}
    assert quantities == {"accuracy", "fidelity", "costs", "controls"}
    assert steps["verify"]["about"]["realization"] == "refit"
    card = (chain.slim / "README.md").read_text()
    assert (chain.slim / "evidence.json").exists()
    assert "TopRank" in card or "top_rank" in card
    assert not list(chain.root.rglob("*.partial"))


def test_a_realized_model_is_distilled_on_images(chain: SimpleNamespace, tmp_path: Path) -> None:
    words = ("realize", chain.run, "--prescription", chain.rx, "--data", chain.data, "--out", tmp_path / "slim")
    reported = record(*words, "--distill", 4, "--by", "renormalized")
    assert reported["distill"] == 4 and reported["compressed"] == chain.steps["realize"]["compressed"]
    slim = rx.load(tmp_path / "slim")
    stored = rx.Prescription.load(tmp_path / "slim" / "prescription.json").about["realized"]
    images, model = rx.load_data(str(chain.data), image_size=16).train, rx.load(chain.run)
    again = rx.realize(model, rx.Prescription.load(chain.rx), by="renormalized")
    assert stored["distill"] == 4
    first, second = (distill(each, model, images, Distill(1)).before for each in (again, slim))
    assert second < first


@pytest.mark.slow
def test_methods_and_baselines_are_compared_at_equal_macs(chain: SimpleNamespace) -> None:
    out = chain.root / "comparison.json"
    methods = ("--methods", "own=energy_retention:{share}", "svd-llm=baseline:svd_llm", "--macs", "0.97,0.5")
    words = ("compare", chain.run, "--data", chain.data, *methods, "--calibration-images", 4, "--out", out)
    found = record(*words)
    assert [(trial["method"], trial["target"]) for trial in found["trials"]] == [
        ("own", 0.97),
        ("svd-llm", 0.97),
        ("svd-llm", 0.5),
    ]
    assert all(trial["macs_share"] <= trial["target"] for trial in found["trials"])
    assert [each["method"] for each in found["unreached"]] == ["own"]
    shown = call(*words)
    assert "cannot cost 50 % of the MACs" in shown.out
    assert call(*words, "--shares", "0.5").code != 0


@pytest.mark.slow
def test_methods_are_timed_beside_the_shipped_model(chain: SimpleNamespace) -> None:
    out, methods = chain.root / "speeds", ("--methods", "qk=top_rank:2", "same=baseline:unchanged")
    words = ("bench", chain.run, *methods, "--batches", "1,2", "--threads", 1, "--rounds", 2)
    found = record(*words, "--clock", "cpu", "--out", out)
    assert [[speed["batch"] for speed in row["speeds"]] for row in found["rows"]] == [[1, 2]] * 2
    assert {row["task"] for row in found["rows"]} == {"speed"} and found["rows"][0]["speeds"][0]["rounds"] == 2
    shown = call(*words, "--clock", "cpu", "--out", out)
    assert "speed, batch 2, 1 thread" in shown.out and "own cost" in shown.out
    refused = call(*words[:-6], "--batches", "1,many", "--out", out)
    assert refused.code != 0 and "argument --batches: 'many' is not a whole number" in refused.err


def test_verify_says_by_its_exit_code_whether_the_claims_hold(chain: SimpleNamespace) -> None:
    # Twelve images cannot show that no accuracy is lost, whatever the candidate; a drop of 100 points is no claim.
    words = ("verify", chain.slim, "--reference", chain.run, "--data", chain.data, "--checks")
    path = chain.root / "accuracy.json"
    assert call(*words, "accuracy(most_drop=100)", "--out", path).code == 0
    other = chain.root / "untrained"
    record("train", "svda:digits", "--data", chain.data, "--out", other, "--epochs", 1, "--batch-size", 8, "--seed", 7)
    words = ("verify", other, "--reference", chain.run, "--data", chain.data, "--checks")
    undecided = call(*words, "fidelity,accuracy(most_drop=0)", "--out", path)
    assert undecided.code == 0 and "undecided" in undecided.out and "FAILS" not in undecided.out
    failed = call(*words, "fidelity(most_discrepancy=0.001)", "--out", path)
    assert failed.code == 1 and "fails" in failed.out


def test_knobs_of_checks_are_reported_and_corrupted_images_are_listed(chain: SimpleNamespace) -> None:
    words = ("verify", chain.slim, "--reference", chain.run, "--data", chain.data, "--out", chain.root / "fog.json")
    requested = "robustness(severities=3/5,corruptions=gaussian_noise/fog),transfer(per_class=2,epochs=2)"
    found = record(*words, "--checks", requested)
    corrupted = [each["details"] for each in found["findings"] if each["check"] == "robustness"]
    reported = {(each["corruption"], each["severity"]) for each in corrupted if "severity" in each}
    assert reported == {(name, severity) for name in ("gaussian_noise", "fog") for severity in (3, 5)}
    (change,) = [each for each in found["findings"] if (each["check"], each["unit"]) == ("transfer", "points")]
    assert change["details"]["training_images"] == 6
    assert found["about"]["checks"][1]["per_class"] == 2
    shown = call(*words, "--checks", requested).out
    for line in ("under fog of severity 3", "over all corruptions of severity 5"):
        assert line in shown


@pytest.mark.usefixtures("single_precision")
def test_a_finished_run_is_read_back_and_another_one_refused(chain: SimpleNamespace) -> None:
    same = ("--epochs", 1, "--batch-size", 8, "--precision", "fp32", "--strength-init", 3, "--seed", 1)
    again = record("train", "svda:digits", "--data", chain.data, "--out", chain.run, *same)
    assert again == chain.steps["train"]
    other = call("train", "svda:digits", "--data", chain.data, "--out", chain.run, "--epochs", 2)
    assert other.code == 2 and "another run" in other.err


def test_a_compressed_model_learns_from_the_original_alone(chain: SimpleNamespace) -> None:
    out = chain.root / "taught"
    words = ("--data", chain.data, "--out", out, "--epochs", 2, "--batch-size", 8, "--seed", 1)
    taught = ("--teacher", chain.run, "--no-task", "--losses", "distillation:weight=1", "feature_distillation:last=1")
    made = record(
        "train", chain.slim, *words, *taught, "--ema", 0.9, "--learning-rate", 1e-4, "--min-learning-rate", 1e-6
    )
    assert made["steps"] > 0
    identity = json.loads((out / "training.json").read_text())["identity"]
    assert [loss["type"] for loss in identity["config"]["losses"]["tuple"]] == ["Distillation", "FeatureDistillation"]
    verified = record("verify", out, "--reference", chain.run, "--data", chain.data, "--checks", "fidelity")
    assert verified["findings"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("verfy", 2, "did you mean 'verify'"),
        ("costs svda:cifar11", 2, "svda:cifar10"),
        ("diagnose {run} --data digitz --out x.json", 3, "digits"),
        ("realize {slim} --prescription {rx} --out x", 2, "made for the model"),
        ("realize {run} --prescription {rx} --by refit --out x", 2, "--data"),
        ("realize {run} --prescription {rx} --out {run}", 2, "would overwrite an input"),
        ("verify {slim} --reference {run} --data {data} --checks acuracy", 2, "accuracy"),
        ("report --out x.html", 2, "nothing to show"),
        ("train {slim} --data {data} --out x --no-task", 2, "nothing to learn"),
        ("train {slim} --data {data} --out x --no-task --losses task", 2, "give one of the two"),
        ("reproduce svda/tabel1", 2, "svda/table1"),
        ("reproduce irratt/table1 --tiny --draws 3", 2, "no such knob"),
    ],
)
def test_bad_input_is_told_and_leaves_nothing(
    chain: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, code: int, said: str
) -> None:
    filled = [word.format(**vars(chain)) for word in words.split()]
    if "reproduce" not in words:
        monkeypatch.chdir(tmp_path)
    done = call(*filled)
    assert (done.code, done.out) == (code, "")
    assert said in done.err
    assert "Traceback" not in done.err
    assert list(tmp_path.iterdir()) == []


def test_errors_are_json_too_and_debug_shows_where() -> None:
    failed = record("costs", "svda:cifar11", code=2)
    assert failed["error"]["kind"] == "UnknownName"
    assert failed["error"]["exit_code"] == 2
    assert "Traceback" in call("costs", "svda:cifar11", "--debug").err


@pytest.mark.parametrize(
    ("raised", "code", "said"), [(KeyboardInterrupt(), 130, "interrupted"), (ZeroDivisionError(), 70, "defect")]
)
def test_what_is_not_an_error_of_the_user_has_a_code_of_its_own(
    monkeypatch: pytest.MonkeyPatch, raised: BaseException, code: int, said: str
) -> None:
    def fail(*_: object) -> None:
        raise raised

    monkeypatch.setitem(COMMANDS._things, "costs", replace(COMMANDS["costs"], run=fail))
    done = call("costs", "svda:digits")
    assert (done.code, done.out) == (code, "")
    assert said in done.err
    assert ("Traceback" in done.err) == (code == 70)


def test_losses_as_text() -> None:
    assert parse_losses(["target_rank:16:0.1"]) == (Task(), TargetRank(16.0, 0.1))
    assert parse_losses(["task:0", "distillation:runs/t:temperature=2"]) == (Task(0.0), Distillation("runs/t", 2.0))
    assert parse_losses(["target_rank:16:layers=2/4"])[1] == TargetRank(16.0, layers=(2, 4))
    assert parse_losses(["target_rank(16, layers=2/4)"])[1] == TargetRank(16.0, layers=(2, 4))
    refused = ("target_rank", "target_rank:16:0.1:2:3", "target_rank:many", "target_rank:16:size=2")
    for text in (*refused, "target_rank:16:layers=2/x"):
        with pytest.raises(rx.AttnrxError, match="target_rank"):
            parse_losses([text])


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_shows_an_example(name: str) -> None:
    done = call(name, "--help")
    assert done.code == 0
    assert f"example:\n  attnrx {name}" in done.out


def test_the_overview_lists_every_command_and_every_exit_code() -> None:
    done = call("--help")
    assert done.code == 0
    assert all(f"  {name}" in done.out for name in COMMANDS)
    assert all(f"\n  {code} " in done.out for code in (0, 1, 2, 3, 70, 130, 143))
    assert call().code == 2
    assert call("--version").out.startswith("attnrx ")


@pytest.mark.parametrize("words", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_loads_none_of_the_heavy_libraries(words: list[str]) -> None:
    heavy = "{'torch', 'numpy', 'datasets', 'PIL'}"
    script = f"import sys; from attnrx.cli import main; main({words}); print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("set()")


def test_of_the_claims_that_fail_only_the_target_is_a_failure_of_shrink() -> None:
    def failed(quantity: str, value: float, unit: str, limit: float) -> Finding:
        details = {"quantity": quantity}
        return Finding("promises", "as predicted", value, unit, limit=limit, outcome="fails", details=details)

    speed = failed("promised speed", 1.4, "x", 1.5)
    agreement = failed("promised_agreement", 80.0, "%", 91.25)
    assert failure(speed, is_target(speed, "latency")) == "target missed: as predicted: 1.4 x, limit 1.5 x"
    assert not is_target(agreement, "latency") and not is_target(agreement, "macs")
    assert is_target(failed("promised_change", -3.0, "points", -1.0), "max-drop")
    assert is_target(failed("divergence", 0.06, "nats", 0.05), "max-kl")
    assert is_target(failed("index recall", 96.0, "%", 98.0), "recall")
    line = "worse than the plan predicted (not your target): as predicted: 80 %, limit 91.25 %"
    assert failure(agreement, False) == line


def test_only_the_first_of_several_processes_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = call("costs", "svda:digits")
    assert (done.code, done.out, done.err) == (0, "", "")
    assert "unknown model" in call("costs", "svda:nowhere").err  # but any of them may fail


def test_a_reader_that_had_enough_is_no_error() -> None:
    command = f"{sys.executable} -c \"from attnrx.cli import main; import sys; sys.exit(main(['--help']))\""
    script = f"set -o pipefail; {command} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.returncode in (0, 141)
    assert done.stderr == ""
