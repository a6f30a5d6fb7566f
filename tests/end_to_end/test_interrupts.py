"""Ctrl-C at random moments of commands; ``python -m tests.end_to_end.interrupts --times 200`` tries all of them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.end_to_end.interrupts import CALLS, interrupted, make_inputs, seconds_of


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sweep", "serial", "plan", "tune", "validate"])
def test_an_interrupt_is_answered_by_its_exit_code_and_no_traceback(name: str, tmp_path: Path) -> None:
    make_inputs(tmp_path)
    seconds, rng = seconds_of(CALLS[name], tmp_path), random.Random(name)
    answers = [interrupted(CALLS[name], tmp_path, rng.uniform(0.1, seconds)) for _ in range(4)]
    assert [fault for _, fault in answers if fault] == []
    assert 130 in [code for code, _ in answers]
