"""Second moments (Gram matrices): validation, spectra and factors."""

import torch

from attnrx.errors import InvalidInput
from attnrx.shapes import Float, Tensor

# Asymmetries and negative eigenvalues up to this share of a Gram's size are rounding (float32 sums).
TOLERANCE = 1e-5


def checked_gram(gram: Float[Tensor, "heads d d"], what: str) -> Float[Tensor, "heads d d"]:
    """Returns the symmetric part in float64; raises InvalidInput if it is not finite, square or symmetric."""
    require_finite(gram, what)
    if gram.shape[-1] != gram.shape[-2]:
        raise InvalidInput(f"the {what} must be square, found {list(gram.shape)}.")
    gram = gram.detach().double()
    if bool(((gram - gram.mT).abs().flatten(1) > TOLERANCE * _size(gram)).any()):
        raise InvalidInput(f"the {what} is not symmetric; give second moments, features^T features.")
    return (gram + gram.mT) / 2


def gram_spectrum(
    gram: Float[Tensor, "heads d d"], what: str
) -> tuple[Float[Tensor, "heads d"], Float[Tensor, "heads d d"]]:
    """Returns the eigenvalues of a Gram, descending and none negative, and its eigenvectors as columns."""
    gram = checked_gram(gram, what)
    values, vectors = torch.linalg.eigh(gram)
    _require_semidefinite(values, gram, what)
    return values.flip(-1).clamp_min(0), vectors.flip(-1)


def gram_factor(gram: Float[Tensor, "heads d d"], what: str) -> Float[Tensor, "heads d d"]:
    """Returns R with R^T R = gram, from the correlations, so that badly scaled features keep their precision."""
    epsilon = torch.finfo(gram.dtype).eps
    gram = checked_gram(gram, what)
    if gram.numel() == 0:
        return gram
    _require_semidefinite(torch.linalg.eigvalsh(gram), gram, what)
    # The diagonal of a difference of moments can be slightly negative.
    spread = gram.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    unit = torch.where(spread > 0, 1 / spread, 0)
    values, vectors = torch.linalg.eigh(gram * unit[:, :, None] * unit[:, None, :])
    # Eigenvalues below the rounding of the correlations, in the precision of the given Gram, are noise.
    cut = gram.shape[-1] * epsilon * values.amax(-1, keepdim=True)
    root = torch.where(values > cut, values, 0).sqrt()
    return root[:, :, None] * vectors.mT * spread[:, None, :]


def require_finite(values: Tensor, what: str) -> None:
    """Raises InvalidInput if a value is infinite or NaN."""
    if not bool(torch.isfinite(values).all()):
        raise InvalidInput(f"the {what} holds values that are not finite; check its computation for an overflow.")


def _require_semidefinite(values: Float[Tensor, "heads d"], gram: Float[Tensor, "heads d d"], what: str) -> None:
    if bool((values < -TOLERANCE * gram.shape[-1] * _size(gram)).any()):
        raise InvalidInput(f"the {what} has negative eigenvalues; give second moments, features^T features.")


def _size(gram: Float[Tensor, "heads d d"]) -> Float[Tensor, "heads 1"]:
    """Returns the largest entry of each Gram, 0 if it is empty."""
    return gram.abs().flatten(1).amax(1, keepdim=True) if gram.numel() else gram.new_zeros(gram.shape[0], 1)
