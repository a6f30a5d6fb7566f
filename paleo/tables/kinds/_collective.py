"""Tables of measured collectives (sizes as in nccl-tests) and of measured MoE token exchanges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from paleo.collectives.base import COLLECTIVE_OPERATIONS
from paleo.errors import PaleoError, suggest_names
from paleo.pricing.communication import SWITCH_UNSUPPORTED_DTYPES, Nccl, fastest_algorithm
from paleo.pricing.kernels import DeviceDatasheet
from paleo.pricing.links.alpha_beta import NANOSECOND, bus_factor
from paleo.pricing.links.fabric import NIC_INJECT_SIZE, FabricParameters, measured_fabric_system
from paleo.pricing.links.group import (
    PAIRWISE_OPERATIONS,
    ExchangeParameters,
    GroupLinks,
    NcclParameters,
    intra_node_link_kind,
    nvlink_domain_ranks,
    sole_group_links,
    stack_group_links,
)
from paleo.pricing.moe_token_exchange import (
    DEEPEP_MULTIPROCESSORS,
    CustomAllReduceParameters,
    TokenExchangeLinks,
    TokenExchangeParameters,
    custom_all_reduce_time,
    mean_visited_groups,
    moe_token_exchange_time,
    token_exchange_links,
)
from paleo.specs.system import System, load_system
from paleo.tables.base import column_set, parse_column_names
from paleo.tables.cells import (
    Array,
    mapped_column,
    number_column,
    number_columns,
    parse_release,
    text_column,
    word_mask,
)
from paleo.tables.kernels import KERNEL_TABLES, FitSettings, FitTarget, KernelTable, apply_per_row
from paleo.units import MICROSECOND

#: Libraries that have neither a low-latency protocol nor trees between nodes.
_LIBRARIES_WITHOUT_TREES = ("NCCL 1.", "NCCL 2.0", "Baidu", "OSU")
#: All-reduce of DeepBench that is not NCCL with a process per GPU: own rings through host memory, MPI.
_NON_NCCL_STACKS = {"single process": "single-process", "Baidu": "host-ring", "OSU": "mpi"}
#: The one parameter that a stack of a handful of rows can tell.
_SINGLE_FITTED_PARAMETER = {
    "single-process": "simple_fraction", "host-ring": "fabric_fraction", "mpi": "ll_fabric_hop_time"
}  # fmt: skip
#: Rows whose times another server than the one they name must have given: (system, library) -> the system. SGLang
#: 0.5.12's four and eight L40S reach 21 GB/s, where four other libraries get 3.7 to 4.7 and 1.4 to 2.0 GB/s from the
#: server without peer-to-peer: its copies do not pass the host's memory.
_CORRECTED_SYSTEMS = {("l40s-pcie-8gpu", "SGLang 0.5.12"): "l40s-8-p2p"}
#: Most ranks over PCIe that engines' own kernels join; beyond, they leave it to NCCL (vLLM and SGLang,
#: custom_all_reduce.py: not supported on more than two PCIe-only GPUs).
_MAX_PCIE_RANKS = 2
#: Largest payload of the engines' own kernels [byte]; vLLM's must be below 8 MiB, so 4 MiB is its last power of two.
_MAX_CUSTOM_PAYLOAD = {"vllm": 2.0**22, "sglang": 2.0**23, "sglang-0.5.14": 2.0**24, "trtllm": 2.0**22}


class CollectiveTable(KernelTable[System]):
    """Table of measured collective operations (NCCL and custom kernels), one timed operation per row.

    Column ``op`` is the operation, ``ranks`` its group size and ``ranks_per_node`` the ranks on each node. ``bytes`` is
    the size that nccl-tests prints (the full tensor).
    """

    name = "collective"
    identifying_columns = column_set("source system library op dtype ranks ranks_per_node bytes time_us")
    optional_columns = "algo compute"
    configuration_columns = ("op", "ranks", "ranks_per_node", "bytes")
    size_columns = ("ranks", "ranks_per_node", "bytes")
    parameters_by_family: ClassVar[Mapping[str, type[Any]]] = {
        "collective.nccl": NcclParameters,
        "collective.exchange": ExchangeParameters,
        "collective.fabric": FabricParameters,
        "collective.custom": CustomAllReduceParameters,
    }
    host_parameters = ("launch_time", "launch_skew_time", "host_time")
    hardware_column = "system"

    def _start_and_fixed_parameters(self, target: FitTarget) -> tuple[Any, tuple[str, ...]]:
        """Choose (start values, names of fixed parameters) to fit a collective's timing formula to measured times.

        Parameters that the measured times do not determine stay fixed.
        """
        family, stack, figures = target.family, target.stack, target.figures
        if family == "collective.custom":
            engine, _, mode = stack.rpartition("-")
            eager = mode == "eager"
            start = CustomAllReduceParameters(
                max_payload_bytes=_largest(engine, figures), host_time=20 * MICROSECOND if eager else NANOSECOND
            )
            return start, () if eager else ("host_time",)
        joined = intra_node_link_kind(figures)
        unused = () if joined == "pcie-staged" else ("staging_share_exponent",)
        if family == "collective.exchange":
            return ExchangeParameters(), unused
        waits = stack.startswith("kernel")
        skew, fixed = (40 * MICROSECOND, ()) if waits else (NANOSECOND, ("launch_skew_time",))
        if family == "collective.fabric":
            if waits:
                return FabricParameters(launch_skew_time=skew, fabric_fraction=0.5, nic_bandwidth_exponent=0.7), fixed
            small_piece = NIC_INJECT_SIZE if measured_fabric_system(figures) is not None else 1.0
            plain = FabricParameters(fabric_fraction=0.8, exchange_fraction=0.6, crowded_piece_bytes=small_piece)
            return plain, (*fixed, "nic_bandwidth_exponent", "send_fraction")
        fixed = (*fixed, *unused)
        if joined.startswith("pcie"):
            tree = NcclParameters(launch_time=12 * MICROSECOND, simple_fence_time=14 * MICROSECOND, simple_fraction=0.4)
            return tree, (*fixed, "switch_fraction", "ll128_fraction")
        return NcclParameters(launch_skew_time=skew), fixed

    def fit_settings(self, target: FitTarget) -> FitSettings:
        """Choose how parameters of collectives are fitted to measured times: start values and fixed parameters.

        Stacks (timing methods) with few rows fit one parameter (`_SINGLE_FITTED_PARAMETER`); all others keep the values
        fitted to back-to-back rows.
        """
        if target.stack in _SINGLE_FITTED_PARAMETER:
            usual = target._replace(stack="back-to-back")
            plain = target.fitted.get(usual[:3], self._start_and_fixed_parameters(usual)[0])
            single = _SINGLE_FITTED_PARAMETER[target.stack]
            fixed = tuple(field.name for field in fields(plain) if field.name != single)
            return FitSettings(plain, fixed_parameters=fixed, random_starts=0, prior_precision=0.0)
        start, fixed = self._start_and_fixed_parameters(target)
        if not isinstance(start, NcclParameters) or intra_node_link_kind(target.figures) != "pcie-staged":
            return FitSettings(start, fixed_parameters=fixed)
        return FitSettings(
            replace(start, launch_skew_time=10 * MICROSECOND), parameters_per_stack=("launch_skew_time",),
            fixed_parameters=tuple(name for name in fixed if name != "launch_skew_time"),
        )  # fmt: skip

    def load_datasheet(self, subject: str, dtype: str, compute: str) -> System:
        """Load the catalog's system named ``subject``, from whose links the times of collectives are predicted."""
        return load_system(subject)

    def calibration_keys(self, figures: System) -> tuple[str, str, str]:
        """Return the keys by which parameters of collectives are looked up for a system.

        They are (system, architecture of its devices, kind of link within a node).
        """
        return figures.name, figures.device.architecture, intra_node_link_kind(figures)

    def prepare_rows(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Correct the system of measured collectives whose times show that another system ran them."""
        systems = text_column(frame, "system")
        for (system, library), other in _CORRECTED_SYSTEMS.items():
            systems = systems.mask((systems == system) & word_mask(frame, "library", library), other)
        return frame.assign(system=systems)

    def unsupported_reasons(self, frame: pd.DataFrame) -> pd.Series[str]:
        """Explain for each measured collective why it cannot be modelled; '' if it can.

        Reasons are an unknown operation or system, and more ranks than the system can have.
        """
        words = (text_column(frame, "system"), text_column(frame, "op"), self.kernel_family(frame))
        sizes = (number_column(frame, name, 0.0) for name in ("ranks", "ranks_per_node"))
        rows = zip(*words, *sizes, number_column(frame, "bytes", 0.0) > 0, strict=True)
        return pd.Series([_reason(*row) for row in rows], index=frame.index, dtype=object)

    def timing_method(self, frame: pd.DataFrame) -> pd.Series[str]:
        """Return how each collective of this table was timed, as launch costs are fitted per timing method.

        NCCL: ``kernel`` (duration on rank 0), ``back-to-back``, or ``back-to-back/eager`` for calls of an engine
        outside a graph. Custom kernels: ``<engine>-graph`` or ``<engine>-eager``. vidur's multi-node rows are
        ``kernel-unknown-fabric``, because the network between its nodes is not documented.
        """
        library, eager = text_column(frame, "library"), text_column(frame, "algo").str.lower().str.contains("eager")
        mode, crosses = eager.map({True: "eager", False: "graph"}), self.kernel_family(frame) == "collective.fabric"
        plain = (text_column(frame, "source") == "vidur").map({True: "kernel", False: "back-to-back"})
        plain = plain.mask((plain == "kernel") & crosses, "kernel-unknown-fabric").mask(eager, "back-to-back/eager")
        for words, name in _NON_NCCL_STACKS.items():
            plain = plain.mask(library.str.contains(words, regex=False), name)
        return plain.where(~self._custom(frame), library.map(_engine) + "-" + mode)

    def kernel_family(self, frame: pd.DataFrame) -> pd.Series[str]:
        """Return the family of each measured collective: the key of its timing formula and calibrated parameters.

        It is ``collective.custom`` for an engine's custom kernels and ``collective.fabric`` for NCCL across nodes.
        Within a node, it is ``collective.exchange`` for pairwise operations such as all-to-all, else
        ``collective.nccl``.
        """
        crosses = self._crosses(frame)
        inside = np.where(text_column(frame, "op").isin(PAIRWISE_OPERATIONS), "collective.exchange", "collective.nccl")
        plain = np.where(crosses, "collective.fabric", inside)
        return pd.Series(np.where(self._custom(frame), "collective.custom", plain), index=frame.index, dtype=object)

    def flops_and_bytes(self, frame: pd.DataFrame) -> tuple[Array, Array]:
        """Count (FLOP, bytes) of measured collectives: no FLOP, and the bytes that each rank sends."""
        factor = np.zeros(len(frame))
        operations, ranks = text_column(frame, "op").to_numpy(), number_column(frame, "ranks")
        for operation in COLLECTIVE_OPERATIONS:
            operation_rows = operations == operation
            factor[operation_rows] = bus_factor(operation, ranks[operation_rows])
        return np.zeros(len(frame)), factor * number_column(frame, "bytes")

    def roofline_times(self, frame: pd.DataFrame, figures: System) -> Array:
        """Compute the bandwidth-only time [s] of measured collectives, as a baseline.

        It is the bytes that a rank sends over the datasheet bandwidth of the slowest link level.
        """
        links = self._links(frame, figures)
        slowest = np.full(len(frame), np.inf)
        for level in links.levels:
            slowest = np.where(np.asarray(level.fan_out) > 1, np.minimum(slowest, level.bandwidth), slowest)
        return np.asarray(self.flops_and_bytes(frame)[1] / slowest)

    def predict_times(self, frame: pd.DataFrame, figures: System, parameters: Any) -> Array:
        """Predict the time [s] of measured collectives that share system, dtype, family and timing method.

        Each row takes the fastest algorithm that its NCCL version has, or the engine's custom kernel.
        """
        operations, payload = text_column(frame, "op").to_numpy(), number_column(frame, "bytes")
        adds = ~word_mask(frame, "dtype", *SWITCH_UNSUPPORTED_DTYPES)
        recent = ~text_column(frame, "library").str.startswith(_LIBRARIES_WITHOUT_TREES).to_numpy()
        seconds = np.zeros(len(frame))
        for operation in np.unique(operations):
            operation_rows = operations == operation
            links = self._links(frame[operation_rows], figures)
            if isinstance(parameters, CustomAllReduceParameters):
                seconds[operation_rows] = custom_all_reduce_time(
                    payload_bytes=payload[operation_rows], links=links, parameters=parameters
                )
                continue
            policy = replace(
                _nccl(parameters), sends_in_ring_shift=True, switch_can_add=adds[operation_rows],
                has_ll_protocol=recent[operation_rows], has_trees=recent[operation_rows],
            )  # fmt: skip
            seconds[operation_rows] = fastest_algorithm(policy, str(operation), payload[operation_rows], links).time
        return seconds

    def _custom(self, frame: pd.DataFrame) -> pd.Series[bool]:
        """Return True for measured collectives that an engine's custom kernels ran.

        Custom kernels read the memory of other devices. Without such access, or over PCIe with many ranks, NCCL runs
        instead.
        """
        ranks = zip(text_column(frame, "system"), number_column(frame, "ranks", 0.0), strict=True)
        reachable = pd.Series([count <= _most_ranks(name) for name, count in ranks], index=frame.index, dtype=bool)
        return text_column(frame, "algo").str.lower().str.startswith("custom") & reachable

    def _crosses(self, frame: pd.DataFrame) -> pd.Series[bool]:
        """Return True for measured collectives whose group spans nodes; an NVLink domain counts as one node."""
        neighbours = number_column(frame, "ranks_per_node", np.inf)
        pairs = zip(text_column(frame, "system"), neighbours, strict=True)
        inside = pd.Series([_neighbours(name, count) for name, count in pairs], index=frame.index, dtype=np.float64)
        return pd.Series(number_column(frame, "ranks", 0.0) > inside, index=frame.index)

    def _links(self, frame: pd.DataFrame, system: System) -> GroupLinks:
        sizes = np.stack([number_column(frame, "ranks"), number_column(frame, "ranks_per_node")], axis=1)
        unique, index = np.unique(sizes, axis=0, return_inverse=True)
        groups = [sole_group_links(system, ranks=int(n), ranks_per_node=int(m)) for n, m in unique]
        return stack_group_links(groups, np.ravel(index))


def _largest(engine: str, system: System) -> float:
    """Return the largest payload for which an engine uses its custom all-reduce [byte].

    TensorRT-LLM's limit is lower on Ampere.
    """
    if engine == "trtllm" and system.device.architecture == "Ampere":
        return 2.0**20
    return _MAX_CUSTOM_PAYLOAD.get(engine, 2.0**23)


@cache
def _most_ranks(system: str) -> float:
    """Return the largest group for which engines use custom collective kernels on a system; inf without a limit."""
    try:
        joined = intra_node_link_kind(load_system(system))
    except PaleoError:
        return np.inf
    return {"pcie-staged": 0.0, "pcie": _MAX_PCIE_RANKS, "pcie-switch": _MAX_PCIE_RANKS}.get(joined, np.inf)


@cache
def _neighbours(system: str, ranks_per_node: float) -> float:
    try:
        whole = np.isfinite(ranks_per_node) and ranks_per_node >= 1
        return float(nvlink_domain_ranks(load_system(system), int(ranks_per_node))) if whole else ranks_per_node
    except PaleoError:
        return ranks_per_node


@cache
def _engine(library: str) -> str:
    """Return the inference engine of a custom kernel, by library name; SGLang has other kernels from 0.5.14 on."""
    name, _, version = library.lower().partition(" ")
    return "sglang-0.5.14" if name == "sglang" and parse_release(version) >= (0, 5, 14) else name or "custom"


def _nccl(parameters: NcclParameters | ExchangeParameters | FabricParameters) -> Nccl:
    """Build the NCCL model with the given parameters of one family (such as inter-node), else with defaults."""
    if isinstance(parameters, NcclParameters):
        return Nccl(intra_node=parameters)
    if isinstance(parameters, ExchangeParameters):
        return Nccl(intra_node_exchange=parameters)
    return Nccl(inter_node=parameters)


@cache
def _reason(system: str, operation: str, family: str, ranks: float, ranks_per_node: float, sized: bool) -> str:
    if operation not in COLLECTIVE_OPERATIONS:
        return f"operation {operation!r} is not modelled; {suggest_names(operation, COLLECTIVE_OPERATIONS)}"
    if family == "collective.custom" and operation != "all_reduce":
        return f"custom kernels are modelled for all_reduce, not for {operation!r}"
    if not sized or ranks < 2 or ranks_per_node < 1:
        return "needs bytes above zero, two ranks or more, and ranks_per_node"
    if ranks != int(ranks) or ranks_per_node != int(ranks_per_node) or ranks % min(ranks, ranks_per_node):
        return "ranks is not a multiple of ranks_per_node"
    try:
        sole_group_links(load_system(system), ranks=int(ranks), ranks_per_node=int(ranks_per_node))
    except PaleoError as error:
        return str(error)
    return ""


KERNEL_TABLES.register(CollectiveTable.name)(CollectiveTable())


# Exchange of tokens between the ranks of a mixture's experts, each direction by itself

#: Servers whose devices the rows name, and devices of a node of theirs.
_SYSTEM_OF_DEVICE, _DEVICES_PER_NODE = {"h100-sxm5-80gb": "dgx-h100", "b200": "dgx-b200", "gb200": "gb200-nvl72"}, 8.0
#: Bytes of an element on the wire; DeepEP's rows dispatch fp8 and combine bf16, as its own tests do.
_WIRE_BYTES_BY_DTYPE = {"bfloat16": 2.0, "fp8": 1.0, "nvfp4": 0.5625}
_EXCHANGE_STEPS_OF_MODE = {
    **dict.fromkeys(("deepep-normal", "deepep-low-latency", "nvlink-onesided"), ("dispatch", "combine")),
    "nvlink-twosided": ("prepare", "dispatch", "combine", "combine_low_precision"),
}  # fmt: skip


class ExpertExchangeTable(KernelTable[DeviceDatasheet]):
    """Table of MoE token exchanges (dispatch, combine, …), one timed direction per row, by library and mode."""

    name = "expert_exchange"
    identifying_columns = frozenset({"mode", "step", "num_tokens", "hidden_size", "topk", "num_experts", "time_us"})
    optional_columns = "device library version nodes dispatch_sms combine_sms moe_ep_size dtype"
    configuration_columns = parse_column_names("mode num_tokens hidden_size topk num_experts nodes moe_ep_size")
    size_columns = ("num_tokens", "hidden_size", "topk", "num_experts")
    parameters_by_family: ClassVar[Mapping[str, type[Any]]] = {
        f"exchange.{mode}.{step}": TokenExchangeParameters for mode, s in _EXCHANGE_STEPS_OF_MODE.items() for step in s
    }
    host_parameters = ("launch_time",)

    def prepare_rows(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Move column ``dtype`` (format of tokens on the wire) to column ``wire``, and set ``dtype`` to bf16."""
        return frame.assign(wire=text_column(frame, "dtype"), dtype="bf16")

    @apply_per_row
    def unsupported_reasons(self, device: str, mode: str, step: str) -> str:
        """Explain why a measured MoE token exchange cannot be modelled (unknown server, mode or step); '' if it can."""
        if device not in _SYSTEM_OF_DEVICE:
            return f"device {device!r}: its server is not known; expected {', '.join(_SYSTEM_OF_DEVICE)}"
        return "" if step in _EXCHANGE_STEPS_OF_MODE.get(mode, ()) else f"mode {mode!r}, step {step!r}: not modelled"

    @apply_per_row
    def timing_method(self, version: str) -> str:
        """Return ``graph/nodes`` for multi-node DeepEP exchanges, else ``graph``.

        The rows come from two clusters, whose launch costs are fitted apart.
        """
        return "graph/nodes" if version == "0.5.0" else "graph"

    @apply_per_row
    def kernel_family(self, mode: str, step: str) -> str:
        """Return the key ``exchange.<mode>.<step>`` of the calibrated parameters of a MoE token exchange."""
        return f"exchange.{mode}.{step}"

    def fit_settings(self, target: FitTarget) -> FitSettings:
        """Choose how parameters of MoE token exchanges are fitted to measured times: start values and fixed parameters.

        Network parameters are fitted only where exchanges span nodes. ``prepare`` steps send token counts alone; they
        determine the time per token but no bandwidth.
        """
        several_nodes = target.subject.startswith("h100") and "deepep" in target.family
        between = () if several_nodes else ("nic_share", "nic_share_exponent", "time_per_node_doubling")
        unseen = ("link_share", "copy_rate") if target.family.endswith("prepare") else ("time_per_visit",)
        fixed = (*between, *unseen)
        return FitSettings(TokenExchangeParameters(), (), ("launch_time",), fixed, prior_precision=0.2)

    def flops_and_bytes(self, frame: pd.DataFrame) -> tuple[Array, Array]:
        """Count (FLOP, bytes) of measured MoE token exchanges: no FLOP, and the bytes that one rank sends."""
        sent = _sent(frame)
        return np.zeros(len(frame)), sent["inside"] + sent["across"]

    def roofline_times(self, frame: pd.DataFrame, figures: DeviceDatasheet) -> Array:
        """Compute the bandwidth-only time [s] of MoE token exchanges, as a baseline.

        It is the slower of links and NIC at datasheet bandwidth.
        """
        sent, links = _sent(frame), _links(figures.name)
        wire = np.maximum(sent["linked"] / links.link_bandwidth, sent["across"] / links.nic_bandwidth)
        return np.maximum(wire, np.finfo(np.float64).tiny)

    def predict_times(
        self, frame: pd.DataFrame, figures: DeviceDatasheet, parameters: TokenExchangeParameters
    ) -> Array:
        """Predict the time [s] of measured MoE token exchanges that share device, mode and step."""
        sends, receives = (number_column(frame, n, DEEPEP_MULTIPROCESSORS) for n in ("dispatch_sms", "combine_sms"))
        return moe_token_exchange_time(
            **_sent(frame), visits=number_column(frame, "num_tokens") * number_column(frame, "topk"),
            nodes=number_column(frame, "nodes", 1.0), links=_links(figures.name), parameters=parameters,
            multiprocessors=np.where(word_mask(frame, "step", "dispatch"), sends, receives),
        )  # fmt: skip


@cache
def _links(device: str) -> TokenExchangeLinks:
    return token_exchange_links(load_system(_SYSTEM_OF_DEVICE[device]))


def _sent(frame: pd.DataFrame) -> dict[str, Array]:
    """Count the bytes that one rank sends in each MoE token exchange, by destination.

    ``inside`` is sent within the node, ``linked`` is the part of that over links to other devices, ``across`` goes to
    other nodes. Steps that exchange token counts alone send no bytes.
    """
    stated = mapped_column(
        frame, "wire" if "wire" in frame.columns else "dtype", _WIRE_BYTES_BY_DTYPE, _WIRE_BYTES_BY_DTYPE["fp8"]
    )
    steps = [word_mask(frame, "step", word) for word in ("prepare", "combine")]
    element = np.select(steps, [0.0, _WIRE_BYTES_BY_DTYPE["bfloat16"]], stated)
    tokens = number_column(frame, "num_tokens") * number_column(frame, "hidden_size") * element
    top_k, experts = number_columns(frame, ("topk", "num_experts"))
    nodes, group = number_column(frame, "nodes", 1.0), number_column(frame, "moe_ep_size", 0.0)
    ranks = np.where(group > 0, group, _DEVICES_PER_NODE * nodes)
    each_expert = word_mask(frame, "mode", "deepep-low-latency")
    inside = tokens * np.where(each_expert, top_k / nodes, mean_visited_groups(ranks, experts, top_k))
    across = tokens * (1.0 - 1.0 / nodes) * np.where(each_expert, top_k, mean_visited_groups(nodes, experts, top_k))
    return {"inside": inside, "linked": inside * (1.0 - 1.0 / ranks), "across": across}


KERNEL_TABLES.register(ExpertExchangeTable.name)(ExpertExchangeTable())
