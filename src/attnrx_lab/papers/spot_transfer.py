"""Tables 4 and 5 of the SPOT paper: a model and its candidates, on other datasets and on corrupted images."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from attnrx.data import Splits, num_dataset_classes
from attnrx.data.model_data import adapt_preprocessing
from attnrx.nouns.evidence import Evidence, Finding
from attnrx.show.checks import Comparison, parse_checks
from attnrx.support.dataclass_records import to_dict
from attnrx.support.errors import InvalidInput
from attnrx.support.progress import Log
from attnrx.verbs.load import load
from attnrx.vit.models import build_model, family_of
from attnrx.vit.tokens import TokenPolicy, parse_policy
from attnrx_lab.checks import Robustness, Transfer
from attnrx_lab.papers import sources
from attnrx_lab.papers.experiment import (
    DATA_KNOBS,
    MODEL_KNOBS,
    Measure,
    comparison_with,
    evidence_at,
    first_images,
    measure_of,
    plain_measures,
)
from attnrx_lab.papers.spot import attach_policy_, outline_for

BATCH = 50  # images at a time, for measuring
BASELINE = "original"
# Twelve layers, so that the policies of the paper's models fit.
TINY = {"image_size": 16, "patch_size": 4, "width": 12, "depth": 12, "heads": 3, "classes": 4, "stem_channels": 4}
TINY_TRANSFER = {"per_class": 8, "seeds": (0,), "epochs": 2}


@dataclass(frozen=True)
class SpotTransferExperiment(sources.DatasetExperiment):
    """One model and its candidates by one check, `transfer` or `robustness`, all in one pass over one dataset.

    `check` is the text of the check with its options. A candidate is NAME=POLICY, or NAME=POLICY=FOLDER of its trained
    model; for a policy with a predictor but no folder, only the costs are computed. Costs are those of the model itself
    in closed form, also if `tiny` measures a tiny one on generated images.
    """

    kind: ClassVar[str] = "spot-transfer"
    knobs: ClassVar[tuple[str, ...]] = (*MODEL_KNOBS, *DATA_KNOBS, "check", "candidates", "test_images")

    check: str
    candidates: tuple[str, ...]

    def __post_init__(self):
        names = [BASELINE, *(name for name, _, _ in map(candidate_parts, self.candidates))]
        if len(names) == 1 or len(set(names)) != len(names):
            raise InvalidInput(
                f"candidates={self.candidates}: give at least one, each under a name of its own that is not {BASELINE}."
            )
        requested = parse_checks(self.check)
        if len(requested) != 1 or requested[0].name not in ("transfer", "robustness"):
            raise InvalidInput(f"check={self.check!r}: give one of transfer and robustness, with its knobs.")

    def as_tiny(self) -> "SpotTransferExperiment":
        """The same policies in a tiny model, on generated images, in a second or two."""
        return replace(self, tiny=True, test_images=16)

    def original(self) -> nn.Module:
        if self.tiny:
            return build_model("lvvit:t", seed=self.seed, classifies_patches=False, **TINY).eval()
        return self.pretrained()

    def splits(self, model: nn.Module) -> Splits:
        if self.tiny:
            splits = sources.generated_splits(self.subject, 3, TINY["classes"], TINY["image_size"])
        else:
            splits = self.data_for(model, self.seed)
        return adapt_preprocessing(splits, model)

    def made(self) -> dict[str, nn.Module]:
        """Makes the candidates that can be measured: trained ones, and those whose policy has no predictor.

        A tiny run uses new predictors.

        Raises:
            InvalidInput: No candidate can be measured.
        """
        models = {}
        for name, policy, folder in map(candidate_parts, self.candidates):
            if folder is not None and not self.tiny:
                models[name] = load(folder).eval()
            elif self.tiny or not policy.reducer.learned:
                models[name] = self.original()  # a new one for each, because a policy is attached in place
                attach_policy_(models[name], policy, self.seed)
        if not models:
            texts = " ".join(f"{text}=FOLDER" for text in self.candidates)
            raise InvalidInput(
                f"{self.scenario}: no candidate can be measured, for each has predictors that must be trained. Train "
                f"one with `attnrx train` and give its folder: --candidates {texts}"
            )
        return models

    def measured(self, folder: Path, log: Log, stages: Collection[str]) -> dict[str, Any]:
        """Computes the costs of all policies, and measures the candidates in one pass."""
        model = self.original()
        splits, candidates = self.splits(model), self.made()
        self.claim(folder)
        test = first_images(splits.test, self.test_images)
        comparison = comparison_with(model, test, seed=self.seed, batch_size=BATCH)
        log(f"{self.name}: {self.check} of {', '.join(candidates)} on {len(test):,} images")
        rules = self._priced()
        for name, evidence in self._evidence(splits, candidates, comparison, folder).items():
            rules[BASELINE]["measured"], rules[name]["measured"] = _measures(evidence.findings)
        missing = [name for name in rules if name not in (BASELINE, *candidates)]
        notes = [*splits.notes, *(f"{name} is priced and not measured: it must be trained" for name in missing)]
        return {"data": {"name": splits.name, "test": test.fingerprint, "notes": notes}, "rules": rules}

    def _priced(self) -> dict[str, dict[str, Any]]:
        """Returns the GFLOPS of the original and of every policy in it, in the paper's unit of 10^9 MACs."""
        outline = outline_for(self.model, self.subject)
        policies: dict[str, TokenPolicy | None] = {BASELINE: None}
        policies |= {name: policy for name, policy, _ in map(candidate_parts, self.candidates)}
        costs = {name: family_of(outline).costs(outline, tokens=policy) for name, policy in policies.items()}
        # With the classifier, as in the other tables of the paper (`spot.token_price`).
        macs = {name: each.macs + each.classifier_macs for name, each in costs.items()}
        return {name: {"costs": plain_measures({"gflops": count / 1e9})} for name, count in macs.items()}

    def _evidence(
        self, splits: Splits, candidates: Mapping[str, nn.Module], comparison: Comparison, folder: Path
    ) -> dict[str, Evidence]:
        """Returns the evidence about every candidate, from files or from one pass for all."""
        paths = {name: folder / "evidence" / f"{name}.json" for name in candidates}
        findings: Mapping[str, Any] = {}
        if not all(path.exists() for path in paths.values()):
            placed = {name: candidate.to(comparison.device) for name, candidate in candidates.items()}
            findings = self._check(splits).of_each(placed, comparison)
        about = {"experiment": to_dict(self), "images": len(comparison.data)}
        return {
            name: evidence_at(path, lambda name=name: Evidence(findings[name], about)) for name, path in paths.items()
        }

    def _check(self, splits: Splits) -> Robustness | Transfer:
        (requested,) = parse_checks(self.check)
        if requested.name == Robustness.name:
            return Robustness(**requested.knobs)
        # The images of a head are those of the dataset's training split, so they are no option of the text.
        knobs = {**requested.knobs, **(TINY_TRANSFER if self.tiny else {})}
        return Transfer(splits.train, num_dataset_classes(splits), **knobs)


