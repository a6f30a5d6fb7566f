"""Textbook formulas come out exactly in a flat network; bad input is refused; hand-worked groups."""

from __future__ import annotations

import numpy as np
import pytest

from paleo.collectives.base import ALGORITHMS
from paleo.collectives.parameter_server import parameter_server_all_reduce
from paleo.collectives.traffic import LevelTraffic, Traffic
from paleo.errors import SpecError
from paleo.pricing.alpha_beta import (
    LevelCost,
    best,
    bus_factor,
    crossovers,
    lower_bound,
    span_costs,
    table,
    times,
    traffic_time,
)

L, G, S = 7e-6, 1 / 12.5e9, 244e6
RANKS = np.array([2.0, 4.0, 8.0, 64.0, 1024.0])
LOG = np.log2(RANKS)


def flat(name: str, operation: str = "all_reduce") -> np.ndarray:
    return np.asarray(times(operation, S, (RANKS,), [LevelCost(L, G)], [name])[name])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tree", 2 * L * LOG + 2 * S * G * LOG),
        ("butterfly", L * LOG + S * G * LOG),
        ("ring", 2 * L * (RANKS - 1) + 2 * S * G * (RANKS - 1) / RANKS),
        ("rabenseifner", 2 * L * LOG + 2 * S * G * (RANKS - 1) / RANKS),
        ("double_tree", 2 * L * LOG + 2 * S * G * (RANKS - 1) / RANKS),
        ("hierarchical", 2 * L * (RANKS - 1) + 2 * S * G * (RANKS - 1) / RANKS),
        ("parameter_server", 2 * L + 2 * RANKS * S * G),
        ("sharded_parameter_server", 2 * L + 2 * S * G),
        ("one_to_all", 2 * L * (RANKS - 1) + 2 * S * G * (RANKS - 1)),
    ],
)
def test_all_reduce_textbook_formulas(name: str, expected: np.ndarray) -> None:
    assert np.allclose(flat(name), expected, rtol=1e-13)


def test_lower_bound_textbook_formula() -> None:
    bound = lower_bound("all_reduce", S, (RANKS,), [LevelCost(L, G)])
    assert np.allclose(bound, L * LOG + 2 * S * G * (RANKS - 1) / RANKS, rtol=1e-13)


def test_parameter_server_of_s_shards() -> None:
    priced = traffic_time(
        parameter_server_all_reduce(np.float64(S), (np.float64(16),), servers=4.0),  # type: ignore[arg-type]
        [LevelCost(L, G)],
    )
    assert priced == pytest.approx(2 * L + 2 * 16 * (S / 4) * G)


@pytest.mark.parametrize("ranks", [2, 3, 8, 100])
def test_original_paleo_without_latency(ranks: int) -> None:
    def seconds(name: str) -> float:
        return float(times("all_reduce", S, (ranks,), [LevelCost(0.0, G)], [name])[name])

    rounds = int(np.ceil(np.log2(ranks)))
    assert seconds("one_to_all") == pytest.approx(2 * (ranks - 1) * S * G)
    assert seconds("tree") == pytest.approx(2 * rounds * S * G)
    assert seconds("butterfly") == pytest.approx(rounds * S * G)


@pytest.mark.parametrize(
    ("name", "operation", "steps", "wire"),
    [
        ("ring", "reduce_scatter", 7, 7 / 8),
        ("ring", "all_gather", 7, 7 / 8),
        ("ring", "broadcast", 7, 1),
        ("butterfly", "all_gather", 3, 7 / 8),
        ("tree", "broadcast", 3, 3),
        ("double_tree", "broadcast", 3, 1),
        ("rabenseifner", "broadcast", 6, 7 / 4),
        ("pairwise", "all_to_all", 7, 7 / 8),
        ("bruck", "all_to_all", 3, 3 / 2),
        ("point_to_point", "send_recv", 1, 1),
        ("in_switch", "all_reduce", 2, 9 / 8),
        ("in_switch", "all_gather", 1, 7 / 8),
    ],
)
def test_steps_and_bytes_of_eight_ranks(name: str, operation: str, steps: float, wire: float) -> None:
    traffic = ALGORITHMS[name].traffic(operation, 800.0, (8,))
    assert float(traffic.steps) == steps
    assert float(traffic.wire_bytes) == pytest.approx(800.0 * wire)


def test_two_nodes_of_eight_by_hand() -> None:
    ring = ALGORITHMS["ring"].traffic("all_reduce", 1600.0, (8, 2))
    assert [float(level.steps) for level in ring.levels] == [28.0, 2.0]
    assert [float(level.wire_bytes) for level in ring.levels] == [3000.0, 3000.0]
    layered = ALGORITHMS["hierarchical"].traffic("all_reduce", 1600.0, (8, 2))
    assert [float(level.steps) for level in layered.levels] == [14.0, 2.0]
    assert [float(level.wire_bytes) for level in layered.levels] == [2800.0, 1600.0]
    exchange = ALGORITHMS["pairwise"].traffic("all_to_all", 1600.0, (8, 2))
    assert [float(level.steps) for level in exchange.levels] == [7.0, 8.0]
    assert [float(level.wire_bytes) for level in exchange.levels] == [1500.0, 6400.0]
    message = ALGORITHMS["point_to_point"].traffic("send_recv", 1600.0, (2, 2))
    assert [float(level.wire_bytes) for level in message.levels] == [0.0, 1600.0]


