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
# accelerate launch --num_processes 4 -m attnrx reproduce spot/table2 --only deit_small --out runs    # 4 GPUs
# torchrun --nproc-per-node 8 -m attnrx reproduce spot/table2 --only deit_small --out runs            # 8 GPUs
# accelerate launch --num_machines 2 --machine_rank RANK --main_process_ip HOST --main_process_port 29500 \
#     --num_processes 16 -m attnrx reproduce spot/table2 --only deit_small --out /shared/runs         # 2 machines
# ```
#
# On several machines, run the command on each one with its own `RANK` and the same shared folder: every process reads
# the results there. Repeat the command to continue a stopped run. `attnrx train --parallel fsdp` divides a model's
# weights among the GPUs; recipes keep a copy on each.
#
# ## What can go wrong
#
# - CIFAR-10, FashionMNIST and others are downloaded by `datasets`, or given with `--data PATH`.
# - A recipe differs from the paper where the paper does not state something; the table lists it.
