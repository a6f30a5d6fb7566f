"""Time of one convolution kernel call: the fastest algorithm that the library has and the workspace admits.

What each algorithm costs is in `paleo.pricing.convolution_algorithms`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paleo.pricing.convolution_algorithms import (
    Cost,
    Machine,
    direct_cost,
    explicit_cost,
    fft_cost,
    implicit_cost,
    nonfused_cost,
    winograd_cost,
)

if TYPE_CHECKING:
    from paleo.pricing.convolution_algorithms import (
        ConvolutionParameters,
    )
    from paleo.pricing.convolution_shape import ConvolutionShape
    from paleo.pricing.kernels import DeviceFigures

Array = npt.NDArray[np.float64]
Number = float | Array

#: Algorithms that run on vector units only: with tensor cores the reduced products do not pay for their transforms.
VECTOR_ONLY = frozenset({"explicit", "winograd", "nonfused", "fft"})
#: Algorithms that trade products for transforms.
REDUCED = frozenset({"winograd", "nonfused", "fft"})
#: Version of cuDNN that a present program has, and what stands for kernels of one's own: every algorithm that is named.
PRESENT, OWN_KERNELS = 9.0, np.inf
#: Library version (cuDNN) from which an algorithm is chosen, in each direction (forward, data, filter); inf = never.
#: Versions 5.1 and 6 have the unfused Winograd kernels, but measured rows say that their heuristics do not take them
#: forward or for the data gradient; so 7.0 is an observation of what is chosen, not a release note: see SEARCHED_FROM.
AVAILABLE_FROM: Mapping[str, tuple[float, float, float]] = {
    "implicit": (1.0, 1.0, 1.0),
    "explicit": (2.0, 2.0, np.inf),
    "winograd": (5.0, 5.0, np.inf),
    "nonfused": (7.0, 7.0, 5.1),
    "fft": (3.0, 3.0, 3.0),
    "direct": (1.0, 1.0, 1.0),
}
#: The same where a framework times all that the library has and keeps the fastest: by the release notes.
SEARCHED_FROM: Mapping[str, tuple[float, float, float]] = {**AVAILABLE_FROM, "nonfused": (5.1, 5.1, 5.1)}
#: Time of the implicit products of cuDNN before release 3, which brought kernels for Maxwell, over later ones:
#: geometric mean over the five layers of convnet-benchmarks on a Titan X (Maxwell), which lie within 12 % of it.
#: Earlier kernels were written for Kepler, where they are taken to be as good.
EARLY_RELEASE, EARLY_SLOWDOWN, EARLY_ARCHITECTURE = 3.0, 1.28, "Kepler"

ALGORITHMS: Mapping[str, Callable[[ConvolutionShape, Machine], Cost]] = {
    "implicit": implicit_cost,
    "explicit": explicit_cost,
    "winograd": winograd_cost,
    "nonfused": nonfused_cost,
    "fft": fft_cost,
    "direct": direct_cost,
}


def algorithm_costs(
    shape: ConvolutionShape,
    *,
    device: DeviceFigures,
    parameters: ConvolutionParameters,
    element_bytes: Number = 4.0,
    library: Number = PRESENT,
    channels_last: bool = False,
    algorithms: Collection[str] = tuple(AVAILABLE_FROM),
    available: Mapping[str, tuple[float, float, float]] = AVAILABLE_FROM,
) -> dict[str, Cost]:
    """Seconds (launch included) and workspace [bytes] of each algorithm; inf seconds where the library has it not.

    ``element_bytes`` of storage; ``library`` is the cuDNN version, e.g. 7.6; ``channels_last`` says that tensors are
    laid out so on tensor cores; ``available``: the versions that have an algorithm, `AVAILABLE_FROM` or
    `SEARCHED_FROM`. Holds for 2-D convolutions of 1 to 10^5 positions and more; library heuristics that pick a slower
    kernel than they have (cuDNN 4 to 6 did) are modelled by ``available`` alone.
    """
    width, release = (np.asarray(number, dtype=np.float64) for number in (element_bytes, library))
    machine = Machine(device, parameters, width, release, channels_last)
    costs = {}
    for name in algorithms:
        cost = ALGORITHMS[name](shape, machine)
        since = np.asarray(available[name])[shape.direction]
        absent = (np.asarray(library) < since) | (device.tensor_cores and name in VECTOR_ONLY)
        early = name == "implicit" and device.architecture != EARLY_ARCHITECTURE
        slower = np.where(early & (np.asarray(library) < EARLY_RELEASE), EARLY_SLOWDOWN, 1.0)
        costs[name] = Cost(np.where(absent, np.inf, cost.seconds * slower + parameters.launch), cost.workspace)
    return costs


def fastest_time(costs: Mapping[str, Cost], workspace_limit: Number = np.inf) -> Array:
    """Seconds of the fastest algorithm whose workspace [bytes] stays within the limit; infinite where none does."""
    times = [np.where(cost.workspace <= workspace_limit, cost.seconds, np.inf) for cost in costs.values()]
    return np.asarray(np.min(np.broadcast_arrays(*times), axis=0), dtype=np.float64)
