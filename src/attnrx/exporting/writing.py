"""Exporting: a model is captured, written, run beside eager, and only then put in its place."""

import copy
import importlib.metadata
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attnrx.atomic_writes import flush, require_regular, temporary_folder
from attnrx.attention import Attention, Eager, Fused, using
from attnrx.config import to_dict
from attnrx.data import ImageSet
from attnrx.errors import AttnrxError, CheckpointError, InvalidInput, NotSupported
from attnrx.evidence import Evidence
from attnrx.exporting.exported import KIND, SCHEMA, Exported, Images, facts_path, present_facts
from attnrx.exporting.format import PRECISIONS, Format, require_suffix
from attnrx.exporting.parity import compare
from attnrx.models import TokenReduction, described_tokens, family_of, model_fingerprint, require_ordinary_weights
from attnrx.shapes import Tensor
from attnrx.storage import file_kind, file_sha256, write_json

DYNAMIC = "dynamic"
# How many images a model is captured and compared on where its file takes batches of any size.
CAPTURED, COMPARED, AT_ONCE = 2, (1, 3, 8), 8
PACKAGES = ("attnrx", "torch", "onnx", "onnxscript", "onnxruntime", "openvino")


@dataclass(frozen=True, eq=False)
class Subject:
    """What is exported: a model in evaluation mode, what images its file is to take, and facts that go with it.

    `calibration` are images on the model's scale; without any, parity is measured on noise.
    """

    model: nn.Module
    images: Images
    calibration: ImageSet | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        form: Format,
        batch: int | str = DYNAMIC,
        precision: str | None = None,
        calibration: ImageSet | None = None,
    ) -> "Subject":
        """Copies a model of a known family, at a precision, and reads its facts."""
        family = family_of(model)
        require_ordinary_weights(model)
        if precision is not None and precision not in PRECISIONS:
            raise InvalidInput(f"precision={precision!r}: choose from {', '.join(PRECISIONS)}, or None for its own.")
        placed = _placed(model, form, precision)
        own = next(placed.parameters())
        images = Images(family.input_shape(model), str(own.dtype).removeprefix("torch."), _count(batch), _device(own))
        mean, std = family.normalization(model)
        costs = family.costs(model)
        facts = {
            "model": {
                "family": family.name,
                "fingerprint": model_fingerprint(model),
                "parameters": costs.params,
                "macs": costs.macs,
                "tokens": described_tokens(model),
            },
            "normalization": {"mean": list(mean), "std": list(std)},
            "class_names": list(family.class_names(model)),
        }
        return cls(placed, images, calibration, facts)

    @property
    def prunes_tokens(self) -> bool:
        """Whether tokens leave the model on their way."""
        return any(isinstance(module, TokenReduction) for module in self.model.modules())

    def batches(self, count: int) -> list[Tensor]:
        """Returns images to calibrate and compare on, in batches that the file takes: `count` of them, or noise."""
        size = self.images.batch or AT_ONCE
        if self.calibration is not None:
            taken = self.calibration.take(min(max(count, size), len(self.calibration)))
            found = [batch.images for batch in taken.batches(size, device=self.images.device)]
            whole = [each for each in found if self.images.batch is None or len(each) == size]
            if not whole:
                raise InvalidInput(f"{len(taken)} images for a file that takes {size} at once: give at least {size}.")
            return [each.to(self.images.dtype) for each in whole]
        generator = torch.Generator().manual_seed(0)
        sizes = COMPARED if self.images.batch is None else (size, size)
        noise = (torch.randn(each, *self.images.shape, generator=generator, dtype=torch.float64) for each in sizes)
        return [each.to(self.images.device, self.images.dtype) for each in noise]


def _placed(model: nn.Module, form: Format, precision: str | None) -> nn.Module:
    placed = copy.deepcopy(model).eval()
    placed = placed if form.on_cuda else placed.cpu()
    return placed if precision is None else placed.to(PRECISIONS[precision])


def _device(tensor: Tensor) -> str:
    return str(tensor.device)


def _count(batch: int | str) -> int | None:
    if batch == DYNAMIC:
        return None
    if not isinstance(batch, int) or batch < 1:
        raise InvalidInput(f"batch={batch!r}: give the number of images that the file takes at once, or {DYNAMIC!r}.")
    return batch


def write_exported(subject: Subject, path: Path | str, form: Format) -> Exported:
    """Writes the file and its facts, and returns what runs it.

    Raises:
        NotSupported: The model cannot be captured so, or the file does not answer as the model does. Nothing is left.
    """
    path = Path(path)
    require_suffix(path, form.suffix)
    require_writable(path)
    form.require(subject.images.dtype)
    if form.calibrated and subject.calibration is None:
        raise InvalidInput(f"{form.name} is calibrated on images: give calibration images of the model's task.")
    batches = subject.batches(form.wanted)
    program = captured(subject, form)
    with temporary_folder(path) as room:
        written = room / path.name
        _write(form, program, written, batches)
        files = {each.name: file_sha256(each) for each in sorted(room.iterdir(), key=lambda each: each == written)}
        evidence = _compared(subject, form, written, batches)
        facts = {
            "kind": KIND,
            "schema": SCHEMA,
            "format": to_dict(form),
            "files": files,
            "images": {
                "shape": list(subject.images.shape),
                "precision": subject.images.precision,
                "batch": subject.images.batch,
                "device": subject.images.device,
            },
            **subject.facts,
            "parity": [vars(finding) for finding in evidence.findings],
            "versions": _versions(),
        }
        _put(room, path, facts)
    return Exported(path, form, subject.images, facts).eval()


