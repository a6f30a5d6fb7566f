"""Options that several commands take: names of the catalog, counts, output, those of a run, of what a training is to
reach and costs, and of a run that is long enough to fail."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from paleo.errors import SpecError

if TYPE_CHECKING:
    from paleo.specs.run import Run
    from paleo.studies.cost import Tariff
    from paleo.studies.long_run import LongRunOptions

#: Collective operations that the shell completes, and formats.
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce")
DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8", "fp4")


def completes(*kinds: str) -> Callable[[str], list[str]]:
    """Completes names of the catalog, by its kinds; of a list, its last name."""

    def complete(incomplete: str) -> list[str]:
        return _completed(incomplete, (name for kind in kinds for name in _names(kind)))

    return complete


def words(*known: str) -> Callable[[str], list[str]]:
    """Completes one of these words."""
    return lambda incomplete: _completed(incomplete, known)


def _completed(incomplete: str, known: Iterable[str]) -> list[str]:
    before, comma, begun = incomplete.rpartition(",")
    return [before + comma + name for name in known if name.startswith(begun)]


def _names(kind: str) -> Iterable[str]:
    """Names of a kind: files of the catalog, or what is registered."""
    from paleo.specs.catalog import FOLDERS, names

    if kind in FOLDERS:
        return names(kind)
    from paleo.report.describe import lines

    return lines(kind)


ModelName = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A model of the catalog, or a YAML file.", autocompletion=completes("models")),
]
SystemName = Annotated[
    str,
    typer.Option(
        "--system",
        metavar="S",
        help="A system or device of the catalog, or a YAML file.",
        autocompletion=completes("systems", "devices"),
    ),
]
Systems = Annotated[
    str,
    typer.Option(
        "--systems",
        metavar="A,B,C",
        help="Systems or devices of the catalog, or YAML files.",
        autocompletion=completes("systems", "devices"),
    ),
]
Counts = Annotated[str, typer.Option("--gpus", metavar="1,2,4,…", help="GPU counts: 8,16 or 8..64, by doublings.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Plot = Annotated[str | None, typer.Option("--plot", metavar="FILE", help="Draw it, too: .png, .svg or .pdf.")]


def _option(help_: str, name: str | None = None, **more: Any) -> Any:
    return typer.Option(*filter(None, [name]), help=help_, rich_help_panel="The run", **more)


def whole(text: str) -> int:
    """A whole number in digits, perhaps with commas between thousands: ``1,024``."""
    digits = text.replace(",", "") if re.fullmatch(r"\s*\d{1,3}(,\d{3})+\s*", text) else text
    try:
        return int(digits)
    except ValueError:
        raise typer.BadParameter(f"{text[:80]!r} is not a whole number; write it in digits, such as 1024") from None


def _whole(help_: str) -> Any:
    return _option(help_, parser=whole, metavar="N")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of a run, shared by the commands that predict; what is not given keeps the default of ``Run``."""

    gpus: Annotated[int | None, _whole("GPUs in all. [1]")] = None
    batch: Annotated[
        int | None, _whole("Samples for each data-parallel rank and step. [32 samples, or 8 sequences]")
    ] = None
    global_batch: Annotated[
        int | None, _whole("Samples of a step over all ranks, instead of --batch. [--batch times the ranks]")
    ] = None
    microbatch: Annotated[
        int | None, _whole("Samples of one pass; a step has as many as it takes. [all, or 1 in a pipeline]")
    ] = None
    seq: Annotated[int | None, _whole("Sequence length, for models that have one. [the model's]")] = None
    dtype: Annotated[
        str | None,
        _option("fp32, tf32, bf16, fp16, fp8, fp4. [the device's best 16 bits]", autocompletion=words(*DTYPES)),
    ] = None
    optimizer: Annotated[
        str | None,
        _option("sgd, momentum, rmsprop, adam, adamw, lars, lamb. [adamw]", autocompletion=completes("optimizers")),
    ] = None
    strategy: Annotated[
        str | None,
        _option("Preset, degrees or both: dp, owt, tp=8,pp=4,zero=1,sp. [dp]", autocompletion=completes("strategies")),
    ] = None
    schedule: Annotated[
        str | None, _option("Order of a pipeline: gpipe, 1f1b, … [1f1b]", autocompletion=completes("schedules"))
    ] = None
    recompute: Annotated[
        str | None,
        _option(
            "Recomputation of activations: none, selective or full; of modules: --set recompute_modules=… [none]",
            autocompletion=words("none", "selective", "full"),
        ),
    ] = None
    recompute_layers: Annotated[int | None, _whole("Full recomputation of so many layers a stage. [all]")] = None
    lora: Annotated[str | None, _option("Adapters of a rank, the rest frozen: 16, 16:all, 16:mlp. [none]")] = None
    qlora: Annotated[bool | None, _option("Frozen weights in NF4; without --lora, 64:all.", "--qlora")] = None
    freeze: Annotated[str | None, _option("Layers that are not trained: embed,block.[0-9]. [none]")] = None
    compress: Annotated[str | None, _option("Compressed gradients: fp16, onebit, topk:0.001, … [none]")] = None
    consistency: Annotated[str | None, _option("bsp, async, ssp:4, local:32, diloco:100, gossip:exp2, … [bsp]")] = None
    servers: Annotated[int | None, _whole("Parameter servers, for async and ssp. [async: one]")] = None
    jitter: Annotated[
        str | None, _option("Noise of a rank's step, a share of it: 0.02, with its own 0.02,0.01, or traces. [0]")
    ] = None
    nodes: Annotated[str | None, _option("Where nodes lie: packed, random, spread:8 leaf switches. [packed]")] = None
    background: Annotated[float | None, _option("Share of the links above leaf switches that others use. [0]")] = None
    neighbour: Annotated[
        str | None, _option("A second job there: traffic, nodes, share of the time: all_to_all:32:0.4. [none]")
    ] = None
    software: Annotated[
        str | None,
        _option(
            "Profile of a framework, NAME or NAME@RELEASE; plan: any, for what any of them runs. [pytorch-eager]",
            autocompletion=completes("software"),
        ),
    ] = None
    calibration: Annotated[
        str | None,
        _option("auto, ideal, ppp=0.6 or a calibration. [auto]", autocompletion=words("auto", "ideal", "ppp=")),
    ] = None
    run_file: Annotated[str | None, _option("A run as a YAML file; options win over it.", "--run", metavar="FILE")] = (
        None
    )
    set_: Annotated[
        list[str] | None, _option("Any other field of a run, or model.PARAMETER.", "--set", metavar="KEY=VALUE")
    ] = None

    def run(self) -> Run:
        """The run that the options describe, its fields set as far as stated; SpecError names the option that is
        wrong."""
        from paleo.specs.loading import validate
        from paleo.specs.run import Run

        data = self._stated_fields()
        for key, value in self._settings().items():
            _put(data, key, value)
        file = self._file()
        if "batch" in data or "global_batch" in data:  # one follows from the other: an option wins over either
            file = {key: value for key, value in file.items() if key not in ("batch", "global_batch")}
        sizes = {**file.get("model", {}), **data.get("model", {})}
        return validate(Run, {**file, **data, **({"model": sizes} if sizes else {})}, "options")

    def _stated_fields(self) -> dict[str, Any]:
        names = [field.name for field in fields(self) if field.name not in ("set_", "seq", "run_file")]
        stated = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return stated if self.jitter is None else {**stated, **_noise(self.jitter)}

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

        settings = [("model.seq", self.seq)] if self.seq is not None else []
        for text in self.set_ or []:
            key, equals, value = text.partition("=")
            if not equals or not key.strip() or not value.strip() or len(value.splitlines()) > 1:
                raise SpecError(f"--set {text!r}: expected key=value, such as --set bucket='50 MiB' or model.seq=512")
            settings.append((key.strip(), parse_yaml(f"value: {value}", where=f"--set {text}")["value"]))
        twice = [key for key, _ in settings if [name for name, _ in settings].count(key) > 1]
        if twice:
            raise SpecError(f"--set: {twice[0]} is stated twice; keep one")
        return dict(settings)


