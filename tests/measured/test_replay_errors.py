"""Errors by source of ``paleo validate`` on some rows of each measured table are those that were frozen. Tables
that are predicted whole are compared in test_step_tables."""

from __future__ import annotations

import pytest

from tests.replay.freeze import WHOLE_TABLES, label, load, moved_figures

ERRORS = [(case, frozen) for case, frozen in load("errors") if case["table"] not in WHOLE_TABLES]


@pytest.mark.shared
@pytest.mark.parametrize(("case", "frozen"), ERRORS, ids=[label(case) for case, _ in ERRORS])
def test_errors_have_not_moved(case: dict[str, object], frozen: dict[str, object]) -> None:
    assert moved_figures("errors", case, frozen) == []
