"""Where fits set out on silicon that rows do not tell apart: energies by process, the L2 by its build."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from paleo.pricing.parameters import DeviceFigures


class Energy(NamedTuple):
    """Energy at full clock [pJ/FLOP] of matrix units at two bytes and at one, and of ordinary cores in fp32.

    ``training`` and ``training_fp8`` are those of sustained training on matrix units.
    """

    tensor: float
    fp8: float
    vector: float
    training: float
    training_fp8: float


#: Products of eight-bit integers that an ordinary core adds up in the time of one in fp32 (dp4a).
INTEGER_LANES = 4.0
#: Energies by process, from the power limit over the rate that long products, and steps of training, sustain under it.
ENERGY: Mapping[str, Energy] = {
    "28 nm": Energy(9.0, 9.0, 30.0, 11.0, 11.0),
    "16 nm": Energy(4.0, 4.0, 20.0, 5.0, 5.0),
    "12 nm": Energy(2.3, 2.3, 16.0, 2.9, 2.9),
    "8 nm": Energy(1.5, 0.8, 11.0, 1.9, 1.0),
    "7 nm": Energy(0.8, 0.4, 11.0, 1.0, 0.5),
    "4 nm, consumer": Energy(1.35, 0.5, 7.3, 1.5, 0.75),
    "4 nm, Hopper": Energy(0.68, 0.31, 7.3, 0.86, 0.46),
    "4 nm": Energy(0.56, 0.11, 7.3, 0.70, 0.31),
}
#: Architecture -> process, of the parts with HBM and of those with graphics memory (NVIDIA's whitepapers).
PROCESS: Mapping[str, tuple[str, str]] = {
    "Kepler": ("28 nm", "28 nm"),
    "Maxwell": ("28 nm", "28 nm"),
    "Pascal": ("16 nm", "16 nm"),
    "Volta": ("12 nm", "12 nm"),
    "Turing": ("12 nm", "12 nm"),
    "Ampere": ("7 nm", "8 nm"),
    "Ada Lovelace": ("4 nm, consumer", "4 nm, consumer"),
    "Hopper": ("4 nm, Hopper", "4 nm, consumer"),
    "Blackwell": ("4 nm", "4 nm, consumer"),
    "Blackwell Ultra": ("4 nm", "4 nm, consumer"),
}
#: Architectures whose parts with HBM have an L2 of two partitions, each of which caches for its half of the device
#: (NVIDIA A100 whitepaper, 2020), and shares of the nominal size in which data then survive; others keep nearly all.
SPLIT_L2 = frozenset({"Ampere", "Hopper", "Blackwell", "Blackwell Ultra"})
SPLIT_SHARE, WHOLE_SHARE = 0.45, 0.9


def energy(figures: DeviceFigures) -> Energy:
    """Energies of a device by its process; those of 7 nm where the architecture is not known.

    >>> from paleo.pricing.roofline import figures
    >>> from paleo.specs.hardware import load_device
    >>> energy(figures(load_device("v100-sxm2-16gb"), "fp16")).tensor
    2.3
    """
    process = PROCESS.get(figures.architecture, PROCESS["Ampere"])
    return ENERGY[process[figures.memory_kind.startswith("GDDR")]]


def surviving_share(figures: DeviceFigures) -> float:
    """Share of the L2 in which data survive from launch to launch, by its build."""
    split = figures.architecture in SPLIT_L2 and figures.memory_kind.startswith("HBM")
    return SPLIT_SHARE if split else WHOLE_SHARE
