"""The target of a plan and its text form: `faster=1.6`, `latency=60%`, `macs=50%`, `params=0.7x` or `max-drop=1pt`."""

import re
from dataclasses import dataclass

from attnrx.support.arguments import FASTER, NOT_NEGATIVE, one_of, require_fields
from attnrx.support.errors import InvalidInput
from attnrx.support.text_parsing import share

COSTS = ("latency", "macs", "params")
DROP = "max-drop"
EXAMPLES = "faster=1.6, latency=0.6x, macs=50%, params=0.7x or max-drop=1pt"
_TEXT = re.compile(r"(?P<of>[a-z-]+)\s*=\s*(?P<number>[0-9.]+(?:e-?[0-9]+)?)\s*(?P<unit>x|%|pt|)")

# `1.6x`, `faster=1.6` or `1.6x faster`; a number of at most 1 is no speed and is parsed as a share, which needs a name.
_SPEED = re.compile(r"(faster\s*=\s*)?(?P<number>[0-9.]+)\s*x?(\s*faster)?")


def _speed(text: str) -> float:
    try:
        return float(text)
    except ValueError:  # e.g. 1.2.3, which the pattern accepts
        return 0.0


@dataclass(frozen=True)
class Target:
    """An upper limit: a share of the original's latency, MACs or parameters, or a drop of top-1 accuracy in points.

    For a drop, `of` is "max-drop" and `spend` the cost to minimize; otherwise both are the same.
    """

    of: str
    most: float
    spend: str = ""

    def __post_init__(self):
        require_fields(self, of=one_of(*COSTS, DROP), most=NOT_NEGATIVE, spend=one_of("", *COSTS))
        if self.of in COSTS and not 0 < self.most < 1:
            raise InvalidInput(
                f"{self.of}={self.most:g}x: give a share of the original's below 1, e.g. {self.of}=0.6x."
            )
        if self.of == DROP and not 0 <= self.most <= 100:
            raise InvalidInput(f"max-drop={self.most:g}pt: give percentage points from 0 to 100, e.g. max-drop=1pt.")
        # The class is frozen, and the default depends on another field.
        object.__setattr__(self, "spend", self.spend or ("macs" if self.of == DROP else self.of))
        if self.spend not in COSTS or (self.of in COSTS and self.spend != self.of):
            raise InvalidInput(
                f"spend={self.spend!r} with a target for {self.of}: it goes with max-drop, and is one of "
                f"{', '.join(COSTS)}."
            )

    def __str__(self) -> str:
        return f"{self.of}={self.most:g}{'pt' if self.of == DROP else 'x'}"

    @classmethod
    def parse(cls, text: str, spend: str | None = None) -> "Target":
        """Parses a target. `faster=1.6`, `1.6x` and `1.6x faster` are a share of 1 / 1.6 of the latency."""
        speed = _SPEED.fullmatch(text.strip())
        if speed is not None and _speed(speed["number"]) > 1:
            return cls("latency", 1 / _speed(speed["number"]), spend or "")
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise InvalidInput(f"the target {text!r} is not of the form {EXAMPLES}.")
        of, unit = match["of"], match["unit"]
        if unit not in (("", "pt") if of == DROP else ("", "x", "%")):
            raise InvalidInput(f"the target {text!r} has the wrong unit; write {EXAMPLES}.")
        try:
            limit = share(match["number"] + ("%" if unit == "%" else ""))
        except ValueError as error:
            raise InvalidInput(f"the target {text!r} has no number; write {EXAMPLES}.") from error
        return cls(of, limit, spend or "")


def target_of(
    faster: float | None = None, macs: float | None = None, params: float | None = None, max_drop: float | None = None
) -> Target:
    """Returns the target of exactly one of the arguments."""
    arguments = {"faster": faster, "macs": macs, "params": params, "max_drop": max_drop}
    named = {name: value for name, value in arguments.items() if value is not None}
    if len(named) != 1:
        raise InvalidInput(
            f"{' and '.join(named) or 'no target'} given: give exactly one of faster=1.6, macs=0.5, params=0.7 or "
            "max_drop=1."
        )
    ((name, value),) = named.items()
    if name == "faster":
        value = FASTER.checked(value, "Target", name)
        return Target("latency", 1 / value)
    return Target("max-drop" if name == "max_drop" else name, value)
