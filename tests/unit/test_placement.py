"""Closed forms of placement and contention against a flow-level simulation that shares links max-min fairly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from paleo.errors import SpecError
from paleo.predict import predict
from paleo.pricing.communication import Fabric
from paleo.pricing.links.fabric import (
    NodePlacement,
    ecmp_share,
    exchange_share,
    leaves_touched,
    node_placement,
    placed,
    ring_crossings,
    shared_slowdown,
)
from paleo.specs.hardware import System, load_system
from paleo.specs.model import load_model
from paleo.specs.run import Run

RANDOM = np.random.default_rng(7)


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


@pytest.mark.parametrize("ratio", [4, 16, 64])
def test_hashed_flows(ratio: int) -> None:
    links, slowest = 32, []
    for _ in range(60):
        paths = [[link] for link in RANDOM.integers(0, links, ratio * links)]
        slowest.append(max_min_rates(paths, [float(ratio)] * links).min())
    assert float(ecmp_share(ratio * links, links)) == pytest.approx(float(np.mean(slowest)), rel=0.05)


@pytest.mark.parametrize(
    ("nodes", "leaves", "oversubscription"), [(16, 2, 1.0), (16, 2, 4.0), (16, 4, 2.0), (24, 3, 4.0)]
)
def test_an_exchange_over_leaves(nodes: int, leaves: int, oversubscription: float) -> None:
    leaf = nodes // leaves
    rates = exchange_rates([node // leaf for node in range(nodes)], leaf, oversubscription)
    expected = float(exchange_share(nodes, leaf, leaf, oversubscription))
    assert rates.min() * (nodes - 1) == pytest.approx(expected, rel=0.05)


def test_nodes_drawn_at_random() -> None:
    machine, leaf, nodes = 256, 16, 12
    draws = [RANDOM.permutation(machine)[:nodes] // leaf for _ in range(2000)]
    touched = np.mean([len(set(draw)) for draw in draws])
    crossings = np.mean([(draw != np.roll(draw, 1)).sum() for draw in draws])
    assert float(leaves_touched(nodes, machine, leaf)) == pytest.approx(touched, rel=0.02)
    assert float(ring_crossings(nodes, machine, leaf)) == pytest.approx(crossings, rel=0.02)
    assert float(leaves_touched(8, 1024, 1024)) == pytest.approx(1.0)


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


def test_a_ring_in_rank_order_over_random_nodes() -> None:
    """Against the slowest flow of drawn placements, leaves four times oversubscribed."""
    shares = []
    for _ in range(60):
        _, leaf_of = np.unique(RANDOM.permutation(256)[:128] // 16, return_inverse=True)
        shares.append(ring_rates(RANDOM.permutation(leaf_of).tolist(), 16, 4.0).min())
    share = placed(oversubscribed(4.0, leaf=16, nodes=256), 128, node_placement("random")).unsorted_share
    assert share == pytest.approx(float(np.mean(shares)), rel=0.05)


def test_the_fullest_leaf_of_a_random_exchange() -> None:
    """Against the slowest flow of drawn placements, leaves four times oversubscribed."""
    system = oversubscribed(4.0, leaf=8, nodes=64)
    shares = []
    for _ in range(40):
        _, leaf_of = np.unique(RANDOM.permutation(64)[:24] // 8, return_inverse=True)
        shares.append(exchange_rates(leaf_of.tolist(), 8, 4.0).min() * 23)
    share = placed(system, 24, node_placement("random")).exchange_share
    assert share == pytest.approx(float(np.mean(shares)), rel=0.05)


@pytest.mark.parametrize("share", [0.2, 0.35, 0.5])
def test_two_jobs_on_one_link(share: float) -> None:
    """Both compute, then send; while both send, each gets half of the link. Steps last 1 alone, phases drift."""
    clock, sending, steps = 0.0, [False, False], [0, 0]
    lengths = (1.0 - share, 1.0371 - share)
    left = [lengths[0], 0.5 * lengths[1]]
    while min(steps) < 400:
        rates = [0.5 if all(sending) else 1.0] * 2
        wait = min(left[job] / rates[job] for job in (0, 1))
        clock += wait
        for job in (0, 1):
            left[job] -= wait * rates[job]
            if left[job] <= 1e-12:
                steps[job] += sending[job]
                sending[job] = not sending[job]
                left[job] = share if sending[job] else lengths[job]
    assert float(shared_slowdown(share, share)) == pytest.approx(clock / steps[0], rel=0.05)


def oversubscribed(ratio: float, *, leaf: int = 8, nodes: int = 64, routing: str | None = None) -> System:
    system = load_system("dgx-h100")
    fabric = system.levels[-1].model_copy(update={"leaf": leaf, "oversubscription": ratio, "routing": routing})
    return system.model_copy(update={"levels": (*system.levels[:-1], fabric), "max_nodes": nodes})


def seconds(system: System, operation: str, placement: NodePlacement | None) -> float:
    fabric = Fabric(system, placement=placement)
    return float(fabric.times(operation, np.array([1]), np.array([64]), np.array([1e9]))[0])


def test_random_nodes_hurt_exchanges_and_not_sorted_rings() -> None:
    system, random = oversubscribed(8.0), node_placement("random")
    assert seconds(system, "all_to_all", random) > 1.5 * seconds(system, "all_to_all", None)
    assert seconds(system, "all_gather", random) == seconds(system, "all_gather", None)
    assert seconds(oversubscribed(1.0), "all_to_all", random) == pytest.approx(
        seconds(oversubscribed(1.0), "all_to_all", None), rel=1e-12
    )


def test_neighbours_take_their_part_of_the_uplinks() -> None:
    system = oversubscribed(1.0)
    alone, beside = (replace(node_placement("spread:4"), background=share) for share in (0.0, 0.3))
    ratio = seconds(system, "all_gather", beside) / seconds(system, "all_gather", alone)
    assert 1.2 < ratio <= 1 / 0.7 + 1e-9
    packed = replace(node_placement("packed"), background=0.3)
    assert seconds(system, "all_gather", packed) == seconds(system, "all_gather", None)  # one leaf, no uplink


def test_hashing_counts_where_the_network_hashes() -> None:
    spread = node_placement("spread:4")
    shares = [placed(oversubscribed(1.0, routing=how), 8, spread).ring_share for how in ("ecmp", "adaptive", None)]
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


@pytest.mark.parametrize(("text", "background"), [("spread:0", 0.0), ("spred:2", 0.0), ("packed", 1.0), ("", 0.0)])
def test_bad_placements_are_refused(text: str, background: float) -> None:
    with pytest.raises(SpecError, match=r"nodes|background"):
        node_placement(text, background)
