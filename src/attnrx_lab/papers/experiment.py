"""The base classes of runs and experiments, from which the tables are made."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from attnrx.data import ImageSet
from attnrx.errors import CheckpointError, InvalidInput
from attnrx.progress import Log, no_log
from attnrx.serialization.config import to_dict
from attnrx.serialization.storage import check_schema, read_json, write_json
from attnrx.training import Reporter

AnyRun = TypeVar("AnyRun", bound="Run")


@dataclass(frozen=True)
class Run(ABC):
    """A finished run: its folder and result.json, with numbers by rule, kind and quantity."""

    folder: Path
    record: Mapping[str, Any]
    kind: ClassVar[str]
    schema: ClassVar[int] = 1

    @property
    @abstractmethod
    def experiment(self) -> "Experiment":
        """The settings of the run."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the data and the method, for readers of the numbers."""
        return tuple(self.record["data"]["notes"])

    def measure(self, rule: str, kind: str, quantity: str) -> Mapping[str, Any] | None:
        """Returns one number (`value`, and `low` and `high`, which may be None), or None if it was not measured."""
        return self.record["rules"].get(rule, {}).get(kind, {}).get(quantity)

    @classmethod
    def load(cls: type[AnyRun], folder: Path | str) -> AnyRun:
        """Reads a finished run back."""
        path = Path(folder) / "result.json"
        record = read_json(path)
        check_schema(record, cls.kind, cls.schema, path)
        return cls(Path(folder), record)


class Experiment(ABC):
    """One run of a protocol, as a frozen dataclass of its settings.

    `dataset` names the data, `seed` seeds every draw. `knobs` are the settings that a user may change, each with the
    text
    for a change in the table: {own} is the setting, {protocol} the paper's.
    """

    kind: ClassVar[str]
    run_type: ClassVar[type[Run]]
    knobs: ClassVar[Mapping[str, str]]
    told_when_tiny: ClassVar[str] = (
        "generated images and a tiny model; these numbers show that the recipe runs, and nothing else"
    )
    dataset: str
    seed: int
    tiny: bool

    @property
    def scenario(self) -> str:
        """Its name in the rows of a table and in `only`, one per protocol of a recipe: the dataset, by default."""
        return self.dataset

    @property
    def name(self) -> str:
        """The name of the run in messages."""
        return f"{self.scenario}{' (tiny)' if self.tiny else ''}, seed {self.seed}"

    @property
    def place(self) -> Path:
        """The folder of the run among all runs."""
        return Path(self.kind) / (f"{self.scenario}-tiny" if self.tiny else self.scenario) / f"seed-{self.seed}"

    @abstractmethod
    def as_tiny(self) -> "Experiment":
        """The same run on generated images or weights, in a second or two."""

    @abstractmethod
    def run(self, folder: Path | str, *, reporter: Reporter | None = None, log: Log = no_log) -> Run:
        """Makes the run, continues it, or reads it back; a folder that holds another one is refused."""

    def load(self, folder: Path | str) -> Run:
        """Reads a finished run of this kind back."""
        return self.run_type.load(folder)

    def here(self) -> "Experiment":
        """The same run with the settings that suit this machine."""
        return self

    def seeded(self, seed: int) -> "Experiment":
        """The same run with another seed."""
        return replace(self, seed=seed)  # type: ignore[type-var]

    def changed(self, changes: Mapping[str, Any]) -> "Experiment":
        """The same run with some settings changed; unknown ones raise UnknownName."""
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
            return [f"{self.scenario}: {self.told_when_tiny}"]
        pairs = {name: (getattr(self, name), getattr(protocol, name)) for name in self.knobs}
        return [
            f"{self.scenario}: {self.knobs[name].format(own=_value_text(own), protocol=_value_text(theirs))}"
            for name, (own, theirs) in pairs.items()
            if own != theirs
        ]

    def differences(self, record: Mapping[str, Any]) -> list[str]:
        """Returns the differences from the settings of a stored run."""
        own = to_dict(self)
        names = sorted(own.keys() | record.keys())
        return [
            f"{name} was {record.get(name)!r} and is now {own.get(name)!r}"
            for name in names
            if own.get(name) != record.get(name)
        ]

    def require(self, folder: Path) -> None:
        """Refuses a folder that holds a different run; an empty one is unchanged."""
        path = folder / "settings.json"
        if not path.exists():
            return
        record = read_json(path)
        check_schema(record, self.run_type.kind, self.run_type.schema, path)
        differing = self.differences(record["settings"])
        if differing:
            raise CheckpointError(
                f"{folder} holds another run: {'; '.join(differing)}. Ask for the same settings to go on, choose "
                f"another folder, or delete everything in it but train/ to measure the same model anew."
            )

    def claim(self, folder: Path) -> None:
        """Stores the settings with the first stage; called after model and data were loaded with them."""
        self.require(folder)
        path = folder / "settings.json"
        if not path.exists():
            kind, schema = self.run_type.kind, self.run_type.schema
            write_json(path, {"kind": kind, "schema": schema, "settings": to_dict(self)})


def first_images(images: ImageSet, count: int | None) -> ImageSet:
    """Returns the first `count` images, balanced over the classes; all if there are no more, or `count` is None."""
    return images if count is None else images.take(min(count, len(images)))


def _value_text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)
