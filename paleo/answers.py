"""Answers as objects: the tables of the command line in a notebook, the document of ``--json``, rows as a data frame.

`paleo.questions` has the functions that give them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

    from paleo.predict import Prediction
    from paleo.report.blocks import Blocks
    from paleo.search.plans import Explanation, Search
    from paleo.specs.model import ModelSpec
    from paleo.specs.run import Run
    from paleo.specs.system import System
    from paleo.specs.task import TrainingTask
    from paleo.step.memory import Footprint
    from paleo.studies import buying
    from paleo.studies.advice import Advice
    from paleo.studies.audit import Audit, CollectiveAudit
    from paleo.studies.comparison import Candidate, Comparison, Objective
    from paleo.studies.cost import Tariff
    from paleo.studies.goodput import Goodput
    from paleo.studies.scaling import ScaleCurve, ScalePoint
    from paleo.studies.target import TargetScaling, TargetTime
    from paleo.studies.training import Training
    from paleo.validate.runner import FileReport

Document = dict[str, Any]


class StudyResult(ABC):
    """An answer: the tables of the command line in a notebook, its document, and its rows as a data frame."""

    #: The command whose document this is, and the key of its rows; None: the document is the one row.
    command: ClassVar[str]
    rows: ClassVar[str | None] = None

    @abstractmethod
    def document(self) -> Document:
        """The document that the command prints with --json, without the name of its schema."""

    @abstractmethod
    def table(self) -> RenderableType:
        """The tables that the command prints."""

    @property
    @abstractmethod
    def headline(self) -> str:
        """The answer in a line."""

    def to_dict(self) -> Document:
        """The document of ``--json``: seconds, bytes, FLOP (``paleo schema COMMAND`` describes it)."""
        from paleo.report.documents import with_schema

        return with_schema(self.command, self.document())

    def to_frame(self) -> pd.DataFrame:
        """A row for each point, system or plan, in SI unless a column says otherwise (``minutes``, ``days``, ``usd``,
        ``kwh``); a key of a key is ``breakdown_s.compute``. Each row names its task, model and system."""
        import pandas as pd

        document = self.document()
        if self.rows is None:
            return pd.DataFrame([_flat(document)])
        names = {key: document[key] for key in ("task", "model", "system") if key in document}
        return pd.DataFrame([names | _flat(row) for row in document[self.rows]])

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.headline}>"

    def _repr_html_(self) -> str:
        from paleo.report.notebook import html

        return html(self.table())


def _flat(row: Mapping[str, Any], before: str = "") -> Document:
    """Nested keys joined by dots, ends of intervals in columns of their own."""
    flat: Document = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{before}{key}.")
        elif "interval" in key and isinstance(value, Sequence) and len(value) == 2:
            flat |= {f"{before}{key}.low": value[0], f"{before}{key}.high": value[1]}
        else:
            flat[before + key] = value
    return flat


@dataclass(frozen=True, repr=False, eq=False)
class Estimate(StudyResult):
    """One predicted configuration; ``training`` if its length was stated."""

    command = "estimate"
    prediction: Prediction
    training: Training | None
    advice: tuple[Advice, ...]
    blocks: Blocks
    notes: tuple[str, ...]

    @property
    def step_time(self) -> float:
        """Seconds of one step."""
        return self.prediction.step_time

    @property
    def interval(self) -> tuple[float, float]:
        """Ends of the 90 % interval of the step [s]."""
        return self.prediction.interval

    @property
    def samples_per_s(self) -> float:
        """Samples that all GPUs see a second, under the run's consistency model."""
        return (self.blocks.consistency or self.prediction).samples_per_s

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens that all GPUs see a second, under the run's consistency model; None for models that count none."""
        return (self.blocks.consistency or self.prediction).tokens_per_s

    @property
    def mfu(self) -> float:
        """Model FLOP over the peak of all devices, of the synchronous step."""
        return self.prediction.mfu

    @property
    def memory(self) -> Footprint:
        """Memory of the fullest GPU [bytes]."""
        return self.prediction.memory

    @property
    def goodput(self) -> Goodput | None:
        """The run with failures, where they were counted."""
        return None if self.training is None else self.training.goodput

    @property
    def headline(self) -> str:
        return self.prediction.headline

    def document(self) -> Document:
        from paleo.report import documents

        rates = {"samples_per_s": self.samples_per_s, "tokens_per_s": self.tokens_per_s}
        return {**documents.estimate(self.prediction, self.training, self.advice), **rates, **self.blocks.documents()}

    def table(self, *, verbose: bool = False) -> RenderableType:
        from paleo.report import tables

        return self.blocks.below(tables.estimate(self.prediction, self.training, self.advice, verbose=verbose))


