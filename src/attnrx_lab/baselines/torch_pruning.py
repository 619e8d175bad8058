"""A baseline that makes heads and MLPs narrower with the library Torch-Pruning."""

import copy
import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from attnrx.data import Batch, ImageSet
from attnrx.support.errors import NotSupported
from attnrx.support.optional import required_module
from attnrx.support.shapes import Tensor
from attnrx.vit.costs import ModelCosts
from attnrx.vit.models import LIBRARIES, family_of
from attnrx.vit.models.working.adopted import Adopted
from attnrx_lab.baselines.compressor import ModelCompressor


class TorchPruningBaseline(ModelCompressor):
    """Removes features inside heads and MLPs with the library torch-pruning. The residual stream keeps its width.

    The baseline ranks features by the library's first-order Taylor criterion (`GroupTaylorImportance`). The gradients
    come from the calibration images. The labels are the model's own predictions or, if the model returns embeddings,
    the index of the largest feature. Every head loses the same share of its query, key and value features, and every
    MLP loses this share of its hidden features.

    The pruned weights run in attnrx's attention module. The attention module of timm 1.0.31 fails after pruning,
    because its `attn_dim` is not updated. Its fused path would also rescale the scores.

    Raises:
        NotSupported: The library is not installed, or the model is not an uncompressed timm model.
    """

    def __init__(self, model: nn.Module, calibration: ImageSet, batch_size: int = 16):
        self.package = required_module("torch_pruning", "lab", "the baseline torch_pruning")
        self.model, self.calibration, self.batch_size = model, calibration, batch_size
        self.family = LIBRARIES["timm"]
        _as_timm(model)  # refuses other models
        self.head_dim = family_of(model).attention(model)[0].spec.head_dim

    def costs(self, share: float) -> ModelCosts:
        # The pruned widths do not depend on the criterion, so this one is enough. It needs no calibration images.
        return self.family.costs(self._pruned(share, self.package.importance.MagnitudeImportance(), ()))

    def make(self, share: float) -> nn.Module:
        """Returns the model that keeps this share of the features inside heads and MLPs."""
        device = next(self.model.parameters()).device
        batches = self.calibration.batches(self.batch_size, device=device)
        return self._pruned(share, self.package.importance.GroupTaylorImportance(), batches)

    def _pruned(self, share: float, importance: Any, batches: Iterable[Batch]) -> nn.Module:
        timm_model = _as_timm(self.model)
        if share < 1:
            # At least one feature stays in every head.
            self._prune_(timm_model, 1 - max(share, 1 / self.head_dim), importance, batches)
        pruned: Any = copy.deepcopy(self.model)
        for index, layer in enumerate(self.family.blocks(timm_model)):
            block: Any = layer
            self.family.set_attention_(pruned, index, self.family.convert_attention(timm_model, block.attn))
            for which, linear in enumerate((block.mlp.fc1, block.mlp.fc2)):
                self.family.set_mlp_(pruned, index, which, linear)
        return pruned.eval()

    def _prune_(self, timm_model: nn.Module, ratio: float, importance: Any, batches: Iterable[Batch]) -> None:
        parameter = next(timm_model.parameters())
        blocks: list[Any] = list(self.family.blocks(timm_model))
        # The maps that write to the residual stream and the classifiers are not pruned, so the width stays the same.
        fixed = [
            module for name, module in timm_model.named_modules() if name in ("head", "head_dist", "patch_embed.proj")
        ]
        fixed += [linear for block in blocks for linear in (block.attn.proj, block.mlp.fc2)]
        example = torch.zeros(1, *family_of(self.model).input_shape(self.model), dtype=parameter.dtype)
        with torch.enable_grad(), warnings.catch_warnings():
            # The library warns that it would also prune tokens and positions. They have the width of the residual
            # stream, which does not change.
            warnings.filterwarnings("ignore", message="Unwrapped parameters")
            pruner = self.package.pruner.BasePruner(
                timm_model,
                example.to(parameter.device),
                importance=importance,
                pruning_ratio=ratio,
                ignored_layers=fixed,
                num_heads={block.attn.qkv: block.attn.num_heads for block in blocks},
                prune_head_dims=True,
            )
            for batch in batches:
                logits = timm_model(batch.images.to(parameter.dtype))
                F.cross_entropy(logits, logits.argmax(-1)).backward()
            pruner.step()
        timm_model.zero_grad()


def _as_timm(model: nn.Module) -> nn.Module:
    """Rebuilds the timm model from which an attnrx model was made, with the attnrx model's current weights."""
    family, refusal = LIBRARIES["timm"], "torch_pruning prunes the attention of timm: give an uncompressed timm:NAME."
    if not (isinstance(model, Adopted) and family.matches(model)):
        raise NotSupported(refusal)
    if not all(attention.spec.is_plain for attention in family.attention(model)):
        raise NotSupported(f"{refusal} Its attention has plain dot products; this one has rotations, biases or norms.")
    timm_model = family.create(model.origin.architecture, model.origin.arguments)
    # An adopted model has attnrx's attention. timm's attention has queries, keys and values in one map.
    state: dict[str, Tensor] = {
        name: tensor for name, tensor in model.source.state_dict().items() if ".attn.attention." not in name
    }
    for index, attention in enumerate(family.attention(model)):
        fused = (attention.scores.query, attention.scores.key, attention.value)
        state[f"blocks.{index}.attn.qkv.weight"] = torch.cat([part.weight for part in fused])
        biases = [part.bias for part in fused if part.bias is not None]
        if biases:
            state[f"blocks.{index}.attn.qkv.bias"] = torch.cat(biases)
        state |= {f"blocks.{index}.attn.proj.{name}": own for name, own in attention.output.state_dict().items()}
    parameter = next(model.parameters())
    timm_model = timm_model.to(parameter.device, parameter.dtype)
    try:
        timm_model.load_state_dict(state)
    except RuntimeError as error:  # a compressed model has other names or shapes
        raise NotSupported(refusal) from error
    for layer in family.blocks(timm_model):
        attention: Any = layer.get_submodule("attn")
        attention.fused_attn = False  # unfused, so that the library can trace it
    return timm_model.eval().requires_grad_()
