"""Identities, limits and bounds that hold for every registered collective algorithm."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paleo.collectives.base import COLLECTIVE_ALGORITHMS, COLLECTIVE_OPERATIONS, CollectiveAlgorithm, algorithms_for
from paleo.pricing.communication import Nccl, algorithm_times, fastest_algorithm
from paleo.pricing.links.alpha_beta import (
    LevelCost,
    collective_time_lower_bound,
    collective_traffic_time,
    torus_time_lower_bound,
)
from paleo.pricing.links.group import GroupLinks, LinkLevel

CASES = [
    (name, operation) for name, algorithm in COLLECTIVE_ALGORITHMS.items() for operation in algorithm.traffic_formulas
]
PAYLOADS = np.geomspace(1.0, 1e10, 41)
FLAT = (LevelCost(alpha=3e-6, beta=1 / 50e9, gamma=1 / 400e9),)
TWO = (FLAT[0], LevelCost(alpha=9e-6, beta=1 / 25e9, gamma=1 / 400e9))
GROUPS = [(2,), (3,), (8,), (13,), (64,), (8, 1), (1, 8), (8, 2), (4, 7), (2, 3), (8, 128)]

costs = st.builds(LevelCost, alpha=st.floats(0, 1e-4), beta=st.floats(1e-12, 1e-8), gamma=st.floats(0, 1e-10))


def priced(
    algorithm: CollectiveAlgorithm, operation: str, payload: object, group: tuple[object, ...], levels: object
) -> object:
    return collective_traffic_time(algorithm.traffic(operation, payload, group), levels)  # type: ignore[arg-type]


def least(
    algorithm: CollectiveAlgorithm, operation: str, payload: object, group: tuple[object, ...], levels: object
) -> object:
    """The lower bound of the networks that an algorithm is for."""
    if algorithm.required_topology == "torus":
        return torus_time_lower_bound(operation, payload, group, levels)  # type: ignore[arg-type]
    return collective_time_lower_bound(operation, payload, group, levels, in_network=not algorithm.is_one_port)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "operation"), CASES)
def test_one_rank_costs_nothing(name: str, operation: str) -> None:
    for group, levels in (((1,), FLAT), ((1, 1), TWO)):
        assert np.all(priced(COLLECTIVE_ALGORITHMS[name], operation, PAYLOADS, group, levels) == 0.0)


@pytest.mark.parametrize(("name", "operation"), CASES)
def test_no_algorithm_beats_the_lower_bound(name: str, operation: str) -> None:
    algorithm = COLLECTIVE_ALGORITHMS[name]
    for group in GROUPS:
        levels = FLAT if len(group) == 1 else TWO
        bound = least(algorithm, operation, PAYLOADS, group, levels)
        assert np.all(priced(algorithm, operation, PAYLOADS, group, levels) >= bound * (1 - 1e-12))


@settings(max_examples=25, deadline=None)
@given(st.tuples(st.integers(1, 16), st.integers(1, 16)), st.floats(0, 1e12), st.tuples(costs, costs))
def test_lower_bound_on_any_two_level_network(
    group: tuple[int, int], payload: float, levels: tuple[LevelCost, LevelCost]
) -> None:
    for name, operation in CASES:
        bound = least(COLLECTIVE_ALGORITHMS[name], operation, payload, group, levels)
        assert priced(COLLECTIVE_ALGORITHMS[name], operation, payload, group, levels) >= bound * (1 - 1e-12)


@pytest.mark.parametrize(("name", "operation"), CASES)
def test_monotone_in_payload_and_in_each_fan_out(name: str, operation: str) -> None:
    algorithm = COLLECTIVE_ALGORITHMS[name]
    for group in GROUPS:
        time = priced(algorithm, operation, PAYLOADS, group, FLAT if len(group) == 1 else TWO)
        assert np.all(np.diff(time) >= 0)
    by_ranks = priced(algorithm, operation, 1e6, (np.arange(2, 65),), FLAT)
    if algorithm.reduces_in_network and operation == "all_reduce":  # the multicast of 1/P shrinks with P
        return
    assert np.all(np.diff(by_ranks) >= -1e-15)


@pytest.mark.parametrize(("name", "operation"), CASES)
def test_scalars_agree_with_arrays(name: str, operation: str) -> None:
    algorithm, inner, outer = COLLECTIVE_ALGORITHMS[name], np.array([1, 2, 4, 8])[:, None], np.array([1, 2, 5])[None, :]
    grid = priced(algorithm, operation, 3e6, (inner, outer), TWO)
    assert np.shape(grid) == (4, 3)
    for i, a in enumerate(inner.ravel()):
        for j, b in enumerate(outer.ravel()):
            assert priced(algorithm, operation, 3e6, (int(a), int(b)), TWO) == grid[i, j]  # type: ignore[index]


@pytest.mark.parametrize(("name", "operation"), CASES)
def test_idle_levels_do_not_count(name: str, operation: str) -> None:
    algorithm = COLLECTIVE_ALGORITHMS[name]
    flat = priced(algorithm, operation, PAYLOADS, (8,), FLAT)
    assert np.allclose(priced(algorithm, operation, PAYLOADS, (8, 1), TWO), flat, rtol=1e-14)
    if not (
        algorithm.reduces_in_network or algorithm.only_between_nodes
    ):  # for these the inner level is a node's inside
        assert np.allclose(priced(algorithm, operation, PAYLOADS, (1, 8), (TWO[1], FLAT[0])), flat, rtol=1e-14)


@pytest.mark.parametrize(("name", "operation"), CASES)
def test_reduction_of_bytes_is_conserved_by_bandwidth_optimal_algorithms(name: str, operation: str) -> None:
    if name not in ("ring", "rabenseifner", "double_tree", "hierarchical") or operation != "all_reduce":
        return
    for group in GROUPS:
        ranks = float(np.prod(group))
        reduced = COLLECTIVE_ALGORITHMS[name].traffic(operation, 960.0, group).reduced_bytes
        assert reduced == pytest.approx(960.0 * (ranks - 1) / ranks)


@pytest.mark.parametrize("operation", COLLECTIVE_OPERATIONS)
def test_best_is_the_least_of_all_and_every_operation_is_served(operation: str) -> None:
    assert algorithms_for(operation)
    inside = LinkLevel(8.0, 50e9, 1.0, 1.0, 1.0, latency=3e-6, latency_in_calibrated_hops=3e-6)
    between = LinkLevel(4.0, 25e9, 8.0, 1.0, 8.0, latency=9e-6, latency_in_calibrated_hops=9e-6)
    links = GroupLinks((inside, between), inter_node_level_count=1)
    table = algorithm_times(Nccl(), operation, PAYLOADS, links)
    choice = fastest_algorithm(Nccl(), operation, PAYLOADS, links)
    assert np.array_equal(choice.time, np.min(list(table.values()), axis=0))
    for index, name in enumerate(choice.algorithm):
        assert table[str(name)][index] == choice.time[index]


@pytest.mark.parametrize(("name", "operation"), CASES)
def test_registry_entry_says_what_it_is(name: str, operation: str) -> None:
    algorithm = COLLECTIVE_ALGORITHMS[name]
    assert algorithm.name == name and algorithm.summary and algorithm.reference
    assert operation in COLLECTIVE_OPERATIONS
