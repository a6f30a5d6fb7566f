"""The catalog: a line on every entry for ``list``, all facts of one entry for ``show``, a network layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.text import Text

from paleo.collectives.base import COLLECTIVE_ALGORITHMS
from paleo.errors import SpecError, suggest_names
from paleo.layers.base import LAYERS
from paleo.operations.base import OPTIMIZERS
from paleo.parallel.placement import STRATEGY_PRESETS
from paleo.report.columns import TEXT_WIDTH, AnswerColumn, Document, empty_table, row_json, rows_table, wrapped_text
from paleo.report.columns import name_value_table as fact_table
from paleo.schedules.base import SCHEDULES
from paleo.specs.calibration import Calibration, load_calibration
from paleo.specs.catalog import entry_names, is_path, kind_of_spec_file, resolve_entry_name
from paleo.specs.device import Device, Interconnect, Link, Price, load_device, load_link
from paleo.specs.loading import Spec
from paleo.specs.model import ModelSpec, load_model, needs_importer
from paleo.specs.prices import rent_quote
from paleo.specs.run import Run, load_run, user_set_fields
from paleo.specs.software import FieldRow, SoftwareProfile, field_table, format_value, load_software
from paleo.specs.system import InterconnectLevel, System, load_system
from paleo.specs.task import load_task
from paleo.studies.network_summary import NetworkSummary, summarise_network
from paleo.studies.sweep import load_sweep_study
from paleo.units import HOUR, format_duration, format_gibibytes, format_quantity, with_noun

#: A name and its value, as people read them.
NamedFact = tuple[str, str]
#: A field of a software profile: name, value, default, meaning.
SoftwareSettingRow = tuple[str, str, str, str]


def _first_line(entry: object) -> str:
    lines = (getattr(entry, "__doc__", None) or "").strip().splitlines()
    return lines[0] if lines else ""


def _dated(entry: Device | System) -> str:
    return entry.full_name if entry.year is None else f"{entry.full_name}, {entry.year}"


def _device_line(device: Device) -> str:
    dtype = device.training_dtype
    peak = format_quantity(device.peak_flops_per_s(dtype), "FLOP/s")
    return f"{_dated(device)}: {peak} {dtype}, {format_gibibytes(device.memory.capacity)} {device.memory.kind}"


def _software_line(profile: SoftwareProfile) -> str:
    """Return one line on a software profile: its description, and the measured steps its constants were fitted to."""
    if profile.fit is None:
        return f"{profile.title}. Nothing fitted"
    tested = f"MAPE {100 * profile.fit.residual.mape:.1f} % on {profile.fit.residual.rows:,} held out"
    return f"{profile.title}. Fitted to {with_noun(profile.fit.rows_fitted, 'row')}: {tested}"


_DescriptionsByName = Callable[[], Mapping[str, str]]


def _cataloged(kind: str, load: Callable[[str], Any], line: Callable[[Any], str]) -> _DescriptionsByName:
    return lambda: {name: line(load(name)) for name in entry_names(kind)}


#: kind -> names with a line on each.
DESCRIPTIONS_BY_KIND: dict[str, _DescriptionsByName] = {
    "models": _cataloged("models", load_model, lambda model: f"{model.title}: {model.task}"),
    "devices": _cataloged("devices", load_device, _device_line),
    "links": _cataloged(
        "links", load_link, lambda link: f"{format_quantity(link.bandwidth, 'B/s')} each way, {link.scope}"
    ),
    "systems": _cataloged(
        "systems",
        load_system,
        lambda system: f"{_dated(system)}: {system.devices_per_node} × {system.device.name} a node",
    ),
    "collectives": lambda: {name: algorithm.summary for name, algorithm in COLLECTIVE_ALGORITHMS.items()},
    "layers": lambda: {name: _first_line(layer) for name, layer in LAYERS.items()},
    "schedules": lambda: {name: schedule.reference for name, schedule in SCHEDULES.items()},
    "software": _cataloged("software", load_software, _software_line),
    "strategies": lambda: {name: _first_line(preset) for name, preset in STRATEGY_PRESETS.items()},
    "optimizers": lambda: {name: rule.reference for name, rule in OPTIMIZERS.items()},
    "tasks": _cataloged("tasks", load_task, lambda task: f"{task.title}: {task.target}"),
    "tables": lambda: _table_lines(),
}


def _table_lines() -> dict[str, str]:
    """Return one line for each kind of measured table: the columns that identify a row, and the measured one."""
    from paleo.tables.run_tables import table_kinds

    lines = {}
    for name, table in sorted(table_kinds().items()):
        columns = ", ".join(sorted(table.identifying_columns - {table.measured_column}))
        meaning = _first_line(getattr(table, "kind", table)).replace("`", "")
        lines[name] = f"{meaning} Columns: {columns} -> {table.measured_column}"
    return lines


def catalog_descriptions(kind: str) -> Mapping[str, str]:
    """List the catalog entries of one kind (such as ``devices``), each with a line of description.

    Parameters
    ----------
    kind : str
        ``devices``, ``systems``, ``models``, ``layers`` and so on.

    Returns
    -------
    dict of str to str
        One line of description by name.

    Raises
    ------
    SpecError
        If the kind is unknown.
    """
    if kind not in DESCRIPTIONS_BY_KIND:
        raise SpecError(f"unknown kind {kind!r}; {suggest_names(kind, DESCRIPTIONS_BY_KIND)}")
    return DESCRIPTIONS_BY_KIND[kind]()


def find_entries(name: str, kind: str | None = None) -> list[tuple[str, object]]:
    """Find the catalog entries with a name, such as a device and a system of that name.

    Parameters
    ----------
    name : str
        Name of an entry, or the path of a YAML file.
    kind : str, optional
        Kind to look in; all by default.

    Returns
    -------
    list[tuple[str, object]]
        Pairs of kind and entry.

    Raises
    ------
    SpecError
        If there is none; the message has the nearest names.
    """
    if kind in (None, "model", "models") and needs_importer(name):
        return [("model", load_model(name))]
    if is_path(name):
        return [_read(name, kind)]
    folded = name.strip().lower()
    loaders = _loaders()
    if kind is not None:
        lower_kind = kind.strip().lower()
        singular = lower_kind if lower_kind in loaders else lower_kind.removesuffix("s")
        if singular not in loaders:
            raise SpecError(f"unknown kind {kind!r}; {suggest_names(kind, loaders)}")
        loaders = {singular: loaders[singular]}
    entries = [(kind, load(folded)) for kind, (known, load) in loaders.items() if folded.partition("@")[0] in known()]
    if not entries:
        meant = ((kind, load, resolve_entry_name(f"{kind}s", folded)) for kind, (_, load) in loaders.items())
        entries = [(kind, load(entry)) for kind, load, entry in meant if entry is not None]
    if not entries:
        known_names = [name for known, _ in loaders.values() for name in known()]
        raise SpecError(f"nothing is named {name!r}; {suggest_names(name, known_names)} (see `paleo list`)")
    return entries


def _loaders() -> dict[str, tuple[Callable[[], Any], Callable[[str], object]]]:
    return {
        "model": (lambda: entry_names("models"), load_model),
        "system": (lambda: entry_names("systems"), load_system),
        "device": (lambda: entry_names("devices"), load_device),
        "link": (lambda: entry_names("links"), load_link),
        "collective": (lambda: COLLECTIVE_ALGORITHMS, lambda name: COLLECTIVE_ALGORITHMS[name]),
        "layer": (lambda: LAYERS, lambda name: LAYERS[name]),
        "schedule": (lambda: SCHEDULES, lambda name: SCHEDULES[name]),
        "software": (lambda: entry_names("software"), load_software),
        "strategy": (lambda: STRATEGY_PRESETS, lambda name: STRATEGY_PRESETS[name]),
        "optimizer": (lambda: OPTIMIZERS, lambda name: OPTIMIZERS[name]),
        "task": (lambda: entry_names("tasks"), load_task),
    }


def _read(path: str, kind: str | None = None) -> tuple[str, object]:
    """Read a YAML file of the catalog.

    Returns (kind, entry), where the kind is the named one or follows from the keys.
    """
    loaders: dict[str, Callable[[str], object]] = {name: load for name, (_, load) in _loaders().items()}
    loaders |= {"calibration": load_calibration, "run": load_run, "study": load_sweep_study}
    kind_of_file = kind_of_spec_file(path) if kind is None else kind.strip().lower()
    if kind_of_file not in loaders:
        raise SpecError(f"unknown kind {kind!r}; {suggest_names(str(kind), loaders)}")
    return kind_of_file, loaders[kind_of_file](path)


def _entry_facts(entry: object) -> list[NamedFact]:
    """List facts of a catalog entry as pairs of name and text, with units and sources, for ``paleo show``.

    Parameters
    ----------
    entry : object
        Device, link, system, model and so on.

    Returns
    -------
    list of NamedFact
        Pairs of name and text.
    """
    return next(describe(entry) for kind, describe in _FACTS.items() if isinstance(entry, kind))


def json_document(entry: object) -> Document:
    """Return an entry of the catalog as a JSON document, in SI units.

    Parameters
    ----------
    entry : object
        Device, link, system, model and so on.

    Returns
    -------
    Document
        The document.
    """
    if isinstance(entry, Spec):
        return entry.model_dump(mode="json", by_alias=True)
    return dict(_entry_facts(entry))


def _known(*rows: tuple[str, object]) -> list[NamedFact]:
    """Return those (name, value) rows that have a value, with the value as text."""
    return [(name, str(value)) for name, value in rows if value not in (None, "", ())]


def _rates(peaks: Mapping[Any, float]) -> str:
    return ", ".join(f"{dtype} {format_quantity(rate, 'FLOP/s')}" for dtype, rate in peaks.items())


def _price(price: Price | None) -> str | None:
    return None if price is None else f"{price.rate * HOUR:.2f} USD/h ({price.date}; {price.source})"


def _market(system: System) -> str | None:
    """Return a text on the market price of a system's device, if the system's file has none."""
    quote = None if system.price_per_node is not None else rent_quote(system, "on-demand")
    return None if quote is None else _price(quote.price)


def _device_facts(device: Device) -> list[NamedFact]:
    memory, joined, links = device.memory, device.host_link, device.interconnect
    bandwidth = format_quantity(memory.bandwidth, "B/s", digits=4)
    return _known(
        ("name", device.full_name),
        ("architecture", f"{device.vendor} {device.architecture}, {device.form_factor}"),
        ("year", device.year),
        ("multiprocessors", device.multiprocessors),
        ("boost clock", device.boost_clock and format_quantity(device.boost_clock, "Hz", digits=4)),
        ("peak, dense", _rates(device.peak)),
        ("peak of ordinary cores", _rates(device.vector_peak)),
        ("tensor cores for", ", ".join(device.tensor_dtypes)),
        ("systolic array", device.matrix_unit and f"{device.matrix_unit.width} x {device.matrix_unit.width}"),
        ("memory", f"{format_gibibytes(memory.capacity)} {memory.kind}, {bandwidth}"),
        ("memory for programs", memory.reported and format_gibibytes(memory.reported)),
        ("L2 cache", device.l2 and format_gibibytes(device.l2)),
        ("design power", device.tdp and format_quantity(device.tdp, "W")),
        ("PCIe", device.pcie and f"generation {device.pcie.generation}, {device.pcie.lanes} lanes"),
        ("link to the host", joined and joined.link + f", shared by {joined.devices} devices" * (joined.devices > 1)),
        ("links of the device", links and _device_links(links)),
        ("price", _price(device.price)),
        ("also known as", ", ".join(device.aliases)),
        ("notes", device.notes),
        ("source", device.source),
    )


def _device_links(links: Interconnect) -> str:
    return f"{links.kind} {links.generation or ''}".strip() + f", {format_quantity(links.bandwidth, 'B/s')} each way"


def _link_facts(link: Link) -> list[NamedFact]:
    achieved, in_switch = link.achieved_fraction, link.in_switch_bandwidth
    return _known(
        ("kind", link.kind),
        ("scope", link.scope),
        ("bandwidth, each way", format_quantity(link.bandwidth, "B/s")),
        ("achieved", achieved and f"{100 * achieved:g} % of it ({link.achieved_source})"),
        ("sums in switches", in_switch and f"{format_quantity(in_switch, 'B/s')} of bus bandwidth at most"),
        ("latency", link.latency and f"{format_duration(link.latency)} ({link.latency_source or 'source unknown'})"),
        ("notes", link.notes),
        ("source", link.source),
    )


def _system_facts(system: System) -> list[NamedFact]:
    levels = []
    for index, level in enumerate(system.levels, start=1):
        rate = f"{format_quantity(level.member_bandwidth, 'B/s')} each way from a unit"
        words = f"{level.ranks or 'any number of'} GPUs, {level.ports} × {level.link.name} ({rate}), {_topology(level)}"
        levels.append((f"level {index}: {level.name}", words))
    return _known(
        ("name", _dated(system)),
        ("device", f"{system.device.name}: {system.device.full_name}"),
        ("devices a node", system.devices_per_node),
        ("nodes", system.max_nodes and f"up to {system.max_nodes}"),
        *levels,
        ("host", system.host and system.host.cpu and f"{system.host.sockets or 1} × {system.host.cpu}"),
        ("price of a node", _price(system.price_per_node)),
        ("rent of a GPU", _market(system)),
        ("notes", system.notes),
        ("source", system.source),
    )


def _topology(level: InterconnectLevel) -> str:
    """Return a text on an interconnect level's topology: leaves, routing, and links between groups."""
    unit = "group" if level.topology == "dragonfly" else "leaf switch"
    words = (
        level.leaf and f"{level.leaf} nodes to a {unit}",
        level.global_links and f"{level.global_links} links between each two groups",
        level.oversubscription > 1.0 and f"{level.oversubscription:g} times oversubscribed",
        level.routing and ("rails" if level.routing == "rail" else f"{level.routing} routing"),
    )
    return ", ".join([level.topology, *(word for word in words if word)])


