"""Schemas of devices and links (hardware datasheets) in SI units, with sources.

Bandwidth is per direction and peaks are dense. A memory that is sold as "80 GB" has 80 GiB of HBM or GDDR, as
``nvidia-smi`` shows it (H100 80GB: 81559 MiB; H200 141GB: 143771 MiB), so the catalog writes GiB. Memory that the
driver and ECC keep is not subtracted from the capacity. Cache sizes are binary too. Measured values are in
calibrations, except the ``achieved_fraction`` of a link, which is in the link's file beside its source.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from paleo.errors import SpecError, suggest_names
from paleo.specs.catalog import is_path, load_entry, read_entry, resolve_device_name
from paleo.specs.loading import (
    UNKNOWN_SOURCE,
    NonEmptyText,
    PositiveCount,
    Spec,
    Year,
    cache_by_files,
    validate_mapping,
)
from paleo.units import Bytes, BytesPerSecond, FlopsPerSecond, Hertz, PricePerSecond, Seconds, Watts, format_gibibytes

Fraction = Annotated[float, Field(strict=True, gt=0, le=1)]
LinkKind = Literal[
    "pcie", "nvlink", "nvswitch", "infinity_fabric", "ici", "qpi", "ethernet", "infiniband", "efa", "slingshot", "other"
]


class Link(Spec):
    """One link: bandwidth per direction [byte/s] and one-way latency of a small message [s].

    ``scope`` says what counts as one link (a port, all NVLinks of one GPU, …). ``achieved_fraction`` is the fraction of
    the bandwidth that large messages reach. ``in_switch_bandwidth`` is the published bus bandwidth [byte/s] of large
    all-reduces that switches reduce in the network; it bounds groups of any size. ``stated_latency`` is the latency at
    the time of calibration, taken from the base entry of a chain of ``extend:``; no file has this key.
    """

    name: NonEmptyText
    kind: LinkKind
    scope: NonEmptyText
    bandwidth: BytesPerSecond
    achieved_fraction: Fraction | None = None
    achieved_source: NonEmptyText | None = None
    in_switch_bandwidth: BytesPerSecond | None = None
    latency: Seconds | None = None
    latency_source: NonEmptyText | None = None
    stated_latency: Annotated[Seconds | None, Field(exclude=True)] = None
    notes: NonEmptyText | None = None
    source: NonEmptyText = UNKNOWN_SOURCE


@cache_by_files
def load_link(name_or_path: str | Path) -> Link:
    """Load a link by catalog name or path.

    Parameters
    ----------
    name_or_path : str | Path
        Entry of the catalog, or a YAML file.

    Returns
    -------
    Link
        Link with bandwidth and latency in SI units.

    Raises
    ------
    SpecError
        If there is no such entry or the file is not valid.
    """
    return load_entry(Link, "links", name_or_path)


Dtype = Literal["fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8"]
ArithmeticUnit = Literal["tensor", "vector"]


class Price(Spec):
    """Rent of one device or node per second (``rate`` [USD/s]), with source and date."""

    rate: PricePerSecond
    date: NonEmptyText
    source: NonEmptyText


class Memory(Spec):
    """Device memory: capacity [byte] and peak bandwidth [byte/s].

    ``reported`` is the number of bytes that the driver offers to programs, if known. Firmware keeps some memory, and
    inline error correction takes a sixteenth of graphics memory, so this is less than the capacity.
    """

    capacity: Bytes
    bandwidth: BytesPerSecond
    kind: NonEmptyText
    reported: Bytes | None = None

    @property
    def usable_bytes(self) -> float:
        """Memory that a run may use [byte]: the bytes that the driver reports, else the capacity."""
        return self.capacity if self.reported is None else self.reported

    def with_capacity(self, capacity: float) -> Memory:
        """Return this memory with another capacity; the usable fraction stays the same.

        Parameters
        ----------
        capacity : float
            New capacity [byte].

        Returns
        -------
        Memory
            Memory whose ``reported`` bytes are the same fraction of the capacity, as firmware and inline error
            correction take a fraction of any capacity.

        >>> memory = load_device("l40").memory
        >>> doubled = memory.with_capacity(2.0 * memory.capacity)
        >>> doubled.usable_bytes / doubled.capacity
        0.9375
        """
        share = self.usable_bytes / self.capacity
        reported = None if self.reported is None else share * capacity
        return self.model_copy(update={"capacity": capacity, "reported": reported})

    @model_validator(mode="after")
    def _within_capacity(self) -> Memory:
        if self.usable_bytes > self.capacity:
            raise ValueError(f"reported: must not exceed the capacity of {format_gibibytes(self.capacity)}")
        return self


class Multiprocessor(Spec):
    """Sizes of one streaming multiprocessor, compute unit or core: registers and shared memory [byte]."""

    compute_capability: NonEmptyText | None = None
    registers: Bytes | None = None
    shared_memory: Bytes | None = None
    source: NonEmptyText = UNKNOWN_SOURCE


class Pcie(Spec):
    """PCI Express slot or socket that connects the device to its host."""

    generation: PositiveCount
    lanes: PositiveCount


class HostLink(Spec):
    """Link between device and host if it is not PCIe: catalog name, and number of devices that share one link."""

    link: NonEmptyText
    devices: PositiveCount = 1


class MatrixUnit(Spec):
    """Systolic array of a TPU-like device, with ``width`` rows and columns of multipliers."""

    width: PositiveCount
    source: NonEmptyText = UNKNOWN_SOURCE


class Interconnect(Spec):
    """Links of the device to other devices (NVLink, ICI, …).

    ``bandwidth`` is the sum over all links per direction [byte/s].
    """

    kind: Literal["nvlink", "infinity_fabric", "ici", "roce"]
    generation: PositiveCount | None = None
    bandwidth: BytesPerSecond


class Device(Spec):
    """One accelerator as its datasheet describes it: a device that a deep-learning framework sees.

    ``peak`` is the fastest dense rate of each dtype, on tensor cores (with fp32 accumulation) where these support the
    dtype. ``vector_peak`` is the rate of the ordinary cores at ``boost_clock``.
    """

    name: NonEmptyText
    full_name: NonEmptyText
    vendor: NonEmptyText
    architecture: NonEmptyText
    kind: Literal["gpu", "tpu", "accelerator", "cpu"] = "gpu"
    year: Year | None = None
    multiprocessors: PositiveCount
    boost_clock: Hertz | None = None
    tensor_clock: Hertz | None = None
    peak: dict[Dtype, FlopsPerSecond]
    vector_peak: dict[Dtype, FlopsPerSecond] = Field(default_factory=dict)
    memory: Memory
    l2: Bytes | None = None
    multiprocessor: Multiprocessor | None = None
    matrix_unit: MatrixUnit | None = None
    tdp: Watts | None = None
    form_factor: NonEmptyText
    pcie: Pcie | None = None
    host_link: HostLink | None = None
    interconnect: Interconnect | None = None
    price: Price | None = None
    aliases: tuple[NonEmptyText, ...] = ()
    notes: NonEmptyText | None = None
    source: NonEmptyText = UNKNOWN_SOURCE

    @model_validator(mode="after")
    def _has_a_peak(self) -> Device:
        if not self.peak:
            raise SpecError("peak: is empty; write at least one, like {fp32: 19.5 TFLOP/s}")
        slow = [dtype for dtype, rate in self.vector_peak.items() if rate > self.peak.get(dtype, 0.0)]
        if slow:
            raise SpecError(f"peak.{slow[0]}: is missing or below vector_peak.{slow[0]}; peak is the fastest rate")
        return self

    def host_copy_bandwidth(self, achieved: float | None = None) -> float:
        """Return the bandwidth of copies between host and device, in each direction [byte/s].

        Parameters
        ----------
        achieved : float, optional
            Fraction of the link's bandwidth that copies reach; by default the ``achieved_fraction`` of the link's file.

        Returns
        -------
        float
            Rate in byte/s over the device's part of its ``host_link``, else over its PCIe lanes.

        Raises
        ------
        SpecError
            If the device file has neither ``host_link`` nor ``pcie``.

        Examples
        --------
        >>> from paleo.units import GIGA
        >>> names = ("h100-sxm5-80gb", "gh200-96gb", "gb200")
        >>> [round(load_device(name).host_copy_bandwidth(1.0) / GIGA, 1) for name in names]
        [63.0, 450.0, 225.0]
        """
        if self.host_link is not None:
            link, part = load_link(self.host_link.link), 1.0 / self.host_link.devices
        elif self.pcie is not None:
            link, part = load_link(f"pcie{self.pcie.generation}-x16"), self.pcie.lanes / 16
        else:
            raise SpecError(f"device {self.name}: its file has no pcie, so the time of copies to the host is not known")
        return link.bandwidth * (achieved or link.achieved_fraction or 1.0) * part

    @property
    def tensor_dtypes(self) -> tuple[Dtype, ...]:
        """Number formats for which tensor (matrix) cores are faster than ordinary cores."""
        return tuple(dtype for dtype in self.peak if self.peak[dtype] > self.vector_peak.get(dtype, 0.0))

    @property
    def training_dtype(self) -> Dtype:
        """Number format in which people usually train on this device: bf16, else fp16 on tensor cores, else fp32."""
        tensor = self.tensor_dtypes
        return "bf16" if "bf16" in tensor else "fp16" if "fp16" in tensor else "fp32"

    @property
    def has_tensor_cores(self) -> bool:
        """True if the device has tensor cores for 16-bit matrix products."""
        return any(dtype in ("fp16", "bf16") for dtype in self.tensor_dtypes)

    def arithmetic_dtype(self, dtype: str) -> str:
        """Return the dtype in which libraries compute with numbers of a given dtype on this device.

        Libraries use fp32 where ordinary cores multiply it faster than 16-bit numbers: a GeForce of the Pascal
        architecture has 1/64 of the fp32 rate in fp16. cuBLAS and cuDNN do so when fp32 accumulation is requested. Both
        also use fp32 where ordinary cores can only convert fp16 (NVIDIA's before Pascal; cuDNN's PSEUDO_HALF_CONFIG).

        Parameters
        ----------
        dtype : str
            Number format in which the operands are stored.

        Returns
        -------
        str
            ``fp32`` or the dtype itself.

        Examples
        --------
        >>> names = ("gtx-1080-ti", "p100-pcie-16gb", "titan-x-maxwell")
        >>> [load_device(name).arithmetic_dtype("fp16") for name in names]
        ['fp32', 'fp16', 'fp32']
        >>> load_device("titan-x-maxwell").arithmetic_dtype("bf16")
        'bf16'
        """
        native, wide = self.peak.get(dtype), self.vector_peak.get("fp32")  # type: ignore[call-overload]
        if native is None:
            converted = dtype == "fp16" and self.vendor == "NVIDIA" and wide is not None
        else:
            converted = dtype in ("fp16", "bf16") and wide is not None and native < wide
        return "fp32" if converted else dtype

    def peak_flops_per_s(self, dtype: str, unit: ArithmeticUnit | None = None) -> float:
        """Return the dense peak rate of a dtype.

        Parameters
        ----------
        dtype : str
            Operand format. If the device cannot compute in it, the rate is that of `arithmetic_dtype`.
        unit : ArithmeticUnit, optional
            ``tensor`` or ``vector``; by default the faster one.

        Returns
        -------
        float
            Rate in FLOP/s.

        Raises
        ------
        SpecError
            If the unit has no peak for the dtype.

        Examples
        --------
        >>> load_device("a100-sxm4-80gb").peak_flops_per_s("fp16", "vector")
        78000000000000.0
        """
        rates: Mapping[Dtype, float] = self.vector_peak if unit == "vector" else self.peak
        known = self.tensor_dtypes if unit == "tensor" else tuple(rates)
        operand_dtype = dtype if dtype in known else self.arithmetic_dtype(dtype)
        for name in known:
            if name == operand_dtype:
                return rates[name]
        where = f"{unit} peak" if unit else "peak"
        raise SpecError(f"device {self.name} has no {where} for dtype {dtype!r}; {suggest_names(dtype, known)}")


@cache_by_files
def load_device(name_or_path: str | Path) -> Device:
    """Load a device by catalog name or path.

    Parameters
    ----------
    name_or_path : str | Path
        Entry of the catalog, or a YAML file.

    Returns
    -------
    Device
        Device with datasheet values in SI units.

    Raises
    ------
    SpecError
        If there is no such entry or the file is not valid.
    """
    path, data = read_entry("devices", name_or_path)
    return validate_mapping(Device, add_default_names(data, path.stem), path)


def find_device(text: str) -> Device:
    """Load a device by its catalog name, path, full name or alias, whatever the case.

    Parameters
    ----------
    text : str
        Name or path, for example the name that CUDA reports.

    Returns
    -------
    Device
        Device with datasheet values in SI units.

    Raises
    ------
    SpecError
        If no device has that name.

    Examples
    --------
    >>> find_device("NVIDIA H100 80GB HBM3").name
    'h100-sxm5-80gb'
    """
    try:
        name = resolve_device_name(text)
    except SpecError:
        if not is_path(text):
            raise
        name = text
    return load_device(name)


def add_default_names(data: Mapping[str, Any], stem: str) -> dict[str, Any]:
    """Add ``name`` (the file's stem) and ``full_name`` to the mapping of a device or system file.

    Parameters
    ----------
    data : dict of str to Any
        Mapping of the file.
    stem : str
        File name without suffix.

    Returns
    -------
    dict of str to Any
        Copy of the mapping with both keys.
    """
    return {"name": stem, "full_name": data.get("name", stem), **data}
