"""Textbook formulas come out exactly in a flat network; bad input is refused; hand-worked groups."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from paleo.collectives.base import ALGORITHMS
from paleo.collectives.parameter_server import parameter_server_all_reduce
from paleo.collectives.traffic import LevelTraffic, Traffic
from paleo.errors import PlanError, SpecError
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
from paleo.pricing.collective import (
    LL,
    LL128,
    SIMPLE,
    CustomParameters,
    ExchangeParameters,
    FabricParameters,
    NcclParameters,
    Network,
    collective_time,
    custom_time,
    fabric_defaults,
    fabric_time,
    link_kind,
    nccl_time,
    network,
    network_across,
    protocol,
    stack_networks,
)
from paleo.specs.hardware import System, load_system
from paleo.validate.kinds.base import KINDS, kind_of

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


# --- NCCL on a real network ------------------------------------------------------------------------------------------

A100 = load_system("dgx-a100-80gb")
H100 = load_system("dgx-h100")
SIZES = np.geomspace(512.0, 2.0**34, 60)


def inside(system: System, ranks: int, operation: str, payload: object, **options: object) -> np.ndarray:
    return collective_time(
        operation=operation,
        payload_bytes=payload,  # type: ignore[arg-type]
        network=network_across(system, ranks=ranks, ranks_per_node=ranks),
        inside=NcclParameters(),
        exchange=ExchangeParameters(),
        between=FabricParameters(),
        **options,  # type: ignore[arg-type]
    )


def test_a_group_knows_its_levels_and_the_nics_it_reaches() -> None:
    alone = network_across(A100, ranks=2, ranks_per_node=1)
    assert (alone.fan_outs, alone.ports) == ((1.0, 2.0), (1.0, 1.0))
    together = network(A100, stride=8, size=2)
    assert together.ports[-1] == 1.0
    assert network(A100, stride=1, size=16).ports[-1] == 8.0
    assert network_across(A100, ranks=4, ranks_per_node=2).ports[-1] == 2.0
    assert float(network_across(A100, ranks=24, ranks_per_node=8).nodes) == 3.0


def test_a_pcie_tree_is_no_nvlink_and_a_system_without_fabric_stays_in_its_node() -> None:
    tree = load_system("deepbench-8gpu-dual-root")
    assert link_kind(tree) == "pcie" and link_kind(A100) == "nvlink"
    assert not network_across(tree, ranks=8, ranks_per_node=8).nvlink
    with pytest.raises(PlanError, match="nodes"):
        network_across(load_system("l40s-pcie-8gpu"), ranks=16, ranks_per_node=8)


def test_protocol_follows_the_tuner() -> None:
    def chosen(ranks: int, payload: float) -> int:
        net = network_across(A100, ranks=ranks, ranks_per_node=ranks)
        wire = float(bus_factor("all_gather", ranks)) * payload / 300e9
        return int(protocol(steps=ranks - 1, wire_time=wire, network=net))

    assert [chosen(2, 2.0**k) for k in (10, 20, 21, 29)] == [LL, LL, SIMPLE, SIMPLE]
    assert [chosen(8, 2.0**k) for k in (10, 20, 22, 29)] == [LL, LL, LL128, SIMPLE]


@pytest.mark.parametrize(
    "operation", ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send_recv"]
)
def test_nccl_is_free_alone_rises_with_payload_and_takes_arrays(operation: str) -> None:
    assert np.all(inside(H100, 1, operation, SIZES) == 0.0)
    times = inside(H100, 8, operation, SIZES)
    assert np.all(times[1:] > times[:-1] * 0.85)  # a change of protocol may be a small step down
    assert [float(inside(H100, 8, operation, float(size))) for size in SIZES[::20]] == pytest.approx(list(times[::20]))


def test_nccl_never_beats_the_link() -> None:
    for operation in ("all_reduce", "all_gather", "all_to_all"):
        bound = bus_factor(operation, 8) * SIZES / 300e9
        assert np.all(inside(A100, 8, operation, SIZES) > bound)


def test_bus_bandwidth_of_large_messages_is_the_share_of_the_link() -> None:
    payload = 2.0**36
    bus = float(bus_factor("all_reduce", 4)) * payload / float(inside(A100, 4, "all_reduce", payload))
    assert 0.9 * 0.78 < bus / 300e9 < 0.78


def test_the_switch_adds_floats_of_five_ranks_and_more() -> None:
    payload = 2.0**29
    floats, integers = (float(inside(H100, 8, "all_reduce", payload, switch_can_add=one)) for one in (True, False))
    assert floats < 0.9 * integers
    same = [float(inside(H100, 4, "all_reduce", payload, switch_can_add=one)) for one in (True, False)]
    assert same[0] == same[1]


@pytest.mark.parametrize(
    ("operation", "ranks", "payload", "measured_us"),
    [
        ("all_reduce", 8, 2**29, 4225.9),
        ("all_reduce", 2, 2**26, 391.5),
        ("all_gather", 4, 2**29, 2102.0),
        ("reduce_scatter", 8, 2**27, 624.0),
        ("all_to_all", 8, 2**28, 1197.9),
        ("all_reduce", 8, 2**12, 21.4),
        ("all_gather", 2, 2**17, 12.4),
    ],
)
def test_defaults_are_near_nccl_tests_on_a_dgx_a100(
    operation: str, ranks: int, payload: int, measured_us: float
) -> None:
    """nccl-tests of NCCL 2.27.3 on a DGX A100, from the tables of ai-dynamo/aiconfigurator (Apache-2.0)."""
    assert float(inside(A100, ranks, operation, float(payload))) == pytest.approx(measured_us * 1e-6, rel=0.25)


def test_ranks_that_go_through_host_memory_share_it() -> None:
    slow, parameters = load_system("l40s-pcie-8gpu"), replace(NcclParameters(), copy=0.02, staging_power=1.92)
    nets = [network_across(slow, ranks=ranks, ranks_per_node=ranks) for ranks in (2, 8)]
    two, eight = (
        float(nccl_time(operation="all_gather", payload_bytes=2.0**34, network=net, parameters=parameters))
        for net in nets
    )
    assert eight / two == pytest.approx((7 / 8) / (1 / 2) * (8 / 2) ** 1.92, rel=0.05)


def test_skew_holds_up_small_collectives_only() -> None:
    net = network_across(A100, ranks=2, ranks_per_node=2)
    late = replace(NcclParameters(), skew=60e-6)
    small, large, punctual = (
        float(nccl_time(operation="all_reduce", payload_bytes=size, network=net, parameters=parameters))
        for size, parameters in ((1024.0, late), (2.0**28, late), (2.0**28, NcclParameters()))
    )
    assert small == pytest.approx(60e-6, rel=1e-3) and large == pytest.approx(punctual, rel=1e-3)


def test_fabric_bandwidth_grows_with_the_nics_in_use() -> None:
    def bus(ranks: int, per_node: int) -> float:
        net = network_across(A100, ranks=ranks, ranks_per_node=per_node)
        payload = 2.0**36
        time = fabric_time(operation="all_reduce", payload_bytes=payload, network=net, parameters=FabricParameters())
        return float(bus_factor("all_reduce", ranks) * payload / time)

    assert bus(2, 1) == pytest.approx(0.9 * 25e9, rel=0.02)
    assert bus(4, 2) == pytest.approx(2 * bus(2, 1), rel=0.05)
    assert bus(16, 8) == pytest.approx(0.9 * 200e9, rel=0.05)


def test_rows_of_several_groups_are_priced_as_one_by_one() -> None:
    groups = [(2, 2), (8, 8), (16, 8), (2, 1)]
    networks = [network_across(A100, ranks=n, ranks_per_node=m) for n, m in groups]
    payload = np.array([1e4, 1e6, 1e8, 1e7])

    def priced(net: Network, size: object) -> np.ndarray:
        return collective_time(
            operation="all_reduce",
            payload_bytes=size,  # type: ignore[arg-type]
            network=net,
            inside=NcclParameters(),
            exchange=ExchangeParameters(),
            between=FabricParameters(),
        )

    together = priced(stack_networks(networks, np.arange(4)), payload)
    assert together == pytest.approx([float(priced(net, size)) for net, size in zip(networks, payload, strict=True)])


def test_sockets_are_slower_than_remote_memory_access() -> None:
    assert fabric_defaults(load_system("paleo-k40-10gbe")).fabric_fraction == 0.72
    assert fabric_defaults(A100) == FabricParameters()


def test_custom_kernels_turn_from_one_shot_to_two_shot_and_then_to_nccl() -> None:
    def seconds(ranks: int, payload: float, parameters: CustomParameters) -> float:
        net = network_across(A100, ranks=ranks, ranks_per_node=ranks)
        return float(custom_time(payload_bytes=payload, network=net, parameters=parameters))

    graph = CustomParameters()
    assert seconds(8, 2.0**17, graph) == pytest.approx(4e-6 + 0.8e-6 + 7 * 2.0**17 / (0.6 * 300e9), rel=1e-3)
    assert seconds(8, 2.0**20, graph) == pytest.approx(8.8e-6 + 1.75 * 2.0**20 / (0.6 * 300e9), rel=1e-3)
    assert seconds(8, 2.0**30, graph) > 1.75 * 2.0**30 / (0.77 * 300e9)
    assert seconds(2, 512.0, replace(graph, host=40e-6)) == pytest.approx(40e-6, rel=1e-3)


# --- the table of measured collectives -------------------------------------------------------------------------------


def measured_rows(**changes: object) -> pd.DataFrame:
    row = {
        "source": "vidur", "system": "dgx-h100", "device": "h100-sxm5-80gb", "library": "NCCL", "op": "all_reduce",
        "dtype": "fp16", "ranks": 8, "ranks_per_node": 8, "bytes": 1048576, "algo": "", "time_us": 40.0,
    }  # fmt: skip
    return pd.DataFrame([{**row, **changes}])


@pytest.mark.parametrize(
    ("changes", "family", "stack"),
    [
        ({}, "collective.nccl", "kernel"),
        ({"source": "aiconfigurator"}, "collective.nccl", "back-to-back"),
        ({"op": "send_recv", "ranks": 2, "ranks_per_node": 2}, "collective.exchange", "kernel"),
        ({"ranks": 16}, "collective.fabric", "kernel-unknown-fabric"),
        ({"library": "vLLM 0.14.0", "algo": "custom: vLLM_custom_eager"}, "collective.custom", "vllm-eager"),
        ({"library": "SGLang 0.5.14", "algo": "custom: x_graph"}, "collective.custom", "sglang-0.5.14-graph"),
        ({"library": "SGLang 0.5.9", "algo": "custom: x_graph"}, "collective.custom", "sglang-graph"),
        ({"library": "TRTLLM 1.0.0", "algo": "custom: TRTLLM"}, "collective.custom", "trtllm-graph"),
    ],
)
def test_rows_find_their_family_and_stack(changes: dict[str, object], family: str, stack: str) -> None:
    kind, frame = KINDS["collective"], measured_rows(**changes)
    assert kind_of(frame.columns) is kind
    assert kind.unsupported(frame).tolist() == [""]
    assert (kind.family(frame).item(), kind.stack(frame).item()) == (family, stack)
    start, fixed = kind.start(family, stack, H100)  # type: ignore[attr-defined]
    assert kind.time(frame, H100, start)[0] > 0 and all(hasattr(start, name) for name in fixed)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"op": "gather"}, "'all_gather'"),
        ({"system": "dgx-h1000"}, "dgx-h100"),
        ({"system": ""}, "system"),
        ({"ranks": 12}, "multiple"),
        ({"ranks": 1}, "two ranks"),
        ({"bytes": 0}, "bytes above zero"),
        ({"ranks": 16, "system": "l40s-pcie-8gpu"}, "no network between nodes"),
        ({"algo": "custom: x", "op": "all_gather"}, "custom kernels"),
    ],
)
def test_rows_that_cannot_be_priced_say_why(changes: dict[str, object], says: str) -> None:
    assert says in KINDS["collective"].unsupported(measured_rows(**changes)).item()


def test_work_of_a_row_is_what_a_rank_sends() -> None:
    kind, frame = KINDS["collective"], measured_rows()
    flops, sent = kind.work(frame)
    assert flops.tolist() == [0.0] and sent.tolist() == [1.75 * 1048576]
    assert kind.ideal_time(frame, H100).tolist() == pytest.approx([1.75 * 1048576 / 450e9])  # type: ignore[attr-defined]
