"""The 90 % interval of a predicted step time.

`StepUncertainty` holds what is known of a run before the run is measured. `IntervalParameters` holds how much each part
of that counts, fitted to measured steps by `paleo.calibrate.interval_constants`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paleo.pricing.communication import collective_calibrations
from paleo.pricing.kernels import device_datasheet
from paleo.specs.calibration import (
    STEP_CALIBRATION_NAME,
    Calibration,
    catalog_calibration,
    constants_fitted_to_steps,
    parameter,
)
from paleo.units import MICROSECOND

if TYPE_CHECKING:
    from paleo.parallel.placement import Mesh
    from paleo.parallel.plan import Plan
    from paleo.schedules.base import Numeric
    from paleo.specs.device import Device
    from paleo.specs.software import SoftwareProfile
    from paleo.step.backend import Backend
    from paleo.step.step import TimedProgram

Array = npt.NDArray[np.float64]

#: Calibration that holds the spreads, and their family in it.
INTERVAL_CALIBRATION, INTERVAL_FAMILY = STEP_CALIBRATION_NAME, "interval"
#: Kind of kernels of functions that an importer did not know, and the factor by which their times may be wrong in
#: either direction.
OPAQUE_KERNEL_KIND, _OPAQUE_TIME_FACTOR = "opaque", 3.0
#: First cuDNN release whose convolutions were timed for a calibration.
_FIRST_TIMED_CUDNN_RELEASE = 5.0
#: First cuDNN release with kernels for an architecture's tensor cores, by its release notes; 8 for other architectures.
_FIRST_TENSOR_CORE_CUDNN_RELEASES = {"Volta": 7.0, "Turing": 7.0}
_AMPERE_TENSOR_CORE_CUDNN_RELEASE = 8.0
#: Kernels shorter than this reveal a host slower than its profile. Eager frameworks take 10 to 46 us to issue an
#: operation (host times of profiles), and gaps between operations are added.
_SHORT_KERNEL_SECONDS = 100.0 * MICROSECOND
#: GPUs of a node. Beyond it stragglers, fabrics and node placement add errors that steps inside a node do not show.
_GPUS_PER_NODE = 8.0
#: Largest share of short kernels in measured steps of untested software; the half-width does not grow beyond it.
_MAX_SHORT_KERNEL_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class IntervalParameters:
    """Constants of the 90 % interval of a step time: how much each source of uncertainty widens it, in log units.

    Each constant multiplies one part of `StepUncertainty`, such as the share of kernels of unknown speed.

    Defaults are round start values of the fit; `interval_parameters` returns the fitted values.
    """

    gemm_error_weight: float = parameter("0.2", "0.01..1", "part of products' half-widths that all of a step share")
    link_error_weight: float = parameter("0.5", "0.01..2", "part of large collectives' half-width that a step's show")
    software_half_width: float = parameter("0.07", "0.005..1", "half-width of every step")
    untested_software_half_width: float = parameter(
        "0.1", "0.005..1", "half-width of software fitted to no steps on the architecture"
    )
    unknown_host_half_width: float = parameter("1", "0.01..7", "half-width above per share of unknown hosts' kernels")
    untimed_library_half_width: float = parameter("0.5", "0.01..2", "half-width of convolutions by an untimed library")
    half_width_per_tenfold_nodes: float = parameter("0.04", "0.001..0.3", "half-width per tenfold GPUs beyond a node")
    unmeasured_device_half_width: float = parameter("0.08", "0.005..0.5", "half-width of an unmeasured device")
    expert_half_width: float = parameter("0.08", "0.005..0.5", "half-width of a network that sends tokens to experts")
    fused_pass_half_width: float = parameter("0.3", "0.01..2", "half-width of passes that a compiler may fuse")
    update_half_width: float = parameter("0.6", "0.01..3", "half-width of the update, for its share of the step")
    upper_to_lower_width_root: float = parameter("1.2", "0.5..2", "root of the half-width above over that below")


def interval_parameters(user_calibration: Calibration | None = None) -> IntervalParameters:
    """Return the fitted constants of the 90 % intervals of predicted step times.

    The constants come from the user's calibration, else from the shipped one, else from the defaults.

    Parameters
    ----------
    user_calibration : Calibration, optional
        Calibration file of the user.

    Returns
    -------
    IntervalParameters
        Half-widths, in log units.
    """
    return constants_fitted_to_steps(IntervalParameters, INTERVAL_FAMILY, user_calibration)


@dataclass(frozen=True, slots=True)
class StepUncertainty:
    """Parts of the 90 % interval of a predicted step time: half-widths in log units and shares of the step.

    Arrays hold the low and the high end, shape (2,) or (2, steps); shares then have the shape (steps,).

    Attributes
    ----------
    gemm_half_width : ndarray
        Half-widths of matrix products, weighted by their shares of the kernel time. Products have a common error, as
        power limits their clock; errors of other kernels average out. If ``uses_constant_rates``, this half-width
        covers all kernels, and nothing else is added.
    unmeasured_half_width : ndarray
        The same weighted sum over kernels without a measurement on the architecture, or without any.
    link_half_width : ndarray
        Half-width of the links times the share of exposed communication.
    short_kernel_share : float or ndarray
        Share of kernels shorter than `_SHORT_KERNEL_SECONDS` that a host of unknown speed issues one by one, up to
        `_MAX_SHORT_KERNEL_SHARE`.
    untimed_convolution_share : float or ndarray
        Share of convolutions by a library that was not timed.
    update_share : float or ndarray
        Share of the optimizer's update.
    software_tested : float or ndarray
        1 if the software was fitted to steps on the architecture, else 0.
    uses_constant_rates : bool
        True with constant rates, whose error factors hold for whole steps.
    log10_nodes : float or ndarray
        Decimal logarithm of GPUs per `_GPUS_PER_NODE`, if above 0.
    unmeasured_device : float or ndarray
        1 if products were not measured on a device of that name, else 0.
    uses_experts : float or ndarray
        1 if tokens are sent to experts, else 0. The load of each expert depends on the router and the data, and
        frameworks differ in their kernels for it more than in those of other layers.
    unfused_pass_share : float or ndarray
        Share of passes over memory that the software runs one by one unless its users turn a compiler on. Publications
        seldom say if they did, and no table holds kernels of either kind.
    fitted_constants : IntervalParameters
        Fitted weight of each part.
    """

    gemm_half_width: Array
    unmeasured_half_width: Array
    link_half_width: Array
    short_kernel_share: Numeric
    untimed_convolution_share: Numeric
    update_share: Numeric
    software_tested: Numeric
    uses_constant_rates: bool
    log10_nodes: Numeric = 0.0
    unmeasured_device: Numeric = 0.0
    uses_experts: Numeric = 0.0
    unfused_pass_share: Numeric = 0.0
    fitted_constants: IntervalParameters = field(default_factory=interval_parameters)

    def interval_half_widths(self, known: IntervalParameters | None = None) -> Array:
        """Return the half-widths of the 90 % interval of a step time: the root of the sum of squares of its parts.

        A host slower than its profile lengthens a step. A faster host hardly shortens it, because the step then waits
        for the device. So the part for kernels too short to hide their launches widens only the upper side.

        Parameters
        ----------
        known : IntervalParameters, optional
            Fitted constants of intervals; by default those that the prediction holds (``fitted_constants``).

        Returns
        -------
        ndarray, shape (2,) or (2, steps)
                Logarithms from the prediction down to the low end, and up to the high end.
        """
        if self.uses_constant_rates:
            return self.gemm_half_width
        known = known or self.fitted_constants
        squares: tuple[Numeric, ...] = (
            (known.gemm_error_weight * self.gemm_half_width) ** 2,
            self.unmeasured_half_width**2,
            (known.link_error_weight * self.link_half_width) ** 2,
            known.software_half_width**2,
            (1.0 - self.software_tested) * known.untested_software_half_width**2,
            (known.half_width_per_tenfold_nodes * self.log10_nodes) ** 2,
            (known.unmeasured_device_half_width * self.unmeasured_device) ** 2,
            (known.expert_half_width * self.uses_experts) ** 2,
            (known.fused_pass_half_width * self.unfused_pass_share) ** 2,
            (known.untimed_library_half_width * self.untimed_convolution_share) ** 2,
            (known.update_half_width * self.update_share) ** 2,
        )
        low, high = np.asarray(sum(squares))
        high = high + (known.unknown_host_half_width * self.short_kernel_share) ** 2
        root = known.upper_to_lower_width_root
        return np.stack([np.sqrt(low) / root, np.sqrt(high) * root])


def step_uncertainty(
    program: TimedProgram, layout: Plan, backend: Backend, *, exposed: float, update: float
) -> StepUncertainty:
    """Collect what determines the 90 % interval of a predicted step time.

    Parameters
    ----------
    program : TimedProgram
        One rank's kernels and collectives with their times.
    layout : Plan
        Parallel plan of the run: mesh, strategy, microbatches.
    backend : Backend
        Software, and models of kernel and link times.
    exposed : float
        Share of the step that is exposed communication, 0 to 1.
    update : float
        Share of the step that is the optimizer update, 0 to 1.

    Returns
    -------
    StepUncertainty
        Half-widths and shares from which the interval follows.
    """
    kernels = program.kernels
    counted = [(each, section.repeat) for section in program.program.sections for each in section.kernels]
    shares = kernels.device_time * np.array([each.repetitions * repeat for each, repeat in counted], dtype=np.float64)
    shares = shares / (float(shares.sum()) or 1.0)
    half_widths = np.abs(np.log(np.stack([kernels.low_factor, kernels.high_factor])))
    families = np.array([each.kernel.family for each, _ in counted])
    opaque = np.array([each.kernel.operation == OPAQUE_KERNEL_KIND for each, _ in counted])
    unknown = np.isin(families, list(backend.predictor.unmeasured_families)) * half_widths
    unknown = unknown + opaque * np.log(_OPAQUE_TIME_FACTOR)
    software, device, predictor = backend.software, backend.system.device, backend.predictor
    constants = predictor.constant_efficiencies is not None
    products = half_widths + unknown if constants else half_widths * (families == "gemm")
    issued = not (software.host.whole_iteration or software.has_fitted_host_times(device.architecture))
    short = min(float(shares[kernels.device_time < _SHORT_KERNEL_SECONDS].sum()), _MAX_SHORT_KERNEL_SHARE)
    untimed = lacks_timed_convolutions(software, device, layout.dtype)
    return StepUncertainty(
        gemm_half_width=(shares * products).sum(axis=1),
        unmeasured_half_width=(shares * unknown).sum(axis=1),
        link_half_width=exposed * _links(backend, layout.mesh),
        short_kernel_share=short * issued,
        untimed_convolution_share=float(shares[families == "conv"].sum()) * untimed,
        update_share=update,
        software_tested=float(software.is_fitted_for(device.architecture)),
        uses_constant_rates=constants,
        log10_nodes=float(np.log10(max(layout.gpus / _GPUS_PER_NODE, 1.0))),
        unmeasured_device=float(catalog_calibration(device.name) is None and predictor.user_calibration is None),
        uses_experts=float(any(each.kernel.expert_count > 0 for each, _ in counted)),
        unfused_pass_share=float(shares[families == "memory"].sum()) * software.fusion.compiles,
        fitted_constants=interval_parameters(predictor.user_calibration),
    )


def _links(backend: Backend, mesh: Mesh) -> Array:
    """Return the half-widths of the interval of large all-reduces over a mesh, shape (2,), in log units."""
    if mesh.size == 1 or backend.predictor.constant_efficiencies is not None:
        return np.zeros(2)
    families = collective_calibrations(backend.fabric, "all_reduce", backend.fabric.links(1, mesh.size))
    return np.abs(np.log(next(iter(families.values())).interval_factors(np.inf)))


def lacks_timed_convolutions(software: SoftwareProfile, device: Device, dtype: str) -> bool:
    """Return True if no calibration covers the convolutions of a software's library.

    Not covered are kernels other than cuDNN's, cuDNN releases before the first that was timed, and releases without
    kernels for the requested tensor cores.

    Parameters
    ----------
    software : SoftwareProfile
        Software profile.
    device : Device
        Device, as its datasheet describes it.
    dtype : str
        Number format of the operands, such as ``bf16``.

    Returns
    -------
    bool
        True if the convolutions are not covered.
    """
    release = software.convolutions.cudnn
    least = _FIRST_TENSOR_CORE_CUDNN_RELEASES.get(device.architecture, _AMPERE_TENSOR_CORE_CUDNN_RELEASE)
    early = device_datasheet(device, dtype).tensor_cores and release < least
    return software.convolutions.algorithms is not None or release < _FIRST_TIMED_CUDNN_RELEASE or early
