"""Closed forms of fabrics against maximum flows on their graphs, and the pictures of these."""

from __future__ import annotations

from pathlib import Path

import networkx as nx
import pytest

from paleo.cli import run_command_line as run
from paleo.network.graph import build_graph
from paleo.pricing.links.topology import Dragonfly, all_to_all_nic_share, rail_all_to_all_nic_share
from paleo.report.collective import LinkGraphVertex, interconnect_level_graph, level_member_counts
from paleo.specs.catalog import entry_names
from paleo.specs.model import load_model
from paleo.specs.system import InterconnectLevel, System, load_system, torus_levels

SYSTEM = load_system("dgx-h100")
FABRIC = SYSTEM.levels[-1]
LEVELS = [(name, index) for name in entry_names("systems") for index in range(len(load_system(name).levels))]


def carried(
    graph: nx.Graph[LinkGraphVertex], sends: dict[LinkGraphVertex, float], takes: dict[LinkGraphVertex, float]
) -> float:
    """The largest flow from vertices that send so much at most to those that take so much at most."""
    flows = graph.copy()
    flows.add_edges_from(("source", vertex) for vertex in sends)
    for end, rates in (("source", sends), ("sink", takes)):
        flows.add_edges_from((end, vertex, {"rate": rate}) for vertex, rate in rates.items())
    return float(nx.maximum_flow_value(flows, "source", "sink", capacity="rate"))


def changed(**update: object) -> InterconnectLevel:
    return FABRIC.model_copy(update={"routing": None, **update})


def system_with(level: InterconnectLevel, nodes: int) -> System:
    return SYSTEM.model_copy(update={"levels": (SYSTEM.levels[0], level), "max_nodes": nodes})


@pytest.mark.parametrize(("name", "index"), LEVELS)
def test_a_unit_sends_at_the_rate_of_its_level(name: str, index: int) -> None:
    """From one unit to all others of its leaf, or of the whole level where there are no leaves."""
    system = load_system(name)
    level = system.levels[index]
    units = min(level_member_counts(system, level)[1], 32)
    if level.topology == "torus" or units < 2:
        return
    graph = interconnect_level_graph(system, level, units)
    rest = dict.fromkeys((unit for unit in range(1, units)), float("inf"))
    assert carried(graph, {0: float("inf")}, rest) == pytest.approx(level.member_bandwidth)


