"""The statistics behind every interval, as pure functions of tensors and counts.

All intervals are 95 % intervals. Resamples are drawn from the images, and both models are evaluated on the same
resamples. scipy is not used, because it is not in the base install and its bootstrap is not studentized. Wilson's
interval and McNemar's test take only 30 lines here.
"""

import math
from collections.abc import Callable, Iterator
from statistics import NormalDist

import numpy as np
import torch

from attnrx.support.estimate import Estimate
from attnrx.support.shapes import Bool, Float, Tensor

LEVEL = 0.95
TAIL, SHORT = (1 - LEVEL) / 2, 70  # the share of each tail, and the number of images that halves it (`studentized`)
DRAWS = 2000  # bootstrap resamples
# The number of elements in one chunk of resampling counts. A chunk takes 64 MiB in float64 for any number of images.
CHUNK = 2**23


def proportion(successes: int, n: int) -> Estimate:
    """Returns a share with its Wilson score interval, which has nonzero width at 0 and 1."""
    # The interval contains all shares that the score test does not reject, given the observed share.
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    share = successes / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2)
    # Rounding must not move an end past the share itself, e.g. at 0 and 1.
    return Estimate(share, min(centre - half, share), max(centre + half, share))


def paired_change(before: Bool[Tensor, "images"], after: Bool[Tensor, "images"], seed: int) -> Estimate:
    """Returns the change of a share, after minus before, with a bootstrap interval over images.

    The result on an image changes by -1, 0 or +1, so resampling images is the same as drawing from a trinomial. The
    trinomial's weights include pseudo-counts of 0.5 losses, 0.5 gains and 1 unchanged result (Agresti and Min, 2005).
    The pseudo-counts give the interval nonzero width even if no result on a small set changes.
    """
    n = before.numel()
    lost, gained = int((before & ~after).sum()), int((~before & after).sum())
    # A resample draws three counts instead of n images.
    weights = np.array([lost + 0.5, gained + 0.5, n - lost - gained + 1.0])
    counts = np.random.default_rng(seed).multinomial(n, weights / weights.sum(), size=DRAWS)
    changes = torch.from_numpy((counts[:, 1] - counts[:, 0]) / n)
    return estimate((gained - lost) / n, changes)


def mcnemar(lost: int, gained: int) -> float:
    """Returns the exact two-sided p-value of McNemar's test that losses and gains are equally likely."""
    n = lost + gained
    # Logarithms are added, because binomial coefficients of many images overflow.
    terms = (
        math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) - n * math.log(2)
        for k in range(min(lost, gained) + 1)
    )
    return min(1.0, 2 * math.fsum(map(math.exp, terms)))


def resampled_means(values: Float[Tensor, "images columns"], seed: int) -> Float[Tensor, "draws columns"]:
    """Returns the column means of bootstrap resamples of the rows. All columns share the resamples."""
    values = values.double().cpu()  # the generator is on the CPU, so resamples are the same for every device
    n = len(values)
    generator = torch.Generator().manual_seed(seed)
    ones, means = torch.ones(1, dtype=torch.float64), []
    for rows in chunks(DRAWS, n):
        # Counts how often every image is drawn, [rows, n]. One matrix product then computes all column means.
        drawn = torch.randint(n, (rows, n), generator=generator)
        counts = torch.zeros(rows, n, dtype=torch.float64).scatter_add_(1, drawn, ones.expand(rows, n))
        means.append(counts @ values / n)
    return torch.cat(means)


