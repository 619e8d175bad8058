"""Alternating least squares on factored tensors beside tensorly's parafac on the same tensors formed in full.

    python benchmarks/decomposition.py --cases 384x6x64:96 384x6x64:192 768x12x64:168 --out decomposition.json

A case is WIDTHxHEADSxINNER:RANK, a tensor of width x width x heads. Start, updates and number of sweeps are the same,
in float64, so the errors must agree: the run ends with an error if they differ by more than --agreement. All take
turns in one run; a ratio is the median over rounds of tensorly / ours, with its 95 % interval. Forming the tensor for
tensorly is not counted. Needs tensorly.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

import torch
from threadpoolctl import threadpool_info, threadpool_limits

from attnrx.support.estimate import Estimate
from attnrx.support.storage import write_json
from attnrx.vit.costs import Timing, device_name, interleave, ratio_of
from attnrx_lab.decompositions import Canonical, FactoredTensor, als
from attnrx_lab.decompositions.canonical import starting_terms

HEADER = (
    f"{'tensor':<14}{'rank':>5}{'sweeps':>7}{'error':>12}  {'baseline':<9}{'ours s':>9}{'baseline s':>9}"
    f"{'baseline / ours (95 %)':>24}"
)


@dataclass(frozen=True)
class Case:
    """The shape of one tensor, and the requested result."""

    width: int
    heads: int
    inner: int
    rank: int
    sweeps: int
    start: str

    def tensor(self) -> FactoredTensor:
        """Seeded heads with falling spectra, of different strengths."""
        generator = torch.Generator().manual_seed(0)
        shape = self.heads, self.inner, self.width
        left, right = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(2))
        falling = torch.exp(-torch.arange(self.inner, dtype=torch.float64) / self.inner)[:, None]
        # Of equal heads the start by water-filling could be a saddle, at which no sweep moves a term.
        strength = torch.linspace(0.5, 1.5, self.heads, dtype=torch.float64)[:, None, None]
        return FactoredTensor(left * falling * strength, right * falling)


@dataclass(frozen=True)
class Baseline:
    """One backend of tensorly beside ours."""

    backend: str
    timing: Timing
    ratio: Estimate
    error: float


@dataclass(frozen=True)
class Result:
    """One case: times, and the errors that must agree."""

    case: Case
    timing: Timing
    error: float
    baselines: tuple[Baseline, ...]

    @property
    def disagreement(self) -> float:
        """The largest difference of a relative error from ours."""
        return max((abs(baseline.error - self.error) for baseline in self.baselines), default=0.0)

    def __str__(self) -> str:
        case, lines = self.case, []
        for baseline in self.baselines:
            ratio = baseline.ratio
            lines.append(
                f"{f'{case.width}x{case.width}x{case.heads}':<14}{case.rank:>5}{case.sweeps:>7}{self.error:>12.8f}  "
                f"{baseline.backend:<9}{self.timing.median:>9.3f}{baseline.timing.median:>9.3f}"
                f"{f'{ratio.value:.1f} ({ratio.low:.1f}-{ratio.high:.1f})':>24}"
            )
        return "\n".join(lines)


def parafac(tensorly: ModuleType, backend: str, tensor: FactoredTensor, start: Canonical, sweeps: int) -> Callable:
    """Returns a function that runs tensorly from the start and returns its factors."""
    from tensorly.cp_tensor import CPTensor
    from tensorly.decomposition import parafac as run

    def to_backend(values: torch.Tensor) -> object:
        return values.clone() if backend == "pytorch" else values.numpy().copy()

    dense, factors = to_backend(tensor.dense()), [to_backend(factor) for factor in start.factors]

    def decompose() -> list[torch.Tensor]:
        tensorly.set_backend(backend)  # a global setting, and the backends take turns
        # Copies, so that every run starts from the same factors whatever the last one did with them.
        begin = CPTensor((None, [tensorly.copy(factor) for factor in factors]))
        # Without a tolerance it takes all sweeps, as ours does.
        result = run(dense, start.rank, n_iter_max=sweeps, init=begin, tol=0)
        return [torch.as_tensor(factor) for factor in result.factors]

    return decompose


def measure(tensorly: ModuleType, case: Case, arguments: argparse.Namespace) -> Result:
    """Times ours and each backend in turn, after one run of each whose errors are compared."""
    tensor = case.tensor()
    start = starting_terms(tensor, case.rank, case.start, seed=0)

    def ours() -> Canonical:
        return als(tensor, case.rank, start=start, sweeps=case.sweeps, tolerance=0.0)

    # The dense tensor is formed here, once and untimed; ours works on the factors of the heads.
    theirs = {name: parafac(tensorly, name, tensor, start, case.sweeps) for name in arguments.backends}
    error = tensor.relative_error(*ours().factors)
    errors = {name: tensor.relative_error(*run()) for name, run in theirs.items()}
    # Without a warm-up, because each has run once above.
    seconds = interleave({"ours": ours, **theirs}, rounds=arguments.rounds, warmup=0, clock=arguments.clock)
    baselines = (
        Baseline(name, Timing.of(seconds[name]), ratio_of(seconds[name], seconds["ours"]), errors[name])
        for name in theirs
    )
    return Result(case, Timing.of(seconds["ours"]), error, tuple(baselines))


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["384x6x64:96", "384x6x64:192", "768x12x64:168"])
    parser.add_argument("--sweeps", type=int, default=10)
    parser.add_argument("--start", default="random", help="random or water_filling")
    parser.add_argument("--backends", nargs="+", default=["numpy", "pytorch"], choices=["numpy", "pytorch"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", default="wall", choices=["wall", "cpu"], help="cpu: for a machine that is busy")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch and of the BLAS of numpy")
    parser.add_argument("--agreement", type=float, default=1e-10, help="largest difference of the relative errors")
    parser.add_argument("--out", type=Path, default=None, help="JSON file for the results")
    return parser.parse_args(words)


def read_case(text: str, arguments: argparse.Namespace) -> Case:
    """Reads WIDTHxHEADSxINNER:RANK."""
    try:
        shape, rank = text.split(":")
        width, heads, inner = (int(size) for size in shape.split("x"))
        return Case(width, heads, inner, int(rank), arguments.sweeps, arguments.start)
    except ValueError:
        sys.exit(f"case {text!r} is not WIDTHxHEADSxINNER:RANK, e.g. 384x6x64:96")


def main(words: list[str] | None = None) -> int:
    """Runs the benchmark."""
    arguments = parse(words)
    cases = [read_case(text, arguments) for text in arguments.cases]
    try:
        import tensorly
    except ImportError:
        sys.exit("this benchmark compares with tensorly, which is not installed: pip install tensorly==0.10.0")
    torch.set_num_threads(arguments.threads)
    # NumPy's BLAS has threads of its own, which torch does not set.
    with threadpool_limits(arguments.threads):
        about = {
            "hardware": device_name("cpu"),
            "threads": {"torch": torch.get_num_threads()}
            | {pool["internal_api"]: pool["num_threads"] for pool in threadpool_info()},
            "clock": arguments.clock,
            "torch": torch.__version__,
            "tensorly": tensorly.__version__,
        }
        print(", ".join(f"{name}: {fact}" for name, fact in about.items()))
        print(HEADER)
        results = []
        for case in cases:
            results.append(measure(tensorly, case, arguments))
            print(results[-1], flush=True)
    if arguments.out:
        record = {"benchmark": "decomposition", **about, "results": [asdict(result) for result in results]}
        print(f"written to {write_json(arguments.out, record)}")
    worst = max(result.disagreement for result in results)
    print(f"largest difference of the errors: {worst:.1e}")
    return int(worst > arguments.agreement)  # different errors mean different computations, so no ratio of their times


if __name__ == "__main__":
    sys.exit(main())
