"""What must hold for every device, link and system of the catalog."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paleo.errors import SpecError
from paleo.pricing.calibration_lookup import constant_efficiencies
from paleo.pricing.communication import Fabric, fastest_algorithm
from paleo.specs.catalog import entry_files, entry_names
from paleo.specs.device import Device, find_device, load_device, load_link
from paleo.specs.loading import UNKNOWN_SOURCE, read_yaml
from paleo.specs.model import load_model
from paleo.specs.system import load_system
from paleo.units import GIBIBYTE, GIGA, KILO, MICROSECOND, TERA

#: FP32 lanes per multiprocessor (NVIDIA SM, AMD CU), by architecture; from the vendors' architecture papers.
LANES = {
    "Kepler": 192, "Maxwell": 128, "Pascal": 128, "Volta": 64, "Turing": 64, "Ampere": 128, "Ada Lovelace": 128,
    "Hopper": 128, "Blackwell": 128, "GCN5 (Vega 10)": 64, "GCN5.1 (Vega 20)": 64, "CDNA": 64, "CDNA2": 64,
}  # fmt: skip
#: Sources disagree with the boost clock here (see the notes of the entries); V100 PCIe is 0.9 % off.
FP32_EXCEPTIONS = {"h20"}


def lanes(device: Device) -> int | None:
    if device.name.startswith(("p100", "a100", "a800")) or device.name == "a30":
        return 64
    return LANES.get(device.architecture)


@pytest.mark.parametrize("kind", ["devices", "links", "systems"])
def test_there_are_all_entries_of_the_facts(kind: str) -> None:
    assert len(entry_names(kind)) >= {"devices": 86, "links": 74, "systems": 55}[kind]


@pytest.mark.parametrize("kind", ["devices", "links", "systems"])
def test_a_file_is_named_as_its_entry(kind: str) -> None:
    for name, path in entry_files(kind).items():
        assert name == name.lower()
        assert read_yaml(path)["name"] == name


@pytest.mark.parametrize("name", entry_names("devices"))
def test_a_device_is_sane(name: str) -> None:
    device = load_device(name)
    assert device.source != UNKNOWN_SOURCE and device.year is not None
    assert device.multiprocessor is None or device.multiprocessor.source != UNKNOWN_SOURCE
    assert GIBIBYTE <= device.memory.usable_bytes <= device.memory.capacity <= KILO * GIBIBYTE
    assert device.memory.usable_bytes >= 0.92 * device.memory.capacity  # inline error correction takes a sixteenth
    assert 30 * GIGA <= device.memory.bandwidth <= 20 * TERA
    fastest = max(rate for dtype, rate in device.peak.items() if dtype in ("fp32", "fp16", "bf16"))
    ridge_point = fastest / device.memory.bandwidth
    assert 5 < ridge_point < 700, "FLOP per byte at which the device stops being bound by its memory"
    order = [device.peak[dtype] for dtype in ("fp64", "fp32", "tf32", "bf16", "fp8", "fp4") if dtype in device.peak]
    assert order == sorted(order), "a narrower dtype is not slower"
    assert device.tdp is None or 20 <= device.tdp <= 1500
    assert device.l2 is None or device.l2 < device.memory.capacity / 20
    assert device.kind != "gpu" or device.multiprocessor is not None


@pytest.mark.parametrize("name", entry_names("devices"))
def test_fp32_is_two_per_lane_and_clock(name: str) -> None:
    device = load_device(name)
    count = lanes(device)
    if count is None or device.boost_clock is None or name in FP32_EXCEPTIONS:
        return
    expected = 2 * count * device.multiprocessors * device.boost_clock
    assert device.vector_peak["fp32"] == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("name", entry_names("devices"))
def test_a_tensor_peak_is_a_power_of_two_per_clock(name: str) -> None:
    """Dense 16-bit FLOP per SM and clock: 512 to 8192, as the architecture papers say (GeForce at half rate)."""
    device = load_device(name)
    clock = device.tensor_clock or device.boost_clock
    if device.vendor != "NVIDIA" or not device.has_tensor_cores or clock is None or name == "titan-v":
        return
    per_clock = device.peak_flops_per_s("fp16", "tensor") / (device.multiprocessors * clock)
    nearest = 2 ** round(math.log2(per_clock))
    tolerance = 0.15 if device.tensor_clock is None and device.architecture in ("Hopper", "Blackwell") else 0.02
    assert per_clock == pytest.approx(nearest, rel=tolerance)


def test_aliases_are_unique_and_all_resolve() -> None:
    seen: dict[str, str] = {}
    for name in entry_names("devices"):
        device = load_device(name)
        for alias in (device.name, device.full_name, *device.aliases):
            folded = " ".join(alias.lower().split())
            assert seen.setdefault(folded, name) == name, f"{alias!r} means {seen[folded]} and {name}"
            assert find_device(alias).name == name
            assert find_device(alias.upper()).name == name


@pytest.mark.slow
def test_aliases_of_models_are_unique_and_all_resolve() -> None:
    known = {name.lower() for name in entry_names("models")}
    listed = [(alias, name) for name in entry_names("models") for alias in load_model(name).aliases]
    assert listed and len({alias for alias, _ in listed}) == len(listed)
    for alias, name in listed:
        assert alias not in known
        assert load_model(alias).name == load_model(alias.upper()).name == name


def test_dots_of_aliases_count() -> None:
    assert load_model("Llama-3.1-70B").name == load_model("llama_3.3_70b").name == "llama3-70b"
    with pytest.raises(SpecError, match="unknown model 'llama3-170b'; nearest: 'llama3-70b'"):
        load_model("llama3-170b")


@pytest.mark.parametrize("name", entry_names("links"))
def test_a_link_is_sane(name: str) -> None:
    link = load_link(name)
    assert link.source != UNKNOWN_SOURCE
    assert link.achieved_fraction is None or link.achieved_source is not None
    assert link.latency is None or link.latency_source is not None
    assert GIGA / 10 <= link.bandwidth <= TERA
    assert link.latency is None or 0.1 * MICROSECOND <= link.latency <= 50 * MICROSECOND


@pytest.mark.parametrize("name", entry_names("systems"))
def test_a_system_is_sane(name: str) -> None:
    system = load_system(name)
    assert system.name == name and system.source != UNKNOWN_SOURCE and system.year is not None
    assert system.host is None or system.host.source != UNKNOWN_SOURCE
    assert system.levels
    assert system.device.name in entry_names("devices")
    for level in system.levels:
        assert level.member_bandwidth > 0
    if system.price_per_node is not None:
        assert 1 < system.price_per_node.rate * 3600 < KILO
    if system.levels[-1].ranks is not None and system.max_nodes is not None:
        assert system.levels[-1].ranks == system.max_nodes * system.devices_per_node


#: Architectures whose NVSwitches add and multicast: NVLink SHARP came with the third generation (H100 white paper).
SHARP = {"Hopper", "Blackwell", "Blackwell Ultra"}


@pytest.mark.parametrize("name", entry_names("systems"))
def test_nvswitches_add_from_the_third_generation_on(name: str) -> None:
    """Bridges, meshes of NVLink, PCIe trees and earlier NVSwitches do not."""
    system = load_system(name)
    for level in system.levels:
        if not system.is_inter_node_level(level):
            nvswitch = level.topology == "switch" and level.link.kind in ("nvlink", "nvswitch")
            assert level.in_switch_reduction == (nvswitch and system.device.architecture in SHARP)


#: The widest port that a device has to itself between nodes: 800 Gb/s.
WIDEST_PORT = 100 * GIGA
#: Ranks at which the bus bandwidths of a gigabyte are looked at, and the share of the links that is always reached.
GROUPS, LEAST_SHARE = (8, 16, 64, 512), 1 / 3
#: What one hop of a ring may take, over sockets at worst.
HOP = 60 * MICROSECOND
#: Systems whose links give less, measured or by what their copies pass, and the share that is left.
SLOWER = {
    "deepbench-8gpu-dual-root": 0.2,  # NCCL 2.0 through the link between the sockets (DeepBench)
    "baidu-svail-2015": 0.2,  # likewise
    "aws-p2.16xlarge": 0.3,  # likewise
    "l40s-pcie-8gpu": 0.04,  # copies through the host's memory: 1.4 GB/s over eight GPUs (aiconfigurator)
    "deepspeed-v100-edr": 0.2,  # sixteen GPUs exchange over one port or four (DeepSpeed's steps)
    "paleo-k20-pcie2": 0.25,  # both sockets' copies share one path
}
#: The least shares of copies through the host's memory, and of an all_to_all over EFA or Slingshot (0.43 of the NICs,
#: less on many nodes) or over a torus, whose packets share the links of those between.
STAGED_SHARE, EXCHANGE_SHARE = 0.15, 0.07


@pytest.mark.parametrize("name", entry_names("systems"))
def test_ports_between_nodes_are_counted_once(name: str) -> None:
    system = load_system(name)
    devices = system.devices_per_node
    for level in system.levels:
        if system.is_inter_node_level(level):
            assert level.ports == 1 or not level.link.scope.startswith(("node", "per node"))
            assert level.member_bandwidth / devices <= WIDEST_PORT
            devices = level.ranks or devices


@pytest.mark.parametrize("name", entry_names("systems"))
def test_a_gigabyte_is_exchanged_at_a_plausible_rate(name: str) -> None:
    """No faster than the links, and no slower than `LEAST_SHARE` of them beside the hops of many ranks."""
    system, payload = load_system(name), np.asarray(2.0**30)
    fabric = Fabric(system, constant_efficiencies=constant_efficiencies(system.device.kind, "auto"))
    staged = any(not level.peer_to_peer for level in system.levels)
    share = SLOWER.get(name, STAGED_SHARE if staged else LEAST_SHARE)
    for ranks in GROUPS:
        if system.max_devices is not None and ranks > system.max_devices:
            continue
        links = fabric.links(1, ranks)
        for operation in ("all_reduce", "reduce_scatter", "all_to_all"):
            seconds = float(fastest_algorithm(fabric.collective_model, operation, payload, links).time)
            least, wire = (
                float(fabric.collective_model.time_lower_bound(operation, payload, links, in_network=switch))
                for switch in (True, False)
            )
            reached = min(share, EXCHANGE_SHARE) if operation == "all_to_all" else share
            assert least * (1.0 - 1e-9) <= seconds <= wire / reached + HOP * (ranks - 1), (operation, ranks)


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_the_fan_outs_of_a_group_multiply_to_its_size(data: st.DataObject) -> None:
    system = load_system(data.draw(st.sampled_from(entry_names("systems"))))
    capacity = system.max_devices or 64 * system.devices_per_node
    size = data.draw(st.integers(1, capacity))
    stride = data.draw(st.integers(1, (capacity - 1) // max(size - 1, 1)) if capacity > size else st.just(1))
    spans = system.group_levels(stride, size)
    product = math.prod(span.fan_out for span in spans)
    assert len(spans) == sum(len(level.shape or (1,)) for level in system.levels)  # a torus: one a dimension
    assert product >= size
    even = all(level.ranks is None or stride % level.ranks == 0 or level.ranks % stride == 0 for level in system.levels)
    whole = [level.ranks // stride for level in system.levels if level.ranks is not None and level.ranks > stride]
    if even and all(size % members == 0 or members % size == 0 for members in whole):
        assert product == size
    for span, inner in zip(spans[1:], spans, strict=False):
        assert span.ranks_per_unit == min(size, -(-(inner.level.ranks or 0) // stride))
        assert 1 <= span.groups_per_unit * span.ranks_per_unit < (inner.level.ranks or 0) + span.ranks_per_unit
