"""Merges tokens inside attention modules and MLPs, for models whose blocks pass grids of tokens (SAM, ViTDet).

Such a block divides the grid into windows, pads it, and puts it together again. So no token can leave between blocks.
Instead, every attention and every MLP from a policy's first layer on computes on merged tokens, and its outputs are
copied to all tokens that were merged. The residual connections keep every token. Each attention merges the tokens of
its own windows, and the MLP of the same block merges the same tokens.
"""

import math

import torch
import torch.nn.functional as F

from attnrx.support.shapes import Float, ImageBatch, Int, Tensor
from attnrx.vit.models.parts.token_reduction import TokenReduction, TokenRun
from attnrx.vit.tokens import counted, gathered_rows

Grid = Float[Tensor, "windows rows columns width"]
Windows = Float[Tensor, "windows tokens width"]


class LayerRun(TokenRun):
    """The statistics of a forward pass in which every layer merges the tokens of its own windows.

    `grid` is the number of rows and columns of an image's patches. `shape` is the shape of what entered the present
    attention or MLP. `window` is the number of rows and columns of a window in the present layer. For every token of a
    window, `sources` contains the index of its representative among the merged tokens, or is None if the layer merges
    nothing. `num_merged` is the number of merged tokens in a window. If tokens are masked, `positions` contains their
    indices in the window.
    """

    def __init__(self, images: int):
        super().__init__(is_tracked=True)
        self.images = images
        self.grid: tuple[int, int] = (0, 0)
        self.shape: torch.Size | None = None
        self.window: tuple[int, int] = (0, 0)
        self.sources: Int[Tensor, "windows tokens"] | None = None
        self.positions: Int[Tensor, "windows merged"] | None = None
        self.num_merged = 0


class MergingInLayers(TokenReduction):
    """A token reduction that merges tokens inside every attention and every MLP from the policy's first layer on."""

    def new_run(self, images: ImageBatch) -> TokenRun:
        return LayerRun(images.shape[0])

    @property
    def _layer_run(self) -> LayerRun:
        run = self.call.run
        if run is None:
            raise self.called_alone("an attention or MLP")
        assert isinstance(run, LayerRun)
        return run

    def enter_block(self, axis: int, tokens: Float[Tensor, "images _ _ _"]) -> None:
        """Stores the grid of the images. `axis` is the axis of the features (`ViTParts.grid_axis`)."""
        rows, columns = tokens.shape[2:] if axis == 1 else tokens.shape[1:3]
        self._layer_run.grid = rows, columns

    def enter_attention(self, layer: int, tokens: Grid) -> Windows | None:
        """Merges the tokens of every window. Returns None if the layer merges nothing."""
        run, (windows, *window, width) = self._layer_run, tokens.shape
        run.shape, run.window, run.sources = tokens.shape, (window[0], window[1]), None
        run.sizes, run.patch_indices, run.trail = None, None, []
        stage, number = self.policy.stage_of(layer), math.prod(window)
        count = self.policy.left_in(layer, number, self.shape.layout.patches)
        if stage is None or count >= number:
            return None
        run.patches, run.patch_indices = number, counted(0, number, tokens.device).expand(windows, -1)
        merged = self.reduced(stage, count, tokens.reshape(windows, number, width))
        assert run.stages is not None
        # Every token keeps its residual connection, so only its representative is needed later.
        record, run.trail = run.stages.pop(), []
        run.sources, run.positions, run.num_merged = record.sources, record.positions, count
        return merged

    def leave_attention(self, outputs: Windows) -> Grid | None:
        """Copies the outputs of the merged tokens to all tokens of their windows."""
        run = self._layer_run
        if run.sources is None:
            return None
        assert run.shape is not None
        sources = run.sources if run.positions is None else run.positions.gather(1, run.sources)
        run.sizes, run.patch_indices = None, None
        return gathered_rows(outputs, sources).view(run.shape)

    def enter_mlp(self, tokens: Float[Tensor, "images *sides width"]) -> Windows | None:
        """Returns the means of the tokens that the attention of this block merged, for every window of the grid."""
        run = self._layer_run
        if run.sources is None:
            return None
        run.shape = tokens.shape
        inside = in_windows(tokens.reshape(run.images, *run.grid, tokens.shape[-1]), run.window)
        # Padding is not part of the grid here, so it has no weight. Tokens of padding alone stay zero.
        weights = in_windows(tokens.new_ones(1, *run.grid, 1), run.window)[..., 0].repeat(run.images, 1)
        places = run.sources[..., None].expand_as(inside)
        sums = inside.new_zeros(inside.shape[0], run.num_merged, inside.shape[2]).scatter_add(1, places, inside)
        total = weights.new_zeros(inside.shape[0], run.num_merged).scatter_add(1, run.sources, weights)
        means = sums / total.clamp_min(1)[..., None]
        return means if self.by == "compress" else gathered_rows(means, run.sources)

    def leave_mlp(self, outputs: Windows) -> Float[Tensor, "images *sides width"] | None:
        """Copies the outputs of the merged tokens to all tokens of the grid."""
        run = self._layer_run
        if run.sources is None:
            return None
        assert run.shape is not None
        inside = gathered_rows(outputs, run.sources) if self.by == "compress" else outputs
        run.sources = None
        return from_windows(inside, run.window, (run.images, *run.grid)).reshape(run.shape)

    def leave_blocks(self, tokens: Float[Tensor, "images *sides"]) -> None:
        """Ends a pass that a library method started, e.g. a method of the backbone alone."""
        self._end_outside()


def in_windows(grid: Float[Tensor, "images rows columns width"], window: tuple[int, int]) -> Windows:
    """Divides grids into windows, row by row. Zeros are added below and on the right of a grid that windows don't fit.

    The windows of an image follow each other, as in the attention of SAM and ViTDet.
    """
    height, width = window
    _, rows, columns, _ = grid.shape
    padded = F.pad(grid, (0, 0, 0, -columns % width, 0, -rows % height))
    split = padded.unflatten(2, (-1, width)).unflatten(1, (-1, height))  # [images, down, rows, across, columns, width]
    return split.transpose(2, 3).flatten(0, 2).flatten(1, 2)


def from_windows(
    windows: Windows, window: tuple[int, int], shape: tuple[int, int, int]
) -> Float[Tensor, "images rows columns width"]:
    """Assembles windows into grids. `shape` is the number of images, and of rows and columns without padding."""
    (height, width), (images, rows, columns) = window, shape
    down, across = -(-rows // height), -(-columns // width)
    split = windows.view(images, down, across, height, width, -1).transpose(2, 3)
    return split.reshape(images, down * height, across * width, -1)[:, :rows, :columns]
