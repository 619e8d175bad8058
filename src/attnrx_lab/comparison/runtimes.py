"""What runs models that are timed: PyTorch as they are, or what runs a format of export."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import nn

from attnrx.data import ImageSet
from attnrx.exporting import Format, Subject, bare_subject, write_exported


@contextmanager
def running_in(
    form: Format | None, models: Mapping[str, nn.Module], like: nn.Module, precision: str, calibration: ImageSet
) -> Iterator[dict[str, nn.Module]]:
    """Returns the models themselves, or for as long as the context lasts the files that a format makes of them.

    All are written alike, for batches of any size, and checked against themselves in eager mode. They take the images
    that `like` takes, a model of a known family, which the others need not be.
    """
    if form is None:
        yield dict(models)
        return
    subject = Subject.of(like, form, precision=precision, calibration=calibration)
    with TemporaryDirectory() as folder:
        yield {
            name: write_exported(bare_subject(model, subject), Path(folder) / f"{index}{form.suffix}", form)
            for index, (name, model) in enumerate(models.items())
        }
