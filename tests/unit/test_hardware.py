"""Devices, links and systems: worked values, a user's own files, and bad input."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paleo.calibrate.kernel_fits import calibration_yaml
from paleo.errors import PlanError, SpecError
from paleo.predict import predict
from paleo.pricing.kernels import device_datasheet
from paleo.report.catalog import _device_line
from paleo.specs.calibration import load_calibration, present_names_of_parameters
from paleo.specs.catalog import entry_names, kind_of_spec_file
from paleo.specs.device import find_device, load_device, load_link
from paleo.specs.loading import UNKNOWN_SOURCE
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.software import load_software
from paleo.specs.system import System, load_system
from paleo.studies.what_if import HARDWARE_SCALERS, change_system
from paleo.units import GIBIBYTE, GIGA, MICROSECOND, TERA, format_quantity


def fan_outs(system: System, stride: int, size: int) -> list[int]:
    return [span.fan_out for span in system.group_levels(stride, size)]


@pytest.mark.parametrize("command", ["kind", "device", "software"])
def test_a_misspelt_extend_is_named(tmp_path: Path, command: str) -> None:
    (path := tmp_path / "mine.yaml").write_text("extends: a100-sxm4-80gb\nsource: mine\n")
    load = {"kind": kind_of_spec_file, "device": load_device, "software": load_software}[command]
    with pytest.raises(SpecError, match="extends: unknown key; nearest: 'extend'"):
        load(path)


def test_a_device_in_si() -> None:
    a100 = load_device("a100-sxm4-80gb")
    assert a100.memory.capacity == 80 * GIBIBYTE
    assert a100.memory.bandwidth == 2039 * GIGA
    assert a100.boost_clock == 1410e6
    assert a100.interconnect is not None and a100.interconnect.bandwidth == 300 * GIGA
    assert a100.peak_flops_per_s("bf16") == a100.peak_flops_per_s("bf16", "tensor") == 312 * TERA
    assert a100.peak_flops_per_s("fp16", "vector") == 78 * TERA
    assert a100.has_tensor_cores and "fp32" not in a100.tensor_dtypes


def test_a_device_without_tensor_cores() -> None:
    p100 = load_device("p100-pcie-16gb")
    assert not p100.has_tensor_cores
    assert p100.peak_flops_per_s("fp16") == p100.peak_flops_per_s("fp16", "vector")
    with pytest.raises(SpecError, match="p100-pcie-16gb has no tensor peak for dtype 'fp16'"):
        p100.peak_flops_per_s("fp16", "tensor")


def test_a_missing_dtype_is_an_error_with_near_names() -> None:
    maxwell = load_device("titan-x-maxwell")  # converts fp16, multiplies in fp32
    assert maxwell.peak_flops_per_s("fp16") == maxwell.peak_flops_per_s("fp32")
    with pytest.raises(SpecError, match="device v100-sxm2-16gb has no peak for dtype 'bf16'; nearest: 'fp16'"):
        load_device("v100-sxm2-16gb").peak_flops_per_s("bf16")


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm5-80gb"),
        ("nvidia a100-sxm4-80gb", "a100-sxm4-80gb"),
        ("Tesla V100-SXM2-16GB", "v100-sxm2-16gb"),
        ("Tesla K80", "k80-die"),
        ("NVIDIA H200", "h200-sxm"),
        ("Titan X (Maxwell)", "titan-x-maxwell"),
        ("NVIDIA A10", "a10"),
        ("L4", "l4"),
    ],
)
def test_the_names_that_cuda_reports(reported: str, name: str) -> None:
    assert find_device(reported).name == name


def test_a_link_in_si() -> None:
    link = load_link("nvlink3-a100")
    assert (link.bandwidth, link.latency, link.achieved_fraction) == (300 * GIGA, 2.7 * MICROSECOND, 0.783)


def test_groups_of_a_switched_node() -> None:
    dgx = load_system("dgx-a100-80gb")
    assert dgx.max_devices is None
    switch, fabric = dgx.group_levels(stride=1, size=16)
    assert (switch.fan_out, switch.ranks_per_unit, switch.groups_per_unit) == (8, 1, 1)
    assert (fabric.fan_out, fabric.ranks_per_unit, fabric.groups_per_unit) == (2, 8, 1)
    assert fabric.bandwidth == 8 * 25 * GIGA
    switch, fabric = dgx.group_levels(stride=8, size=4)
    assert (switch.fan_out, fabric.fan_out, fabric.ranks_per_unit, fabric.groups_per_unit) == (1, 4, 1, 8)
    assert fabric.bandwidth == 25 * GIGA
    switch, fabric = dgx.group_levels(stride=2, size=8)
    assert (switch.fan_out, fabric.fan_out, fabric.ranks_per_unit, fabric.groups_per_unit) == (4, 2, 4, 2)


def test_groups_that_do_not_divide_take_the_fullest_unit() -> None:
    dgx = load_system("dgx-a100-80gb")
    assert fan_outs(dgx, 1, 12) == [8, 2]
    assert fan_outs(dgx, 3, 4) == [3, 2]  # ranks 0, 3, 6 | 9
    assert fan_outs(dgx, 1, 3) == [3, 1]


def test_groups_of_a_pcie_tree() -> None:
    svail = load_system("baidu-svail-2015")
    assert fan_outs(svail, 1, 32) == [2, 2, 2, 4]
    assert fan_outs(svail, 4, 2) == [1, 1, 2, 1]
    qpi = svail.group_levels(4, 2)[2]
    assert (qpi.groups_per_unit, qpi.bandwidth) == (4, 19.2 * GIGA / 4)


def test_one_gpu_per_node() -> None:
    (fabric,) = load_system("paleo-k40-10gbe").group_levels(1, 100)
    assert (fabric.fan_out, fabric.ranks_per_unit, fabric.groups_per_unit) == (100, 1, 1)
    assert fabric.bandwidth == 10 * GIGA / 8


def test_more_ranks_than_there_are() -> None:
    with pytest.raises(PlanError, match="paleo-k20-pcie2 has 8 devices; 16 ranks"):
        load_system("paleo-k20-pcie2").group_levels(1, 16)
    with pytest.raises(PlanError, match="has 8 devices; 4 ranks with stride 4 need at least 13"):
        load_system("paleo-k20-pcie2").group_levels(4, 4)
    with pytest.raises(PlanError, match="1 or more"):
        load_system("dgx-1-v100").group_levels(0, 4)
    assert load_system("titan-ornl").max_devices == 18688


def test_a_device_name_is_a_system_of_one() -> None:
    alone = load_system("h200-sxm")
    assert (alone.device.name, alone.max_devices, alone.group_levels(1, 1)) == ("h200-sxm", 1, ())
    with pytest.raises(PlanError, match="has 1 devices"):
        alone.group_levels(1, 2)


def test_a_users_own_files_stand_wherever_a_name_does(tmp_path: Path) -> None:
    (tmp_path / "lab.yaml").write_text(
        "extend: a100-sxm4-80gb\nfull_name: capped A100\ntdp: 250 W\npeak: {bf16: 250 TFLOP/s}\n"
    )
    (tmp_path / "wire.yml").write_text("extend: infiniband-hdr\nbandwidth: 100 Gb/s\n")
    (path := tmp_path / "node.yaml").write_text(
        "extend: dgx-a100-80gb\ndevice: lab.yaml\nlevels:\n"
        "  - {name: NVSwitch, ranks: 8, link: nvswitch2-a100, topology: switch}\n"
        "  - {name: fabric, ranks: null, link: ./wire.yml, topology: fabric, ports: 4}\n"
    )  # fmt: skip
    system = load_system(str(path))
    assert (system.name, system.device.name, system.device.tdp, system.device.aliases) == ("node", "lab", 250.0, ())
    assert system.device.peak_flops_per_s("bf16") == 250 * TERA
    assert system.device.peak_flops_per_s("fp16") == 312 * TERA
    assert system.levels[1].link.name == "wire"
    assert system.levels[1].member_bandwidth == 50 * GIGA
    assert find_device(str(tmp_path / "lab.yaml")).name == "lab"


SYSTEM = """
name: mine
full_name: my node
year: 2024
device: h100-sxm5-80gb
devices_per_node: 8
source: mine
levels:
  - {name: NVSwitch, ranks: 8, link: nvswitch3-h100, topology: switch}
  - {name: fabric, ranks: null, link: infiniband-ndr, topology: fabric, ports: 8}
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("device: h100-sxm5-80gb", "device: h100-sxm5-80g", "mine.yaml: device: unknown device 'h100-sxm5-80g'; near"),
        ("link: nvswitch3-h100", "link: nvswitch3", "levels[0].link: unknown link 'nvswitch3'; nearest: 'nvswitch3-"),
        ("link: infiniband-ndr", "link: {extend: infiniband-ndr, bandwidth: 4}", "[1].link.bandwidth: 4 has no unit"),
        ("link: infiniband-ndr", "link: {extend: infiniband-ndr, bandwith: 4 B/s}", "[1].link.bandwith: unknown key"),
        ("link: infiniband-ndr", "link: 7", "levels[1].link: 7: "),
        ("device: h100-sxm5-80gb", "device: [1]", "device: a list: "),
        ("device: h100-sxm5-80gb", "", "mine.yaml: device: this key is missing"),
        ("levels:", "levls:", "mine.yaml: levls: unknown key; nearest: 'levels'"),
        ("ranks: 8", "ranks: null", "only the outermost level may be unlimited"),
        ("ranks: 8", "ranks: 0", "levels[0].ranks: 0: it should be greater than 0"),
        ("ranks: null", "ranks: 12", "levels[1].ranks: 12 is not a multiple of the 8"),
        ("devices_per_node: 8", "devices_per_node: 4", "devices_per_node: no level has 4 ranks"),
        ("topology: switch", "topology: swich", "levels[0].topology: 'swich': "),
        ("source: mine", "source: ''", "source: ''"),
        ("ports: 8", "ports: 8, in_switch_reduction: on", "levels[1].in_switch_reduction: 'on': "),
        ("year: 2024", "year: 20240", "year: 20240"),
    ],
)  # fmt: skip
def test_a_bad_system_is_one_message(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in SYSTEM
    (path := tmp_path / "mine.yaml").write_text(SYSTEM.replace(old, new))
    with pytest.raises(SpecError) as caught:
        load_system(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_good_system_is_good(tmp_path: Path) -> None:
    (path := tmp_path / "mine.yaml").write_text(SYSTEM)
    assert load_system(path).levels[1].member_bandwidth == 400 * GIGA


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("peak: {fp33: 1 TFLOP/s}", "peak.fp33"),
        ("peak: {fp16: 1 TFLOP/s}", "peak.fp16: is missing or below vector_peak.fp16"),
        ("peak: 5 TFLOP/s", "peak: '5 TFLOP/s': it should be a mapping"),
        ("tdp: -1 W", "tdp: '-1 W' must be above zero"),
        ("memory: {capacity: 80 GB/s}", "memory.capacity: '80 GB/s': 'GB/s' is a unit of bandwidth, not of bytes"),
        ("multiprocessors: 1.5", "multiprocessors: 1.5"),
        ("kind: gpuu", "kind: 'gpuu'"),
    ],
)
def test_a_bad_device_is_one_message(tmp_path: Path, change: str, message: str) -> None:
    (path := tmp_path / "mine.yaml").write_text(f"extend: a100-sxm4-80gb\n{change}\n")
    with pytest.raises(SpecError) as caught:
        load_device(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(path))


