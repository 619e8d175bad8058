"""A small ViT and images of handwritten digits, with which the how-to pages run in seconds.

Import both with `from stand_in import model, splits`. The model is a timm model if timm is installed, and otherwise one
of attnrx's own. It is trained on the first import and loaded from `runs/stand-in` afterwards.
"""

import importlib.util

import torch

import attnrx as rx

SIZES = {"image_size": 16, "patch_size": 4, "channels": 1, "classes": 10, "width": 48, "depth": 3, "heads": 3}


def _of_timm():
    import timm

    return timm.create_model(
        "vit_tiny_patch16_224",
        img_size=SIZES["image_size"],
        patch_size=SIZES["patch_size"],
        in_chans=SIZES["channels"],
        num_classes=SIZES["classes"],
        embed_dim=SIZES["width"],
        depth=SIZES["depth"],
        num_heads=SIZES["heads"],
        # The digits fill the images, so the images must not be cropped.
        pretrained_cfg_overlay={"mean": (0.5,), "std": (0.5,), "crop_pct": 1.0, "interpolation": "bilinear"},
    )


torch.manual_seed(0)
fresh = rx.load(_of_timm()) if importlib.util.find_spec("timm") else rx.models.build_model("dense:digits", **SIZES)
for weight in fresh.parameters():
    if weight.ndim == 2:  # larger initial weights than the default, so that attention becomes selective sooner
        torch.nn.init.xavier_uniform_(weight)
splits = rx.adapt_preprocessing(rx.load_data("digits"), fresh)
training = rx.TrainingConfig(
    epochs=4,
    batch_size=32,
    learning_rate=4e-3,
    weight_decay=0.0,
    losses=(rx.losses.Task(0.0),),
    augmentation=rx.data.Augmentation(padding=0, flip=False),
    precision="fp32",
)
model = rx.train(fresh, splits, training, "runs/stand-in").model.eval()
