"""Tables 4 and 5 of the SPOT paper: a model and its candidates, on other datasets and on corrupted images."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from attnrx.api import adapt_preprocessing, load
from attnrx.checks import Comparison, parse_checks
from attnrx.data import Columns, Splits, load_data, own_classes
from attnrx.errors import InvalidInput
from attnrx.evidence import Evidence, Finding
from attnrx.models import attach_tokens_, build_model, family_of
from attnrx.progress import Log, no_log
from attnrx.serialization.config import from_dict, to_dict
from attnrx.serialization.storage import write_json
from attnrx.tokens import TokenPolicy, parse_policy
from attnrx.training import Reporter
from attnrx_lab.checks import Robustness, Transfer
from attnrx_lab.papers.evidence_bench import answering_device, evidence_at
from attnrx_lab.papers.experiment import Experiment, Run, first_images
from attnrx_lab.papers.measures import Measure, plain_measure
from attnrx_lab.papers.pretrained_subject import loaded, outline_of
from attnrx_lab.papers.short_training import generated_splits

ORIGINAL = "original"
TINY = {"image_size": 16, "patch_size": 4, "width": 12, "depth": 12, "heads": 3, "classes": 4, "stem_channels": 4}
TINY_TRANSFER = {"per_class": 8, "seeds": (0,), "epochs": 2}


@dataclass(frozen=True)
class SpotTransferRun(Run):
    """A finished run; the "rules" of its record are the original and the candidates."""

    kind: ClassVar[str] = "attnrx spot transfer run"

    @property
    def experiment(self) -> "SpotTransferExperiment":
        """The settings of the run."""
        return SpotTransferExperiment.from_dict(self.record["settings"])


@dataclass(frozen=True)
class SpotTransferExperiment(Experiment):
    """One model and its candidates by one check, `transfer` or `robustness`, all in one pass over one dataset.

    `check` is the text of the check with its options. A candidate is NAME=POLICY, or NAME=POLICY=FOLDER of its trained
    model; for a policy with a predictor but no folder, only the costs are computed. Costs are those of the model itself
    in
    closed form, also if `tiny` measures a tiny one on generated images.
    """

    kind: ClassVar[str] = "spot-transfer"
    run_type: ClassVar[type[Run]] = SpotTransferRun
    told_when_tiny: ClassVar[str] = (
        "accuracies are of a tiny model with fresh weights on generated images: they show that the recipe runs, and "
        "nothing else; the GFLOPS are exact"
    )
    knobs: ClassVar[Mapping[str, str]] = {
        "model": "the model {own} instead of {protocol}",
        "weights": "weights from a file ({own})",
        "dataset": "data {own} instead of {protocol}",
        "label_column": "labels from the column {own} instead of {protocol}",
        "test_column": "tested where {own} is true, instead of {protocol}",
        "check": "measured by {own} instead of {protocol}",
        "candidates": "the candidates {own} instead of {protocol}",
        "test_images": "measured on {own} test images",
    }

    subject: str
    model: str
    dataset: str
    check: str
    candidates: tuple[str, ...]
    seed: int = 0
    weights: str | None = None
    label_column: str | None = None
    test_column: str | None = None
    test_images: int | None = None
    tiny: bool = False

    def __post_init__(self):
        names = [name for name, _, _ in map(candidate_parts, self.candidates)]
        if not names or len({ORIGINAL, *names}) != len(names) + 1:
            raise InvalidInput(
                f"candidates={self.candidates}: give at least one, each under a name of its own that is not {ORIGINAL}."
            )
        requested = parse_checks(self.check)
        if len(requested) != 1 or requested[0].name not in ("transfer", "robustness"):
            raise InvalidInput(f"check={self.check!r}: give one of transfer and robustness, with its knobs.")

    @property
    def scenario(self) -> str:
        """The model and the check: one dataset may serve several models."""
        return self.subject

    def as_tiny(self) -> "SpotTransferExperiment":
        """The same policies in a tiny model, on generated images, in a second or two."""
        return replace(self, tiny=True, test_images=16)

    def original(self) -> nn.Module:
        """The model, or its tiny replacement, which has a class token too."""
        if self.tiny:
            return build_model("lvvit:t", seed=self.seed, classifies_patches=False, **TINY).eval()
        return loaded(self.model, self.weights)

    def splits(self, model: nn.Module) -> Splits:
        """The data at the size and with the normalization of the model."""
        if self.tiny:
            return adapt_preprocessing(generated_splits(self.subject, 3, TINY["classes"], TINY["image_size"]), model)
        _, size, _ = family_of(model).input_shape(model)
        given = {"label_column": self.label_column, "test_column": self.test_column}
        named = {part: column for part, column in given.items() if column is not None}
        columns = Columns(**named) if named else None
        return adapt_preprocessing(load_data(self.dataset, image_size=size, seed=self.seed, columns=columns), model)

    def made(self, model: nn.Module) -> dict[str, nn.Module]:
        """Makes the candidates that can be measured: trained ones, and those whose policy has no predictor.

        A tiny run uses new predictors.
        """
        made = {}
        for name, policy, folder in map(candidate_parts, self.candidates):
            if folder is not None and not self.tiny:
                made[name] = load(folder).eval()
            elif self.tiny or not policy.reducer.learned:
                torch.manual_seed(self.seed)
                twin = self.original()
                attach_tokens_(twin, family_of(twin), policy)
                made[name] = twin
        if not made:
            texts = " ".join(f"{text}=FOLDER" for text in self.candidates)
            raise InvalidInput(
                f"{self.scenario}: no candidate can be measured, for each has predictors that must be trained. Train "
                f"one with `attnrx train` and give its folder: --candidates {texts}"
            )
        return made

    def findings(self, splits: Splits, made: Mapping[str, nn.Module], comparison: Comparison) -> Mapping[str, Any]:
        """Runs the check on every candidate."""
        (requested,) = parse_checks(self.check)
        if requested.name == "robustness":
            return Robustness(**requested.knobs).of_each(made, comparison)
        knobs = {**requested.knobs, **(TINY_TRANSFER if self.tiny else {})}
        return Transfer(splits.train, own_classes(splits), **knobs).of_each(made, comparison)

    def run(self, folder: Path | str, *, reporter: Reporter | None = None, log: Log = no_log) -> SpotTransferRun:
        """Computes costs and measures; a finished run is read back."""
        folder = Path(folder)
        self.require(folder)
        if (folder / "result.json").exists():
            return SpotTransferRun.load(folder)
        model = self.original()
        splits, made = self.splits(model), self.made(model)
        self.claim(folder)
        device = answering_device()
        test = first_images(splits.test, self.test_images)
        reference = model.to(device)
        comparison = Comparison(reference, reference, test, seed=self.seed, device=device, batch_size=50)
        log(f"{self.name}: {self.check} of {', '.join(made)} on {len(test):,} images")
        rules = _priced(self)
        for name, found in _evidence(self, splits, made, comparison, folder).items():
            numbers = _measures(found.findings)
            rules[name]["measured"] = numbers[name != ORIGINAL]
            rules[ORIGINAL]["measured"] = numbers[False]
        missing = [name for name, _, _ in map(candidate_parts, self.candidates) if name not in made]
        notes = [*splits.notes, *(f"{name} is priced and not measured: it must be trained" for name in missing)]
        record = {
            "kind": SpotTransferRun.kind,
            "schema": SpotTransferRun.schema,
            "settings": to_dict(self),
            "data": {"name": splits.name, "test": test.fingerprint, "notes": notes},
            "rules": rules,
            "measured_with": {"device": str(device), "threads": torch.get_num_threads()},
        }
        write_json(folder / "result.json", record)
        log(f"{self.name}: done, {folder / 'result.json'}")
        return SpotTransferRun.load(folder)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> "SpotTransferExperiment":
        """Returns the experiment that `to_dict` described."""
        return from_dict(record, (cls,))


def candidate_parts(text: str) -> tuple[str, TokenPolicy, str | None]:
    """Parses NAME=POLICY or NAME=POLICY=FOLDER; the options of a policy contain equals signs too, in brackets."""
    name, sign, rest = text.partition("=")
    policy, at, layers = rest.partition("@")
    stages, _, folder = layers.partition("=")
    if not (name and sign and at):
        raise InvalidInput(
            f"the candidate {text!r} cannot be read; write NAME=POLICY, e.g. evit=evit:0.7@4,7,10, and =FOLDER behind "
            "it where the model was trained and saved."
        )
    return name, parse_policy(f"{policy}@{stages}"), folder or None


def _priced(experiment: SpotTransferExperiment) -> dict[str, dict[str, Any]]:
    """Returns the GFLOPS of the original and of every policy in it, in the paper's unit of 10^9 MACs."""
    outline = outline_of(experiment.model)
    family = family_of(outline)
    policies: dict[str, TokenPolicy | None] = {ORIGINAL: None}
    policies |= {name: policy for name, policy, _ in map(candidate_parts, experiment.candidates)}
    macs = {name: family.costs(outline, tokens=policy).macs for name, policy in policies.items()}
    return {name: {"costs": {"gflops": plain_measure(own / 1e9)}} for name, own in macs.items()}


