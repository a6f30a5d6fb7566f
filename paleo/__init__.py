"""Paleo predicts how fast a neural network trains on a machine and how that scales, before anyone buys or books it.

    import paleo

    paleo.compare("bert_large", ["dgx-a100-80gb", "dgx-h100"], gpus=8, batch=16)
    answer = paleo.estimate("resnet50", "dgx-a100-80gb", gpus=64, batch=32, epochs=90)
    answer.step_time, answer.memory.fits, answer.to_dict(), answer.to_frame()

`estimate`, `scale`, `compare`, `search`, `plan` and `target` answer like the commands of these names (`search` is
``paleo plan`` without an amount of training). `validate` and `audit` compare measured tables and logs with predictions.
`sweep` returns a study as a data frame. `predict` predicts one step from loaded objects.

The public names are loaded when they are first used, so that ``import paleo`` is fast.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paleo.errors import PaleoError as PaleoError
    from paleo.importers.import_sources import from_hf as from_hf
    from paleo.importers.import_sources import from_onnx as from_onnx
    from paleo.importers.import_sources import from_torch as from_torch
    from paleo.predict import Prediction as Prediction
    from paleo.predict import predict as predict
    from paleo.questions import audit as audit
    from paleo.questions import compare as compare
    from paleo.questions import estimate as estimate
    from paleo.questions import fleet as fleet
    from paleo.questions import plan as plan
    from paleo.questions import scale as scale
    from paleo.questions import search as search
    from paleo.questions import sweep as sweep
    from paleo.questions import target as target
    from paleo.questions import tune as tune
    from paleo.questions import validate as validate
    from paleo.services import rl as rl
    from paleo.services import serve as serve
    from paleo.specs.calibration import load_calibration as load_calibration
    from paleo.specs.model import load_model as load_model
    from paleo.specs.run import Run as Run
    from paleo.specs.software import load_software as load_software
    from paleo.specs.system import load_system as load_system
    from paleo.specs.task import load_task as load_task

__version__ = "0.3.0"
_NAMES_OF_MODULES = {
    "paleo.errors": "PaleoError",
    "paleo.predict": "Prediction predict",
    "paleo.specs.run": "Run",
    "paleo.questions": "audit compare estimate fleet plan scale search sweep target tune validate",
    "paleo.importers.import_sources": "from_hf from_onnx from_torch",
    "paleo.specs.calibration": "load_calibration",
    "paleo.specs.model": "load_model",
    "paleo.specs.software": "load_software",
    "paleo.specs.system": "load_system",
    "paleo.specs.task": "load_task",
    "paleo.services": "rl serve",
}
_MODULE_OF_NAME = {name: module for module, names in _NAMES_OF_MODULES.items() for name in names.split()}
__all__ = ["__version__", *_MODULE_OF_NAME]


class _Package(ModuleType):
    """A package that loads each public name when it is first used."""

    def __getattr__(self, name: str) -> Any:
        if name not in _MODULE_OF_NAME:
            raise AttributeError(f"module 'paleo' has no attribute {name!r}")
        return import_module(_MODULE_OF_NAME[name]).__dict__[name]

    def __dir__(self) -> list[str]:
        return sorted(__all__)


def _function_property(name: str) -> property:
    """Make a property for a public function whose name is also that of a module.

    Importing such a module would otherwise replace the function on the package. The function also has the attributes of
    the module, so that ``import paleo.search.plans as plans`` works.
    """

    def get(package: _Package) -> Any:
        function, module = _Package.__getattr__(package, name), sys.modules.get(f"paleo.{name}")
        contents = {} if module is None else vars(module)
        vars(function).update({key: entry for key, entry in contents.items() if not key.startswith("__")})
        return function

    return property(get, lambda package, module: None)


_Package.predict = _function_property("predict")  # type: ignore[attr-defined]
_Package.search = _function_property("search")  # type: ignore[attr-defined]
_Package.validate = _function_property("validate")  # type: ignore[attr-defined]
sys.modules[__name__].__class__ = _Package
