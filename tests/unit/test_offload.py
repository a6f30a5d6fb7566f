"""Offload, data loading, clipping and the advice for runs that do not fit, worked by hand."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from paleo.errors import PlanError, SpecError
from paleo.lowering.stages_and_recompute import RecomputePolicies
from paleo.operations.base import configure_optimizer
from paleo.operations.tensor import default_precision
from paleo.predict import Prediction, predict
from paleo.pricing.calibration_lookup import parse_efficiencies
from paleo.specs.loading import validate_mapping
from paleo.specs.model import load_model
from paleo.specs.run import InputOptions, Run
from paleo.specs.system import load_system
from paleo.step.memory import (
    HOST_OPTIMIZER_BANDWIDTH_SHARE,
    Offload,
    OffloadShares,
    gradient_clipping_kernels,
    gradient_norm_axes,
    host_link_rate,
    host_update_time,
    parse_offload,
    with_offload_traffic,
)
from paleo.step.section_times import ARRAY_FIELDS, SectionTimes, layer_times
from paleo.step.waiting import input_pipeline
from paleo.studies.advice import suggest_memory_savings

H100 = load_system("dgx-h100")
BF16 = default_precision("bf16")
#: Parameters of the section, all trained.
ELEMENTS = np.array([100.0])
NONE = RecomputePolicies.uniform(np.array([1.0]), "none")


def run(**options: Any) -> Prediction:
    stated = {"gpus": 8, "batch": 1, "dtype": "bf16"} | options
    return predict(load_model("llama2-7b"), H100, validate_mapping(Run, stated, "test"))


def test_link_is_that_of_the_slot() -> None:
    """PCIe 5 x16: 63.015 GB/s each way, of which copies reach the share of the link's file."""
    assert host_link_rate(H100) == pytest.approx(63.015e9 * 0.879)


def iteration(**more: float) -> SectionTimes:
    """One section: forward 2 s, backward 3 s, weights 1 s, 100 parameters."""
    figures = {"repeat": 1, "forward": 2, "backward": 3, "weight_gradients": 1, "saved_bytes": 400} | more
    costs = {
        name: np.array([float(figures.get(name, 0))]) for name in ("repeat", *ARRAY_FIELDS) if name != "times_by_limit"
    }
    return SectionTimes(**costs, times_by_limit=np.zeros((3, 3, 1)))


def test_activations_stream_beside_their_turns() -> None:
    """400 bytes at 100 B/s: 4 s, of which 2 s hide behind forward and all behind 4 s of backward."""
    times = layer_times(iteration(), NONE)
    moved = with_offload_traffic(
        times, ELEMENTS, ELEMENTS, Offload(frozenset({"activations"}), 100.0, np.inf), BF16, OffloadShares()
    )
    assert (moved.forward_transfers[0], moved.backward_transfers[0]) == (2.0, 0.0)
    assert (moved.saved_bytes[0], moved.offloaded_bytes[0], moved.recompute_bytes[0]) == (0.0, 400.0, 800.0)


def test_activations_of_some_layers_travel_beside_all_of_them() -> None:
    """One of four layers: 400 bytes at 25 B/s take 16 s, beside four layers of 2 s forward and of 4 s backward, so that
    forward waits 8 s in all, 2 s a layer. One layer travels while others compute, which stay where they are."""
    times, link = layer_times(iteration(), NONE), Offload(frozenset({"activations"}), 25.0, np.inf)
    quarter = OffloadShares(activations=np.array([0.25]))
    moved = with_offload_traffic(times, ELEMENTS, ELEMENTS, link, BF16, quarter)
    assert (moved.forward_transfers[0], moved.backward_transfers[0]) == (2.0, 0.0)
    assert (moved.saved_bytes[0], moved.offloaded_bytes[0], moved.recompute_bytes[0]) == (300.0, 100.0, 400.0)
    none = with_offload_traffic(times, ELEMENTS, ELEMENTS, link, BF16, OffloadShares(activations=np.zeros(1)))
    assert (none.forward_transfers[0], none.saved_bytes[0], none.recompute_bytes[0]) == (0.0, 400.0, 0.0)


