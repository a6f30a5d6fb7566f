"""Time of a matrix product C[m,n] = A[m,k] B[k,n], ``batch`` of them, on one device.

The model follows a tiled kernel. The output is cut into tiles, one per thread block, and the sum over k may be split so
that few tiles still fill the device. The library chooses a tile and a split that are the fastest, or nearly.

    time   = launch + fill + mean over (tile, split) of  spread + max4(compute + epilogue, L2, DRAM) + reduction
    mean   = weighted with the 16th power of the rate: a library's own estimate of a kernel scatters by about 1/16
    spread = until blocks run on all multiprocessors; fewer blocks take their share of it
    reduction = of a split: a second kernel or semaphores, and a step for each part
    fill   = latency of the first reads, as far as they come from DRAM
    max4   = (a⁴ + b⁴ + c⁴)^(1/4): the slowest resource, with some loss if two are nearly equal; a further term is the
             time that a single block waits for its reads, which libraries leave out of their estimates
    waves  = blocks / multiprocessors, rounded up as far as kernels are not persistent
    compute= waves · k · (tile FLOP per k) / (efficiency · peak FLOP per clock and multiprocessor)
    L2     = operands that all blocks read: blocks · k · (Tm + Tn) elements
    DRAM   = compulsory bytes that the L2 does not still hold
    clock  = lowered if power at full clock would exceed the board's limit (`paleo.pricing.power`)

Vector units read transposed operands one sector of each row at a time, which is slow on GDDR5
(`transposed_operand_read_time`).

Roofline and tiling: Williams, Waterman, Patterson, CACM 52(4), 2009; NVIDIA, "Matrix Multiplication Background User's
Guide" (tile and wave quantisation); split and stream-K: Osama et al., PPoPP 2023. Rates are per clock and per FLOP of
the unit as it is built, even if the maker limits its rate: the operand bandwidth of the full unit remains. So they
apply to other devices.

Valid for dense products, m, n, k, batch >= 1, in the formats that the device's unit supports; not for sparsity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paleo.pricing.engine_gemm import wave_count
from paleo.pricing.power import HALF_THROTTLE_TIME, power_slowdown, slowdown_share
from paleo.specs.calibration import parameter

if TYPE_CHECKING:
    from paleo.pricing.kernels import DeviceDatasheet

Array = npt.NDArray[np.float64]
ArrayLike = npt.ArrayLike
#: Output tiles of one thread block that CUTLASS and cuBLAS offer; columns are along the contiguous side of C. Kernels
#: for vector units exist in one orientation only (``sgemm_128x64`` has its 128 on the contiguous side).
_TENSOR_TILES = (
    (256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64), (128, 32), (32, 128), (64, 32), (32, 64),
)  # fmt: skip
_VECTOR_TILES = ((256, 128), (128, 256), (128, 128), (64, 128), (64, 64), (32, 128))
#: Least length of the sum per split, and the step in which a main loop of vector units runs through k.
_MIN_SPLIT_K_LENGTH, _VECTOR_K_STEP = 128.0, 8.0
#: Largest number of parts of a sum that are added in the shared memory of a cluster (NVIDIA, CUDA C++ Programming
#: Guide, "Thread Block Clusters": at most 16 blocks). From k = 4,096 to 65,536 a single tile on B200 takes 0.125 us
#: longer per 1,024, a tenth of what one block takes for them.
_MAX_CLUSTER_BLOCKS = 16.0
#: Step of a main loop of tensor cores [bytes of a row]: the widest row that the tensor memory accelerator swizzles.
#: Before it, cuBLAS has kernels with half of that for short sums (``ampere_bf16_s16816gemm_…_stages_32x5``).
_TENSOR_CORE_K_STEP_BYTES, _OLDER_K_STEP_BYTES = 128.0, 64.0
#: Architectures with tensor cores, but without that accelerator and without clusters.
_BEFORE_HOPPER = frozenset({"Volta", "Turing", "Ampere", "Ada Lovelace"})
#: Ratio of the smallest sgemm tile for single products to that for batched ones: libraries have narrower kernels for
#: single products.
_SINGLE_TILE = 0.25
#: Stride from which every row of an operand is on a separate page of the address-translation cache.
_PAGE_BYTES = 128 * 2.0**10
#: Tile of an sgemm kernel in the libraries for Maxwell and Pascal, and the number of its blocks on a multiprocessor.
_SGEMM_TILE_SIZE, _SGEMM_BLOCKS_PER_MULTIPROCESSOR = 128.0, 2.0
#: Ratio of footprint to capacity beyond which nothing survives in a cache; it avoids an overflow of high powers.
_BEYOND = 1e3
#: Length of the sum from which the main loop pays the full latency of DRAM.
_FILL_LENGTH = 256.0
#: Bytes of an operand's element for which ``latency`` is stated.
_REFERENCE_ELEMENT_BYTES = 2.0
#: Share of the cache for operands in which results survive from launch to launch: L40S repeatedly writes 56 MiB of them
#: at 1.5 TB/s, but from 72 MiB on at 0.7 TB/s, the rate of its memory, while weights of 96 MiB survive.
_RESULT_SHARE = 0.75
#: Rows priced at once, so that the working arrays fit into the cache.
_ROWS_AT_ONCE = 8192


@dataclass(frozen=True, slots=True)
class GemmParameters:
    """Calibrated GEMM parameters of one device, arithmetic unit (tensor, vector, fp8) and software stack.

    Notes
    -----
    ``cycles_per_summed_element`` is the wait of a single block for its reads. With a ``scattered_read_efficiency`` of 1
    scattered reads cost nothing extra. Below ``min_narrow_tile_rows`` single products take the time of 128 rows if both
    operands are contiguous along k, and of half as many if one is. ``half_throttle_time`` is the kernel time at which
    half of the power limit's slow-down applies in a short test run. ``training_energy_per_flop`` is that of sustained
    training, from the rates of measured steps: training data switch more bits than a calibration's, and it includes
    casts, transposes and scales of narrow formats.
    """

    launch_time: float = parameter("2.5 us", "0.5..150 us", "launch to first instruction, with the host's exposed part")
    efficiency: float = parameter("0.95", "0.5..1", "share of peak that the main loop of a full tile reaches")
    bandwidth_efficiency: float = parameter("0.82", "0.4..1", "share of the DRAM bandwidth that streaming reaches")
    split_time: float = parameter("2.5 us", "0.2..60 us", "latency of a split reduction: a second kernel, semaphores")
    l2_rate: float = parameter("0.006 element/FLOP", "0.001..0.2", "L2's operand elements per FLOP of the unit")
    l2_survival_share: float = parameter("0.5", "0.05..1.1", "share of L2 in which data survive from launch to launch")
    wave_quantisation: float = parameter("0.7", "0.02..1", "cost of a partial last wave: 1 a full one, 0 persistent")
    energy_per_flop: float = parameter("1.2 pJ/FLOP", "0.1..60", "dynamic energy per FLOP at full clock, with operands")
    epilogue_cycles: float = parameter("2000 cycle", "50..20000", "prologue and epilogue of a 128 x 128 tile")
    time_per_split: float = parameter("0.01 us", "1 ns..1 us", "time of each part of a split reduction, in sequence")
    dram_latency_cycles: float = parameter("800 cycle", "20..30000", "latency of DRAM before the first tile, if read")
    block_start_cycles: float = parameter("1000 cycle", "10..10000", "until thread blocks run on all multiprocessors")
    min_tile_area: float = parameter("5000 element", "500..20000", "area of the smallest tile of the library")
    page_stall_ratio: float = parameter("0.05", "0.01..5", "extra main-loop time where each row lies on its own page")
    cycles_per_summed_element: float = parameter("0.5 cycle", "0.2..50", "least cycles of a block per two summed bytes")
    scattered_read_efficiency: float = parameter("1", "0.02..1", "DRAM share of one-sector reads", fitted=False)
    min_narrow_tile_rows: float = parameter("1 row", "1..128", "rows from which there are narrow tiles", fitted=False)
    half_throttle_time: float = parameter(
        f"{HALF_THROTTLE_TIME} s", "0.01..30 ms", "kernel time that feels half the slow-down", fitted=False
    )
    training_energy_per_flop: float = parameter("1.5 pJ/FLOP", "0.1..90", "energy per FLOP in training", fitted=False)

    @property
    def training_energy_ratio(self) -> float:
        """Energy of a FLOP in training, relative to its energy in the calibrated benchmark; dimensionless."""
        return self.training_energy_per_flop / self.energy_per_flop


def _fourth_power(x: Array) -> Array:
    return np.asarray(np.square(np.square(x)))


def _fourth_root(x: Array) -> Array:
    return np.asarray(np.sqrt(np.sqrt(x)))


def cache_miss_rate(footprint: Array, capacity: float) -> Array:
    """Compute the cache miss rate (0 to 1) of a footprint that is read cyclically.

    The rate is a steep step, 1 - 1 / (1 + x¹⁶): LRU alone would give a sharp one at 1, hashed sets and other traffic
    smooth the step. L40S reads weights of 96 MiB in total at 2 to 3 times the rate of its memory, those of 105 MiB at
    that rate.

    Parameters
    ----------
    footprint : ndarray
        Bytes that are read cyclically.
    capacity : float
        Bytes of the cache.

    Returns
    -------
    ndarray
        Shares; the shape of `footprint`.

    Examples
    --------
    >>> cache_miss_rate(np.array([0.0, 0.9, 1.0, 1.1]), 1.0).round(2)
    array([0.  , 0.16, 0.5 , 0.82])
    """
    return np.asarray(1.0 - 1.0 / (1.0 + _fourth_power(_fourth_power(np.minimum(footprint / capacity, _BEYOND)))))


def _split_counts(blocks: Array, k: Array, batch: Array, device: DeviceDatasheet) -> tuple[Array | float, ...]:
    """List the split-K counts that a library tries: none, one wave of blocks, two waves.

    Batched kernels do not split.
    """
    clustered = device.tensor_cores and device.architecture not in _BEFORE_HOPPER
    most = np.clip(np.floor(k / _MIN_SPLIT_K_LENGTH), 1.0, _MAX_CLUSTER_BLOCKS if clustered else np.inf)
    most = np.where(batch > 1, 1.0, most)
    wave = np.clip(np.floor(device.multiprocessors / blocks), 1.0, most)
    two = np.clip(np.rint(2.0 * device.multiprocessors / blocks), 1.0, most)
    return (1.0, wave, two)


def _step(element: Array, device: DeviceDatasheet) -> Array | float:
    """Return how many elements of k, of ``element`` bytes each, one iteration of the main loop takes."""
    if not device.tensor_cores:
        return _VECTOR_K_STEP
    return (_OLDER_K_STEP_BYTES if device.architecture in _BEFORE_HOPPER else _TENSOR_CORE_K_STEP_BYTES) / element


def kernel_choice_odds(seconds: Array, reference: Array) -> Array:
    """Compute the odds that a library's heuristic picks one kernel over another, (reference / seconds)^16.

    Libraries estimate the time of a kernel with an error of about 1/16, so that slower kernels are chosen at times.

    Parameters
    ----------
    seconds : ndarray
        Times of the kernel.
    reference : ndarray
        Times of the other kernel.

    Returns
    -------
    ndarray
        Odds against the other kernel [-].

    Examples
    --------
    >>> kernel_choice_odds(np.array([1.0, 1.1, 2.0]), np.array(1.0)).round(2)
    array([1.  , 0.22, 0.  ])
    """
    return _fourth_power(_fourth_power(reference / seconds))


def _busy_time(
    shape: tuple[Array, Array, Array, Array], element: Array, result: Array, dram: Array, stall: Array, wide: Array,
    device: DeviceDatasheet, p: GemmParameters,
) -> tuple[Array, Array]:  # fmt: skip
    """Compute the GEMM time averaged over the tiles and splits that a library may choose, at full clock.

    Returns that time [s], and the share of it that is arithmetic [-].
    """
    m, n, k, batch = shape
    clock, flops = device.clock_hz, device.flops_per_clock
    step = _step(element, device)
    l2 = p.l2_rate * flops * device.uncapped_rate_ratio * device.multiprocessors * clock
    outputs, waiting = batch * m * n, p.cycles_per_summed_element * element / (_REFERENCE_ELEMENT_BYTES * clock)
    dram4 = _fourth_power(dram / (p.bandwidth_efficiency * device.memory_bandwidth))
    shapes = _TENSOR_TILES if device.tensor_cores else _VECTOR_TILES
    single = 1.0 if device.tensor_cores else _SINGLE_TILE
    least = np.where(batch > 1, p.min_tile_area, single * p.min_tile_area)
    weights, seconds, arithmetic = np.zeros((3, *m.shape))
    reference: Array | None = None
    written, parts = outputs * result / (element * l2), p.time_per_split + 4.0 * outputs / (element * l2)
    row_tiles = {rows: np.ceil(m / rows) * batch for rows in {rows for rows, _ in shapes}}
    column_tiles = {columns: np.ceil(n / columns) for columns in {columns for _, columns in shapes}}
    for rows, columns in shapes:
        tiles = row_tiles[rows] * column_tiles[columns]
        per_k = np.maximum(np.maximum(rows, wide) * columns, least) * (2.0 / (p.efficiency * flops * clock))
        edge, operands = p.epilogue_cycles * rows * columns / (128 * 128 * clock), (rows + columns) / l2
        for index, split in enumerate(_split_counts(tiles, k, batch, device)):
            blocks, length = tiles * split, np.ceil(k / (split * step)) * step
            rounds = wave_count(blocks, device.multiprocessors, p.wave_quantisation)
            compute = rounds * length * per_k
            traffic = blocks * length * operands + written
            fourth = _fourth_power(compute * stall + rounds * edge) + _fourth_power(traffic) + dram4
            spread = p.block_start_cycles / clock * np.minimum(blocks / device.multiprocessors, 1.0)
            expected = _fourth_root(fourth) + spread
            busy = _fourth_root(fourth + _fourth_power(length * waiting)) + spread
            joining = 0.0 if index == 0 else np.where(split > 1, p.split_time + parts * split, 0.0)
            reference = expected + joining if reference is None else reference
            weight = kernel_choice_odds(expected + joining, reference) * (1.0 if index == 0 else split > 1)
            weights += weight
            seconds += weight * (busy + joining)
            arithmetic += weight * compute / busy
    return seconds / weights, np.minimum(arithmetic / weights, 1.0)


def transposed_operand_read_time(
    m: Array, n: Array, k: Array, batch: Array, element: Array, efficiency: float, device: DeviceDatasheet
) -> Array:
    """Compute the time to read a transposed B, [n, k] in memory, by kernels of vector units.

    A main loop takes eight elements of each row at a time, one sector of 32 bytes of fp32. Blocks run along n first, so
    that all rows of B are read at once, each on a separate DRAM page. The number of opened pages counts, not bytes.
    DeepBench's products reach 50 of 480 GB/s on Titan X (Pascal) and 44 of 336 on that of Maxwell, for any size, if n
    is many tiles; HBM2 (P100), with its many banks, shows no such effect. Each round of blocks over m reads B again;
    each product of a batch has its own B. Narrow tiles take more elements at a time (16 rows: three sectors), and rows
    a power of two apart open half the pages. Both follow from these rows, the latter is unexplained.

    Parameters
    ----------
    m, n, k : ndarray
        Extents of C[m, n] = A[m, k] B[k, n], at least 1; n runs along the contiguous side of C.
    batch : ndarray
        Products of one call.
    element : ndarray
        Bytes of an element.
    efficiency : float
        Share of the bandwidth that scattered reads reach.
    device : DeviceDatasheet
        Datasheet values of the device (`paleo.pricing.kernels.device_datasheet`).

    Returns
    -------
    ndarray
        Time [s]; arguments broadcast.

    Examples
    --------
    >>> from paleo.pricing.kernels import DeviceDatasheet
    >>> titan = DeviceDatasheet("x", "Pascal", "GDDR5X", 28, 1.531e9, 10.97e12, 480e9, 3e6, 250, False)
    >>> one = np.array(1.0)
    >>> # 1.62 ms measured
    >>> seconds = transposed_operand_read_time(128 * one, 7680 * one, 2560 * one, one, 4 * one, 0.105, titan)
    >>> float(seconds.round(5))
    0.00167
    """
    tiles = np.ceil(m / _SGEMM_TILE_SIZE) * np.ceil(n / _SGEMM_TILE_SIZE)
    rounds = np.maximum(1.0, tiles / (_SGEMM_BLOCKS_PER_MULTIPROCESSOR * device.multiprocessors))
    visits = np.sqrt(np.minimum(m, _SGEMM_TILE_SIZE) / _SGEMM_TILE_SIZE) * np.where(np.frexp(k)[0] == 0.5, 0.5, 1.0)
    return np.asarray(rounds * visits * batch * n * k * element / (efficiency * device.memory_bandwidth))


#: Elements of two bytes that tensor cores load at a time; the share of the fp32 rate that unaligned products reach; and
#: architectures whose batched kernels need aligned head sizes. Two head sizes of BigScience's runs on A100 (108, 150;
#: 2022) lose as much as fp32 at half rate would take (8 to 10.5 of 19.5 TFLOP/s), neighbouring ones of 104, 112 and 144
#: nothing.
_ALIGNED_ELEMENTS, _UNALIGNED_RATE_SHARE = 8.0, 0.5
_ALIGNMENT_BOUND_ARCHITECTURES = frozenset({"Volta", "Turing", "Ampere"})


def unaligned_batched_gemm_time(m: Array, n: Array, k: Array, batch: Array, device: DeviceDatasheet) -> Array:
    """Compute the time of batched 16-bit GEMMs with unaligned rows, which run on vector units.

    Parameters
    ----------
    m, n, k : ndarray
        Extents of each product.
    batch : ndarray
        Products of one call; a single product has padded kernels.
    device : DeviceDatasheet
        Datasheet values of the vector units in fp32.

    Returns
    -------
    ndarray
        Seconds; 0 where the smaller of n and k, the head size, is a multiple of `_ALIGNED_ELEMENTS`.

    Examples
    --------
    >>> from paleo.pricing.kernels import device_datasheet
    >>> from paleo.specs.device import load_device
    >>> card, one = device_datasheet(load_device("a100-sxm4-80gb"), "fp32"), np.array(1.0)
    >>> [float(unaligned_batched_gemm_time(2048 * one, 2048 * one, k * one, 32 * one, card).round(6))
    ... for k in (104, 108)]
    [0.0, 0.002973]
    """
    bound = device.architecture in _ALIGNMENT_BOUND_ARCHITECTURES
    odd = (np.minimum(n, k) % _ALIGNED_ELEMENTS > 0) & (batch > 1.0) & bound
    return np.asarray(np.where(odd, 2.0 * m * n * k * batch / (_UNALIGNED_RATE_SHARE * device.peak_flops_per_s), 0.0))


#: FLOP for each clock and multiprocessor of 16-bit products on tensor cores with a row that is no multiple of 16 bytes,
#: where both operands are contiguous along the sum, and else. cuBLAS 13 takes kernels of Turing there, which load an
#: element at a time (28 products on one H100, 2026-11-27, above 2 GFLOP: 12 % off, 7 without those of 129 rows and with
#: rows of 8 bytes). Volta's kernels lose nothing (DeepBench). Other architectures: not measured.
_UNALIGNED_FLOPS_PER_CLOCK: Mapping[str, tuple[float, float]] = {"Hopper": (395.0, 560.0)}


def unaligned_gemm_time(
    m: ArrayLike, n: ArrayLike, k: ArrayLike, along_sum: tuple[ArrayLike, ArrayLike], device: DeviceDatasheet
) -> Array:
    """Compute the time of 16-bit products on tensor cores whose rows in memory are no multiple of 16 bytes.

    Parameters
    ----------
    m, n, k : array-like
        Extents of C[m, n] = A[m, k] B[k, n]; n runs along the contiguous side of C.
    along_sum : tuple of (array-like, array-like)
        1 where A, and where B, is contiguous along k, else 0: along m, and along n.
    device : DeviceDatasheet
        Datasheet values of the tensor cores.

    Returns
    -------
    ndarray
        Seconds; 0 where all rows are aligned, and on architectures that `_UNALIGNED_FLOPS_PER_CLOCK` does not name.

    Examples
    --------
    >>> from paleo.pricing.kernels import device_datasheet
    >>> from paleo.specs.device import load_device
    >>> card = device_datasheet(load_device("h100-sxm5-80gb"), "bf16")
    >>> [float(unaligned_gemm_time(4096, words, 768, (1, 1), card).round(5)) for words in (50304, 50257)]
    [0.0, 0.00306]
    """
    m, n, k, left, right = np.broadcast_arrays(*(np.asarray(each, dtype=np.float64) for each in (m, n, k, *along_sum)))
    if device.architecture not in _UNALIGNED_FLOPS_PER_CLOCK:
        return np.zeros(m.shape)
    rows = (n, np.where(left > 0.0, k, m), np.where(right > 0.0, k, n))
    both, mixed = _UNALIGNED_FLOPS_PER_CLOCK[device.architecture]
    rate = np.where(left * right > 0.0, both, mixed) * device.multiprocessors * device.clock_hz
    return np.asarray(np.where(np.any(np.mod(rows, _ALIGNED_ELEMENTS) > 0.0, axis=0), 2.0 * m * n * k / rate, 0.0))


def _chunk_time(columns: tuple[Array, ...], device: DeviceDatasheet, p: GemmParameters) -> Array:
    m, n, k, batch, element, result, copies, activity, contiguous, heated = columns
    left, right, out = batch * m * k * element, batch * k * n * element, batch * m * n * result
    footprint, capacity = left + right + out, p.l2_survival_share * device.l2_bytes
    dram = left * cache_miss_rate(footprint, capacity) + out * cache_miss_rate(footprint, _RESULT_SHARE * capacity)
    dram = dram + right * cache_miss_rate(footprint + (copies - 1.0) * right, capacity)
    latency = p.dram_latency_cycles / device.clock_hz * np.minimum(k / _FILL_LENGTH, 1.0) * dram / footprint
    stall = 1.0 + p.page_stall_ratio * contiguous * np.minimum(k * element / _PAGE_BYTES, 1.0)
    wide = np.where((m < p.min_narrow_tile_rows) & (batch == 1), _SGEMM_TILE_SIZE * contiguous, 0.0)
    busy, share = _busy_time((m, n, k, batch), element, result, dram, stall, wide, device, p)
    if p.scattered_read_efficiency < 1.0 and not device.tensor_cores:
        transposed = np.maximum(2.0 * contiguous - 1.0, 0.0) * cache_miss_rate(right, capacity)
        read = transposed_operand_read_time(m, n, k, batch, element, p.scattered_read_efficiency, device)
        scattered = transposed * read
        busy = _fourth_root(_fourth_power(busy) + _fourth_power(scattered))
    busy = busy + latency
    flops, energy = 2.0 * m * n * k * batch, p.energy_per_flop
    slowed = power_slowdown(busy=busy, flops=flops, dram=dram, energy=energy, activity=activity, device=device)
    slowdown = share * (slowed - 1.0) * slowdown_share(busy, heated, p.half_throttle_time)
    return np.asarray(p.launch_time + busy * (1.0 + slowdown))


def gemm_time(
    *,
    m: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    batch: ArrayLike = 1.0,
    element_bytes: ArrayLike,
    result_bytes: ArrayLike,
    weight_copies: ArrayLike = 1.0,
    activity: ArrayLike = 1.0,
    k_contiguous: ArrayLike = 1.0,
    sustained: ArrayLike = 0.0,
    device: DeviceDatasheet,
    parameters: GemmParameters,
) -> Array:
    """Compute the time of GEMM kernels, with tiles, split-K, L2, DRAM and the power limit.

    Parameters
    ----------
    m, n, k : array-like
        Extents of C[m, n] = A[m, k] B[k, n], at least 1; n runs along the contiguous side of C.
    batch : array-like, default 1.0
        Products of one call.
    element_bytes, result_bytes : array-like
        Bytes per element of A and B, and of C.
    weight_copies : array-like, default 1.0
        B matrices that are used in turn (a model's layers, or a benchmark that keeps B out of the cache); infinity
        means that B is always read from DRAM.
    activity : array-like, default 1.0
        Switching activity of the data relative to random numbers (zeros draw less power).
    k_contiguous : array-like, default 1.0
        Share of A and B that is contiguous along k.
    sustained : array-like, default 0.0
        1 for a device under long load, as in training, on which the power limit has its full effect.
    device : DeviceDatasheet
        Datasheet values of the device (`paleo.pricing.kernels.device_datasheet`).
    parameters : GemmParameters
        Calibrated parameters of the kernel on the device.

    Returns
    -------
    ndarray
        Seconds of each product.

    Examples
    --------
    >>> from paleo.pricing.kernels import DeviceDatasheet
    >>> from paleo.units import GIGA, MEGA, MILLISECOND, TERA
    >>> d = DeviceDatasheet("x", "Ampere", "HBM2e", 108, 1.41 * GIGA, 312 * TERA, 2.0 * TERA, 40 * MEGA, 400, True)
    >>> a100 = GemmParameters(energy_per_flop=0.8, training_energy_per_flop=1.0)  # as fitted to its rows
    >>> t = gemm_time(m=8192, n=8192, k=8192, element_bytes=2, result_bytes=2, device=d, parameters=a100)
    >>> bool(3.5 < float(t) / MILLISECOND < 4.8)  # 1.1 TFLOP at 312 TFLOP/s take 3.52 ms at the least
    True
    """
    figures = (m, n, k, batch, element_bytes, result_bytes, weight_copies, activity, k_contiguous, sustained)
    arrays = np.broadcast_arrays(*(np.asarray(values, dtype=np.float64) for values in figures))
    flat = [values.ravel() for values in arrays]
    seconds = np.empty(flat[0].shape)
    for start in range(0, len(seconds), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        seconds[rows] = _chunk_time(tuple(values[rows] for values in flat), device, parameters)
    return seconds.reshape(arrays[0].shape)


def quantisation_time(
    *,
    elements: ArrayLike,
    source_bytes: ArrayLike,
    target_bytes: ArrayLike,
    device: DeviceDatasheet,
    bandwidth_efficiency: float,
    capacity: float,
) -> Array:
    """Compute the time to convert activations to a narrower format: two reads and one write.

    Only bytes beyond ``capacity`` are charged, since the rest stays in cache. Launches are part of the parameter
    ``launch_time`` of fp8 products.

    Parameters
    ----------
    elements : array-like
        Elements of the activations.
    source_bytes, target_bytes : array-like
        Bytes of an element before and after.
    device : DeviceDatasheet
        Datasheet values of the device (`paleo.pricing.kernels.device_datasheet`).
    bandwidth_efficiency : float
        Share of the memory bandwidth that is reached.
    capacity : float
        Bytes of cache within which data cost nothing.

    Returns
    -------
    ndarray
        Time [s].
    """
    count = np.asarray(elements, dtype=np.float64)
    moved = count * (2.0 * np.asarray(source_bytes) + np.asarray(target_bytes))
    missed = cache_miss_rate(count * (np.asarray(source_bytes) + np.asarray(target_bytes)), capacity)
    return np.asarray(moved * missed / (bandwidth_efficiency * device.memory_bandwidth))
