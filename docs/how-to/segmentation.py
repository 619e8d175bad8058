"""Makes a whole segmentation model smaller, and judges it by your own divergence and metric, e.g. the mean IoU."""

# %% [markdown]
# # A segmentation model, and a measure of your own
#
# You want a smaller segmentation model with the same outputs, and you judge it by your own measure, e.g. the mean IoU.
# The example is a timm Vision Transformer with a decoder, which the page trains in seconds on mosaics of four digits.
# Your module may return any tensors in tuples or dictionaries.

# %%
import timm
import torch
from torch import nn

import attnrx as rx

SIZE, PATCH, CLASSES = 16, 4, 10
digits = rx.load_data("digits", image_size=SIZE // 2)


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = {"img_size": SIZE, "patch_size": PATCH, "in_chans": 1, "embed_dim": 48, "depth": 3, "num_heads": 3}
        scale = {"mean": digits.normalization.mean, "std": digits.normalization.std}  # timm needs the images' scale
        self.backbone = timm.create_model("vit_tiny_patch16_224", num_classes=0, pretrained_cfg_overlay=scale, **sizes)
        self.decoder = nn.ConvTranspose2d(48, CLASSES, PATCH, PATCH)

    def forward(self, images):
        tokens = self.backbone.forward_features(images)[:, 1:]  # without the class token
        grid = tokens.transpose(1, 2).unflatten(2, (SIZE // PATCH, SIZE // PATCH))
        return self.decoder(grid)  # [batch, classes, height, width]


# %% [markdown]
# A loader yields images and masks. A mask contains the class of every pixel in its image.

# %%
generator = torch.Generator().manual_seed(0)


def mosaics(images, count):
    batch = next(iter(images.batches(len(images))))
    rows = torch.randint(len(batch), (count, 2, 2), generator=generator)

    def tiled(values):  # [count, 2, 2, ..., side, side] -> [count, ..., 2 side, 2 side]
        return torch.cat([torch.cat([values[:, i, j] for j in (0, 1)], dim=-1) for i in (0, 1)], dim=-2)

    masks = batch.labels[rows][..., None, None].expand(-1, -1, -1, SIZE // 2, SIZE // 2)
    return torch.utils.data.TensorDataset(tiled(batch.images[rows]), tiled(masks))


torch.manual_seed(0)
model, training = Segmenter(), mosaics(digits.train, 4000)
optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
for _ in range(6):
    for images, masks in torch.utils.data.DataLoader(training, batch_size=64, shuffle=True, generator=generator):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), masks).backward()
        optimizer.step()
model.eval()

# %% [markdown]
# ## A divergence and a metric
#
# You pass two functions. `divergence(original, smaller)` returns one number per image, which measures how far the
# outputs are from the original's. attnrx uses it for plans, repair, distillation and evidence, without labels.
# `metric(outputs, (images, labels))` also returns one number per image, whose mean you report. Labels may have any
# shape that your loader yields. If you pass neither function, attnrx compares outputs by their squared error and does
# not read the labels.


# %%
def pixel_divergence(original, smaller):
    old, new = original.log_softmax(1), smaller.log_softmax(1)
    return (old.exp() * (old - new)).sum(1).mean((1, 2))


def mean_iou(outputs, batch):
    _, masks = batch
    found = nn.functional.one_hot(outputs.argmax(1), CLASSES).bool()
    true = nn.functional.one_hot(masks, CLASSES).bool()
    shared, either = (found & true).sum((1, 2)), (found | true).sum((1, 2))
    return (shared / either.clamp_min(1)).sum(1) / (either > 0).sum(1)  # the mean over the classes of the image


# %%
data = torch.utils.data.DataLoader(mosaics(digits.test, 900), batch_size=64)
small = rx.shrink(model, data, macs=0.7, divergence=pixel_divergence, metric=mean_iou)
print(small.summary())
for finding in small.evidence.findings:
    if finding.check == "metric":
        print(f"{finding.claim}: {finding.value:.3f} [{finding.low:.3f}, {finding.high:.3f}]")

# %% [markdown]
# `small.model` has the class of your module. `small.model(images)` returns outputs in the same form as `model(images)`,
# and `small.model.decoder` is its decoder. attnrx planned on one part of `data`, and measured the numbers above on the
# rest.
#
# ## What can go wrong
#
# - Your metric is not a mean over images, e.g. an IoU over the pixels of all images. Pass
#   `metric_of_set(outputs, labels)`, which returns one number for a whole set. attnrx resamples images to compute its
#   interval. `rx.verify(small.model, model, test_data, metric=...)` measures either kind of metric on other images.
# - Your divergence has no gradient (e.g. it uses an argmax). attnrx can still plan with it, but fits the weights by the
#   squared error instead.
# - The masks have different shapes. Resize them in the dataset.
