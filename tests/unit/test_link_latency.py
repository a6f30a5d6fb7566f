"""What another latency of a link changes in measured hops: the link's part of them, and nothing of software's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paleo.errors import SpecError
from paleo.predict import predict
from paleo.pricing.communication import Fabric, collective_parameters
from paleo.pricing.links.alpha_beta import hop_latency_correction
from paleo.specs.catalog import entry_names
from paleo.specs.device import load_link
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.system import System, load_system
from paleo.studies.purchase import hardware_sensitivities
from paleo.studies.what_if import change_system
from paleo.units import MICROSECOND

NODE = load_system("dgx-h100")
OWN_SYSTEM = """
extend: dgx-h100
levels:
  - {{name: NVSwitch, ranks: 8, link: nvswitch3-h100, topology: switch, in_switch_reduction: true}}
  - name: fabric
    ranks: null
    link: {link}
    topology: fabric
    ports: 8
"""


def seconds(system: System, operation: str, ranks: int, payload: float, stride: int = 1) -> float:
    times = Fabric(system).collective_times(operation, np.array([stride]), np.array([ranks]), np.array([payload]))
    return float(times[0])


def slower(system: System, level: int, microseconds: float) -> System:
    before = system.levels[level].link.latency
    assert before is not None
    return change_system(system, f"levels[{level}].link.latency", f"{before / MICROSECOND + microseconds} us")


def test_a_hop_keeps_what_software_takes_of_it() -> None:
    """4 us of which the link states 1: 3 + 3 with a link of 3; half of a hop that is shorter than its link."""
    assert hop_latency_correction(4e-6, 1e-6, 3e-6) == pytest.approx(2e-6)
    assert hop_latency_correction(4e-6, 1e-6, 0.0) == pytest.approx(-1e-6)
    assert hop_latency_correction(1e-6, 2e-6, 1e-6) == pytest.approx(-0.5e-6)
    assert hop_latency_correction(1e-6, 0.0, 2e-6) == pytest.approx(2e-6)
    assert hop_latency_correction(4e-6, None, 3e-6) == 0.0
    assert hop_latency_correction(4e-6, None, 9e-6) == pytest.approx(5e-6)


def test_a_ring_inside_a_node_takes_every_hop_longer() -> None:
    """512 bytes over eight ranks in LL: seven hops of an all_gather, which take a little less than the 0.94 us that the
    link states; each gets (0.94 + 4.7) / 0.94 = 6 times as long, and no other part of the time."""
    hop = collective_parameters(NODE, "collective.nccl").parameters.ll_hop_time
    assert hop < 0.94 * MICROSECOND
    before, after = (seconds(system, "all_gather", 8, 512.0) for system in (NODE, slower(NODE, 0, 4.7)))
    assert after - before == pytest.approx(7 * 5 * hop, rel=0.01)


def test_a_send_between_nodes_takes_one_message_longer() -> None:
    before, after = (seconds(system, "send_recv", 2, 8.0, stride=8) for system in (NODE, slower(NODE, 1, 5.0)))
    assert after - before == pytest.approx(5e-6, rel=0.01)


def test_an_exchange_inside_a_node_waits_once() -> None:
    before, after = (seconds(system, "all_to_all", 8, 4096.0) for system in (NODE, slower(NODE, 0, 5.0)))
    assert after - before == pytest.approx(5e-6, rel=1e-6)


def test_a_gather_between_nodes_takes_every_hop_longer() -> None:
    """Four nodes of one rank each and little to send: three hops of the fabric, 5 us more each."""
    before, after = (seconds(system, "all_gather", 4, 64.0, stride=8) for system in (NODE, slower(NODE, 1, 5.0)))
    assert after - before == pytest.approx(3 * 5e-6, rel=0.01)


@pytest.mark.parametrize("name", entry_names("systems"))
def test_links_of_the_catalog_are_those_that_were_calibrated(name: str) -> None:
    """No latency of the catalog differs from the one that its calibrated hops contain, so that none is moved."""
    for level in load_system(name).levels:
        if level.link.latency is not None:
            assert level.link.stated_latency == level.link.latency
    assert load_link("infiniband-ndr").stated_latency == load_link("infiniband-ndr").latency


def own_system(folder: Path, link: str) -> System:
    path = folder / "own.yaml"
    path.write_text(OWN_SYSTEM.format(link=link))
    return load_system(path)


def test_a_link_that_extends_another_carries_the_difference(tmp_path: Path) -> None:
    (tmp_path / "slow.yaml").write_text("extend: infiniband-ndr\nlatency: 6.2 us\nlatency_source: a test\n")
    inline = own_system(tmp_path, "{extend: infiniband-ndr, latency: 6.2 us, latency_source: a test}")
    file = own_system(tmp_path, "./slow.yaml")
    chain = own_system(tmp_path, "{extend: ./slow.yaml, latency: 6.2 us}")
    what_if = slower(own_system(tmp_path, "infiniband-ndr"), 1, 5.0)
    expected = seconds(what_if, "all_gather", 4, 64.0, stride=8)
    assert expected > seconds(NODE, "all_gather", 4, 64.0, stride=8)
    for system in (inline, file, chain):
        assert seconds(system, "all_gather", 4, 64.0, stride=8) == pytest.approx(expected)


def test_hops_that_nobody_measured_take_what_a_link_states_beyond_infiniband(tmp_path: Path) -> None:
    """Three hops of a gather over four nodes: EFA states 25 us of a message, NDR 1.2; so does a link of one's own."""
    gather, efa = seconds(NODE, "all_gather", 4, 64.0, stride=8), load_system("aws-p5.48xlarge")
    assert seconds(efa, "all_gather", 4, 64.0, stride=8) - gather == pytest.approx(3 * 23.8e-6, rel=0.01)
    own = own_system(tmp_path, "{kind: infiniband, scope: a port, bandwidth: 50 GB/s, latency: 6.2 us}")
    assert seconds(own, "all_gather", 4, 64.0, stride=8) - gather == pytest.approx(3 * 5e-6, rel=0.01)
    later = slower(own, 1, 5.0)
    assert seconds(later, "all_gather", 4, 64.0, stride=8) - gather == pytest.approx(3 * 10e-6, rel=0.01)