def captured(subject: Subject, form: Format) -> torch.export.ExportedProgram:
    """Captures what the model does with a batch of the size, or of any size."""
    images = subject.images
    example = torch.zeros(images.batch or CAPTURED, *images.shape, dtype=images.dtype, device=images.device)
    shapes = None if images.batch is not None else ({0: torch.export.Dim("batch", min=1)},)
    with torch.no_grad(), _unfused(subject.model) if form.writes_out else nullcontext():
        try:
            return torch.export.export(subject.model, (example,), dynamic_shapes=shapes)
        except Exception as error:  # torch.export raises what it pleases
            reason = str(error).strip().partition("\n")[0]
            if images.batch is None:
                raise NotSupported(
                    f"this model cannot be exported for batches of any size ({reason}). Give batch=N, the number of "
                    "images that the file is to take at once."
                ) from error
            raise NotSupported(f"this model cannot be captured by torch.export ({reason}).") from error


@contextmanager
def _unfused(model: nn.Module) -> Iterator[None]:
    """Lets attention take its steps one by one at exact ranks; what counts tokens by their size does so already."""
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    layers = [layer for layer in layers if isinstance(layer.backend, Fused)]
    with using(layers, [Eager() for _ in layers]):
        yield


def _write(form: Format, program: torch.export.ExportedProgram, path: Path, batches: Sequence[Tensor]) -> None:
    try:
        form.write(program, path, batches)
    except AttnrxError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot write {path.name}: {error.strerror or error}. Nothing was left.") from error
    except Exception as error:  # what translates programs raises what it pleases
        reason = str(error).strip().partition("\n")[0]
        raise NotSupported(
            f"this model cannot be written as {form.name} ({type(error).__name__}: {reason})."
        ) from error


def _compared(subject: Subject, form: Format, path: Path, batches: Sequence[Tensor]) -> Evidence:
    """Runs the file beside the model, and refuses it unless it answers alike."""
    limit = form.limit(subject.images.dtype)
    runs = Exported(path, form, subject.images, {})
    try:
        parity = compare(subject.model, runs, batches, limit, subject.prunes_tokens)
    except AttnrxError:
        raise
    except Exception as error:  # every runtime has errors of its own
        reason = str(error).strip().partition("\n")[0]
        raise NotSupported(f"what was written as {form.name} does not run ({reason}). Nothing was left.") from error
    evidence = Evidence(parity.findings(limit), {})
    if evidence.failures:
        raise NotSupported(
            f"what was written as {form.name} does not answer as the model does: a logit differs by "
            f"{parity.largest:.3g}, {parity.share:.3g} of the largest where {limit:g} is allowed, and "
            f"{100 * parity.agreement:.0f} % of {parity.images} images keep their class. Nothing was left."
        )
    return evidence


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def require_writable(path: Path) -> None:
    """Refuses to write over anything but a regular file, or over a file beside it that is not its facts."""
    require_regular(path)
    beside = facts_path(path)
    if os.path.lexists(beside) and file_kind(beside) != KIND:
        raise InvalidInput(
            f"the facts go into {beside}, which exists and was not written by an export: move it away, or choose "
            "another name."
        )


def _put(room: Path, path: Path, facts: Mapping[str, Any]) -> None:
    """Moves what was exported into place.

    A file and its facts have two names, which no system replaces at once: for a moment the facts name the earlier file,
    too, and the file's content decides which of them hold. Several files have no such moment.
    """
    files, earlier = facts["files"], present_facts(path)
    taken = [path.with_name(name) for name in files if path.with_name(name).exists()]
    if len(files) > 1 and taken:
        raise InvalidInput(
            f"{', '.join(map(str, taken))}: an export of {len(files)} files cannot replace another one at once. Delete "
            "that first, or choose another name."
        )
    if earlier is not None:
        write_json(facts_path(path), {**facts, "earlier": earlier})
    for name in files:
        flush(room / name)
        (room / name).replace(path.with_name(name))
    write_json(facts_path(path), facts)
    for name in {} if earlier is None else earlier["files"].keys() - files.keys():
        path.with_name(name).unlink(missing_ok=True)


class _Logits(nn.Module):
    """Returns the logits of a model that may give them with other things."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        answer = self.model(images)
        return answer if isinstance(answer, Tensor) else answer.logits


def bare_subject(model: nn.Module, like: Subject) -> Subject:
    """Returns a model of no known family, e.g. as its library ships it, which takes the same images as another."""
    placed = _Logits(copy.deepcopy(model)).eval().to(like.images.device, like.images.dtype)
    return replace(like, model=placed, facts={})
