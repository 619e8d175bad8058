"""Every error that attnrx raises on purpose: what was requested, what was found, what to do."""

import difflib
from collections.abc import Iterable


class AttnrxError(Exception):
    """The base of all errors a user can cause; anything else that escapes is a defect of attnrx."""


class UnknownName(AttnrxError):
    """A name that no part, model, dataset or recipe carries."""

    def __init__(self, kind: str, name: str, valid: Iterable[str]):
        known = sorted(valid)
        super().__init__(f"unknown {kind} {name!r}: {nearest(name, known)}")


class InvalidInput(AttnrxError, ValueError):
    """An argument, a tensor or a file whose content cannot be right."""


class InvalidRule(InvalidInput):
    """A rule with a knob outside its range."""


class NoOpPrescription(AttnrxError):
    """A request that would have had no effect, which is never what was meant."""


class FingerprintMismatch(AttnrxError):
    """A diagnosis or a prescription that was made for another model."""


class NotSupported(AttnrxError):
    """A model or a combination that attnrx does not model, refused by name."""


class DataError(AttnrxError):
    """A dataset that cannot be found, read or trusted."""


class ScaleWarning(UserWarning):
    """Images that do not seem to be on the scale that the model was trained with."""


class KernelWarning(UserWarning):
    """The C++ attention kernel cannot be used; PyTorch's attention, which is slower, runs in its place."""


class CacheWarning(UserWarning):
    """A file of the cache folder that is damaged, and is made anew."""


class CheckpointError(AttnrxError):
    """A file of ours that is missing, truncated, tampered with or from another schema."""


class TrainingDiverged(AttnrxError):
    """A training run whose loss or weights stopped being finite."""


class TrainingInterrupted(KeyboardInterrupt):
    """A training run that was requested to stop, and did so after saving a checkpoint."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """Says which valid names are nearest to `name`, or lists them all when none is near."""
    known = sorted(valid)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(repr(c) for c in close) + "?"
    return "choose one of " + ", ".join(known) + "."