def chunks(draws: int, n: int) -> Iterator[int]:
    """Yields the number of resamples in each chunk, so that memory does not grow with the number of images `n`."""
    chunk = max(1, CHUNK // n)
    yield from (min(chunk, draws - start) for start in range(0, draws, chunk))


def estimate(value: float, samples: Float[Tensor, "draws"]) -> Estimate:
    """Returns a value with the percentile interval of its bootstrap samples."""
    low, high = torch.quantile(samples, torch.tensor([TAIL, 1 - TAIL], dtype=samples.dtype)).tolist()
    return Estimate(value, low, high)


def biased_change(value: float, samples: Float[Tensor, "draws"]) -> Estimate:
    """Returns a change, whose estimate may be biased, with an interval from its bootstrap samples.

    If an estimate has a bias, its bootstrap samples differ from the estimate by about the same bias. So percentiles of
    the samples contain the bias twice. The returned interval covers two intervals: the percentile interval without the
    samples' bias, and the basic bootstrap interval, which removes both biases. The returned interval always contains
    the value.
    """
    percentiles, bias = estimate(value, samples), float(samples.mean()) - value
    # The basic interval is the percentile interval, reflected at the value.
    basic = 2 * value - percentiles.high, 2 * value - percentiles.low
    low, high = min(basic[0], percentiles.low - bias), max(basic[1], percentiles.high - bias)
    return Estimate(value, min(low, value), max(high, value))


def mean_estimate(values: Float[Tensor, "images"], seed: int) -> Estimate:
    """Returns the mean over images and its studentized bootstrap interval, clipped at 0 if no value is negative."""
    minimum = 0.0 if bool((values >= 0).all()) else -math.inf
    return studentized(values[:, None], lambda means: means[..., 0], seed, minimum)


def studentized(
    values: Float[Tensor, "images columns"],
    function: Callable[[Float[Tensor, "*draws columns"]], Float[Tensor, "*draws"]],
    seed: int,
    minimum: float = -math.inf,
) -> Estimate:
    """Returns the value of a smooth function of column means over images, with its studentized bootstrap interval.

    The change in every resample is divided by the resample's own standard error, which comes from the delta method
    (Efron and Tibshirani, 1993, section 12.5). If a resample lacks the few images of a heavy tail, both its mean and
    its standard error are small. The quotient reflects this skew, but percentiles of the change do not. For n images,
    each tail of the interval has the probability TAIL * n / (n + SHORT) instead of TAIL. This widens the intervals of
    small samples, because these have too few images from the tail for any bootstrap (benchmarks/coverage.py).

    Args:
        values: One row per image.
        function: A differentiable function that maps column means to the quantity.
        seed: The seed for the resamples.
        minimum: The smallest possible value of the quantity.

    Returns:
        The value with its interval. If all rows are equal, both ends of the interval are the value.
    """
    values = values.double().cpu()
    n, columns = values.shape
    means = values.mean(0)
    centered = values - means  # keeps all digits of the squares below
    squares = (centered[:, :, None] * centered[:, None, :]).flatten(1)  # [images, columns * columns]
    drawn = resampled_means(torch.cat([centered, squares], dim=1), seed)
    shifts = drawn[:, :columns]
    covariances = drawn[:, columns:].unflatten(1, (columns, columns)) - shifts[:, :, None] * shifts[:, None, :]
    value, gradient = _with_gradient(function, means[None])
    samples, gradients = _with_gradient(function, means + shifts)
    error = (centered @ gradient[0]).square().mean().sqrt()
    # There is no error to divide by if all images are equal up to rounding, or if the value is at the end of its range.
    if not (error.isfinite() and error > 1e-14 * values.abs().max()):
        return Estimate(float(value), float(value), float(value))
    errors = (gradients[:, None] @ covariances @ gradients[:, :, None])[:, 0, 0].clamp(min=0).sqrt()
    # A resample of very few images may repeat a single one, and then its own error is zero.
    quotients = (samples - value) / errors.clamp(min=error / 10)
    tail = TAIL * n / (n + SHORT)
    ends = torch.quantile(quotients[quotients.isfinite()], torch.tensor([tail, 1 - tail], dtype=torch.float64))
    low, high = sorted((value - error * ends).tolist())
    return Estimate(float(value), max(minimum, min(low, float(value))), max(high, float(value)))


def _with_gradient(
    function: Callable[[Tensor], Tensor], means: Float[Tensor, "draws columns"]
) -> tuple[Float[Tensor, "draws"], Float[Tensor, "draws columns"]]:
    with torch.enable_grad():
        means = means.clone().requires_grad_()
        found = function(means)
        (gradient,) = torch.autograd.grad(found.sum(), means)
    return found.detach(), gradient


def mean_share(shares: Float[Tensor, "images"], seed: int) -> Estimate:
    """Returns the mean of shares in [0, 1] with its interval.

    If all shares are 0 or 1, the interval comes from `proportion`. Otherwise it is a bootstrap interval. The resamples
    then include two pseudo-images with the shares 0 and 1, so the interval has nonzero width even if all shares are
    equal.
    """
    if bool(((shares == 0) | (shares == 1)).all()):
        return proportion(int(shares.sum()), len(shares))
    pseudo, mean = torch.tensor([0.0, 1.0], dtype=torch.float64), float(shares.double().mean())
    found = estimate(mean, resampled_means(torch.cat([shares.double().cpu(), pseudo])[:, None], seed)[:, 0])
    return Estimate(mean, min(found.low, mean), max(found.high, mean))


def mean_change(changes: Float[Tensor, "images"], seed: int, unit: float = 1.0) -> Estimate:
    """Returns the mean change with its interval, like `paired_change`, but for changes of any size.

    `unit` is the typical size of a change. Two pseudo-images, which change by plus and minus unit * sqrt(0.5), add the
    same variance as the pseudo-counts of `paired_change`.
    """
    pseudo = unit * torch.tensor([0.5**0.5, -(0.5**0.5)], dtype=torch.float64)
    samples = resampled_means(torch.cat([changes.double(), pseudo])[:, None], seed)[:, 0]
    return estimate(float(changes.double().mean()), samples)


def metric_change(before: Float[Tensor, "images"], after: Float[Tensor, "images"], seed: int) -> Estimate:
    """Returns a metric's mean change, after minus before, with its interval over images. The metric may have any unit.

    If the metric changes for every image, the interval is the studentized bootstrap interval. Otherwise `mean_change`
    computes the interval, because a metric that changes for only some images behaves like a decision. An example is the
    share of detected objects if an image contains only a few objects. The `unit` is the root mean square of the nonzero
    changes. If no image changes, the `unit` is the smallest difference between two images' values, so that the interval
    has nonzero width.
    """
    changes = (after - before).double()
    if bool((changes != 0).all()):
        return mean_estimate(changes, seed)
    found, values = changes[changes != 0], torch.cat([before, after]).double().unique()
    unit = found.square().mean().sqrt() if len(found) else values.diff().min() if len(values) > 1 else torch.zeros(())
    return mean_change(changes, seed, float(unit))


def calibration_gaps(
    confidence: Float[Tensor, "images"], correct: Bool[Tensor, "images"], bins: int
) -> Float[Tensor, "images bins"]:
    """Returns a matrix of zeros, except for each image's confidence minus correctness in the column of its bin."""
    # The gaps are kept per image, [images, bins], because a resample's calibration error needs its own column means.
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)[1:-1]
    column = torch.bucketize(confidence.double(), edges)  # a confidence on an edge belongs to the lower bin
    gap = confidence.double() - correct.double()
    return torch.zeros(len(gap), bins, dtype=torch.float64).scatter_(1, column[:, None], gap[:, None])


