"""The kinds of outputs (logits of classes or labels, numbers, embeddings), and how to compare two models' outputs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, field
from functools import wraps
from math import isfinite, nan
from typing import Any, ClassVar, ParamSpec, TypeVar, cast

import torch
from torch import nn

from attnrx.support.arguments import described, user_code
from attnrx.support.errors import InvalidInput, UserCodeError
from attnrx.support.modules import evaluating, from_rows, mapped
from attnrx.support.shapes import Bool, Float, Int, Tensor
from attnrx.vit.models import family_of, known_family, num_outputs, stated_outputs
from attnrx.vit.models.parts.record import record_of

# The number of images among which the nearest neighbours of an embedding are searched. A neighbour is harder to keep
# among more images. With a fixed number, results on different numbers of images can be compared.
GROUP = 64
# How many queries are compared with an index at once, and the rounding error of the similarity of float32 vectors.
QUERIES, EQUALLY_NEAR = 512, 1e-7
Rows = Float[Tensor, "images features"]
PerImage = Float[Tensor, "images"]
Decisions = Int[Tensor, "images *labels"]


class OutputKind(ABC):
    """How outputs are compared: by a divergence per image, and by a decision per image that each model makes.

    `noun`, `distance`, `decision` and `accuracy` are the words in findings. `columns` are the headings for accuracy and
    divergence in tables. `returns` is used in errors. `unit` is the unit of the divergence, and `flip_divergence` is a
    divergence at which a decision may change. If `has_decisions` is false, there are no decisions, and so neither
    agreement nor accuracy.
    """

    name: ClassVar[str]
    noun: ClassVar[str]
    distance: ClassVar[str]
    decision: ClassVar[str]
    accuracy: ClassVar[str]
    columns: ClassVar[tuple[str, str]]
    returns: ClassVar[str]
    unit: ClassVar[str]
    flip_divergence: ClassVar[float]
    has_decisions: ClassVar[bool] = True
    needed_images: ClassVar[float] = 1.0
    """The share of the usual number of images that makes a mean divergence as precise as for logits."""
    note: str = ""
    """A note on such outputs, which a call logs first and adds to its evidence."""

    @abstractmethod
    def divergence(self, base: Rows, other: Rows) -> PerImage:
        """Returns the divergence of `other` from `base` per image."""

    @abstractmethod
    def softened(self, base: Rows, other: Rows) -> PerImage:
        """Returns a divergence per image that varies less between images, for searching plans."""

    @abstractmethod
    def decisions(self, outputs: Rows) -> Decisions:
        """Returns the decision per image: a number, or one number per label."""

    def labels(self, decisions: Decisions, labels: Decisions) -> Decisions:
        """Returns the label that follows from each decision, given the true labels of all images."""
        return decisions

    def agreement(self, decisions: Decisions, others: Decisions) -> PerImage:
        """Returns the share of equal decisions per image."""
        return (decisions == others).double().unsqueeze(-1).flatten(1).mean(1)

    def correct(self, decisions: Decisions, labels: Decisions) -> Bool[Tensor, "images"]:
        """Returns whether the label that follows from the decision is true. With several labels, all must be true."""
        return (self.labels(decisions, labels) == labels).unsqueeze(-1).flatten(1).all(1)

    @abstractmethod
    def drawn(self, outputs: Float[Tensor, "batch features"], generator: torch.Generator) -> Float[Tensor, ""]:
        """Returns the log-probability of an answer drawn from the outputs, summed over the images.

        The second moment of its gradient is the Fisher information, the curvature of the divergence.
        """


class Logits(OutputKind):
    """Class logits: the Kullback-Leibler divergence in nats, and the predicted class."""

    name, noun, unit, flip_divergence = "logits", "logit", "nats", 0.25
    distance, decision, accuracy = "KL divergence", "prediction", "top-1 accuracy"
    columns, returns = ("top-1", "KL"), "logits of classes"

    def num_classes(self, width: int) -> int:
        """Returns the number of classes that a model with `width` outputs distinguishes."""
        return width

    def class_logits(self, outputs: Float[Tensor, "batch features"]) -> Float[Tensor, "batch classes"]:
        """Returns one logit per class. Their softmax is the predicted probabilities."""
        return outputs

    def divergence(self, base: Rows, other: Rows) -> PerImage:
        log_base, log_other = (self.class_logits(rows).double().log_softmax(-1) for rows in (base, other))
        return (log_base.exp() * (log_base - log_other)).sum(-1)

    def softened(self, base: Rows, other: Rows) -> PerImage:
        """Returns the limit of T^2 KL(base || other) per image for softmax temperature T to infinity.

        The limit is half the variance, over the classes, of the difference of the logits. All classes contribute to it,
        so it varies much less between images than the divergence, which a few images dominate.
        """
        # A variance ignores constants, so logits and log-probabilities give the same result.
        return (self.class_logits(base).double() - self.class_logits(other).double()).var(-1, correction=0) / 2

    def decisions(self, outputs: Rows) -> Decisions:
        return self.class_logits(outputs).argmax(-1)

    def drawn(self, outputs: Float[Tensor, "batch features"], generator: torch.Generator) -> Float[Tensor, ""]:
        logits = self.class_logits(outputs)
        classes = torch.multinomial(logits.detach().float().softmax(-1).cpu(), 1, generator=generator)
        return logits.log_softmax(-1).gather(1, classes.to(outputs.device)).sum()


class BinaryLogit(Logits):
    """One logit per image for class 1 against class 0, by the sigmoid. Class 1 is predicted above zero.

    The divergence is computed between the two Bernoulli distributions. Its softened limit is an eighth of the squared
    difference of the logits. A classifier with one logit looks like a regression model, unless you state which one it
    is (`load(..., outputs="regression")`).
    """

    name = "binary_logit"
    note = (
        "the model has one output, which is taken as the logit of class 1 against class 0, with the decision at zero; "
        'if it is the value of a regression, load the model with outputs="regression".'
    )

    def num_classes(self, width: int) -> int:
        return 2

    def class_logits(self, outputs: Float[Tensor, "batch one"]) -> Float[Tensor, "batch two"]:
        # The softmax of (0, z) is the pair 1 - sigmoid(z), sigmoid(z). The softmax of only z would be constant.
        return torch.cat([torch.zeros_like(outputs), outputs], dim=-1)


class Multilabel(OutputKind):
    """One logit per label, each with its own sigmoid. A label is predicted above zero.

    The divergence is computed between Bernoulli distributions and summed over the labels. Its softened limit is an
    eighth of the squared differences. Agreement is the share of equal label decisions. An answer is correct if all of
    its labels are correct.
    """

    name, noun, unit, flip_divergence = "multilabel", "logit", "nats", 0.25
    distance, decision, accuracy = "KL divergence", "label", "exact-match accuracy"
    columns, returns = ("exact match", "KL"), "one logit per label, each with a sigmoid"

    def label_logits(self, outputs: Float[Tensor, "batch labels"]) -> Float[Tensor, "batch labels"]:
        """Returns one logit per label. Its sigmoid is the predicted probability."""
        return outputs

    def divergence(self, base: Rows, other: Rows) -> PerImage:
        base, other = (self.label_logits(rows.double()) for rows in (base, other))
        total = torch.zeros(len(base), dtype=torch.float64, device=base.device)
        for sign in (1, -1):  # the label is present or absent
            before, after = (nn.functional.logsigmoid(sign * logits) for logits in (base, other))
            total = total + (before.exp() * (before - after)).sum(-1)
        return total

    def softened(self, base: Rows, other: Rows) -> PerImage:
        return (self.label_logits(base.double()) - self.label_logits(other.double())).square().sum(-1) / 8

    def decisions(self, outputs: Rows) -> Decisions:
        return (self.label_logits(outputs) > 0).long()

    def drawn(self, outputs: Float[Tensor, "batch labels"], generator: torch.Generator) -> Float[Tensor, ""]:
        outputs = self.label_logits(outputs)
        present = torch.bernoulli(outputs.detach().float().sigmoid().cpu(), generator=generator).to(outputs.device)
        return nn.functional.logsigmoid(torch.where(present > 0, outputs, -outputs)).sum()


class LabelProbabilities(Multilabel):
    """One probability per label, for a module that ends with a sigmoid. Compared like `Multilabel`, by their logits."""

    name, noun = "label_probabilities", "probability"
    returns = "one probability per label"

    def label_logits(self, outputs: Float[Tensor, "batch labels"]) -> Float[Tensor, "batch labels"]:
        return torch.logit(outputs, eps=torch.finfo(outputs.dtype).eps)


class Regression(OutputKind):
    """Numbers, compared by the squared error of each output relative to the reference's variance over the images.

    The divergence is the mean over the outputs, so outputs with different units count the same. Over all images, it is
    the lost share of the variance. There is no decision.
    """

    name, noun, unit, flip_divergence = "regression", "output", "", 0.05
    distance, decision, accuracy = "squared error relative to the variance", "", ""
    columns, returns = ("", "squared error"), "numbers of a regression"
    has_decisions = False

    def divergence(self, base: Rows, other: Rows) -> PerImage:
        base, other = base.double(), other.double()
        return ((base - other).square() / self._scale(base)).mean(-1)

    def softened(self, base: Rows, other: Rows) -> PerImage:
        return self.divergence(base, other)

    def decisions(self, outputs: Rows) -> Decisions:
        """Raises an error, because there are no decisions.

        Raises:
            InvalidInput: Always.
        """
        raise InvalidInput("the numbers of a regression make no decision: there is neither agreement nor accuracy.")

    def drawn(self, outputs: Float[Tensor, "batch numbers"], generator: torch.Generator) -> Float[Tensor, ""]:
        noise = torch.randn(outputs.shape, generator=generator).to(outputs.device, outputs.dtype)
        return (noise * outputs / self._scale(outputs.detach().double()).sqrt().to(outputs.dtype)).sum()

    def _scale(self, base: Rows) -> Float[Tensor, "numbers"]:
        variance, square = base.var(0, correction=0), base.square().mean(0)
        # Equal outputs, or the outputs for one image, have no variance.
        return torch.where(variance > 1e-12 * square, variance, torch.where(square > 0, square, 1.0))


class Map(Regression):
    """A map per image, or any other tensor.

    The divergence is the squared error relative to the variance of the reference's numbers over all images and
    positions, averaged over the numbers of an image. It is 0 for equal maps and about 1 for a constant map. If the maps
    differ by no shift or scale, it is one minus the squared correlation. For several tensors, it is their mean.
    """

    name, noun = "map", "number of a map"
    returns = "a map per image"
    needed_images = 0.25  # an image's divergence is a mean over its positions, so it varies less between images
    note = (
        "the outputs are compared as maps, by the squared error relative to the variance of the reference's numbers; "
        "there is no decision, and so neither agreement nor accuracy."
    )

    def __init__(self, sizes: tuple[int, ...] = ()):
        """`sizes` has the count of numbers per image for each tensor, in the order of a row. One tensor needs none."""
        self.sizes = sizes

    def divergence(self, base: Rows, other: Rows) -> PerImage:
        pairs = zip(self._tensors(base), self._tensors(other), strict=True)
        return torch.stack([super(Map, self).divergence(*pair) for pair in pairs]).mean(0)

    def drawn(self, outputs: Float[Tensor, "batch numbers"], generator: torch.Generator) -> Float[Tensor, ""]:
        # Divided by the root of the number of outputs, because the divergence is a mean.
        drawn = [super(Map, self).drawn(part, generator) / part.shape[1] ** 0.5 for part in self._tensors(outputs)]
        return torch.stack(drawn).sum()

    def _tensors(self, outputs: Rows) -> tuple[Tensor, ...]:
        return outputs.split(self.sizes or (outputs.shape[1],), dim=1)

    def _scale(self, base: Rows) -> Float[Tensor, "numbers"]:
        return super()._scale(base.flatten()[:, None]).expand(base.shape[1])


class Several(Map):
    """Several tensors per image. The divergence is the mean over the tensors of `Map`'s divergence."""

    name, noun, returns = "several", "number of the outputs", "several tensors per image"
    note = (
        "the model returns several tensors per image. Each is compared by the squared error relative to the variance "
        "of the reference's numbers, and the divergence is the mean over the tensors; there is no decision, and so "
        "neither agreement nor accuracy."
    )


