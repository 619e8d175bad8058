"""Use your own data: every verb takes a DataLoader, a dataset, batches, a tensor or a Hugging Face dataset."""

# %% [markdown]
# # Use your own data
#
# Every verb takes a `DataLoader`, a dataset, a list of batches, a tensor or a Hugging Face dataset. You need labels
# only where accuracy is measured.

# %%
import torch
from stand_in import model, splits  # a small ViT for handwritten digits, trained in seconds
from torch.utils.data import DataLoader, TensorDataset

import attnrx as rx

# Replace this by your own loader: the test images as tensors on the model's scale, and their labels.
batches = list(splits.test.batches(64))
images = torch.cat([batch.images for batch in batches])
labels = torch.cat([batch.labels for batch in batches])
loader = DataLoader(TensorDataset(images, labels), batch_size=32)

# %% [markdown]
# ## Images and labels
#
# A batch is a pair `(images, labels)`, or a mapping with keys such as `pixel_values` and `labels`. Images are float
# tensors on the scale that the model was trained with. If they seem to have another scale, you get a `ScaleWarning`.

# %%
diagnosis = rx.diagnose(model, loader)
slim = rx.realize(model, rx.prescribe(diagnosis, "qk=total_rank:0.75"))
evidence = rx.verify(slim, model, loader, [rx.checks.Accuracy()])
for finding in evidence.findings:
    print(f"{finding.claim}: {finding.value:.1f} {finding.unit}")

# %% [markdown]
# ## Images without labels
#
# Without labels, attnrx skips the standard checks that need them, and the evidence lists the skipped checks.

# %%
evidence = rx.verify(slim, model, images)
print(evidence.about["notes"][0])

# %% [markdown]
# ## Pictures
#
# Items may be PIL pictures, such as those from `torchvision.datasets.ImageFolder("photos")` or
# `datasets.load_dataset("imagefolder", data_dir="photos")["train"]`. The model's own library resizes, crops and
# normalizes them with timm's transform, or with the image processor of transformers. For other models, attnrx prepares
# them in the same way as `rx.load_data`.
#
# ## Training loaders
#
# A call reads the data once, and all of its passes see the same images. Random crops, shuffling and samplers are drawn
# once, from the call's `seed`. If reading the data again would give other images, a note in the evidence says so.
# `rx.shrink` divides the images by content, so it never verifies on an image that it planned on. 8-bit images take one
# byte per value. attnrx writes more than 2 GiB to a temporary file. It reads at most 50,000 images, or 10,000 from an
# iterable without a length.
#
# ## Training
#
# `rx.train` takes a mapping from split names to data. It draws a new order for every epoch and resumes an interrupted
# run exactly. So the training data must have a length and an index.

# %%
config = rx.TrainingConfig(epochs=1, batch_size=32, learning_rate=1e-4, precision="fp32")
data = {"train": loader, "validation": TensorDataset(images, labels)}
run = rx.train(slim, data, config, "runs/own-data")
print(f"{len(run.history)} epoch")

# %% [markdown]
# ## What can go wrong
#
# - attnrx refuses images of type `uint8`. Divide them by 255 and normalize them.
# - It refuses a generator, because you can read a generator only once. Pass a list or a `DataLoader`.
# - A `DataLoader` with its own sampler, or over an `IterableDataset`, keeps its own order. Every verb except `rx.train`
#   accepts it.
# - A model that was fitted to images of few classes loses more on other classes. To reduce this loss, add images of
#   other classes ([measured](../results/hidden.md#does-it-hold-for-other-classes)). Pass `{"train":
#   ConcatDataset([yours, others]), "test": ...}`, with the label -1 for the others.
# - `images=N` and `take(N)` select images from all classes if the dataset lists its labels (`targets`). Otherwise they
#   take evenly spaced rows, because datasets are often sorted by class.
