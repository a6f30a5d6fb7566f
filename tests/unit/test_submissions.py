"""What tasks learn from submissions, on rows whose truth is known; baselines worked by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest

from paleo.calibrate.mlperf_tasks import (
    SubmissionRow,
    errors_by_benchmark,
    fit_evaluation,
    fit_sample_ratio,
    fit_step_time_ratio,
    fit_training_task,
    gpu_ranking_accuracy,
    is_mlperf_task_table,
    leave_one_round_out,
    replace_task_blocks,
    step_residual,
)
from paleo.parallel.plan import Plan
from paleo.specs.device import load_device
from paleo.specs.task import load_task
from paleo.studies.target import TargetTime, _code_ratio, _evaluation_time
from paleo.tables.kinds._mlperf_training import (
    SENTENCE_PAIRS_PER_ROW,
    other_round_baselines,
    peak_flops_of_devices,
    samples_in_task_unit,
    submission_time_to_target,
)

ROUNDS = ["v1.0", "v1.1", "v2.0"]
#: Seconds of each run that are neither steps nor evaluations.
START = 7.0
ARCHITECTURES = {"a30": "Ampere", "h100-sxm5-80gb": "Hopper", "tpu-v4": "TPU v4"}


def row(
    index: int,
    device: str,
    round_name: str,
    *,
    ratio: float,
    per_gpu: float = 400.0,
    samples: float = 1.1,
    kind: str = "gpu",
) -> SubmissionRow:
    """A submission that takes ``ratio`` times as long a step as predicted, and ``samples`` times the law's samples."""
    task = load_task("mlperf-resnet").for_device_kind(kind)
    prediction = SimpleNamespace(
        system=SimpleNamespace(
            device=SimpleNamespace(name=device, architecture=ARCHITECTURES[device], kind=kind), devices_per_node=8
        ),
        plan=SimpleNamespace(gpus=8, global_batch=8 * per_gpu, local_batch=per_gpu, mesh=SimpleNamespace(replicas=8)),
        step_time=0.1,
        interval=(0.09, 0.11),
        warnings=(),
    )
    point = SimpleNamespace(task=task, prediction=prediction, forward_time=0.03, global_batch=8 * per_gpu)
    needed = float(task.law.samples(8 * per_gpu)) * samples
    evaluation = 9 * 50000 / (8 * per_gpu) * 0.03 * ratio * 2.0
    return SubmissionRow(index, cast(TargetTime, point), round_name, True, 5.0, 0.1 * ratio, needed, evaluation, 9.0,
               needed / (8 * per_gpu) * 0.1 * ratio + evaluation + START, START)  # fmt: skip


ROWS = [
    row(index, device, name, ratio=ratio)
    for index, (device, ratio, name) in enumerate(
        (device, ratio, name)
        for device, ratio in (("a30", 0.8), ("h100-sxm5-80gb", 0.6))
        for name in ROUNDS
        for _ in range(6)
    )
]


def test_ratios_by_device_and_architecture() -> None:
    code = fit_step_time_ratio(ROWS, ROUNDS, "v2.0")
    assert code.ratio["a30"] == pytest.approx(0.8, rel=0.03)
    assert code.ratio["h100-sxm5-80gb"] == pytest.approx(0.6, rel=0.03)
    assert 0.6 < code.ratio["all"] < 0.8
    unknown = cast(Any, SimpleNamespace(name="b200", architecture="Blackwell"))
    ratio, sigma = _code_ratio(code, unknown, samples_per_gpu=400.0, nodes=1)
    assert ratio == code.ratio["all"]
    assert sigma > code.residual  # the spread between architectures is added


def test_samples_and_evaluations() -> None:
    submissions = fit_sample_ratio(ROWS, ROUNDS, "v2.0")
    assert submissions is not None
    assert submissions.ratio == pytest.approx(1.1, rel=1e-3)
    assert submissions.residual == pytest.approx(0.0, abs=1e-3)
    evaluation = fit_evaluation(ROWS, fit_step_time_ratio(ROWS, ROUNDS, "v2.0"), ROUNDS, "v2.0")
    total = evaluation.work * 50000 / 3200 * 0.03 * 0.8 + evaluation.fixed
    assert total == pytest.approx(50000 / 3200 * 0.03 * 0.8 * 2.0, rel=0.2)


def test_every_round_is_predicted_from_the_others() -> None:
    found = list(leave_one_round_out(ROWS, ROUNDS))
    assert len(found) == len(ROWS)
    errors = [abs(point.step_time / submission.step_time - 1) for submission, point in found]
    assert max(errors) < 0.05
    assert step_residual(ROWS, ROUNDS) < 0.05
    assert step_residual([one for one in ROWS if one.round_name == "v1.0"], ROUNDS) == 0.15


