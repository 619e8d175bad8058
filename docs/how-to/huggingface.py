"""Makes a transformers model smaller, and uses it in `pipeline` and `Trainer` as before."""

# %% [markdown]
# # Models and pipelines of transformers
#
# You have an image model from transformers, and want a smaller model that still works with `pipeline` and `Trainer`.
# You need `pip install 'attnrx[huggingface,train]'`.

# %%
import numpy
import torch
import transformers
from PIL import Image

import attnrx as rx

transformers.logging.set_verbosity_error()

# %% [markdown]
# ## Load
#
# `rx.load("hf:google/vit-base-patch16-224")` loads a model from the hub. `rx.load("hf:FOLDER")` loads a model that
# `save_pretrained` wrote. `rx.load(model)` returns a copy of a model in memory, after a test on random images that the
# copy has the same outputs. The example is a small model with random weights, so that the page runs without a download.

# %%
config = transformers.ViTConfig(
    hidden_size=48,
    num_hidden_layers=4,
    num_attention_heads=3,
    intermediate_size=96,
    image_size=32,
    patch_size=8,
    id2label={0: "cat", 1: "dog", 2: "bird"},
)
torch.manual_seed(0)
original = transformers.ViTForImageClassification(config).eval()
model = rx.load(original)

# %% [markdown]
# ## Make it smaller
#
# `rx.shrink(original, loader, macs=0.6)` chooses ranks, units and tokens for a target. On this page, you choose them
# with `rx.prescribe`. Your loader may yield the output of a processor: `{"pixel_values": ..., "labels": ...}`.

# %%
processor = transformers.ViTImageProcessor(size={"height": 32, "width": 32})
noise = numpy.random.default_rng(0).integers(0, 256, (32, 32, 32, 3), dtype=numpy.uint8)
pictures = [Image.fromarray(pixels) for pixels in noise]
pixels = processor(pictures, return_tensors="pt")["pixel_values"]
diagnosis = rx.diagnose(model, [(pixels, torch.zeros(len(pixels), dtype=torch.long))], moments=True)
prescription = rx.prescribe(diagnosis, "qk=total_rank:0.5 hidden=uniform_rank:0.5 tokens=ward:0.7@3")
small = rx.realize(model, prescription)
before, after = (rx.models.family_of(each).costs(each).macs for each in (model, small))
print(f"{100 * after / before:.0f} % of the MACs")

# %% [markdown]
# ## pipeline
#
# To use the smaller model in a pipeline, load the saved folder with `rx.load`, and pass the model together with the
# original's processor. The pipeline reads the label names from the model's configuration.

# %%
rx.save(small, "runs/small-hf")
small = rx.load("runs/small-hf")
classify = transformers.pipeline("image-classification", model=small, image_processor=processor, device="cpu")
answers = classify(pictures[0], top_k=3)
print(sorted(answer["label"] for answer in answers))

# %% [markdown]
# ## Trainer
#
# Like any transformers model, the smaller model takes `pixel_values` and `labels`, and returns logits and a loss. So
# `Trainer` can evaluate and fine-tune it. Ranks and the token policy stay the same. (`rx.distill` and `rx.train` fit
# the model without labels.)

# %%
rows = [{"pixel_values": image, "labels": label % 3} for label, image in enumerate(pixels)]
settings = transformers.TrainingArguments(
    output_dir="runs/trainer",
    max_steps=2,
    per_device_train_batch_size=8,
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
    save_strategy="no",
    logging_strategy="no",
)
trainer = transformers.Trainer(model=small, args=settings, train_dataset=rows, eval_dataset=rows)
trainer.train()
print(sorted(name for name in trainer.evaluate() if name == "eval_loss"))
rx.save(trainer.model.eval(), "runs/fine-tuned")

# %% [markdown]
# ## What can go wrong
#
# - `from_pretrained` cannot load the folder. `type(small)` is `transformers.ViTForImageClassification`, but its weights
#   have other shapes. Load the folder with `rx.load`, which also loads the folders that `trainer.save_model(folder)`
#   and the checkpoints of `Trainer` write.
# - Attention with reduced ranks returns no attention weights (`output_attentions=True`).
# - attnrx does not save the processor with the model. Keep the original's processor, or its folder.
# - If `rx.load` cannot copy a model exactly, it refuses the model and names the block or the feature ([which classes
#   are read](../models.md)).
# - Dense tasks need all patches. Prune or merge tokens only if the class token gives the answer.
