"""The checker of types and shapes of `make test-all`: as for pyright, a whole number is a float too."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
