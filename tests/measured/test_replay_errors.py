"""Errors by source of ``paleo validate`` on some rows of each measured table are those that were frozen."""

from __future__ import annotations

import pytest

from tests.replay.freeze import label, load, moved_figures

ERRORS = load("errors")


@pytest.mark.shared
@pytest.mark.parametrize(("case", "frozen"), ERRORS, ids=[label(case) for case, _ in ERRORS])
def test_errors_have_not_moved(case: dict[str, object], frozen: dict[str, object]) -> None:
    assert moved_figures("errors", case, frozen) == []
