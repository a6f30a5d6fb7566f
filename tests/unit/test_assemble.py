"""The streams in closed form against the engine's timeline, and parts of a step worked by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paleo.assemble import (
    BYTES,
    alive,
    bucket_count,
    columns,
    exchange_left,
    memory,
    states,
    turns_held,
    walk,
    workspace,
)
from paleo.lower import Counted, Program, Section, Transfer
from paleo.optimizers import optimizer
from paleo.precision import precision
from paleo.predict import predict
from paleo.specs.hardware import load_system
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.timeline import Turn, busy
from paleo.work import Kernel

RUNS: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", {"gpus": 8}),
    ("gpt2", {"gpus": 8, "microbatch": 2, "strategy": "zero=1"}),
    ("gpt2", {"gpus": 16, "strategy": "zero=3", "microbatch": 2}),
    ("gpt2", {"gpus": 16, "strategy": "zero=3", "exchange": "after", "recompute": "full"}),
    ("gpt2", {"gpus": 16, "strategy": "tp=2,cp=2,zero=3"}),
    ("resnet50", {"gpus": 16, "strategy": "zero=3", "batch": 4}),
    ("vgg16", {"gpus": 64, "batch": 2}),
    ("alexnet", {"gpus": 8, "strategy": "owt"}),
    ("mixtral-8x7b", {"gpus": 16, "strategy": "ep=8", "expert_imbalance": 1.2}),
    ("gpt2", {"gpus": 32, "strategy": "zero=3,shard=8,cp=2,ulysses"}),
    ("resnet50", {"gpus": 16, "strategy": "spatial=4,zero=2", "batch": 16}),
]


@pytest.mark.parametrize(("model", "options"), RUNS)
def test_streams_end_when_the_engine_says(model: str, options: dict[str, Any]) -> None:
    made = predict(load_model(model), load_system("dgx-h100"), Run(**options))
    assert made.step_time == pytest.approx(made.timeline.end, rel=1e-12)


def test_hidden_communication_is_counted_as_the_timeline_has_it() -> None:
    made = predict(load_model("vgg16"), load_system("dgx-h100"), Run(gpus=64, batch=2))
    assert made.breakdown.communication_total == pytest.approx(busy(made.timeline.events, "bucket"))


def test_two_streams_by_hand() -> None:
    """Backward turns of 2 s; buckets of 3 s go out after the first and of 1 s after the second: 2 + 3 + 1 beside 4 s of
    work."""
    one = (("dp",), 1.0)
    order = [Turn(0, "backward", 1, buckets=(one,)), Turn(1, "backward", 1, buckets=(one,))]
    compute, network = walk(order, np.zeros(2), np.full(2, 2.0), None, [3.0, 1.0], 0.0)
    assert (float(compute), float(network)) == (4.0, 6.0)


def test_gathered_weights_are_awaited_by_hand() -> None:
    """Gathers of 5 s, turns of 1 s: the first turn starts at 5 s; the second gather has been sent at once, the third
    after turn one."""
    order = [Turn(0, "forward", 1, gathers=True)] * 3
    compute, network = walk(order, np.ones(1), np.zeros(1), np.full(1, 5.0), [0.0] * 3, 0.0)
    assert (float(compute), float(network)) == (16.0, 15.0)


def test_states_are_shared_as_zero_says() -> None:
    """Adam in bf16: 2 bytes of parameter, 2 of gradient, 12 of states; stages 1, 2 and 3 divide one after another by 4
    ranks."""
    parts = {}
    for zero in range(4):
        held = states(np.array([100.0]), 10.0, 4, zero, optimizer("adam"), precision("bf16"))
        parts[zero] = [float(one[0]) for one in (held.parameters, held.gradients, held.optimizer)]
    assert parts == {0: [200, 200, 1200], 1: [200, 200, 300], 2: [200, 50, 300], 3: [50, 50, 300]}
    held = states(np.array([100.0]), 10.0, 4, 3, optimizer("adam"), precision("bf16"))
    total = memory(held, np.array([7.0]), workspace(np.array([3.0, 1.0]), np.asarray(2.0), 4.0))
    assert float(total[0]) == 50 + 50 + 300 + 7 + (2 * 3 + 2 * 4 + 2) + 2 * 10 * 2


def test_turns_of_chunks_go_round_the_stages() -> None:
    held = turns_held(3, [((0, 1), (1, 2)), ((1, 2),), ((1, 2),), ((1, 2), (2, 1))], 2)
    assert held.tolist() == [[1, 4, 0], [0, 4, 1]]


def test_one_stage_keeps_one_microbatch() -> None:
    assert alive("1f1b", 1, 8, 1).tolist() == [1.0]
    assert alive("1f1b", 4, 8, 1).tolist() == [4, 3, 2, 1]
    assert alive("interleaved", 2, 8, 2).tolist() == [2.5, 1.5]


def test_an_exchange_hides_behind_the_pass_that_makes_its_gradients() -> None:
    """Never less than its last bucket, never more than all of it; nothing hides from one bucket, nor where computation
    loses what the exchange gains."""
    behind = np.array([0.0, 1.0, 4.0, 100.0])
    left = exchange_left(np.full(4, 4.0), behind, np.full(4, 8.0), 0.0)
    assert left.tolist() == [4.0, 4.0 - 7 / 8, 0.5, 0.5]
    assert exchange_left(np.full(4, 4.0), behind, np.ones(4), 0.0).tolist() == [4.0] * 4
    assert exchange_left(np.full(4, 4.0), behind, np.full(4, 8.0), 1.0).tolist() == [4.0] * 4
    assert bucket_count(np.array([0.0, 99.0, 250.0]), 100.0).tolist() == [1.0, 1.0, 2.0]


def test_collectives_beside_computation_cost_what_it_does_not_cover() -> None:
    """A ring hides behind the core of attention alone, other collectives behind their section."""
    kernels = np.array([3.0, 5.0])
    for name, forward, hidden in (("attention.core", 7.0, 3.0), ("gather.again", 2.0, 8.0)):
        one = Transfer(name, "all_gather", "cp", 1.0, "forward", 1, overlapped=True)
        core, rest = (Counted(_kernel(called), "layer", 1.0) for called in ("attention.core", "mlp"))
        section = Section("block", 1, (core, rest), (one,), (), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        table = columns(Program((section,)), kernels, np.array([10.0]), [np.zeros(1)] * len(BYTES))
        assert (float(table.forward_transfers[0]), float(table.hidden[0])) == (forward, hidden)


def _kernel(name: str) -> Kernel:
    return Kernel(name, "memory", "elementwise", "forward", 0.0, 0.0, 1.0, 1.0, {"rows": 1.0, "columns": 1.0})
