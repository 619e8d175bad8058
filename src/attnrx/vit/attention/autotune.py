"""The autotuned backend: for every layer and context, the fastest backend whose output is verified."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from attnrx.support.arguments import MODEL, checked, instance
from attnrx.support.errors import NotSupported, UnknownName
from attnrx.support.hardware import Measurements, may_measure
from attnrx.support.shapes import Tensor, TokenBatch
from attnrx.vit.attention.attention import Attention
from attnrx.vit.attention.backends.auto import Auto, Fused, Native
from attnrx.vit.attention.backends.backend import Backend, Eager
from attnrx.vit.attention.backends.capture import AttentionCapture, Observed
from attnrx.vit.attention.backends.explicit import Explicit
from attnrx.vit.attention.backends.generated import Flex, Ragged
from attnrx.vit.attention.factors import AttentionContext
from attnrx.vit.attention.positions import Positions
from attnrx.vit.kernels.compilation import required_library
from attnrx.vit.spec import AttentionSpec

CANDIDATES: dict[str, dict[str, Callable[[], Backend]]] = {
    "cpu": {"fused": Fused, "explicit": Explicit, "native": Native},
    "cuda": {"fused": Fused, "explicit": Explicit, "flex": Flex, "ragged": Ragged},
}
"""The measured backends by device type and name; other devices use `Auto`."""

# The candidates take turns in every round, so that a change of the clock rate affects all of them; the median of the
# rounds ignores single delays.
ROUNDS, WARMUP = 7, 2
ERROR = 40
"""The largest accepted error against `Eager` in float64, in machine epsilons times the largest output."""


class Autotuned(Auto):
    """Runs the fastest verified candidate, measured once per machine, layer and context; otherwise `Auto`.

    Measurements are stored in the user's cache folder (ATTNRX_CACHE), or in the file `table`; a `pinned` table is
    read-only. With `measure=False`, or ATTNRX_MEASURE=0, unmeasured layers run on `Auto`. Nothing is measured while
    gradients or a graph are recorded.
    """

    def __init__(self, table: str | None = None, pinned: bool = False, measure: bool | None = None):
        self.table, self.pinned = table, pinned
        self.measure = not pinned if measure is None else measure
        self._known: dict[str, Measurements] = {}
        if pinned:
            self._measurements("cpu")  # a missing table raises before the model runs

    def at(self, spec: AttentionSpec, context: AttentionContext) -> Backend:
        candidates = CANDIDATES.get(context.device)
        if not context.free or candidates is None:
            return super().at(spec, context)
        measurements, key = self._measurements(context.device), key_of(spec, context)
        record = measurements.get(key, _is_whole)
        # A record of an earlier version may lack candidates that were added since: it is measured anew.
        complete = record is not None and candidates.keys() <= record["trials"].keys()
        if not complete and self.measure and may_measure():
            record = measured_record(spec, context, candidates)
            measurements.put(key, record)
        if record is None:
            return super().at(spec, context)
        # A pinned table may name a backend that this version lacks; and a candidate may delegate in its turn.
        return candidates.get(record["backend"], Auto)().at(spec, context)

    def _measurements(self, device: str) -> Measurements:
        if device not in self._known:
            self._known[device] = Measurements(device, self.table, self.pinned)
        return self._known[device]


def key_of(spec: AttentionSpec, context: AttentionContext) -> str:
    """Returns a text of everything that the latency of a layer depends on."""
    parts = (
        f"{spec.form} {spec.norms} width={spec.width} original={spec.original_rank}",
        # `reads` is the name of the value dimensions in stored measurements, which another name would make useless.
        f"ranks={','.join(map(str, spec.ranks))} reads={','.join(map(str, spec.value_dims))}"
        + ("" if spec.blocks is None else f" blocks={','.join(map(str, spec.blocks))}")
        # How many pairs a head rotates matters for its latency, not which frequencies they have.
        + ("" if spec.pairs is None else f" pairs={','.join(str(len(pairs)) for pairs in spec.pairs)}")
        + (" bias" if spec.pair_bias else ""),
        f"{context.images}x{context.tokens} {context.device} {str(context.dtype).removeprefix('torch.')}",
        f"threads={context.threads}",
    )
    return "attention | " + " | ".join(parts)


def _is_whole(record: Mapping[str, Any]) -> bool:
    return isinstance(record.get("backend"), str) and isinstance(record.get("trials"), Mapping)


@torch.no_grad()
def measured_record(
    spec: AttentionSpec, context: AttentionContext, candidates: Mapping[str, Callable[[], Backend]]
) -> dict[str, Any]:
    """Times a fresh layer of this shape on every candidate in turns; uses no global random generator.

    Returns the fastest backend whose output is right, and the error of every candidate against `Eager` in float64 with
    its seconds; None for a candidate that failed, and for the seconds of one whose output is wrong.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = Attention(spec).to(context.device, context.dtype).eval()
        shape = (int(context.images), int(context.tokens), spec.width)
        tokens = torch.randn(shape).to(context.device, context.dtype)
        # Images are independent: two suffice for the error, and the reference in float64 is slow.
        sample = tokens[: min(len(tokens), 2)]
        positions = _drawn_positions(spec, shape[1])
        if positions is not None:
            layer.register_forward_pre_hook(partial(_with_positions, positions))
        exact = Attention(spec, Eager()).to(context.device, torch.float64)
        exact.load_state_dict(layer.state_dict())
        # The same positions: the hook converts them to the dtype of its input.
        exact._forward_pre_hooks.update(layer._forward_pre_hooks)
        reference = exact(sample.double())
        # The smallest limit is positive, because an output may be all zeros.
        allowed = ERROR * torch.finfo(context.dtype).eps * max(float(reference.abs().max()), 1e-30)
        errors = {name: _error(layer, make, sample, reference) for name, make in candidates.items()}
        accurate = [name for name, error in errors.items() if error is not None and error <= allowed]
        seconds = _seconds(layer, {name: candidates[name]() for name in accurate}, tokens)
    best = min(seconds, key=lambda name: seconds[name], default="fused")
    return {
        "backend": best,
        "trials": {name: {"seconds": seconds.get(name), "error": error} for name, error in errors.items()},
    }