@pytest.mark.parametrize(("nodes", "members", "ratio"), [(24, 8, 1.0), (24, 8, 2.0), (64, 16, 4.0), (12, 4, 3.0)])
def test_exchange_over_a_fat_tree(nodes: int, members: int, ratio: float) -> None:
    """What the members of a leaf send to the nodes of others in an all-to-all fits at the share, and no more does."""
    leaf = 16
    level = changed(leaf=leaf, oversubscription=ratio)
    machine = system_with(level, 16 * leaf)
    graph = interconnect_level_graph(machine, level, (nodes // members) * leaf)
    rate = level.member_bandwidth
    inside = range(members)
    others = [leaf * group + i for group in range(1, nodes // members) for i in range(members)]
    share = float(all_to_all_nic_share(nodes, members, leaf, ratio))
    leaving = rate * (nodes - members) / (nodes - 1)  # of a node, to other leaves

    def fits(at: float) -> bool:
        wanted = at * members * leaving
        found = carried(graph, dict.fromkeys(inside, at * leaving), dict.fromkeys(others, at * rate))
        return found == pytest.approx(wanted)

    assert fits(share) and (share == 1.0 or not fits(1.01 * share))


@pytest.mark.parametrize(("nodes", "members", "ratio"), [(8, 8, 2.0), (32, 8, 2.0), (16, 8, 4.0), (8, 8, 1.0)])
def test_exchange_over_rails(nodes: int, members: int, ratio: float) -> None:
    """What the NICs below one rail switch send to other rails, and to their own rail below other switches, fits."""
    leaf, rails = 8, FABRIC.ports
    level = changed(leaf=leaf, oversubscription=ratio, routing="rail")
    graph = interconnect_level_graph(system_with(level, 16 * leaf), level, 2 * leaf)
    share = float(rail_all_to_all_nic_share(nodes, members, rails, leaf, ratio))
    port = level.link.bandwidth
    leaving = port * (1.0 - (members - 1) / ((nodes - 1) * rails))

    switches = graph.subgraph([vertex for vertex in graph if isinstance(vertex, str)])  # no node forwards anything
    others = [switch for switch in switches if switch not in ("leaf 0, rail 0", "spine")]

    def fits(at: float) -> bool:
        wanted = at * members * leaving
        found = carried(switches, {"leaf 0, rail 0": wanted}, dict.fromkeys(others, float("inf")))
        return found == pytest.approx(wanted)

    assert fits(share) and (share == 1.0 or not fits(1.01 * share))


@pytest.mark.parametrize("routing", ["minimal", "valiant"])
@pytest.mark.parametrize("links", [4, 16, 64])
def test_exchange_over_a_dragonfly(routing: str, links: int) -> None:
    """Two full groups exchange over their own links, or over those of all third groups."""
    groups, leaf = 6, 16
    level = changed(topology="dragonfly", leaf=leaf, global_links=links, routing=routing)
    graph = interconnect_level_graph(system_with(level, groups * leaf), level, groups * leaf)
    direct = {"group 0", "group 1", *range(2 * leaf)}
    graph = graph.subgraph(direct).copy() if routing == "minimal" else graph.copy()
    if routing == "valiant":
        graph.remove_edge("group 0", "group 1")
    nodes, rate = 2 * leaf, level.member_bandwidth
    network = Dragonfly(groups, links / level.ports, routing)
    share = float(network.exchange_share(nodes, leaf, 2))
    leaving = rate * leaf / (nodes - 1)

    def fits(at: float) -> bool:
        found = carried(
            graph, dict.fromkeys(range(leaf), at * leaving), dict.fromkeys(range(leaf, nodes), at * leaving)
        )
        return found == pytest.approx(at * leaf * leaving)

    assert fits(share) and (share == 1.0 or not fits(1.01 * share))


@pytest.mark.parametrize("name", ["tpu-v2-pod", "tpu-v4-pod", "tpu-v5e-pod", "tpu-v5p-pod"])
@pytest.mark.parametrize("chips", [8, 64, 256])
def test_planes_of_a_torus_send_at_the_rate_of_their_dimension(name: str, chips: int) -> None:
    """From the first row, plane, … of each dimension to the rest of the box."""
    system = load_system(name)
    level = next(each for each in system.levels if each.topology == "torus")
    graph = interconnect_level_graph(system, level, chips)
    places: dict[LinkGraphVertex, tuple[int, ...]] = nx.get_node_attributes(graph, "place")
    below = level_member_counts(system, level)[0]
    for axis, dimension in enumerate(torus_levels(level, below, chips * below)):
        inside = [v for v, place in places.items() if all(place[other] == 0 for other in range(axis, len(place)))]
        rest = [v for v, place in places.items() if place[axis] > 0 and not any(place[axis + 1 :])]
        box = graph.subgraph([*inside, *rest])
        infinite = float("inf")
        if rest:
            found = carried(box, dict.fromkeys(inside, infinite), dict.fromkeys(rest, infinite))
            assert found == pytest.approx(dimension.member_bandwidth), (axis, dimension)


def test_a_network_is_a_directed_graph_of_its_layers() -> None:
    graph = build_graph(load_model("resnet50"), batch=1)
    order = {node.name: place for place, node in enumerate(graph.nodes)}
    assert nx.is_directed_acyclic_graph(graph.layer_graph) and nx.is_weakly_connected(graph.layer_graph)
    assert list(graph.layer_graph) == list(order)
    assert all(order[before] < order[after] for before, after in graph.layer_graph.edges)
    assert graph.layer_graph.nodes[graph.nodes[0].name]["layer"] is graph.nodes[0]
    joins = [name for name in graph.layer_graph if graph.layer_graph.in_degree(name) == 2]
    assert len(joins) == 8  # residual sums of the first block of each of four stages, and of the folded others


@pytest.mark.parametrize(("name", "code"), [("dgx-h100", 0), ("tpu-v4-pod", 0), ("perlmutter", 0), ("lenet", 2)])
def test_the_links_of_a_system_are_drawn(
    name: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "links.svg"
    assert run(["show", name, "--plot", str(picture)]) == code
    assert picture.exists() == (code == 0)
    assert code == 0 or "--plot: draws the links of a system, and 'lenet' is a model" in capsys.readouterr().err
