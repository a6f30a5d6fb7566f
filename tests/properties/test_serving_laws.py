"""Laws of a serving replica on random loads, and its closed form against its simulation."""

from __future__ import annotations

import numpy as np
import pytest

from paleo.serving.formats import Formats
from paleo.serving.forward_lowering import Sharding
from paleo.serving.iteration_times import iteration_tables
from paleo.serving.requests import sample_requests
from paleo.serving.simulation import simulate_requests
from paleo.serving.steady_state import (
    BatchingLimits,
    RequestLengths,
    closed_loop_steady_state,
    saturated_steady_state,
    steady_state_at_rate,
)
from paleo.specs.model import load_model
from paleo.specs.system import load_system

EDGE = 300


@pytest.fixture(scope="module")
def replicas():
    layouts = (
        ("llama3-8b", "dgx-h100", Sharding(), Formats()),
        ("llama3-70b", "dgx-h100", Sharding(4), Formats("fp8", "fp8")),
        ("qwen3-30b-a3b", "dgx-a100-80gb", Sharding(2), Formats()),
    )
    return [iteration_tables(load_model(model), load_system(system), *others) for model, system, *others in layouts]


def broken_laws(replica, seed):
    """The laws that a random run breaks: conservation, places, the cache, Little's law, and monotony in the rate."""
    random = np.random.default_rng(seed)
    prompt, answer, capacity = random.uniform(1, 1500), random.uniform(1, 300), random.uniform(8_000, 40_000)
    spreads = random.uniform(0, 1, 2)
    limits = BatchingLimits(
        int(random.integers(64, 4096)), int(random.integers(1, 256)), mixes_prefill=bool(random.integers(2))
    )
    users = int(random.integers(1, 40)) if seed % 4 == 0 else None
    requests = sample_requests(
        int(random.integers(1, 120)), input_tokens=prompt, output_tokens=answer, rate=random.uniform(0.5, 200),
        input_variation=spreads[0], output_variation=spreads[1], arrivals="closed" if users else "poisson", seed=seed,
    )  # fmt: skip
    capacity = max(capacity, float((requests.prompt_tokens + requests.answer_tokens).max()) + 2)
    result = simulate_requests(replica, limits, requests, capacity=capacity, reservation=random.uniform(), users=users)
    decoded = result.mean_decoding_sequences * result.iterations
    rates = np.geomspace(0.01, 2.0, 9) * float(
        saturated_steady_state(replica, limits, RequestLengths(prompt, answer, *spreads), 30.0).requests_per_s
    )
    steady = steady_state_at_rate(replica, limits, RequestLengths(prompt, answer, *spreads), 30.0, rates)
    stable = steady.utilisation < 1
    turns = np.maximum(answer - 1.0, 1.0)
    laws = {
        "every request ends": bool(np.isfinite(result.finish).all() and (result.ttft > 0).all()),
        "the last token comes after the first": bool((result.latency >= result.ttft - 1e-12).all()),
        "tokens are conserved": result.tokens == requests.answer_tokens.sum()
        and abs(decoded + result.preemptions - (requests.answer_tokens - 1).sum()) < 1e-6 * max(decoded, 1.0),
        "the cache holds": result.peak_cached_tokens <= capacity,
        "places hold": result.mean_decoding_sequences <= np.asarray(limits.max_sequences),
        "users wait": users is None or result.latency.sum() <= users * result.makespan * (1 + 1e-9),
        "Little's law": np.allclose(
            steady.decoding_sequences, steady.requests_per_s * turns * steady.iteration_time, rtol=1e-6
        ),
        "slower under more load": bool(np.all(np.diff(steady.latency[stable]) >= -1e-9)),
        "more is never less": bool(np.all(np.diff(steady.requests_per_s) >= -1e-9)),
    }
    return [law for law, holds in laws.items() if not holds]


@pytest.mark.slow
@pytest.mark.parametrize("runs", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_laws_hold_on_random_runs(replicas, runs):
    broken = {seed: broken_laws(replicas[seed % 3], seed) for seed in range(runs)}
    assert not {seed: laws for seed, laws in broken.items() if laws}


def relative_errors(replica, seed):
    """Closed form over simulation, less 1, of a random stable load; None where one request does not fit."""
    random = np.random.default_rng(seed)
    prompt, answer = random.uniform(20, 4000), random.uniform(10, 800)
    spreads, share = random.uniform(0, 1, 2), random.uniform(0.05, 0.8)
    limits = BatchingLimits(
        int(random.integers(1024, 16384)), int(random.integers(16, 512)), mixes_prefill=bool(random.integers(2)),
        host_time=random.uniform(0, 1e-3), time_per_request=float(random.choice([0.0, 0.002, 0.01])),
    )  # fmt: skip
    capacity, lengths = random.uniform(30, 400) * (prompt + answer), RequestLengths(prompt, answer, *spreads)
    places = capacity / float(lengths.mean_cached_tokens)
    rate = share * float(saturated_steady_state(replica, limits, lengths, places).requests_per_s)
    requests = sample_requests(
        3000, input_tokens=prompt, output_tokens=answer, rate=rate, input_variation=spreads[0],
        output_variation=spreads[1], seed=seed,
    )  # fmt: skip
    if float((requests.prompt_tokens + requests.answer_tokens).max()) + 2 > capacity:
        return None
    state = steady_state_at_rate(replica, limits, lengths, places, rate)
    result = simulate_requests(replica, limits, requests, capacity=capacity, reservation=0.0)
    finish, arrival = np.sort(result.finish)[[EDGE, -EDGE]], np.sort(requests.arrival)[[EDGE, -EDGE]]
    errors = [float(state.requests_per_s) / rate * np.diff(finish)[0] / np.diff(arrival)[0] - 1.0]
    for part in ("ttft", "tpot", "latency"):
        values = getattr(result, part)[EDGE:-EDGE]
        values = values[np.isfinite(values)]
        errors.append(float(getattr(state, part)) / values.mean() - 1.0)
        errors.append(float(state.percentile(part, 99)) / np.percentile(values, 99) - 1.0)
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("loads", [8, pytest.param(300, marks=pytest.mark.slow)])
def test_closed_form_agrees_with_simulation_on_random_stable_loads(replicas, loads):
    errors = [relative_errors(replicas[seed % 3], seed) for seed in range(loads)]
    rate, ttft, ttft99, tpot, tpot99, latency, latency99 = np.abs([each for each in errors if each]).mean(axis=0)
    print(f"{rate:.3f} {ttft:.3f} {tpot:.3f} {latency:.3f}; p99 {ttft99:.3f} {tpot99:.3f} {latency99:.3f}")
    assert rate < 0.03
    assert max(ttft, tpot, latency) < 0.08
    assert np.mean([ttft99, tpot99, latency99]) < (0.2 if loads < 20 else 0.12)
    assert loads < 20 or max(ttft99, tpot99, latency99) < 0.15


@pytest.mark.slow
def test_a_closed_loop_never_exceeds_its_users(replicas):
    state = closed_loop_steady_state(
        replicas[0], BatchingLimits(8192, 1024), RequestLengths(500, 100), 400.0, np.array([1.0, 8.0, 64.0]), 1.0
    )
    assert np.all(state.requests_per_s * (state.latency + 1.0) <= np.array([1.0, 8.0, 64.0]) * (1 + 1e-6))