def _model_facts(model: ModelSpec) -> list[NamedFact]:
    counts = summarise_network(model, Run())
    sizes = ", ".join(f"{key} {value}" for key, value in counts.graph.hyperparameters.items() if key != "batch")
    data = model.dataset
    flops, back = (format_quantity(counts.total(f"flops_{way}"), "FLOP") for way in ("forward", "backward"))
    return _known(
        ("title", model.title),
        ("also known as", ", ".join(model.aliases)),
        ("weights published in", model.released if model.weights_hub_id else ""),
        ("task", model.task),
        ("parameters", f"{counts.graph.parameters:,}"),
        ("FLOP of one sample", f"{flops} forward, {back} back"),
        ("FLOP of MFU", counts.model_flops and _model_flops(*counts.model_flops)),
        ("settable (--set model.NAME=…)", sizes),
        ("tokens a sample", counts.graph.tokens_per_sample),
        ("data set", data and f"{data.name}, {data.samples:,} samples"),
        ("notes", model.notes),
        ("source", model.source),
        ("file", model.path),
    )


def _model_flops(forward: float, backward: float) -> str:
    without = "attention scores under the causal mask and recomputation are not counted"
    return f"{format_quantity(forward, 'FLOP')} forward, {format_quantity(backward, 'FLOP')} back: {without}"


