"""Results of `paleo.questions`: tables in a notebook, the document of ``--json``, and data frames."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

    from paleo.cluster.study import FleetStudy
    from paleo.predict import Prediction
    from paleo.report.estimate import RunStudies
    from paleo.search.plans import Explanation, FoundPlans
    from paleo.specs.model import ModelSpec
    from paleo.specs.run import Run
    from paleo.specs.system import System
    from paleo.specs.task import TrainingTask
    from paleo.step.memory import MemoryFootprint
    from paleo.studies.advice import Advice
    from paleo.studies.audit import CollectiveAudit, TrainingLogAudit
    from paleo.studies.cost import Tariff, TrainingEstimate
    from paleo.studies.defaults import RunWithDefaults
    from paleo.studies.goodput import LongRun
    from paleo.studies.purchase import (
        ComparedSystem,
        Objective,
        PlanWithCost,
        PurchasePlans,
        PurchaseRequirements,
        SystemComparison,
    )
    from paleo.studies.scale import ScaleCurve, ScalePoint
    from paleo.studies.target import TargetScaling, TargetTime
    from paleo.tables.validation import FileReport
    from paleo.tuning.study import TuningStudy

JsonDocument = dict[str, Any]


@dataclass(frozen=True, repr=False, eq=False)
class StudyResult:
    """Base class of the results of `paleo.estimate`, `paleo.plan` and the other public functions.

    A result prints as a table in a notebook and converts to a JSON document or a data frame.
    """

    #: Command that answers the same question, and the key of the rows in its document (None: the document is one row).
    command: ClassVar[str]
    rows_key: ClassVar[str | None] = None
    #: Module that writes the answer, and prefix of its functions ``document`` and ``table``, which take the fields.
    report_module_name: ClassVar[str]
    report_function_prefix: ClassVar[str] = ""

    def json_document(self) -> JsonDocument:
        """Return the JSON document that the command prints under ``--json``, without the key ``schema``."""
        document: JsonDocument = self._render("json_document")
        return document

    def table(self) -> RenderableType:
        """Return the tables that the command of the same name prints to the console."""
        table: RenderableType = self._render("table")
        return table

    def _render(self, form: str) -> Any:
        """Call the report function that writes the result as ``document`` (JSON) or ``table`` (console)."""
        module = importlib.import_module(self.report_module_name)
        return getattr(module, f"{self.report_function_prefix}{form}")(*self._field_values())

    def _field_values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, entry.name) for entry in fields(self))

    @property
    def headline(self) -> str:
        """Summary of the answer in one line of text."""
        return str(self._field_values()[0].verdict)

    def to_dict(self) -> JsonDocument:
        """Return the answer as a JSON document in seconds, bytes and FLOP (see ``paleo schema COMMAND``)."""
        from paleo.report.columns import with_schema

        return with_schema(self.command, self.json_document())

    def to_frame(self) -> pd.DataFrame:
        """Return a data frame with a row for each point, system or plan, and its task, model and system.

        Columns are in SI units unless their names end in another one (``minutes``, ``days``, ``usd``, ``kwh``). Names
        of nested keys are joined by dots: ``breakdown_s.compute``.
        """
        import pandas as pd

        document = self.json_document()
        if self.rows_key is None:
            return pd.DataFrame([_flatten(document)])
        names = {key: document[key] for key in ("task", "model", "system") if key in document}
        return pd.DataFrame([names | _flatten(row) for row in document[self.rows_key]])

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.headline}>"

    def _repr_html_(self) -> str:
        from paleo.report.columns import notebook_html

        return notebook_html(self.table())


def _flatten(row: Mapping[str, Any], before: str = "") -> JsonDocument:
    """Flatten a nested document to one level: nested keys are joined by dots, an interval becomes two columns."""
    flat: JsonDocument = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{before}{key}.")
        elif "interval" in key and isinstance(value, Sequence) and len(value) == 2:
            flat |= {f"{before}{key}.low": value[0], f"{before}{key}.high": value[1]}
        else:
            flat[before + key] = value
    return flat


@dataclass(frozen=True, repr=False, eq=False)
class Estimate(StudyResult):
    """The answer of `paleo.estimate`: one predicted configuration.

    Parameters
    ----------
    prediction : Prediction
        Predicted training step.
    training : TrainingEstimate or None
        Time, cost and energy of a whole training, if its length is known.
    advice : tuple of Advice
        Changes that would make the run fit in memory; empty if it fits.
    studies : RunStudies
        Consistency, compression and placement, where the run asks for them.
    notes : tuple of str
        Warnings about the amount of training.
    run_with_defaults : RunWithDefaults, optional
        Software and strategy that were chosen because the question leaves them open, with reasons.
    """

    command = "estimate"
    prediction: Prediction
    training: TrainingEstimate | None
    advice: tuple[Advice, ...]
    studies: RunStudies
    notes: tuple[str, ...]
    run_with_defaults: RunWithDefaults | None = None

    @property
    def step_time(self) -> float:
        """Step time of a worker under the consistency model of the run (synchronous by default) [s]."""
        return (self.studies.consistency or self.prediction).step_time

    @property
    def interval(self) -> tuple[float, float]:
        """Ends of the 90 % interval of the step time [s]."""
        return (self.studies.consistency or self.prediction).interval

    @property
    def samples_per_s(self) -> float:
        """Throughput of all GPUs under the consistency model of the run [samples/s]."""
        return (self.studies.consistency or self.prediction).samples_per_s

    @property
    def tokens_per_s(self) -> float | None:
        """Throughput of all GPUs under the consistency model of the run [tokens/s]; None for models without tokens."""
        return (self.studies.consistency or self.prediction).tokens_per_s

    @property
    def mfu(self) -> float:
        """Model FLOP utilisation under the consistency model of the run."""
        return (self.studies.consistency or self.prediction).mfu

    @property
    def memory(self) -> MemoryFootprint:
        """Memory of the fullest GPU by purpose [bytes]."""
        return self.prediction.memory

    @property
    def goodput(self) -> LongRun | None:
        """Goodput of the training with failures and checkpoints; None if failures are not modelled."""
        return None if self.training is None else self.training.long_run

    @property
    def headline(self) -> str:
        return self.prediction.headline

    def json_document(self) -> JsonDocument:
        from paleo.report import estimate

        document = estimate.json_document(self.prediction, self.training, self.advice, self.studies)
        from paleo.studies.defaults import RunWithDefaults

        choice = self.run_with_defaults or RunWithDefaults(self.prediction.run)
        return {**document, "software": self.prediction.run.software, "reasons": choice.reasons}

    def table(self, *, verbose: bool = False) -> RenderableType:
        """Return the tables of ``paleo estimate``.

        Parameters
        ----------
        verbose : bool, optional
            Add sections, streams and collectives.

        Returns
        -------
        RenderableType
            Tables for the console.
        """
        from paleo.report import estimate

        table = estimate.table(self.prediction, self.training, self.advice, self.studies, verbose=verbose)
        words = "" if self.run_with_defaults is None else self.run_with_defaults.automatic_choices_text
        if not words:
            return table
        from rich.console import Group
        from rich.text import Text

        from paleo.report.columns import wrapped_text

        return Group(wrapped_text(words), Text(), table)


@dataclass(frozen=True, repr=False, eq=False)
class ScalingCurves(StudyResult):
    """Predictions of a network on growing numbers of GPUs; ``curves`` has one entry for each kind of scaling."""

    command, rows_key = "scale", "points"
    report_module_name = "paleo.report.scale"
    model: ModelSpec
    system: System
    curves: tuple[ScaleCurve, ...]
    run_with_defaults: RunWithDefaults | None = None

    @property
    def points(self) -> tuple[ScalePoint, ...]:
        """Points (one per GPU count) of all scaling curves."""
        return tuple(point for curve in self.curves for point in curve.points)

    @property
    def verdict(self) -> str:
        """Sentence about the number of GPUs up to which scaling pays, and what limits it."""
        from paleo.studies.scale import scaling_verdict

        return " ".join(scaling_verdict(curve).text for curve in self.curves)

    @property
    def headline(self) -> str:
        return f"{self.model.name} on {self.system.name}: {self.verdict}"


@dataclass(frozen=True, repr=False, eq=False)
class CompareResult(StudyResult):
    """Answer of `paleo.compare`: predictions of the same run on several systems."""

    command, rows_key = "compare", "systems"
    report_module_name = "paleo.report.compare"
    comparison: SystemComparison
    runs_with_defaults: Mapping[str, RunWithDefaults] = field(default_factory=dict)

    def best(self, objective: Objective = "time") -> ComparedSystem | None:
        """Return the system that fits and has the lowest time, cost or energy.

        Parameters
        ----------
        objective : Objective, optional
            ``time``, ``cost`` or ``energy``.

        Returns
        -------
        ComparedSystem, optional
            The system with its prediction; None if no value is known.
        """
        return self.comparison.best(objective)

    @property
    def headline(self) -> str:
        winner = self.best()
        names = ", ".join(candidate.system.name for candidate in self.comparison.candidates)
        return f"{names}; " + ("it fits none of them" if winner is None else f"fastest is {winner.system.name}")


@dataclass(frozen=True, repr=False, eq=False)
class SearchResult(StudyResult):
    """Answer of `paleo.search`: plans on one system, best first; ``explanation`` says why the first one wins."""

    command, rows_key = "plan", "plans"
    report_module_name = "paleo.report.plan"
    model: ModelSpec
    system: System
    found_plans: FoundPlans
    explanation: Explanation | None
    choice_reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def requirements(self) -> PurchaseRequirements:
        """Requirements of the search: its objective, such as the shortest step time."""
        from paleo.studies.purchase import PurchaseRequirements

        return PurchaseRequirements(objective=self.found_plans.objective)

    @cached_property
    def best_prediction(self) -> Prediction:
        """Prediction of the best plan."""
        from paleo.predict import predict

        return predict(self.model, self.system, self.found_plans.plans[0].run)

    @property
    def best(self) -> Run | None:
        """Run of the best plan that fits in memory; None if no plan fits."""
        return next((plan.run for plan in self.found_plans.plans if plan.fits), None)

    @property
    def headline(self) -> str:
        first = self.found_plans.plans[0]
        fits = f"best is {first.strategy or 'dp'}" if first.fits else "none fits"
        return f"{self.found_plans.covered_configurations:,} plans of {self.model.name} on {self.system.name}, {fits}"

    def table(self) -> RenderableType:
        from paleo.report import plan

        step, reasons = self.best_prediction, self.choice_reasons
        return plan.table(self.model, self.system, self.found_plans, self.explanation, step, reasons)


@dataclass(frozen=True, repr=False, eq=False)
class PlanResult(StudyResult):
    """Answer of `paleo.plan`: plans on all systems and GPU counts; those that meet the requirements come first."""

    command, rows_key = "plan", "plans"
    report_module_name = "paleo.report.plan"
    report_function_prefix = "purchase_"
    purchase: PurchasePlans

    @property
    def model(self) -> ModelSpec:
        return self.purchase.model

    @property
    def system(self) -> System:
        """System of the first plan search."""
        return self.purchase.searches[0][0]

    @property
    def found_plans(self) -> FoundPlans:
        """All plans on the first system at the global batch size of the purchase, as one search result."""
        return self.purchase.joined_search

    @property
    def requirements(self) -> PurchaseRequirements:
        """Deadline, budget and objective of the purchase."""
        return self.purchase.requirements

    @property
    def best(self) -> PlanWithCost | None:
        """First plan if it meets the requirements, else None."""
        return self.purchase.best

    @property
    def headline(self) -> str:
        from paleo.studies.purchase import purchase_verdict

        return purchase_verdict(self.purchase)


@dataclass(frozen=True, repr=False, eq=False)
class TimeToTarget(StudyResult):
    """Answer of `paleo.target`: time of a training task to its quality target, by number of GPUs."""

    command, rows_key = "target", "points"
    report_module_name = "paleo.report.target"
    task: TrainingTask
    system: System
    curve: TargetScaling
    tariff: Tariff
    choice_reasons: Mapping[str, str]

    @property
    def points(self) -> tuple[TargetTime, ...]:
        """Time to the quality target for each GPU count that can run the task."""
        return self.curve.points

    @property
    def headline(self) -> str:
        return f"{self.task.name} on {self.system.name}: {self.curve.verdict}"


@dataclass(frozen=True, repr=False, eq=False)
class FleetResult(StudyResult):
    """Answer of `paleo.fleet`: start and end of many jobs that share a cluster."""

    command, rows_key = "fleet", "jobs"
    report_module_name = "paleo.report.cluster"
    study: FleetStudy

    @property
    def requirements_met(self) -> bool:
        """True if all deadlines and the limit of the waiting time are met."""
        return self.study.meets_requirements


@dataclass(frozen=True, repr=False, eq=False)
class TuneResult(StudyResult):
    """Answer of `paleo.tune`: time of a hyperparameter search, by GPUs per trial and GPUs in all."""

    command, rows_key = "tune", "curve"
    report_module_name = "paleo.report.tuning"
    study: TuningStudy

    @property
    def deadline_met(self) -> bool:
        """True if the search ends before its deadline."""
        return self.study.deadline_margin is None or self.study.deadline_margin.meets_deadline


@dataclass(frozen=True, repr=False, eq=False)
class AuditResult(StudyResult):
    """Answer of `paleo.audit`: a log, its prediction, and the faults that explain the difference."""

    command = "audit"
    report_module_name = "paleo.report.audit"
    audit: TrainingLogAudit | CollectiveAudit

    @property
    def headline(self) -> str:
        from paleo.report import audit

        return audit.log_audit_verdict_text(self.audit)


@dataclass(frozen=True, repr=False, eq=False)
class ValidateResult(StudyResult):
    """Answer of `paleo.validate`: measured tables with their predictions.

    `to_frame` has one row for each file, `predictions` one for each row of the files.
    """

    command, rows_key = "validate", "files"
    report_module_name = "paleo.tables.validation_report"
    reports: tuple[FileReport, ...]

    def predictions(self) -> pd.DataFrame:
        """Return every measured row with its prediction and interval, in the unit of the measured column.

        A row that cannot be predicted has the reason instead.
        """
        from paleo.tables.validation import with_predictions

        return with_predictions(self.reports)

    @property
    def headline(self) -> str:
        counts = ((report.predicted_row_mask.sum(), len(report.frame), report.file) for report in self.reports)
        return "; ".join(f"{predicted:,} of {rows:,} rows of {file} predicted" for predicted, rows, file in counts)

    def table(self, *, worst: int = 5) -> RenderableType:
        """Return the tables of ``paleo validate``.

        Parameters
        ----------
        worst : int, optional
            Number of worst rows of each file.

        Returns
        -------
        RenderableType
            Tables for the console.
        """
        from rich.console import Group
        from rich.text import Text

        from paleo.tables.validation_report import validation_renderables

        parts = ([*validation_renderables(report, worst=worst), Text()] for report in self.reports)
        return Group(*(part for group in parts for part in group))
