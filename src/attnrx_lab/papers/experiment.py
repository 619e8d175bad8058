"""Experiments, which are resumable runs that measure models for the tables of papers."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from attnrx.data import ImageSet
from attnrx.data.loading import catalogue_name
from attnrx.nouns.evidence import Evidence, Finding
from attnrx.show.checks import Check, Comparison
from attnrx.support.errors import CheckpointError, InvalidInput
from attnrx.support.progress import Log, no_log
from attnrx.support.records import to_dict, without_folders
from attnrx.support.storage import check_schema, read_json, write_json
from attnrx_lab.papers.plan import Training
from attnrx_lab.papers.processes import agreed, is_first, shared_lock

SCHEMA = 1  # of settings.json and result.json

# Knobs are the settings that a user may change. MODEL_KNOBS belong to experiments that load a pre-trained model, and
# DATA_KNOBS to experiments that load data by name.
MODEL_KNOBS = ("model", "weights")
DATA_KNOBS = ("dataset", "label_column", "test_column")
PLACES = ("dataset", "transfer")  # knobs that say where images are
HARMLESS = ("accumulate",)  # knobs that change only rounding, so they make neither another run nor a deviation

# A number in result.json: value, low and high (None without an interval), and optionally `samples`, which holds one
# value per group of images.
Measure = dict[str, Any]

MeasureKey = tuple[str, str, str]
"""The rule, the kind and the quantity of a number in result.json."""


@dataclass(frozen=True)
class Run:
    """A finished run with its folder, its experiment, and the numbers in result.json by rule, kind and quantity."""

    folder: Path
    record: Mapping[str, Any]
    experiment: "Experiment"

    def measure(self, rule: str, kind: str, quantity: str) -> Measure | None:
        return self.record["rules"].get(rule, {}).get(kind, {}).get(quantity)


class Experiment(ABC):
    """One run of a paper's protocol. Subclasses are frozen dataclasses of the run's settings.

    `kind` is the name of the folder that contains the runs. `knobs` are the settings that a user may change. `chosen`
    lists the knobs whose default values are our choice, because no paper states them.
    """

    kind: ClassVar[str]
    knobs: ClassVar[tuple[str, ...]]
    chosen: ClassVar[tuple[str, ...]] = ("precision", "draws", "calibration_images")
    subject: str
    seed: int  # for all random draws
    tiny: bool

    @property
    def scenario(self) -> str:
        """The name of the run in table rows and in the argument `only`. It defaults to the run's subject."""
        return self.subject

    @property
    def name(self) -> str:
        return f"{self.scenario}{' (tiny)' if self.tiny else ''}, seed {self.seed}"

    @property
    def place(self) -> Path:
        return Path(self.kind) / (f"{self.scenario}-tiny" if self.tiny else self.scenario) / f"seed-{self.seed}"

    @property
    def differences(self) -> tuple[str, ...]:
        """Sentences for the table's notes about differences from the paper that do not depend on user settings."""
        return ()

    @abstractmethod
    def as_tiny(self) -> "Experiment":
        """Returns a tiny version of the run on generated images or weights, which takes a second or two."""

    def trainings(self) -> tuple[Training, ...]:
        """Returns the trainings that the run needs, computed from shapes only. For tiny runs the result is empty."""
        return ()

    def stages(self, keys: Collection[MeasureKey] | None = None) -> frozenset[str]:
        """Returns the names of the stages that measure the numbers `keys`, or of all stages if `keys` is None.

        An experiment without stages is measured as a whole.
        """
        return frozenset()

    @abstractmethod
    def measured(self, folder: Path, log: Log, stages: Collection[str]) -> dict[str, Any]:
        """Measures the requested stages, and returns the contents of result.json.

        The result contains the numbers under `rules`. Under `data` it contains the `name` of the data, the number of
        test `images`, and `notes` for the table's readers. If the folder already contains the evidence of a stage, this
        evidence is loaded, and the stage is not measured again. After loading the model and the data, the method calls
        `claim` to write the settings to the folder.
        """

    def run(self, folder: Path | str, log: Log = no_log, keys: Collection[MeasureKey] | None = None) -> Run:
        """Runs the experiment, continues an interrupted run, or loads the stored result.

        With `keys`, the method measures only the stages that contain these numbers. The stored result contains the
        stages of all calls so far, so several tables can share one run. If a launcher started several processes, they
        share the work of the run (see `processes`). If the folder contains another run, the method raises
        CheckpointError.
        """
        folder = Path(folder)
        result, stages = folder / "result.json", self.stages(keys)
        with shared_lock(folder):  # another launch waits here, and then reads the first launch's result
            self.require(folder)
            stored = agreed(frozenset(read_json(result).get("stages", ())) if result.exists() else None)
            # A run without stages is complete if it has a result.
            if stored is None or not stages <= stored:
                # Stored stages are included, so that the result has all stages. Their evidence is loaded from files.
                stages |= stored or frozenset()
                numbers = self.measured(folder, log, stages)
                if is_first():
                    write_json(result, {**self._header(), "stages": sorted(stages), **numbers})
                log(f"{self.name}: done, {result}")
            agreed(None)  # waits until the result is written
        return Run(folder, read_json(result), self)

    def seeded(self, seed: int) -> "Experiment":
        return replace(self, seed=seed)  # type: ignore[type-var]

    def changed(self, changes: Mapping[str, Any]) -> "Experiment":
        """Returns the same run with some settings changed.

        Raises:
            InvalidInput: The experiment has no such setting, or `changes` has `weights` without a `model`.
        """
        unknown_knobs = [name for name in changes if name not in self.knobs]
        if unknown_knobs:
            requested = ", ".join(f"{name}={changes[name]!r}" for name in unknown_knobs)
            raise InvalidInput(
                f"{requested}: the {self.kind} experiment of {self.scenario} has no such knob; it has "
                f"{', '.join(self.knobs)}. Leave {', '.join(unknown_knobs)} out."
            )
        changed = replace(self, **changes)  # type: ignore[type-var]
        weights = changes.get("weights")
        if weights is not None and getattr(changed, "model", None) is None:
            raise InvalidInput(
                f"weights={weights!r}: the original of {self.scenario} is trained here and loads none; leave weights "
                "out, give the model that they belong to, or request only scenarios with a pre-trained model."
            )
        return changed

    def deviations(self, protocol: "Experiment") -> list[str]:
        """Returns sentences that describe all differences from the protocol to the table's readers."""
        if self.tiny:
            what = "numbers measured on a tiny model and generated data show that the recipe runs, and nothing else"
            return [f"{self.scenario}: {what}"]
        texts = []
        for name in self.knobs:
            value, default = getattr(self, name), getattr(protocol, name)
            # Loading the published images from another place is not a deviation.
            published = default or protocol.scenario
            if name in HARMLESS or value == default or (name in PLACES and catalogue_name(value) == published):
                continue
            default_text = "the default" if default is None else default
            if name in self.chosen:
                texts.append(f"{name} = {value}; the default is {default_text}, and the paper states none")
            else:
                texts.append(f"{name} = {value} instead of {default_text}")
        return [f"{self.scenario}: {text}" for text in texts]

    def require(self, folder: Path) -> None:
        """Checks that the folder is empty or contains this run.

        Raises:
            CheckpointError: The folder contains a different run.
        """
        path = folder / "settings.json"
        if not path.exists():
            return
        record = read_json(path)
        check_schema(record, self._header()["kind"], SCHEMA, path)
        stored = record["settings"]
        differing = [
            f"{name} was {stored.get(name)!r} and is now {value!r}"
            for name, value in self.settings().items()
            if stored.get(name) != value
        ]
        if differing:
            raise CheckpointError(
                f"{folder} holds another run: {'; '.join(differing)}. Ask for the same settings to go on, choose "
                f"another folder, or delete everything in it but train/ to measure the same model anew."
            )

    def claim(self, folder: Path) -> None:
        """Writes the settings to the folder. Call this method after the model and the data were loaded with them."""
        if is_first():
            write_json(folder / "settings.json", self._header())

    def settings(self) -> dict[str, Any]:
        """Returns the settings to write to files. Folder paths are omitted, because they differ between machines."""
        return {name: value for name, value in without_folders(to_dict(self)).items() if name not in HARMLESS}

    def _header(self) -> dict[str, Any]:
        kind = self.kind.replace("-", " ")
        return {"kind": f"attnrx {kind} run", "schema": SCHEMA, "settings": self.settings()}


