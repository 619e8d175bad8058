"""Weights with two names: outside of the blocks they stay one weight, inside of them they are refused."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

import attnrx as rx
from attnrx.support.errors import NotSupported
from attnrx.support.modules import shared_weights


def images(count: int = 48) -> torch.Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def vit(depth: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=depth, embed_dim=48, num_heads=3, num_classes=7
    )


class Captioner(nn.Module):
    """Returns scores of words; the matrix of the scores embeds the words, as in language models."""

    def __init__(self):
        super().__init__()
        self.encoder = vit()
        self.encoder.reset_classifier(0)  # type: ignore[operator]
        self.words = nn.Embedding(11, 48)
        self.before = nn.Linear(48, 48)
        self.scores = nn.Linear(48, 11, bias=False)
        self.scores.weight = self.words.weight

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        started = self.words(torch.zeros(len(images), dtype=torch.long))
        return self.scores(self.before(self.encoder(images) + started))


class TwoHeads(nn.Module):
    """Two classifiers with one bias, and one norm under two names."""

    def __init__(self):
        super().__init__()
        self.encoder = vit()
        self.encoder.reset_classifier(0)  # type: ignore[operator]
        self.norm = nn.LayerNorm(48)
        self.first, self.second = nn.Linear(48, 5), nn.Linear(48, 5)
        self.second.bias = self.first.bias
        self.alias = self.norm

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.encoder(images)
        return self.first(self.norm(features)) + self.second(self.alias(features))


def names_of(model: nn.Module) -> set[tuple[str, ...]]:
    return {tuple(names) for names in shared_weights(model).values()}


@pytest.mark.parametrize("create", [Captioner, TwoHeads])
@pytest.mark.parametrize("rules", ["hidden=uniform_rank:0.5", "qk=uniform_rank:0.5", "tokens=ward:0.5@2"])
def test_weights_of_other_parts_stay_shared(create: type[nn.Module], rules: str, tmp_path: Path) -> None:
    model = create().eval()
    loaded = rx.load(model, factory=create)
    assert names_of(loaded) == names_of(model) != set()
    small = rx.realize(loaded, rx.prescribe(rx.diagnose(loaded, images(), moments=True), rules))
    assert names_of(small) == names_of(model)
    rx.save(small, tmp_path / "small")
    again = rx.load(tmp_path / "small", factory=create)
    assert names_of(again) == names_of(model)
    with torch.no_grad():
        torch.testing.assert_close(again(images(2)), small(images(2)), rtol=1e-5, atol=1e-5)
    # One step of training changes both names.
    again.train()
    again(images(2)).square().sum().backward()
    torch.optim.SGD(again.parameters(), lr=0.1).step()
    assert names_of(again) == names_of(model)


def share_a_block(model: Any) -> None:
    model.blocks[1] = model.blocks[0]


def share_a_norm(model: Any) -> None:
    model.blocks[1].norm1.weight = model.blocks[0].norm1.weight


def share_with_the_head(model: Any) -> None:
    model.norm.weight = model.blocks[1].norm2.weight


@pytest.mark.parametrize("change", [share_a_block, share_a_norm, share_with_the_head])
@pytest.mark.parametrize("is_inside", [False, True])
def test_weights_of_blocks_with_two_names_are_refused(change: Any, is_inside: bool) -> None:
    model = vit(3)
    change(model)
    with pytest.raises(NotSupported, match=r"shares one tensor between \S*blocks\.\d"):
        rx.load(nn.Sequential(model, nn.Linear(7, 4)) if is_inside else model)


def test_maps_with_weights_of_another_part_keep_their_units() -> None:
    """In a module without attention that is read, MLPs are found by structure."""

    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.patches = nn.Conv2d(3, 16, 8, 8)
            self.mlps = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3))
            self.mlps[2][0].weight = self.mlps[1][0].weight  # type: ignore[index, union-attr]
            self.head = nn.Linear(16, 5)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            tokens = self.patches(images).flatten(2).mT
            for mlp in self.mlps:
                tokens = tokens + mlp(tokens)
            return self.head(tokens.mean(1))

    torch.manual_seed(0)
    loaded = rx.load(Mixer().eval(), factory=Mixer, image_size=32)
    small = rx.realize(loaded, rx.prescribe(rx.diagnose(loaded, images(), moments=True), "hidden=uniform_rank:0.5"))
    widths = [small.get_submodule(f"mlps.{index}.0").out_features for index in range(3)]
    assert widths == [16, 32, 32]
    assert names_of(small) == {("mlps.1.0.weight", "mlps.2.0.weight")}
