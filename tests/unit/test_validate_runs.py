"""Tables of runs: learning, goodput, checkpoints, stragglers, storage, MLPerf's submissions."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from paleo.errors import PlanError, SpecError
from paleo.learning.base import fit_reference_points, refit_without_batch
from paleo.specs.calibration import load_calibration
from paleo.specs.software import load_software
from paleo.specs.task import QualityEvaluation, load_task
from paleo.studies.goodput import checkpoint_pause, storage_by_name
from paleo.studies.target import _code_ratio, _evaluations, target_scaling, task_run, time_to_target
from paleo.tables.kinds._learning import StalenessTable
from paleo.tables.kinds._machines import rank_mean_times
from paleo.tables.kinds._mlperf_training import (
    MlperfTrainingTable,
    boolean_cell,
    mlperf_submission_row,
    repeated_rows,
    strategy_of_row,
    submission_system,
    submission_time_to_target,
    training_gpus_and_options,
)
from paleo.tables.kinds._vision_and_language import VisionStepTable
from paleo.tables.run_tables import find_table_kind
from paleo.tables.validation import validate_frame
from paleo.tables.validation_report import json_document

RUN = {
    "benchmark": "resnet", "round": "v2.1", "submitter": "somebody", "system": "dgx-a100-80gb",
    "device": "a100-sxm4-80gb", "n_gpus": 8, "nodes": 1, "dtype": "fp16", "global_batch": 3264, "step_ms": 118.0,
    "samples_to_target": 44840845.0, "evaluation_s": 10.0, "minutes_to_target": 28.0, "runs": 5,
}  # fmt: skip


IMAGES = {
    "source": "MLPerf Training v2.1, somebody", "model_slug": "resnet50-v1.5", "system": "dgx-a100-80gb",
    "device": "a100-sxm4-80gb", "n_gpus": 8, "nodes": 1, "dtype": "fp16", "batch_per_gpu": 408.0,
    "framework": "MXNet", "iteration_ms": 118.0, "software": "mxnet",
}  # fmt: skip


def errors_of(rows: list[dict[str, object]]) -> dict[str, object]:
    frame = pd.DataFrame(rows)
    report = validate_frame("rows.csv", frame, find_table_kind(frame.columns))
    (found,) = json_document([report])["files"]
    return dict(found)


def test_submissions_and_their_parts() -> None:
    found = errors_of([RUN, {**RUN, "submitter": "a partner with the same log"}, {**RUN, "benchmark": "minigo"}])
    assert found["kind"] == "training_runs"
    assert found["predicted"] == 1
    reasons = found["unsupported_reasons"]
    assert isinstance(reasons, dict)
    assert reasons["repeats the log of another row"] == 1
    assert any("minigo" in reason for reason in reasons)
    parts, benchmarks = found["parts"], found["by_benchmark"]
    assert isinstance(parts, dict)
    assert isinstance(benchmarks, dict)
    assert set(parts) == {"step", "samples", "evaluation"}
    assert parts["step"]["rows"] == 1
    assert parts["step"]["mape"] < 0.5
    assert benchmarks["resnet"]["mape"] < 0.5


def test_a_submission_is_the_same_step_in_a_table_of_steps() -> None:
    overall = errors_of([IMAGES])["overall"]
    assert isinstance(overall, dict)
    assert overall["mape"] < 0.1
    submission = mlperf_submission_row(IMAGES)
    assert submission is not None
    assert submission["global_batch"] == 3264
    assert submission_time_to_target(submission).step_time == submission_time_to_target(RUN).step_time
    assert mlperf_submission_row({**IMAGES, "source": "another page"}) is None


def test_an_own_calibration_prices_submissions_on_its_device_too() -> None:
    measured = load_calibration("a100-sxm4-80gb")
    slower = [entry.model_copy(update={"parameters": _slowed(entry.parameters)}) for entry in measured.entries]
    own = measured.model_copy(update={"entries": tuple(slower)})
    for table in (MlperfTrainingTable, VisionStepTable):
        row = RUN if table is MlperfTrainingTable else IMAGES
        plain, priced = table().predict_row(row), table(own).predict_row(row)
        assert priced.value > 1.05 * plain.value
        elsewhere = {**row, "system": "dgx-h100", "device": "h100-sxm5-80gb"}
        assert table(own).predict_row(elsewhere) == table().predict_row(elsewhere)


def _slowed(parameters: dict[str, float]) -> dict[str, float]:
    """Parameters of kernels with half the bandwidth, where there is one."""
    return {name: value / 2 if name == "bandwidth_fraction" else value for name, value in parameters.items()}


def test_degrees_of_submissions_are_read_as_those_of_other_steps() -> None:
    row = {"tp": 4, "pp": 2, "cp": 2, "vp": 3, "sequence_parallel": "True", "distributed_optimizer": "False"}
    software = load_software("megatron-core")
    assert strategy_of_row(row, 32, software) == "tp=4,pp=2,dp=2,cp=2,vp=3,sp"
    assert strategy_of_row({"tp": 4, "cp": 2}, 8, software) == "tp=4,cp=2,zero=1,sp", "states lie over cp, too"
    assert strategy_of_row({"pp": 2, "distributed_optimizer": 1}, 2, software) == "pp=2", "a replica alone"
    with pytest.raises(PlanError, match="which do not divide 24"):
        strategy_of_row(row, 24, software)


def test_batches_of_submissions_that_their_notes_state() -> None:
    row = {"source": "MLPerf Training v0.7, NVIDIA", "model": "BERT", "device": "v100-sxm2-32gb", "n_gpus": 8}
    logged = mlperf_submission_row({**row, "global_batch": 48.0, "notes": "logged batch 96 sequences; padding kept"})
    packed = mlperf_submission_row({**row, "source": "MLPerf Training v2.0, Dell", "global_batch": 48.0})
    assert logged is not None
    assert packed is not None
    assert (logged["global_batch"], packed["global_batch"]) == (96.0, 96.0)
    in_parentheses = {"device": "(rtx-a5000)", "n_gpus": 2, "nodes": 1}
    assert submission_system(in_parentheses).device.name == "rtx-a5000"


def test_nodes_and_counts_of_submissions() -> None:
    two = submission_system({"system": "pcie4-8gpu", "device": "a30", "n_gpus": 16, "nodes": 2})
    assert two.devices_per_node == 8
    assert two.levels[-1].ranks is None  # nodes of a catalog server are joined by a fabric
    ten = submission_system({"system": "pcie4-8gpu", "device": "a30", "n_gpus": 10, "nodes": 1})
    assert ten.devices_per_node == 10
    unet, resnet = load_task("mlperf-unet3d"), load_task("mlperf-resnet")
    lora = load_task("mlperf-llama2_70b_lora")
    assert training_gpus_and_options({"n_gpus": 8}, 56, unet) == (8, {})
    assert training_gpus_and_options({"n_gpus": 768}, 84, unet) == (336, {"strategy": "spatial=4,dp=84"})
    assert training_gpus_and_options({"n_gpus": 72}, 56, resnet) == (56, {})
    assert training_gpus_and_options({"n_gpus": 1024}, 128, lora) == (1024, {"strategy": "tp=8,dp=128,zero=1,sp"})
    assert training_gpus_and_options({"n_gpus": 1024, "tp": 4}, 128, lora) == (1024, {})
    assert boolean_cell({"sp": "False"}, "sp", True) is False
    frame = pd.DataFrame([RUN, RUN])
    assert repeated_rows(frame).tolist() == [False, True]


def test_losses_of_both_laws() -> None:
    rows = [
        {"source": "a", "parameters": 1e9, "tokens": 2e10, "loss_nats": 2.5},
        {"source": "b", "parameters": 1.07e9, "tokens": 2e10, "batch_tokens": 524288, "learning_rate": 0.00138,
         "loss_nats": 2.2255},
        {"source": "b", "parameters": 1.07e9, "tokens": 2e10, "batch_tokens": 524288, "learning_rate": 0.5,
         "loss_nats": 7.0},
    ]  # fmt: skip
    found = errors_of(rows)
    assert (found["kind"], found["predicted"], found["unsupported"]) == ("learning", 2, 1)
    by_device = found["by_device"]
    assert isinstance(by_device, dict)
    assert by_device["step-law"]["mape"] < 0.01


def test_goodput_rows_count_a_run_once() -> None:
    llama = {"model": "Llama", "gpus": 16384, "nodes": 2048, "mtbf_s": 11135.0, "interval_s": np.nan, "goodput": 0.9,
             "notes": ""}  # fmt: skip
    found = errors_of([llama, {**llama, "notes": "the run by another count"}])
    assert found["predicted"] == 1
    overall = found["overall"]
    assert isinstance(overall, dict)
    assert overall["mape"] < 0.05


def test_stragglers_and_storage() -> None:
    stage = {"trace": "AR", "ranks": 4, "steps": 22, "compute_mean_s": 25.738, "slowest_rank_mean_s": 45.293,
             "persistent_sd_s": 13.037, "independent_sd_s": 0.194, "compute_max_s": 45.284}  # fmt: skip
    overall = errors_of([stage])["overall"]
    assert isinstance(overall, dict)
    assert overall["mape"] < 0.01  # one worker was slowed on purpose: it decides
    means = rank_mean_times(ranks=4, mean=25.738, slowest=45.293, deviation=13.037)
    assert max(means) == 45.293
    fed = {"workload": "resnet50_h100", "accelerators": 20, "utilization": 0.922, "samples_per_s": 32623.8}
    overall = errors_of([fed])["overall"]
    assert isinstance(overall, dict)
    assert overall["mape"] < 0.03


def test_machines_that_start() -> None:
    rows = [{"device": "k80-die", "preemptible": spot, "boot_s": seconds, "machines": 14} for spot, seconds in
            ((0, 71.6), (0, 69.6), (1, 80.2), (1, 91.9))]  # fmt: skip
    overall = errors_of(rows)["overall"]
    assert isinstance(overall, dict)
    assert overall["mape"] < 0.06
    assert overall["coverage"] == 1.0


def test_checkpoints() -> None:
    """Worked: 14 bytes of 1.557 G parameters through one process of 1.2 GB/s; a NAS of 150 MB/s is slower still."""
    disk, nas = storage_by_name("NVMe SSD", 2e9), storage_by_name("NAS 100 MB/s")
    total = 14 * 1.557e9
    one = checkpoint_pause(total_bytes=total, software="DDP", processes=2, nodes=1, storage=disk)
    assert one == pytest.approx(total / 1.2e9)
    slow = checkpoint_pause(total_bytes=total, software="DDP", processes=2, nodes=1, storage=nas)
    assert slow == pytest.approx(total / 0.15e9)
    copied = checkpoint_pause(total_bytes=total, software="zero-3", processes=2, nodes=1, storage=nas, mode="memory")
    assert copied < 1.5
    with pytest.raises(SpecError, match="software: 'magic' is not known"):
        checkpoint_pause(total_bytes=total, software="magic", processes=2, nodes=1, storage=disk)
    with pytest.raises(SpecError, match="storage"):
        storage_by_name("a drawer")


def test_evaluations_and_ratios() -> None:
    each = QualityEvaluation(samples=10, every=100, source="worked")
    assert [_evaluations(each, samples) for samples in (50.0, 100.0, 110.0, 250.0, 300.0)] == [1, 1, 2, 3, 3]
    assert _evaluations(each.model_copy(update={"beside": True}), 1000.0) == 1
    task = load_task("mlperf-resnet")
    system = submission_system(RUN)
    code = task.code.model_copy(update={"ratio": {"all": 0.8, "Ampere": 0.7}, "samples_per_gpu": 100.0,
                                        "per_doubling": 0.1, "several_nodes": 0.2})  # fmt: skip
    ratio, _ = _code_ratio(code, system.device, samples_per_gpu=200.0, nodes=2)
    assert ratio == pytest.approx(0.7 * math.exp(0.1 + 0.2))


def test_time_to_target_is_the_sum_of_its_parts() -> None:
    task, system = load_task("mlperf:resnet"), submission_system({**RUN, "n_gpus": 64, "nodes": 8})
    points = [
        time_to_target(task, system, task_run(task, gpus, 3264, dtype="fp16"), global_batch=3264)
        for gpus in (8, 16, 32)
    ]
    for point in points:
        trained = point.samples / point.global_batch * point.step_time
        evaluated = point.evaluation_count * point.evaluation_time
        assert point.time_to_target == pytest.approx(trained + evaluated + task.code.start)
        assert point.interval[0] < point.time_to_target < point.interval[1]
    curve = target_scaling(points)
    assert [point.prediction.plan.gpus for point in curve.points] == [8, 16, 32]
    assert "fastest with" in curve.verdict


def test_convergence_tables_become_laws(tmp_path: Path) -> None:
    from paleo.calibrate.mlperf_tasks import (
        convergence_law_yaml,
        fit_convergence_law,
        reference_convergence_points,
        replace_law,
    )

    rows = [
        {"benchmark": "bert", "round": "v2.1", "global_batch_size": batch, "n": 20,
         "samples_mean": 2e6 * (1 + batch / 1e4),
         "samples_std": 1e5}
        for batch in (256, 1024, 4096)
    ]  # fmt: skip
    table = pd.DataFrame(rows)
    task = load_task("mlperf-bert")
    law = fit_convergence_law(reference_convergence_points(task, table))
    assert law.samples_min == pytest.approx(2e6)
    assert law.critical_batch == pytest.approx(1e4)
    text = "title: x\nlaw:\n  constant:\n    fixed: 1\nevaluation:\n  samples: 1\n"
    written = replace_law(text, convergence_law_yaml(law))
    assert "samples_min: 2000000" in written
    assert written.endswith("evaluation:\n  samples: 1\n")


def test_a_point_is_predicted_from_the_others() -> None:
    """On the critical-batch law itself the point left out comes back; with two others at least."""
    law = fit_reference_points([(100.0, 1100.0), (200.0, 1200.0), (400.0, 1400.0)], source="drawn")
    assert float(refit_without_batch(law, 200.0).samples(200.0)) == pytest.approx(1200.0)
    with pytest.raises(SpecError, match="too few other reference points"):
        refit_without_batch(refit_without_batch(law, 200.0), 400.0)


@pytest.mark.parametrize(
    ("cell", "value", "words"),
    [("model", "VGG", "no law of staleness"), ("steps", 10, "64,000 updates"), ("workers", 90, "outside of the range")],
)
def test_stale_runs_that_the_law_does_not_hold_for(cell: str, value: object, words: str) -> None:
    row = {"model": "ResNet-32", "dataset": "CIFAR-10", "consistency": "async", "steps": 64000, "batch_per_gpu": 128}
    row |= {"workers": 2, "device": "k80-die", "final_accuracy": 0.92}
    assert StalenessTable().predict_row(row).value == pytest.approx(0.9286 - 0.00592)
    with pytest.raises(SpecError, match=words):
        StalenessTable().predict_row({**row, cell: value})
