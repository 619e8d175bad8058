"""The kinds of model outputs (class or label logits, numbers, embeddings, maps) and how to compare them."""

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

# GROUP is the number of images among which nearest neighbours are searched. A compressed model keeps fewer neighbours
# if there are more images to choose from. With a fixed number, you can compare results on different numbers of images.
GROUP = 64
# QUERIES is how many queries are compared with an index at once, which limits memory. EQUALLY_NEAR is the rounding
# error of a cosine similarity in float32.
QUERIES, EQUALLY_NEAR = 512, 1e-7
Rows = Float[Tensor, "images features"]
PerImage = Float[Tensor, "images"]
Decisions = Int[Tensor, "images *labels"]


class OutputKind(ABC):
    """Base class of output kinds, which define how the outputs of two models are compared.

    Outputs are compared by a divergence per image, and by the decision that each model makes per image.

    Attributes:
        name: The name of the kind in files.
        noun: What findings call an output.
        distance: What findings call the divergence.
        decision: What findings call a decision.
        answers: What summaries call the decisions.
        accuracy: What findings call the share of correct decisions.
        columns: The table headings for accuracy and divergence.
        returns: A description of such outputs in error messages.
        unit: The unit of the divergence.
        flip_divergence: A divergence at which a decision may change.
        has_decisions: Whether each output implies a decision. If not, evidence contains neither agreement nor accuracy.
    """

    name: ClassVar[str]
    noun: ClassVar[str]
    distance: ClassVar[str]
    decision: ClassVar[str]
    answers: ClassVar[str] = "answers"
    accuracy: ClassVar[str]
    columns: ClassVar[tuple[str, str]]
    returns: ClassVar[str]
    unit: ClassVar[str]
    flip_divergence: ClassVar[float]
    has_decisions: ClassVar[bool] = True
    needed_images: ClassVar[float] = 1.0
    """How many images a mean divergence needs, relative to logits, for the same precision."""
    note: str = ""
    """A note for users on how these outputs are compared. It is logged, and stored in the evidence."""

    @abstractmethod
    def divergence(self, base: Rows, other: Rows) -> PerImage:
        """Returns, for each image, the divergence of the outputs `other` from the outputs `base`."""

    @abstractmethod
    def softened(self, base: Rows, other: Rows) -> PerImage:
        """Returns a divergence per image that varies less between images than `divergence`.

        The search for plans uses this divergence.
        """

    @abstractmethod
    def decisions(self, outputs: Rows) -> Decisions:
        """Returns each image's decision: one integer (e.g. the predicted class), or one integer per label."""

    def labels(self, decisions: Decisions, labels: Decisions) -> Decisions:
        """Returns the predicted label for each decision. `labels` are the true labels of all images."""
        return decisions

    def agreement(self, decisions: Decisions, others: Decisions) -> PerImage:
        """Returns the share of decisions on which both models agree, for each image."""
        return (decisions == others).double().unsqueeze(-1).flatten(1).mean(1)

    def correct(self, decisions: Decisions, labels: Decisions) -> Bool[Tensor, "images"]:
        """Returns whether the predicted label of each image is correct.

        If an image has several labels, all of them must be correct.
        """
        return (self.labels(decisions, labels) == labels).unsqueeze(-1).flatten(1).all(1)

    @abstractmethod
    def drawn(self, outputs: Float[Tensor, "batch features"], generator: torch.Generator) -> Float[Tensor, ""]:
        """Samples one target per image from the predicted distribution, and returns the sum of their log-probabilities.

        The expected squared gradient of this sum is the Fisher information, i.e. the curvature of the divergence.
        """


