"""The checker of types and shapes of `make test-oldest`: as for pyright, a whole number is a float too."""

import torch
from beartype import BeartypeConf, FrozenDict, beartype

# The sizes of a batch are symbols while torch records a program for batches of any size.
SIZES = FrozenDict({int: int | torch.SymInt})
checked = beartype(conf=BeartypeConf(is_pep484_tower=True, hint_overrides=SIZES))
