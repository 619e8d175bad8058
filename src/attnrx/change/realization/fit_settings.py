"""The settings of the fits of a compressed model, as a prescription records them."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from attnrx.change.realization.distillation import Distill
from attnrx.change.realization.refinement import Refinement
from attnrx.change.realization.repair import Repair
from attnrx.vit.maps import FITS

Settings = Refinement | Repair | Distill
# The settings of every fit, and the field that counts its steps: the record has it under the name of the fit.
KINDS: Mapping[str, tuple[type[Any], str]] = dict(
    zip(FITS, ((Refinement, "steps"), (Repair, "steps"), (Distill, "epochs")), strict=True)
)


def recorded_settings(*fits: Settings) -> dict[str, Any]:
    """Returns the steps of every fit by its name, and all other settings, seeds included, under "settings"."""
    record: dict[str, Any] = {"settings": {}}
    for settings in fits:
        name = next(name for name, (kind, _) in KINDS.items() if isinstance(settings, kind))
        fields = asdict(settings)
        record[name] = fields.pop(KINDS[name][1])
        # As JSON gives them back: a prescription equals the one that was saved.
        record["settings"][name] = {
            key: list(value) if isinstance(value, tuple) else value for key, value in fields.items()
        }
    return record


def settings_of(how: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of the fits of a record, by name; records of earlier versions have the steps only."""
    found = {}
    for name, (kind, count) in KINDS.items():
        if how.get(name):
            fields = how.get("settings", {}).get(name, {})
            values = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
            found[name] = kind(**{count: how[name]}, **values)
    return found