@dataclass(frozen=True, repr=False, eq=False)
class ScalingCurves(StudyResult):
    """A network on more and more GPUs; ``curves`` holds one for each kind of scaling."""

    command, rows = "scale", "points"
    model: ModelSpec
    system: System
    curves: tuple[ScaleCurve, ...]

    @property
    def points(self) -> tuple[ScalePoint, ...]:
        """The points of all curves."""
        return tuple(point for curve in self.curves for point in curve.points)

    @property
    def verdict(self) -> str:
        """Up to how many GPUs it pays, and why no further."""
        from paleo.studies.scaling import verdict

        return " ".join(verdict(curve).text for curve in self.curves)

    @property
    def headline(self) -> str:
        return f"{self.model.name} on {self.system.name}: {self.verdict}"

    def document(self) -> Document:
        from paleo.report import documents

        return documents.scale(self.model.name, self.system.name, self.curves)

    def table(self) -> RenderableType:
        from paleo.report import tables

        return tables.scale(self.model.name, self.system.name, self.curves)


@dataclass(frozen=True, repr=False, eq=False)
class Compared(StudyResult):
    """The same run on several systems."""

    command, rows = "compare", "systems"
    comparison: Comparison

    def best(self, objective: Objective = "time") -> Candidate | None:
        """The system that fits and takes the least time, money (cost) or energy; None where no figure is known."""
        return self.comparison.best(objective)

    @property
    def headline(self) -> str:
        winner = self.best()
        names = ", ".join(candidate.system.name for candidate in self.comparison.candidates)
        return f"{names}; " + ("it fits none of them" if winner is None else f"fastest is {winner.system.name}")

    def document(self) -> Document:
        from paleo.report import documents

        return documents.compare(self.comparison)

    def table(self) -> RenderableType:
        from paleo.report import comparison

        return comparison.compare(self.comparison)


@dataclass(frozen=True, repr=False, eq=False)
class Searched(StudyResult):
    """Every strategy of a search, the best first; ``explanation`` says why the first one wins."""

    command, rows = "plan", "plans"
    model: ModelSpec
    system: System
    search: Search
    explanation: Explanation | None

    @property
    def wish(self) -> buying.Wish:
        """The wish of a search: the shortest step, without an amount of training."""
        from paleo.studies.buying import Wish

        return Wish(objective=self.search.objective)

    @cached_property
    def lead(self) -> Prediction:
        """The step of the first plan."""
        from paleo.predict import predict

        return predict(self.model, self.system, self.search.plans[0].run)

    @property
    def best(self) -> Run | None:
        """The run of the best plan that fits."""
        fitting = [plan for plan in self.search.plans if plan.fits]
        return fitting[0].run if fitting else None

    @property
    def headline(self) -> str:
        first = self.search.plans[0]
        fits = f"best is {first.strategy or 'dp'}" if first.fits else "none fits"
        return f"{self.search.configurations:,} plans of {self.model.name} on {self.system.name}, {fits}"

    def document(self) -> Document:
        from paleo.report import search as shown

        return shown.document(self.model.name, self.system.name, self.search, self.explanation)

    def table(self) -> RenderableType:
        from paleo.report import search as shown

        return shown.table(self.search, self.lead, self.explanation)