class Embeddings(OutputKind):
    """Embeddings, compared by the cosine distance and by the nearest neighbour among `GROUP` consecutive images.

    The label that follows from a decision is the neighbour's label, so accuracy is 1-nearest-neighbour accuracy.
    """

    name, noun, unit, flip_divergence = "embedding", "embedding", "", 0.05
    distance, decision = "cosine distance", "nearest neighbour"
    accuracy, columns = "1-nearest-neighbour accuracy", ("1-NN", "cosine distance")
    returns = "embeddings"

    def divergence(self, base: Rows, other: Rows) -> PerImage:
        return 1 - torch.cosine_similarity(base.double(), other.double(), dim=-1)

    def softened(self, base: Rows, other: Rows) -> PerImage:
        """Returns half of the squared distance of the embeddings, relative to the mean squared norm of the base."""
        base, other = base.double(), other.double()
        return (base - other).square().sum(-1) / (2 * base.square().sum(-1).mean())

    def decisions(self, outputs: Rows) -> Decisions:
        return nearest_neighbours(outputs, 1)[:, 0]

    def labels(self, decisions: Decisions, labels: Decisions) -> Decisions:
        return labels[decisions]

    def drawn(self, outputs: Float[Tensor, "batch features"], generator: torch.Generator) -> Float[Tensor, ""]:
        # Embeddings are compared by their angle, so their lengths do not matter.
        direction = torch.randn(outputs.shape, generator=generator).to(outputs.device, outputs.dtype)
        return (nn.functional.normalize(outputs, dim=-1) * direction).sum()


