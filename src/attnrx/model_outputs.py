"""The kinds of outputs (logits of classes, one binary logit, embeddings), and how those of two models are compared."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import nn

from attnrx.models import FAMILIES
from attnrx.shapes import Float, Int, Tensor

# Images among which the nearest neighbours of an embedding are sought. A neighbour is harder to keep among more images,
# so that the number is fixed: results on different numbers of images can be compared.
GROUP = 64


class OutputKind(ABC):
    """How outputs are compared: a divergence per image, and a decision per image that both models make.

    `noun`, `distance`, `decision` and `accuracy` are the words of findings, `columns` those of tables for accuracy and
    divergence; `unit` is that of the divergence, and `doubt` a divergence at which a decision may change.
    """

    name: ClassVar[str]
    noun: ClassVar[str]
    distance: ClassVar[str]
    decision: ClassVar[str]
    accuracy: ClassVar[str]
    columns: ClassVar[tuple[str, str]]
    unit: ClassVar[str]
    doubt: ClassVar[float]

    @abstractmethod
    def prepared(self, outputs: Float[Tensor, "batch features"]) -> Float[Tensor, "batch features"]:
        """Returns the outputs of a batch in float64 on the CPU, in the form in which they are stored."""

    @abstractmethod
    def divergence(
        self, base: Float[Tensor, "images features"], other: Float[Tensor, "images features"]
    ) -> Float[Tensor, "images"]:
        """Returns the divergence of `other` from `base` per image."""

    @abstractmethod
    def softened(
        self, base: Float[Tensor, "images features"], other: Float[Tensor, "images features"]
    ) -> Float[Tensor, "images"]:
        """Returns a divergence per image that varies less between images; plans are searched by it."""

    @abstractmethod
    def decisions(self, outputs: Float[Tensor, "images features"]) -> Int[Tensor, "images"]:
        """Returns the decision per image, a number."""

    @abstractmethod
    def labels(self, decisions: Int[Tensor, "images"], labels: Int[Tensor, "images"]) -> Int[Tensor, "images"]:
        """Returns the label that follows from each decision, given the true labels of all images."""


class Logits(OutputKind):
    """Class logits: the Kullback-Leibler divergence in nats, and the class."""

    name, noun, unit, doubt = "logits", "logit", "nats", 0.25
    distance, decision, accuracy = "KL divergence", "prediction", "top-1 accuracy"
    columns = "top-1", "KL"

    def num_classes(self, width: int) -> int:
        """Returns the number of classes that a model with `width` outputs distinguishes."""
        return width

    def class_logits(self, outputs: Float[Tensor, "batch features"]) -> Float[Tensor, "batch classes"]:
        """Returns one logit per class, whose softmax are the predicted probabilities."""
        return outputs

    def prepared(self, outputs: Float[Tensor, "batch features"]) -> Float[Tensor, "batch features"]:
        # Normalized once: the comparisons below take logits as well as log-probabilities, which log_softmax does not
        # change.
        return torch.log_softmax(outputs.double(), dim=-1).cpu()

    def divergence(
        self, base: Float[Tensor, "images features"], other: Float[Tensor, "images features"]
    ) -> Float[Tensor, "images"]:
        return divergence(self.class_logits(base), self.class_logits(other))

    def softened(
        self, base: Float[Tensor, "images features"], other: Float[Tensor, "images features"]
    ) -> Float[Tensor, "images"]:
        return softened_divergence(self.class_logits(base), self.class_logits(other))

    def decisions(self, outputs: Float[Tensor, "images features"]) -> Int[Tensor, "images"]:
        return self.class_logits(outputs).argmax(-1)

    def labels(self, decisions: Int[Tensor, "images"], labels: Int[Tensor, "images"]) -> Int[Tensor, "images"]:
        return decisions


class BinaryLogit(Logits):
    """One logit per image: that of class 1 against class 0, by the sigmoid; class 1 is predicted above zero.

    The divergence is that of the two Bernoulli distributions, and an eighth of the squared difference of the logits its
    softened limit. Nothing in a model distinguishes a classifier with one logit from a regression model, whose
    divergence and decisions mean nothing; `note` is added to the evidence of both.
    """

    name = "binary_logit"
    note: ClassVar[str] = (
        "the model has one output, which is taken as the logit of class 1 against class 0, with the decision at zero; "
        "for the value of a regression, only the relative logit discrepancy of the check fidelity is meaningful."
    )

    def num_classes(self, width: int) -> int:
        return 2

    def class_logits(self, outputs: Float[Tensor, "batch one"]) -> Float[Tensor, "batch two"]:
        # A softmax of (0, z) has the probabilities 1 - sigmoid(z) and sigmoid(z). Of z alone it would be constant.
        return torch.cat([torch.zeros_like(outputs), outputs], dim=-1)

    def prepared(self, outputs: Float[Tensor, "batch one"]) -> Float[Tensor, "batch one"]:
        return outputs.double().cpu()


class Embeddings(OutputKind):
    """Embeddings: the cosine distance, and the nearest neighbour among `GROUP` consecutive images.

    The label that follows is that of the neighbour, so that accuracy is that of the 1-nearest-neighbour classifier.
    """

    name, noun, unit, doubt = "embedding", "embedding", "", 0.05
    distance, decision = "cosine distance", "nearest neighbour"
    accuracy, columns = "1-nearest-neighbour accuracy", ("1-NN", "cosine distance")

    def prepared(self, outputs: Float[Tensor, "batch features"]) -> Float[Tensor, "batch features"]:
        return outputs.double().cpu()

    def divergence(
        self, base: Float[Tensor, "images features"], other: Float[Tensor, "images features"]
    ) -> Float[Tensor, "images"]:
        return 1 - torch.cosine_similarity(base.double(), other.double(), dim=-1)

    def softened(
        self, base: Float[Tensor, "images features"], other: Float[Tensor, "images features"]
    ) -> Float[Tensor, "images"]:
        """Returns half of the squared distance of the embeddings, relative to the mean squared norm of the base."""
        base, other = base.double(), other.double()
        return (base - other).square().sum(-1) / (2 * base.square().sum(-1).mean())

    def decisions(self, outputs: Float[Tensor, "images features"]) -> Int[Tensor, "images"]:
        return nearest_neighbours(outputs, 1)[:, 0]

    def labels(self, decisions: Int[Tensor, "images"], labels: Int[Tensor, "images"]) -> Int[Tensor, "images"]:
        return labels[decisions]


def nearest_neighbours(outputs: Float[Tensor, "images features"], k: int) -> Int[Tensor, "images k"]:
    """Returns the `k` nearest neighbours of every image by cosine similarity, among `GROUP` consecutive images.

    In a last group of fewer images, neighbours are repeated.
    """
    # Groups of consecutive images: memory is linear in their number, and the task as hard for any number of them.
    unit, neighbours = nn.functional.normalize(outputs.double(), dim=-1), [torch.zeros(0, k, dtype=torch.long)]
    for start in range(0, len(unit), GROUP):
        group = unit[start : start + GROUP]
        similarity = group @ group.T
        similarity.fill_diagonal_(-torch.inf)  # an image is no neighbour of its own; a lone last one is
        # Stable: equal similarities, e.g. of repeated images, have the same order in both models.
        order = similarity.argsort(dim=-1, descending=True, stable=True)[:, : max(1, len(group) - 1)]
        neighbours.append(start + order[:, torch.arange(k).clamp(max=order.shape[1] - 1)])
    return torch.cat(neighbours)


KINDS: dict[str, OutputKind] = {kind.name: kind for kind in (Logits(), BinaryLogit(), Embeddings())}


def output_kind_of(model: nn.Module) -> OutputKind:
    """Returns how the outputs of a model are compared; those of a model that no family knows are logits."""
    # Not `family_of`, which raises: checks also take modules of no family.
    family = next((family for family in FAMILIES if family.matches(model)), None)
    name = "logits" if family is None else family.output_kind(model)
    heads = () if family is None else family.heads(model)
    return KINDS["binary_logit" if name == "logits" and heads and heads[0].out_features == 1 else name]


def divergence(
    base: Float[Tensor, "images classes"], other: Float[Tensor, "images classes"]
) -> Float[Tensor, "images"]:
    """Returns the Kullback-Leibler divergence KL(base || other) of the predicted probabilities per image, in nats."""
    log_base, log_other = base.double().log_softmax(-1), other.double().log_softmax(-1)
    return (log_base.exp() * (log_base - log_other)).sum(-1)


def softened_divergence(
    base: Float[Tensor, "images classes"], other: Float[Tensor, "images classes"]
) -> Float[Tensor, "images"]:
    """Returns the limit of T^2 KL(base || other) per image for softmax temperature T to infinity.

    It is half the variance over the classes of the difference of the logits. All classes contribute, so that it varies
    much less between images than the divergence, which few images dominate.
    """
    # A variance ignores constants, so that logits and log-probabilities give the same.
    return (base.double() - other.double()).var(-1, correction=0) / 2