class Logits(OutputKind):
    """Class logits, compared by the Kullback-Leibler divergence in nats and by the predicted class."""

    name, noun, unit, flip_divergence = "logits", "logit", "nats", 0.25
    distance, decision, accuracy = "KL divergence", "prediction", "top-1 accuracy"
    columns, returns = ("top-1", "KL"), "logits of classes"

    def num_classes(self, width: int) -> int:
        """Returns the number of classes that a model with `width` outputs distinguishes."""
        return width

    def class_logits(self, outputs: Float[Tensor, "batch features"]) -> Float[Tensor, "batch classes"]:
        """Returns one logit per class. The softmax of these logits gives the predicted probabilities."""
        return outputs

    def divergence(self, base: Rows, other: Rows) -> PerImage:
        log_base, log_other = (self.class_logits(rows).double().log_softmax(-1) for rows in (base, other))
        return (log_base.exp() * (log_base - log_other)).sum(-1)

    def softened(self, base: Rows, other: Rows) -> PerImage:
        """Returns the limit of T^2 KL(base || other) per image as the softmax temperature T goes to infinity.

        The limit is half the variance of the logit differences over the classes. All classes contribute to the limit.
        Its mean over the images therefore reaches the same precision with fewer images than the mean KL divergence,
        which a few images dominate.
        """
        # A variance ignores added constants, so logits and log-probabilities give the same result.
        return (self.class_logits(base).double() - self.class_logits(other).double()).var(-1, correction=0) / 2

    def decisions(self, outputs: Rows) -> Decisions:
        return self.class_logits(outputs).argmax(-1)

    def drawn(self, outputs: Float[Tensor, "batch features"], generator: torch.Generator) -> Float[Tensor, ""]:
        logits = self.class_logits(outputs)
        classes = torch.multinomial(logits.detach().float().softmax(-1).cpu(), 1, generator=generator)
        return logits.log_softmax(-1).gather(1, classes.to(outputs.device)).sum()


class BinaryLogit(Logits):
    """One logit per image. Its sigmoid is the probability of class 1, which is predicted if the logit is above zero.

    The divergence is the KL divergence between two Bernoulli distributions. The softened divergence is an eighth of the
    squared logit difference. A regression model may also have a single output, which attnrx cannot distinguish from a
    logit. Load such a model with `load(..., outputs="regression")`.
    """

    name = "binary_logit"
    note = (
        "the model has one output, which is taken as the logit of class 1 against class 0, with the decision at zero; "
        'if it is the value of a regression, load the model with outputs="regression".'
    )

    def num_classes(self, width: int) -> int:
        return 2

    def class_logits(self, outputs: Float[Tensor, "batch one"]) -> Float[Tensor, "batch two"]:
        # The softmax of (0, z) is (1 - sigmoid(z), sigmoid(z)). A softmax over z only would always be 1.
        return torch.cat([torch.zeros_like(outputs), outputs], dim=-1)


class Multilabel(OutputKind):
    """One logit per label, each with its own sigmoid. The model predicts a label if its logit is above zero.

    The divergence is the KL divergence between Bernoulli distributions, summed over the labels. The softened divergence
    is an eighth of the summed squared logit differences. Agreement is the share of labels on which both models agree. A
    prediction is correct only if all its labels are correct.
    """

    name, noun, unit, flip_divergence = "multilabel", "logit", "nats", 0.25
    distance, decision, accuracy = "KL divergence", "label", "exact-match accuracy"
    columns, returns = ("exact match", "KL"), "one logit per label, each with a sigmoid"

    def label_logits(self, outputs: Float[Tensor, "batch labels"]) -> Float[Tensor, "batch labels"]:
        """Returns one logit per label. The sigmoid of a logit gives the label's predicted probability."""
        return outputs

    def divergence(self, base: Rows, other: Rows) -> PerImage:
        base, other = (self.label_logits(rows.double()) for rows in (base, other))
        total = torch.zeros(len(base), dtype=torch.float64, device=base.device)
        for sign in (1, -1):  # sums over the two cases: the label is present or absent
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
    """One probability per label, from a module that ends with a sigmoid.

    Probabilities are converted to logits and then compared like `Multilabel`.
    """

    name, noun = "label_probabilities", "probability"
    returns = "one probability per label"

    def label_logits(self, outputs: Float[Tensor, "batch labels"]) -> Float[Tensor, "batch labels"]:
        return torch.logit(outputs, eps=torch.finfo(outputs.dtype).eps)


