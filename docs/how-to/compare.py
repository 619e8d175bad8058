"""Compares methods at equal MACs and by measured latency, in Python and on the command line."""

# %% [markdown]
# # Compare methods
#
# Which method loses the least at the same cost? A *method* is one way of compressing a model, which you write as text.
# attnrx gives all methods the same diagnosis and measures them on the same images.

# %%
import os

import attnrx as rx
from attnrx_lab.comparison import Method, MethodBench, Rates, compare_methods, compare_speeds, noise_bench

MODEL = os.environ.get("MODEL", "")  # yours: timm:vit_tiny_patch16_224, hf:ID, a folder saved by attnrx
DATA = os.environ.get("DATA", "")  # yours: a folder of images, parquet, or a known name
LAYERS = os.environ.get("LAYERS", "2,3")  # with twelve layers, take 4,7,10

# %%
if MODEL:
    model = rx.load(MODEL)
    _, size, _ = rx.models.family_of(model).input_shape(model)
    splits = rx.adapt_preprocessing(rx.load_data(DATA, image_size=size), model)
else:
    from stand_in import model, splits  # a small ViT for handwritten digits, trained in seconds

# %% [markdown]
# ## Methods
#
# Write a method as `NAME=RULES [repair=STEPS]`, with the rules of `prescribe` (`qk=RULE vo=RULE fc1=RULE fc2=RULE
# tokens=POLICY`). A rule without a map applies to qk. attnrx replaces `{share}` by the share that the method keeps.
# `baseline:NAME` is a published method, implemented as in its paper. To decompose the scores as a tensor, use
# `baseline:tucker`, `baseline:tucker_terms`, or IrrAtt's `qk=shared_rank:{share},form=literal`. Include a control such
# as `random`, because a useful method must beat it.

# %%
methods = [
    Method.parse(text)
    for text in (
        "ranks=qk=total_rank:{share} vo=total_rank:{share} fc1=uniform_rank:{share} fc2=uniform_rank:{share}",
        "svd=baseline:svd",
        f"tome=tokens=tome:{{share}}@{LAYERS}",
        f"random=tokens=random:{{share}}@{LAYERS}",
    )
]

# %% [markdown]
# ## At equal MACs
#
# Every method gets the largest `{share}` that costs no more than 0.8 of the model's MACs. attnrx computes this share by
# formulas before it builds a model. Each model is compared with the original on the same images, and the table shows
# 95 % intervals. No model is fine-tuned.

# %%
calibration = splits.train.take(96)
bench = MethodBench(model, rx.diagnose(model, calibration, batch_size=32), calibration, splits.test)
trials = compare_methods(bench, methods, macs=[0.8], out="comparison.json")
print(trials.to_markdown())

# %% [markdown]
# If a method cannot reach the target, the table lists it with its smallest cost. `comparison.json` contains all
# numbers. To compare at equal shares instead of equal MACs, pass `shares=[0.5]`.
#
# To include a trained model, write the name of its folder as the method: `spot=runs/spot`. Its cost is fixed. Pass its
# share of the MACs as `macs`, e.g. 0.64, to measure the other methods at the same cost. Methods whose MACs differ by at
# most 2 % are compared image by image.
#
# ## Figures
#
# `rx.figures` draws the trade-off between cost and quality with its intervals, and the spectra of the diagnosis. It
# writes SVG and PDF files, and CSV files from which you can draw your own figures. You need `attnrx[figures]`. To draw
# which patches of some images stay, pass `rx.reports.sample_tokens(small, images)`. Here, `small` is a model with a
# token policy, and `images` are e.g. `next(iter(splits.test.take(4).batches(4))).images`.

# %%
drawn = rx.figures(["comparison.json", bench.diagnosis], "figures", formats=["svg", "csv"])
print(*(path.name for path in drawn if path.suffix == ".svg"))

