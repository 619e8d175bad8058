"""Evidence: the measured claims about a candidate against its reference, with values, limits and outcomes."""

import math
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from attnrx.support import arguments as kinds
from attnrx.support.display import Displayed, Sentence
from attnrx.support.errors import CheckpointError, InvalidInput
from attnrx.support.estimate import Estimate
from attnrx.support.seals import SEAL, check_seal, sealed
from attnrx.support.storage import read_record, require_fingerprint, write_json
from attnrx.support.tables import aligned_table

KIND, SCHEMA = "attnrx evidence", 3
# If a decision needs more than this multiple of the samples, more samples hardly help.
HARDLY = 100
HOLDS, FAILS, UNDECIDED, REPORTED = OUTCOMES = ("holds", "fails", "undecided", "reported")


FINDING = kinds.record(
    {
        "check": kinds.ANY_TEXT,
        "claim": kinds.ANY_TEXT,
        "value": kinds.optional(kinds.finite()),  # JSON has no NaN, so null means that the value could not be measured
        "unit": kinds.ANY_TEXT,
        "limit": kinds.optional(kinds.finite()),
        "outcome": kinds.one_of(*OUTCOMES),
        "low": kinds.optional(kinds.finite()),
        "high": kinds.optional(kinds.finite()),
        "n": kinds.optional(kinds.whole(0, kinds.LARGEST)),
        "deciding_n": kinds.optional(kinds.whole(0, kinds.LARGEST)),
        "seed": kinds.optional(kinds.SEED),
        "details": kinds.JSON_OBJECT,
    }
)
RECORD = kinds.record(
    {
        "outcome": kinds.one_of(*OUTCOMES),
        "about": kinds.JSON_OBJECT,
        "findings": kinds.each(FINDING),
        SEAL: kinds.ANY_TEXT,
    }
)


@dataclass(frozen=True, repr=False)
class Finding(Displayed):
    """One measured claim.

    A claim has a `limit` and an `outcome`. The claim holds if the whole interval satisfies the limit, and fails if no
    part of the interval does. In all other cases, the claim is undecided, and about `deciding_n` samples with the same
    value and spread would decide it. A quantity without a limit is only reported. `low` and `high` are the 95 %
    interval, and `n` is the sample size (images, rounds or runs). `details` contains further measurements (draws,
    kernels).
    """

    check: str
    claim: str
    value: float
    unit: str = ""
    limit: float | None = None
    outcome: str = REPORTED
    low: float | None = None
    high: float | None = None
    n: int | None = None
    deciding_n: int | None = None
    seed: int | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        counts = dict.fromkeys(("n", "deciding_n"), kinds.optional(kinds.whole(0, kinds.LARGEST)))
        numbers = {"value": kinds.REAL, **dict.fromkeys(("limit", "low", "high"), kinds.optional(kinds.REAL))}
        kinds.require_fields(self, check=kinds.TEXT, unit=kinds.ANY_TEXT, **counts, **numbers)
        if self.outcome not in OUTCOMES or (self.limit is None) != (self.outcome == REPORTED):
            raise InvalidInput(
                f"finding {self.claim!r} has the limit {self.limit} and the outcome {self.outcome!r}: a claim with a "
                f"limit {HOLDS}, {FAILS} or is {UNDECIDED}, a quantity without one is {REPORTED}."
            )
        if self.low is not None and self.high is not None and self.low > self.high:
            raise InvalidInput(f"finding {self.claim!r} has the interval [{self.low}, {self.high}]: low is above high.")

    @property
    def is_claim(self) -> bool:
        return self.limit is not None

    @property
    def outcome_text(self) -> str:
        """The outcome as text. If it is undecided, the text also contains the reason and the deciding sample size."""
        if self.outcome != UNDECIDED:
            return self.outcome
        limit = f"{self.limit:.4g} {self.unit}".strip() if self.limit is not None else "its limit"
        samples = "rounds of timing" if self.unit == "x" else "images"
        if self.low is None or self.high is None or self.limit is None:
            return f"undecided: {self.n or 0:,} {samples} are too few to judge the limit {limit}"
        within = f"[{self.low:.4g}, {self.high:.4g}]"
        why = f"undecided: the limit {limit} lies in the interval {within}"
        if not self.low <= self.limit <= self.high:
            why = f"undecided: {self.n or 0:,} {samples} do not exclude the limit {limit}"
        if self.deciding_n is None or self.n is None:
            return why
        if self.deciding_n > HARDLY * self.n:
            return f"{why}; more {samples} hardly help, because the value is almost at the limit"
        return f"{why}; about {self.deciding_n:,} {samples} would decide, and {self.n:,} were used"