def _software_facts(software: SoftwareProfile) -> list[NamedFact]:
    """Return facts about a software profile as (name, text) pairs; `_software_settings` lists the profile's fields."""
    eras = []
    for era in software.earlier:
        changes = ", ".join(f"{field}: {value}" for field, value in era.changes.items())
        eras.append((f"before {era.until}", f"{changes} ({era.source})"))
    return _known(
        ("title", software.title),
        ("releases from", software.since),
        ("releases until", software.until),
        ("dated releases", ", ".join(f"{release} {date}" for release, date in software.releases.items())),
        *eras,
        ("notes", software.notes),
        ("source", software.source),
    )


def _calibration_facts(calibration: Calibration) -> list[NamedFact]:
    """Return one line for each fitted entry of a calibration: what was fitted, to how many rows, and its test error."""
    rows = [("subject", calibration.device_or_system)]
    for entry in calibration.entries:
        error = "not tested" if entry.residual is None else f"MAPE {100 * entry.residual.mape:.1f} % on rows held out"
        rows.append((f"{entry.family}, {entry.stack}", f"{entry.rows_fitted or 0} rows fitted, {error}; {entry.date}"))
    return _known(*rows)


def _software_settings(entry: object) -> list[SoftwareSettingRow]:
    """List the fields of a software profile with their values, defaults and meanings.

    Parameters
    ----------
    entry : object
        An entry of the catalog.

    Returns
    -------
    list of SoftwareSettingRow
        Name, value, default and meaning of each field; empty for other entries.
    """
    if not isinstance(entry, SoftwareProfile):
        return []
    rows, groups = [row for row in field_table(SoftwareProfile) if "." in row.field], entry.model_dump(by_alias=True)
    return [(row.field, _value(groups, row), row.default, row.meaning) for row in rows]


