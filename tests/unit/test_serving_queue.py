"""Fixed point and simulation of a serving replica: laws that hold exactly, and each against the other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import paleo
from paleo.errors import SpecError
from paleo.serving.formats import Formats
from paleo.serving.forward_lowering import Sharding
from paleo.serving.iteration_times import iteration_tables
from paleo.serving.requests import Requests, read_trace, sample_requests
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


@pytest.fixture(scope="module")
def llama():
    return iteration_tables(load_model("llama3-8b"), load_system("dgx-h100"), Sharding(), Formats())


LIMITS = BatchingLimits(8192, 1024, host_time=0.3e-3)


def test_littles_law_holds_in_the_fixed_point(llama):
    rate = np.array([1.0, 5.0, 20.0, 30.0])
    state = steady_state_at_rate(llama, LIMITS, RequestLengths(500, 200), 700.0, rate)
    assert state.decoding_sequences == pytest.approx(state.requests_per_s * 199 * state.iteration_time, rel=1e-6)
    assert np.all(np.diff(state.tpot) > 0)
    assert np.all(np.diff(state.ttft) > 0)
    assert state.requests_per_s == pytest.approx(rate)


def test_above_capacity_waiting_is_without_end_and_throughput_full(llama):
    full = saturated_steady_state(llama, LIMITS, RequestLengths(500, 200), 700.0)
    state = steady_state_at_rate(llama, LIMITS, RequestLengths(500, 200), 700.0, 2.0 * full.requests_per_s)
    assert float(state.utilisation) == pytest.approx(2.0)
    assert np.isinf(state.queueing_time)
    assert float(state.requests_per_s) == pytest.approx(float(full.requests_per_s))


def test_one_request_alone_takes_its_iterations(llama):
    one = Requests(np.zeros(1), np.array([1000.0]), np.array([11.0]))
    result = simulate_requests(llama, LIMITS, one, capacity=1e5)
    prompt = float(llama.iteration_time(decoded=0, cached=1, chunks=1, length=1000)) + LIMITS.host_time
    token = float(llama.iteration_time(decoded=1, cached=1006)) + LIMITS.host_time
    assert result.ttft[0] == pytest.approx(prompt, rel=1e-3)
    assert result.latency[0] == pytest.approx(prompt + 10 * token, rel=1e-3)
    assert result.iterations == 11


def test_launches_bound_batches_beyond_the_largest_graph(llama):
    issued = replace(llama, launch_time=0.5, kernels=replace(llama.kernels, kernel_launch_time=1e-3, largest_graph=4))
    small, large = (sample_requests(count, input_tokens=50, output_tokens=11, arrivals="at once") for count in (4, 5))
    spans = [simulate_requests(issued, LIMITS, burst, capacity=1e5).makespan for burst in (small, large)]
    assert spans[0] == pytest.approx(0.5, rel=0.2)  # the prompts' iteration, then ten in a graph
    assert spans[1] == pytest.approx(11 * (0.5 + LIMITS.host_time))


def test_a_host_that_is_not_overlapped_adds_a_time_for_each_sequence(llama):
    burst, number, each = sample_requests(64, input_tokens=50, output_tokens=101, arrivals="at once"), 64, 1e-4
    slower = replace(LIMITS, host_time_per_sequence=each)
    spans = [simulate_requests(llama, limits, burst, capacity=1e5).makespan for limits in (LIMITS, slower)]
    assert spans[1] - spans[0] == pytest.approx(100 * number * each, rel=0.02)
    rate = 20.0
    states = [steady_state_at_rate(llama, limits, RequestLengths(50, 101), 700.0, rate) for limits in (LIMITS, slower)]
    added = [
        float(state.iteration_time) - float(state.decoding_sequences) * each * place
        for place, state in enumerate(states)
    ]
    assert added[1] == pytest.approx(added[0], rel=0.1)


def test_requests_of_one_instant_leave_the_server_together(llama):
    front = BatchingLimits(8192, 1024, time_per_request=0.01)
    burst = sample_requests(100, input_tokens=50, output_tokens=4, arrivals="at once")
    first = simulate_requests(llama, front, burst, capacity=1e5).ttft
    assert first.min() > 100 * front.time_per_request
    assert first.max() - first.min() < 0.1
    spaced = Requests(
        np.arange(100) / 50.0, burst.prompt_tokens, burst.answer_tokens
    )  # one every 20 ms: none waits for another
    assert simulate_requests(llama, front, spaced, capacity=1e5).ttft.max() < 0.06


@pytest.mark.slow
def test_a_closed_loop_of_one_user_is_one_request_after_another(llama):
    alone = closed_loop_steady_state(llama, LIMITS, RequestLengths(1000, 101), 100.0, 1)
    requests = sample_requests(20, input_tokens=1000, output_tokens=101, arrivals="closed")
    result = simulate_requests(llama, LIMITS, requests, capacity=1e5, users=1)
    assert float(alone.requests_per_s) == pytest.approx(result.requests_per_s, rel=0.03)


@pytest.mark.parametrize(("prompt", "answer", "rate"), [(500, 200, 5.0), (500, 200, 25.0), (2000, 300, 5.0)])
def test_fixed_point_and_simulation_agree(llama, prompt, answer, rate):
    state = steady_state_at_rate(llama, LIMITS, RequestLengths(prompt, answer), 4e5 / (prompt + answer / 2), rate)
    requests = sample_requests(3000, input_tokens=prompt, output_tokens=answer, rate=rate)
    result = simulate_requests(llama, LIMITS, requests, capacity=4e5, reservation=0.0)
    middle = slice(300, 2700)
    assert float(state.tpot) == pytest.approx(np.mean(result.tpot[middle]), rel=0.05)
    assert float(state.ttft) == pytest.approx(np.mean(result.ttft[middle]), rel=0.12)


@pytest.mark.parametrize("seed", range(6))
def test_conservation_and_capacity(llama, seed):
    random = np.random.default_rng(seed)
    capacity = float(random.integers(6_000, 30_000))
    requests = sample_requests(
        200,
        input_tokens=float(random.integers(20, 1500)),
        output_tokens=float(random.integers(2, 400)),
        rate=float(random.uniform(1, 200)),
        input_variation=0.5,
        output_variation=0.5,
        seed=seed,
    )
    limits = BatchingLimits(int(random.integers(256, 4096)), int(random.integers(8, 256)), mixes_prefill=bool(seed % 2))
    result = simulate_requests(llama, limits, requests, capacity=capacity, reservation=[0.0, 0.5, 1.0][seed % 3])
    assert np.all(np.isfinite(result.finish))
    assert np.all(result.ttft > 0)
    assert np.all(result.latency >= result.ttft)
    assert result.peak_cached_tokens <= capacity
    assert result.tokens == requests.answer_tokens.sum()


def test_a_full_cache_stops_requests_and_reservation_does_not(llama):
    requests = sample_requests(50, input_tokens=100, output_tokens=400, arrivals="at once")
    tight = simulate_requests(llama, LIMITS, requests, capacity=5_000, reservation=0.0)
    reserved = simulate_requests(llama, LIMITS, requests, capacity=5_000, reservation=1.0)
    assert tight.preemptions > 0
    assert reserved.preemptions == 0
    with pytest.raises(SpecError, match="longer than the cache"):
        simulate_requests(llama, LIMITS, requests, capacity=300)


@pytest.mark.parametrize(
    ("prompt", "answer", "variation"), [(1000, 300, 0.0), (1000, 300, 0.5), (500, 500, 0.0), (4000, 400, 0.3)]
)
def test_a_saturated_replica_computes_stopped_requests_again(llama, prompt, answer, variation):
    lengths, capacity = RequestLengths(prompt, answer, variation, variation), 450e3
    limits = replace(LIMITS, cache_may_overflow=True)
    places = capacity / float(lengths.mean_cached_tokens)
    state = saturated_steady_state(llama, limits, lengths, places)
    requests = sample_requests(
        int(12 * places), input_tokens=prompt, output_tokens=answer, arrivals="at once", input_variation=variation,
        output_variation=variation,
    )  # fmt: skip
    result = simulate_requests(llama, limits, requests, capacity=capacity, reservation=0.0)
    finish = np.sort(result.finish)
    first, last = len(finish) // 5, 4 * len(finish) // 5
    rate = (last - first) / (finish[last] - finish[first])
    assert result.preemptions > 0
    assert float(state.requests_per_s) == pytest.approx(rate, rel=0.04)
    whole = saturated_steady_state(llama, LIMITS, lengths, places)
    assert float(whole.requests_per_s) > float(state.requests_per_s)
    few = saturated_steady_state(llama, limits, lengths, 2048.0)  # the sequences of an iteration bind, not the cache
    assert float(few.requests_per_s) == float(saturated_steady_state(llama, LIMITS, lengths, 2048.0).requests_per_s)


@pytest.mark.parametrize("variation", [0.0, 0.5, 1.0])
def test_whole_requests_that_are_reserved_are_the_longer_ones_at_any_time(variation):
    layout = paleo.serve("llama3-8b", "dgx-h100", gpus=1, engine="tensorrt-llm").service.best.layout
    lengths = RequestLengths(1000, 400, 0.0, variation)
    places = layout.max_cached_sequences(lengths)
    state = saturated_steady_state(layout.iteration_tables, layout.batching(), lengths, places)
    capacity = layout.memory.max_cached_tokens(1400.0)
    requests = sample_requests(
        int(12 * places), input_tokens=1000, output_tokens=400, arrivals="at once", output_variation=variation
    )
    result = simulate_requests(layout.iteration_tables, layout.batching(), requests, capacity=capacity, reservation=1.0)
    finish = np.sort(result.finish)
    first, last = len(finish) // 5, 4 * len(finish) // 5
    rate = (last - first) / (finish[last] - finish[first])
    assert float(state.requests_per_s) == pytest.approx(rate, rel=0.05)


def test_cached_prefixes_shorten_the_first_token(llama):
    cold = steady_state_at_rate(llama, LIMITS, RequestLengths(2000, 100), 200.0, 5.0)
    warm = steady_state_at_rate(llama, LIMITS, RequestLengths(2000, 100, prefix_hit_share=0.9), 200.0, 5.0)
    assert float(warm.ttft) < 0.5 * float(cold.ttft)


def test_traces_of_several_forms(tmp_path):
    own = tmp_path / "own.csv"
    own.write_text("arrival_s,input_tokens,output_tokens\n2.0,10,5\n1.0,20,7\n")
    trace = read_trace(own)
    assert trace.arrival.tolist() == [0.0, 1.0]
    assert trace.prompt_tokens.tolist() == [20.0, 10.0]
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:47.0,1,2\n"
    )
    assert read_trace(azure).arrival[1] == pytest.approx(0.31941)
    mooncake = tmp_path / "mooncake.jsonl"
    mooncake.write_text(
        '{"timestamp": 0, "input_length": 6755, "output_length": 500, "hash_ids": [0]}\n'
        '{"timestamp": 27482, "input_length": 7319, "output_length": 490, "hash_ids": [0, 1]}\n'
    )
    assert read_trace(mooncake).arrival.tolist() == [0.0, 27.482]
    burst = tmp_path / "burst.csv"
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    burst.write_text(f"{header}\n5,a,472,18,490,b\n250005,a,1,0,1,b\n9,a,3,4,7,b\n")
    assert read_trace(burst).arrival.tolist() == [0.0, 4.0]
    mooncake.write_text('{"timestamp": 0, "input_length": 6755, "output_length": 500}\n[1]\n')
    with pytest.raises(SpecError, match=r"line 2: .*expected a JSON object"):
        read_trace(mooncake)
    wrong = tmp_path / "wrong.csv"
    wrong.write_text("arrival_s,input_tokens\n1,2\n")
    with pytest.raises(SpecError, match="no column of the output"):
        read_trace(wrong)
    for content in (b"\x89PNG\r\n", b"\x1f\x8b\x08\x00broken", b"\x1f\x8bx"):
        wrong.write_bytes(content)
        with pytest.raises(SpecError, match=r"wrong\.csv"):
            read_trace(wrong)
    wrong.write_text("arrival_s,input_tokens,output_tokens\n1,x,2\n")
    with pytest.raises(SpecError, match="line 2"):
        read_trace(wrong)