def against_limit(
    value: float,
    limit: float | None,
    interval: tuple[float | None, float | None] = (None, None),
    n: int | None = None,
    *,
    at_least: bool,
    strict: bool = False,
) -> dict[str, Any]:
    """Compares a measured value and its interval with a limit, and returns the outcome.

    The claim holds if the whole interval satisfies the limit, and fails if no part of the interval does. In all other
    cases, the claim is undecided.

    Args:
        value: The measured value. If it is NaN, the claim fails.
        limit: The limit, or None to report the value without an outcome.
        interval: The lower and upper end of the value's interval. If both are None, the value is exact.
        n: The sample size, e.g. the number of images.
        at_least: Whether the limit is a lower bound. If False, the limit is an upper bound.
        strict: Whether a value equal to the limit violates it.

    Returns:
        The limit, the outcome, the interval, `n` and `deciding_n`, as keyword arguments for `Finding`. `deciding_n` is
        the sample size at which the interval would no longer contain the limit, if its width shrinks as 1 / sqrt(n).
    """
    low, high = interval
    judgement: dict[str, Any] = {"limit": limit, "low": low, "high": high, "n": n}
    if limit is None:
        return judgement
    sign = 1 if at_least else -1
    # The sign turns an upper limit into a lower limit, so the code handles only one case.
    middle, bound = sign * value, sign * limit
    # With the sign, a larger value is better in both cases. Without an interval, both ends are the value.
    worst, best = sorted(sign * (value if end is None else end) for end in interval)
    if worst > bound or (worst == bound and not strict):
        return {**judgement, "outcome": HOLDS}
    # Comparisons with NaN are false, so NaN is not caught above. Its claim fails, instead of being undecided.
    if math.isnan(value) or best < bound or (best == bound and strict):
        return {**judgement, "outcome": FAILS}
    # The half of the interval towards the limit. Bootstrap intervals are not symmetric.
    distance, half = abs(middle - bound), middle - worst if middle > bound else best - middle
    if n is None or distance == 0:  # no number of samples would decide
        return {**judgement, "outcome": UNDECIDED, "deciding_n": None}
    # The count is at least n, because an undecided claim's interval contains the limit: half >= distance.
    # It is rounded up to two significant digits, the precision of such an estimate.
    count = n * (half / distance) ** 2
    if count >= kinds.LARGEST / 10:  # the value differs from the limit only by rounding
        return {**judgement, "outcome": UNDECIDED, "deciding_n": None}
    unit = 10 ** max(0, math.floor(math.log10(count)) - 1)
    return {**judgement, "outcome": UNDECIDED, "deciding_n": unit * math.ceil(count / unit)}


def estimate_against_limit(
    estimate: Estimate, n: int, limit: float | None = None, *, at_least: bool = True, strict: bool = False
) -> dict[str, Any]:
    """Returns the keyword arguments for a `Finding` about an estimate, with an outcome if there is a limit."""
    value, ends = estimate.value, (estimate.low, estimate.high)
    # Every resample of one image is that image, so the interval has no width and decides no claim.
    if n == 1 and math.isclose(*ends, rel_tol=1e-9):
        undecided: dict[str, Any] = {} if limit is None else {"outcome": UNDECIDED}
        return {"value": value, "limit": limit, "n": n, **undecided}
    return {"value": value, **against_limit(value, limit, ends, n, at_least=at_least, strict=strict)}