def _value(groups: Mapping[str, Any], row: FieldRow) -> str:
    group, _, name = row.field.partition(".")
    return format_value(groups[group][name], row.unit)


def _registered(entry: object) -> list[NamedFact]:
    attributes = {name: getattr(entry, name) for name in ("summary", "reference", "operations") if hasattr(entry, name)}
    described = _known(*((name, ", ".join(v) if isinstance(v, tuple) else v) for name, v in attributes.items()))
    if isinstance(entry, type) and hasattr(entry, "model_fields"):
        described += [(name, _field(field)) for name, field in entry.model_fields.items()]
    if not attributes:
        described.insert(0, ("what it is", _first_line(entry)))
    return described


def _field(field: Any) -> str:
    kind = getattr(field.annotation, "__name__", None) or str(field.annotation)
    return f"{kind}, required" if field.is_required() else f"{kind}, {field.default!r} if left out"


def _stated(entry: Spec) -> list[NamedFact]:
    return _known(*((name, getattr(entry, name)) for name in sorted(entry.model_fields_set)))


#: Class of an entry -> its facts, the most special class first.
_FACTS: Mapping[type, Callable[[Any], list[NamedFact]]] = {
    Device: _device_facts,
    Link: _link_facts,
    System: _system_facts,
    ModelSpec: _model_facts,
    SoftwareProfile: _software_facts,
    Calibration: _calibration_facts,
    Run: lambda run: _known(*user_set_fields(run).items()),
    Spec: _stated,
    object: _registered,
}


