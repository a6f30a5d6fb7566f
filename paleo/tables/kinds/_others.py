"""Rows of other measured training steps: BERT, GNMT, Transformer, Transformer-XL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from paleo.errors import SpecError, near
from paleo.predict import predict
from paleo.specs.catalog import names
from paleo.specs.model import ModelSpec, load_model
from paleo.specs.run import Run
from paleo.tables.cells import Array, number_or_nan
from paleo.tables.kinds._submissions import NetworkSteps
from paleo.tables.steps import (
    EXAMPLES,
    STEPS,
    Row,
    Step,
    filled,
    row_dicts,
    software_of,
    step_of_prediction,
    whole_cell,
)

if TYPE_CHECKING:
    from paleo.specs.software import Software


#: Names of the tables -> models of the catalog; BERT without more is BERT-large in these sources.
MODELS = {
    "bert": "bert_large",
    "biobert": "bert_base",
    "gnmt": "gnmt",
    "transformer": "transformer_big",
    "transformer-xl base": "transformer_xl-base",
    "transformer-xl large": "transformer_xl-large",
}
#: Length of sequences where fine-tuning rows do not state it: the default of the scripts that their pages name,
#: 384 for SQuAD (BERT), 128 for named entities (BioBERT). The latter can be checked: 64 sequences of n words through
#: BERT-base are 64 · n · 6 · 85e6 FLOP, measured in 433 ms on a V100 of 15.7 TFLOP/s: n is at most 208.
FINE_TUNING = {"bert": 384, "biobert": 128}
#: PyTorch code of these networks is built on apex where a row names no profile, and in NVIDIA's examples that name no
#: container.
APEX = "nvidia-apex"


class OtherSteps(NetworkSteps):
    """Table of training steps, one per row; batches are sequences or sentences, or tokens of sentences of the model's
    own length."""

    name = "other_iterations"
    header = frozenset({"model", "task", "device", "n_gpus", "global_batch", "batch_unit", "iteration_ms"})
    reads = (
        "batch_per_gpu dtype framework grad_accum interconnect nodes notes seq_len software source system throughput "
        "throughput_unit"
    )
    configuration = ("source", "system", "seq_len", "dtype", "grad_accum", "software", "framework", "notes")

    def network_step(self, row: Row, software: Software | None = None) -> Step:
        """Predict the step of the row's run; raise SpecError for models that the catalog lacks."""
        name = _catalog_name(row)
        if name is None:
            known = {*MODELS, *names("models")}
            raise SpecError(f"model {row['model']!r} is not in the catalog; {near(str(row['model']), known)}")
        unit = str(row["batch_unit"])
        if not unit.startswith(("seq", "sentence", "tok")):
            raise SpecError(f"batches of {unit} do not say how many sequences there are")
        model, system = load_model(name), self.system(row)
        return step_of_prediction(predict(model, system, self._run(row, model), software, self.calibration_of(system)))

    def measured(self, frame: pd.DataFrame) -> Array:
        """Return the seconds of the step; where the row has a throughput in tokens alone, the tokens of its batch over
        it."""
        stated, columns = super().measured(frame), ("throughput", "seq_len", "global_batch")
        rate, lengths, batch = (number_or_nan(frame, column) for column in columns)
        tokens = np.array([_tokens(row, length) for row, length in zip(row_dicts(frame), lengths, strict=True)])
        return np.where(np.isfinite(stated), stated, tokens * batch / np.where(rate > 0, rate, np.nan))

    def unmeasured(self, row: Mapping[Any, Any]) -> str:
        """Return why a row has no step time: a rate in tokens needs a network of the catalog."""
        if filled(row, "iteration_ms"):
            return super().unmeasured(row)
        if _catalog_name(row) is None:
            return f"iteration_ms is empty, and model {row['model']!r} is not in the catalog"
        wrong = (key for key in ("throughput", "global_batch") if filled(row, key) and not _is_number(row[key]))
        if (column := next(wrong, None)) is not None:
            return f"{column} {str(row[column])[:40]!r} is not a number"
        return "iteration_ms is empty: nothing to compare with"

    def _run(self, row: Row, model: ModelSpec) -> Run:
        gpus = whole_cell(row, "n_gpus", 1)
        sizes = _sizes(row)
        batch = whole_cell(row, "global_batch")
        if str(row["batch_unit"]).startswith("tok"):
            batch = max(gpus, round(batch / int(model.params["seq"])))
        accumulated = max(1, whole_cell(row, "grad_accum", 1))
        software, example = software_of(row, APEX), str(row.get("source", "")).startswith(EXAMPLES)
        return Run(
            gpus=gpus,
            global_batch=batch,
            microbatch=max(1, -(-batch // gpus) // accumulated),
            dtype=str(row["dtype"]),
            optimizer=_optimizer(row),
            software=APEX if example and software == "pytorch-eager" else software,
            model=sizes,
        )


def _is_number(cell: object) -> bool:
    return bool(np.isfinite(pd.to_numeric(str(cell), errors="coerce")))


def _tokens(row: Row, length: float) -> float:
    """Tokens that a row's throughput counts in each unit of its batch: of a sample, those that the network's data set
    has on average, else its ``length`` or that of the network; nan where it counts something else or the network is
    not known."""
    name = _catalog_name(row)
    if name is None or not str(row.get("throughput_unit", "")).startswith("tokens"):
        return float("nan")
    if str(row["batch_unit"]).startswith("tok"):
        return 1.0
    model = load_model(name)
    stated = None if model.dataset is None else model.dataset.tokens
    return stated or (length if length > 0 else float(model.params["seq"]))


def _catalog_name(row: Mapping[Any, Any]) -> str | None:
    """Return the catalog's name of a row's network; None where it has none."""
    stated = str(row["model"]).strip().lower()
    return MODELS.get(stated) or (stated if stated in names("models") else None)


def _optimizer(row: Row) -> str:
    """Return the optimizer of the scripts: LAMB for BERT and Transformer-XL, weight decay for fine-tuned BERT."""
    if "-xl" in str(row["model"]).lower():
        return "lamb"
    if not _is_bert(row):
        return "adam"
    return "adamw" if _is_tuning(row) else "lamb"


def _is_bert(row: Row) -> bool:
    return "bert" in str(row["model"]).lower()


def _is_tuning(row: Row) -> bool:
    return str(row.get("task", "")).lower().startswith("fine")


def _sizes(row: Row) -> dict[str, int | float | str]:
    """Return the parameters of a network: the length of sequences, and no words to guess where BERT is fine-tuned."""
    stated: dict[str, int | float | str] = {"seq": whole_cell(row, "seq_len")} if filled(row, "seq_len") else {}
    if _is_bert(row) and _is_tuning(row):
        usual = FINE_TUNING.get(str(row["model"]).strip().lower(), FINE_TUNING["bert"])
        return {"seq": usual, **stated, "predictions": 0}
    return stated


STEPS.register("other_iterations")(OtherSteps())
