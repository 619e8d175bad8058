"""The exceptions of attnrx. Their messages say what you passed, what was found and what to do."""

import difflib
from collections.abc import Iterable


class AttnrxError(Exception):
    """The base class of all errors that user input can cause. Any other exception is a bug in attnrx."""


class UnknownName(AttnrxError):
    """The error for an unknown name of a model, dataset, rule, option or recipe."""

    def __init__(self, kind: str, name: str, valid: Iterable[str]):
        super().__init__(f"unknown {kind} {name!r}: {nearest(name, valid)}")


class InvalidInput(AttnrxError, ValueError):
    """The error for an argument, a tensor or a file with invalid content."""


class NonFiniteOutputs(InvalidInput):
    """The error for a compressed model that returns NaN or infinity for `count` of `images` images."""

    def __init__(self, count: int, images: int):
        super().__init__(
            f"the candidate returns NaN or infinity for {count} of {images} images; "
            "check its weights and the normalization of the data."
        )
        self.count, self.images = count, images


class InvalidRule(InvalidInput):
    """The error for a rule with a parameter outside its range."""


class MissingMoments(InvalidRule):
    """The error for a rule that needs moments, if the diagnosis was made without moments."""


class NoOpPrescription(AttnrxError):
    """The error for a prescription or an option without effect, or for a target that the unchanged model meets."""


class FingerprintMismatch(AttnrxError):
    """The error for a diagnosis, a prescription or evidence that belongs to another model."""


class NotSupported(AttnrxError):
    """The error for a model or a combination of options that attnrx does not support."""


class DataError(AttnrxError):
    """The error for a dataset that is missing, unreadable or invalid."""


class UserCodeError(AttnrxError):
    """The error for an exception in the user's code, e.g. a log callback or a dataset. The exception is `__cause__`."""


class ScaleWarning(UserWarning):
    """The warning about images that do not seem to be normalized like the model's training images."""


class KernelWarning(UserWarning):
    """The warning about a missing C++ attention kernel. The slower PyTorch attention is used instead."""


class CardWarning(UserWarning):
    """The warning about an edited model card, which is kept although the model in its folder was replaced."""


class FactoryWarning(UserWarning):
    """The warning about a saved model whose class cannot be created by name. You need a `factory` to load it."""


class CheckpointError(AttnrxError):
    """The error for a file of attnrx that is missing, truncated, modified or of another schema version."""


class TrainingDiverged(AttnrxError):
    """The error for a training run in which the loss or a gradient is no longer finite."""


class TrainingInterrupted(KeyboardInterrupt):
    """The exception for an interrupted training run, which saved a checkpoint before it stopped."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory is exhausted. torch raises RuntimeError on the CPU, and a subclass on CUDA."""
    causes = ("allocate memory", "out of memory") if isinstance(error, RuntimeError) else ()
    return isinstance(error, MemoryError) or any(cause in str(error) for cause in causes)


def nearest(name: str, valid: Iterable[str]) -> str:
    """Returns a hint with the closest valid names, or with all valid names if none is close."""
    names = sorted(valid)
    # Most unknown names are misspelled. In a list of a hundred models, the user would not find the intended name.
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(repr(match) for match in close) + "?"
    return "choose one of " + ", ".join(names) + "."