@pytest.mark.parametrize(("strategy", "living"), [("dp", 1), ("zero=3", 1), ("pp=2,dp=4", 2)])
def test_each_layer_more_gives_memory_back(strategy: str, living: int) -> None:
    """Of 32 layers; embedding and head stay on the device. The first of two stages holds half of the layers, for two
    microbatches."""
    stated = {"strategy": strategy, "batch": 4, "microbatch": 1}
    plain = run(**stated)
    some = [run(**stated, offload={"states": "activations", "layers": layers}) for layers in (0, 8, 16, 32)]
    assert some[0].memory == plain.memory and some[0].step_time == plain.step_time
    [block] = [section for section in plain.program.sections if section.repeat > 1]
    for (less, more), layers in zip(pairwise(some), (8, 8, 16), strict=True):
        held, host = (
            [getattr(each.step_arrays.stage_memory, part)[0, 0] for each in (less, more)]
            for part in ("activations", "host_bytes")
        )
        first = less.step_arrays.batch.assignment.layers_per_stage[0].max() / 32
        assert held[0] - held[1] == host[1] - host[0] == pytest.approx(living * first * layers * block.saved_bytes)
        assert more.step_time >= less.step_time


@pytest.mark.parametrize("layers", [1, 31])
def test_layers_of_two_policies_are_counted_together(layers: int) -> None:
    """Half of all layers, of those that recompute and of those that do not, also where one alone does."""
    options = {"recompute": "full", "recompute_layers": layers}
    plain, half = run(**options), run(**options, offload={"states": "activations", "layers": 16})
    blocks = [section for section in plain.program.sections if section.name == "block"]
    assert sorted(section.repeat for section in blocks) == [1, 31]
    kept = plain.memory.activations - half.memory.activations
    ends = run(offload={"states": "activations", "layers": 32}, **options).memory.activations
    assert kept == pytest.approx((plain.memory.activations - ends) / 2)


def test_layers_that_cannot_be_counted_are_refused() -> None:
    with pytest.raises(PlanError, match=r"offload\.layers: counts layers .* but offload is 'none'; use activations"):
        run(offload={"layers": 4})
    with pytest.raises(PlanError, match=r"offload\.layers: 33 layers; the network has 32"):
        run(offload={"states": "activations", "layers": 33})
    with pytest.raises(SpecError, match=r"offload\.layers"):
        run(offload={"states": "activations", "layers": -1})


@pytest.mark.slow
def test_a_run_that_does_not_fit_is_advised_on() -> None:
    offloads = run(batch=8, microbatch=8, offload={"states": "activations", "layers": 3})
    assert not offloads.memory.fits
    assert all(advice.prediction.run.offload.layers == 3 for advice in suggest_memory_savings(offloads))


@pytest.mark.slow
def test_a_search_counts_layers_as_a_prediction_does() -> None:
    from paleo.search.plans import search

    stated = Run(gpus=8, offload={"states": "activations", "layers": 6})
    plan = search(load_model("gpt2"), H100, stated, top=1).plans[0]
    again = predict(load_model("gpt2"), H100, plan.run)
    assert plan.run.offload.layers == 6 and plan.step_time == pytest.approx(again.step_time, rel=1e-6)
    assert plan.memory == pytest.approx(again.memory.total, rel=1e-6)


def test_a_superchip_reaches_its_host_over_nvlink() -> None:
    """450 GB/s each way of a Grace, of which copies reach 81.8 %, for both GPUs of a GB200."""
    assert host_link_rate(load_system("gb200-nvl72")) == pytest.approx(450e9 * 0.818 / 2)


def test_parameters_and_gradients_stream_both_ways_at_once() -> None:
    """200 bytes of weights in, 200 of gradients out at 20 B/s: 10 s each; forward waits 8 s, backward 6 s. Half of it
    where two ranks share them."""
    parts = Offload(frozenset({"optimizer", "parameters", "gradients"}), 20.0, 1.0)
    for share, waits in ((1.0, (8.0, 6.0)), (0.5, (3.0, 1.0))):
        moved = with_offload_traffic(
            layer_times(iteration(), NONE), ELEMENTS, ELEMENTS, parts, BF16, OffloadShares(share, share)
        )
        assert (moved.forward_transfers[0], moved.backward_transfers[0]) == waits


