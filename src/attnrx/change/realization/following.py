"""Narrows MLPs outside the Transformer blocks, for example in SigLIP's pooling head.

A library's model class often has one setting for the width of all MLPs. If pruning narrows the MLPs of the blocks, all
other MLPs must become equally narrow. Otherwise, the class could not load the model. As in the blocks
(`decide_hidden`), the units that contribute least to the output are removed. The second map is then refitted to the
remaining units.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from attnrx.change.decompositions import compensated, gram, unit_losses
from attnrx.data import ImageSet
from attnrx.support.modules import evaluating
from attnrx.vit.models import observing_calls
from attnrx.vit.models.parts.mlp import write_linear_

IMAGES = 128
"""The largest number of images for measuring the moments of hidden units."""


def narrow_(model: nn.Module, pairs: Sequence[tuple[str, str]], hidden: int, images: ImageSet) -> None:
    """Reduces MLPs to `hidden` units, in place. Each pair holds the module paths of an MLP's two linear layers."""
    adopted: Any = model
    weight = next(model.parameters())
    with evaluating((model,)):
        for first, second in ((adopted.source.get_submodule(path) for path in pair) for pair in pairs):
            rows: list[torch.Tensor] = []
            with observing_calls((second,), lambda call, rows=rows: rows.append(call.tokens.flatten(0, -2).double())):
                for batch in images.take(min(IMAGES, len(images))).batches(32, device=weight.device):
                    model(batch.images.to(weight.dtype))
            inputs, old = torch.cat(rows).cpu(), second.weight.detach().double().cpu()
            mean = inputs.mean(0)
            covariance = gram(inputs - mean) / len(inputs)
            keep = torch.zeros(len(mean), dtype=torch.bool)
            keep[unit_losses(covariance, old).topk(hidden).indices] = True
            new = compensated(covariance, old, keep)
            bias = old @ mean - new @ mean[keep] + (0.0 if second.bias is None else second.bias.detach().double().cpu())
            kept = keep.to(weight.device)
            write_linear_(first, first.weight.detach()[kept], None if first.bias is None else first.bias.detach()[kept])
            write_linear_(second, new.to(weight), bias.to(weight))
