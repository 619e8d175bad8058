"""Uses your own data in attnrx: a DataLoader, a dataset, batches, a tensor or a Hugging Face dataset."""

# %% [markdown]
# # Use your own data
#
# Functions that need images, such as `rx.diagnose` and `rx.verify`, accept a `DataLoader`, a dataset, a list of
# batches, a tensor or a Hugging Face dataset. You need labels only to measure accuracy.

# %%
import torch
from stand_in import model, splits  # a small ViT for handwritten digits, trained in seconds
from torch.utils.data import DataLoader, TensorDataset

import attnrx as rx

# Replace these lines by your own loader. Here it yields the test images as tensors on the model's scale, and their
# labels.
batches = list(splits.test.batches(64))
images = torch.cat([batch.images for batch in batches])
labels = torch.cat([batch.labels for batch in batches])
loader = DataLoader(TensorDataset(images, labels), batch_size=32)

# %% [markdown]
# ## Images and labels
#
# A loader yields pairs `(images, labels)`, or mappings with keys such as `pixel_values` and `labels`. Images are float
# tensors, normalized as the model expects. If they seem to have another scale, you get a `ScaleWarning`.

# %%
diagnosis = rx.diagnose(model, loader)
slim = rx.realize(model, rx.prescribe(diagnosis, "qk=total_rank:0.75"))
evidence = rx.verify(slim, model, loader, [rx.checks.Accuracy()])
for finding in evidence.findings:
    print(f"{finding.claim}: {finding.value:.1f} {finding.unit}")

# %% [markdown]
# ## Images without labels
#
# If your images have no labels, `rx.verify` skips the standard checks that need labels. The evidence lists the skipped
# checks.

# %%
evidence = rx.verify(slim, model, images)
print(evidence.about["notes"][0])

# %% [markdown]
# ## Pictures
#
# The items of a dataset may be PIL pictures, e.g. from `torchvision.datasets.ImageFolder("photos")` or
# `datasets.load_dataset("imagefolder", data_dir="photos")["train"]`. attnrx resizes, crops and normalizes pictures with
# timm's transform or with the image processor of transformers, depending on the model. For other models, it prepares
# pictures in the same way as `rx.load_data`.
#
# ## Training loaders
#
# You can pass a training loader with random crops and shuffling. Each call to attnrx reads the data once, and all of
# its passes see the same images. Random numbers are drawn from the call's `seed`. If reading the data again would give
# other images, a note in the evidence says so. `rx.shrink` divides the images by content, so it never verifies on an
# image that it planned on.
#
# attnrx reads at most 50,000 images, or 10,000 from an iterable without a length. It stores 8-bit images with one byte
# per value. If the images need more than 2 GiB, it stores them in a temporary file.
#
# ## Training
#
# Pass `rx.train` a mapping from split names to data. The training data must have a length and an index, because
# `rx.train` draws a new order for every epoch and resumes an interrupted run exactly.

# %%
config = rx.TrainingConfig(epochs=1, batch_size=32, learning_rate=1e-4, precision="fp32")
data = {"train": loader, "validation": TensorDataset(images, labels)}
run = rx.train(slim, data, config, "runs/own-data")
print(f"{len(run.history)} epoch")

# %% [markdown]
# ## What can go wrong
#
# - attnrx refuses images of type `uint8`. Divide them by 255 and normalize them.
# - attnrx refuses a generator, because it can be read only once. Pass a list or a `DataLoader`.
# - `rx.train` does not accept a `DataLoader` with its own sampler or over an `IterableDataset`, because it needs its
#   own order. All other functions accept such loaders.
# - A model that was fitted to images of few classes loses more on other classes. To reduce this loss, add images of
#   other classes ([measured](../results/hidden.md#does-it-hold-for-other-classes)). Pass `{"train":
#   ConcatDataset([yours, others]), "test": ...}`, and label the additional images with -1.
# - If the dataset lists its labels (`targets`), `images=N` and `take(N)` select images from all classes. Otherwise they
#   select evenly spaced rows, because datasets are often sorted by class.
