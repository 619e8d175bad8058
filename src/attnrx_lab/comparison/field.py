"""A benchmark of methods at equal budgets on several tasks. Each row is saved as JSON, so a run can resume."""

import platform
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from hashlib import sha256
from math import floor, inf
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from attnrx.change.predictions import Predictions
from attnrx.data import ImageSet
from attnrx.data.images import generator
from attnrx.nouns.target import Target
from attnrx.support import arguments as kinds
from attnrx.support.errors import InvalidInput, NoOpPrescription, NotSupported, UserCodeError
from attnrx.support.estimate import Estimate
from attnrx.support.hardware import device_name
from attnrx.support.optional import installed_versions
from attnrx.support.progress import Log, no_log
from attnrx.support.records import to_dict
from attnrx.support.storage import file_kind, read_record, write_json, write_text
from attnrx.vit.models import family_of, model_fingerprint
from attnrx_lab.baselines import ModelCompressor
from attnrx_lab.comparison.comparing import require_meaning
from attnrx_lab.comparison.methods import Method, MethodBench, diagnosed, points
from attnrx_lab.comparison.page import Table, page_of
from attnrx_lab.comparison.record import COUNT, ESTIMATE, NUMBER, SHARE, Unreached, kept_text
from attnrx_lab.comparison.speeds import Rates, timed
from attnrx_lab.comparison.tasks import TASKS

KIND, ROW, SCHEMA = "attnrx bench", "attnrx bench row", 1
MEASURED, UNREACHED, REFUSED = "measured", "unreached", "refused"
STEPS = 16  # the bisection for a target speed tries multiples of 1 / STEPS of the MACs
VERSIONS = ("attnrx", "torch", "timm", "transformers", "onnxruntime", "openvino", "nncf", "torch-pruning")


def _require_estimates(values: Mapping[str, Any], where: str) -> None:
    for name, value in values.items():
        ESTIMATE.check(value, f"{where}.{name}")


RECORD = kinds.record(
    {
        **dict.fromkeys(("task", "method", "text", "budget", "note"), kinds.ANY_TEXT),
        "state": kinds.one_of(MEASURED, UNREACHED, REFUSED),
        "share": SHARE,
        **dict.fromkeys(("params", "macs", "n"), COUNT),
        **dict.fromkeys(("params_share", "macs_share", "seconds"), kinds.finite(0.0)),
        "measures": kinds.record(then=_require_estimates, open=True),
        "speeds": kinds.each(
            kinds.record({"batch": COUNT, "threads": COUNT, "faster": ESTIMATE, "milliseconds": NUMBER}, open=True)
        ),
        **dict.fromkeys(("conditions", "about"), kinds.record(open=True)),
    }
)