def test_the_host_adds_up_gradients_of_several_microbatches() -> None:
    """100 gradients of 2 bytes and their fp32 sums, read and written: 1000 bytes at 50 B/s, less 4 s of backward."""
    parts = Offload(frozenset({"optimizer", "gradients"}), 1e9, 50.0)
    moved = with_offload_traffic(
        layer_times(iteration(), NONE), ELEMENTS, ELEMENTS, parts, BF16, OffloadShares(accumulates_on_host=True)
    )
    assert moved.backward_transfers[0] == 16.0


def test_shares_follow_zero() -> None:
    """ZeRO-3 fetches and sends a rank's shards; ZeRO-1 sends shards where there is one microbatch, whole weights."""
    once, each = {"scattered": False}, {"scattered": True}
    assert OffloadShares.from_zero_stage(0, 8, 1, **once) == OffloadShares(1.0, 1.0)
    assert OffloadShares.from_zero_stage(3, 8, 2, **each) == OffloadShares(1 / 8, 1 / 8, accumulates_on_host=True)
    assert OffloadShares.from_zero_stage(1, 8, 1, **once) == OffloadShares(
        1.0, 1 / 8
    ) and OffloadShares.from_zero_stage(2, 8, 4, **once) == OffloadShares(accumulates_on_host=True)
    assert OffloadShares.from_zero_stage(2, 8, 4, **each) == OffloadShares(1.0, 1 / 8, accumulates_on_host=True)


def test_update_on_the_host_by_hand() -> None:
    """1e9 parameters: 2 GB of gradients out (0.1 s, 0.06 s hidden), 28 GB through memory (2 s) beside 2 GB back."""
    adam, one = configure_optimizer("adam"), Offload(frozenset({"optimizer"}), 20e9, 14e9)
    assert float(host_update_time(np.array(1e9), np.array(0.06), adam, BF16, one)) == pytest.approx(0.04 + 2.0)
    slow = Offload(frozenset({"optimizer"}), 0.5e9, 14e9)
    assert float(host_update_time(np.array(1e9), np.array(9.0), adam, BF16, slow)) == pytest.approx(4.0)
    both = Offload(frozenset({"optimizer", "gradients", "parameters"}), 20e9, 14e9)
    assert float(host_update_time(np.array(1e9), np.array(0.0), adam, BF16, both)) == pytest.approx(2.0)


def test_offload_moves_memory_and_loses_none() -> None:
    plain, away = run(), run(offload="optimizer")
    assert away.memory.optimizer == 0.0
    assert away.host_memory == pytest.approx(plain.memory.optimizer)
    update = plain.memory.workspace - away.memory.workspace
    assert plain.memory.total - away.memory.total == pytest.approx(plain.memory.optimizer + update)
    roots = plain.memory.optimizer / 3 - plain.memory.activations  # on the host, too
    assert update == pytest.approx(max(0.0, roots - (away.memory.workspace - away.memory.reserved)))
    everything = run(offload="optimizer,gradients,parameters,activations", strategy="zero=3")
    assert everything.host_memory == pytest.approx(sum(run(strategy="zero=3").memory.parts.values()), rel=0.1)
    assert everything.memory.parameters == everything.memory.gradients == everything.memory.activations == 0.0


@pytest.mark.parametrize("strategy", ["dp", "zero=1", "zero=3", "pp=2,dp=4", "tp=2,dp=4"])
@pytest.mark.parametrize("parts", ["optimizer", "activations", "optimizer,gradients,parameters"])
def test_offload_is_never_faster_nor_larger(strategy: str, parts: str) -> None:
    plain, away = run(strategy=strategy, batch=2), run(strategy=strategy, batch=2, offload=parts)
    if parts == "activations":
        assert away.step_time >= plain.step_time
    assert away.memory.total <= plain.memory.total * 1.001
    spent = away.breakdown
    assert spent.step_time == pytest.approx(away.step_time)
    assert min(spent.bubble, spent.optimizer, spent.communication_exposed) >= 0