def nearest_neighbours(outputs: Rows, k: int) -> Int[Tensor, "images k"]:
    """Returns the `k` nearest neighbours of every image by cosine similarity, among `GROUP` consecutive images.

    If the last group has too few images, neighbours are repeated.
    """
    # With groups of consecutive images, memory is linear in the number of images, and the task is equally hard for any
    # number.
    unit, neighbours = nn.functional.normalize(outputs.double(), dim=-1), [torch.zeros(0, k, dtype=torch.long)]
    for start in range(0, len(unit), GROUP):
        group = unit[start : start + GROUP]
        similarity = group @ group.T
        similarity.fill_diagonal_(-torch.inf)  # an image is not its own neighbour, unless it is alone in its group
        # Stable, because equal similarities, e.g. of repeated images, must have the same order in both models.
        order = similarity.argsort(dim=-1, descending=True, stable=True)[:, : max(1, len(group) - 1)]
        neighbours.append(start + order[:, torch.arange(k).clamp(max=order.shape[1] - 1)])
    return torch.cat(neighbours)


def recalled(
    base: tuple[Rows, Rows], other: tuple[Rows, Rows], ks: Sequence[int], own: Int[Tensor, "images"] | None = None
) -> Float[Tensor, "images ks"]:
    """Returns, per query and number k, the share of its k nearest neighbours in `base` that `other` also finds.

    The search is exact. Each pair contains the embeddings of the queries and of the index, in the same order, and they
    are compared by cosine similarity. If the queries are in the index, `own` are their rows in it, because an image is
    not its own neighbour.
    """
    pairs = [tuple(nn.functional.normalize(rows.double(), dim=-1) for rows in pair) for pair in (base, other)]
    shares = [torch.zeros(0, len(ks), dtype=torch.float64, device=base[0].device)]
    for start in range(0, len(base[0]), QUERIES):
        span, similarities = slice(start, start + QUERIES), []
        for queries, index in pairs:
            similarity = queries[span] @ index.T
            if own is not None:
                similarity.scatter_(1, own[span, None], -torch.inf)
            similarities.append(similarity)
        nearest, matched = similarities[0].topk(max(ks)).values, similarities[1].topk(max(ks)).indices
        matched = similarities[0].gather(1, matched)
        # Counted by the k-th neighbour's similarity, because repeated images are equally near and any of them counts.
        found = [(matched[:, :k] >= nearest[:, k - 1, None] - EQUALLY_NEAR).double().mean(1) for k in ks]
        shares.append(torch.stack(found, dim=1))
    return torch.cat(shares)


