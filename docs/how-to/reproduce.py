"""Reproduces a table from a paper, in full or in seconds on generated images."""

# %% [markdown]
# # Reproduce a table
#
# `attnrx reproduce` repeats the experiments of three papers (SVDA, IrrAtt and SPOT). A *recipe* trains, prescribes,
# realizes and measures, and prints a table with our numbers and the paper's. To test a recipe, pass `--tiny`, which
# runs the whole protocol in seconds on generated images. A tiny run compares only numbers that follow from formulas,
# such as MACs. You need `pip install 'attnrx[lab]'`.

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
# On the real data, a table takes from minutes to hours. Each training prints how long it will take. If you stop a
# command and run it again, it continues where it stopped (`timeout -s INT 3600 attnrx ...` stops it after an hour).
# Several commands can use the same folder at the same time, and share its runs:
#
# ```bash
# for seed in 42 43 44; do attnrx reproduce svda/table1 --seeds $seed & done; wait    # trains three runs at a time
# attnrx reproduce svda/table1                                                        # makes the table of all three
# attnrx reproduce svda/table1 --only cifar10 --epochs 10 --seeds 42    # shorter than in the paper, as the table notes
# ```
#
# The [results](../results/svda.md#at-the-papers-protocol) show our numbers and the paper's in one table. [One
# list](../results/papers.md) says which parts of the papers are exact and which are missing.
#
# ## What will it take?
#
# `--dry-run` lists every training of a recipe with its images, steps, operations, and hours on one H100, without
# starting it:

# %%
print(attnrx("reproduce", "svda/table1", "--only", "cifar10", "--dry-run"))

# %% [markdown]
# ## On several GPUs
#
# If you start a recipe with a launcher such as `torchrun`, all processes train together and the first process writes
# the results. The batch size is the number of images over all processes, so the protocol is still the paper's.
#
# ```bash
# torchrun --nproc-per-node 8 -m attnrx reproduce spot/table2 --only deit_small --out runs    # 8 GPUs
# attnrx reproduce spot/table2 --only deit_small --accumulate 4 --out runs                    # 1 GPU, with less memory
# ```
#
# For several machines, launch files and Slurm, see [Train on several GPUs](several_gpus.md).
#
# ## Models and images of yours
#
# ```bash
# attnrx reproduce spot/table4 --only dtd --transfer path/to/dtd --tuned runs/spot    # new heads on your SPOT model
# attnrx reproduce spot/figure3 --only deit_small --data path/to/imagenet --tuned runs/spot    # which patches it keeps
# ```
#
# With `--tuned`, you pass a model that already has a token policy, so the command does not fine-tune a model. It writes
# its pictures to the folder of the run. In Python, `rx.figures(rx.reports.sample_tokens(model, images), "figures")`
# draws such pictures for any model that prunes tokens.
#
# ## What can go wrong
#
# - You have no access to the hub, from which `datasets` downloads CIFAR-10, FashionMNIST and others. Pass your copy
#   with `--data PATH`. DTD and EuroSAT are not on the hub, and the error says where their authors publish them.
# - The paper does not mention a setting, so the recipe chooses a value that may differ from the paper's. The table
#   lists all such settings.
