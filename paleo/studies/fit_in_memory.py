"""Room on the devices: the fewest layers that have to be recomputed for a run to fit."""

from __future__ import annotations

from collections.abc import Callable

from paleo.lowering.recompute import most_layers
from paleo.predict import Prediction, predict
from paleo.specs.calibration import Calibration
from paleo.specs.software import Software


def fewest_layers(
    prediction: Prediction, software: Software | None = None, calibration: Calibration | None = None
) -> Prediction | None:
    """The run with full recomputation of as few first layers of each stage as let it fit, by bisection (each layer more
    takes less memory); None where all of them do not."""

    def tried(layers: int) -> Prediction:
        changed = {"recompute": "full", "recompute_layers": layers, "recompute_every": None, "recompute_by_layer": {}}
        return predict(
            prediction.model, prediction.system, prediction.run.model_copy(update=changed), software, calibration
        )

    return _least(tried, most_layers(prediction.program, prediction.pieces))


def _least(tried: Callable[[int], Prediction], most: int) -> Prediction | None:
    low, smallest = 0, tried(most)
    if not smallest.memory.fits:
        return None
    high = most
    while high - low > 1:
        middle = (low + high) // 2
        trial = tried(middle)
        low, high, smallest = (low, middle, trial) if trial.memory.fits else (middle, high, smallest)
    return smallest
