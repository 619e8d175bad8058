"""Use your own data: every verb takes a DataLoader, a dataset, batches, a tensor or a Hugging Face dataset."""

# %% [markdown]
# # Use your own data
#
# Every verb takes a `DataLoader`, a dataset, a list of batches, a tensor or a Hugging Face dataset. Labels are needed
# only where accuracy is measured.

# %%
import torch
from stand_in import model, splits  # a small ViT for handwritten digits, trained in seconds
from torch.utils.data import DataLoader, TensorDataset

import attnrx as rx

# In place of your own loader: the test images as tensors on the model's scale, and their labels.
batches = list(splits.test.batches(64))
images = torch.cat([batch.images for batch in batches])
labels = torch.cat([batch.labels for batch in batches])
loader = DataLoader(TensorDataset(images, labels), batch_size=32)

# %% [markdown]
# ## Images and labels
#
# A batch is a pair `(images, labels)`, or a mapping with a key such as `pixel_values` and one such as `labels`. Images
# are float tensors on the scale that the model was trained with; otherwise there is a `ScaleWarning`.

# %%
diagnosis = rx.diagnose(model, loader)
slim = rx.realize(model, rx.prescribe(diagnosis, "qk=total_rank:0.75"))
evidence = rx.verify(slim, model, loader, [rx.checks.Accuracy()])
for finding in evidence.findings:
    print(f"{finding.claim}: {finding.value:.1f} {finding.unit}")

# %% [markdown]
# ## Images without labels
#
# Without labels, the standard checks that need them are skipped, and the evidence lists them.

# %%
evidence = rx.verify(slim, model, images)
print(evidence.about["notes"][0])

# %% [markdown]
# ## Pictures
#
# Items may be PIL pictures, as `torchvision.datasets.ImageFolder("photos")` or `datasets.load_dataset("imagefolder",
# data_dir="photos")["train"]` yield them. The model's own library resizes, crops and normalizes them: timm's transform,
# or the image processor of transformers. Other models follow `rx.load_data`.
#
# ## Training loaders
#
# A call reads the data once, and all of its passes see the same images: random crops, shuffling and samplers are drawn
# once, from its `seed`. If another reading would give other images, a note in the evidence says so. `rx.shrink` divides
# the images by content, so no image is both planned and verified on. Images of 8-bit pixels take a byte per value; more
# than 2 GiB are held in a temporary file. At most 50,000 images are read, 10,000 of an iterable without a length.
#
# ## Training
#
# `rx.train` takes a mapping from split names to data. It draws a new order for every epoch and resumes an interrupted
# run exactly, so the training data must have a length and an index.

# %%
config = rx.TrainingConfig(epochs=1, batch_size=32, learning_rate=1e-4, precision="fp32")
data = {"train": loader, "validation": TensorDataset(images, labels)}
run = rx.train(slim, data, config, "runs/own-data")
print(f"{len(run.history)} epoch")

# %% [markdown]
# ## What can go wrong
#
# - Images of type `uint8` are refused: divide them by 255 and normalize them.
# - A generator is refused, because it can be read only once: give a list or a `DataLoader`.
# - A `DataLoader` with its own sampler, or over an `IterableDataset`, is iterated in its own order; every verb except
#   `rx.train` takes it.
# - A fit to images of few classes loses more on other classes. Add images of other classes to lower that loss
#   ([measured](../results/hidden.md#does-it-hold-for-other-classes)). Pass `{"train": ConcatDataset([yours, others]),
#   "test": ...}` with the label -1 for them.
# - `images=N` and `take(N)` select images of all classes if the dataset lists its labels (`targets`), otherwise evenly
#   spaced rows: datasets are often sorted by class.