def test_sixteen_mebibytes_over_efa_are_near_what_was_published() -> None:
    """50 GB/s of bus bandwidth over four nodes of P6-B200 (ml-engineering, network/README.md; no algorithm stated): a
    ring reaches that, and trees, which NCCL's tuner expects to be faster, twice as much. No parameter was fitted."""
    fabric = Fabric(load_system("aws-p6-b200.48xlarge"))
    prices = fabric.algorithm_times("all_reduce", fabric.links(1, 32), np.array([2.0**24]), ["ring", "in_switch"])
    rates = {name: 2.0 * 31 / 32 * 2**24 / float(time[0]) for name, time in prices.items()}
    assert rates["ring"] == pytest.approx(50e9, rel=0.1) and rates["in_switch"] < 2.2 * 50e9


def test_a_latency_where_none_was_stated_is_the_least_that_a_hop_takes(tmp_path: Path) -> None:
    node = load_system("dgx-b200")
    hop = collective_parameters(node, "collective.nccl").parameters.ll_hop_time
    short, long = (change_system(node, "levels[0].link.latency", f"{us} us") for us in (0.5, hop / MICROSECOND + 5.0))
    before = seconds(node, "all_gather", 8, 512.0)
    assert seconds(short, "all_gather", 8, 512.0) == before
    assert seconds(long, "all_gather", 8, 512.0) - before == pytest.approx(7 * 5e-6, rel=0.01)


def test_the_calibrated_latency_is_no_key_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="stated_latency: unknown key"):
        own_system(tmp_path, "{extend: infiniband-ndr, stated_latency: 1 us}")


@pytest.mark.slow
def test_sensitivities_show_the_latency_of_links() -> None:
    """Tensor parallelism over a node in small pieces waits for hops: 20 % of them is some of the step."""
    prediction = predict(load_model("gpt2"), NODE, Run(gpus=16, batch=1, strategy="tp=4,dp=4"))
    by_figure = {each.hardware_property: each for each in hardware_sensitivities(prediction)}
    latency, bandwidth = by_figure["link latency"], by_figure["link bandwidth"]
    assert latency.step_ratio_decreased < 1.0 < latency.step_ratio_increased
    assert bandwidth.step_ratio_increased < 1.0 < bandwidth.step_ratio_decreased
