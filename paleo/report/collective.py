"""Algorithms of a collective, as documents and as tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from itertools import combinations, product
from typing import TYPE_CHECKING, Any

import matplotlib
import networkx as nx
import numpy as np
from matplotlib.collections import LineCollection
from rich.console import Group, RenderableType
from rich.text import Text

from paleo.pricing.links.topology import DEFAULT_MACHINE_NODES, DEFAULT_NODES_PER_LEAF, dragonfly_network
from paleo.report.columns import AnswerColumn, Document, row_json, rows_table, wrapped_text
from paleo.report.plots import BLACK, BLUE, COLOUR_CYCLE, PLOT_STYLE, figure_with_axes
from paleo.specs.system import InterconnectLevel, System, smallest_torus_box
from paleo.units import format_duration, format_quantity, with_noun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from paleo.studies.collective import CollectiveStudy
    from paleo.studies.gradient_exchange import AllReduceCompressionStudy


_ALGORITHM_COLUMNS = (
    AnswerColumn("algorithm", lambda row: row.algorithm, "algorithm"),
    AnswerColumn("steps", lambda row: row.steps, "steps", "count"),
    AnswerColumn("time_s", lambda row: row.time, "time", "duration"),
    AnswerColumn("algorithm_bandwidth", lambda row: row.algorithm_bandwidth, "algorithm GB/s", "GB/s"),
    AnswerColumn("bus_bandwidth", lambda row: row.bus_bandwidth, "bus GB/s", "GB/s"),
    AnswerColumn("times_lower_bound", lambda row: row.lower_bound_ratio, "time/bound", "ratio"),
    AnswerColumn("automatic", lambda row: row.chosen_by_library),
)  # fmt: skip
_LEVEL_COLUMNS = (
    AnswerColumn("name", lambda span: span.level.name),
    AnswerColumn("", lambda span: f"{span.level.name} ({span.level.link.name})", "level"),
    AnswerColumn("fan_out", lambda span: span.fan_out, "group size", "count"),
    AnswerColumn("alpha_s", lambda span: span.level.link.latency, "latency", "words",
              lambda span: "unknown" if span.level.link.latency is None else format_duration(span.level.link.latency)),
    AnswerColumn("beta_s_per_byte", lambda span: 1.0 / span.bandwidth),
    AnswerColumn("", lambda span: span.bandwidth, "bandwidth", "B/s"),
)  # fmt: skip


def json_document(study: CollectiveStudy) -> Document:
    """Return the answer of ``paleo collective`` as a JSON document: a row per algorithm, fastest first.

    Parameters
    ----------
    study : CollectiveStudy
        One operation over one group of ranks.

    Returns
    -------
    Document
        Dict of plain values, times in seconds, sizes in bytes.
    """
    return {
        "operation": study.operation,
        "system": study.system.name,
        "ranks": study.ranks,
        "payload_bytes": study.payload_bytes,
        "levels": [row_json(_LEVEL_COLUMNS, span) for span in study.group_levels],
        "best": study.best.algorithm,
        "time_s": study.best.time,
        "lower_bound_s": study.lower_bound,
        "calibration": study.calibration_text,
        "algorithms": [row_json(_ALGORITHM_COLUMNS, row) for row in study.rows],
        "crossovers": [asdict(crossover) for crossover in study.crossovers],
    }


def table(study: CollectiveStudy) -> RenderableType:
    """Return the answer of ``paleo collective`` as tables.

    Parameters
    ----------
    study : CollectiveStudy
        Every algorithm of one operation over one group of ranks.

    Returns
    -------
    RenderableType
        Tables for the console.
    """

    def choice(row: Any) -> str:
        other = "" if row.chosen_by_library else "not for this payload" if row.available_in_library else "only by name"
        return "chosen" if row is study.best else other

    rows = rows_table("", (*_ALGORITHM_COLUMNS, AnswerColumn("", choice, "choice")), study.rows)
    chooser, chosen = study.algorithm_selector, study.best.algorithm
    steps = [f"{each.above} from {format_quantity(each.payload_bytes, 'B')}" for each in study.crossovers]
    if steps:
        words = f"{chooser} chooses by payload" if chooser else "Fastest by payload"
        changes = f"{words}: {study.crossovers[0].below}, {', '.join(steps)}.\n"
    else:
        words = f"{chooser} chooses {chosen}" if chooser else f"{chosen} is the fastest"
        changes = f"{words} for every payload.\n"
    levels = rows_table("Levels of the group, inner to outer", _LEVEL_COLUMNS, study.group_levels)
    return Group(wrapped_text(_headline(study)), rows, Text(), wrapped_text(changes), levels)


def _headline(study: CollectiveStudy) -> Text:
    """Return the line above the tables: the operation, the chosen algorithm, and faster ones that are not chosen."""
    best, size, chooser = study.best, format_quantity(study.payload_bytes, "B"), study.algorithm_selector
    head = Text(f"{study.operation} of {size} over {study.ranks} ranks of {study.system.name}\n", style="bold")
    reduction = "with in-network reduction" if best.in_network else "without in-network reduction"
    chosen = f"{chooser} chooses {best.algorithm}" if chooser else f"best: {best.algorithm}"
    bound = f"lower bound {reduction}: {format_duration(study.lower_bound)}"
    head.append(f"{chosen}, {format_duration(best.time)}; {bound}\n")
    for row in study.faster_unchosen_algorithms:
        use = "uses it for other payloads or groups" if row.available_in_library else "does not have it"
        head.append(f"faster, but not chosen: {row.algorithm}, {format_duration(row.time)} ({chooser} {use})\n")
    return head.append(f"Calibration: {study.calibration_text}\n", style="dim")


def _break_even(row: Any) -> float | None:
    return row.break_even_bandwidth if math.isfinite(row.break_even_bandwidth) else None


_METHOD_COLUMNS = (
    AnswerColumn("method", lambda row: row.method, "method"),
    AnswerColumn("scheme", lambda row: row.collective_scheme or None, "scheme"),
    AnswerColumn("time_s", lambda row: row.time, "time", "duration"),
    AnswerColumn("wire_s", lambda row: row.communication_time, "on the wire", "duration"),
    AnswerColumn("coding_s", lambda row: row.compression_time, "coding", "duration"),
    AnswerColumn("sent_bytes", lambda row: row.sent_bytes, "sent per rank", "decimal B"),
    AnswerColumn("break_even_bytes_per_s", _break_even, "pays below", "words",
              lambda row: "any rate" if _break_even(row) is None else format_quantity(row.break_even_bandwidth, "B/s")),
)  # fmt: skip


def compression_json_document(study: AllReduceCompressionStudy) -> Document:
    """Return the times and sizes of an all-reduce under several gradient compressions as a JSON document.

    Parameters
    ----------
    study : AllReduceCompressionStudy
        Methods and the uncompressed sum.

    Returns
    -------
    Document
        Dict of plain values, times in seconds, sizes in bytes.
    """
    return {
        "dense_time_s": study.uncompressed_time,
        "dense_sent_bytes": study.uncompressed_sent_bytes,
        "rate_bytes_per_s": study.uncompressed_bandwidth,
        "tensors": study.matrix_count,
        "methods": [{**row_json(_METHOD_COLUMNS, row), "pays": study.saves_time(row)} for row in study.rows],
    }


def compression_table(study: AllReduceCompressionStudy) -> RenderableType:
    """Return the times and sizes of an all-reduce under several gradient compressions as tables.

    Parameters
    ----------
    study : AllReduceCompressionStudy
        Compression methods compared with the dense sum.

    Returns
    -------
    RenderableType
        Tables for the console.
    """
    pays = AnswerColumn("", study.saves_time, "pays", "yes or no")
    rows = rows_table("Gradient compression", (*_METHOD_COLUMNS, pays), study.rows)
    sent = format_quantity(study.uncompressed_sent_bytes, "B")
    rate = format_quantity(study.uncompressed_bandwidth, "B/s")
    algorithm, time = study.uncompressed_study.best.algorithm, format_duration(study.uncompressed_time)
    uncompressed = f"Uncompressed: {algorithm}, {time}, {sent} per rank at {rate}. "
    assumed = f"The gradient is assumed to consist of {with_noun(study.matrix_count, 'square tensor')} (--tensors)."
    return Group(rows, Text(), wrapped_text(uncompressed + assumed))


# Graphs of a system's links, one a level: units, switches and rates. Plots draw them; closed forms are tested against
# them.

#: A unit of the level below by its number, or a switch by its name.
LinkGraphVertex = int | str


def level_member_counts(system: System, level: InterconnectLevel) -> tuple[int, int]:
    """Count the devices in one member of a level, and the most members that the level joins.

    Parameters
    ----------
    system : System
        Nodes, devices and links.
    level : InterconnectLevel
        One of its levels.

    Returns
    -------
    tuple of (int, int)
        Devices per member, and members.

    Examples
    --------
    >>> from paleo.specs.system import load_system
    >>> node = load_system("dgx-a100-80gb")
    >>> [level_member_counts(node, level) for level in node.levels]
    [(1, 8), (8, 1024)]
    """
    below = max((each.ranks or 1 for each in system.levels[: system.levels.index(level)]), default=1)
    return below, (system.max_nodes or DEFAULT_MACHINE_NODES) if level.ranks is None else level.ranks // below


def interconnect_level_graph(system: System, level: InterconnectLevel, units: int) -> nx.Graph[LinkGraphVertex]:
    """Build the graph of the first members (devices, nodes, …) of one level of a system's interconnect.

    Parameters
    ----------
    system : System
        Nodes, devices and links.
    level : InterconnectLevel
        One of its levels. In a mesh with unequal links every pair gets the mean rate.
    units : int
        Number of members, which are the vertices 0, 1, 2, …; in a torus it is rounded up to a full box.

    Returns
    -------
    networkx.Graph
        Units by number and switches by name; ``rate`` of an edge is that of one direction [byte/s].

    Examples
    --------
    >>> from paleo.specs.system import load_system
    >>> node = load_system("dgx-a100-80gb")
    >>> graph = interconnect_level_graph(node, node.levels[0], 8)
    >>> nx.maximum_flow_value(graph, 0, 7, capacity="rate") == node.levels[0].member_bandwidth
    True
    """
    graph: nx.Graph[LinkGraphVertex] = nx.Graph()
    rate = level.member_bandwidth
    graph.add_nodes_from(range(units))
    if level.topology == "torus":
        return _torus(level, units)
    if level.topology == "mesh":
        graph.add_edges_from(combinations(range(units), 2), rate=rate / max(units - 1, 1))
    elif level.topology == "ring":
        nx.add_cycle(graph, range(units), rate=rate / 2)
    elif level.topology in ("switch", "pcie-tree"):
        graph.add_edges_from(((unit, "switch") for unit in range(units)), rate=rate)
    else:
        _add_leaves(graph, system, level, units)
    return graph


def _add_leaves(graph: nx.Graph[LinkGraphVertex], system: System, level: InterconnectLevel, units: int) -> None:
    """Add leaf switches with the units below them to a graph, joined by a spine or directly (a dragonfly).

    With rails, each port of a unit connects to a separate switch.
    """
    machine = max(level_member_counts(system, level)[1], units)
    size = min(level.leaf or DEFAULT_NODES_PER_LEAF, machine)
    leaves, rate = math.ceil(units / size), level.member_bandwidth
    is_dragonfly = level.topology == "dragonfly"
    rails = level.ports if level.routing == "rail" else 1
    for leaf, rail in product(range(leaves), range(rails)):
        name = f"group {leaf}" if is_dragonfly else f"leaf {leaf}" + (f", rail {rail}" if rails > 1 else "")
        members = range(leaf * size, min((leaf + 1) * size, units))
        graph.add_edges_from(((unit, name) for unit in members), rate=rate / rails)
        if leaves > 1 and not is_dragonfly:
            graph.add_edge(name, "spine", rate=size * rate / rails / level.oversubscription)
    if is_dragonfly:
        groups = [f"group {leaf}" for leaf in range(leaves)]
        between = float(dragonfly_network(level, machine, size).group_pair_bandwidth) * rate
        graph.add_edges_from(combinations(groups, 2), rate=between)


def _torus(level: InterconnectLevel, units: int) -> nx.Graph[LinkGraphVertex]:
    """Return the graph of the chips in the torus that a job of ``units`` chips gets, with the chips' positions.

    In a dimension of two chips that closes, both links lead to the same chip.
    """
    assert level.shape is not None
    graph: nx.Graph[LinkGraphVertex] = nx.Graph()
    box = smallest_torus_box(level.shape, units)
    places = list(product(*map(range, box)))
    number = {place: index for index, place in enumerate(places)}
    graph.add_nodes_from((number[place], {"place": place}) for place in places)
    for place, axis in product(places, range(len(box))):
        closes = level.wrap is not None and box[axis] % level.wrap == 0
        if box[axis] == 1 or (place[axis] == box[axis] - 1 and not closes):
            continue
        following = number[*place[:axis], (place[axis] + 1) % box[axis], *place[axis + 1 :]]
        known = graph.get_edge_data(number[place], following, {}).get("rate", 0.0)
        graph.add_edge(number[place], following, rate=known + level.link.bandwidth)
    return graph


# pictures

Position = tuple[float, float]


def plot_interconnect(system: System) -> Figure:
    """Draw a system's interconnect, inner to outer: devices, nodes, switches and link rates.

    Parameters
    ----------
    system : System
        Nodes, devices and links.

    Returns
    -------
    Figure
        The plot.
    """
    with matplotlib.rc_context({**PLOT_STYLE, "axes.grid": False}):
        drawn, panels = figure_with_axes(9.0, 0.6 + 3.2 * len(system.levels), rows=max(len(system.levels), 1))
        drawn.suptitle(system.full_name)
        for axes, level in zip(panels, system.levels, strict=False):
            _panel(axes, system, level)
        if not system.levels:
            panels[0].set_axis_off()
            panels[0].set_title(f"one {system.device.full_name}, without links", fontsize=9)
    return drawn


def _panel(axes: Axes, system: System, level: InterconnectLevel) -> None:
    """Draw one level of an interconnect: lines are wider for higher rates, thinner where there are many."""
    below, most = level_member_counts(system, level)
    leaves = {"fabric": 2, "dragonfly": 6, "torus": 8}.get(level.topology, most)
    units = min(most, leaves * min(level.leaf or DEFAULT_NODES_PER_LEAF, most))
    graph = interconnect_level_graph(system, level, units)
    places, rates = _places(graph, level), nx.get_edge_attributes(graph, "rate")
    for colour, rate in zip(COLOUR_CYCLE[1:], sorted(set(rates.values())), strict=False):
        lines = [_line(places[a], places[b]) for (a, b), of_edge in rates.items() if of_edge == rate]
        width = (1.0 + math.log1p(rate / min(rates.values()))) * min(1.0, (200.0 / len(lines)) ** 0.5)
        label = f"{format_quantity(rate, 'B/s')} per direction"
        axes.add_collection(LineCollection(lines, colors=colour, linewidths=width, label=label))
    for kind, marker, colour, size in ((int, "o", BLUE, 3), (str, "s", BLACK, 6)):
        rows = np.array([places[vertex] for vertex in graph if isinstance(vertex, kind)]).reshape(-1, 2)
        axes.plot(*rows.T, marker, color=colour, markersize=size, linestyle="none")
    for vertex in graph:
        if isinstance(vertex, str) and "rail" not in vertex:
            axes.annotate(vertex, places[vertex], (0, 7), textcoords="offset points", ha="center", fontsize=7)
    count = sum(isinstance(vertex, int) for vertex in graph)
    unit = "device" if below == 1 else "node" if below == system.devices_per_node else "unit"
    words = f"{with_noun(count, unit)}{' here' if count < most else ''}{f' of {below:,} devices' if below > 1 else ''}"
    axes.set_title(f"{level.name} ({level.topology}): {words}, {level.ports} × {level.link.name} each", fontsize=9)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=7)
    axes.margins(0.05, 0.2)
    axes.set_axis_off()


def _places(graph: nx.Graph[LinkGraphVertex], level: InterconnectLevel) -> Mapping[LinkGraphVertex, Position]:
    """Return the position of each vertex in the plot.

    Units are in a row, switches above the middle of their units, and chips of a torus on a grid in perspective.
    """
    chips: Mapping[LinkGraphVertex, tuple[int, ...]] = nx.get_node_attributes(graph, "place")
    if chips:
        return {chip: _seen(place) for chip, place in chips.items()}
    places: dict[LinkGraphVertex, Position] = {unit: (float(unit), 0.0) for unit in graph if not isinstance(unit, str)}
    for switch in (vertex for vertex in graph if isinstance(vertex, str)):
        hanging = [places[other] for other in graph[switch] if other in places and places[other][1] < 1.0]
        middle = float(np.mean([x for x, _ in hanging])) if hanging else (len(places) - 1) / 2.0
        rail = int(switch.rpartition(" ")[2]) if "rail" in switch else 0
        width = 0.8 * len(hanging) / level.ports
        places[switch] = middle + width * (rail - (level.ports - 1) / 2) * ("rail" in switch), 1.0
    if "spine" in graph:
        places["spine"] = float(np.mean([places[leaf][0] for leaf in graph["spine"]])), 2.0
    return places


def _seen(place: tuple[int, ...]) -> Position:
    x, y, z = (*place, 0, 0)[:3]
    return x + 0.28 * z, y + 0.18 * z


def _line(start: Position, end: Position) -> np.ndarray:
    """Return the points of an edge: a straight line to a neighbour or another height, otherwise an arc."""
    across, share = abs(end[0] - start[0]), np.linspace(0.0, 1.0, 24)[:, None]
    line = np.array(start) * (1.0 - share) + np.array(end) * share
    if start[1] == end[1] and across > 1.5:
        line[:, 1] += 0.15 * across**0.5 * (4.0 * share * (1.0 - share))[:, 0]
    return line
