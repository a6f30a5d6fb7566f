"""Which protocol a ring of NCCL runs in: the rule of its tuner.

NCCL has three protocols: LL (flags in the data, lowest latency, about a quarter of the link), LL128 (flags per 128
bytes) and Simple (fences, most of the link, slow to start). Which one runs is not the fastest but the one that NCCL's
tuner expects to be fastest, from constants published in its source; `protocol` follows that rule, so that the jumps of
measured curves stand where they are, and the calibrated parameters give the price of what was chosen.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paleo.collectives.traffic import Numeric
from paleo.pricing.links.group import GroupLinks
from paleo.units import MICROSECOND

LL, LL128, SIMPLE = 0, 1, 2
#: Base latency, and latency per ring step over NVLink and over PCIe, that NCCL's tuner expects of LL, LL128 and Simple.
_TUNER_BASE = (6.6 * MICROSECOND, 14.0 * MICROSECOND, 8.4 * MICROSECOND)
_TUNER_NVLINK_STEP = (0.6 * MICROSECOND, 1.9 * MICROSECOND, 3.4 * MICROSECOND)
_TUNER_PCIE_STEP = (1.0 * MICROSECOND, 2.5 * MICROSECOND, 5.7 * MICROSECOND)
#: Share of the NVLink bandwidth at which the tuner caps LL: 39, 87.7, 141 and 282 GB/s by generation.
_TUNER_LL = {"Volta": 0.26, "Ampere": 0.2923, "Hopper": 0.3133, "Blackwell": 0.3133}
#: The tuner's bus bandwidth over the datasheet's (20 of 25 GB/s a link), and what LL128 leaves of it.
_TUNER_BUS, _TUNER_LL128 = 0.8, 0.92


def protocol(*, steps: Numeric, wire_time: Numeric, links: GroupLinks) -> npt.NDArray[np.intp]:
    """The protocol of a ring (0 LL, 1 LL128, 2 Simple) that NCCL's tuner takes for the fastest.

    ``wire_time`` is the time on the wire at the datasheet's bandwidth [s]. LL128 needs NVLink.

    Source: NVIDIA/nccl src/graph/tuning.cc (baseLat, hwLat, llMaxBws), NCCL 2.8 to 2.29.

    >>> switch = GroupLinks(fan_outs=(2.0,), bandwidths=(300e9,), ports=(1.0,))
    >>> protocol(steps=1, wire_time=np.array([1e4, 1e6]) / 300e9, links=switch).tolist()
    [0, 2]
    """
    nvlink = np.asarray(links.nvlink)
    shares: tuple[Numeric, ...] = (
        np.where(nvlink, _TUNER_LL.get(links.generation, 0.3), 0.5 * _TUNER_BUS),
        _TUNER_LL128 * _TUNER_BUS,
        _TUNER_BUS,
    )
    expected = [
        base + np.where(nvlink, over_nvlink, over_pcie) * np.asarray(steps) + wire_time / share
        for base, over_nvlink, over_pcie, share in zip(
            _TUNER_BASE, _TUNER_NVLINK_STEP, _TUNER_PCIE_STEP, shares, strict=True
        )
    ]
    expected[LL128] = np.where(nvlink, expected[LL128], np.inf)
    return np.asarray(np.argmin(np.stack(np.broadcast_arrays(*expected)), axis=0))
