"""Measured quality: accuracy of stale runs, and MLPerf's reference convergence points, each from what was not it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from paleo.tables.validation import FileReport

Validated = Callable[[str], FileReport]


@pytest.mark.shared
def test_accuracy_by_staleness_on_cards_that_were_left_out(validated: Validated) -> None:
    """The best constant errs by 1.3 % there; one run at the accuracy of guessing is counted as not predicted."""
    report = validated("staleness_accuracy.csv")
    left_out = report.errors(np.asarray(report.predictions.device_names == "v100-sxm2-16gb"))
    assert left_out.rows == 84 and left_out.mape is not None and left_out.mape < 0.008
    assert report.unsupported_reasons == {"the run never learned: its accuracy is that of guessing (10%)": 1}


@pytest.mark.shared
def test_reference_points_from_the_others_of_their_task(validated: Validated) -> None:
    """A third of the error of one constant for each task; later rounds repeat most points."""
    report = validated("mlperf/convergence.csv")
    errors = report.errors()
    assert errors.rows == 145 and errors.mape is not None and errors.baseline_mape is not None
    assert errors.mape < 0.062 and errors.mape < 0.4 * errors.baseline_mape
    assert report.unsupported_reasons["the point of another round once more"] == 400
