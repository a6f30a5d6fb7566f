"""Exchange of tokens between experts: ranks that a token visits, what bounds it, rows, and its place in a step."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from paleo.pricing.moe_token_exchange import (
    TokenExchangeParameters,
    intra_node_token_exchange_time,
    mean_visited_groups,
    moe_token_exchange_time,
    token_exchange_links,
)
from paleo.specs.system import load_system
from paleo.tables.kernels import KERNEL_TABLES

H100 = load_system("dgx-h100")
LINKS = token_exchange_links(H100)


def priced(parameters: TokenExchangeParameters, **changed: float) -> float:
    sizes = {
        "inside": 0.0,
        "linked": 0.0,
        "across": 0.0,
        "visits": 0.0,
        "nodes": 1.0,
        "multiprocessors": 20.0,
    } | changed
    arrays = {name: np.array(value) for name, value in (sizes | changed).items()}
    return float(moe_token_exchange_time(**arrays, links=LINKS, parameters=parameters))


def test_a_token_visits_all_groups_only_if_it_has_many_experts() -> None:
    """Two of four experts in two groups of two: both groups but where both are of one, 1 of 3."""
    assert float(mean_visited_groups(2, 4, 2)) == pytest.approx(2 * 2 / 3 + 1 / 3)
    assert float(mean_visited_groups(8, 256, 8)) == pytest.approx(5.3, abs=0.1)


def test_links_nics_and_copies_bound_an_exchange() -> None:
    plain = TokenExchangeParameters(
        launch_time=0.0, link_share=1.0, nic_share=1.0, copy_rate=10.0, time_per_node_doubling=0.0
    )
    assert priced(plain, linked=450e6) == pytest.approx(1e-3)
    assert priced(plain, inside=200e6) == pytest.approx(1e-3)
    assert priced(plain, across=50e6, nodes=2.0) == pytest.approx(2.0**plain.nic_share_exponent * 1e-3)


def test_rows_send_each_expert_a_copy_in_low_latency_mode_alone() -> None:
    row = {
        "device": "h100-sxm5-80gb", "step": "combine", "num_tokens": 128, "hidden_size": 7168, "topk": 8,
        "num_experts": 256, "nodes": 2,
    }  # fmt: skip
    kind = KERNEL_TABLES["expert_exchange"]
    modes = ("deepep-low-latency", "deepep-normal")
    low, normal = (kind.flops_and_bytes(pd.DataFrame([row | {"mode": mode}]))[1][0] for mode in modes)
    assert low == pytest.approx(128 * 7168 * 2 * 8)
    assert normal == pytest.approx(128 * 7168 * 2 * (float(mean_visited_groups(16, 256, 8)) + 1.0), rel=0.01)


def test_a_step_prices_the_exchange_of_architectures_that_were_measured() -> None:
    payload = np.array([1e6, 1e8])
    times = intra_node_token_exchange_time(payload, 8, H100, "deepep-normal.dispatch")
    assert times is not None and (times > payload * 7 / 8 / LINKS.link_bandwidth).all()
    assert intra_node_token_exchange_time(payload, 8, load_system("dgx-a100-80gb"), "unknown") is None