class Regression(OutputKind):
    """Regression outputs, compared by their squared error relative to the variance of the original model's outputs.

    Each output's squared error is divided by that output's variance over the images. The divergence is the mean over
    the outputs, so outputs with different units have equal weight. Averaged over all images, the divergence is the
    share of the variance that the smaller model fails to explain. A regression makes no decisions.
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
        """Raises an error, because regressions have no decisions.

        Raises:
            InvalidInput: Always.
        """
        raise InvalidInput("the numbers of a regression make no decision: there is neither agreement nor accuracy.")

    def drawn(self, outputs: Float[Tensor, "batch numbers"], generator: torch.Generator) -> Float[Tensor, ""]:
        noise = torch.randn(outputs.shape, generator=generator).to(outputs.device, outputs.dtype)
        return (noise * outputs / self._scale(outputs.detach().double()).sqrt().to(outputs.dtype)).sum()

    def _scale(self, base: Rows) -> Float[Tensor, "numbers"]:
        variance, square = base.var(0, correction=0), base.square().mean(0)
        # The variance is zero if all outputs are equal or there is only one image. The mean square then replaces it.
        return torch.where(variance > 1e-12 * square, variance, torch.where(square > 0, square, 1.0))


class Map(Regression):
    """One map per image, e.g. for segmentation, or another tensor with several axes per image.

    The divergence is an image's mean squared error, divided by the variance of the original model's values over all
    images and positions. It is 0 for equal maps, and about 1 if every value of the smaller model is the mean of the
    original values. If no shift or scaling of the smaller model's maps would reduce the divergence, it equals one minus
    the squared correlation of the two models' maps. If a model returns several tensors, the divergence is averaged over
    the tensors.
    """

    name, noun = "map", "number of a map"
    returns = "a map per image"
    needed_images = 0.25  # an image's divergence is a mean over many positions, so it varies less between images
    note = (
        "the outputs are compared as maps, by the squared error relative to the variance of the reference's numbers; "
        "there is no decision, and so neither agreement nor accuracy."
    )

    def __init__(self, sizes: tuple[int, ...] = ()):
        """Stores the number of values per image in each output tensor. Omit `sizes` if there is only one tensor."""
        self.sizes = sizes

    def divergence(self, base: Rows, other: Rows) -> PerImage:
        pairs = zip(self._tensors(base), self._tensors(other), strict=True)
        return torch.stack([super(Map, self).divergence(*pair) for pair in pairs]).mean(0)

    def drawn(self, outputs: Float[Tensor, "batch numbers"], generator: torch.Generator) -> Float[Tensor, ""]:
        # The divergence is a mean over the outputs, so the noise is divided by the square root of their number.
        drawn = [super(Map, self).drawn(part, generator) / part.shape[1] ** 0.5 for part in self._tensors(outputs)]
        return torch.stack(drawn).sum()

    def _tensors(self, outputs: Rows) -> tuple[Tensor, ...]:
        return outputs.split(self.sizes or (outputs.shape[1],), dim=1)

    def _scale(self, base: Rows) -> Float[Tensor, "numbers"]:
        return super()._scale(base.flatten()[:, None]).expand(base.shape[1])


class Several(Map):
    """Several tensors per image, compared by the divergence of `Map`, averaged over the tensors."""

    name, noun, returns = "several", "number of the outputs", "several tensors per image"
    note = (
        "the model returns several tensors per image. Each is compared by the squared error relative to the variance "
        "of the reference's numbers, and the divergence is the mean over the tensors; there is no decision, and so "
        "neither agreement nor accuracy."
    )


class Embeddings(OutputKind):
    """Embeddings, compared by their cosine distance and by each image's nearest neighbour.

    The nearest neighbour is searched within a group of `GROUP` consecutive images. The predicted label of an image is
    its neighbour's label, so accuracy is 1-nearest-neighbour accuracy.
    """

    name, noun, unit, flip_divergence = "embedding", "embedding", "", 0.05
    distance, decision, answers = "cosine distance", "nearest neighbour", "nearest neighbours"
    accuracy, columns = "1-nearest-neighbour accuracy", ("1-NN", "cosine distance")
    returns = "embeddings"

    def divergence(self, base: Rows, other: Rows) -> PerImage:
        return 1 - torch.cosine_similarity(base.double(), other.double(), dim=-1)

    def softened(self, base: Rows, other: Rows) -> PerImage:
        """Returns half the squared distance between embeddings, divided by the mean squared norm of `base`."""
        base, other = base.double(), other.double()
        return (base - other).square().sum(-1) / (2 * base.square().sum(-1).mean())

    def decisions(self, outputs: Rows) -> Decisions:
        return nearest_neighbours(outputs, 1)[:, 0]

    def labels(self, decisions: Decisions, labels: Decisions) -> Decisions:
        return labels[decisions]

    def drawn(self, outputs: Float[Tensor, "batch features"], generator: torch.Generator) -> Float[Tensor, ""]:
        # Embeddings are compared by their angles, so they are normalized first.
        direction = torch.randn(outputs.shape, generator=generator).to(outputs.device, outputs.dtype)
        return (nn.functional.normalize(outputs, dim=-1) * direction).sum()


def nearest_neighbours(outputs: Rows, k: int) -> Int[Tensor, "images k"]:
    """Returns the indices of every image's `k` nearest neighbours by cosine similarity.

    Neighbours are searched within groups of `GROUP` consecutive images. If the last group has too few images, the
    farthest neighbour is repeated.
    """
    # Searching in groups keeps memory linear in the number of images, and the task equally hard for any number.
    unit, neighbours = nn.functional.normalize(outputs.double(), dim=-1), [torch.zeros(0, k, dtype=torch.long)]
    for start in range(0, len(unit), GROUP):
        group = unit[start : start + GROUP]
        similarity = group @ group.T
        similarity.fill_diagonal_(-torch.inf)  # an image is its own neighbour only if its group has no other image
        # A stable sort gives equal similarities (e.g. of repeated images) the same order in both models.
        order = similarity.argsort(dim=-1, descending=True, stable=True)[:, : max(1, len(group) - 1)]
        neighbours.append(start + order[:, torch.arange(k).clamp(max=order.shape[1] - 1)])
    return torch.cat(neighbours)


def recalled(
    base: tuple[Rows, Rows], other: tuple[Rows, Rows], ks: Sequence[int], own: Int[Tensor, "images"] | None = None
) -> Float[Tensor, "images ks"]:
    """Returns the share of each query's k nearest neighbours in `base` that `other` also finds, for every k in `ks`.

    The search is exact and uses the cosine similarity.

    Args:
        base: The original model's embeddings of the query images, and of the images in the index.
        other: The smaller model's embeddings of the same images, in the same order.
        ks: The values of k.
        own: The row of each query in the index, if the index contains the queries. A query is then not counted as its
            own neighbour.
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
        # A match counts if it is as near as the k-th neighbour. If images are repeated, any of the copies then counts.
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
# A user's divergence returns one number per image, given the outputs of the original and of the smaller model.
Divergence = Callable[[Any, Any], PerImage]
# A user's metric returns one number per image, given a model's outputs and a pair of images and labels.
Metric = Callable[[Any, tuple[Tensor, Tensor]], PerImage]
# A user's metric of a set returns one number, given a model's outputs for all images, and all labels.
SetMetric = Callable[[Any, Tensor], float | Tensor]
MOST_NUMBERS = 2**26  # the most output numbers to compare: 256 MiB in float32, and several times as much in sums
CHUNK = 64  # images per call to a user's function
SHIFT = 0.1  # the shift of the outputs, in standard deviations, at which a divergence's curvature is measured


