"""Makes a whole detector smaller, and judges it by the objects that it finds."""

# %% [markdown]
# # A detector
#
# You want a smaller detector with the same head and the same outputs, and you judge it by the objects that it finds.
# The example is a timm Vision Transformer with a detection head. If the centre of an object is in a patch, that patch
# predicts the object's class and box. The page trains this detector in half a minute, on digits of different sizes in
# noise. Your module may return any tensors in tuples or dictionaries.

# %%
import timm
import torch
from torch import nn
from transformers import LwDetrConfig, LwDetrForObjectDetection, LwDetrViTConfig

import attnrx as rx

SIZE, PATCH, CLASSES, OBJECTS, EPOCHS = 24, 4, 10, 2, 20
SIDE = SIZE // PATCH
digits = rx.load_data("digits", image_size=8)


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = {"img_size": SIZE, "patch_size": PATCH, "in_chans": 1, "embed_dim": 48, "depth": 3, "num_heads": 3}
        scale = {"mean": digits.normalization.mean, "std": digits.normalization.std}  # timm needs the images' scale
        self.backbone = timm.create_model("vit_tiny_patch16_224", num_classes=0, pretrained_cfg_overlay=scale, **sizes)
        self.head = nn.Linear(48, CLASSES + 1 + 4)
        cells = torch.stack(torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="xy"), -1)
        self.register_buffer("cells", cells.reshape(-1, 2).float())

    def forward(self, images):
        answers = self.head(self.backbone.forward_features(images)[:, 1:])  # one per patch, without the class token
        logits, offset, size = answers.split((CLASSES + 1, 2, 2), -1)  # the last class: no object
        return {"logits": logits, "boxes": torch.cat([(self.cells + offset.sigmoid()) / SIDE, size.sigmoid()], -1)}


# %% [markdown]
# A loader yields images and their objects, [batch, objects, 5]. An object has five numbers: its class, the two
# coordinates of its centre, its width and its height. Lengths are relative to the side of the image.

# %%
generator = torch.Generator().manual_seed(0)


def scenes(images, count):
    batch = next(iter(images.batches(len(images))))
    background = batch.images.amin()
    pictures = background + 0.1 * torch.rand(count, 1, SIZE, SIZE, generator=generator)
    objects = torch.zeros(count, OBJECTS, 5)
    for scene in range(count):
        for half in range(OBJECTS):  # one object in each half, so that none hides another
            row, side = (int(torch.randint(n, (), generator=generator)) for n in (len(batch), 5))
            side += 8
            left = half * SIZE // 2 + int(torch.randint(SIZE // 2 - side + 1, (), generator=generator))
            top = int(torch.randint(SIZE - side + 1, (), generator=generator))
            drawn = nn.functional.interpolate(batch.images[row : row + 1], (side, side), mode="bilinear")[0]
            pictures[scene, :, top : top + side, left : left + side] = drawn
            place = [left + side / 2, top + side / 2, side, side]
            objects[scene, half] = torch.tensor([float(batch.labels[row]), *(number / SIZE for number in place)])
    return torch.utils.data.TensorDataset(pictures, objects)


def loss_of(answers, objects):
    centres = (objects[..., 1:3] * SIDE).long()
    cells = centres[..., 1] * SIDE + centres[..., 0]
    wanted = torch.full(answers["logits"].shape[:2], CLASSES).scatter(1, cells, objects[..., 0].long())
    boxes = answers["boxes"].gather(1, cells[..., None].expand(-1, -1, 4))
    classes = nn.functional.cross_entropy(answers["logits"].flatten(0, 1), wanted.flatten())
    return 5 * classes + 10 * nn.functional.l1_loss(boxes, objects[..., 1:])


torch.manual_seed(0)
model, training = Detector(), scenes(digits.train, 4000)
loader = torch.utils.data.DataLoader(training, batch_size=64, shuffle=True, generator=generator)
optimizer = torch.optim.AdamW(model.parameters())
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, epochs=EPOCHS, steps_per_epoch=len(loader))
for _ in range(EPOCHS):
    for images, objects in loader:
        optimizer.zero_grad()
        loss_of(model(images), objects).backward()
        optimizer.step()
        schedule.step()
model.eval()

# %% [markdown]
# ## A divergence and a metric
#
# You pass two functions. `divergence(original, smaller)` compares the outputs of both models without labels. attnrx
# uses it to choose the plan and to fit the weights. A detector has two outputs in different units, so the function must
# weight them. The example adds the divergence of the classes in all patches and the error of the boxes where the
# original sees an object.
#
# `metric(outputs, (images, labels))` computes the number that you report. The example computes the share of objects
# that the detector finds with the right class and an overlap (IoU) above one half.


# %%
def detection_divergence(original, smaller):
    old, new = (answers["logits"].log_softmax(-1) for answers in (original, smaller))
    seen = 1 - old[..., -1].exp()  # the probability of an object
    moved = (original["boxes"] - smaller["boxes"]).abs().sum(-1)
    return (old.exp() * (old - new)).sum((1, 2)) + (seen * moved).sum(1)


def corners(boxes):
    centre, size = boxes[..., :2], boxes[..., 2:]
    return centre - size / 2, centre + size / 2


def overlaps(boxes, objects):  # the IoU, [batch, boxes, objects]
    (low, high), (left, right) = corners(boxes[:, :, None]), corners(objects[:, None, :, 1:])
    shared = (torch.minimum(high, right) - torch.maximum(low, left)).clamp_min(0).prod(-1)
    return shared / ((high - low).prod(-1) + (right - left).prod(-1) - shared)