# tables


def catalog_list_table(kind: str, entries: Mapping[str, str]) -> RenderableType:
    """Return a table of catalog entries of one kind, each with a line of description.

    Parameters
    ----------
    kind : str
        Kind of the entries, printed above the table.
    entries : mapping
        Description by name.

    Returns
    -------
    RenderableType
        Table for the console.
    """
    table = empty_table(f"{len(entries)} {kind}", ("name", "description"), left=2)
    for name, line in entries.items():
        table.add_row(name, line)
    return Constrain(table, TEXT_WIDTH)


def entry_tables(title: str, entry: object) -> Iterator[RenderableType]:
    """Yield the facts of one entry, and the fields of a software profile, in bold where they differ from defaults.

    Parameters
    ----------
    title : str
        Kind and name.
    entry : object
        What `find_entries` returned.

    Yields
    ------
    RenderableType
        Tables for the console.
    """
    yield fact_table(title, _entry_facts(entry))
    fields = _software_settings(entry)
    if fields:
        table = empty_table("", ("field", "value", "default", "meaning"), left=4)
        for field, value, default, meaning in fields:
            table.add_row(field, Text(value, style="" if value == default else "bold"), default, meaning)
        yield table


# a network layer by layer


_LAYER_COLUMNS = (
    AnswerColumn("name", lambda layer: layer.name, "layer"),
    AnswerColumn("type", lambda layer: layer.type, "type"),
    AnswerColumn("output_shape", lambda layer: list(layer.output_shape), "output", "",
              lambda layer: "×".join(f"{size:g}" for size in layer.output_shape)),
    AnswerColumn("output_dims", lambda layer: list(layer.dims)),
    AnswerColumn("parameters", lambda layer: layer.parameters, "parameters", "prefix"),
    AnswerColumn("flops_forward", lambda layer: layer.flops_forward, "FLOP fwd", "prefix"),
    AnswerColumn("flops_backward", lambda layer: layer.flops_backward, "FLOP bwd", "prefix"),
    AnswerColumn("bytes_forward", lambda layer: layer.bytes_forward, "bytes fwd", "decimal B"),
    AnswerColumn("bytes_backward", lambda layer: layer.bytes_backward),
    AnswerColumn("", lambda layer: layer.arithmetic_intensity, "FLOP/B", "words",
        lambda layer: f"{layer.arithmetic_intensity:.1f}"),
    AnswerColumn("saved_bytes", lambda layer: layer.saved_bytes, "saved", "decimal B"),
    AnswerColumn("repeat", lambda layer: layer.repeat, "repeat", "words",
              lambda layer: str(layer.repeat) if layer.repeat > 1 else ""),
)  # fmt: skip