KINDS: dict[str, OutputKind] = {
    kind.name: kind
    for kind in (
        Logits(),
        BinaryLogit(),
        Multilabel(),
        LabelProbabilities(),
        Regression(),
        Map(),
        Several(),
        Embeddings(),
    )
}


P = ParamSpec("P")
R = TypeVar("R")
# Returns one number per image from the outputs of the original and of the smaller model, as the models return them.
Divergence = Callable[[Any, Any], PerImage]
# Returns one number per image from the outputs of a model, and a pair of images and labels.
Metric = Callable[[Any, tuple[Tensor, Tensor]], PerImage]
# Returns one number from the outputs of a model for all images, and their labels.
SetMetric = Callable[[Any, Tensor], float | Tensor]
MOST_NUMBERS = 2**26  # outputs to compare: 256 MiB in float32, and several times this in sums
CHUNK = 64  # images per call of a user's function
SHIFT = 0.1  # the shift of the outputs that measures the curvature of a divergence, in standard deviations


@dataclass(eq=False)
class Judgement:
    """The user's functions that compare the outputs of models during one call.

    `templates` contains the outputs of the call's models for one image, by input shape.
    """

    divergence: Divergence | None = None
    metric: Metric | None = None
    metric_of_set: SetMetric | None = None
    templates: dict[tuple[int, ...], Any] = field(default_factory=dict, repr=False)

    @property
    def reads_labels(self) -> bool:
        """Whether labels of any shape are allowed, because a user's function reads them."""
        return self.metric is not None or self.metric_of_set is not None

    def template(self, model: nn.Module) -> Any:
        """Returns the outputs of a model for one image."""
        shape = family_of(model).input_shape(model)
        if shape not in self.templates:
            image = torch.zeros(1, *shape).to(next(model.parameters()))
            with torch.no_grad(), evaluating([model]):
                self.templates[shape] = mapped(lambda tensor: tensor.cpu(), model(image))
        return self.templates[shape]

    def measured(self, model: nn.Module, rows: Rows, others: Any, what: str) -> Tensor:
        """Returns one number per image from "divergence" with other rows, or from "metric" with images and labels.

        Raises:
            UserCodeError: The function raised an exception.
            InvalidInput: The function does not return one finite number per image.
        """
        function, parts, template = getattr(self, what), [], self.template(model)
        for start in range(0, len(rows), CHUNK):
            span = slice(start, start + CHUNK)
            first = from_rows(rows[span], template)
            second = from_rows(others[span], template) if what == "divergence" else tuple(each[span] for each in others)
            with user_code(f"{what} ({name_of(function)})", UserCodeError):
                values = function(first, second)
            count = len(rows[span])
            if not isinstance(values, Tensor) or values.shape != (count,) or not bool(values.isfinite().all()):
                raise InvalidInput(
                    f"{what} ({name_of(function)}) returned {described(values)} for {count} images: return a tensor of "
                    "one finite number per image, [images]."
                )
            parts.append(values.double())
        return torch.cat(parts)

    def measured_set(self, model: nn.Module, rows: Rows, labels: Tensor) -> float:
        """Returns the result of `metric_of_set` for all these images.

        Raises:
            UserCodeError: The function raised an exception.
            InvalidInput: The function does not return one finite number.
        """
        function = self.metric_of_set
        with user_code(f"metric_of_set ({name_of(function)})", UserCodeError):
            value = cast(SetMetric, function)(from_rows(rows, self.template(model)), labels)
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError):
            number = nan
        if not isfinite(number):
            raise InvalidInput(
                f"metric_of_set ({name_of(function)}) returned {described(value)} for {len(rows)} images: return one "
                "finite number. It is called with resamples of the images, which may lack a rare class."
            )
        return number