def _evidence(
    experiment: SpotTransferExperiment,
    splits: Splits,
    made: Mapping[str, nn.Module],
    comparison: Comparison,
    folder: Path,
) -> dict[str, Evidence]:
    """Returns the evidence about every candidate, from files or from one pass for all."""
    paths = {name: folder / "evidence" / f"{name}.json" for name in made}
    found: Mapping[str, Any] = {}
    if not all(path.exists() for path in paths.values()):
        found = experiment.findings(splits, {name: own.to(comparison.device) for name, own in made.items()}, comparison)
    about = {"experiment": to_dict(experiment), "images": len(comparison.data)}
    return {name: evidence_at(path, lambda name=name: Evidence(found[name], about)) for name, path in paths.items()}


def _measures(findings: tuple[Finding, ...]) -> dict[bool, dict[str, Measure]]:
    """Returns accuracy and change of the reference (False) and of the candidate (True): of the mean over everything."""
    last = findings[-1]
    changes = {False: plain_measure(0.0), True: _measure(last)}
    if last.check == Robustness.name:
        names = {False: "reference_accuracy", True: "candidate_accuracy"}
        own = {which: plain_measure(last.details[name]) for which, name in names.items()}
    else:
        own = {which: _measure(finding) for which, finding in zip((False, True), findings, strict=False)}
    return {which: {"accuracy": own[which], "accuracy_change": changes[which]} for which in (False, True)}


def _measure(finding: Finding) -> Measure:
    return {"value": finding.value, "low": finding.low, "high": finding.high, "n": finding.n}
