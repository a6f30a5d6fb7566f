"""Options that several commands share: catalog names, GPU counts, output, the run, the goal and price of a training,
and failures."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from paleo.cli.application import checked_page_path, checked_plot_path
from paleo.errors import SpecError

if TYPE_CHECKING:
    from paleo.launch.jobs import LaunchFileJob
    from paleo.specs.model import ModelSpec
    from paleo.specs.run import Run
    from paleo.studies.cost import Tariff
    from paleo.studies.goodput import LongRunOptions

#: Collective operations and number formats that shell completion offers.
COLLECTIVE_OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce")
DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8", "fp4")


def catalog_name_completion(*kinds: str) -> Callable[[str], list[str]]:
    """Return a shell completion of catalog names; in a list it completes the last name.

    Parameters
    ----------
    *kinds : str
        Kinds of catalog entries.

    Returns
    -------
    Callable[[str], list[str]]
        Names that begin as the text does.
    """

    def complete(incomplete: str) -> list[str]:
        return _completed(incomplete, (name for kind in kinds for name in _names(kind)))

    return complete


def word_completion(*known: str) -> Callable[[str], list[str]]:
    """Return a shell completion that offers the given words; in a list it completes the last word.

    Parameters
    ----------
    *known : str
        Words.

    Returns
    -------
    Callable[[str], list[str]]
        Words that begin as the text does.
    """
    return lambda incomplete: _completed(incomplete, known)


def _completed(incomplete: str, known: Iterable[str]) -> list[str]:
    before, comma, begun = incomplete.rpartition(",")
    return [before + comma + name for name in known if name.startswith(begun)]


def _names(kind: str) -> Iterable[str]:
    """Return the names of one kind of catalog entries or of a registry's entries, for completion."""
    from paleo.specs.catalog import CATALOG_FOLDERS, entry_names

    if kind in CATALOG_FOLDERS:
        return entry_names(kind)
    from paleo.report.catalog import catalog_descriptions

    return catalog_descriptions(kind)