def evaluation_device() -> torch.device:
    """Returns the device for the test images, which is CUDA if available, otherwise the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def comparison_with(model: nn.Module, images: ImageSet, **options: Any) -> Comparison:
    """Returns a comparison of the model with itself on the evaluation device. Use `replace` to change the candidate."""
    device = evaluation_device()
    # The caller's model stays on the CPU, where candidates are made from it.
    reference = model if device.type == "cpu" else copy.deepcopy(model).to(device)
    return Comparison(reference, reference, images, device=device, **options)


def first_images(images: ImageSet, count: int | None) -> ImageSet:
    """Returns at most `count` images, balanced over the classes, or all images if `count` is None."""
    return images if count is None else images.take(min(count, len(images)))


def evidence_at(path: Path, make: Callable[[], Evidence]) -> Evidence:
    """Loads stored evidence, or computes and saves it. All processes compute, but only the first process saves."""
    if not agreed(path.exists()):
        evidence = make()
        if is_first():
            evidence.save(path)
        agreed(None)
    return Evidence.load(path)


def evidence_by(checks: Sequence[Check], comparison: Comparison, own: Experiment, **about: Any) -> Evidence:
    findings = tuple(finding for check in checks for finding in check(comparison))
    data = {"data": comparison.data.fingerprint, "images": len(comparison.data)}
    return Evidence(findings, {"experiment": own.settings(), **data, **about})


def measures(evidence: Evidence) -> dict[str, Measure]:
    """Returns the findings that a table can show, as numbers by name. All other findings are skipped."""
    named = ((_measure_name(finding), finding) for finding in evidence.findings)
    return {name: measure_of(finding) for name, finding in named if name is not None}


def measure_of(finding: Finding) -> Measure:
    measure = {"value": finding.value, "low": finding.low, "high": finding.high}
    return {**measure, "samples": finding.details["samples"]} if "samples" in finding.details else measure


def plain_measures(numbers: Mapping[str, float | int]) -> dict[str, Measure]:
    """Returns exact numbers, without intervals."""
    return {name: {"value": float(value), "low": None, "high": None} for name, value in numbers.items()}


def _measure_name(finding: Finding) -> str | None:
    details = finding.details
    match finding.check:
        case "accuracy" if details["quantity"] == "accuracy change":
            return "accuracy_change"
        case "accuracy" if details["quantity"] == "accuracy by group":
            return "accuracy_by_group"
        case "object_patches":
            return f"object_patches_{details['stage']}"
        case "accuracy":
            return "accuracy" if details["model"] == "candidate" else "original_accuracy"
        case "fidelity" if details["other"] == "candidate":  # the masked model has its own evidence as a candidate
            return f"{details['quantity']}_to_{'original' if details['base'] == 'reference' else 'masked'}"
        case "costs":
            # The SVDA paper's tables have these reductions. No table has the other findings of this check.
            return {"parameters": "params_down", "MACs": "macs_down"}.get(details["quantity"])
        case "controls":
            better = "nearer" if details["quantity"] == "discrepancy" else "more_accurate"
            return f"{better}_than_{details['kind']}"
    return None