def objects_found(outputs, batch):
    _, objects = batch
    right_class = outputs["logits"].argmax(-1)[..., None] == objects[:, None, :, 0]
    found = (overlaps(outputs["boxes"], objects) > 0.5) & right_class
    return found.any(1).float().mean(1)  # the mean over the objects of the image


# %%
data = torch.utils.data.DataLoader(scenes(digits.test, 600), batch_size=64)
small = rx.shrink(model, data, macs=0.7, divergence=detection_divergence, metric=objects_found)
print(small.summary())
for finding in small.evidence.findings:
    if finding.check == "metric":
        print(f"{finding.claim}: {finding.value:.3f} [{finding.low:.3f}, {finding.high:.3f}]")

# %% [markdown]
# `small.model` has the class and the outputs of your module. You can select boxes from `small.model(images)["boxes"]`
# as before.
#
# ## The average precision
#
# The average precision (AP) ranks the boxes of all images by their scores, so it has no value per image and attnrx
# cannot plan with it. Measure it once, with your own evaluation. Each image's boxes are matched only with that image's
# objects. So you can resample images to get an interval for the change of AP.


# %%
def ranked_boxes(detector, scenes):  # for every box: image, class, score, and whether it is the first to find an object
    boxes = []
    for image, (picture, objects) in enumerate(scenes):
        with torch.no_grad():
            outputs = detector(picture[None])
        scores, classes = outputs["logits"][0].softmax(-1)[:, :-1].max(-1)
        fits = (overlaps(outputs["boxes"], objects[None])[0] > 0.5) & (classes[:, None] == objects[:, 0])
        for row in scores.argsort(descending=True):
            is_hit = bool(fits[row].any())
            boxes.append([image, int(classes[row]), float(scores[row]), is_hit])
            if is_hit:
                fits[:, fits[row].int().argmax()] = False  # an object is found once
    return torch.tensor(sorted(boxes, key=lambda box: -box[2]))


def average_precision(boxes, scenes, weights):  # at an IoU of 0.5; `weights`: how often every image counts
    areas = []
    for each in range(CLASSES):
        image, _, _, hit = boxes[boxes[:, 1] == each].T
        counts = weights[image.long()]
        precision = (counts * hit).cumsum(0) / counts.cumsum(0).clamp_min(1)
        highest = precision.flip(0).cummax(0).values.flip(0)  # at this recall or a higher one
        objects = (weights[:, None] * (scenes.tensors[1][..., 0] == each)).sum()
        areas.append((highest * counts * hit).sum() / objects.clamp_min(1))
    return float(torch.stack(areas).mean())


others = scenes(digits.test, 300)
boxes = [ranked_boxes(each, others) for each in (model, small.model)]
draws = torch.randint(len(others), (300, len(others)), generator=generator)
weights = [torch.ones(len(others)), *(torch.bincount(draw, minlength=len(others)).float() for draw in draws)]
measured = torch.tensor([[average_precision(each, others, weight) for each in boxes] for weight in weights])
(old, new), changes = measured[0], measured[1:].diff(dim=1)[:, 0]
low, high = changes.quantile(torch.tensor([0.025, 0.975]))
print(f"AP of the original {old:.3f}, of the smaller model {new:.3f}: {new - old:+.3f} [{low:+.3f}, {high:+.3f}]")

# %% [markdown]
# ## Windows and merging
#
# You can also pass a whole detector from a library (ViTDet, YOLOS, LW-DETR, RF-DETR). attnrx finds the backbone in it.
# LW-DETR and RF-DETR divide the patches of an image into windows between their blocks. attnrx can remove ranks, heads
# and units in these models, too. It merges the same number of tokens in every window, and restores all patches before
# the head. The example is an LW-DETR with random weights. Load yours with `from_pretrained`.

# %%
torch.manual_seed(0)
backbone = LwDetrViTConfig(
    hidden_size=48, num_hidden_layers=4, num_attention_heads=3, mlp_ratio=2, image_size=64, patch_size=8,
    pretrain_image_size=64, num_windows=4, window_block_indices=[0, 2], out_indices=[2, 4],
)  # fmt: skip
config = LwDetrConfig(
    backbone_config=backbone, d_model=32, decoder_layers=1, decoder_ffn_dim=64, decoder_self_attention_heads=2,
    decoder_cross_attention_heads=2, num_queries=10, num_labels=5, group_detr=1, projector_scale_factors=[1.0],
)  # fmt: skip
detector = rx.load(LwDetrForObjectDetection(config).eval())
pictures = torch.randn(32, 3, 64, 64, generator=generator)
rules = "qk=total_rank:0.75 hidden=uniform_rank:0.75 tokens=ward:0.75@2"
smaller = rx.realize(detector, rx.prescribe(rx.diagnose(detector, pictures), rules))
before, after = (rx.models.family_of(each).costs(each).macs for each in (detector, smaller))
print(f"{100 * after / before:.0f} % of the MACs; boxes of two images: {tuple(smaller(pictures[:2]).pred_boxes.shape)}")

# %% [markdown]
# ## What can go wrong
#
# - `forward` selects boxes (by a threshold, or non-maximum suppression), so the sizes of its tensors depend on the
#   image. Pass the module without this selection, and select boxes afterwards.
# - A DETR predicts one box per query, not per patch. In your divergence, compare the same query of both models, and
#   weight it by the original's scores, as above.
# - Images have different numbers of objects. Pad the lists in the dataset, so that all have the same shape.
