"""Rows of other measured training steps: BERT, GNMT, Transformer."""

from __future__ import annotations

from paleo.errors import SpecError
from paleo.predict import predict
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.software import Software
from paleo.validate.steps.base import Row, Step, StepTable, filled, of_prediction, software_of, whole
from paleo.validate.steps.vision import system_of
from paleo.validate.tables import STEPS

#: Names of the tables -> models of the catalog; BERT without more is BERT-large in these sources.
MODELS = {"bert": "bert_large", "biobert": "bert_base", "gnmt": "gnmt", "transformer": "transformer_big"}


class OtherSteps(StepTable):
    """One training step a row; batches are sequences or sentences."""

    name = "other_iterations"
    header = frozenset({"model", "task", "device", "n_gpus", "global_batch", "batch_unit", "iteration_ms"})
    configuration = ("system", "seq_len", "dtype", "grad_accum", "software", "framework", "notes")

    def step(self, row: Row, software: Software | None = None) -> Step:
        """The step of the row's run; SpecError for models that the catalog lacks and batches counted in tokens."""
        name = str(row["model"]).strip().lower()
        if name not in MODELS:
            raise SpecError(f"model {row['model']!r} is not in the catalog")
        if not str(row["batch_unit"]).startswith("se"):
            raise SpecError(f"batches of {row['batch_unit']} do not say how many sequences there are")
        return of_prediction(predict(load_model(MODELS[name]), system_of(row), self._run(row, name), software))

    def _run(self, row: Row, name: str) -> Run:
        gpus = whole(row, "n_gpus", 1)
        batch = whole(row, "global_batch")
        local = -(-batch // gpus)
        accumulated = max(1, whole(row, "grad_accum", 1))
        return Run(
            gpus=gpus,
            global_batch=batch,
            microbatch=max(1, local // accumulated),
            dtype=str(row["dtype"]),
            optimizer="lamb" if "bert" in name else "adam",
            software=software_of(row),
            model={"seq": whole(row, "seq_len")} if filled(row, "seq_len") else {},
        )


STEPS.register("other_iterations")(OtherSteps())
