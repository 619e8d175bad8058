"""Baselines without pruning: smaller images, the vendor's 8-bit quantization, and the unchanged model."""

import weakref
from contextlib import ExitStack

from torch import nn
from torch.nn.functional import interpolate

from attnrx.data import ImageSet
from attnrx.exporting import library_subject, parse_format, vendor_file
from attnrx.support.atomic_writes import scratch_folder
from attnrx.support.errors import NotSupported
from attnrx.support.optional import is_installed
from attnrx.support.shapes import ImageBatch, Tensor
from attnrx.vit.costs import ModelCosts
from attnrx.vit.models import accepting, family_of
from attnrx_lab.baselines.compressor import ModelCompressor


class UnchangedModel(ModelCompressor):
    """Returns the original model for every share."""

    def __init__(self, model: nn.Module):
        self.model = model

    def costs(self, share: float) -> ModelCosts:
        return family_of(self.model).costs(self.model)

    def make(self, share: float) -> nn.Module:
        return self.model


class VendorInt8(UnchangedModel):
    """Exports the unchanged model to an 8-bit file with the default settings of the vendor's quantization tools.

    The baseline uses OpenVINO and NNCF or, if one of them is not installed, ONNX Runtime. Quantization does not change
    the number of MACs, so only the measured latency shows its gain.
    """

    def __init__(self, model: nn.Module, calibration: ImageSet):
        super().__init__(model)
        self.calibration = calibration

    def make(self, share: float) -> nn.Module:
        """Returns a module that runs the exported file. Raises NotSupported if no tool is installed or a tool fails."""
        has_openvino = all(map(is_installed, ("openvino", "nncf")))
        form = parse_format("openvino(precision=int8)" if has_openvino else "int8")
        opened = ExitStack()
        path = opened.enter_context(scratch_folder()) / f"model{form.suffix}"
        try:
            file = vendor_file(library_subject(self.model, form, self.calibration), path, form)
        except BaseException:
            opened.close()
            raise
        weakref.finalize(file, opened.close)  # the runtime needs the file as long as the module is in use
        return file


class Resized(nn.Module):
    """Resizes full-size images (bicubic, antialiased) and runs a model that takes smaller images."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.sides = family_of(model).input_shape(model)[1:]

    def forward(self, images: ImageBatch) -> Tensor:
        return self.model(interpolate(images, self.sides, mode="bicubic", antialias=True))


class LowerResolution(ModelCompressor):
    """Runs the same weights on smaller images.

    The share scales the height and the width, which are rounded down to whole patches. The model's library interpolates
    the position embeddings. No weights are fitted.

    Raises:
        NotSupported: The patches do not form a regular grid, or their sides are not whole numbers of pixels.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.channels, self.height, self.width = family_of(model).input_shape(model)
        layout = family_of(model).token_layout(model)
        self.rows = round((layout.patches * layout.windows * self.height / self.width) ** 0.5)
        self.columns = self.rows * self.width // self.height
        is_grid = self.rows * self.columns == layout.patches * layout.windows
        if not is_grid or self.height % self.rows or self.width % self.columns:
            raise NotSupported("a lower resolution needs patches in a grid, of whole pixels.")
        self._models: dict[tuple[int, int], nn.Module] = {}

    @property
    def least(self) -> float:
        return 1 / min(self.rows, self.columns)

    def share_within(self, macs: int) -> float | None:
        share = super().share_within(macs)
        return None if share is None else max(1, int(share * self.rows + 1e-9)) / self.rows  # of whole patches

    def costs(self, share: float) -> ModelCosts:
        model = self._at(share)
        return family_of(model).costs(model)

    def make(self, share: float) -> nn.Module:
        model = self._at(share)
        return model if model is self.model else Resized(model)

    def _at(self, share: float) -> nn.Module:
        # The tolerance matters for shares that rounding put just below a whole number of patches.
        rows, columns = (max(1, int(share * count + 1e-9)) for count in (self.rows, self.columns))
        if (rows, columns) not in self._models:
            sides = rows * (self.height // self.rows), columns * (self.width // self.columns)
            self._models[rows, columns] = accepting(self.model, (self.channels, *sides))
        return self._models[rows, columns]