def summary_document(study: NetworkSummary) -> Document:
    """Return the counts of a network's layers (parameters, FLOP, bytes) as a JSON document.

    Parameters
    ----------
    study : NetworkSummary
        Counts of each layer (of one iteration if the layer repeats), and totals over all iterations.

    Returns
    -------
    Document
        Dict of plain values: counts, FLOP and bytes of each layer.
    """
    return {
        "model": study.graph.name,
        "batch": study.graph.batch,
        "dtype": study.dtype,
        "parameters": study.graph.parameters,
        "flops_forward": study.total("flops_forward"),
        "flops_backward": study.total("flops_backward"),
        "saved_activation_bytes": study.total("saved_bytes"),
        "layers": [row_json(_LAYER_COLUMNS, layer) for layer in study.layers],
    }


def summary_table(study: NetworkSummary) -> RenderableType:
    """Return the counts of a network's layers as tables.

    Parameters
    ----------
    study : NetworkSummary
        Counts of the layers.

    Returns
    -------
    RenderableType
        Tables for the console.
    """
    title = f"{study.graph.name}, batch {study.graph.batch}, {study.dtype}; repeated layers are listed once"
    table = rows_table(title, _LAYER_COLUMNS, study.layers)
    for column in table.columns[1:]:
        column.no_wrap = True
    table.add_section()
    forward, moved = study.total("flops_forward"), study.total("bytes_forward")
    flops = [format_quantity(count, "") for count in (study.graph.parameters, forward, study.total("flops_backward"))]
    sizes = [format_quantity(size, "B") for size in (moved, study.total("saved_bytes"))]
    table.add_row("total", "", "", *flops, sizes[0], f"{forward / max(moved, 1):.0f}", sizes[1], "")
    if study.model_flops is None:
        return table
    return Group(table, wrapped_text(f"FLOP of MFU: {_model_flops(*study.model_flops)}."))