def _noise(text: str) -> dict[str, float]:
    """Fields of a run that --jitter states."""
    from paleo.step.waiting import noise_named

    independent, persistent = noise_named(text)
    return {"jitter": independent, **({"slow_ranks": persistent} if persistent else {})}


def _put(data: dict[str, Any], key: str, value: Any) -> None:
    part, _, name = key.partition(".")
    if name and part in ("model", "input"):
        data[part] = {**data.get(part, {}), name: value}
    elif key in data:
        raise SpecError(f"--set {key}: stands beside --{key.replace('_', '-')}; keep one")
    else:
        data[key] = value


def packs(argument: str, options: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the options that the fields of a dataclass are, packed into one argument; the command's own
    options of a name win."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        stated = inspect.signature(command, eval_str=True).parameters
        hints = get_type_hints(options, include_extras=True)
        shared = [field for field in fields(options) if field.name not in stated]
        parameters = [parameter for name, parameter in stated.items() if name != argument]
        parameters += [
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
            )
            for field in shared
        ]

        @functools.wraps(command)
        def wrapper(**values: Any) -> None:
            packed = options(**{field.name: values.pop(field.name) for field in shared})
            command(**{argument: packed}, **values)

        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return wrapper

    return decorate


#: The options of a run, in the argument ``options``.
takes_run = packs("options", RunOptions)