def field_methods(model: nn.Module) -> list[Method]:
    """Returns the benchmark's default methods, e.g. attnrx's plans, token reduction, factorization and pruning.

    Token Transforming (arXiv 2506.05709) is not included. We have only its abstract, which does not define its
    matrices.
    """
    depth = len(family_of(model).attention(model))
    layers = ",".join(str(layer) for layer in sorted({1 + depth * part // 4 for part in (1, 2, 3)} - {1}))
    tokens = {"merging": "ward", "ToMe": "tome", "EViT": "evit", "random patches": "random"}
    texts = {
        "unchanged": "baseline:unchanged",
        "plan": "baseline:plan",
        "hidden units": "hidden=uniform_rank:{share} repair=100",
        **{name: f"tokens={reducer}:{{share}}@{layers}" for name, reducer in tokens.items()},
        "SVD": "baseline:svd",
        "SVD-LLM": "baseline:svd_llm",
        "CORP": "baseline:corp",
        "SnapViT": "baseline:snapvit",
        "Torch-Pruning": "baseline:torch_pruning",
        "lower resolution": "baseline:resolution",
        "vendor's int8": "baseline:int8",
    }
    return [Method.parse(f"{name}={text}") for name, text in texts.items()]


class Cell(NamedTuple):
    """One measurement to make: a method on a task, with a target budget if the method has an adjustable share."""

    task: str
    method: Method
    target: Target | None

    @property
    def budget(self) -> str:
        """The target as text, or "" if there is none."""
        if self.target is None:
            return ""
        is_speed = self.target.quantity == "latency"
        return f"faster={1 / self.target.limit:g}x" if is_speed else str(self.target)

    @property
    def file_name(self) -> str:
        """The row's file name, which is unique for every cell."""
        words = " ".join((self.task, self.method.name, self.budget))
        slug = re.sub(r"\W+", "-", words, flags=re.ASCII).strip("-").lower()
        return f"{slug[:80]}-{sha256(words.encode()).hexdigest()[:8]}.json"


@dataclass(frozen=True)
class Row:
    """One row of the benchmark table, with the costs of a method at one budget and its quality on one task.

    `state` is "measured", "unreached" (the method cannot meet the budget) or "refused" (the method cannot compress this
    model or do this task). `note` explains why a row was not measured or not timed. `conditions` are the settings that
    all rows of a table have in common. `about` contains the software versions and the hardware of this row.
    """

    task: str
    method: str
    text: str
    budget: str
    conditions: Mapping[str, Any]
    about: Mapping[str, Any]
    state: str = MEASURED
    note: str = ""
    share: float | None = None
    params: int = 0
    macs: int = 0
    params_share: float = 0.0
    macs_share: float = 0.0
    measures: Mapping[str, Estimate] = field(default_factory=dict)
    speeds: tuple[Mapping[str, Any], ...] = ()
    n: int = 0
    seconds: float = 0.0

    @property
    def rank(self) -> tuple[float, float]:
        """The row's sort key in a task's table. Larger budgets come first, and at equal budgets, better methods do."""
        first = next(iter(self.measures.values()), None)
        budget = Target.parse(self.budget).limit if self.budget else inf
        return -budget, inf if first is None else -first.value

    def save(self, path: Path) -> Path:
        """Writes the JSON file, and returns its path."""
        return write_json(path, {"kind": ROW, "schema": SCHEMA, **asdict(self)})

    @classmethod
    def load(cls, path: Path) -> "Row":
        """Reads a file written by `save`. Raises CheckpointError if the file is damaged or not a row."""
        record = read_record(path, ROW, SCHEMA, RECORD)
        values = {each.name: record[each.name] for each in fields(cls)}
        measures = {name: Estimate(**value) for name, value in record["measures"].items()}
        return cls(**{**values, "measures": measures, "speeds": tuple(record["speeds"])})


@dataclass(frozen=True, eq=False)
class FieldBench:
    """The settings of a table: a model, calibration and test images, tasks, methods, targets and timing.

    For every row, the compressed model is timed in turns with the unchanged library model, at the batch sizes and
    protocols in `rates`. Latency targets need `rates`, and are measured at the first batch size and protocol. `seed`
    seeds the methods' random draws. All methods are calibrated on the same images.
    """

    model: nn.Module
    calibration: ImageSet
    test: ImageSet
    tasks: tuple[str, ...]
    methods: tuple[Method, ...]
    targets: tuple[Target, ...]
    rates: Rates | None = None
    seed: int = 0
    batch_size: int = 64

    def __post_init__(self):
        if self.rates is None and any(target.quantity == "latency" for target in self.targets):
            raise InvalidInput("a budget of latency needs batches to time (--batches).")
        for task in self.tasks:
            TASKS[task].require(self.model, self.test)

    @property
    def cells(self) -> Iterator[Cell]:
        """All cells to measure, task by task and method by method."""
        for task in self.tasks:
            for method in self.methods:
                yield from (Cell(task, method, each) for each in (self.targets if method.varies else (None,)))

    @cached_property
    def conditions(self) -> dict[str, Any]:
        """The settings that must be equal in all rows of a table."""
        return {
            "model": model_fingerprint(self.model),
            "calibration": self.calibration.fingerprint,
            "test": self.test.fingerprint,
            "seed": self.seed,
            "rates": None if self.rates is None else to_dict(self.rates),
        }

    def run(self, folder: Path | str, log: Log = no_log) -> list[Row]:
        """Measures every row that is missing from the folder, and writes the table after each row.

        FOLDER/rows contains one file per row. Rows that were refused are measured again. Rows of methods that are not
        in `methods` stay in the table.

        Raises:
            InvalidInput: The folder has rows from another model, other images, another seed or other timing settings,
                or a table that attnrx did not write.
        """
        folder = Path(folder)
        rows = self._stored(folder)
        runs: dict[str, _TaskRun] = {}
        for cell in self.cells:
            path = folder / "rows" / cell.file_name
            if path in rows and rows[path].state != REFUSED:
                continue
            run = runs.setdefault(cell.task, _TaskRun(self, cell.task, log))
            rows[path] = run.row(cell)
            rows[path].save(path)
            log(": ".join((" ".join((cell.task, cell.method.name, cell.budget)), _summary(rows[path]))))
            write_table(folder, rows.values())
        if not runs:  # an earlier run may have stopped after writing a row and before writing the table
            write_table(folder, rows.values())
        return list(rows.values())

    def repeat(self, folder: Path | str, count: int, log: Log = no_log) -> list["Repeat"]:
        """Repeats `count` random rows of a table with another seed (`seed` + 1), and compares each row's first measure.

        FOLDER/repeats contains the repeated rows. Rows that are already in this folder are loaded.

        Raises:
            InvalidInput: As for `run`.
        """
        rows, other = self._stored(Path(folder)), replace(self, seed=self.seed + 1)
        cells = [cell for cell in self.cells if (row := rows.get(Path(folder) / "rows" / cell.file_name)) is not None]
        cells = [cell for cell in cells if rows[Path(folder) / "rows" / cell.file_name].measures]
        order = torch.randperm(len(cells), generator=generator(self.seed, count)).tolist()[:count]
        chosen, runs, repeats = [cells[index] for index in sorted(order)], dict[str, _TaskRun](), list[Repeat]()
        for cell in chosen:
            path = Path(folder) / "repeats" / cell.file_name
            if path.exists():
                row = other._required(path)
            else:
                row = runs.setdefault(cell.task, _TaskRun(other, cell.task, log)).row(cell)
                row.save(path)
            repeats.append(Repeat(rows[Path(folder) / "rows" / cell.file_name], row))
            log(", ".join(repeats[-1].cells))
        return repeats

    def _stored(self, folder: Path) -> dict[Path, Row]:
        found = file_kind(folder / "bench.json")
        if found != KIND and any((folder / name).exists() for name in ("bench.json", "bench.md", "index.html")):
            raise InvalidInput(f"{folder} has a table that attnrx did not write; choose another folder.")
        return {path: self._required(path) for path in sorted((folder / "rows").glob("*.json"))}

    def _required(self, path: Path) -> Row:
        row = Row.load(path)
        for name, value in self.conditions.items():
            if row.conditions.get(name) != value:
                raise InvalidInput(
                    f"{path} was measured with {name}={row.conditions.get(name)}, and this call has {value}: rows of a "
                    "table have the same model, images, seed and conditions. Choose another folder."
                )
        return row


@dataclass(frozen=True)
class Repeat:
    """A stored row of a table, and the same measurement repeated with another seed."""

    stored: Row
    again: Row

    @property
    def holds(self) -> bool:
        """Whether the two rows' intervals of the first measure overlap."""
        # An interval covers the choice of test images, and not the random draws of a method. So a row of a method that
        # draws, e.g. for a repair, may leave the interval of one measurement.
        name, expected = next(iter(self.stored.measures.items()))
        found = self.again.measures.get(name)
        return found is not None and expected.low <= found.high and found.low <= expected.high

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of this repeat's row in the table of repeats."""
        name, expected = next(iter(self.stored.measures.items()))
        found = self.again.measures.get(name)
        again, verdict = self.again.state if found is None else found.text(2), "holds" if self.holds else "DIFFERS"
        return self.stored.task, self.stored.method, self.stored.budget, name, expected.text(2), again, verdict


class _TaskRun:
    """Measures the rows of one task. It computes the task's model, its diagnosis and its outputs only once."""

    def __init__(self, bench: FieldBench, task: str, log: Log):
        self.bench, self.task, self.log = bench, TASKS[task], log
        self._compressors: dict[str, ModelCompressor] = {}

    @cached_property
    def model(self) -> nn.Module:
        return self.task.prepared(self.bench.model)

    @cached_property
    def methods(self) -> MethodBench:
        bench = self.bench
        about = bench.batch_size, bench.seed, self.log
        diagnosis = diagnosed(self.model, bench.methods, bench.calibration, *about)
        images = bench.calibration, bench.test
        return MethodBench(self.model, diagnosis, *images, bench.seed, bench.batch_size, self.task.prepared)

    @cached_property
    def original(self) -> Predictions:
        return self.task.outputs(self.model, self.bench.test, self.bench.batch_size)

    @cached_property
    def library_model(self) -> nn.Module:
        return family_of(self.model).library_model(self.model)

    def row(self, cell: Cell) -> Row:
        """Measures one row. If the method does not support the model or the task, the row's `note` explains why."""
        started = time.perf_counter()
        about = {
            "hardware": device_name(str(next(self.bench.model.parameters()).device)),
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            **installed_versions(*VERSIONS),
        }
        row = Row(cell.task, cell.method.name, cell.method.text, cell.budget, self.bench.conditions, about)
        try:
            row = self._measured(row, cell)
        except (NotSupported, InvalidInput, NoOpPrescription, UserCodeError) as error:
            note = str(error).replace(cell.method.folder or "\0", cell.method.text)  # keeps local paths out of the file
            row = replace(row, state=REFUSED, note=note)
        return replace(row, seconds=time.perf_counter() - started)

    def _measured(self, row: Row, cell: Cell) -> Row:
        method = cell.method
        if self.task.name != "speed":  # for speed, untrained reducers are fine, because the time is the same
            require_meaning(method)
        if self._compressors.keys() != {method.name}:  # keeps only one, because it holds decompositions and models
            self._compressors = {method.name: self.methods.compressor(method)}
        compressor, before = self._compressors[method.name], family_of(self.model).costs(self.model)
        if cell.target is not None and cell.target.quantity == "latency":
            found = self._fast_enough(compressor, 1 / cell.target.limit)
        else:
            targets = () if cell.target is None else (cell.target.limit,)
            found = next(points(method, compressor, before, (), targets))
        if isinstance(found, Unreached):
            return replace(row, state=UNREACHED, note=f"{found.cells[2]}: {found.cells[6]}")
        if isinstance(found, str):
            return replace(row, state=UNREACHED, note=found)
        share, costs = found[0], compressor.costs(found[0])
        smaller = compressor.make(share)
        outputs = self.task.outputs(smaller, self.bench.test, self.bench.batch_size)
        try:
            speeds, note = self._speeds(smaller), ""
        except NotSupported as error:
            speeds, note = (), f"not timed: {error}"
        return replace(
            row,
            note=note,
            share=share if method.varies else None,
            params=costs.params,
            macs=costs.macs,
            params_share=costs.params / before.params,
            macs_share=costs.macs / before.macs,
            measures=self.task.measures(self.original, outputs, 0),  # the intervals of all rows use seed 0
            speeds=speeds,
            n=len(self.bench.test),
        )

    def _speeds(self, model: nn.Module, first: bool = False) -> tuple[dict[str, Any], ...]:
        """Times a model in turns with the library's model. `first` selects only the first batch size and protocol."""
        rates = self.bench.rates
        if rates is None:
            return ()
        if first:
            rates = replace(rates, batches=rates.batches[:1], protocols=rates.protocols[:1])
        speeds = []
        for found in timed({"smaller": model, "": self.library_model}, rates, self.methods):
            latency = found["smaller"]
            speeds.append(
                {
                    "batch": latency.batch,
                    "threads": latency.threads,
                    "faster": asdict(latency.faster),
                    "milliseconds": 1000 * latency.candidate.median,
                    "original_milliseconds": 1000 * latency.reference.median,
                    "rounds": latency.rounds,
                    "clock": latency.clock,
                    "hardware": latency.hardware,
                    "processors_taken": latency.taken,
                }
            )
        return tuple(speeds)

    def _fast_enough(self, compressor: ModelCompressor, faster: float) -> tuple[float, None] | str:
        """Returns the largest share with a speed-up of at least `faster`.

        If no share is fast enough, the method returns a note with the largest measured speed-up. The bisection tries
        multiples of 1 / STEPS of the MACs.
        """
        macs, best, fastest, low, high = family_of(self.model).costs(self.model).macs, None, 0.0, 0, STEPS
        while high - low > 1:
            middle = (low + high) // 2
            share = compressor.share_within(floor(middle / STEPS * macs))
            if share is None:
                low = middle
                continue
            speed = self._speeds(compressor.make(share), True)[0]["faster"]["value"]
            fastest = max(fastest, speed)
            self.log(f"{speed:.2f}x at {100 * middle / STEPS:.0f} % of the MACs")
            low, high, best = (middle, high, share) if speed >= faster else (low, middle, best)
        return (best, None) if best is not None else f"at most {fastest:.2f}x was measured"


def tables_of(rows: Sequence[Row]) -> list[Table]:
    """Returns one table per task. Rows are sorted by descending budget, then by descending quality."""
    tables = []
    for task in dict.fromkeys(row.task for row in rows):
        found = sorted((row for row in rows if row.task == task), key=lambda row: row.rank)
        measures = list(dict.fromkeys(name for row in found for name in row.measures))
        speeds = list(dict.fromkeys(_where(speed) for row in found for speed in row.speeds))
        columns = ("budget", "method", *measures, *speeds, "MACs", "parameters", "kept", "note")
        tables.append(Table(task, columns, tuple(_cells(row, measures, speeds) for row in found)))
    return tables


def _where(speed: Mapping[str, Any]) -> str:
    return f"speed, batch {speed['batch']}, {speed['threads']} thread{'s' * (speed['threads'] != 1)}"


def _cells(row: Row, measures: Sequence[str], speeds: Sequence[str]) -> tuple[str, ...]:
    times = {_where(speed): Estimate(**speed["faster"]).text(2) for speed in row.speeds}
    # Percentages and points have one decimal, and divergences have three.
    texts = {name: each.text(1 if name.endswith(("%", "points")) else 3) for name, each in row.measures.items()}
    is_measured = row.state == MEASURED
    costs = [f"{100 * share:.1f} %" if is_measured else "-" for share in (row.macs_share, row.params_share)]
    note = row.note if is_measured else f"{row.state}: {row.note}"
    values = *(texts.get(name, "-") for name in measures), *(times.get(name, "-") for name in speeds)
    return row.budget or "own cost", row.method, *values, *costs, kept_text(row.share), note


def _summary(row: Row) -> str:
    parts = [f"{name} {each.text(2)}" for name, each in list(row.measures.items())[:1]]
    parts += [f"{_where(speed)} {speed['faster']['value']:.2f}x" for speed in row.speeds]
    return ", ".join((*parts, f"{100 * row.macs_share:.1f} % of the MACs")) if row.state == MEASURED else row.note


def write_table(folder: Path | str, rows: Iterable[Row]) -> None:
    """Writes these rows to bench.json, bench.md and index.html in the folder."""
    rows = sorted(rows, key=lambda row: (list(TASKS).index(row.task), *row.rank, row.method))
    record = {"kind": KIND, "schema": SCHEMA, "rows": [asdict(row) for row in rows]}
    write_json(Path(folder) / "bench.json", record)
    tables, about = tables_of(rows), about_rows(rows)
    write_text(Path(folder) / "bench.md", "\n\n".join((*(table.to_markdown() for table in tables), about)) + "\n")
    write_text(Path(folder) / "index.html", page_of(tables, about))


def about_rows(rows: Sequence[Row]) -> str:
    """Returns one or two sentences that say how the rows were measured."""
    conditions = rows[0].conditions
    places = sorted({f"{row.about['hardware']}, torch {row.about.get('torch', '?')}" for row in rows})
    return (
        f"tested on {conditions['test']}, calibrated on {conditions['calibration']}, seed {conditions['seed']}; "
        f"intervals are 95 % over images, those of speeds over rounds. {'; '.join(places)}."
    )
