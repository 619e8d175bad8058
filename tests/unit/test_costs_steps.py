"""Steps of the hardware: a rank between two of them is rounded to what costs no more."""

from pathlib import Path

import pytest
import torch

from attnrx.costs import Steps, measured_steps, rank_steps
from attnrx.errors import InvalidInput

# Sizes up to 16 cost one, up to 32 two, and 40 is a bad size.
TABLE = Steps((8, 12, 16, 24, 32, 40, 48), (1.0, 1.01, 1.0, 2.0, 2.02, 3.5, 3.0))


@pytest.mark.parametrize(("size", "most", "rounded"), [(8, None, 16), (5, None, 16), (9, 12, 12), (17, None, 32)])
def test_a_size_is_rounded_up_to_what_costs_no_more(size: int, most: int | None, rounded: int) -> None:
    assert TABLE.rounded(size, most) == rounded


def test_a_bad_size_is_left_for_a_larger_one_that_is_cheaper() -> None:
    assert TABLE.rounded(40) == 48 and TABLE.rounded(48) == 48 and TABLE.rounded(60) == 60
    assert TABLE.cost(96) == 6.0 and TABLE.cost(20) == 2.0


@pytest.mark.parametrize("wrong", [((), ()), ((2, 1), (1.0, 1.0)), ((1,), (0.0,)), ((1, 2), (1.0,))])
def test_wrong_tables_are_refused(wrong: tuple[tuple[int, ...], tuple[float, ...]]) -> None:
    with pytest.raises(InvalidInput, match="rising sizes"):
        Steps(*wrong)


def test_steps_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNRX_CACHE", str(tmp_path))
    first = measured_steps(16, (4, 8), tokens=5)
    assert first.sizes == (4, 8)
    requested: list[list[int]] = []
    measure = rank_steps._seconds
    monkeypatch.setattr(rank_steps, "_seconds", lambda *given: (requested.append(list(given[1])), measure(*given))[1])
    assert measured_steps(16, (8, 4), tokens=5) == first and not requested
    assert measured_steps(16, (4, 12), tokens=5).seconds[0] == first.seconds[0] and requested == [[12]]
    measured_steps(16, (4,), tokens=5, dtype=torch.bfloat16)
    assert requested[1:] == [[4]]
    monkeypatch.setenv("ATTNRX_MEASURE", "0")
    with pytest.raises(InvalidInput, match="never measured"):
        measured_steps(16, (99,), tokens=5)
    with pytest.raises(InvalidInput, match="at least one"):
        measured_steps(16, ())
