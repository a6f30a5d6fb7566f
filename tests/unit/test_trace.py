"""Traces: valid events, tracks by stream and class of ranks, counts that add up."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from paleo.cli import run_command_line as command
from paleo.predict import predict
from paleo.report.estimate import trace_events
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.system import load_system
from paleo.units import MICROSECOND


def traced(model: str, **options: Any) -> tuple[dict[str, Any], Any]:
    made = predict(load_model(model), load_system("dgx-a100-80gb"), Run(**options))
    return trace_events(made), made


def complete(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in document["traceEvents"] if event["ph"] == "X"]


def tracks(document: dict[str, Any]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in complete(document):
        found.setdefault((event["pid"], event["tid"]), []).append(event)
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"gpus": 8},
        {"gpus": 8, "strategy": "zero=3", "microbatch": 2},
        {"gpus": 16, "strategy": "tp=2,pp=4,vp=3", "global_batch": 16},
        {"gpus": 16, "strategy": "pp=4,zero=1", "global_batch": 64, "schedule": "zb-h1"},
    ],
)
def test_events_of_a_track_follow_one_another(options: dict[str, Any]) -> None:
    document, made = traced("gpt2", **options)
    for events in tracks(document).values():
        ordered = sorted(events, key=lambda event: event["ts"])
        for before, after in pairwise(ordered):
            assert before["ts"] + before["dur"] <= after["ts"] * (1 + 1e-9) + 1e-6
    end = max(event["ts"] + event["dur"] for event in complete(document)) * MICROSECOND
    assert end == pytest.approx(made.timeline.end_time, rel=1e-9)
    assert json.loads(json.dumps(document)) == document


def test_flop_add_up_to_what_a_rank_does() -> None:
    document, made = traced("gpt2", gpus=8)
    drawn = sum(event["args"].get("flops", 0.0) for event in complete(document))
    assert drawn == pytest.approx(made.program.flops() * made.plan.microbatches)


def test_full_recomputation_counts_its_forward_passes_again() -> None:
    plain, _ = traced("gpt2", gpus=8)
    again, _ = traced("gpt2", gpus=8, recompute="full")
    done = [sum(event["args"].get("flops", 0.0) for event in complete(one)) for one in (plain, again)]
    forward = sum(
        event["args"].get("flops", 0.0)
        for event in complete(plain)
        if event["name"] == "block" and event["cat"] == "forward"
    )
    assert done[1] - done[0] == pytest.approx(forward)


def test_buckets_carry_all_gradients_on_their_own_track() -> None:
    document, made = traced("gpt2", gpus=8)
    buckets = [event for event in complete(document) if event["cat"] == "bucket"]
    assert sum(event["args"]["bytes"] for event in buckets) == pytest.approx(made.program.parameter_count * 2.0)
    assert {event["tid"] for event in buckets} != {
        event["tid"] for event in complete(document) if event["cat"] == "forward"
    }


def test_a_pipeline_has_a_process_for_each_stage() -> None:
    document, made = traced("gpt2", gpus=16, strategy="tp=2,pp=4,vp=3", global_batch=16)
    names = {event["args"]["name"] for event in document["traceEvents"] if event["name"] == "process_name"}
    assert names == {f"stage {stage} (4 alike)" for stage in range(4)}
    passes = [event for event in complete(document) if event["cat"] in ("F", "B")]
    assert len(passes) == 2 * 4 * 3 * made.plan.microbatches
    flops = sum(event["args"]["flops"] for event in passes if event["cat"] == "F" and "flops" in event["args"])
    assert flops == pytest.approx(made.program.flops("forward") * made.plan.microbatches)


def test_command_writes_a_file(tmp_path: Any) -> None:
    path = tmp_path / "t.json"
    arguments = ["trace", "gpt2", "--system", "dgx-a100-80gb", "--gpus", "8", "-o", str(path)]
    assert command(arguments) == 0
    document = json.loads(path.read_text())
    assert document["otherData"]["gpus"] == 8 and document["traceEvents"]
    assert command([*arguments[:-1], str(tmp_path / "missing" / "t.json")]) == 2


@pytest.mark.slow
def test_plan_command_prints_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "plan",
        "gpt2",
        "--system",
        "dgx-h100",
        "--gpus",
        "8",
        "--global-batch",
        "32",
        "--top",
        "3",
        "--json",
        "--explain",
        "--software",
        "any",
    ]
    assert command(arguments) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["configurations"] > 1000 and document["seconds"] > 0 and len(document["plans"]) == 3
    for row in document["plans"]:
        assert {"strategy", "microbatch", "recompute", "schedule", "step_time_s", "memory_bytes", "fits"} <= set(row)
    assert "wins" in document["explanation"]
    assert command([*arguments[:-2], "--strategy", "nonsense"]) == 2