@dataclass(eq=False)
class Judgement:
    """The user's functions that compare model outputs during one call of attnrx.

    `templates` caches a model's outputs for one image, by input shape. The structure of these outputs (e.g. a
    dictionary of tensors) shows how to convert rows of numbers, one per image, back to model outputs.
    """

    divergence: Divergence | None = None
    metric: Metric | None = None
    metric_of_set: SetMetric | None = None
    templates: dict[tuple[int, ...], Any] = field(default_factory=dict, repr=False)

    @property
    def reads_labels(self) -> bool:
        """Whether labels may have any shape, because only a user's function interprets them."""
        return self.metric is not None or self.metric_of_set is not None

    def template(self, model: nn.Module) -> Any:
        """Returns a model's outputs for one blank image, from the cache if possible."""
        shape = family_of(model).input_shape(model)
        if shape not in self.templates:
            image = torch.zeros(1, *shape).to(next(model.parameters()))
            with torch.no_grad(), evaluating([model]):
                self.templates[shape] = mapped(lambda tensor: tensor.cpu(), model(image))
        return self.templates[shape]

    def measured(self, model: nn.Module, rows: Rows, others: Any, what: str) -> Tensor:
        """Calls the user's "divergence" or "metric" on chunks of images, and returns one number per image.

        Args:
            model: The model that determines the structure of the outputs to which the rows are converted.
            rows: A model's outputs, one row per image.
            others: For "divergence", the other model's rows. For "metric", a pair of images and labels.
            what: The function to call, "divergence" or "metric".

        Raises:
            UserCodeError: The function raised an exception.
            InvalidInput: The function did not return one finite number per image.
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
        """Calls the user's `metric_of_set` once for all images, with labels of any shape, and returns its result.

        Raises:
            UserCodeError: The function raised an exception.
            InvalidInput: The function did not return one finite number.
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
    """Sets the user's functions with which outputs are compared inside the context.

    If all three functions are None, the functions of an outer context remain in use.
    """
    # The functions are not stored on a model, because a model with a lambda could not be sent to another process.
    if divergence is None and metric is None and metric_of_set is None:
        yield
        return
    token = _JUDGEMENT.set(Judgement(divergence, metric, metric_of_set))
    try:
        yield
    finally:
        _JUDGEMENT.reset(token)