Loss = Annotated[
    float | None, typer.Option(help="Train a language model to this loss in nats a token, by Chinchilla's law.")
]
Target = Annotated[
    str | None,
    typer.Option(metavar="TASK", help="Train to the target of a task: mlperf:bert.", autocompletion=completes("tasks")),
]
NoiseScale = Annotated[
    float | None,
    typer.Option(help="Critical batch in samples: a batch as large needs twice the samples. [not counted]"),
]


def count(text: str) -> float:
    """A number of samples or tokens, perhaps with a prefix: ``15T``."""
    from paleo.units import parse

    try:
        return parse(text, "count")
    except SpecError as error:
        raise typer.BadParameter(str(error)) from None


Epochs = Annotated[float | None, typer.Option(help="Time, rent and energy of so many epochs of the data set.")]
Samples = Annotated[
    float | None, typer.Option(parser=count, metavar="N", help="The same for so many samples: 4M or 4000000.")
]
Tokens = Annotated[float | None, typer.Option(parser=count, metavar="N", help="The same for so many tokens: 15T.")]
GpuPrice = Annotated[
    str | None,
    typer.Option(
        "--price",
        metavar="RATE",
        help="Rent of one GPU: '2.5 USD/h', or by system in USD an hour: A=2.1,B=1.3. [catalog and price lists]",
    ),
]
RentTerm = Annotated[
    str, typer.Option("--term", metavar="TERM", help="Rented on-demand, 1-year, 3-year or spot (dated price lists).")
]
Bought = Annotated[
    float | None,
    typer.Option("--buy", metavar="YEARS", help="Machines are bought and written off over so many years. [rented]"),
]
Electricity = Annotated[str | None, typer.Option(metavar="RATE", help="Price of energy: '0.12 USD/kWh'. [not counted]")]
Pue = Annotated[float | None, typer.Option(help="Energy of the building over that of its machines. [1]")]
HostPower = Annotated[
    str | None, typer.Option(metavar="POWER", help="Of the host, for each GPU: '150 W'. [not counted]")
]
RankBy = Annotated[str | None, typer.Option("--objective", help="Best first by time, cost or energy.")]


@dataclass(frozen=True, kw_only=True)
class TariffOptions:
    """What is paid beside the catalog's rent, for the commands that price a training."""

    price: GpuPrice = None
    electricity: Electricity = None
    pue: Pue = None
    host_power: HostPower = None
    term: RentTerm = "on-demand"
    buy: Bought = None

    def tariff(self) -> Tariff:
        """The tariff that the options describe; SpecError names the option that is wrong."""
        from paleo.studies.cost import stated_tariff

        return stated_tariff(**asdict(self))


#: Those options, in the argument ``rates``.
takes_tariff = packs("rates", TariffOptions)


def _long_run(help_: str, name: str | None = None, **more: Any) -> Any:
    return typer.Option(*filter(None, [name]), help=help_, rich_help_panel="A long run", **more)


@dataclass(frozen=True, kw_only=True)
class LongRunFlags:
    """Options of failures, checkpoints and restarts; any of them makes the command count failures."""

    goodput: Annotated[bool, _long_run("Count failures, checkpoints and restarts in.", "--goodput")] = False
    failures: Annotated[str | None, _long_run("Of a node: '4/knodeday'. [the system's]", metavar="RATE")] = None
    checkpoint: Annotated[str | None, _long_run("auto, 30min or 250steps. [auto]", metavar="EVERY")] = None
    checkpointing: Annotated[str | None, _long_run("sync, async or memory (and storage behind it). [sync]")] = None
    storage: Annotated[str | None, _long_run("What it takes in: '2 GB/s'. [100 GB/s]", metavar="RATE")] = None
    storage_size: Annotated[str | None, _long_run("What it holds: '10 TB'. [enough]", metavar="BYTES")] = None
    restart: Annotated[str | None, _long_run("From a failure to the next step. [3 min + load]", metavar="TIME")] = None
    spares: Annotated[int | None, _long_run("Spare nodes, paid for. [as many as it takes]", min=0, max=10**6)] = None
    repair: Annotated[str | None, _long_run("How long a failed node is away. [24 h]", metavar="TIME")] = None
    elastic: Annotated[bool, _long_run("Go on without the replica that failed.", "--elastic")] = False

    def keywords(self) -> dict[str, Any]:
        """The options as keywords of a question."""
        return asdict(self)

    def stated(self) -> LongRunOptions | None:
        """The options of the run; None where failures are not counted."""
        from paleo.studies.long_run import stated_long_run

        return stated_long_run(**self.keywords())


#: Those options, in the argument ``long_run``.
takes_long_run = packs("long_run", LongRunFlags)
