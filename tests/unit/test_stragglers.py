"""Waiting for the slowest rank, against drawn steps."""

from __future__ import annotations

import numpy as np
import pytest

from paleo.predict import predict
from paleo.specs.model import load_model
from paleo.specs.run import Run, replace_fields
from paleo.specs.software import load_software
from paleo.specs.system import load_system
from paleo.step.waiting import (
    describe_unmodelled_straggler_wait,
    expected_normal_maximum,
    expected_slowest_rank_time,
    straggler_wait_share,
)


@pytest.mark.parametrize(("ranks", "exact"), [(2, 0.56419), (5, 1.16296), (10, 1.53875), (100, 2.50759)])
def test_the_expected_largest_is_that_of_the_tables(ranks: int, exact: float) -> None:
    """Harter, Expected values of normal order statistics, Biometrika 48 (1961)."""
    assert float(expected_normal_maximum(float(ranks))) == pytest.approx(exact, rel=0.01 if ranks >= 8 else 0.05)


@pytest.mark.parametrize("noise", [0.05, 0.2, 0.6, 1.0])
def test_waiting_is_that_of_drawn_steps(noise: float) -> None:
    """Normal steps where noise is small, lognormal ones where it is large; both kinds of noise add as variances."""
    random = np.random.default_rng(2)
    spread = np.sqrt(np.log1p(noise**2))
    steps = (
        1.0 + noise * random.standard_normal((8_000, 32))
        if noise <= 0.3
        else np.exp(spread * random.standard_normal((8_000, 32)) - spread**2 / 2)
    )
    assert float(straggler_wait_share(32.0, noise)) == pytest.approx(steps.max(axis=1).mean() - 1.0, rel=0.12)
    parts = straggler_wait_share(32.0, noise * 0.6, noise * 0.8)
    assert float(parts) == pytest.approx(float(straggler_wait_share(32.0, noise)))


def test_one_rank_waits_for_nobody_and_arrays_equal_numbers() -> None:
    ranks = np.array([1.0, 4.0, 9.0])
    assert straggler_wait_share(ranks, 0.5)[0] == 0.0
    assert straggler_wait_share(ranks, 0.1).tolist() == [float(straggler_wait_share(n, 0.1)) for n in ranks]


def test_a_rank_known_to_be_slow_comes_before_noise() -> None:
    random = np.random.default_rng(3)
    means = np.array([1.0] * 15 + [1.3])
    steps = means * (1.0 + 0.05 * random.standard_normal((20_000, 16)))
    assert expected_slowest_rank_time(means.tolist(), 0.05) == pytest.approx(steps.max(axis=1).mean(), rel=0.02)


@pytest.mark.slow
def test_ranks_of_a_jittering_profile_wait_for_the_slowest_of_them() -> None:
    """2 % of its kernels' time by the expected largest of 8 normal numbers, 1.43; one GPU, or a forward pass alone,
    waits for none, and neither does a worker that pushes without waiting."""
    model, system, profile = load_model("lenet"), load_system("dgx-a100-80gb"), load_software("pytorch-ngc")
    even = profile.with_fields({"host.jitter": 0.0})
    for run, share in (
        (Run(gpus=8, batch=64), 0.02 * 1.434), (Run(gpus=1, batch=64), 0.0),
        (Run(gpus=8, batch=64, consistency="async"), 0.0), (Run(gpus=8, batch=64, jitter=0.015), 0.025 * 1.434),
    ):  # fmt: skip
        slow = predict(model, system, run, profile)
        quiet = predict(model, system, replace_fields(run, {"jitter": 0.0}), even)
        kernels = slow.breakdown.compute + slow.breakdown.memory_bound + slow.breakdown.launch
        assert slow.breakdown.stragglers == pytest.approx(share * kernels, rel=1e-3)
        assert slow.step_time - quiet.step_time == pytest.approx(slow.breakdown.stragglers, abs=1e-12)
        assert slow.timeline.end_time == pytest.approx(slow.step_time)
        assert quiet.breakdown.communication_exposed == slow.breakdown.communication_exposed
    passes = [
        predict(model, system, Run(gpus=8, batch=64, forward_only=True), software) for software in (profile, even)
    ]
    assert passes[0].step_time == passes[1].step_time


def test_waiting_that_is_left_out_is_named_with_its_size() -> None:
    """Of 16,384 ranks that are as unequal as traced ones the slowest is 4 deviations of 1.53 % late; of eight 1.4."""
    alike = Run(gpus=8, batch=2)
    said = describe_unmodelled_straggler_wait(alike, load_software("megatron-core"), 16384.0, 1.0)
    assert said == "stragglers: as unequal as in traced jobs (--jitter traces) ranks wait 6.1% of the step"
    assert "2.2%" in describe_unmodelled_straggler_wait(alike, load_software("megatron-core"), 8.0, 1.0)
    for run, ranks in ((alike, 1.0), (Run(gpus=8, jitter=0.01), 8.0), (Run(gpus=8, forward_only=True), 8.0)):
        assert describe_unmodelled_straggler_wait(run, load_software("megatron-core"), ranks, 1.0) == ""