_JUDGEMENT: ContextVar[Judgement | None] = ContextVar("judgement", default=None)


@contextmanager
def judging(
    divergence: Divergence | None, metric: Metric | None = None, metric_of_set: SetMetric | None = None
) -> Iterator[None]:
    """Compares all outputs in this context by a user's functions. Without any, the outer context's functions stay."""
    # Not stored on a model, because it may be impossible to send a function to another process.
    if divergence is None and metric is None and metric_of_set is None:
        yield
        return
    token = _JUDGEMENT.set(Judgement(divergence, metric, metric_of_set))
    try:
        yield
    finally:
        _JUDGEMENT.reset(token)


def judged(function: Callable[P, R]) -> Callable[P, R]:
    """Makes the arguments `divergence`, `metric` and `metric_of_set` of a verb apply to its whole call (`judging`)."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with judging(*(cast(Any, kwargs.get(name)) for name in ("divergence", "metric", "metric_of_set"))):
            return function(*args, **kwargs)

    return call


def current_judgement() -> Judgement:
    """Returns the functions of the current call. A missing function is None."""
    return _JUDGEMENT.get() or Judgement()


def name_of(function: Any) -> str:
    """Returns the name of a user's function in words, e.g. "mean iou"."""
    return getattr(function, "__name__", type(function).__name__).replace("_", " ").strip()