@dataclass(frozen=True, repr=False)
class Evidence(Displayed):
    """All findings about one compressed model. `about` records the models, the data, the settings and the versions.

    Printing the evidence shows a table of the findings.

    `about["notes"]` holds remarks. `about["warnings"]` holds warnings without which the numbers would mislead you.
    Warnings come first in `summary`, in the summary of `shrink`, on the console, in the report and in the model card.
    """

    example = "attnrx.verify(model, reference, images)"

    findings: tuple[Finding, ...]
    about: Mapping[str, Any]

    def __post_init__(self):
        kinds.require_fields(self)

    @property
    def outcome(self) -> str:
        """The overall outcome: the worst outcome of all claims, or "reported" if there are no claims."""
        outcomes = {finding.outcome for finding in self.findings}
        return next((outcome for outcome in (FAILS, UNDECIDED, HOLDS) if outcome in outcomes), REPORTED)

    @property
    def claims(self) -> tuple[Finding, ...]:
        """The findings with a limit."""
        return tuple(finding for finding in self.findings if finding.is_claim)

    @property
    def failures(self) -> tuple[Finding, ...]:
        """The claims that fail."""
        return tuple(finding for finding in self.findings if finding.outcome == FAILS)

    @property
    def undecided(self) -> tuple[Finding, ...]:
        """The claims that are undecided, because there were too few images or timing rounds."""
        return tuple(finding for finding in self.findings if finding.outcome == UNDECIDED)

    @property
    def summary(self) -> Sentence:
        """The warnings, followed by a sentence about the outcomes of the claims."""
        return Sentence(". ".join((*self.warnings, self.counted)))

    @property
    def counted(self) -> str:
        """A text that says how many claims have each outcome, and how many quantities have no limit."""
        number, reported = len(self.claims), len(self.findings) - len(self.claims)
        words = {HOLDS: ("holds", "hold"), FAILS: ("fails", "fail"), UNDECIDED: ("is undecided", "are undecided")}
        counts = {outcome: sum(claim.outcome == outcome for claim in self.claims) for outcome in words}
        parts = [f"{count} {words[outcome][count > 1]}" for outcome, count in counts.items() if count]
        text = f"of {number} claim{'s' * (number > 1)} {', '.join(parts)}" if parts else "no claim has a limit"
        quantities = "quantity is" if reported == 1 else "quantities are"
        return f"{text}; {reported} more {quantities} reported without a limit" if reported else text

    def __str__(self) -> str:
        """Returns the table of the findings, with claims first."""
        reported = [finding for finding in self.findings if not finding.is_claim]
        columns = ("claim", "value", "unit", "95 % interval", "limit", "outcome", "n")
        rows = [
            (
                finding.claim,
                finding.value,
                finding.unit,
                "" if finding.low is None or finding.high is None else f"[{finding.low:.4g}, {finding.high:.4g}]",
                finding.limit,
                finding.outcome_text if finding.is_claim else "",
                finding.n,
            )
            for finding in (*self.claims, *reported)
        ]
        return aligned_table(columns, rows, f"Evidence: {self.summary}")

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings that you should read before the numbers, e.g. that the accuracy is at chance level."""
        return tuple(map(str, self.about.get("warnings", ())))

    @kinds.checked()
    def of(self, check: str) -> tuple[Finding, ...]:
        """Returns the findings of one check, by its name."""
        return tuple(finding for finding in self.findings if finding.check == check)

    @kinds.checked()
    def require(self, fingerprint: str, what: str) -> None:
        """Checks that the evidence was measured on a model.

        Args:
            fingerprint: The fingerprint of the model.
            what: How the error message names the model.

        Raises:
            FingerprintMismatch: The evidence was measured on another model.
        """
        # Evidence that does not record its candidate is accepted.
        measured = self.about.get("candidate", fingerprint)
        advice = "verify that model, or omit the evidence"
        require_fingerprint(measured, fingerprint, "the evidence was measured on", what, advice)

    @kinds.checked()
    def save(self, path: Path | str) -> Path:
        """Writes the evidence and a hash of its content to a JSON file, and returns the file's path."""
        return write_json(path, sealed(self.to_record()))

    def to_record(self) -> dict[str, Any]:
        """Returns the content of the file as JSON-ready values."""
        findings = [asdict(finding) for finding in self.findings]
        about = dict(self.about)
        return {"kind": KIND, "schema": SCHEMA, "outcome": self.outcome, "about": about, "findings": findings}

    @classmethod
    @kinds.checked()
    def load(cls, path: Path | str) -> "Evidence":
        """Reads a file written by `save`.

        Raises:
            CheckpointError: The file is missing, damaged or edited, does not contain evidence, or contains numbers that
                contradict each other.
        """
        record = read_record(path, KIND, SCHEMA, RECORD)
        written = deepcopy(record)
        for finding in record["findings"]:
            if finding["value"] is None:  # JSON has no NaN, so the file has null in its place
                finding["value"] = math.nan
        try:
            evidence = cls(tuple(Finding(**finding) for finding in record["findings"]), record["about"])
        except InvalidInput as error:
            raise CheckpointError(f"{path}: {error}") from error
        # The numbers are checked before the hash, so the message can name the field that was edited.
        if problems := _contradictions(evidence):
            raise CheckpointError(f"{path}: {'; '.join(problems[:3])}. The file was edited; verify again.")
        # The file stores the outcome for its readers. Computing it again reveals an edit.
        if evidence.outcome != record["outcome"]:
            raise CheckpointError(
                f"{path}: outcome is {record['outcome']!r}, and the findings give {evidence.outcome!r}; verify again."
            )
        check_seal(written, path, "Verify again.")
        return evidence


