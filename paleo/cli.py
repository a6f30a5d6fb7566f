"""The command line: parse, call, print. Exit codes: 0, 1 (the answer is no: it does not fit), 2 (bad input).

Commands import what they need when they run, so that ``paleo --help`` stays quick.
"""

from __future__ import annotations

import functools
import gc
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args, get_type_hints

import typer

from paleo.errors import CapacityError, PaleoError, SpecError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

    from paleo.specs.hardware import System
    from paleo.specs.run import Run
    from paleo.studies.comparison import Objective
    from paleo.studies.cost import Tariff

app = typer.Typer(
    name="paleo",
    help="Predicts how fast a neural network trains on a machine, and how that scales, before anyone buys it.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
#: What typer raises on wrong usage; its base class has moved between versions.
_UsageError: type[Exception] = typer.BadParameter.__mro__[2]
#: Exit codes: the answer is no; the input is wrong; stopped from the keyboard; nobody reads the output any more.
NO, WRONG, INTERRUPTED, UNREAD = 1, 2, 130, 141

#: Objects made between two searches for garbage: a command makes many that it keeps, and little garbage.
ALLOCATED = 100_000
#: The largest GPU count that --gpus of ``scale`` takes, and the most counts.
MOST_GPUS, MOST_COUNTS = 10**7, 200


def _named(*kinds: str) -> Callable[[str], list[str]]:
    """Completes names of the catalog; of a list, its last name."""

    def complete(incomplete: str) -> list[str]:
        from paleo.specs.catalog import names

        before, comma, begun = incomplete.rpartition(",")
        return [before + comma + name for kind in kinds for name in names(kind) if name.startswith(begun)]

    return complete


ModelName = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A model of the catalog, or a YAML file.", autocompletion=_named("models")),
]
SystemName = Annotated[
    str,
    typer.Option(
        "--system",
        metavar="S",
        help="A system or device of the catalog, or a YAML file.",
        autocompletion=_named("systems", "devices"),
    ),
]
Shapes = Annotated[
    list[str] | None,
    typer.Option("--input", metavar="SHAPE", help="torch: 32x3x224x224, or name=8x512:int64; once for each."),
]
Sizes = Annotated[
    list[str] | None, typer.Option("--size", metavar="DIM=N", help="onnx, hf: a named dim, such as seq=2048.")
]
ModelFile = Annotated[
    str | None, typer.Option("-o", "--output", metavar="FILE", help="The model file to write. [stdout]")
]
Roofline = Annotated[str | None, typer.Option("--system", metavar="S", help="Whose roofline --plot draws.")]
Systems = Annotated[
    str,
    typer.Option(
        "--systems", metavar="A,B,C", help="Names of the catalog, or YAML files.", autocompletion=_named("systems")
    ),
]
Offered = Annotated[
    str,
    typer.Option(
        "--systems",
        metavar="A:8,B:16",
        help="Systems, each with its GPUs, else --gpus.",
        autocompletion=_named("systems"),
    ),
]
Counts = Annotated[str, typer.Option("--gpus", metavar="1,2,4,…", help="GPU counts.")]
Goal = Annotated[str, typer.Option(help="What is made small: time, cost, energy, or gpus.")]
Top = Annotated[int, typer.Option(min=1, metavar="K", help="So many plans.")]
Explain = Annotated[bool, typer.Option("--explain", help="Why the winner wins, and how near the next one is.")]
PerLayer = Annotated[bool, typer.Option("--per-layer", help="Choose the split of each layer, for chains of layers.")]
TraceFile = Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The trace, .json.")]
Mode = Annotated[
    str | None,
    typer.Argument(
        metavar="[strong|weak|both]",
        help="strong keeps the global batch, weak that of each GPU. [strong with --global-batch, else weak]",
    ),
]
ModeOption = Annotated[str | None, typer.Option("--mode", metavar="MODE", help="The same as an option.")]
Kind = Annotated[str | None, typer.Argument(metavar="[KIND]", help="models, devices, links, systems, …")]
EntryName = Annotated[str, typer.Argument(metavar="NAME", help="Any name of the catalog, or a YAML file.")]
Tables = Annotated[list[str], typer.Argument(metavar="FILE…", help="Measured tables, CSV or CSV.gz.")]
Operation = Annotated[str, typer.Argument(metavar="OP", help="all_reduce, all_gather, reduce_scatter, …")]
Payload = Annotated[str, typer.Option("--bytes", metavar="SIZE", help="Payload with its unit: 100MB, 64KiB.")]
Ranks = Annotated[int, typer.Option(help="Ranks of the group, neighbours on the system.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Plot = Annotated[str | None, typer.Option("--plot", metavar="FILE", help="Draw it, too: .png, .svg or .pdf.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Sections and streams, too.")]
Epochs = Annotated[float | None, typer.Option(help="Time, rent and energy of so many epochs of the data set.")]
Samples = Annotated[float | None, typer.Option(help="The same for so many samples.")]
Tokens = Annotated[float | None, typer.Option(help="The same for so many tokens.")]
GpuPrice = Annotated[
    str | None, typer.Option("--price", metavar="RATE", help="Rent of one GPU: '2.5 USD/h'. [catalog]")
]
Electricity = Annotated[str | None, typer.Option(metavar="RATE", help="Price of energy: '0.12 USD/kWh'. [not counted]")]
Pue = Annotated[float | None, typer.Option(help="Energy of the building over that of its machines. [1]")]
HostPower = Annotated[
    str | None, typer.Option(metavar="POWER", help="Of the host, for each GPU: '150 W'. [not counted]")
]
RankBy = Annotated[str | None, typer.Option("--objective", help="Best first by time, cost or energy.")]
CriticalBatch = Annotated[
    float | None, typer.Option(help="Gradient noise scale [samples]: large batches then need more samples.")
]
Output = Annotated[str, typer.Option("-o", "--output", metavar="FILE", help="File to write.")]


def _option(help_: str, name: str | None = None, **more: Any) -> Any:
    return typer.Option(*filter(None, [name]), help=help_, rich_help_panel="The run", **more)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of a run, shared by the commands that predict; what is not given keeps the default of ``Run``."""

    gpus: Annotated[int | None, _option("GPUs in all. [1]")] = None
    batch: Annotated[int | None, _option("Samples for each data-parallel rank and step.")] = None
    global_batch: Annotated[int | None, _option("Samples of a step over all ranks, instead of --batch.")] = None
    microbatch: Annotated[int | None, _option("Samples of one pass; a step has as many as it takes.")] = None
    seq: Annotated[int | None, _option("Sequence length, for models that have one.")] = None
    dtype: Annotated[str | None, _option("fp32, tf32, bf16, fp16, fp8. [the device's best 16 bits]")] = None
    optimizer: Annotated[str | None, _option("sgd, momentum, adam, adamw, lars, lamb. [adamw]")] = None
    strategy: Annotated[str | None, _option("Preset, degrees or both: dp, owt, tp=8,pp=4,zero=1,sp. [dp]")] = None
    schedule: Annotated[str | None, _option("Order of a pipeline: gpipe, 1f1b, … [1f1b]")] = None
    recompute: Annotated[str | None, _option("none, selective or full recomputation of activations.")] = None
    recompute_layers: Annotated[int | None, _option("Full recomputation of so many layers a stage. [all]")] = None
    software: Annotated[str | None, _option("Profile of a framework: host time, overlap. [pytorch-eager]")] = None
    calibration: Annotated[str | None, _option("auto, ideal, ppp=0.6 or a calibration. [auto]")] = None
    run_file: Annotated[str | None, _option("A run as a YAML file; options win over it.", "--run", metavar="FILE")] = (
        None
    )
    set_: Annotated[
        list[str] | None, _option("Any other field of a run, or model.PARAMETER.", "--set", metavar="KEY=VALUE")
    ] = None

    def run(self, **more: Any) -> Run:
        """The run that the options describe; SpecError names the option that is wrong."""
        from paleo.specs.loading import validate
        from paleo.specs.run import Run

        data = {**self._given(), **more}
        for key, value in self._settings().items():
            _put(data, key, value)
        file = self._file()
        model = {**file.get("model", {}), **data.get("model", {})}
        return validate(Run, {**file, **data, "model": model}, "options")

    def stated(self, name: str) -> Any:
        """A field of the run as an option or the run's file states it; None where neither does."""
        return {**self._file(), **self._given()}.get(name)

    def _given(self) -> dict[str, Any]:
        names = [field.name for field in fields(self) if field.name not in ("set_", "seq", "run_file")]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def _file(self) -> dict[str, Any]:
        """What --run states, checked by itself so that a message names the file."""
        from paleo.specs.loading import read_yaml, validate
        from paleo.specs.run import Run

        if self.run_file is None:
            return {}
        data = read_yaml(self.run_file)
        validate(Run, data, self.run_file)
        return data

    def _settings(self) -> dict[str, Any]:
        """What --seq and --set state, key by key."""
        from paleo.specs.loading import parse_yaml

        given = [("model.seq", self.seq)] if self.seq is not None else []
        for text in self.set_ or []:
            key, equals, value = text.partition("=")
            if not equals or not key.strip() or not value.strip() or len(value.splitlines()) > 1:
                raise SpecError(f"--set {text!r}: expected key=value, such as --set bucket='50 MiB' or model.seq=512")
            given.append((key.strip(), parse_yaml(f"value: {value}", where=f"--set {text}")["value"]))
        twice = [key for key, _ in given if [one for one, _ in given].count(key) > 1]
        if twice:
            raise SpecError(f"--set: {twice[0]} is stated twice; keep one")
        return dict(given)


def _put(data: dict[str, Any], key: str, value: Any) -> None:
    part, _, name = key.partition(".")
    if name and part in ("model", "input"):
        data[part] = {**data.get(part, {}), name: value}
    elif key in data:
        raise SpecError(f"--set {key}: stands beside --{key.replace('_', '-')}; keep one")
    else:
        data[key] = value


def takes_run(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of a run, packed into its argument ``options``; its own options of a name win."""
    own = inspect.signature(command, eval_str=True).parameters
    hints = get_type_hints(RunOptions, include_extras=True)
    shared = [field for field in fields(RunOptions) if field.name not in own]
    parameters = [parameter for name, parameter in own.items() if name != "options"]
    parameters += [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in shared
    ]

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        options = RunOptions(**{field.name: values.pop(field.name) for field in shared})
        command(options=options, **values)

    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper


def _show(document: Callable[[], Mapping[str, Any]], table: Callable[[], RenderableType], as_json: bool) -> None:
    """One JSON document, or tables."""
    if as_json:
        from paleo.report.documents import dumped

        sys.stdout.write(dumped(document()) + "\n")
        return
    from paleo.report.tables import console

    console().print(table())


def _warn(warnings: Sequence[str]) -> None:
    for warning in warnings:
        sys.stderr.write(f"warning: {warning}\n")


def _checked_plot(plot: str | None) -> Path | None:
    """Whether a picture of that name can be drawn, before anything is computed for it."""
    if plot is None:
        return None
    path, known = Path(plot), (".png", ".svg", ".pdf")
    if path.suffix.lower() not in known:
        raise SpecError(f"--plot {plot}: the name of a picture ends in {', '.join(known)}")
    if not path.parent.is_dir():
        raise SpecError(f"--plot {plot}: there is no folder {str(path.parent)!r}")
    return path


def _draw(path: Path | None, figure: Callable[[], Figure]) -> None:
    if path is not None:
        from paleo.report.plots import save

        save(figure(), path)
        sys.stderr.write(f"wrote {path}\n")


def _tariff(price: str | None, electricity: str | None, pue: float | None, host_power: str | None) -> Tariff:
    """What is paid beside the catalog's rent."""
    from paleo.specs.loading import validate
    from paleo.studies.cost import Tariff

    stated = {"gpu_price": price, "electricity": electricity, "pue": pue, "host_power": host_power}
    return validate(Tariff, {key: value for key, value in stated.items() if value is not None}, "options")


def _objective(text: str | None, default: Objective) -> Objective:
    from paleo.errors import near
    from paleo.studies.comparison import Objective

    for one in get_args(Objective):
        if one == (text or default):
            return cast("Objective", one)
    raise SpecError(f"--objective {text!r} is not time, cost or energy; {near(str(text), get_args(Objective))}")


def _version(wanted: bool) -> None:
    if wanted:
        from paleo import __version__

        sys.stdout.write(f"paleo {__version__}\n")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")]


@app.callback()
def _main(
    version: Version = False,
) -> None:
    pass


@app.command("list")
def list_(
    kind: Kind = None,
    as_json: AsJson = False,
) -> None:
    """What the catalog holds."""
    from paleo.report import describe, tables

    kinds = [kind] if kind is not None else list(describe.KINDS)
    found = {one: describe.lines(one) for one in kinds}
    counts = {one: f"{len(entries)}: {', '.join(list(entries)[:4])}, …" for one, entries in found.items()}
    table = tables.catalog("kinds of entries (paleo list KIND)", counts) if kind is None else None
    _show(lambda: found, lambda: table or tables.catalog(str(kind), found[str(kind)]), as_json)


@app.command()
def show(
    name: EntryName,
    as_json: AsJson = False,
) -> None:
    """All that is known of one model, device, link, system, collective, layer, strategy or optimizer."""
    from rich.console import Group

    from paleo.report import describe, tables

    found = describe.find(name)
    _show(
        lambda: {kind: describe.document(entry) for kind, entry in found},
        lambda: Group(*(tables.facts(f"{kind} {name}", describe.facts(entry)) for kind, entry in found)),
        as_json,
    )


@app.command()
@takes_run
def summary(
    model: ModelName,
    options: RunOptions,
    system: Roofline = None,
    as_json: AsJson = False,
    plot: Plot = None,
) -> None:
    """A network layer by layer: shape, parameters, FLOP, bytes, intensity, saved activations."""
    from paleo.report import documents, tables
    from paleo.specs.hardware import load_system
    from paleo.specs.model import load_model
    from paleo.studies.summary import summarise

    path = _checked_plot(plot)
    if path is not None and system is None:
        raise SpecError("--plot: a roofline is that of a device; name it with --system")
    run = options.run()
    study = summarise(load_model(model), run)
    machine = None if system is None else load_system(system)
    if path is not None and machine is not None:
        from paleo.report import plots

        _draw(path, lambda: plots.roofline(study, machine, run))
    _show(lambda: documents.summary(study), lambda: tables.summary(study), as_json)


@app.command()
@takes_run
def estimate(
    model: ModelName,
    system: SystemName,
    options: RunOptions,
    epochs: Epochs = None,
    samples: Samples = None,
    tokens: Tokens = None,
    price: GpuPrice = None,
    electricity: Electricity = None,
    pue: Pue = None,
    host_power: HostPower = None,
    as_json: AsJson = False,
    plot: Plot = None,
    verbose: Verbose = False,
) -> None:
    """One configuration: step time with its parts, memory, throughput; time, rent and energy of a training."""
    from paleo.predict import predict
    from paleo.report import documents, tables
    from paleo.specs.hardware import load_system
    from paleo.specs.model import load_model
    from paleo.studies.advice import advise
    from paleo.studies.training import amount, training

    path = _checked_plot(plot)
    network = load_model(model)
    made = predict(network, load_system(system), options.run())
    each = made.graph.tokens_per_sample
    wanted = amount(network, epochs=epochs, samples=samples, tokens=tokens, tokens_per_sample=each)
    tariff = _tariff(price, electricity, pue, host_power)
    cost = None if wanted is None else training(made, wanted, tariff)
    if path is not None:
        from paleo.report import plots

        _draw(path, lambda: plots.estimate(made))
    changes = advise(made)
    _show(
        lambda: documents.estimate(made, cost, changes),
        lambda: tables.estimate(made, cost, changes, verbose=verbose),
        as_json,
    )
    _warn(made.warnings if as_json else ())
    if not made.memory.fits:
        raise typer.Exit(NO)


@app.command()
@takes_run
def scale(
    model: ModelName,
    system: SystemName,
    gpus: Counts,
    options: RunOptions,
    mode: Mode = None,
    mode_option: ModeOption = None,
    as_json: AsJson = False,
    plot: Plot = None,
) -> None:
    """The same network on more and more GPUs: speed-up, efficiency, and where it stops paying and why."""
    from paleo.report import documents, tables
    from paleo.specs.hardware import load_system
    from paleo.specs.model import load_model
    from paleo.studies import scaling

    path = _checked_plot(plot)
    run, counts = options.run(), _counts(gpus)
    if mode is not None and mode_option not in (None, mode):
        raise SpecError(f"--mode {mode_option}: the argument says {mode!r}; keep one")
    kinds = scaling.scalings(mode or mode_option or ("weak" if run.global_batch is None else "strong"))
    network, machine = load_model(model), load_system(system)
    curves = [scaling.scale(network, machine, run, counts, kind) for kind in kinds]
    names = (network.name, machine.name)
    if path is not None:
        from paleo.report import plots

        _draw(path, lambda: plots.scale(*names, curves))
    _show(lambda: documents.scale(*names, curves), lambda: tables.scale(*names, curves), as_json)
    if not any(curve.base.runs for curve in curves):
        raise typer.Exit(NO)


def _counts(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and 0 < int(part) <= MOST_GPUS for part in parts):
        raise SpecError(f"--gpus {text!r}: expected GPU counts from 1 up, such as 1,2,4,8")
    if len(parts) > MOST_COUNTS:
        raise SpecError(f"--gpus: {len(parts)} counts; {MOST_COUNTS} are enough for a curve")
    return [int(part) for part in parts]


@app.command("plan")
@takes_run
def plan_(
    model: ModelName,
    system: SystemName,
    gpus: Counts,
    options: RunOptions,
    objective: Goal = "time",
    top: Top = 10,
    explain: Explain = False,
    per_layer: PerLayer = False,
    as_json: AsJson = False,
    plot: Plot = None,
) -> None:
    """The fastest (or cheapest) strategies of all: degrees, microbatch, recomputation, ZeRO, schedule.

    Options of a run that are given narrow the search: --strategy tp=8 tries tp=8 alone.
    """
    from paleo.report import search as shown
    from paleo.search import plans, space
    from paleo.specs.hardware import load_system
    from paleo.specs.model import load_model

    path = _checked_plot(plot)
    counts, network, machine = _counts(gpus), load_model(model), load_system(system)
    run = options.run(gpus=counts[0], strategy="dp")
    if per_layer and path is not None:
        raise SpecError("--plot draws plans of whole networks; leave out --per-layer")
    if per_layer:
        from paleo.search import hybrid

        split = hybrid.hybrid(network, machine, run)
        names = network.name, machine.name
        _show(lambda: shown.hybrid_document(*names, split), lambda: shown.hybrid_table(*names, split), as_json)
        return
    fields_of = {"microbatches": "microbatch", "recompute": "recompute", "schedules": "schedule"}
    fixed = {listed: options.stated(name) for listed, name in fields_of.items()}
    narrowed = space.within(options.stated("strategy"), **fixed)
    found = plans.search(network, machine, run, counts=counts, space=narrowed, objective=objective, top=top)
    best = plans.explain(network, machine, found) if explain else None
    names = network.name, machine.name
    if path is not None:
        from paleo.report import plots

        _draw(path, lambda: plots.plan(*names, found, machine.device.memory.capacity))
    _show(lambda: shown.document(*names, found, best), lambda: shown.table(*names, found, best), as_json)
    if not found.fitting:
        raise typer.Exit(NO)


@app.command()
@takes_run
def trace(model: ModelName, system: SystemName, options: RunOptions, output: TraceFile) -> None:
    """One step as a timeline for Perfetto or chrome://tracing: a track for each stream of each class of ranks."""
    from paleo.predict import predict
    from paleo.report.documents import dumped, write_whole
    from paleo.report.trace import trace as traced
    from paleo.specs.hardware import load_system
    from paleo.specs.model import load_model

    made = predict(load_model(model), load_system(system), options.run())
    text = dumped(traced(made)) + "\n"
    write_whole(output, lambda file: file.write(text.encode()))
    sys.stderr.write(f"wrote {output}\n")
    _warn(made.warnings)


@app.command()
@takes_run
def compare(
    model: ModelName,
    systems: Systems,
    options: RunOptions,
    epochs: Epochs = None,
    samples: Samples = None,
    tokens: Tokens = None,
    objective: RankBy = None,
    price: GpuPrice = None,
    electricity: Electricity = None,
    pue: Pue = None,
    host_power: HostPower = None,
    as_json: AsJson = False,
    plot: Plot = None,
) -> None:
    """The same run on several systems: step time, speed-up, memory, rent and energy."""
    from paleo.network.graph import build
    from paleo.report import documents, tables
    from paleo.specs.hardware import load_system
    from paleo.specs.model import load_model
    from paleo.studies import comparison
    from paleo.studies.training import amount

    path = _checked_plot(plot)
    network, run = load_model(model), options.run()
    machines = [load_system(name.strip()) for name in systems.split(",") if name.strip()]
    if not machines:
        raise SpecError(f"--systems {systems!r}: expected names such as dgx-a100-80gb,dgx-h100")
    each = None if tokens is None else build(network, batch=1, overrides=run.model).tokens_per_sample
    wanted = amount(network, epochs=epochs, samples=samples, tokens=tokens, tokens_per_sample=each)
    study = comparison.compare(network, machines, run, wanted, _tariff(price, electricity, pue, host_power))
    study = study if objective is None else study.ranked(_objective(objective, "time"))
    if path is not None:
        from paleo.report import plots

        _draw(path, lambda: plots.compare(study))
    _show(lambda: documents.compare(study), lambda: tables.compare(study), as_json)
    if not any(one.runs for one in study.candidates):
        raise typer.Exit(NO)


@app.command()
@takes_run
def report(
    model: ModelName,
    systems: Annotated[
        str, typer.Option("--systems", metavar="A:8,B:16", help="Systems, each with its GPUs or --gpus.")
    ],
    options: RunOptions,
    output: Output = "report.html",
    epochs: Epochs = None,
    samples: Samples = None,
    tokens: Tokens = None,
    objective: RankBy = None,
    counts: Annotated[str | None, typer.Option(metavar="1,2,4,…", help="GPU counts of the scaling curves.")] = None,
    mode: Annotated[str, typer.Option(help="Of the scaling curves: strong or weak.")] = "strong",
    critical_batch: CriticalBatch = None,
    price: GpuPrice = None,
    electricity: Electricity = None,
    pue: Pue = None,
    host_power: HostPower = None,
) -> None:
    """A page that answers a purchase question: one HTML file, self-contained. Without --strategy plans are searched."""
    import datetime

    from paleo.network.graph import build
    from paleo.report.documents import write_whole
    from paleo.report.html import report as page
    from paleo.search.recommended import recommended
    from paleo.specs.model import load_model
    from paleo.studies import comparison, purchase
    from paleo.studies.scaling import scalings
    from paleo.studies.training import amount

    path = Path(output)
    if not path.parent.is_dir():
        raise SpecError(f"--output {output}: there is no folder {str(path.parent)!r}")
    network, run = load_model(model), options.run()
    run = run if options.stated("strategy") is not None else run.model_copy(update={"strategy": purchase.AUTO})
    each = None if tokens is None else build(network, batch=1, overrides=run.model).tokens_per_sample
    wanted = amount(network, epochs=epochs, samples=samples, tokens=tokens, tokens_per_sample=each)
    study = purchase.purchase(
        purchase.Asked(
            network,
            _machines(systems, run.gpus),
            run,
            wanted or comparison.usual_amount(network),
            _tariff(price, electricity, pue, host_power),
            critical_batch,
            _objective(objective, "cost"),
            tuple(_counts(counts)) if counts else (),
            scalings(mode)[0],
            functools.partial(recommended, headroom=purchase.HEADROOM),
        )
    )
    text = page(study, date=datetime.date.today().isoformat())
    write_whole(path, lambda file: file.write(text.encode()))
    sys.stderr.write(f"wrote {path}\n")
    if not any(one.candidate.runs for one in study.offers):
        raise typer.Exit(NO)


@app.command()
def sweep(
    study: Annotated[str, typer.Argument(metavar="STUDY", help="A YAML file: models, systems, run, axes.")],
    output: Annotated[
        str | None, typer.Option("-o", "--output", metavar="FILE", help=".csv, .csv.gz or .parquet [STUDY.csv]")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Processes of this machine; 0: as many as pay.")] = 0,
    scheduler: Annotated[str | None, typer.Option(metavar="URL", help="A Dask scheduler: tcp://host:8786.")] = None,
) -> None:
    """The product of models, systems, runs, changed hardware and prices as a table; goes on where it was stopped."""
    from rich.console import Console
    from rich.progress import Progress

    from paleo.studies import sweep as studies

    asked = studies.load_study(study)
    target = Path(output) if output is not None else Path(study).with_suffix(".csv")
    evaluator = studies.dask(scheduler) if scheduler is not None else studies.local(asked, jobs)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"{asked.points:,} points")
        rows = studies.sweep(asked, target, evaluator, lambda done, all_: bar.update(task, completed=done, total=all_))
    sys.stderr.write(f"wrote {target}: {rows:,} rows of {asked.points:,} points\n")


def _machines(text: str, gpus: int) -> tuple[tuple[System, int], ...]:
    """Systems by name or path, each with the count behind its colon."""
    from paleo.specs.hardware import load_system

    found = []
    for part in filter(None, (one.strip() for one in text.split(","))):
        name, colon, count = part.rpartition(":")
        counted = bool(colon) and count.isdecimal()
        found.append((load_system(name if counted else part), _counts(count)[0] if counted else gpus))
    if not found:
        raise SpecError(f"--systems {text!r}: expected names such as dgx-a100-80gb:16,dgx-h100:8")
    return tuple(found)


@app.command()
def collective(
    operation: Operation,
    system: SystemName,
    bytes_: Payload,
    ranks: Ranks,
    as_json: AsJson = False,
    plot: Plot = None,
) -> None:
    """Every algorithm for a collective operation: time, bandwidth, distance from the lower bound, cross-overs."""
    from paleo.report import documents, tables
    from paleo.specs.hardware import load_system
    from paleo.studies import collective as studies
    from paleo.units import parse

    path = _checked_plot(plot)
    try:
        payload = parse(bytes_, "bytes")
    except SpecError as error:
        raise SpecError(f"--bytes: {error}") from None
    study = studies.collective(operation.replace("-", "_"), payload, ranks, load_system(system))
    if path is not None:
        from paleo.report import plots

        _draw(path, lambda: plots.collective(study))
    _show(lambda: documents.collective(study), lambda: tables.collective(study), as_json)


@app.command()
def validate(
    files: Tables,
    as_json: AsJson = False,
    predictions: Annotated[
        str | None, typer.Option(metavar="F.csv", help="Write the rows with predicted, low and high.")
    ] = None,
    plot: Plot = None,
    calibration: Annotated[
        str | None, typer.Option(help="Price devices by this calibration file, where it has them. [auto]")
    ] = None,
    worst: Annotated[int, typer.Option(min=0, help="How many of the worst rows to show.")] = 5,
) -> None:
    """Predictions against measured tables: errors by device and source, beside a roofline."""
    from paleo.validate.command import validate as run_validation

    _finish(
        run_validation(files, as_json=as_json, predictions=predictions, plot=plot, calibration=calibration, worst=worst)
    )


@app.command()
def calibrate(
    files: Annotated[list[str] | None, typer.Argument(metavar="[FILE…]", help="With --fit: measured tables.")] = None,
    fit: Annotated[bool, typer.Option("--fit", help="Fit the tables FILE…, instead of measuring a device.")] = False,
    device: Annotated[str, typer.Option(help="What to measure: cuda:0, … (cpu only to test the path).")] = "cuda:0",
    name: Annotated[
        str | None, typer.Option(help="Catalog name of the device, where it is not known by what CUDA calls it.")
    ] = None,
    output: Annotated[
        str | None, typer.Option("-o", "--output", metavar="F.yaml", help="The calibration file, for one device.")
    ] = None,
    output_dir: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Folder of one calibration file a device, and of measured tables."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="With --fit: this device, system or profile alone; on steps, links: fabric or a system."),
    ] = None,
    free: Annotated[
        str | None,
        typer.Option(
            help="With --fit, on steps: host_forward,contention,attention_slowdown; of links: inside_share,… "
            "[what rows settle]"
        ),
    ] = None,
    budget: Annotated[float, typer.Option(help="Seconds to measure for; a later run goes on.")] = 300.0,
    suites: Annotated[str | None, typer.Option(help="What to measure: gemm,elementwise,attention,…,deepbench.")] = None,
    dtypes: Annotated[str | None, typer.Option(help="In which formats: fp32,tf32,fp16,bf16. [all it has]")] = None,
    largest: Annotated[int, typer.Option(help="Bound of the sizes.")] = 16384,
) -> None:
    """Measure this machine's GPU, or fit measured tables: a calibration file."""
    from paleo.calibrate import command

    if fit:
        _finish(command.fit(files or [], output=output, output_dir=output_dir, only=only or [], free=_listed(free)))
        return
    if files:
        raise SpecError(f"{files[0]}: tables are for --fit; without it `paleo calibrate` measures --device {device}")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        _finish(command.collectives(device=device, system=name, output_dir=output_dir or "."))
        return
    _finish(
        command.measure(
            device=device, name=name, output=output, output_dir=output_dir or ".", budget=budget, largest=largest,
            suites=_listed(suites), dtypes=_listed(dtypes),
        )
    )  # fmt: skip


@app.command("import")
def import_(
    kind: Annotated[str, typer.Argument(metavar="torch|onnx|hf", help="What the network comes from.")],
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="module:factory, a file.onnx, or a config.json.")],
    inputs: Shapes = None,
    sizes: Sizes = None,
    loss: Annotated[str, typer.Option(help="auto ends a classifier with its loss, none does not.")] = "auto",
    output: ModelFile = None,
    as_json: AsJson = False,
) -> None:
    """A network from elsewhere as a model file: a torch module, an ONNX file, a configuration of transformers."""
    from paleo.importers import sources

    made = sources.imported(kind, source, inputs=inputs or (), sizes=sources.sizes_of(sizes or ()), loss=loss)
    if output is not None:
        sources.write(made.text, output)
    if as_json:
        from paleo.report.documents import dumped

        sys.stdout.write(dumped(made.document(output)) + "\n")
    elif output is None:
        sys.stdout.write(made.text)
    else:
        sys.stdout.write(f"wrote {output}: {made.line}\n")
    if made.unknown:
        _warn([f"not recognised, priced as passes over memory: {', '.join(made.unknown)}"])


def _listed(text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def _finish(code: int) -> None:
    if code:
        raise typer.Exit(code)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code."""
    gc.set_threshold(ALLOCATED)
    try:
        code = run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader (head, less) has gone; nothing is left to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = UNREAD
    gc.freeze()  # nothing is left to tidy up: the process ends
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """The exit code of a command line; what goes wrong on purpose is one line on stderr."""
    try:
        return int(app(list(arguments) or ["--help"], standalone_mode=False, prog_name="paleo") or 0)
    except CapacityError as error:
        return _fail(str(error), NO)
    except PaleoError as error:
        return _fail(str(error), WRONG)
    except typer.Abort:
        return INTERRUPTED
    except _UsageError as error:
        return _fail(error.format_message(), WRONG)  # type: ignore[attr-defined]


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"error: {' '.join(message.split())}\n")
    return code
