"""An elastic model: a folder with several sizes of one model, from which `load` chooses one within a budget."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from attnrx.support import arguments as kinds
from attnrx.support.errors import CheckpointError, NotSupported
from attnrx.support.storage import read_record, write_json

KIND, SCHEMA = "attnrx elastic model", 1
INDEX = "elastic.json"
ORIGINAL = "original"
MOST_SIZES = 1000
# The name of a size is joined to the folder's path. A separator or ".." would lead out of the folder.
NAME = kinds.matching(r"[A-Za-z0-9][\w.+-]{0,100}", "the name of a folder of letters, digits and . _ + -")
SIZE = kinds.record(
    {
        "name": NAME,
        "macs": kinds.finite(0.0, 2.0),
        "params": kinds.finite(0.0, 2.0),
        "latency": kinds.optional(kinds.finite(0.0, 100.0)),
        "divergence": kinds.optional(kinds.finite(0.0)),
        "fingerprint": kinds.ANY_TEXT,
    }
)
AT_LEAST_ONE = kinds.whole(1, kinds.LARGEST)
RECORD = kinds.record(
    {
        "sizes": kinds.each(SIZE, least=1, most=MOST_SIZES),
        "about": kinds.record(
            {"macs": AT_LEAST_ONE, "params": AT_LEAST_ONE}, more={"fingerprint": kinds.ANY_TEXT}, open=True
        ),
    }
)


@dataclass(frozen=True)
class Size:
    """One stored size: the name of its folder, its costs as shares of the original's costs, and its divergence.

    `latency` is relative to the original in its own library, under the conditions in `about["timing"]` of the elastic
    model. If the latency was not measured, it is None. `fingerprint` identifies the weights of this size.
    """

    name: str
    macs: float
    params: float
    fingerprint: str
    latency: float | None = None
    divergence: float | None = None

    def __post_init__(self):
        kinds.require_fields(self, fingerprint=kinds.ANY_TEXT)

    def __str__(self) -> str:
        speed = "" if self.latency is None else f", {1 / self.latency:.2f}x the speed"
        far = "" if self.divergence is None else f", divergence {self.divergence:.4f}"
        return (
            f"{self.name}: {100 * self.macs:.1f} % of the MACs, {100 * self.params:.1f} % of the parameters{speed}{far}"
        )


@dataclass(frozen=True)
class Elastic:
    """A folder with a model and several smaller sizes of it. Each is an ordinary saved model with its evidence.

    Of all sizes within a budget, `load` returns the size that diverges least from the original (`best`).
    """

    folder: Path
    sizes: tuple[Size, ...]
    about: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    @kinds.checked()
    def read(cls, folder: Path | str) -> "Elastic":
        """Reads the index of the folder. Raises CheckpointError if the index is missing or damaged."""
        record = read_record(Path(folder) / INDEX, KIND, SCHEMA, RECORD)
        return cls(Path(folder), tuple(Size(**size) for size in record["sizes"]), record["about"])

    def write(self) -> Path:
        """Writes the index of the sizes, which must already be in the folder."""
        return write_json(self.folder / INDEX, self.to_record())

    def to_record(self) -> dict[str, Any]:
        """Returns the content of the index."""
        return {"kind": KIND, "schema": SCHEMA, "sizes": [*map(asdict, self.sizes)], "about": dict(self.about)}

    def __repr__(self) -> str:
        return "\n".join((f"Elastic({str(self.folder)!r})", *map(str, self.sizes)))

    @kinds.checked(quantity=kinds.one_of("macs", "params", "latency"), limit=kinds.POSITIVE)
    def best(self, quantity: str, limit: float) -> Size:
        """Returns the size with the least divergence, among the sizes within a cost limit.

        `quantity` names the cost (macs, params or latency), and `limit` is the largest allowed share of the original's
        cost. If divergences were not measured, the size with the most MACs is returned.

        Raises:
            NotSupported: No size is small enough, or the latency was not measured.
        """
        costs = [getattr(size, quantity) for size in self.sizes]
        if None in costs:
            raise NotSupported(f"{self.folder}: the latency of its sizes was not measured; give macs or params.")
        fitting = [size for size, cost in zip(self.sizes, costs, strict=True) if cost <= limit]
        if not fitting:
            sizes = "\n".join(map(str, self.sizes))
            raise NotSupported(
                f"{self.folder} has no size with {limit:.3g} of the original's {quantity}. It has\n{sizes}\nRequest "
                "more, or make a smaller size with attnrx.elastic."
            )
        divergences = {size: inf if size.divergence is None else size.divergence for size in fitting}
        return min(fitting, key=lambda size: (size.name != ORIGINAL and divergences[size], -size.macs))

    def require(self, size: Size, fingerprint: str, macs: int) -> None:
        """Checks that a size's folder contains the model that the index describes.

        Args:
            size: The size whose folder was loaded.
            fingerprint: The fingerprint of the loaded model.
            macs: The MACs of the loaded model.

        Raises:
            CheckpointError: The folder contains another model, e.g. because the folder was renamed or replaced.
        """
        # MACs are compared, too, because a token policy changes the MACs but not the weights.
        expected_macs = round(size.macs * self.about["macs"])
        for name, found, expected in (("fingerprint", fingerprint, size.fingerprint), ("MACs", macs, expected_macs)):
            if found != expected:
                raise CheckpointError(
                    f"{self.folder / size.name} is not the model that {INDEX} describes ({name} {found}, not "
                    f"{expected}): it was replaced or renamed. Put it back, or make the sizes again with "
                    "attnrx.elastic."
                )


def is_elastic(folder: Path | str) -> bool:
    return (Path(folder) / INDEX).is_file()