def test_update_takes_no_less_than_the_memory_of_the_host() -> None:
    """28 bytes for each of 6.74e9 parameters, on eight ranks, over the node's memory bandwidth."""
    assert H100.host is not None and H100.host.memory_bandwidth is not None
    least = 28 * 6738415616 * 8 / H100.host.memory_bandwidth
    assert run(offload="optimizer").breakdown.optimizer >= least
    assert run(offload="optimizer", strategy="zero=1").breakdown.optimizer >= least / 8


def test_offload_that_cannot_be_is_said() -> None:
    with pytest.raises(SpecError, match="nearest: 'optimizer'"):
        parse_offload("optimiser", H100)
    with pytest.raises(PlanError, match="cannot go without optimizer"):
        parse_offload("gradients", H100)
    with pytest.raises(SpecError, match=r"pcie4-8gpu: host\.memory_bandwidth is not stated"):
        parse_offload("optimizer", load_system("pcie4-8gpu"))
    with pytest.raises(SpecError, match="tpu-v5e: its file has no pcie"):
        parse_offload("activations", load_system("tpu-v5e"))
    assert any("does not run" in one or "will not run" in one for one in _too_much().warnings)


def _too_much() -> Prediction:
    return predict(
        load_model("gpt3-175b"), H100, validate_mapping(Run, {"gpus": 8, "batch": 1, "offload": "optimizer"}, "test")
    )


def test_a_batch_arrives_by_hand() -> None:
    """16 samples for each of 8 ranks. Storage: 128 · 100 kB at 1 GB/s; 64 cores, 10 ms each; 4 MB each at the link."""
    wanted = validate_mapping(
        InputOptions, {"sample": "100 kB", "storage": "1 GB/s", "decode": "10 ms", "cores": 8}, "test"
    )
    fed = input_pipeline(wanted, H100, 4e6, gpus=8, replica=1, local_batch=16)
    assert float(fed.storage) == pytest.approx(0.0128)
    assert float(fed.decode) == pytest.approx(128 * 0.01 / 64)
    assert float(fed.copy) == pytest.approx(64e6 / host_link_rate(H100))
    assert (float(fed.batch_interval), fed.slowest_stage) == (float(fed.decode), "decoding")


def test_replicas_share_a_node() -> None:
    """Replicas of 2 GPUs: 4 of them on the node; of 16: the node feeds its one replica whole."""
    wanted = validate_mapping(InputOptions, {"decode": "10 ms", "cores": 1}, "test")
    for replica, samples in ((1, 8), (2, 4), (16, 1)):
        fed = input_pipeline(wanted, H100, 0.0, gpus=32, replica=replica, local_batch=1)
        assert float(fed.decode) == pytest.approx(samples * 0.01 / 8)


def test_a_step_waits_for_the_slower_of_work_and_input() -> None:
    plain = run()
    for decode in (1e-4, 100.0):
        fed = run(input={"decode": f"{decode} s"})
        arrives = 8 * decode / 112
        assert fed.step_time == pytest.approx(max(plain.step_time, arrives))
        assert fed.breakdown.input == pytest.approx(max(0.0, arrives - plain.step_time))
        assert fed.timeline.end_time == pytest.approx(fed.step_time)
    assert plain.breakdown.input == 0.0 and plain.input_pipeline is None
    assert any("input pipeline" in one for one in plain.unmodelled)
    assert not any("input pipeline" in one for one in fed.unmodelled)


def photographs(**options: object) -> Prediction:
    """AlexNet on a DGX-1, where 40 cores decode a photograph in 4.84 ms each."""
    chosen = {"gpus": 8, "batch": 1024, "dtype": "fp16", "software": "pytorch-ngc", "optimizer": "momentum", **options}
    return predict(load_model("alexnet"), load_system("dgx-1-v100"), validate_mapping(Run, chosen, "test"))


