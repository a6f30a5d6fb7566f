"""Closed forms of placement and contention against a flow-level simulation that shares links max-min fairly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from paleo.cli import run_command_line as paleo
from paleo.errors import SpecError
from paleo.predict import predict
from paleo.pricing.communication import Fabric
from paleo.pricing.links.topology import (
    Dragonfly,
    NodePlacement,
    all_to_all_nic_share,
    mean_leaf_count,
    mean_leaf_crossings,
    nic_share_with_neighbour,
    parse_node_placement,
    placement_nic_share,
    rail_all_to_all_nic_share,
    slowest_ecmp_flow_share,
)
from paleo.specs.device import load_link
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.system import InterconnectLevel, System, load_system


@pytest.fixture
def random() -> np.random.Generator:
    """A generator for each test, so that what a test draws does not depend on those that ran before it."""
    return np.random.default_rng(7)


def max_min_rates(paths: Sequence[Sequence[int]], capacity: Sequence[float]) -> np.ndarray:
    """Rates of flows over links by progressive filling: all grow alike until a link is full, whose flows then stay."""
    crosses = np.zeros((len(paths), len(capacity)))
    for flow, links in enumerate(paths):
        crosses[flow, list(links)] = 1.0
    rates, left, moving = np.zeros(len(paths)), np.array(capacity, dtype=float), np.ones(len(paths), dtype=bool)
    while moving.any():
        users = crosses[moving].sum(axis=0)
        growth = np.min(np.where(users > 0, left / np.maximum(users, 1.0), np.inf))
        rates[moving] += growth
        left -= growth * users
        full = (left <= 1e-9 * np.array(capacity)) & (users > 0)
        moving &= ~(crosses[:, full].any(axis=1))
    return rates


def exchange_rates(leaf_of: Sequence[int], leaf: int, oversubscription: float) -> np.ndarray:
    """Rates of all flows of an all-to-all over two tiers: links are ports up and down, and uplinks and downlinks of
    leaves (ideally balanced)."""
    nodes, leaves = len(leaf_of), max(leaf_of) + 1
    up, down = 2 * nodes, 2 * nodes + leaves
    paths = []
    for sender in range(nodes):
        for receiver in set(range(nodes)) - {sender}:
            path = [sender, nodes + receiver]
            if leaf_of[sender] != leaf_of[receiver]:
                path += [up + leaf_of[sender], down + leaf_of[receiver]]
            paths.append(path)
    return max_min_rates(paths, [1.0] * (2 * nodes) + [leaf / oversubscription] * (2 * leaves))


@pytest.mark.parametrize("ratio", [1, 4, 16])
def test_hashed_flows(random: np.random.Generator, ratio: int) -> None:
    links, slowest = 32, []
    for _ in range(200):
        paths = [[link] for link in random.integers(0, links, ratio * links)]
        slowest.append(max_min_rates(paths, [float(ratio)] * links).min())
    assert float(slowest_ecmp_flow_share(ratio * links, links)) == pytest.approx(float(np.mean(slowest)), rel=0.05)


@pytest.mark.parametrize(
    ("nodes", "leaves", "oversubscription"), [(16, 2, 1.0), (16, 2, 4.0), (16, 4, 2.0), (24, 3, 4.0)]
)
def test_an_exchange_over_leaves(nodes: int, leaves: int, oversubscription: float) -> None:
    leaf = nodes // leaves
    rates = exchange_rates([node // leaf for node in range(nodes)], leaf, oversubscription)
    expected = float(all_to_all_nic_share(nodes, leaf, leaf, oversubscription))
    assert rates.min() * (nodes - 1) == pytest.approx(expected, rel=0.05)


def test_nodes_drawn_at_random(random: np.random.Generator) -> None:
    machine, leaf, nodes = 256, 16, 12
    draws = [random.permutation(machine)[:nodes] // leaf for _ in range(2000)]
    touched = np.mean([len(set(draw)) for draw in draws])
    crossings = np.mean([(draw != np.roll(draw, 1)).sum() for draw in draws])
    assert float(mean_leaf_count(nodes, machine, leaf)) == pytest.approx(touched, rel=0.02)
    assert float(mean_leaf_crossings(nodes, machine, leaf)) == pytest.approx(crossings, rel=0.02)
    assert float(mean_leaf_count(8, 1024, 1024)) == pytest.approx(1.0)


def ring_rates(leaf_of: Sequence[int], leaf: int, oversubscription: float) -> np.ndarray:
    """Rates of the flows of a ring in the order of its nodes, over ports and the up- and downlinks of leaves."""
    nodes, leaves = len(leaf_of), max(leaf_of) + 1
    paths = []
    for sender, receiver in ((node, (node + 1) % nodes) for node in range(nodes)):
        path = [sender, nodes + receiver]
        if leaf_of[sender] != leaf_of[receiver]:
            path += [2 * nodes + leaf_of[sender], 2 * nodes + leaves + leaf_of[receiver]]
        paths.append(path)
    return max_min_rates(paths, [1.0] * (2 * nodes) + [leaf / oversubscription] * (2 * leaves))


def test_a_ring_in_rank_order_over_random_nodes(random: np.random.Generator) -> None:
    """Against the slowest flow of drawn placements, leaves four times oversubscribed."""
    shares = []
    for _ in range(200):
        _, leaf_of = np.unique(random.permutation(256)[:128] // 16, return_inverse=True)
        shares.append(ring_rates(random.permutation(leaf_of).tolist(), 16, 4.0).min())
    share = placement_nic_share(
        oversubscribed(4.0, leaf=16, nodes=256), 128, parse_node_placement("random")
    ).unsorted_ring_share
    assert share == pytest.approx(float(np.mean(shares)), rel=0.05)


def test_the_fullest_leaf_of_a_random_exchange(random: np.random.Generator) -> None:
    """Against the slowest flow of drawn placements, leaves four times oversubscribed."""
    system = oversubscribed(4.0, leaf=8, nodes=64)
    shares = []
    for _ in range(200):
        _, leaf_of = np.unique(random.permutation(64)[:24] // 8, return_inverse=True)
        shares.append(exchange_rates(leaf_of.tolist(), 8, 4.0).min() * 23)
    share = placement_nic_share(system, 24, parse_node_placement("random")).exchange_share
    assert share == pytest.approx(float(np.mean(shares)), rel=0.05)


def all_rates(
    groups: Sequence[Sequence[int]], leaf_of: Sequence[int], oversubscription: float, *, ring: bool, leaf: int
) -> np.ndarray:
    """Rates of all flows of several groups at once, each a ring in order or an all-to-all, over two tiers."""
    nodes, leaves = len(leaf_of), max(leaf_of) + 1
    paths = []
    for group in groups:
        ordered = sorted(group, key=lambda node: leaf_of[node])
        ringed = list(zip(ordered, [*ordered[1:], ordered[0]], strict=True))
        for sender, receiver in ringed if ring else [(a, b) for a in group for b in group if a != b]:
            path = [sender, nodes + receiver]
            if leaf_of[sender] != leaf_of[receiver]:
                path += [2 * nodes + leaf_of[sender], 2 * nodes + leaves + leaf_of[receiver]]
            paths.append(path)
    return max_min_rates(paths, [1.0] * (2 * nodes) + [leaf / oversubscription] * (2 * leaves))


@pytest.mark.parametrize(
    ("nodes", "stride", "leaf", "oversubscription"), [(8, 4, 8, 4.0), (8, 3, 8, 4.0), (4, 12, 8, 2.0), (6, 8, 8, 1.0)]
)
def test_groups_a_stride_apart_share_the_uplinks(nodes: int, stride: int, leaf: int, oversubscription: float) -> None:
    """All groups of a packed job at once: the slowest flow of their rings, and of their exchanges."""
    whole = nodes * stride
    groups = [range(first, whole, stride) for first in range(stride)]
    leaf_of = [node // leaf for node in range(whole)]
    share = placement_nic_share(oversubscribed(oversubscription, leaf=leaf, nodes=96), nodes, NodePlacement(), stride)
    ring, exchange = (
        all_rates(groups, leaf_of, oversubscription, ring=how, leaf=leaf).min() * scale
        for how, scale in ((True, 1), (False, nodes - 1))
    )
    assert share.ring_share == pytest.approx(ring, rel=0.05)
    assert share.exchange_share == pytest.approx(exchange, rel=0.05)


def test_groups_a_stride_apart_on_nodes_drawn_at_random(random: np.random.Generator) -> None:
    """Four groups of eight on 32 of 64 nodes, in the mean over draws."""
    rings, exchanges = [], []
    for _ in range(200):
        _, leaf_of = np.unique(random.permutation(64)[:32] // 8, return_inverse=True)
        groups = [range(first, 32, 4) for first in range(4)]
        slowest = [all_rates(groups, leaf_of.tolist(), 8.0, ring=how, leaf=8).min() for how in (True, False)]
        rings.append(slowest[0])
        exchanges.append(slowest[1] * 7)
    share = placement_nic_share(oversubscribed(8.0), 8, parse_node_placement("random"), 4)
    assert share.ring_share == pytest.approx(float(np.mean(rings)), rel=0.05)
    assert share.exchange_share == pytest.approx(float(np.mean(exchanges)), rel=0.05)


def test_a_stride_inside_the_nodes_is_none_between_them() -> None:
    """Replicas behind eight tensor-parallel ranks lie in neighbouring nodes, behind four nodes of experts not."""
    fabric = Fabric(oversubscribed(8.0), placement=NodePlacement())
    payload, ranks = np.array([1e9]), np.array([16])
    near, apart = (float(fabric.collective_times("all_gather", np.array([s]), ranks, payload)[0]) for s in (8, 32))
    plain = Fabric(oversubscribed(1.0), placement=NodePlacement())
    assert near == float(plain.collective_times("all_gather", np.array([8]), ranks, payload)[0])
    assert apart > 3.0 * near


def rail_rates(nodes: int, rails: int, leaf: int, oversubscription: float, *, forwarded: bool) -> np.ndarray:
    """Rates of all flows between GPUs of different nodes: over a NIC each way, and over the spine but for like rails of
    one unit; forwarded ones go over NVLink, nine times a NIC, to the GPU of the right rail first."""
    gpus, units = nodes * rails, nodes // leaf
    up, down, nvlink = 2 * gpus, 2 * gpus + units * rails, 2 * gpus + 2 * units * rails
    paths = []
    for a, i, b, j in ((a, i, b, j) for a in range(nodes) for b in range(nodes) for i in range(rails)
                       for j in range(rails) if a != b):  # fmt: skip
        rail = j if forwarded else i
        path = [a * rails + rail, gpus + b * rails + j]
        path += [nvlink + a * rails + i] if rail != i else []
        if rail != j or a // leaf != b // leaf:
            path += [up + a // leaf * rails + rail, down + b // leaf * rails + j]
        paths.append(path)
    return max_min_rates(paths, [1.0] * (2 * gpus) + [leaf / oversubscription] * (2 * units * rails) + [9.0] * gpus)


@pytest.mark.parametrize(("nodes", "leaf", "oversubscription"), [(6, 6, 2.0), (6, 3, 1.5), (8, 4, 4.0), (6, 3, 1.0)])
def test_an_exchange_over_rails(nodes: int, leaf: int, oversubscription: float) -> None:
    rails = 4
    straight, forwarded = (
        rail_rates(nodes, rails, leaf, oversubscription, forwarded=how).min() * (nodes - 1) * rails
        for how in (False, True)
    )
    direct = float(rail_all_to_all_nic_share(nodes, leaf, rails, leaf, oversubscription))
    assert straight == pytest.approx(direct, rel=0.05)
    assert forwarded == pytest.approx(float(all_to_all_nic_share(nodes, leaf, leaf, oversubscription)), rel=0.05)


def dragonfly_rates(flows: Sequence[tuple[int, int]], size: int, network: Dragonfly) -> np.ndarray:
    """Rates of flows between nodes, ``size`` in a group, over their ports and the links of pairs of groups: straight,
    or in equal parts over every third group, the slowest part of which sets the pace."""
    groups = int(network.groups)
    nodes, paths = groups * size, []
    for sender, receiver in flows:
        ports, a, b = [sender, nodes + receiver], sender // size, receiver // size
        thirds = [third for third in range(groups) if third not in (a, b)]
        if a == b:
            paths += [ports] * (1 if network.routing == "minimal" else len(thirds) + 1)
        elif network.routing == "minimal":
            paths.append([*ports, 2 * nodes + a * groups + b])
        else:
            paths += [[*ports, 2 * nodes + a * groups + x, 2 * nodes + x * groups + b] for x in thirds]
    rates = max_min_rates(paths, [1.0] * (2 * nodes) + [float(network.group_pair_bandwidth)] * groups**2)
    if network.routing == "minimal":
        return rates
    parts = groups - 2
    return np.array([part.min() * parts for part in np.array_split(rates, len(rates) / parts)])


@pytest.mark.parametrize("routing", ["minimal", "valiant"])
@pytest.mark.parametrize(("used", "members", "pair"), [(2, 6, 0.8), (3, 6, 0.5), (6, 4, 0.3), (6, 2, 1.0)])
def test_an_exchange_over_a_dragonfly(used: int, members: int, pair: float, routing: str) -> None:
    network = Dragonfly(6, pair, routing)
    nodes = [group * members + node for group in range(used) for node in range(members)]
    across = [(a, b) for a in nodes for b in nodes if a // members != b // members]
    inside = 1.0 - (members - 1.0) / (len(nodes) - 1.0)  # of a port, what is left of the flows that stay in the group
    rates = dragonfly_rates(across, members, network) * (len(nodes) - 1)
    expected = float(network.exchange_share(len(nodes), members, used))
    assert min(rates.min(), 1.0) == pytest.approx(expected, rel=0.05) or rates.min() * inside > 1.0
    best = replace(network, routing="adaptive")
    assert float(best.exchange_share(len(nodes), members, used)) >= expected


@pytest.mark.parametrize("routing", ["minimal", "valiant"])
def test_a_ring_over_a_dragonfly(routing: str) -> None:
    network = Dragonfly(6, 0.4, routing)
    rates = dragonfly_rates([(4 * group, (4 * group + 4) % 24) for group in range(6)], 4, network)
    assert float(network.ring_share(6)) == pytest.approx(rates.min(), rel=0.05)
    assert float(network.ring_share(1)) == 1.0


def test_a_ring_in_rank_order_over_a_dragonfly(random: np.random.Generator) -> None:
    """Against the slowest flow of drawn placements; the balanced number of links."""
    groups, size, nodes = 9, 16, 96
    network = Dragonfly(groups, size / (groups - 1.0), "minimal")
    shares = []
    for _ in range(200):
        drawn = random.permutation(groups * size)[:nodes]
        flows = [(int(a), int(b)) for a, b in zip(drawn, np.roll(drawn, -1), strict=True)]
        shares.append(dragonfly_rates(flows, size, network).min())
    share = float(network.unsorted_ring_share(mean_leaf_crossings(nodes, groups * size, size)))
    assert share == pytest.approx(float(np.mean(shares)), rel=0.05)


@pytest.mark.parametrize(
    ("ports", "demand", "others", "asked"), [(8, 0.5, 8, 1.0), (1, 1.0, 12, 0.7), (4, 1.0, 4, 0.25), (2, 0.4, 2, 0.9)]
)
@pytest.mark.parametrize("sending", [0.3, 0.8])
def test_a_job_beside_another(
    random: np.random.Generator, ports: int, demand: float, others: int, asked: float, sending: float
) -> None:
    """Ports of a leaf share its uplinks max-min fairly while both jobs send; the other is silent in between."""
    capacity = 3.0
    flows = [[port, ports + others] for port in range(ports + others)]
    limits = [demand] * ports + [asked] * others + [capacity]
    together, alone = max_min_rates(flows, limits)[0], max_min_rates(flows[:ports], limits)[0]
    mean = np.mean([together if random.random() < sending else alone for _ in range(20000)])
    kept = nic_share_with_neighbour(
        ports=ports, demand=demand, other_ports=others, other_demand=asked, sending=sending, capacity=capacity
    )
    assert float(kept) == pytest.approx(float(mean / alone), rel=0.05)


def oversubscribed(ratio: float, *, leaf: int = 8, nodes: int = 64, routing: str | None = None) -> System:
    system = load_system("dgx-h100")
    fabric = system.levels[-1].model_copy(update={"leaf": leaf, "oversubscription": ratio, "routing": routing})
    return system.model_copy(update={"levels": (*system.levels[:-1], fabric), "max_nodes": nodes})


def seconds(system: System, operation: str, placement: NodePlacement | None) -> float:
    fabric = Fabric(system, placement=placement)
    return float(fabric.collective_times(operation, np.array([1]), np.array([64]), np.array([1e9]))[0])


def test_random_nodes_hurt_exchanges_and_not_sorted_rings() -> None:
    system, random = oversubscribed(8.0), parse_node_placement("random")
    assert seconds(system, "all_to_all", random) > 1.5 * seconds(system, "all_to_all", None)
    assert seconds(system, "all_gather", random) == seconds(system, "all_gather", None)
    assert seconds(oversubscribed(1.0), "all_to_all", random) == pytest.approx(
        seconds(oversubscribed(1.0), "all_to_all", None), rel=1e-12
    )


def test_neighbours_take_their_part_of_the_uplinks() -> None:
    system = oversubscribed(1.0)
    alone, beside = (replace(parse_node_placement("spread:4"), background_load_share=share) for share in (0.0, 0.3))
    ratio = seconds(system, "all_gather", beside) / seconds(system, "all_gather", alone)
    assert 1.2 < ratio <= 1 / 0.7 + 1e-9
    packed = replace(parse_node_placement("packed"), background_load_share=0.3)
    assert seconds(system, "all_gather", packed) == seconds(system, "all_gather", None)  # one leaf, no uplink


def test_hashing_counts_where_the_network_hashes() -> None:
    spread = parse_node_placement("spread:4")
    shares = [
        placement_nic_share(oversubscribed(1.0, routing=how), 8, spread).ring_share
        for how in ("ecmp", "adaptive", None)
    ]
    assert 0.5 < shares[0] < 0.8 < shares[1] < shares[2] == 1.0


def test_a_step_with_its_nodes_spread_beside_neighbours_is_longer() -> None:
    """Four leaf switches of 32 nodes, half of what lies above them used by others."""
    times = [
        predict(
            load_model("gpt2"), load_system("dgx-h100"), Run(gpus=64, batch=1, strategy="zero=3", **options)
        ).step_time
        for options in ({}, {"nodes": "spread:4"}, {"nodes": "spread:4", "background": 0.5})
    ]
    assert times[0] == times[1] < times[2]


def test_a_second_job_on_the_same_leaves() -> None:
    """Eight nodes of mine and of the other on each of two leaves that are four times oversubscribed."""
    system = oversubscribed(4.0, leaf=16)
    alone, silent, beside, ring = (
        placement_nic_share(system, 16, parse_node_placement("spread:2", 0.0, neighbour)).exchange_share
        for neighbour in (None, "all_to_all:16:0", "all_to_all:16:1", "ring:16:1")
    )
    assert alone == silent == pytest.approx(4 / (8 * 8 / 15)) and beside == pytest.approx(2 / (8 * 8 / 15))
    assert beside < ring < alone
    full = placement_nic_share(system, 32, parse_node_placement("packed", 0.0, "all_to_all:16:1"))
    assert full == placement_nic_share(system, 32, parse_node_placement("packed"))  # no place left on its leaves


def test_rails_keep_exchanges_that_go_over_nvlink_first() -> None:
    rails = oversubscribed(2.0, leaf=8, routing="rail")
    share = placement_nic_share(rails, 8, parse_node_placement("packed"))
    assert (share.exchange_share, share.ring_share) == (1.0, 1.0)
    assert share.direct_rail_exchange_share == pytest.approx(float(rail_all_to_all_nic_share(8, 8, 8, 8, 2.0)))


def test_a_system_that_states_its_topology_is_priced_by_it() -> None:
    """Packed nodes, too: 16 of them on two leaves that are eight times oversubscribed."""
    network, run = load_model("gpt2"), Run(gpus=128, batch=1, strategy="zero=3")
    plain, tapered = oversubscribed(1.0), oversubscribed(16.0)
    assert predict(network, plain, run).step_time < predict(network, tapered, run).step_time


def test_slingshot_with_its_groups_stated() -> None:
    """Four links between groups of 16 nodes with four ports: an exchange of two groups needs the links of others, a
    ring sorted by group does not."""
    system = load_system("perlmutter")
    shares = []
    for routing in ("minimal", "adaptive"):
        changed = {"leaf": 16, "global_links": 4, "routing": routing}
        level = system.levels[-1].model_copy(update=changed)
        sparse = system.model_copy(update={"levels": (*system.levels[:-1], level), "max_nodes": 256})
        shares.append(placement_nic_share(sparse, 32, parse_node_placement("packed")))
    assert [share.leaves for share in shares] == [2.0, 2.0] and [share.ring_share for share in shares] == [1.0, 1.0]
    assert [share.exchange_share for share in shares] == [pytest.approx(31 / 256), 1.0]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"global_links": 4}, "only a dragonfly"),
        ({"routing": "valiant"}, "ecmp, adaptive, rail"),
        ({"routing": "rail", "topology": "dragonfly"}, "adaptive, minimal, valiant"),
    ],
)
def test_routing_fits_its_topology(changes: dict[str, object], says: str) -> None:
    level = {"name": "fabric", "ranks": None, "link": load_link("infiniband-ndr"), "topology": "fabric"}
    with pytest.raises(SpecError, match=says):
        InterconnectLevel(**{**level, **changes})


@pytest.mark.parametrize("text", ["all_to_all", "all_to_al:8:0.5", "ring:0:0.5", "ring:8:1.5", "ring:8", ""])
def test_bad_neighbours_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match="neighbour"):
        parse_node_placement("packed", 0.0, text)


@pytest.mark.parametrize(("text", "background"), [("spread:0", 0.0), ("spred:2", 0.0), ("packed", 1.0), ("", 0.0)])
def test_bad_placements_are_refused(text: str, background: float) -> None:
    with pytest.raises(SpecError, match=r"nodes|background"):
        parse_node_placement(text, background)


def test_show_says_how_nodes_are_joined(capsys: pytest.CaptureFixture[str]) -> None:
    for name, words in (
        ("perlmutter", "dragonfly, 128 nodes to a group"), ("dgx-h100", "fabric, 32 nodes to a leaf switch, rails"),
    ):  # fmt: skip
        assert paleo(["show", name]) == 0
        assert words in " ".join(capsys.readouterr().out.split())
