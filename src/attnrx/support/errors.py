"""The exceptions of attnrx. Messages say what was passed, what was found and what to do."""

import difflib
from collections.abc import Iterable


class AttnrxError(Exception):
    """Base class of all errors that user input can cause. Any other exception is a bug in attnrx."""


class UnknownName(AttnrxError):
    """An unknown name of a model, dataset, rule, option or recipe."""

    def __init__(self, kind: str, name: str, valid: Iterable[str]):
        super().__init__(f"unknown {kind} {name!r}: {nearest(name, valid)}")


class InvalidInput(AttnrxError, ValueError):
    """An argument, a tensor or a file with invalid content."""


class NonFiniteOutputs(InvalidInput):
    """A candidate that returns NaN or infinity for `count` of `images` images."""

    def __init__(self, count: int, images: int):
        super().__init__(
            f"the candidate returns NaN or infinity for {count} of {images} images; "
            "check its weights and the normalization of the data."
        )
        self.count, self.images = count, images


class InvalidRule(InvalidInput):
    """A rule with a parameter outside its range."""


class MissingMoments(InvalidRule):
    """A rule that needs moments, but is used with a diagnosis without moments."""


class NoOpPrescription(AttnrxError):
    """A prescription or option without any effect, or a target that the unchanged model meets."""


class FingerprintMismatch(AttnrxError):
    """A diagnosis, a prescription or evidence that belongs to another model."""


class NotSupported(AttnrxError):
    """A model or a combination of options that attnrx does not support."""


class DataError(AttnrxError):
    """A dataset that is missing, unreadable or invalid."""


class UserCodeError(AttnrxError):
    """The caller's code (a log callback, a factory, a dataset ...) raised an exception, which is the `__cause__`."""


class ScaleWarning(UserWarning):
    """Images whose values do not seem to be normalized as in the model's training."""


class KernelWarning(UserWarning):
    """A missing C++ attention kernel. The slower PyTorch attention is used instead."""


class CardWarning(UserWarning):
    """An edited model card that is kept although the model in its folder was replaced."""


class FactoryWarning(UserWarning):
    """A saved model whose class cannot be created by its name, so you need a `factory` to load it."""


class CheckpointError(AttnrxError):
    """A file written by attnrx that is missing, truncated, modified or of another schema version."""


class TrainingDiverged(AttnrxError):
    """A training run whose loss or weights are no longer finite."""


class TrainingInterrupted(KeyboardInterrupt):
    """A training run that was interrupted and saved a checkpoint before it stopped."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether there was too little memory. On the CPU torch raises RuntimeError for this, and on CUDA a subclass."""
    causes = ("allocate memory", "out of memory") if isinstance(error, RuntimeError) else ()
    return isinstance(error, MemoryError) or any(cause in str(error) for cause in causes)


def nearest(name: str, valid: Iterable[str]) -> str:
    """Returns a hint with the closest valid names, or with all valid names if none is close."""
    names = sorted(valid)
    # Most unknown names are misspelled, and a list of a hundred models would hide the intended name.
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(repr(match) for match in close) + "?"
    return "choose one of " + ", ".join(names) + "."