def _drawn_positions(spec: AttentionSpec, tokens: int) -> Positions | None:
    """Returns random rotations and biases for a layer that needs them; None for others."""
    heads = max(spec.heads, default=0) + 1  # a bias has the heads of the original model, of which some may be removed
    cos = sin = None
    if spec.rotates:
        angles = torch.randn(1, tokens, 1, spec.original_rank // 2)
        cos, sin = angles.cos(), angles.sin()
    bias = torch.randn(1, heads, tokens, tokens) if spec.pair_bias else None
    return Positions(0, cos, sin, bias) if spec.rotates or spec.pair_bias else None


def _with_positions(positions: Positions, layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Any, ...]:
    tables = {name: getattr(positions, name) for name in ("cos", "sin", "bias")}
    converted = {name: None if table is None else table.to(args[0]) for name, table in tables.items()}
    return args[0], None, replace(positions, **converted)


def _error(layer: Attention, make: Callable[[], Backend], tokens: TokenBatch, reference: Tensor) -> float | None:
    layer.backend = make()
    try:
        return float((layer(tokens).double() - reference).abs().max())
    except Exception:  # kernels raise errors of many types for unsupported shapes, devices and versions
        return None


def _seconds(layer: Attention, backends: Mapping[str, Backend], tokens: Tensor) -> dict[str, float]:
    """Returns the median seconds over the rounds."""
    times: dict[str, list[float]] = {name: [] for name in backends}
    for count in range(WARMUP + ROUNDS):
        for name, backend in backends.items():
            layer.backend = backend
            _timed(layer, tokens) if count < WARMUP else times[name].append(_timed(layer, tokens))
    return {name: sorted(rounds)[len(rounds) // 2] for name, rounds in times.items()}


def _timed(layer: Attention, tokens: Tensor) -> float:
    """Runs the layer twice and times the second run, because the first one allocates its plan and buffers."""
    start = 0.0
    for _ in range(2):
        start = time.perf_counter()
        layer(tokens)
        if tokens.is_cuda:  # kernels run asynchronously
            torch.cuda.synchronize(tokens.device)
    return time.perf_counter() - start


# The backends by name, with their factories.
BACKENDS: dict[str, Callable[[], Backend]] = {
    "auto": Auto,
    "eager": Eager,
    "explicit": Explicit,
    "flex": Flex,
    "fused": Fused,
    "native": Native,
    "ragged": Ragged,
    "autotuned": Autotuned,
}


def backend_of(name: str) -> Backend:
    """Returns the backend of this name, one of BACKENDS.

    Raises:
        UnknownName: No backend has this name.
        NotSupported: Its kernel cannot be built here.
    """
    if name not in BACKENDS:
        raise UnknownName("backend", name, BACKENDS)
    if name == "native":
        # `Native` would run `Fused` in its place; a backend that is requested by name must not be replaced silently.
        required_library()
    return BACKENDS[name]()


@checked(model=MODEL, backend=instance("the name of a backend, e.g. 'auto', or a Backend", str, Backend))
def use_backend(model: nn.Module, backend: str | Backend) -> nn.Module:
    """Sets the backend of every layer of the model, in place, and returns the model.

    Names: "auto" (the default of new models: "native" for float32 inference on a CPU, else the usually fastest one),
    "eager" (the reference), "explicit", "flex", "fused", "native", "ragged", or "autotuned", which measures. Layers
    whose attention is captured for a token reducer keep their backend. The choice is not saved with the model, because
    the fastest backend depends on the machine.

    Args:
        model: The model.
        backend: The name of a backend, or a backend.

    Returns:
        The model.

    Raises:
        UnknownName: No backend has this name.
        NotSupported: The model has no attnrx attention, every layer's attention is captured for a token reducer, or the
            kernel of "native" could not be built.
    """
    layers = [part for part in model.modules() if isinstance(part, Attention)]
    free = [layer for layer in layers if not isinstance(layer.backend, AttentionCapture | Observed)]
    if not free:
        cause = "every layer's attention is captured for a token reducer" if layers else "it has no attention of attnrx"
        raise NotSupported(f"no layer of this {type(model).__name__} can take another backend: {cause}.")
    new_backend = backend_of(backend) if isinstance(backend, str) else backend
    for layer in free:
        layer.backend = new_backend
    return model
