"""Paleo predicts, before anyone buys or books a machine, how fast a neural network trains on it, and how that scales.

    import paleo

    run = paleo.Run(gpus=64, batch=32)
    prediction = paleo.predict(paleo.load_model("resnet50"), paleo.load_system("dgx-a100-80gb"), run)
    prediction.step_time, prediction.memory.fits

The names are loaded when they are first used, so that ``import paleo`` costs nothing.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paleo.importers.sources import from_torch as from_torch
    from paleo.predict import Prediction as Prediction
    from paleo.predict import predict as predict
    from paleo.specs.hardware import load_system as load_system
    from paleo.specs.model import load_model as load_model
    from paleo.specs.run import Run as Run

__version__ = "0.1.0"
__all__ = ["Prediction", "Run", "__version__", "from_torch", "load_model", "load_system", "predict"]

_HOMES = {
    "Prediction": "paleo.predict",
    "Run": "paleo.specs.run",
    "from_torch": "paleo.importers.sources",
    "load_model": "paleo.specs.model",
    "load_system": "paleo.specs.hardware",
}


class _Package(ModuleType):
    """A package whose public names are loaded at their first use."""

    def __getattr__(self, name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'paleo' has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)

    @property
    def predict(self) -> Any:
        """The function, whether or not the module of that name has been imported already."""
        return import_module("paleo.predict").__dict__["predict"]

    @predict.setter
    def predict(self, module: ModuleType) -> None:
        """Importing a module sets it on its package; here the function keeps the name."""


sys.modules[__name__].__class__ = _Package