# Some numbers in a file follow from others, so `load` detects edits. Values may be rounded to ROUNDED (e.g. percent).
ROUNDED = 0.01
# Quantities that must be at least, or at most, their limit. Other checks have their own rules.
AT_LEAST = {"accuracy change", "agreement", "speed", "index recall"}
AT_MOST = {"discrepancy", "divergence", "feature error", "change of calibration error", "counted costs"}
CHANGES = {"accuracy change": "accuracy", "metric change": "metric"}  # a change is candidate minus reference


def _contradictions(evidence: Evidence) -> list[str]:
    """Returns an error message, which names the field, for every number that contradicts another number."""
    found = []
    for index, finding in enumerate(evidence.findings):
        where = f"findings[{index}]"
        found += [f"{where}.{problem}" for problem in (*_of_interval(finding), *_of_counts(finding))]
        found += [f"{where}.{problem}" for problem in (*_of_outcome(finding), *_of_change(finding, evidence))]
        images, is_counted = evidence.about.get("images"), finding.check in ("accuracy", "calibration")
        if is_counted and type(images) is int and finding.n is not None and finding.n > images:
            found.append(f"{where}.n is {finding.n}, and about.images is {images}")
    return found


def _of_interval(finding: Finding) -> Iterator[str]:
    low, high, value = finding.low, finding.high, finding.value
    if (low is None) != (high is None):
        yield f"{'low' if low is None else 'high'} is missing, and the other end of the interval is not"
    elif low is not None and high is not None:
        # The value and the ends may have been computed in different precisions.
        slack = 1e-6 * max(abs(low), abs(high), abs(value)) if math.isfinite(value) else math.inf
        if not low - slack <= value <= high + slack and not math.isnan(value):
            yield f"value is {value:.6g}, outside of its interval [{low:.6g}, {high:.6g}]"
        if finding.n == 0:
            yield "n is 0, and there is an interval"


def _of_counts(finding: Finding) -> Iterator[str]:
    """Yields an error message if a percentage of images, or a change of it, contradicts the counts in `details`."""
    n, details = finding.n, finding.details
    right, lost, gained = (details.get(name) for name in ("correct", "lost", "gained"))
    if type(n) is not int or n < 1 or finding.unit not in ("%", "points"):
        return
    if type(right) is int:
        if not 0 <= right <= n:
            yield f"details.correct is {right} of {n} images"
        elif abs(finding.value - 100 * right / n) > ROUNDED:
            yield f"value is {finding.value:.6g}, and {right} of {n} images are {100 * right / n:.6g} %"
    if type(lost) is int and type(gained) is int and finding.details.get("quantity") == "accuracy change":
        if min(lost, gained) < 0 or lost + gained > n:
            yield f"details.lost and details.gained are {lost} and {gained} of {n} images"
        elif abs(finding.value - 100 * (gained - lost) / n) > ROUNDED:
            change = 100 * (gained - lost) / n
            yield f"value is {finding.value:.6g}, and {gained} gained and {lost} lost of {n} images are {change:.6g}"


def _of_outcome(finding: Finding) -> Iterator[str]:
    quantity, limit = finding.details.get("quantity"), finding.limit
    # One image decides nothing, and its interval is not stored.
    if limit is None or quantity not in AT_LEAST | AT_MOST or (finding.n == 1 and finding.outcome == UNDECIDED):
        return
    if finding.check not in ("accuracy", "fidelity", "index", "features", "calibration", "costs", "latency"):
        return
    ends = finding.low, finding.high
    expected = against_limit(finding.value, limit, ends, finding.n, at_least=quantity in AT_LEAST)["outcome"]
    if expected != finding.outcome:
        interval = "" if None in ends else f" and the interval [{finding.low:.6g}, {finding.high:.6g}]"
        yield f"outcome is {finding.outcome!r}, and the limit {limit:g}{interval} give {expected!r}"


def _of_change(finding: Finding, evidence: Evidence) -> Iterator[str]:
    """Yields an error message if a change differs from the candidate's value minus the reference's value."""
    kind = CHANGES.get(finding.details.get("quantity", ""))
    if kind is None or finding.check != kind:
        return
    values = {}
    for role in ("candidate", "reference"):
        facts = {"quantity": kind, "model": role, "measure": finding.details.get("measure")}
        same = [one for one in evidence.of(kind) if facts.items() <= {"measure": None, **one.details}.items()]
        values[role] = same[0].value if len(same) == 1 and same[0].n == finding.n else math.nan
    difference = values["candidate"] - values["reference"]
    # A metric may have any unit, and its means are sums of rounded numbers.
    slack = max(ROUNDED if finding.unit == "points" else 0.0, 1e-4 * max(map(abs, values.values())))
    if abs(finding.value - difference) > slack:
        yield f"value is {finding.value:.6g}, and candidate minus reference is {difference:.6g}"
