"""Makes a fine-tuned model with a new head smaller, with a folder of images, and writes the file to deploy."""

# %% [markdown]
# # A fine-tuned model
#
# You have a timm or transformers model that you fine-tuned on your own classes, with a new head, and a folder of
# images. One call makes the model smaller. The first cells make an example model and an example folder. Use yours
# instead.

# %%
from pathlib import Path

import timm.data
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

import attnrx as rx

# %%
for index, (pixels, label) in enumerate(zip(*load_digits(return_X_y=True), strict=True)):
    folder = Path("runs/photos", "even" if label % 2 == 0 else "odd")
    folder.mkdir(parents=True, exist_ok=True)
    picture = Image.fromarray((15 * pixels).astype("uint8").reshape(8, 8))
    picture.convert("RGB").resize((32, 32)).save(folder / f"{index}.png")
    if index == 399:
        break

torch.manual_seed(0)
model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=3)
model.head = nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 2))  # in place of the 1,000 classes
transform = timm.data.create_transform(**timm.data.resolve_data_config(model=model) | {"input_size": (3, 32, 32)})
loader = DataLoader(ImageFolder("runs/photos", transform), batch_size=32)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for images, labels in loader:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()

# %% [markdown]
# ## Smaller
#
# `rx.shrink` needs no information about the new head. It proves that its copy of your model has the same outputs. To
# plan for a measured speed, pass `faster=1.5` in place of `macs=0.7`. Labels are used only to measure accuracy. This
# page uses the training images, so the measured accuracy is too high. Pass images that the model has not seen, or pass
# `{"train": loader, "test": loader_of_unseen_images}`. attnrx plans on the first and reports accuracy on the second.

# %%
shrunk = rx.shrink(model.eval(), loader, macs=0.7, threads=1)
before, after = (rx.models.family_of(each).costs(each).macs for each in (rx.load(model), shrunk.model))
print(f"at most 70 % of the MACs: {after <= 0.7 * before}")
print("verified:", ", ".join(sorted({finding.check for finding in shrunk.evidence.findings})))

# %% [markdown]
# ## The folder
#
# `shrunk.save` writes a folder with the model, an ONNX file and a script that runs it, the evidence and a report. The
# class names from your image folder are stored with the ONNX file.

# %%
folder = shrunk.save("runs/faster")
print(", ".join(sorted(path.name for path in folder.iterdir() if ".tensors-" not in path.name)))
again = rx.load(folder)
with torch.no_grad():
    print(f"the loaded model answers alike: {torch.equal(again(images), shrunk.model(images))}")
print(rx.exporting.load_exported(folder / "model.onnx").facts["class_names"])

# %% [markdown]
# `python runs/faster/run_model.py IMAGE` classifies a picture with NumPy and ONNX Runtime only.
#
# To use the command line, save your model first:
#
# - A timm model whose head is one linear map: `torch.save(model.state_dict(), "fine_tuned.pt")`, then `attnrx shrink
#   timm:vit_tiny_patch16_224 --weights fine_tuned.pt --data photos --macs 0.7 --out faster`.
# - A transformers model: `model.save_pretrained("FOLDER")`, then `attnrx shrink hf:FOLDER ...`.
# - Any other model: `rx.save(rx.load(model), "mine")`, then `attnrx shrink mine ...`.
#
# ## What can go wrong
#
# - You have few images. attnrx plans on a part of the images and verifies on the rest. With fewer than 1,000 images the
#   intervals are wide, and claims are undecided.
# - Your head has several inputs or outputs (detection, two tasks). See [Use a model of your own](own_model.md).
# - You compress before you fine-tune. Fine-tune first, and then compress. You can train the compressed model further
#   with `rx.train` or your own loop.