def candidate_parts(text: str) -> tuple[str, TokenPolicy, str | None]:
    """Parses NAME=POLICY or NAME=POLICY=FOLDER; the options of a policy contain equals signs too, in brackets.

    Raises:
        InvalidInput: The text has another form.
    """
    name, sign, rest = text.partition("=")
    # A folder follows the layers, and options of a reducer come before them.
    policy, at, layers = rest.partition("@")
    stages, _, folder = layers.partition("=")
    if not (name and sign and at):
        raise InvalidInput(
            f"the candidate {text!r} cannot be read; write NAME=POLICY, e.g. evit=evit:0.7@4,7,10, and =FOLDER behind "
            "it where the model was trained and saved."
        )
    return name, parse_policy(f"{policy}@{stages}"), folder or None


def _measures(findings: Sequence[Finding]) -> list[dict[str, Measure]]:
    """Returns accuracy and change of the reference and of the candidate: of the mean over everything."""
    last = findings[-1]  # of both checks the change over everything
    if last.check == Robustness.name:
        own = [plain_measures({"accuracy": last.details[f"{role}_accuracy"]}) for role in ("reference", "candidate")]
    else:
        own = [{"accuracy": measure_of(finding)} for finding in findings[:2]]
    changes = (plain_measures({"accuracy_change": 0.0}), {"accuracy_change": measure_of(last)})
    return [accuracy | change for accuracy, change in zip(own, changes, strict=True)]