def test_errors_and_order_of_submissions() -> None:
    """Worked: minutes 10 and 30 % off on GPUs, 50 on a TPU; of two pairs of unlike cards one is turned round, and two
    cards alike make no pair."""
    errors = {"step": 0.2, "samples": [0.1, np.nan, 0.3, 0.1], "inside": [1.0, 0.0, 1.0, 0.0]}
    errors |= {"minutes": [0.1, 0.3, 0.2, 0.5], "scaled_best": 0.4, "one_utilisation": 0.3, "nearest": np.nan}
    submissions = pd.DataFrame(
        {
            "benchmark": "x", "round": "v1.0", "gpus": 8, "kind": ["gpu", "gpu", "gpu", "tpu"],
            "device": ["a", "b", "b", "t"], "measured": [10.0, 11.0, 20.0, 5.0], "predicted": [11.0, 10.0, 20.0, 9.0],
        }
        | errors
    )  # fmt: skip
    known = errors_by_benchmark(submissions)
    assert list(known.index) == ["x", "all on GPUs", "all on TPUs"] and list(known["rows"]) == [3, 3, 1]
    assert known.loc["x", "minutes"] == pytest.approx(0.2) and known.loc["x", "samples"] == pytest.approx(0.2)
    assert known.loc["x", "baseline"] == pytest.approx(0.3) and known.loc["all on TPUs", "inside"] == 0.0
    assert gpu_ranking_accuracy(submissions) == (0.5, 2)


def test_software_gets_faster_from_round_to_round() -> None:
    """Steps a tenth shorter each round: the trend is found, and a left-out round lies on it."""
    faster = [replace(row, step_time=row.step_time * 0.9 ** ROUNDS.index(row.round_name)) for row in ROWS]
    code = fit_step_time_ratio(faster, ROUNDS, "v2.0")
    assert code.per_round == pytest.approx(np.log(0.9), abs=0.02)
    assert code.ratio["a30"] == pytest.approx(0.8 * 0.81, rel=0.03)
    errors = [
        abs(point.step_time / submission.step_time - 1) for submission, point in leave_one_round_out(faster, ROUNDS)
    ]
    assert max(errors) < 0.06


def test_a_device_of_old_rounds_keeps_its_own_ratio() -> None:
    """A card that was handed in once, in the first round, and took twice as long as others do."""
    rows = [*ROWS, *(row(100 + index, "tpu-v4", "v1.0", ratio=1.4) for index in range(3))]
    later = [replace(each, round_name="v2.0") if each.round_name == "v1.1" else each for each in rows]
    code = fit_step_time_ratio(later, ROUNDS, "v2.0")
    assert code.ratio["tpu-v4"] == pytest.approx(1.4, rel=0.15)


def test_a_run_is_longer_by_what_is_neither_step_nor_evaluation() -> None:
    code = fit_step_time_ratio(ROWS, ROUNDS, "v2.0")
    assert code.start == START
    assert fit_step_time_ratio([replace(each, other_time=float("nan")) for each in ROWS], ROUNDS, "v2.0").start == 0.0
    errors = [
        point.time_to_target / submission.time_to_target - 1 for submission, point in leave_one_round_out(ROWS, ROUNDS)
    ]
    assert max(map(abs, errors)) < 0.05


def test_submissions_that_state_no_format_have_that_of_their_round() -> None:
    """From v4.0 on LoRA's configurations are fp8 on devices that have it; DeepSpeed's engine has no eight bits."""
    stated = {
        "benchmark": "llama2_70b_lora", "round": "v4.1", "system": "dgx-h100", "device": "h100-sxm5-80gb", "n_gpus": 8,
        "nodes": 1, "global_batch": 8, "tp": 4, "pp": 1, "cp": 1, "micro_batch": 1,
    }  # fmt: skip
    rows = {"NeMo": {}, "DeepSpeed N1": {}, "stated": {"dtype": "bf16"}}
    formats = [
        submission_time_to_target({**stated, "framework": name, **more}).prediction.plan.dtype
        for name, more in rows.items()
    ]
    assert formats == ["fp8", "bf16", "bf16"]
    lora = load_task("mlperf:llama2_70b_lora")
    assert lora.at_mlperf_round("v3.1").submission_dtype(load_device("h100-sxm5-80gb")) is None


def test_replicas_evaluate_whole_samples() -> None:
    """Worked: 42 volumes on 84 replicas of one volume each take one forward pass, not half of one; on 8, six."""
    evaluation = load_task("mlperf-unet3d").evaluation.model_copy(update={"samples": 42, "work": 2.0, "fixed": 0.5})
    task = load_task("mlperf-unet3d").model_copy(update={"evaluation": evaluation})
    plans = [cast(Plan, SimpleNamespace(mesh=SimpleNamespace(replicas=count), local_batch=1)) for count in (84, 8)]
    assert [_evaluation_time(task, 1.0, plan) for plan in plans] == [0.5 + 2.0, 0.5 + 12.0]


def test_code_as_of_another_round() -> None:
    """Worked: two rounds before at a gain of a tenth each; no further than two rounds ahead."""
    code = load_task("mlperf-resnet").code
    code = code.model_copy(update={"ratio": {"all": 0.81}, "per_round": float(np.log(0.9)), "round": "v2.0"})
    assert code.at_mlperf_round("v1.0").ratio["all"] == pytest.approx(1.0)
    assert (
        code.at_mlperf_round("v3.0").ratio["all"] == code.at_mlperf_round("v5.1").ratio["all"] == pytest.approx(0.81**2)
    )
    assert code.at_mlperf_round("unknown") is code


