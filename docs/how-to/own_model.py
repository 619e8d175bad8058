"""Uses a model of your own class, after you describe where its parts are in five lines."""

# %% [markdown]
# # Use a model of your own
#
# attnrx supports the Vision Transformers of timm, transformers, torchvision and open_clip. It also finds the parts of
# many other models ([which ones](../models.md)). Try `rx.load(model)` first. If it raises an error, describe the parts
# of your model with a `Reader`. The model may be any `torch.nn.Module`, such as this example:

# %%
from dataclasses import replace

import torch
from torch import nn

import attnrx as rx


class SelfAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))

    def forward(self, tokens):
        parts = (
            part(tokens).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        return self.output(nn.functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, tokens):
        tokens = tokens + self.attention(self.norm1(tokens))
        return tokens + self.mlp(self.norm2(tokens))


class MyViT(nn.Module):
    def __init__(self, width=32, depth=4, heads=4, classes=10):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.class_token = nn.Parameter(torch.randn(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, 17, width))
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images):
        tokens = self.patches(images).flatten(2).mT
        tokens = torch.cat([self.class_token.expand(tokens.shape[0], -1, -1), tokens], dim=1) + self.places
        for layer in self.layers:
            tokens = layer(tokens)
        return self.head(self.norm(tokens)[:, 0])


torch.manual_seed(0)
mine = MyViT(depth=3).eval()

# %% [markdown]
# ## The reader
#
# A `Reader` contains the paths of your model's parts. `blocks`, `patches`, `norm` and `head` are paths in the model.
# `attention`, `norm_before` and `mlp` are paths in a block. `projections` and `heads` are paths in the attention
# module, and `maps` are paths in the MLP. When you load a saved model, attnrx creates an instance of your class with
# `arguments`.

# %%
reader = rx.Reader(
    input_shape=(3, 32, 32), blocks="layers", patches="patches", norm="norm", head="head", prefix_tokens=1,
    attention="attention", projections=("query", "key", "value", "output"), heads="heads",
    norm_before="norm1", mlp="mlp", maps=("0", "2"), arguments={"depth": 3},
)  # fmt: skip
model = rx.load(mine, reader=reader, factory=MyViT)
images = 2 * torch.rand(64, 3, 32, 32) - 1
with torch.no_grad():
    print(f"the copy differs by less than 1e-5: {bool((model(images) - mine(images)).abs().max() < 1e-5)}")

# %% [markdown]
# `rx.load` returns a copy, and compares the outputs of both models on random images first. If the outputs are not class
# logits, say what they are: `rx.load(..., outputs="multilabel")`, `"regression"` or `"embedding"`. You can then use the
# copy like any other model:

# %%
diagnosis = rx.diagnose(model, images)
slim = rx.realize(model, rx.prescribe(diagnosis, "qk=total_rank:0.5 vo=total_rank:0.5 tokens=tome:2@every"))
evidence = rx.verify(slim, model, images, [rx.checks.Costs()])
finding = evidence.findings[0]
print(f"{finding.claim}: {finding.value:.1f} {finding.unit}")

# %% [markdown]
# ## Save and load
#
# A saved folder contains the weights, the name of your class, its arguments and the reader, but no code. For your
# safety, attnrx never imports or calls something because a file names it. `rx.load` finds your class if you have
# imported it. Otherwise pass the class as `factory`.

# %%
rx.save(slim, "runs/own-model")
again = rx.load("runs/own-model", factory=MyViT)
with torch.no_grad():
    print(f"bit for bit: {torch.equal(again(images), slim(images))}")

# %% [markdown]
# ## What can go wrong
#
# If a reader does not match the model, attnrx raises an error. The message names the part that was not found, or the
# first block whose outputs differ:

# %%
try:
    rx.load(mine, reader=replace(reader, scale=1.0), factory=MyViT)
except rx.AttnrxError as error:
    print(str(error).partition("cannot be adopted: ")[2])

# %% [markdown]
# - The model passes masks or positions to the attention module, which raises `NotSupported`. It must pass only tokens.
# - The attention is `nn.MultiheadAttention` with `batch_first=True`. Omit `projections`.
# - The first argument of a block must be the tokens, [batch, tokens, width].
# - The classifier pools in an unusual way. With a `pooling` other than "class" or "mean", you cannot prune tokens.
# - The MLP is not two linear maps (e.g. gated, or with experts). Pass `maps=None`, and attnrx does not change the MLP.
