"""The runtimes of timed models: PyTorch, or the runtime of an export format."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import nn

from attnrx.data import ImageSet
from attnrx.exporting import ExportSubject, Format, bare_subject, write_exported


@contextmanager
def running_in(
    form: Format | None, models: Mapping[str, nn.Module], like: nn.Module, precision: str, calibration: ImageSet
) -> Iterator[dict[str, nn.Module]]:
    """Yields the models themselves, or their exported files of a format while the context lasts.

    All are exported alike, for batches of any size, and verified against the model in eager mode. They accept the
    images of `like`, a model of a known family; the others may be of any class.
    """
    if form is None:
        yield dict(models)
        return
    subject = ExportSubject.of(like, form, precision=precision, calibration=calibration)
    with TemporaryDirectory() as folder:
        yield {
            name: write_exported(bare_subject(model, subject), Path(folder) / f"{index}{form.suffix}", form)
            for index, (name, model) in enumerate(models.items())
        }
