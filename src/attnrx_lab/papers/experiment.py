"""Experiments: resumable runs that measure candidates, and the numbers of finished runs, from which tables are made."""

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

# The knobs of experiments that load a pre-trained model, and of those that load data by name.
MODEL_KNOBS = ("model", "weights")
DATA_KNOBS = ("dataset", "label_column", "test_column")
PLACES = ("dataset", "transfer")  # knobs that tell where images are
HARMLESS = ("accumulate",)  # knobs that change a result by rounding alone: neither another run, nor a deviation

# value, low and high, the last two None without an interval; and `samples`, the values of groups of images, if any.
Measure = dict[str, Any]

MeasureKey = tuple[str, str, str]
"""The rule, the kind and the quantity of a number in result.json."""


@dataclass(frozen=True)
class Run:
    """A finished run: its folder, its result.json with numbers by rule, kind and quantity, and its settings."""

    folder: Path
    record: Mapping[str, Any]
    experiment: "Experiment"

    def measure(self, rule: str, kind: str, quantity: str) -> Measure | None:
        return self.record["rules"].get(rule, {}).get(kind, {}).get(quantity)


class Experiment(ABC):
    """One run of a protocol, as a frozen dataclass of its settings; a subclass measures, the rest is here.

    `kind` names the folder of the runs, `knobs` the settings that a user may change, and `chosen` those of them that no
    paper states.
    """

    kind: ClassVar[str]
    knobs: ClassVar[tuple[str, ...]]
    chosen: ClassVar[tuple[str, ...]] = ("precision", "draws", "calibration_images")
    subject: str
    seed: int  # of every draw
    tiny: bool

    @property
    def scenario(self) -> str:
        """Its name in the rows of a table and in `only`, one per protocol of a recipe: the model, by default."""
        return self.subject

    @property
    def name(self) -> str:
        return f"{self.scenario}{' (tiny)' if self.tiny else ''}, seed {self.seed}"

    @property
    def place(self) -> Path:
        return Path(self.kind) / (f"{self.scenario}-tiny" if self.tiny else self.scenario) / f"seed-{self.seed}"

    @property
    def differences(self) -> tuple[str, ...]:
        """What is done otherwise than the paper states, whatever a user asks for; a table lists it."""
        return ()

    @abstractmethod
    def as_tiny(self) -> "Experiment":
        """The same run on generated images or weights, in a second or two."""

    def trainings(self) -> tuple[Training, ...]:
        """Returns the trainings of a run by their shapes, with nothing loaded; a tiny run's take seconds: none."""
        return ()

    def stages(self, keys: Collection[MeasureKey] | None = None) -> frozenset[str]:
        """Returns the names of the stages that measure these numbers, or of all stages.

        By default there are none: the run is measured as a whole.
        """
        return frozenset()

    @abstractmethod
    def measured(self, folder: Path, log: Log, stages: Collection[str]) -> dict[str, Any]:
        """Returns the `data`, the `rules` with their numbers, and other parts of result.json.

        `data` has the `name`, the number of `images` that were measured on, and `notes` for readers. Only the requested
        stages are measured; those already in the folder are read back. It claims the folder once model and data are
        loaded.
        """

    def run(self, folder: Path | str, log: Log = no_log, keys: Collection[MeasureKey] | None = None) -> Run:
        """Makes the run, continues it, or reads it back; a folder that holds another one is refused.

        With `keys` it measures the stages that hold these numbers only. The result contains the stages of all calls, so
        several tables share one run. The processes of one launch make it together (`processes`).
        """
        folder = Path(folder)
        result, stages = folder / "result.json", self.stages(keys)
        with shared_lock(folder):  # another launch waits here, and then reads the result of the first
            self.require(folder)
            stored = agreed(frozenset(read_json(result).get("stages", ())) if result.exists() else None)
            # A run without stages is complete once it has a result.
            if stored is None or not stages <= stored:
                # The stored stages again, so that one result has all of them; their evidence is read back.
                stages |= stored or frozenset()
                numbers = self.measured(folder, log, stages)
                if is_first():
                    write_json(result, {**self._header(), "stages": sorted(stages), **numbers})
                log(f"{self.name}: done, {result}")
            agreed(None)  # the result is there
        return Run(folder, read_json(result), self)

    def seeded(self, seed: int) -> "Experiment":
        return replace(self, seed=seed)  # type: ignore[type-var]

    def changed(self, changes: Mapping[str, Any]) -> "Experiment":
        """The same run with some settings changed.

        Raises:
            InvalidInput: The experiment has no such setting, or loads no weights.
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
        """Returns the differences from the protocol, for readers of the table."""
        if self.tiny:
            what = "numbers measured on a tiny model and generated data show that the recipe runs, and nothing else"
            return [f"{self.scenario}: {what}"]
        texts = []
        for name in self.knobs:
            value, default = getattr(self, name), getattr(protocol, name)
            # The published images are the protocol's, wherever they are.
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
        """Checks that the folder is empty or holds this run.

        Raises:
            CheckpointError: It holds a different run.
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
        """Stores the settings with the first stage; called after model and data were loaded with them."""
        if is_first():
            write_json(folder / "settings.json", self._header())

    def settings(self) -> dict[str, Any]:
        """Returns the settings for files, which name no folder of this machine."""
        return {name: value for name, value in without_folders(to_dict(self)).items() if name not in HARMLESS}

    def _header(self) -> dict[str, Any]:
        kind = self.kind.replace("-", " ")
        return {"kind": f"attnrx {kind} run", "schema": SCHEMA, "settings": self.settings()}


def evaluation_device() -> torch.device:
    """Returns the device for the test images: an accelerator if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def comparison_with(model: nn.Module, images: ImageSet, **options: Any) -> Comparison:
    """Returns a comparison of the model with itself on the fastest device; `replace` gives it other candidates."""
    device = evaluation_device()
    # The caller's model stays on the CPU, where candidates are made from it.
    reference = model if device.type == "cpu" else copy.deepcopy(model).to(device)
    return Comparison(reference, reference, images, device=device, **options)


def first_images(images: ImageSet, count: int | None) -> ImageSet:
    """Returns the first `count` images, balanced over the classes; all if there are no more, or `count` is None."""
    return images if count is None else images.take(min(count, len(images)))


def evidence_at(path: Path, make: Callable[[], Evidence]) -> Evidence:
    """Reads existing evidence, or computes and saves it; every process of a launch computes it, and the first saves."""
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
    """Returns every number that a table may use, by name; other findings are skipped."""
    named = ((_measure_name(finding), finding) for finding in evidence.findings)
    return {name: measure_of(finding) for name, finding in named if name is not None}


def measure_of(finding: Finding) -> Measure:
    measure = {"value": finding.value, "low": finding.low, "high": finding.high}
    return {**measure, "samples": finding.details["samples"]} if "samples" in finding.details else measure


def plain_measures(numbers: Mapping[str, float | int]) -> dict[str, Measure]:
    """Returns exact numbers, which have no interval."""
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
        case "fidelity" if details["other"] == "candidate":  # the masked model is measured as a candidate of its own
            return f"{details['quantity']}_to_{'original' if details['base'] == 'reference' else 'masked'}"
        case "costs":
            # The reductions of the SVDA paper's tables; other findings of the check are not in a table.
            return {"parameters": "params_down", "MACs": "macs_down"}.get(details["quantity"])
        case "controls":
            better = "nearer" if details["quantity"] == "discrepancy" else "more_accurate"
            return f"{better}_than_{details['kind']}"
    return None
