"""Makes a volume model and a time series model smaller, whose classes are your own and whose inputs are not images."""

# %% [markdown]
# # Volumes and series
#
# attnrx also works on models whose inputs are not images, such as volumes [batch, channels, depth, height, width] or
# series [batch, steps, channels]. Pass `inputs` to describe the arguments of your model's `forward`. All other steps
# are the same as for images. The result is a module of your class.
#
# ## A volume
#
# The example is a Vision Transformer of a custom class, with patches of 4 x 4 x 4 voxels. The page trains it in seconds
# to distinguish balls, boxes and sticks in noise.

# %%
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import attnrx as rx

WIDTH, HEADS, SIDE, PATCH = 32, 4, 12, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads, self.qkv, self.proj = HEADS, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens):
        parts = self.qkv(tokens).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(nn.functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, tokens):
        tokens = tokens + self.attention(self.norm1(tokens))
        return tokens + self.mlp(self.norm2(tokens))


class VolumeViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv3d(1, WIDTH, PATCH, PATCH)
        self.places = nn.Parameter(0.02 * torch.randn(1, (SIDE // PATCH) ** 3, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, volumes):
        tokens = self.patches(volumes).flatten(2).mT + self.places
        return self.head(self.norm(self.blocks(tokens)).mean(1))


def volumes(count, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=generator)
    centre = 4 + 4 * torch.rand(count, 3, 1, 1, 1, generator=generator)
    places = torch.stack(torch.meshgrid(*[torch.arange(float(SIDE))] * 3, indexing="ij"))
    away = (places - centre).abs()  # [count, 3, depth, height, width]
    shapes = away.square().sum(1) < 9, away.amax(1) < 2.4, (away[:, 1:].amax(1) < 1.2) & (away[:, 0] < 6)
    shown = torch.stack(shapes, 1)[torch.arange(count), labels].float()
    return (shown + 0.5 * torch.randn(shown.shape, generator=generator))[:, None], labels


def trained(model, data, loss, epochs):
    loader = DataLoader(data, batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for _ in range(epochs):
        for taken, wanted in loader:
            optimizer.zero_grad()
            loss(model(taken), wanted).backward()
            optimizer.step()
    return model.eval()


torch.manual_seed(0)
fitted, tested = TensorDataset(*volumes(800, 0)), TensorDataset(*volumes(300, 1))
original = trained(VolumeViT(), fitted, nn.functional.cross_entropy, 8)

# %% [markdown]
# To load the model, pass an example of its inputs as `inputs`: a tensor, a tuple of arguments, or a mapping of named
# arguments. Then you can pass tensors, datasets and loaders of such volumes to all functions.

# %%
model = rx.load(original, inputs=fitted.tensors[0][:4])
diagnosis = rx.diagnose(model, fitted.tensors[0][:256])

# %% [markdown]
# ## All axes
#
# attnrx finds the blocks by their names and shapes. It then runs the model on random volumes to find the patch
# embedding, the norms and the MLPs. If the attention has an attribute with its number of heads (here `num_heads`),
# attnrx can reduce scores, values, heads, units and tokens, as in an image model.

# %%
for text in ("qk=total_rank:0.5", "hidden=uniform_rank:0.5", "tokens=ward:0.5@2"):
    small = rx.realize(model, rx.prescribe(diagnosis, text))
    print(f"{text}: {type(small).__name__} {tuple(small(tested.tensors[0][:2]).shape)}")
    for finding in rx.verify(small, model, tested, [rx.checks.Costs(), rx.checks.Accuracy()]).findings:
        if finding.details["quantity"] in ("MACs", "accuracy change"):
            print(f"  {finding.claim}: {finding.value:.1f} {finding.unit}")

# %% [markdown]
# Some volume decoders, such as UNETR's, use the outputs of several blocks. These decoders still get all patches,
# because attnrx restores removed patches in the outputs that they use. If attnrx does not support a model's kind of
# attention, it does not change the attention. You can then remove hidden units from the MLPs (`hidden`).
#
# ## A series
#
# The second example predicts time series, like PatchTST. It cuts every channel into patches of 8 steps, applies the
# same encoder to all channels, and predicts the next 8 steps. The loader yields the past and the future. The model
# needs only the past, so `inputs` is a function that selects the past from a batch.

# %%
STEPS, CHANNELS, AHEAD = 64, 3, 8


class SeriesTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Linear(AHEAD, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(1, STEPS // AHEAD, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH * STEPS // AHEAD, AHEAD)

    def forward(self, past):  # [batch, steps, channels]
        patches = past.mT.unfold(-1, AHEAD, AHEAD).flatten(0, 1)  # [batch * channels, patches, 8]
        tokens = self.encoder(self.patches(patches) + self.places)
        return self.head(tokens.flatten(1)).unflatten(0, (-1, CHANNELS)).mT  # [batch, 8, channels]


def series(count, seed):
    generator = torch.Generator().manual_seed(seed)
    period = 8 + 24 * torch.rand(count, 2, 1, CHANNELS, generator=generator)  # of two waves, in steps
    phase = 6.3 * torch.rand(count, 2, 1, CHANNELS, generator=generator)
    steps = torch.arange(STEPS + AHEAD)[:, None]
    waves = (6.3 * steps / period + phase).sin().sum(1)
    waves += 0.1 * torch.randn(waves.shape, generator=generator)
    return waves[:, :STEPS], waves[:, STEPS:]


def forecast_error(outputs, batch):
    _, future = batch
    return (outputs - future).square().mean((1, 2))


torch.manual_seed(0)
forecaster = trained(SeriesTransformer(), TensorDataset(*series(1000, 0)), nn.functional.mse_loss, 8)
loader = DataLoader(TensorDataset(*series(600, 1)), batch_size=64)
small = rx.shrink(forecaster, loader, macs=0.7, inputs=lambda batch: batch[0], metric=forecast_error)
print(small.summary())

# %% [markdown]
# `small.model` is a `SeriesTransformer` with the same inputs as your model. Without a `metric`, attnrx ignores the
# futures that the loader yields.
#
# ## What can go wrong
#
# - Series or volumes have different shapes. Cut them to one shape in the dataset. If you pad them and use a mask, the
#   mask is a second input.
# - Your model has several inputs, e.g. integers or masks. Return a tuple or a mapping of all inputs.
# - The output for an item must not depend on the other items in its batch. Normalize over steps, not over the batch.
# - `rx.export` exports modules that take one tensor. Export other modules with `torch.onnx.export`.