def test_platforms_are_fitted_to_their_own_rows() -> None:
    """Rows of TPUs that take 1.5 times as long as predicted leave the ratio of GPUs alone, and the other way round."""
    of_tpus = [row(100 + index, "tpu-v4", "v2.0", ratio=1.5, kind="tpu") for index in range(4)]
    task = fit_training_task(load_task("mlperf-resnet"), [*ROWS, *of_tpus], ROUNDS, "v2.0")
    assert set(task.code.ratio) == set(fit_step_time_ratio(ROWS, ROUNDS, "v2.0").ratio)
    assert task.for_device_kind("tpu").code.ratio["tpu-v4"] == pytest.approx(1.5, rel=0.01)
    assert task.for_device_kind("tpu").code.software == "xla-tpu@2021" and task.for_device_kind("gpu") is task


def test_a_platform_without_submissions_keeps_what_gpus_teach() -> None:
    task = fit_training_task(load_task("mlperf-resnet"), ROWS, ROUNDS, "v2.0")
    assert task.submissions is not None and task.for_device_kind("tpu").submissions == task.submissions
    assert not task.for_device_kind("tpu").code.ratio and task.for_device_kind("tpu").evaluation == task.evaluation


def test_task_files_keep_all_else() -> None:
    task = load_task("mlperf-resnet").model_copy(update={"code": fit_step_time_ratio(ROWS, ROUNDS, "v2.0")})
    text = "title: x\nevaluation:\n  samples: 1\ncode:\n  software: y\nsubmissions:\n  rows: 1\nsource: z\n"
    written = replace_task_blocks(text, task)
    assert written.startswith("title: x\nevaluation:\n  samples: 50000\n")
    assert written.endswith("source: z\n")
    assert written.count("\nsubmissions:") == 1 and written.count("platforms:") == 1
    assert replace_task_blocks(written, task) == written
    assert is_mlperf_task_table({"benchmark", "round", "device", "n_gpus", "global_batch", "minutes_to_target", "more"})
    assert not is_mlperf_task_table({"m", "n", "k"})


def test_baselines_keep_device_time() -> None:
    """Worked: 10 minutes on 8 A100 are 5 on 16, and 312 / 989 of that on H100 (dense peaks in 16 bits)."""
    rows = pd.DataFrame(
        {
            "benchmark": "x", "round": ["v1.0", "v1.0", "v1.1", "v1.1"], "n_gpus": [8, 8, 16, 8],
            "device": ["a100-sxm4-80gb", "a100-sxm4-80gb", "a100-sxm4-80gb", "h100-sxm5-80gb"],
            "minutes_to_target": [10.0, 12.0, 6.0, 4.0],
        }
    )  # fmt: skip
    found = other_round_baselines(rows)
    share = peak_flops_of_devices(pd.Series(["a100-sxm4-80gb", "h100-sxm5-80gb"]))
    assert found["scaled_best"].iloc[2] == pytest.approx(5.0)
    assert found["scaled_best"].iloc[3] == pytest.approx(10.0 * share[0] / share[1])
    assert found["one_utilisation"].iloc[2] == pytest.approx(5.5)
    assert np.isfinite(found["nearest"]).all()


@pytest.mark.parametrize(
    ("device", "column", "value", "pairs"),
    [
        ("v100-sxm2-16gb", "global_batch", 81920.0, 81920.0 / 28),  # tokens
        ("v100-sxm2-16gb", "global_batch", 2048.0, 2048.0),
        ("tpu-v4", "global_batch", 512.0, 512.0 * SENTENCE_PAIRS_PER_ROW),  # packed rows
        ("tpu-v4", "samples_to_target", 1699020.0, 13770303.0),  # three epochs of packed rows
        ("tpu-v3", "samples_to_target", 13770303.0, 13770303.0),
    ],
)
def test_the_transformer_counts_pairs(device: str, column: str, value: float, pairs: float) -> None:
    """Three epochs are three epochs, whatever they are counted in; other benchmarks count what their tasks do."""
    cells = {"benchmark": "transformer", "round": "v0.7", "device": device, column: value}
    assert samples_in_task_unit(cells, column) == pytest.approx(pairs)
    assert samples_in_task_unit({**cells, "benchmark": "gnmt"}, column) == value
    assert np.isnan(samples_in_task_unit({**cells, column: None}, column))


def test_recommenders_of_v07_on_tpus_count_evaluations_for_epochs() -> None:
    """17 of 20 evaluations of an epoch of 4,195,197,692 clicks."""
    cells = {"benchmark": "dlrm", "round": "v0.7", "device": "tpu-v4", "samples_to_target": 17 * 4195197692.0}
    assert samples_in_task_unit(cells, "samples_to_target") == pytest.approx(17 / 20 * 4195197692, rel=1e-6)
    assert samples_in_task_unit({**cells, "samples_to_target": 3.8e9}, "samples_to_target") == 3.8e9
