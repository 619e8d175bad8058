"""Reproduce a table of a paper: the protocol in seconds on generated images, or in full."""

# %% [markdown]
# # Reproduce a table
#
# Recipes of the three papers train, prescribe, realize and measure again, and print their table beside the paper's
# numbers. `--tiny` runs the whole protocol in seconds on generated images, to show that it runs; it compares only
# numbers that follow from formulas, e.g. MACs. Needs `pip install 'attnrx[lab]'`.

# %%
import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from attnrx.cli import main


def attnrx(*words):
    """Runs a command as in a shell, and returns what it prints."""
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(io.StringIO()):
        assert main([*words]) == 0
    return printed.getvalue()


# %% [markdown]
# ## Which recipes are there?

# %%
recipes = json.loads(attnrx("reproduce", "--json"))["recipes"]
print(", ".join(recipes))

# %% [markdown]
# ## A table in seconds

# %%
attnrx("reproduce", "svda/table1", "--only", "cifar10", "--tiny", "--seeds", "42", "--out", "runs/tiny")
(table,) = Path("runs/tiny").rglob("table1.md")
header, _, row = (line for line in table.read_text().splitlines() if line.startswith("|"))
print("columns:", header.strip("| ").replace(" |", ";"))
print("row:", row.split("|")[1].strip())

# %% [markdown]
# ## In full
#
# On the real data, a table takes from minutes to hours. A training says how long it will take. A stopped command
# (`timeout -s INT 3600 attnrx ...` stops it after an hour) continues where it was. Commands share a folder and its
# runs, so you can run several side by side:
#
# ```bash
# for seed in 42 43 44; do attnrx reproduce svda/table1 --seeds $seed & done; wait    # trains three runs at a time
# attnrx reproduce svda/table1                                                        # makes the table of all three
# attnrx reproduce svda/table1 --only cifar10 --epochs 10 --seeds 42    # shorter than the paper; the table says so
# ```
#
# What came out is in the [results](../results/svda.md#at-the-papers-protocol), beside the paper's numbers. What is
# exact, and what is missing, is [one list](../results/papers.md).
#
# ## What will it take?
#
# `--dry-run` trains nothing. It states every training with its images, steps, operations, and hours on one H100:

# %%
print(attnrx("reproduce", "svda/table1", "--only", "cifar10", "--dry-run"))

# %% [markdown]
# ## On several GPUs
#
# A launcher's processes make every run together: all train, and the first one writes. The batch size is the sum over
# all processes, so the protocol stays the paper's.
#
# ```bash
# torchrun --nproc-per-node 8 -m attnrx reproduce spot/table2 --only deit_small --out runs    # 8 GPUs
# attnrx reproduce spot/table2 --only deit_small --accumulate 4 --out runs                    # 1 GPU, with less memory
# ```
#
# Several machines, launch files and Slurm are on [a page of their own](several_gpus.md).
#
# ## Models and images of yours
#
# ```bash
# attnrx reproduce spot/table4 --only dtd --transfer path/to/dtd --tuned runs/spot    # new heads on your SPOT model
# attnrx reproduce spot/figure3 --only deit_small --data path/to/imagenet --tuned runs/spot    # which patches it keeps
# ```
#
# `--tuned` takes a model with a token policy, so nothing is fine-tuned. Pictures are in the folder of the run. In
# Python, `rx.figures(rx.reports.sample_tokens(model, images), "figures")` draws them for any model that prunes tokens.
#
# ## What can go wrong
#
# - CIFAR-10, FashionMNIST and others are downloaded by `datasets`, or given with `--data PATH`. DTD and EuroSAT are on
#   no hub: the error names where their authors publish them.
# - A recipe differs from the paper where the paper does not state something; the table lists it.