_MODELS, SYSTEMS_AND_DEVICES = catalog_name_completion("models"), catalog_name_completion("systems", "devices")
_MODEL_HELP = "Network: a catalog name (`paleo list models`), hub id, config.json or folder, YAML or ONNX file."
ModelName = Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL_HELP, autocompletion=_MODELS)]
_MODEL_OR_FROM_HELP = "A model of the catalog, a hub id, or a file; optional where --from names one."
OptionalModel = Annotated[str | None, typer.Argument(metavar="MODEL", help=_MODEL_OR_FROM_HELP, autocompletion=_MODELS)]
_LAUNCH_HELP = "Write the plan as a configuration file of its framework: job.sh, job.toml, axolotl:job.yml."
LaunchFileOption = Annotated[str | None, typer.Option("--launch", metavar="FILE", help=_LAUNCH_HELP)]
_SYSTEM_HELP = "System or device: a catalog name (`paleo list systems`) or a YAML file."
SystemName = Annotated[
    str, typer.Option("--system", metavar="S", help=_SYSTEM_HELP, autocompletion=SYSTEMS_AND_DEVICES)
]
_SYSTEMS_HELP = "Systems or devices, separated by commas: catalog names or YAML files."
Systems = Annotated[
    str, typer.Option("--systems", metavar="A,B,C", help=_SYSTEMS_HELP, autocompletion=SYSTEMS_AND_DEVICES)
]
_GPUS_HELP = "Numbers of GPUs: a list (8,16) or powers of two (8..64)."
GpuCounts = Annotated[str, typer.Option("--gpus", metavar="1,2,4,…", help=_GPUS_HELP)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")]
_PLOT_HELP = "Also save a plot to this file: .png, .svg or .pdf."
PlotFileOption = Annotated[
    str | None, typer.Option("--plot", metavar="FILE", help=_PLOT_HELP, callback=checked_plot_path)
]
PageFileOption = Annotated[str | None, typer.Option(callback=checked_page_path)]


def _parse_whole_number(text: str) -> int:
    """Parse a whole number, with or without commas between thousands: ``1,024``.

    Parameters
    ----------
    text : str
        The text.

    Returns
    -------
    int
        The number.

    Raises
    ------
    typer.BadParameter
        If the text is no whole number.
    """
    digits = text.replace(",", "") if re.fullmatch(r"\s*\d{1,3}(,\d{3})+\s*", text) else text
    try:
        return int(digits)
    except ValueError:
        raise typer.BadParameter(f"{text[:80]!r} is not a whole number; write it in digits, such as 1024") from None


WholeNumber = Annotated[int, typer.Option(parser=_parse_whole_number, metavar="N")]
OptionalWholeNumber = Annotated[int | None, typer.Option(parser=_parse_whole_number, metavar="N")]


def _options_of(options: Any, group: type[Any]) -> dict[str, Any]:
    """Return the values of those options that are fields of an options dataclass ``group``, by name."""
    return {field.name: getattr(options, field.name) for field in fields(group)}


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of a run, shared by the commands that predict. Options that are not given keep the default of ``Run``.

    Parameters
    ----------
    gpus
        Total number of GPUs. [1]
    batch
        Samples per data-parallel rank and step. [32 samples, or 8 sequences]
    global_batch
        Samples per step over all ranks; replaces --batch. [--batch times data-parallel ranks]
    microbatch
        Samples per forward and backward pass; gradients accumulate up to --batch. [--batch; 1 if pp > 1]
    seq
        Sequence length in tokens, for models that have one. [the model's]
    dtype
        Number format of matrix products: fp32, tf32, bf16, fp16, fp8 or fp4. [the device's best 16 bits]
    optimizer
        Optimizer: adamw, sgd, muon, … (`paleo list optimizers`). [adamw]
    strategy
        Parallelism: a preset (`paleo list strategies`), degrees such as tp=8,pp=4,zero=1,sp, or both. [dp]
    schedule
        Pipeline schedule: gpipe, 1f1b, … (`paleo list schedules`) [1f1b]
    recompute
        Activation recomputation: none, selective or full; single modules: --set recompute.modules=… [none]
    recompute_layers
        Number of layers per pipeline stage to recompute in full. [all]
    lora
        Train LoRA adapters of this rank and freeze all other weights: 16, 16:all, 16:mlp. [none]
    qlora
        Train LoRA adapters over weights frozen in 4 bits (NF4); without --lora: 64:all.
    freeze
        Layers to freeze, by name or pattern: embed,block.[0-9]. [none]
    compress
        Gradient compression: fp16, onebit, topk:0.001, powersgd:4, … [none]
    consistency
        How workers synchronize: bsp, async, ssp:4, local:32, diloco:100, gossip:exp2, … [bsp]
    servers
        Number of parameter servers, for async and ssp. [async: one]
    jitter
        Variation of step times: from step to step (0.02), and also between ranks (0.02,0.01), or traces. [0]
    nodes
        Placement of nodes on the fabric: packed, random, or spread:8 (over 8 leaf switches). [packed]
    background
        Fraction of the uplinks that other jobs use. [0]
    neighbour
        Another job on the same switches, as collective:nodes:fraction of time, such as all_to_all:32:0.4. [none]
    software
        Framework profile: NAME or NAME@RELEASE (`paleo list software`); plan: any, no limits. [pytorch-eager]
    calibration
        Source of efficiencies: auto (measured), ideal (roofline), ppp=0.6 (60 % of peak), or a file. [auto]
    from_ : FILE
        Configuration files of a framework (Megatron, torchtitan, DeepSpeed, accelerate, axolotl, …): network,
        batch, plan and software are as they say; options win. Several files join.
    run_file : FILE
        YAML file with options of the run; options on the command line win.
    set_ : KEY=VALUE
        Any other field of a run (`paleo schema run`), or a size of the network: model.layers=24.
    """

    panel: ClassVar[str] = "Run options"
    gpus: OptionalWholeNumber = None
    batch: OptionalWholeNumber = None
    global_batch: OptionalWholeNumber = None
    microbatch: OptionalWholeNumber = None
    seq: OptionalWholeNumber = None
    dtype: Annotated[str | None, typer.Option(autocompletion=word_completion(*DTYPES))] = None
    optimizer: Annotated[str | None, typer.Option(autocompletion=catalog_name_completion("optimizers"))] = None
    strategy: Annotated[str | None, typer.Option(autocompletion=catalog_name_completion("strategies"))] = None
    schedule: Annotated[str | None, typer.Option(autocompletion=catalog_name_completion("schedules"))] = None
    recompute: Annotated[str | None, typer.Option(autocompletion=word_completion("none", "selective", "full"))] = None
    recompute_layers: OptionalWholeNumber = None
    lora: str | None = None
    qlora: bool | None = None
    freeze: str | None = None
    compress: str | None = None
    consistency: str | None = None
    servers: OptionalWholeNumber = None
    jitter: str | None = None
    nodes: str | None = None
    background: float | None = None
    neighbour: str | None = None
    software: Annotated[str | None, typer.Option(autocompletion=catalog_name_completion("software"))] = None
    calibration: Annotated[str | None, typer.Option(autocompletion=word_completion("auto", "ideal", "ppp="))] = None
    from_: list[str] | None = None
    run_file: Annotated[str | None, typer.Option("--run")] = None
    set_: list[str] | None = None

    def build_run(self, *, searched: bool = False) -> Run:
        """Build the run from the options; fields without an option are unset.

        Parameters
        ----------
        searched : bool, optional
            True for a search of plans, which ignores the plan in ``--from`` files.

        Returns
        -------
        Run
            The run.

        Raises
        ------
        SpecError
            If an option is not valid.
        """
        from paleo.specs.loading import validate_mapping
        from paleo.specs.run import Run, flatten_to_paths, shortest_field_name

        apart = ("set_", "seq", "run_file", "from_")
        options = _options_of(self, RunOptions).items()
        data = flatten_to_paths({name: value for name, value in options if value is not None and name not in apart})
        for key, value in self._settings().items():
            _set_field(data, key, value)
        file = {**self._job_fields(searched=searched), **flatten_to_paths(self._file())}
        # batch and global batch depend on each other: an option replaces either
        if "batch" in data or "global_batch" in data:
            file = {key: value for key, value in file.items() if key not in ("batch", "global_batch")}
        stated = {shortest_field_name(path): value for path, value in {**file, **data}.items()}
        return validate_mapping(Run, stated, "options")

    @functools.cached_property
    def launch_file_job(self) -> LaunchFileJob | None:
        """Training job that the launch files of ``--from`` describe; None without that option."""
        if not self.from_:
            return None
        from paleo.launch.jobs import read_launch_files

        return read_launch_files(self.from_, self.gpus)

    @functools.cached_property
    def launch_file_network(self) -> ModelSpec | None:
        """Network that the launch files of ``--from`` name or describe; None if there is none."""
        if self.launch_file_job is None:
            return None
        from paleo.launch.jobs import load_job_network

        return load_job_network(self.launch_file_job)

    def network(self, model: str | None) -> str | ModelSpec:
        """Return the network of MODEL, or of ``--from`` if MODEL is missing.

        Parameters
        ----------
        model : str, optional
            Value of MODEL.

        Returns
        -------
        str | ModelSpec
            Name or model.

        Raises
        ------
        SpecError
            If neither names a network.
        """
        if model is not None:
            return model
        if self.launch_file_network is None:
            stated = f"{', '.join(self.from_)} names no network" if self.from_ else "no network is named"
            raise SpecError(f"{stated}; state MODEL, such as llama3-8b")
        return self.launch_file_network

    def warnings(self) -> list[str]:
        """Return warnings about keys of the --from file that were not read and may matter, and about --software any."""
        texts = [_UNLIMITED_WARNING] if self.software == "any" else []
        if self.launch_file_job is not None and self.launch_file_job.unread_keys:
            keys = ", ".join(self.launch_file_job.unread_keys[:_MAX_KEYS_SHOWN])
            more = len(self.launch_file_job.unread_keys) - _MAX_KEYS_SHOWN
            keys += f" and {more} more" if more > 0 else ""
            texts.append(f"--from: these keys were not read and may change the result: {keys}")
        return texts

    def _job_fields(self, *, searched: bool) -> dict[str, Any]:
        """Return the run fields that the launch files of ``--from`` describe, by dotted path."""
        if self.launch_file_job is None:
            return {}
        from paleo.launch.jobs import SEARCHED_RUN_FIELDS, run_fields_of_job
        from paleo.network.graph import build_graph

        graph = None if self.launch_file_network is None else build_graph(self.launch_file_network, batch=1)
        length = None if graph is None else int(graph.tokens_per_sample or 0)
        data = run_fields_of_job(self.launch_file_job.plan, self.launch_file_job.software, graph, length)
        return {name: value for name, value in data.items() if not (searched and name in SEARCHED_RUN_FIELDS)}

    def _file(self) -> dict[str, Any]:
        """Return the fields of the --run file; it is validated first, so that messages name the file."""
        from paleo.specs.loading import read_yaml, validate_mapping
        from paleo.specs.run import Run

        if self.run_file is None:
            return {}
        data = read_yaml(self.run_file)
        validate_mapping(Run, data, self.run_file)
        return data

    def _settings(self) -> dict[str, Any]:
        """Return the run fields set by ``--seq`` and ``--set``, by dotted path."""
        from paleo.specs.loading import parse_yaml

        settings = [("model.seq", self.seq)] if self.seq is not None else []
        for text in self.set_ or []:
            key, equals, value = text.partition("=")
            if not equals or not key.strip() or not value.strip() or len(value.splitlines()) > 1:
                example = "such as --set exchange.bucket='50 MiB' or model.seq=512"
                raise SpecError(f"--set {text!r}: expected key=value, {example}")
            settings.append((key.strip(), parse_yaml(f"value: {value}", where=f"--set {text}")["value"]))
        twice = [key for key, _ in settings if [name for name, _ in settings].count(key) > 1]
        if twice:
            raise SpecError(f"--set: {twice[0]} occurs twice; use it once")
        return dict(settings)


#: Most unread keys of a configuration that are listed.
_MAX_KEYS_SHOWN = 12
_UNLIMITED_WARNING = "--software any: plans are not limited to what a framework runs"


def _set_field(data: dict[str, Any], key: str, value: Any) -> None:
    """Set a field of the run from one ``--set`` option; raise SpecError if another option sets the field, too."""
    from paleo.specs.run import flatten_to_paths, shortest_field_name

    if key == "model" and not isinstance(value, dict):
        example = "expected sizes of the network, such as model.layers=24; the network itself is the argument MODEL"
        raise SpecError(f"--set model={str(value)[:80]}: {example}")
    for path, each in flatten_to_paths({key: value}).items():
        option = shortest_field_name(path)
        if path in data:
            raise SpecError(f"--set {key}: --{option.replace('_', '-')} sets it, too; use one of them")
        group = path.partition(".")[0]
        if group != path and group in data:
            raise SpecError(f"--set {key}: --set {group}={str(data[group])[:80]} contradicts it; use one of them")
        data[path] = each


_LOSS_HELP = "Train a language model to this loss (nats per token), by Chinchilla's scaling law."
TargetLossOption = Annotated[float | None, typer.Option(help=_LOSS_HELP)]
_TARGET_HELP = "Train to the quality target of a task, such as mlperf:bert (`paleo list tasks`)."
TargetTaskOption = Annotated[
    str | None, typer.Option(metavar="TASK", help=_TARGET_HELP, autocompletion=catalog_name_completion("tasks"))
]
_NOISE_HELP = "Gradient noise scale in samples: at this batch size, training needs twice the samples. [not counted]"
NoiseScale = Annotated[float | None, typer.Option(help=_NOISE_HELP)]


def parse_count(text: str) -> float:
    """Parse a number of samples or tokens, with or without a prefix: ``15T``.

    Parameters
    ----------
    text : str
        The text.

    Returns
    -------
    float
        The number.

    Raises
    ------
    typer.BadParameter
        If the text is no number.
    """
    from paleo.units import parse_quantity

    try:
        return parse_quantity(text, "count")
    except SpecError as error:
        raise typer.BadParameter(str(error)) from None


ObjectiveOption = Annotated[str | None, typer.Option("--objective", help="Sort by time, cost or energy.")]


@dataclass(frozen=True, kw_only=True)
class TariffOptions:
    """Command-line options for prices, besides the catalog's rents.

    Parameters
    ----------
    price : RATE
        Price of one GPU-hour: '2.5 USD/h', or per system in USD: A=2.1,B=1.3. [catalog and price lists]
    electricity : RATE
        Electricity price: '0.12 USD/kWh'. [not counted]
    pue
        Power usage effectiveness: energy of the building divided by energy of its machines. [1]
    host_power : POWER
        Power of the host per GPU: '150 W'. [not counted]
    term : TERM
        Rental terms of the price lists: on-demand, 1-year, 3-year or spot.
    buy : YEARS
        Buy the machines and write them off over this many years. [rent]
    """

    price: str | None = None
    electricity: str | None = None
    pue: float | None = None
    host_power: str | None = None
    term: str = "on-demand"
    buy: float | None = None

    def tariff(self) -> Tariff:
        """Return the tariff that the options describe; raise SpecError, which names the option, if one is wrong."""
        from paleo.studies.cost import parse_tariff

        return parse_tariff(**_options_of(self, TariffOptions))


@dataclass(frozen=True, kw_only=True)
class FailureOptions:
    """Command-line options for failures, checkpoints and restarts; any of them makes the command count failures.

    Parameters
    ----------
    goodput
        Include failures, checkpoints and restarts in time, cost and energy.
    failures : RATE
        Failure rate of a node: '4/knodeday' is 4 per 1,000 node-days. [the system's]
    checkpoint : EVERY
        Time between checkpoints: auto (the best), 30min or 250steps. [auto]
    checkpointing
        How checkpoints are written: sync, async, or memory (to a peer's memory, then to storage). [sync]
    storage : RATE
        Write bandwidth of the storage: '2 GB/s'. [100 GB/s]
    storage_size : BYTES
        Capacity of the storage: '10 TB'. [unlimited]
    restart : TIME
        Time from a failure to the next step. [3 min and loading the checkpoint]
    spares
        Number of spare nodes. [enough for 99 % of repairs]
    repair : TIME
        Time to repair a failed node. [24 h]
    elastic
        Continue without the failed data-parallel replica until its node is repaired.
    """

    panel: ClassVar[str] = "Failures and checkpoints"
    goodput: bool = False
    failures: str | None = None
    checkpoint: str | None = None
    checkpointing: str | None = None
    storage: str | None = None
    storage_size: str | None = None
    restart: str | None = None
    spares: Annotated[int | None, typer.Option(min=0, max=10**6)] = None
    repair: str | None = None
    elastic: bool = False

    def failure_keywords(self) -> dict[str, Any]:
        """Return the options as keyword arguments of `paleo.estimate` and similar functions."""
        return _options_of(self, FailureOptions)

    def long_run_options(self) -> LongRunOptions | None:
        """Parse the options into validated settings of failures and checkpoints; None if failures are not counted."""
        from paleo.studies.goodput import parse_long_run

        return parse_long_run(**self.failure_keywords())


@dataclass(frozen=True, kw_only=True)
class AmountOptions:
    """Command-line options for the amount of training, of which one may be given.

    Parameters
    ----------
    epochs
        Price a training of this many epochs: time, cost and energy.
    samples : N
        Price a training of this many samples: 4M or 4000000.
    tokens : N
        Price a training of this many tokens: 15T.
    """

    epochs: float | None = None
    samples: Annotated[float | None, typer.Option(parser=parse_count)] = None
    tokens: Annotated[float | None, typer.Option(parser=parse_count)] = None

    def amount_keywords(self) -> dict[str, Any]:
        """Return the amount of training as keyword arguments of `paleo.estimate` and similar functions."""
        return _options_of(self, AmountOptions)


@dataclass(frozen=True, kw_only=True)
class RunPriceAndFailureOptions(RunOptions, TariffOptions, FailureOptions):
    """Command-line options of a run together with those for prices (USD) and for failures."""

    def price_and_failure_keywords(self) -> dict[str, Any]:
        """Return the options for prices and failures as keyword arguments of `paleo.estimate` and similar functions."""
        return {**_options_of(self, TariffOptions), **self.failure_keywords()}


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(RunPriceAndFailureOptions, AmountOptions):
    """Command-line options of a run together with those for the amount of training, prices and failures."""

    def estimate_keywords(self) -> dict[str, Any]:
        """Return all options as keyword arguments of `paleo.estimate` and similar functions."""
        return {"run": self.build_run(), **self.amount_keywords(), **self.price_and_failure_keywords()}