def test_a_box_of_ones_own_needs_neither_year_nor_source(tmp_path: Path) -> None:
    (tmp_path / "wire.yaml").write_text("{kind: ethernet, scope: one port, bandwidth: 25 Gb/s, latency: 10 us}")
    (tmp_path / "card.yaml").write_text(
        "{vendor: me, architecture: Ada Lovelace, multiprocessors: 128, peak: {fp16: 165 TFLOP/s, fp32: 82 TFLOP/s}, "
        "form_factor: PCIe, memory: {capacity: 24 GiB, bandwidth: 1008 GB/s, kind: GDDR6X}}"
    )
    (tmp_path / "box.yaml").write_text(
        "device: ./card.yaml\ndevices_per_node: 4\nlevels:\n"
        "- {name: PCIe, ranks: 4, link: pcie4-x16, topology: pcie-tree}\n"
        "- {name: Ethernet, ranks: null, link: ./wire.yaml, topology: fabric}\n"
    )
    system = load_system(tmp_path / "box.yaml")
    assert (system.full_name, system.year, system.source) == ("box", None, UNKNOWN_SOURCE)
    assert (system.device.full_name, system.levels[1].link.latency) == ("card", 1e-5)
    assert load_system(tmp_path / "card.yaml").max_devices == 1


def test_all_missing_keys_are_named_at_once(tmp_path: Path) -> None:
    (path := tmp_path / "card.yaml").write_text("vendor: me\nmultiprocessors: 8\n")
    with pytest.raises(SpecError) as caught:
        load_device(path)
    assert "architecture, peak, memory, form_factor: these keys are missing" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("extend: dgx-a100-80gb", "system"),
        ("extend: a100-sxm4-80gb", "device"),
        ("extend: ./other.yaml", "link"),
        ("{gpus: 8}", "run"),
        ("{subject: l40s, entries: []}", "calibration"),
    ],
)
def test_a_file_is_of_the_kind_that_its_keys_show(tmp_path: Path, text: str, kind: str) -> None:
    (tmp_path / "other.yaml").write_text("extend: nvswitch2-a100\n")
    (tmp_path / "f.yaml").write_text(text)
    assert kind_of_spec_file(tmp_path / "f.yaml") == kind