def calibration_error(mean_gaps: Float[Tensor, "*draws bins"]) -> Float[Tensor, "*draws"]:
    """Returns the expected calibration error, the sum over bins of |share x (confidence - accuracy)|."""
    return mean_gaps.abs().sum(-1)


def calibration_interval(mean_gaps: Float[Tensor, "bins"], resampled_gaps: Float[Tensor, "draws bins"]) -> Estimate:
    """Returns the binned expected calibration error, with an interval that covers the population's error.

    The calibration error is a sum of magnitudes, so noise increases it. On a small image set, even a perfectly
    calibrated model has an error well above zero. Resamples have an even larger error, so their percentiles may exclude
    the value itself.

    By the triangle inequality, the sample's error differs from the population's error by at most the sum of the bins'
    absolute changes. A quantile of this sum, over resamples, is the distance from the value to the lower end. The upper
    end is as far above the value as the resamples' lower percentile is below their mean. The upper end is not corrected
    for the bias. So the interval is conservative, and it contains the value.
    """
    value, errors = float(calibration_error(mean_gaps)), calibration_error(resampled_gaps)
    distances = calibration_error(resampled_gaps - mean_gaps)
    below = float(errors.mean()) - estimate(value, errors).low
    # An error cannot exceed 1.
    return Estimate(value, max(0.0, value - estimate(value, distances).high), min(1.0, value + max(0.0, below)))