# %% [markdown]
# ## Measured latency
#
# `compare_speeds` times all methods, and the original in its library's own code, in turns. So other load on the machine
# slows all of them alike. The column "ideal" contains the speed-up that the share of the MACs predicts. Timing needs no
# real images, so `noise_bench` uses noise.

# %%
protocol = rx.costs.LatencyProtocol(rounds=10, clock="cpu")  # CPU time; on an idle machine, omit `clock`
rates = Rates(batches=(8,), protocols=(protocol,), macs=(0.8,))
speeds = compare_speeds(noise_bench(model), methods, rates, out="speeds.json")
print(speeds.to_markdown())

# %% [markdown]
# This page's model is so small that function calls take most of its time, so no method makes it faster. Before you
# choose, check the last column on your model, your hardware and your batch size.
#
# To compare at equal latency rather than equal MACs, time several shares with `Rates(..., shares=(0.9, 0.7, 0.5))`.
# Then compare methods whose latency intervals overlap.
#
# ## The same on the command line
#
# ```bash
# attnrx compare timm:vit_tiny_patch16_224 --data path/to/images --macs 0.9,0.8,0.7 --out comparison.json \
#     --methods 'svd=baseline:svd' \
#     'ranks=qk=total_rank:{share} vo=total_rank:{share} fc1=uniform_rank:{share} fc2=uniform_rank:{share}' \
#     'tome=tokens=tome:{share}@4,7,10' 'spot=runs/spot'
# attnrx figures comparison.json --out figures
# ```
#
# ## The table of the field
#
# `attnrx bench` measures many methods at equal budgets, on several tasks. Without `--methods` it compares attnrx's
# plans, token reducers, low ranks, pruning, a lower resolution and the vendor's 8 bits. All methods get the same
# calibration images.
#
# ```bash
# attnrx bench timm:vit_tiny_patch16_224 --data path/to/images --tasks classification,retrieval,dense --out table
# ```
#
# | task | what is measured |
# |---|---|
# | `classification` | accuracy, its change, the share of unchanged answers, the divergence |
# | `retrieval` | how many of an image's 10 nearest neighbours the smaller tower finds |
# | `dense` | cosine and error of the features of all patches |
# | `speed` | only latency (the default without `--data`) |
#
# You set budgets as shares of the MACs (`--macs 0.7,0.5,0.35`), or as measured speeds (`--faster 1.3,1.6 --runtime
# onnx`). `--batches 1,8` adds the latency of every row. If a method cannot reach a budget, its row says so.
#
# Open `table/index.html` in a browser to filter and sort the table. `table/rows` contains a file for every row. If you
# stop the command and run it again, it continues with the next row. `--repeat 10` measures ten rows again with another
# seed, and says for each row whether both intervals overlap.
#
# ## Your method in the table
#
# To add your method to the table, put a function into a file. attnrx calls the function with the model, the calibration
# images and a share of the MACs:
#
# ```python
# import attnrx as rx
# from attnrx_lab.comparison import baseline
#
# @baseline
# def mine(model, images, macs):
#     return rx.shrink(model, images, macs=macs).model
# ```
#
# If you pass the same `--out` as before, the command adds your method's rows to the existing table. To compare with the
# next smaller model, pass its name or folder as a method:
#
# ```bash
# attnrx bench timm:deit_small_patch16_224 --data path/to/images --out table \
#     --plugin mine.py --methods 'mine=baseline:mine' 'smaller=timm:deit_tiny_patch16_224'
# ```
#
# The same command makes the tables of larger models, if you have their images and weights:
#
# ```bash
# for model in deit_small_patch16_224 deit_base_patch16_224 vit_base_patch16_224; do
#     attnrx bench timm:$model --data path/to/imagenet --tasks classification,retrieval,dense --out tables/$model
# done
# for model in vit_base_patch14_dinov2 vit_base_patch16_siglip_224; do  # towers have no classes
#     attnrx bench timm:$model --data path/to/imagenet --tasks retrieval,dense --out tables/$model
# done
# ```
#
# The table does not contain Token Transforming (arXiv 2506.05709), because its abstract does not define its matrices.