def test_a_file_of_no_kind_says_which_there_are(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text("colour: red\n")
    with pytest.raises(SpecError, match="no kind of file; expected one of calibration, study, system"):
        kind_of_spec_file(tmp_path / "f.yaml")
    (tmp_path / "f.yaml").write_text("extend: dgx-a100-80g\n")
    with pytest.raises(SpecError, match="extend: nothing is named 'dgx-a100-80g'; nearest: 'dgx-a100-80gb'"):
        kind_of_spec_file(tmp_path / "f.yaml")


@pytest.mark.slow
def test_a_system_loads_cold_from_its_own_files_alone() -> None:
    """Its file, those of its device and links, and those that they extend; not the whole catalog."""
    code = (
        "import sys; from paleo.specs.system import load_system; opened = set();"
        "sys.addaudithook(lambda event, args: event == 'open' and opened.add(str(args[0])));"
        "load_system('dgx-a100-80gb'); print(sum(name.endswith('.yaml') for name in opened))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert 3 <= int(run.stdout) <= 8


TPU_PODS = ("tpu-v2-pod", "tpu-v3-pod", "tpu-v4-pod", "tpu-v5e-pod", "tpu-v5p-pod", "tpu-v6e-pod", "tpu7x-pod")


@pytest.mark.parametrize("name", [*TPU_PODS, "gaudi2", "gaudi3"])
def test_devices_without_a_published_fp32_rate_run(name: str) -> None:
    """Only the formats that a run needs are asked for; collectives of a pod go over its torus."""
    pod = name in TPU_PODS
    step = predict(load_model("gpt2"), load_system(name), Run(gpus=64 if pod else 1, batch=8))
    assert 0.1 < step.mfu < 0.75
    assert (step.breakdown.communication_total > 0) == pod


def test_the_calibration_of_a_step_names_that_of_its_links() -> None:
    model = load_model("gpt2")
    assert "links" not in predict(model, load_system("dgx-h100"), Run(gpus=1)).calibration
    assert "measured (dgx-h100) collective.nccl" in predict(model, load_system("dgx-h100"), Run(gpus=8)).calibration
    slow = predict(model, load_system("l40s-pcie-8gpu"), Run(gpus=8))
    quick = predict(model, load_system("l40s-8-p2p"), Run(gpus=8))
    assert "measured (l40s-pcie-8gpu) collective.nccl" in slow.calibration
    assert quick.breakdown.communication_total < 0.2 * slow.breakdown.communication_total


@pytest.mark.parametrize(
    ("level", "says"),
    [
        ("{name: n, ranks: 8, link: nvlink4-link, topology: switch, shape: [2, 4], ports: 4}", "only a torus"),
        ("{name: n, ranks: 8, link: ici-tpu-v4, topology: torus, shape: [2, 4], ports: 3}", "4 links"),
        ("{name: n, ranks: 8, link: nvlink2-link, topology: mesh, rings: [0, 1], ports: 6}", "each of 1 to 8"),
    ],
)
def test_a_level_that_contradicts_itself_is_refused(tmp_path: Path, level: str, says: str) -> None:
    file = tmp_path / "odd.yaml"
    file.write_text(
        f"full_name: odd\nyear: 2024\ndevice: h100-sxm5-80gb\ndevices_per_node: 8\nlevels: [{level}]\nsource: here\n"
    )
    with pytest.raises(SpecError, match=says):
        load_system(str(file))


def test_libraries_compute_in_fp32_where_half_precision_is_slower() -> None:
    """GTX 1080 Ti does fp16 at 1/64 of its fp32 rate; P100 does it at twice the rate, V100 on tensor cores."""
    card = load_device("gtx-1080-ti")
    assert device_datasheet(card, "fp16").peak_flops_per_s == card.vector_peak["fp32"]
    assert (
        device_datasheet(card, "fp16", "vector").peak_flops_per_s == card.vector_peak["fp16"]
    )  # what a table says it did
    for name in ("p100-pcie-16gb", "v100-sxm2-16gb"):
        assert load_device(name).arithmetic_dtype("fp16") == "fp16"
    slow, narrow = (
        predict(load_model("resnet50"), load_system(name), Run(batch=32, dtype="fp16"))
        for name in ("gtx-1080-ti", "p100-pcie-16gb")
    )
    assert slow.step_time < 2.5 * narrow.step_time
    assert slow.mfu < 1.0


ENTRY = """
subject: mine
entries:
- {family: memory.elementwise, stack: graph, source: mine, date: "2026-01-01", interval: [{low: 0.9, high: 1.1}],
   parameters: {PARAMETER}}
"""


@pytest.mark.parametrize(
    ("parameter", "said"),
    [
        ("host_overlap: 0", "entries[0].parameters.host_overlap"),
        ("bandwidth_fraction: -0.5", "entries[0].parameters.bandwidth_fraction"),
        ("bandwidth_fraction: 300", "bandwidth_fraction: 300 is no achieved memory bandwidth; expected 0.2 to 1.94"),
        ("launch_time: -2", "entries[0].parameters.launch_time"),
        ("lanch_time: 0.000004", "launch_time"),
    ],
)
def test_calibrations_hold_what_a_fit_could_find(tmp_path: Path, parameter: str, said: str) -> None:
    (file := tmp_path / "mine.yaml").write_text(ENTRY.replace("PARAMETER", parameter))
    with pytest.raises(SpecError) as caught:
        predict(load_model("lenet"), load_system("dgx-a100-80gb"), Run(gpus=1, calibration=str(file)))
    assert said in str(caught.value) and "mine" in str(caught.value)


def with_former_names(family: str, values: dict[str, float]) -> dict[str, float]:
    """Write parameters of a kernel family with the names that they had in the last release."""
    former = {new: old for old, new in present_names_of_parameters(family).items()}
    return {former.get(name, name): value for name, value in values.items()}


@pytest.mark.parametrize("subject", sorted(set(entry_names("calibrations")) - {"architectures"}))
def test_calibrations_with_the_names_of_the_last_release_are_read(tmp_path: Path, subject: str) -> None:
    shipped = load_calibration(subject)
    old = [
        entry.model_copy(
            update={
                part: with_former_names(entry.family, getattr(entry, part)) for part in ("parameters", "uncertainty")
            }
        )
        for entry in shipped.entries
    ]
    (file := tmp_path / "mine.yaml").write_text(calibration_yaml(shipped.model_copy(update={"entries": tuple(old)})))
    with pytest.warns(FutureWarning, match=r"^mine\.yaml: names of parameters have changed \(\w+ is now \w+"):
        assert load_calibration(file).entries == shipped.entries


@pytest.mark.parametrize(("name", "dtype"), [("a100-sxm4-80gb", "bf16"), ("v100-sxm2-16gb", "fp16"), ("k80", "fp32")])
def test_a_list_shows_the_peak_that_training_reaches_for(name: str, dtype: str) -> None:
    """Not that of the narrowest format, in which nobody trains."""
    device = load_device(name)
    assert device.training_dtype == dtype
    assert f"{format_quantity(device.peak_flops_per_s(dtype), 'FLOP/s')} {dtype}," in _device_line(device)


@pytest.mark.parametrize(
    ("stated", "reported"),
    [
        ("{capacity: 160 GiB}", 158.2),  # 79.1 of 80 GiB, doubled
        ("{capacity: 40 GiB}", 39.55),
        ("{capacity: 160 GiB, reported: 150 GiB}", 150.0),
        ("{reported: 70 GiB}", 70.0),
        ("{bandwidth: 4 TB/s}", 79.1),
    ],
)
def test_reported_memory_follows_a_changed_capacity(tmp_path: Path, stated: str, reported: float) -> None:
    (path := tmp_path / "mine.yaml").write_text(f"extend: h100-sxm5-80gb\nmemory: {stated}\n")
    assert load_device(path).memory.usable_bytes == pytest.approx(reported * GIBIBYTE)


@pytest.mark.parametrize(("value", "factor"), [("160 GiB", 2.0), ("x0.5", 0.5), ("x2", 2.0)])
def test_reported_memory_follows_a_study_of_capacity(value: str, factor: float) -> None:
    system = load_system("dgx-h100")
    resized = change_system(system, "device.memory.capacity", value)
    assert resized.device.memory.usable_bytes == pytest.approx(factor * system.device.memory.usable_bytes)
    scaled = HARDWARE_SCALERS["memory capacity"](system, factor)
    assert scaled.device.memory.usable_bytes == pytest.approx(factor * system.device.memory.usable_bytes)
