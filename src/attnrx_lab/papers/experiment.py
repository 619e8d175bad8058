"""Experiments: resumable runs that measure candidates, and the numbers of finished runs, from which tables are made."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from attnrx.checks import Comparison
from attnrx.data import ImageSet
from attnrx.errors import CheckpointError, InvalidInput
from attnrx.evidence import Evidence, Finding
from attnrx.progress import Log, no_log
from attnrx.serialization.config import from_dict, to_dict
from attnrx.serialization.storage import check_schema, read_json, write_json
from attnrx.training import Reporter

Measure = dict[str, Any]  # value, low, high, and other fields of the finding


@dataclass(frozen=True)
class Run:
    """A finished run: its folder, its result.json with numbers by rule, kind and quantity, and its settings."""

    folder: Path
    record: Mapping[str, Any]
    experiment: "Experiment"

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self.record["data"]["notes"])

    def measure(self, rule: str, kind: str, quantity: str) -> Measure | None:
        """Returns one number (`value`, and `low` and `high`, which may be None), or None if it was not measured."""
        return self.record["rules"].get(rule, {}).get(kind, {}).get(quantity)


class Experiment(ABC):
    """One run of a protocol, as a frozen dataclass of its settings; a subclass measures, the rest is here.

    `kind` names the folder of the runs, `format` their files, and `parts` the dataclasses nested in the settings.
    `knobs` are the settings that a user may change, each with the text for a change in the table: {own} is the
    setting, {protocol} the paper's. `dataset` names the data, `seed` seeds every draw.
    """

    kind: ClassVar[str]
    format: ClassVar[str]
    parts: ClassVar[tuple[type, ...]] = ()
    knobs: ClassVar[Mapping[str, str]]
    tiny_note: ClassVar[str] = (
        "generated images and a tiny model; these numbers show that the recipe runs, and nothing else"
    )
    subject: str
    dataset: str
    seed: int
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

    @abstractmethod
    def as_tiny(self) -> "Experiment":
        """The same run on generated images or weights, in a second or two."""

    @abstractmethod
    def measured(self, folder: Path, reporter: Reporter | None, log: Log) -> dict[str, Any]:
        """Returns the `data`, the `rules` with their numbers, and other parts of result.json.

        Stages already in the folder are read back. It claims the folder once model and data are loaded.
        """

    def run(self, folder: Path | str, *, reporter: Reporter | None = None, log: Log = no_log) -> Run:
        """Makes the run, continues it, or reads it back; a folder that holds another one is refused.

        If two processes request the same run, the first makes it; the second waits and reads it back.
        """
        folder = Path(folder)
        result = folder / "result.json"
        self.require(folder)
        if not result.exists():
            with alone(folder):
                self.require(folder)  # another process may have made it while this one waited
                if not result.exists():
                    own = self.measured(folder, reporter, log)
                    write_json(result, {**self._header(), **own})
                    log(f"{self.name}: done, {result}")
        return self.load(folder)

    @classmethod
    def load(cls, folder: Path | str) -> Run:
        """Reads a finished run of this kind back."""
        path = Path(folder) / "result.json"
        record = read_json(path)
        check_schema(record, cls.format, SCHEMA, path)
        return Run(Path(folder), record, cls.from_dict(record["settings"]))

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> "Experiment":
        """Returns the experiment that `to_dict` described."""
        return from_dict(record, (cls, *cls.parts))

    def here(self) -> "Experiment":
        """The same run with the settings that suit this machine."""
        return self

    def seeded(self, seed: int) -> "Experiment":
        return replace(self, seed=seed)  # type: ignore[type-var]

    def changed(self, changes: Mapping[str, Any]) -> "Experiment":
        """The same run with some settings changed; unknown ones raise InvalidInput."""
        strange = {name: value for name, value in changes.items() if name not in self.knobs}
        if strange:
            requested = ", ".join(f"{name}={value!r}" for name, value in strange.items())
            raise InvalidInput(
                f"{requested}: the {self.kind} experiment of {self.scenario} has no such knob; it has "
                f"{', '.join(self.knobs)}. Leave {', '.join(strange)} out."
            )
        return replace(self, **changes)  # type: ignore[type-var]

    def deviations(self, protocol: "Experiment") -> list[str]:
        """Returns the differences from the protocol, for readers of the table."""
        if self.tiny:
            return [f"{self.scenario}: {self.tiny_note}"]
        pairs = {name: (getattr(self, name), getattr(protocol, name)) for name in self.knobs}
        return [
            f"{self.scenario}: {self.knobs[name].format(own=_value_text(own), protocol=_value_text(theirs))}"
            for name, (own, theirs) in pairs.items()
            if own != theirs
        ]

    def differences(self, record: Mapping[str, Any]) -> list[str]:
        """Returns the differences from the settings of a stored run."""
        own = to_dict(self)
        return [
            f"{name} was {record.get(name)!r} and is now {own.get(name)!r}"
            for name in sorted(own.keys() | record.keys())
            if own.get(name) != record.get(name)
        ]

    def require(self, folder: Path) -> None:
        """Refuses a folder that holds a different run; an empty one is unchanged."""
        path = folder / "settings.json"
        if not path.exists():
            return
        record = read_json(path)
        check_schema(record, self.format, SCHEMA, path)
        differing = self.differences(record["settings"])
        if differing:
            raise CheckpointError(
                f"{folder} holds another run: {'; '.join(differing)}. Ask for the same settings to go on, choose "
                f"another folder, or delete everything in it but train/ to measure the same model anew."
            )

    def claim(self, folder: Path) -> None:
        """Stores the settings with the first stage; called after model and data were loaded with them."""
        path = folder / "settings.json"
        if not path.exists():
            write_json(path, self._header())

    def require_counts(self, *names: str) -> None:
        """Raises InvalidInput if a number of images, or of draws, is below 1; None means all."""
        for name in names:
            count = getattr(self, name)
            if count is not None and count < 1:
                raise InvalidInput(f"{type(self).__name__}({name}={count}): give 1 or more.")

    def _header(self) -> dict[str, Any]:
        return {"kind": self.format, "schema": SCHEMA, "settings": to_dict(self)}


SCHEMA = 1  # of settings.json and result.json


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Waits until no other process works in the folder; the system releases the lock when this process ends."""
    try:
        import fcntl
    except ImportError:  # Windows has no such locks: start one process per run there
        yield
        return
    path = folder.with_name(f".{folder.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = path.open("w")
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}. Choose another folder.") from error
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def evaluation_device() -> torch.device:
    """Returns the device for the test images: an accelerator if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def measured_with() -> dict[str, Any]:
    return {"device": str(evaluation_device()), "threads": torch.get_num_threads()}


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
    """Reads existing evidence, or computes and saves it."""
    if path.exists():
        return Evidence.load(path)
    evidence = make()
    evidence.save(path)
    return evidence


def measures(evidence: Evidence) -> dict[str, Measure]:
    """Returns every number that a table may use, by name; other findings are skipped."""
    named = ((_measure_name(finding), finding) for finding in evidence.findings)
    return {name: interval_measure(finding) for name, finding in named if name is not None}


def interval_measure(finding: Finding) -> Measure:
    """Returns the value of a finding with its interval and the details that a record keeps."""
    kept = ("lost", "gained", "mcnemar_p", "draws", "deviation", "p", "candidate", "control")
    more = {name: finding.details[name] for name in kept if name in finding.details}
    return {"value": finding.value, "low": finding.low, "high": finding.high, "n": finding.n, **more}


def plain_measure(value: float | int) -> Measure:
    """Returns an exact number, which has no interval."""
    return {"value": float(value), "low": None, "high": None}


def plain_measures(numbers: Mapping[str, float | int]) -> dict[str, Measure]:
    return {name: plain_measure(value) for name, value in numbers.items()}


def _measure_name(finding: Finding) -> str | None:
    details = finding.details
    match finding.check:
        case "accuracy" if details["quantity"] == "accuracy change":
            return "accuracy_change"
        case "accuracy":
            return "accuracy" if details["model"] == "candidate" else "original_accuracy"
        case "fidelity" if details["other"] == "candidate":  # the masked model is measured as a candidate of its own
            return f"{details['quantity']}_to_{'original' if details['base'] == 'reference' else 'masked'}"
        case "costs":
            return {"parameters": "params_down", "MACs": "macs_down"}.get(details["quantity"])
        case "controls":
            better = "nearer" if details["quantity"] == "discrepancy" else "more_accurate"
            return f"{better}_than_{details['kind']}"
    return None


def _value_text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)