def test_photographs_are_decoded_unless_they_are_synthetic() -> None:
    loaded, synthetic = photographs(), photographs(input="none")
    assert loaded.step_time - loaded.breakdown.stragglers == pytest.approx(1024 * 4.84e-3 / 5)
    assert any("input=none" in line for line in loaded.warnings)
    assert synthetic.input_pipeline is None and synthetic.step_time < loaded.step_time
    assert not any("input=none" in line for line in synthetic.warnings)


def test_a_run_on_part_of_a_node_has_all_of_its_cores() -> None:
    arriving = photographs(gpus=2).input_pipeline
    assert arriving is not None and float(arriving.decode) == pytest.approx(1024 * 4.84e-3 / 20)


def test_small_images_software_that_is_not_known_and_constant_rates_load_nothing() -> None:
    assert photographs(software="mxnet").input_pipeline is None
    assert photographs(calibration="ideal").input_pipeline is None
    assert photographs(model={"resolution": 96}).input_pipeline is None
    assert photographs(forward_only=True).input_pipeline is None


def test_tokens_are_copied_as_int64() -> None:
    """4096 tokens of 8 bytes a sample."""
    fed = run(input={}).input_pipeline
    assert fed is not None and float(fed.copy) == pytest.approx(4096 * 8 / host_link_rate(H100))


def test_input_that_is_not_known_is_said() -> None:
    with pytest.raises(SpecError, match=r"host\.storage_bandwidth is not stated; .* or input\.storage"):
        run(input={"sample": "100 kB"})


def test_clipping_reads_gradients_once_and_scales_them_once() -> None:
    """1000 gradients of 2 bytes; of 4 where the framework sums them in fp32."""
    assert gradient_clipping_kernels(1000.0, "none", BF16) == []
    (norm,) = gradient_clipping_kernels(1000.0, "norm", BF16)
    assert (norm.bytes_read, norm.bytes_written) == (2000.0, 0.0)
    norm, scale = gradient_clipping_kernels(1000.0, "scaled", default_precision("fp32"))
    assert (norm.bytes, scale.bytes_read, scale.bytes_written) == (4000.0, 4000.0, 4000.0)
    assert gradient_norm_axes(0) == ("tp", "pp") and "dp" in gradient_norm_axes(1)


def test_clipping_is_part_of_the_optimizer() -> None:
    none, norm, scaled = (run(clip=one).breakdown.optimizer for one in ("none", "norm", "scaled"))
    least = 2 * 6738415616 / H100.device.memory.bandwidth
    assert norm - none >= least and scaled - norm >= 2 * least
    together, alone = (run(strategy="tp=8", clip="norm", gpus=8), run(strategy="tp=8", clip="none", gpus=8))
    passes = together.breakdown.optimizer - alone.breakdown.optimizer
    assert passes > least / 8  # its share of the gradients, and one number over tp


def test_software_clips() -> None:
    plain = run(software="megatron-core", clip="none").breakdown.optimizer
    assert run(software="megatron-core").breakdown.optimizer > plain
    assert run().breakdown.optimizer == run(clip="none").breakdown.optimizer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("llama2-7b", {"gpus": 8, "batch": 4}),
        ("gpt3-175b", {"gpus": 64, "global_batch": 64, "strategy": "tp=8"}),
        ("llama2-7b", {"gpus": 16, "global_batch": 64, "strategy": "pp=2", "microbatch": 8}),
    ],
)
def test_advice_is_predicted(model: str, options: dict[str, Any]) -> None:
    """Every suggestion, run as it is written, is what the advice says."""
    made = predict(load_model(model), H100, validate_mapping(Run, options, "test"))
    found = suggest_memory_savings(made)
    assert not made.memory.fits and found[0].fits
    assert [one.fits for one in found] == sorted((one.fits for one in found), reverse=True)
    assert len({one.change for one in found}) == len(found)
    words = " ".join(one.change for one in found)
    assert all(word in words for word in ("zero=", "--recompute full", "offload=optimizer", "tp=", "pp="))
    for one in found[:6]:
        again = predict(load_model(model), H100, one.prediction.run)
        assert again.memory.total == one.prediction.memory.total and again.plan.global_batch == made.plan.global_batch
        assert again.plan.gpus == made.plan.gpus


