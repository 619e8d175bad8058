"""The indicators of SVDA (Sections 3.4 to 3.7), each against a slow transcription of its equation."""

import math

import torch

from attnrx.decide.diagnostics import (
    CentredMoment,
    effective_rank,
    energy,
    entropy,
    key_covariances,
    query_grams,
    selectivity,
)
from attnrx_lab.perturbation import response
from attnrx_lab.redundancy import (
    active_directions,
    alignment,
    output_similarity,
    sensitivity,
    sparsity,
    spectral_redundancy,
)

STRENGTH = torch.tensor(
    [
        [0.3, -1.7, 0.02, 2.5, -0.4],
        [1.0, 1.0, 1.0, 1.0, 1.0],
        [0.0, 0.0, -3.0, 0.0, 0.0],
        [1e-3, -2.0, 0.19, 0.21, 4.0],
    ],
    dtype=torch.float64,
)


def close(found: torch.Tensor, expected: float | list[float] | torch.Tensor) -> None:
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-14)


def test_equations_22_to_24() -> None:
    for head, sigma in enumerate(STRENGTH.tolist()):
        p = [s**2 / sum(t**2 for t in sigma) for s in sigma]
        H = -sum(q * math.log(q) for q in p if q)
        close(energy(STRENGTH)[head], p)
        close(entropy(STRENGTH)[head], H)
        close(effective_rank(STRENGTH)[head], math.exp(H))


def test_equation_29() -> None:
    for head, sigma in enumerate(STRENGTH.tolist()):
        limit = 0.1 * max(abs(s) for s in sigma)
        close(sparsity(STRENGTH)[head], sum(abs(s) < limit for s in sigma) / len(sigma))


def test_equation_30() -> None:
    for head, sigma in enumerate(STRENGTH.tolist()):
        limit = 0.1 * max(abs(s) for s in sigma)
        close(active_directions(STRENGTH)[head], float(sum(abs(s) >= limit for s in sigma)))
    assert active_directions(torch.zeros(2, 3)).tolist() == [0, 0]


def test_equation_33() -> None:
    before, after = torch.rand(2, 3, 2, 4, 4)
    for image in range(3):
        for head in range(2):
            squares = [(before[image, head, i, j] - after[image, head, i, j]) ** 2 for i in range(4) for j in range(4)]
            close(response(before, after)[image, head], math.sqrt(sum(squares)))


def test_proposition_4() -> None:
    scale = 5**-0.5
    constants = sensitivity(STRENGTH, scale)
    ratios = []
    for head, sigma in enumerate(STRENGTH):
        for draw in range(20):
            size = 10.0 ** -(draw % 4)
            rows = torch.nn.functional.normalize(torch.randn(4, 7, 5), dim=-1)
            Q, K = rows[0], rows[1]
            Q2, K2 = (
                torch.nn.functional.normalize(old + size * new, dim=-1) for old, new in ((Q, rows[2]), (K, rows[3]))
            )
            change = torch.linalg.matrix_norm(scale * (Q2 * sigma @ K2.T - Q * sigma @ K.T))
            moved = torch.linalg.matrix_norm(Q2 - Q) * torch.linalg.matrix_norm(K2, 2)
            moved += torch.linalg.matrix_norm(Q, 2) * torch.linalg.matrix_norm(K2 - K)
            ratios.append(change / (constants[head] * moved))
    assert max(ratios) <= 1
    assert max(ratios) > 0.1  # a bound that is nowhere near would prove nothing


def test_equation_43() -> None:
    found = spectral_redundancy(STRENGTH)
    for g, first in enumerate(STRENGTH.tolist()):
        for h, second in enumerate(STRENGTH.tolist()):
            product = sum(abs(a) * abs(b) for a, b in zip(first, second, strict=True))
            close(found[g, h], product / math.sqrt(sum(a * a for a in first) * sum(b * b for b in second)))


def test_alignment_and_selectivity() -> None:
    query, key = torch.randn(2, 3, 4, 2, 5) + 0.5
    attention = torch.softmax(3 * torch.randn(3, 2, 4, 4), -1)
    for head in range(2):
        cosines, selective = [], []
        for b in range(3):
            for i in range(4):
                row = attention[b, head, i].tolist()
                selective.append(1 + sum(a * math.log(a) for a in row) / math.log(4))
                for j in range(4):
                    q, k = query[b, i, head], key[b, j, head]
                    cosines.append(float(q @ k / (q.norm() * k.norm())))
        close(alignment(query, key)[head], sum(cosines) / len(cosines))
        close(selectivity(attention)[head], sum(selective) / len(selective))


def test_moments_of_query_and_key() -> None:
    rows = torch.randn(3, 4, 2, 5) + 1
    for b in range(3):
        for head in range(2):
            own = rows[b, :, head]
            close(query_grams(rows)[b, head], sum(torch.outer(row, row) for row in own) / 4)
            close(key_covariances(rows)[b, head], torch.cov(own.T, correction=0))


def test_output_similarity_of_what_heads_add() -> None:
    output, readout = torch.randn(3, 4, 5, 2) + 2, torch.randn(4, 2, 6)
    moment = CentredMoment()
    moment.add(output.transpose(1, 2).flatten(2).flatten(0, 1))
    added = torch.einsum("bhtd,hdw->hbtw", output, readout).flatten(1, 2)
    added = (added - added.mean(1, keepdim=True)).flatten(1)
    expected = torch.nn.functional.cosine_similarity(added[:, None], added[None], dim=-1)
    close(output_similarity(moment.value, readout), expected)
