"""The diagnosis of a model: for every layer, the spectrum of its attention scores and other measurements (readings)."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attnrx.support import arguments as kinds
from attnrx.support.arguments import checked
from attnrx.support.display import Displayed
from attnrx.support.errors import InvalidInput
from attnrx.support.records import MAX_HEADS, MAX_LAYERS
from attnrx.support.shapes import Float, Tensor
from attnrx.support.storage import (
    layer_tensors,
    read_with_tensors,
    require_fingerprint,
    tensors_below,
    write_with_tensors,
)
from attnrx.vit.maps import LAYER_MAPS
from attnrx.vit.spec import NORMS, Spectrum

KIND, SCHEMA = "attnrx diagnosis", 2
# The tensors of a map and of the hidden units, by field.
MAP_FIELDS = ("strength", "directions", "center")
HIDDEN_FIELDS = ("weight", "bias", "covariance", "mean")

TEXTS = kinds.each(kinds.ANY_TEXT, unique=True)
MLP_MAP = kinds.record({"inputs": kinds.whole(1, kinds.LARGEST), "metrics": TEXTS})
LAYER = kinds.record(
    {
        "heads": kinds.each(kinds.whole(0, MAX_HEADS), most=MAX_HEADS, unique=True),
        "scale": kinds.finite(0.0),
        "norms": kinds.one_of(*NORMS),
        "shared": kinds.FLAG,
        "readings": kinds.JSON_OBJECT,  # for human readers, because `load` reads the tensors
        # The list holds both linear maps, or none if the MLP was not diagnosed. A map that is not one matrix is null.
        "mlp": kinds.each(kinds.optional(MLP_MAP), most=2),
    },
    {"hidden": TEXTS, "fixed": kinds.each(kinds.one_of(*LAYER_MAPS), unique=True)},
)
RECORD = kinds.record(
    {
        "fingerprint": kinds.ANY_TEXT,
        "about": kinds.JSON_OBJECT,
        "tensors_sha256": kinds.ANY_TEXT,
        "layers": kinds.each(LAYER, most=MAX_LAYERS),
    }
)


@dataclass(frozen=True, repr=False)
class MapDirections(Displayed):
    """Orthonormal output directions of a linear map in one metric, by decreasing strength.

    The optimal rank-r map in the metric projects the outputs minus `center` onto the first r directions. Its squared
    error is the sum of the squared strengths of all other directions.
    """

    strength: Float[Tensor, "directions"]
    directions: Float[Tensor, "directions outputs"]
    center: Float[Tensor, "outputs"]


class Computed(Mapping[str, MapDirections]):
    """Directions by metric, computed when they are first read, because e.g. plans for hidden units need none."""

    def __init__(self, functions: Mapping[str, Callable[[], MapDirections]]):
        self.functions, self.values_read = functions, dict[str, MapDirections]()

    def __getitem__(self, metric: str) -> MapDirections:
        if metric not in self.values_read:
            self.values_read[metric] = self.functions[metric]()
        return self.values_read[metric]

    def __iter__(self) -> Iterator[str]:
        return iter(self.functions)

    def __len__(self) -> int:
        return len(self.functions)


@dataclass(frozen=True, repr=False)
class MapDiagnosis(Displayed):
    """One linear map of the MLP: the number of its inputs, and its directions by metric.

    In the metric "weights", the directions are singular vectors of the weight matrix, and the center is the bias. In
    the metric "centered", they are the principal directions of the outputs on the data, about their mean. "centered" is
    measured only with the diagnostic `Moments`.
    """

    inputs: int
    metrics: Mapping[str, MapDirections]


@dataclass(frozen=True, repr=False)
class HiddenDiagnosis(Displayed):
    """The hidden units of an MLP: their strengths by metric, their moments, and the linear map after them.

    The strength "weights" is the norm of a unit's input weights times the norm of its output weights. The strength
    "activation" is the unit's standard deviation times the norm of its output weights. The square of the strength
    "centered" is the error that backward elimination adds when it removes the unit (`unit_losses`). Without the
    diagnostic `Moments`, only "weights" is measured, and there is no covariance or mean.
    """

    strength: Mapping[str, Float[Tensor, "units"]]
    weight: Float[Tensor, "outputs units"]
    bias: Float[Tensor, "outputs"]
    covariance: Float[Tensor, "units units"] | None = None
    mean: Float[Tensor, "units"] | None = None


@dataclass(frozen=True, repr=False)
class LayerDiagnosis(Displayed):
    """One layer: its spectrum, and its readings (measurements) by name. A reading's first axis runs over the heads.

    If the MLP was diagnosed, `mlp` describes its two linear maps, and `hidden` describes its hidden units.
    """

    spectrum: Spectrum
    readings: Mapping[str, Tensor]
    mlp: tuple[MapDiagnosis | None, ...] = ()
    hidden: HiddenDiagnosis | None = None

    @checked()
    def reading(self, name: str) -> Tensor:
        """Returns the reading called `name`, a tensor whose first axis runs over the heads.

        Raises:
            InvalidInput: The layer has no reading of this name.
        """
        if name not in self.readings:
            raise InvalidInput(
                f"the diagnosis has no reading {name!r}; it has {', '.join(sorted(self.readings))}. "
                "Diagnose the model again with calibration data and the diagnostic that measures it."
            )
        return self.readings[name]


@dataclass(frozen=True, repr=False)
class Diagnosis(Displayed):
    """The diagnoses of all layers of one model (identified by its fingerprint), and the settings of the measurements.

    `about` records the model's name, the data (name, images, fingerprint), the seed and each diagnostic's parameters.
    """

    example = "attnrx.diagnose(model, images)"

    layers: tuple[LayerDiagnosis, ...]
    fingerprint: str
    about: Mapping[str, Any]

    @checked()
    def save(self, path: Path | str) -> Path:
        """Writes a JSON file and its tensors in the same folder (`storage.write_with_tensors`). Returns the path."""
        record = {
            "kind": KIND,
            "schema": SCHEMA,
            "fingerprint": self.fingerprint,
            "about": dict(self.about),
            "layers": [_summary(layer) for layer in self.layers],
        }
        return write_with_tensors(path, record, self._tensors())

    def _tensors(self) -> dict[str, Tensor]:
        return layer_tensors(map(_tensors, self.layers))

    @classmethod
    @checked()
    def load(cls, path: Path | str) -> "Diagnosis":
        """Reads a JSON file written by `save`, and the tensors in the same folder.

        Raises:
            CheckpointError: A file is missing, damaged or of another kind, or a tensor is not finite.
        """
        # Rules sort and sum strengths and readings, and NaN would make their results undefined without an error.
        return read_with_tensors(path, KIND, SCHEMA, RECORD, Diagnosis._of_file, Diagnosis._tensors)

    @classmethod
    def _of_file(cls, record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> "Diagnosis":
        parts = (tensors_below(f"layers.{index}.", tensors) for index in range(len(record["layers"])))
        return cls(tuple(map(_layer, record["layers"], parts)), record["fingerprint"], record["about"])

    def once(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """Returns the result of `compute`, which is called only once for each key.

        Planning creates all candidates from one diagnosis, and would otherwise repeat the computation.
        """
        # Kept results are not a field, so they are not compared, and a copy made by `replace` starts without them.
        known: dict[Hashable, Any] = vars(self).setdefault("_computed", {})
        if key not in known:
            known[key] = compute()
        return known[key]

    @checked()
    def require(self, fingerprint: str, what: str) -> None:
        """Checks that the diagnosis belongs to a model.

        Args:
            fingerprint: The fingerprint of the model.
            what: A description of that model, for the error message.

        Raises:
            FingerprintMismatch: The diagnosis belongs to another model.
        """
        require_fingerprint(self.fingerprint, fingerprint, "the diagnosis was made for", what, "diagnose that model")


def _tensors(layer: LayerDiagnosis) -> dict[str, Tensor]:
    """Returns the tensors of a layer by their names in the file."""
    # The names are paths, which `_layer` parses.
    tensors: dict[str, Tensor | None] = {
        f"spectrum.{field}": getattr(layer.spectrum, field) for field in ("query", "key", "strength", "used", "pairs")
    }
    tensors |= {f"readings.{name}": reading for name, reading in layer.readings.items()}
    for which, maps in enumerate(layer.mlp):
        for metric, directions in {} if maps is None else maps.metrics.items():
            tensors |= {f"mlp.{which}.{metric}.{field}": getattr(directions, field) for field in MAP_FIELDS}
    if layer.hidden is not None:
        tensors |= {f"hidden.strength.{metric}": strength for metric, strength in layer.hidden.strength.items()}
        tensors |= {f"hidden.{field}": getattr(layer.hidden, field) for field in HIDDEN_FIELDS}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}  # absent fields are None


def _summary(layer: LayerDiagnosis) -> dict[str, Any]:
    spectrum = layer.spectrum
    # The summary has only short readings, because people read the JSON file. The tensors contain all readings.
    per_head = {name: reading.tolist() for name, reading in layer.readings.items() if reading.ndim == 1}
    return {
        "heads": list(spectrum.heads),
        "scale": spectrum.scale,
        "norms": spectrum.norms,
        "shared": spectrum.shared,
        "fixed": list(spectrum.fixed),
        "readings": per_head,
        "mlp": [
            None if linear is None else {"inputs": linear.inputs, "metrics": sorted(linear.metrics)}
            for linear in layer.mlp
        ],
        **({} if layer.hidden is None else {"hidden": sorted(layer.hidden.strength)}),
    }


def _layer(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> LayerDiagnosis:
    # Names are paths, e.g. mlp.0.centered.strength. All tensors below a prefix form a part of the layer.
    parts = tensors_below("spectrum.", tensors)
    spectrum = Spectrum(
        parts["query"],
        parts["key"],
        parts["strength"],
        parts["used"].to(torch.bool),
        facts["scale"],
        facts["norms"],
        tuple(facts["heads"]),
        shared=facts["shared"],
        pairs=parts.get("pairs"),
        fixed=tuple(facts["fixed"]),
    )
    maps: list[MapDiagnosis | None] = []
    for which, linear in enumerate(facts["mlp"]):
        if linear is None:
            maps.append(None)
            continue
        metrics = {
            name: MapDirections(*(tensors[f"mlp.{which}.{name}.{field}"] for field in MAP_FIELDS))
            for name in linear["metrics"]
        }
        maps.append(MapDiagnosis(linear["inputs"], metrics))
    hidden = None
    if "hidden" in facts:
        parts = tensors_below("hidden.", tensors)
        strength = {metric: parts[f"strength.{metric}"] for metric in facts["hidden"]}
        hidden = HiddenDiagnosis(strength, parts["weight"], parts["bias"], parts.get("covariance"), parts.get("mean"))
    return LayerDiagnosis(spectrum, tensors_below("readings.", tensors), tuple(maps), hidden)