@pytest.mark.slow
def test_advice_as_written_on_the_command_line() -> None:
    """The words of a change, as options, give its run."""
    made = run(batch=4)
    for one in suggest_memory_savings(made)[:4]:
        words = one.change.split()
        stated = {
            flag.removeprefix("--").replace("-", "_"): value
            for flag, value in zip(words[::2], words[1::2], strict=True)
        }
        more = {key: int(value) if value.isdigit() else value for key, value in stated.items()}
        more = {"microbatch": made.plan.microbatch} | more
        again = run(global_batch=32, batch=None, **more)
        assert again.memory.total == pytest.approx(one.prediction.memory.total)


def test_no_advice_where_it_fits() -> None:
    assert suggest_memory_savings(predict(load_model("lenet"), H100, Run(gpus=8))) == ()


@pytest.mark.slow
def test_a_search_keeps_what_is_offloaded_away() -> None:
    from paleo.search.plans import search

    plain, away = (
        search(load_model("gpt2"), H100, Run(gpus=8, offload=parts), top=1) for parts in ("none", "optimizer")
    )
    assert away.plans[0].run.offload.states == "optimizer" and away.plans[0].step_time > plain.plans[0].step_time


def test_adam_on_a_host_takes_as_long_as_was_measured() -> None:
    """ZeRO-Offload's CPU-Adam on a DGX-2: 10e9 parameters in 2.57 s; an H100's host has 614.4 GB/s for eight ranks."""
    dgx2 = Offload(frozenset({"optimizer"}), np.inf, HOST_OPTIMIZER_BANDWIDTH_SHARE * 256e9)
    assert float(
        host_update_time(np.array(10e9), np.array(0.0), configure_optimizer("adam"), BF16, dgx2)
    ) == pytest.approx(2.57)
    assert parse_offload("optimizer", H100).host_memory_rate == pytest.approx(0.4256 * 614.4e9 / 8, rel=1e-3)


def test_constant_rates_hold_for_the_host_too() -> None:
    """``ideal`` is the datasheet: all of 63.015 GB/s a slot and of an eighth of 614.4 GB/s; shares scale them."""
    ideal = parse_offload("optimizer", H100, parse_efficiencies("ideal"))
    assert (ideal.link_rate, ideal.host_memory_rate) == (pytest.approx(63.015e9), pytest.approx(614.4e9 / 8))
    shares = parse_offload("optimizer", H100, parse_efficiencies("ppp=0.6,0.75"))
    assert (shares.link_rate, shares.host_memory_rate) == (
        pytest.approx(0.75 * 63.015e9),
        pytest.approx(0.6 * 614.4e9 / 8),
    )


def test_steps_at_the_datasheet_wait_for_all_of_the_hosts_bandwidth() -> None:
    """Adam: 28 bytes for each of 6.74e9 parameters of eight ranks over 614.4 GB/s; links over their whole slot."""
    ideal = run(offload="optimizer", calibration="ideal")
    assert ideal.breakdown.optimizer == pytest.approx(28 * 6738415616 * 8 / 614.4e9, rel=0.05)
    copied = {name: run(calibration=name, input={"copied": "1 GB"}).input_pipeline for name in ("ideal", "auto")}
    ratio = {name: float(fed.copy) for name, fed in copied.items() if fed is not None}
    assert ratio["auto"] / ratio["ideal"] == pytest.approx(1 / 0.879)


def test_offloaded_gradients_are_scaled_by_the_host() -> None:
    """Read and written in fp32 once more: 8 bytes a parameter."""
    asked = {"gpus": 1, "batch": 1, "dtype": "bf16", "offload": "optimizer,gradients,parameters"}
    model = load_model("llama3-8b")
    scaled, norm = (predict(model, H100, Run.model_validate({**asked, "clip": clip})) for clip in ("scaled", "norm"))
    more = 8 * scaled.graph.parameters / parse_offload("optimizer", H100).host_memory_rate
    assert scaled.step_time - norm.step_time == pytest.approx(more, rel=0.05)