def test_pipelined_levels_overlap_and_phases_add() -> None:
    costs = [LevelCost(1.0, 2.0), LevelCost(10.0, 5.0)]
    both = (LevelTraffic(1, 100.0), LevelTraffic(1, 30.0))
    assert traffic_time(Traffic.of(*both), costs) == 11.0 + 200.0
    assert traffic_time(Traffic.of(both[0]) + Traffic.of(LevelTraffic(), both[1]), costs) == 11.0 + 200.0 + 150.0


def test_crossover_of_butterfly_and_rabenseifner_is_where_algebra_puts_it() -> None:
    ranks, log = 64.0, 6.0
    found = crossovers("all_reduce", (ranks,), [LevelCost(L, G)], algorithms=["butterfly", "rabenseifner"])
    expected = L * log / (G * (log - 2 * (ranks - 1) / ranks))
    assert [(one.below, one.above) for one in found] == [("butterfly", "rabenseifner")]
    assert found[0].payload_bytes == pytest.approx(expected, rel=1e-8)


def test_best_takes_arrays_and_may_be_forced() -> None:
    cost = [LevelCost(L, G)]
    choice = best("all_reduce", np.array([8.0, 1e9]), (64,), cost)
    assert choice.algorithm.tolist() == ["butterfly", "double_tree"]
    assert best("all_reduce", 1e9, (64,), cost, ["tree"]).algorithm.item() == "tree"


def test_the_switch_is_used_only_where_there_is_one() -> None:
    assert "in_switch" not in times("all_reduce", 1e6, (8,), [LevelCost(L, G)])
    assert "in_switch" in times("all_reduce", 1e6, (8,), [LevelCost(L, G, in_switch_reduction=True)])


def test_table_lists_servers_and_ratio_to_the_bound() -> None:
    rows = table("all_reduce", 100e6, (64,), [LevelCost(L, G)])
    by_name = {row.algorithm: row for row in rows}
    assert [row.time for row in rows] == sorted(row.time for row in rows)
    assert not by_name["parameter_server"].automatic
    ring = by_name["ring"]
    assert ring.algorithm_bandwidth == pytest.approx(100e6 / ring.time)
    assert ring.bus_bandwidth == pytest.approx(100e6 / ring.time * 2 * 63 / 64)
    assert all(row.times_lower_bound >= 1 for row in rows)


def test_bus_factor_of_one_rank_is_zero() -> None:
    assert bus_factor("all_reduce", 1) == 0.0
    assert bus_factor("all_to_all", np.array([2, 4])).tolist() == [0.5, 0.75]


class _Link:
    def __init__(self, bandwidth: float, fraction: float | None, latency: float | None) -> None:
        self.bandwidth, self.achieved_fraction, self.latency = bandwidth, fraction, latency


class _Level:
    def __init__(self, link: _Link, ports: float, switch: bool) -> None:
        self.link, self.ports, self.in_switch_reduction = link, ports, switch


class _Span:
    def __init__(self, level: _Level, fan_out: int, groups_sharing: float) -> None:
        self.level, self.fan_out, self.groups_sharing = level, fan_out, groups_sharing


def test_span_costs_share_the_ports_of_a_node() -> None:
    switch = _Level(_Link(300e9, 0.8, 2e-6), 1, True)
    fabric = _Level(_Link(25e9, None, None), 8, False)
    fan_outs, costs = span_costs([_Span(switch, 8, 1), _Span(fabric, 4, 8)])
    assert fan_outs == (8.0, 4.0)
    assert costs[0] == LevelCost(2e-6, 1 / (300e9 * 0.8), 0.0, True)
    assert costs[1].alpha == 0.0 and costs[1].beta == pytest.approx(1 / 25e9)
    assert span_costs([_Span(fabric, 2, 1)])[1][0].beta == pytest.approx(1 / 200e9)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: times("all_reduse", 1.0, (2,), [LevelCost(0, 1)]), "all_reduce"),
        (lambda: times("all_reduce", 1.0, (2,), [LevelCost(0, 1)], ["rings"]), "'ring'"),
        (lambda: ALGORITHMS["rign"], "'ring'"),
        (lambda: ALGORITHMS["ring"].traffic("send_recv", 1.0, (2,)), "no 'send_recv'"),
        (lambda: ALGORITHMS["ring"].traffic("all_reduce", -1.0, (2,)), "zero or more"),
        (lambda: ALGORITHMS["ring"].traffic("all_reduce", np.nan, (2,)), "finite"),
        (lambda: ALGORITHMS["ring"].traffic("all_reduce", 1.0, (0,)), "whole numbers"),
        (lambda: ALGORITHMS["ring"].traffic("all_reduce", 1.0, (2.5,)), "whole numbers"),
        (lambda: ALGORITHMS["ring"].traffic("all_reduce", 1.0, ()), "at least one level"),
        (lambda: times("all_reduce", 1.0, (2, 2), [LevelCost(0, 1)]), "2 levels"),
    ],
)
def test_bad_input_is_refused_with_the_cure(call: object, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        call()  # type: ignore[operator]
