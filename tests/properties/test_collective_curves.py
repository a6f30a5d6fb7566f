"""Curves of time over payload, of every system and collective: finite, within the links, without cliffs.

NCCL's tuner takes a protocol or an algorithm by what it expects, not by what is the fastest, so that measured curves
have steps as well: two A100 take 20 us for 512 KiB and 42 us for 1 MiB, eight H100 take as long at 4 MiB as they could
at 5. The bounds leave room for these and for no more.
"""

from __future__ import annotations

import numpy as np
import pytest

from paleo.collectives.base import COLLECTIVE_OPERATIONS
from paleo.pricing.calibration_lookup import constant_efficiencies
from paleo.pricing.communication import Fabric
from paleo.specs.catalog import entry_names
from paleo.specs.system import System, load_system

#: From 8 bytes to 16 GiB, each twice the one before.
SIZES = 2.0 ** np.arange(3, 35)
#: Most that twice the payload takes, over the time of once: two for bytes, the rest for another protocol or algorithm.
STEEPEST = 3.5
#: Least that twice the payload takes, where the tuner leaves a slow protocol late.
FALLS = 0.64
#: Of an exchange over Slingshot whose pieces get too long for the NIC's commands (measured: 483 to 126 us).
FALLS_OVER_SLINGSHOT = 0.33


def groups(system: System) -> list[tuple[int, int]]:
    """Strides and sizes: powers of two, odd numbers, whole nodes and racks, several of them, one rank of each node."""
    node, most = system.devices_per_node, system.max_devices or 2**20
    sizes = {2, 3, 5, 7, 8, node, node + 1, 2 * node, 3 * node, 9 * node, 128 * node, 1440} - {1}
    pairs = [*((1, size) for size in sorted(sizes)), *((node, size) for size in (2, 3, 9, 64)), (2, 4), (3, 5)]
    return [(stride, size) for stride, size in pairs if (size - 1) * stride < most]


@pytest.mark.parametrize("name", [name for name in entry_names("systems") if load_system(name).levels])
def test_times_over_payloads_have_no_cliffs_and_keep_to_the_links(name: str) -> None:
    system = load_system(name)
    fabric = Fabric(system, constant_efficiencies=constant_efficiencies(system.device.kind, "auto"))
    strides, sizes = (np.repeat(column, len(SIZES)) for column in np.array(groups(system)).T)
    slingshot = any(level.link.kind == "slingshot" for level in system.levels)
    for operation in COLLECTIVE_OPERATIONS:
        times = fabric.collective_times(operation, strides, sizes, np.tile(SIZES, len(groups(system)))).reshape(
            -1, len(SIZES)
        )
        assert np.all(np.isfinite(times)) and np.all(times > 0), operation
        growth = times[:, 1:] / times[:, :-1]
        assert growth.max() <= STEEPEST, operation
        exchange = operation == "all_to_all" and slingshot
        assert growth.min() >= (FALLS_OVER_SLINGSHOT if exchange else FALLS), operation
        for group, row in zip(groups(system), times, strict=True):
            links = fabric.links(*group)
            least = fabric.collective_model.time_lower_bound(operation, SIZES, links, in_network=links.switch_reduces)
            assert np.all(row >= least * (1 - 1e-9)), (operation, group)


@pytest.mark.parametrize(("name", "measured"), [("dgx-a100-40gb", 1.03), ("polaris", 0.43)])
def test_small_pieces_of_an_exchange_are_slow_over_slingshot_alone(name: str, measured: float) -> None:
    """2 KiB over 1 KiB of an all-to-all: over InfiniBand 16 ranks take as long (57 and 56 us), over Slingshot eight
    take less than half (83 and 36 us), as pieces of 128 bytes go another way than those of 256 (ALCF, nccl-tests)."""
    ranks = {"dgx-a100-40gb": 16, "polaris": 8}[name]
    once, twice = Fabric(load_system(name)).collective_times(
        "all_to_all", np.array([1, 1]), np.array([ranks, ranks]), np.array([2.0**10, 2.0**11])
    )
    assert twice / once == pytest.approx(measured, rel=0.3)