def judged(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function so that its `divergence`, `metric` and `metric_of_set` also apply to all inner calls.

    The decorator sets these arguments with `judging`, so the function does not have to pass them on.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with judging(*(cast(Any, kwargs.get(name)) for name in ("divergence", "metric", "metric_of_set"))):
            return function(*args, **kwargs)

    return call


def current_judgement() -> Judgement:
    """Returns the functions that the user passed to the current call (None for functions that were not passed)."""
    return _JUDGEMENT.get() or Judgement()


def name_of(function: Any) -> str:
    """Returns the name of a user's function, with spaces instead of underscores, e.g. "mean iou" for `mean_iou`."""
    return getattr(function, "__name__", type(function).__name__).replace("_", " ").strip()


def _judged(kind: OutputKind, model: nn.Module, judgement: Judgement) -> OutputKind:
    """Returns a copy of `kind` that uses the user's divergence."""
    base, name = type(kind), name_of(judgement.divergence)
    judgement.template(model)  # cached now, because later calls of the model may be recorded

    class Judged(base):  # type: ignore[misc, valid-type]
        distance, columns, unit = name, (kind.columns[0], name), ""
        flip_divergence = 0.05
        note = f"the divergence is that of the function {name!r} of this call."

        def divergence(self, base: Tensor, other: Tensor) -> Tensor:
            return judgement.measured(model, base, other, "divergence")

        def softened(self, base: Tensor, other: Tensor) -> Tensor:
            values = self.divergence(base, other)
            # A divergence of decisions (e.g. an intersection over union) has no gradient. Fits of weights then use the
            # kind's softened divergence.
            return super().softened(base, other) if other.requires_grad and not values.requires_grad else values

        def drawn(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
            # Near equal outputs, the divergence is quadratic. Its gradient at a small random shift is therefore the
            # curvature times the shift.
            noise = torch.randn(outputs.shape, generator=generator).to(outputs.device, outputs.dtype)
            shifted = outputs.detach() + SHIFT * outputs.detach().std() * noise
            values = self.divergence(shifted, outputs)
            return values.sum() if values.requires_grad else super().drawn(outputs, generator)

    other = object.__new__(Judged)
    vars(other).update(vars(kind))
    return other


def most_images(model: nn.Module) -> int:
    """Returns the largest number of images whose outputs fit in memory for a comparison (see `MOST_NUMBERS`)."""
    numbers = sum(output_sizes(model).values()) or 1
    return max(MOST_NUMBERS // max(numbers, 1), 2)


def output_sizes(model: nn.Module) -> Mapping[str, int]:
    """Returns the number of values per image in each output tensor, by the tensor's name.

    The sizes are known for user modules that contain a Vision Transformer and other parts, and for files exported from
    such modules. For other models, the result is empty.
    """
    record = record_of(model)
    found = getattr(model, "output_sizes", {}) if record is None else getattr(record.around, "sizes", {})
    return found if isinstance(found, Mapping) else {}


def output_kind_of(model: nn.Module) -> OutputKind:
    """Returns the `OutputKind` that compares a model's outputs.

    The kind that the user stated (`load(..., outputs=...)`) has priority over the kind that the model's family reports.
    The outputs of models without a family are treated as logits. If the current call has a user's divergence (see
    `judging`), the returned kind uses it.
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


# The words by which users can state a model's outputs, and the names of the kinds that they select.
STATEMENTS = {
    "classes": "logits",
    "multilabel": "multilabel",
    "regression": "regression",
    "embedding": "embedding",
    "map": "map",
}