def _judged(kind: OutputKind, model: nn.Module, judgement: Judgement) -> OutputKind:
    """Returns the same kind with the user's divergence."""
    base, name = type(kind), name_of(judgement.divergence)
    judgement.template(model)  # made now, because later calls of the model may be recorded

    class Judged(base):  # type: ignore[misc, valid-type]
        distance, columns, unit = name, (kind.columns[0], name), ""
        flip_divergence = 0.05
        note = f"the divergence is that of the function {name!r} of this call."

        def divergence(self, base: Tensor, other: Tensor) -> Tensor:
            return judgement.measured(model, base, other, "divergence")

        def softened(self, base: Tensor, other: Tensor) -> Tensor:
            values = self.divergence(base, other)
            # A function of decisions (e.g. an intersection over union) has no gradient. A fit then uses the kind's own.
            return super().softened(base, other) if other.requires_grad and not values.requires_grad else values

        def drawn(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
            # The divergence is quadratic near equal outputs. Its gradient at a small random shift is therefore its
            # curvature times the shift.
            noise = torch.randn(outputs.shape, generator=generator).to(outputs.device, outputs.dtype)
            shifted = outputs.detach() + SHIFT * outputs.detach().std() * noise
            values = self.divergence(shifted, outputs)
            return values.sum() if values.requires_grad else super().drawn(outputs, generator)

    other = object.__new__(Judged)
    vars(other).update(vars(kind))
    return other


def most_images(model: nn.Module) -> int:
    """Returns the largest number of images whose outputs can be compared in memory. Maps have a number per pixel."""
    numbers = sum(output_sizes(model).values()) or 1
    return max(MOST_NUMBERS // max(numbers, 1), 2)


def output_sizes(model: nn.Module) -> Mapping[str, int]:
    """Returns how many numbers per image each tensor of a whole module, or of its file, has. Other models have {}."""
    record = record_of(model)
    found = getattr(model, "output_sizes", {}) if record is None else getattr(record.around, "sizes", {})
    return found if isinstance(found, Mapping) else {}


def output_kind_of(model: nn.Module) -> OutputKind:
    """Returns the kind of a model's outputs: the stated one, else its family's, or logits if it has no family.

    If the call has a divergence (`judging`), the kind uses it.
    """
    family = known_family(model)  # not `family_of`, which raises an error: checks also take modules without a family
    name = stated_outputs(model) or ("logits" if family is None else family.output_kind(model))
    heads = () if family is None or name != "logits" else family.heads(model)
    kind = KINDS["binary_logit" if heads and num_outputs(heads[0]) == 1 else name]
    if isinstance(kind, Map):
        kind = type(kind)(tuple(output_sizes(model).values()))
    if stated_outputs(model) is None and (doubt := "" if family is None else family.output_doubt(model)):
        kind = copy(kind)
        kind.note = doubt
    judgement = current_judgement()
    return _judged(kind, model, judgement) if judgement.divergence is not None and family is not None else kind


# The kind names that `state_outputs_` accepts, by the words in which a user states them.
STATEMENTS = {
    "classes": "logits",
    "multilabel": "multilabel",
    "regression": "regression",
    "embedding": "embedding",
    "map": "map",
}