@dataclass(frozen=True, repr=False, eq=False)
class Planned(StudyResult):
    """The answer to a purchase: plans of all systems and counts, those that meet the wish first."""

    command, rows = "plan", "plans"
    reply: buying.Answer

    @property
    def model(self) -> ModelSpec:
        return self.reply.model

    @property
    def system(self) -> System:
        """The first system."""
        return self.reply.searches[0][0]

    @property
    def search(self) -> Search:
        """All plans on the first system, at the global batch of the answer."""
        return self.reply.search

    @property
    def wish(self) -> buying.Wish:
        """What was asked for."""
        return self.reply.wish

    @property
    def best(self) -> buying.PricedPlan | None:
        """The first plan, where it meets the wish."""
        return self.reply.best

    @property
    def headline(self) -> str:
        from paleo.studies.buying import verdict

        return verdict(self.reply)

    def document(self) -> Document:
        from paleo.report import buying

        heading = {"model": self.reply.model.name, "objective": self.reply.wish.objective}
        return {**heading, **buying.document(self.reply)}

    def table(self) -> RenderableType:
        from paleo.report import buying

        return buying.table(self.reply)


@dataclass(frozen=True, repr=False, eq=False)
class TimeToTarget(StudyResult):
    """How long a task takes to its quality over counts of GPUs."""

    command, rows = "target", "points"
    task: TrainingTask
    system: System
    curve: TargetScaling
    tariff: Tariff

    @property
    def points(self) -> tuple[TargetTime, ...]:
        """A point for each count that runs."""
        return self.curve.points

    @property
    def headline(self) -> str:
        return f"{self.task.name} on {self.system.name}: {self.curve.verdict}"

    def document(self) -> Document:
        from paleo.report import target

        return target.document(self.task.name, self.system.name, self.curve, self.tariff)

    def table(self) -> RenderableType:
        from paleo.report import target

        return target.table(self.system.name, self.curve, self.tariff)


@dataclass(frozen=True, repr=False, eq=False)
class Audited(StudyResult):
    """A log of a training, or of nccl-tests, beside its prediction, and the faults that explain the difference."""

    command = "audit"
    audit: Audit | CollectiveAudit

    @property
    def headline(self) -> str:
        from paleo.report import audit as shown
        from paleo.studies.audit import Audit

        return shown.verdict(self.audit) if isinstance(self.audit, Audit) else self.audit.verdict

    def document(self) -> Document:
        from paleo.report import audit as shown
        from paleo.studies.audit import Audit

        return shown.document(self.audit) if isinstance(self.audit, Audit) else shown.collective_document(self.audit)

    def table(self) -> RenderableType:
        from paleo.report import audit as shown
        from paleo.studies.audit import Audit

        return shown.table(self.audit) if isinstance(self.audit, Audit) else shown.collective_table(self.audit)


@dataclass(frozen=True, repr=False, eq=False)
class Validated(StudyResult):
    """Measured tables beside their predictions; a row of `to_frame` for each file, of `predictions` for each of its
    rows."""

    command, rows = "validate", "files"
    reports: tuple[FileReport, ...]

    def predictions(self) -> pd.DataFrame:
        """The rows of all files with predicted, low and high in the unit of the measured column, and why a row has
        none."""
        from paleo.validate.runner import with_predictions

        return with_predictions(self.reports)

    @property
    def headline(self) -> str:
        counts = ((report.predicted.sum(), len(report.frame), report.file) for report in self.reports)
        return "; ".join(f"{predicted:,} of {rows:,} rows of {file} predicted" for predicted, rows, file in counts)

    def document(self) -> Document:
        from paleo.validate.report import document

        return document(self.reports)

    def table(self, *, worst: int = 5) -> RenderableType:
        """``worst``: how many of the worst rows of each file are shown."""
        from rich.console import Group
        from rich.text import Text

        from paleo.validate.report import renderables

        return Group(*(part for report in self.reports for part in (*renderables(report, worst=worst), Text())))
