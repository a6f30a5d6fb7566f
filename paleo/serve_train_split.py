"""Purchase for two uses: GPUs of each system that serve a request rate, and what the other GPUs train meanwhile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from paleo.answers import JsonDocument, StudyResult
from paleo.errors import PaleoError, SpecError
from paleo.units import DAY, format_duration, parse_quantity

if TYPE_CHECKING:
    from rich.console import RenderableType

    from paleo.questions import SystemChoice
    from paleo.specs.model import ModelSpec
    from paleo.specs.run import Run
    from paleo.specs.system import System

#: Default latency limits of requests.
_DEFAULT_LATENCY_LIMITS: dict[str, Any] = {"ttft": "2s", "tpot": "50ms"}
#: Keywords of the tariff that both uses share.
_TARIFF = ("price", "term", "buy", "electricity", "pue", "host_power")


@dataclass(frozen=True, slots=True)
class ServeTrainSplit:
    """Division of one system's GPUs between serving and training; ``problem`` says why the system cannot do both.

    Attributes
    ----------
    system : System
        Machine: its devices, nodes and links.
    gpus, serving_gpus, training_gpus : int
        GPUs in all, of the service, of the training.
    serving_layout : str
        Replicas of the service.
    trained_samples : float
        Samples that ``training_gpus`` train in the planned time.
    rent_usd : float or None
        Rent of all GPUs for the planned time [USD].
    """

    system: System
    gpus: int
    serving_gpus: int = 0
    training_gpus: int = 0
    serving_layout: str = ""
    trained_samples: float = 0.0
    rent_usd: float | None = None
    problem: str = ""


@dataclass(frozen=True, repr=False, eq=False)
class ServeTrainSplits(StudyResult):
    """Systems that serve a request rate and train with the remaining GPUs; most training per USD comes first."""

    command, rows_key = "compare", "systems"
    network: str
    request_rate: float
    training_seconds: float
    splits: tuple[ServeTrainSplit, ...]

    @property
    def is_possible(self) -> bool:
        """True if at least one system can serve the request rate and train at the same time."""
        return not self.splits[0].problem

    @property
    def headline(self) -> str:
        first = self.splits[0]
        if first.problem:
            return f"No system serves {self.request_rate:g} requests/s of {self.network} and trains: {first.problem}"
        cost = "" if first.rent_usd is None else f" for {first.rent_usd:,.0f} USD"
        limits = " and ".join(_DEFAULT_LATENCY_LIMITS.values())
        return (
            f"{first.system.name}: {first.serving_gpus} of {first.gpus} GPUs serve {self.request_rate:g} requests/s of "
            f"{self.network} (first token, further token: {limits} at p99), {first.training_gpus} train "
            f"{first.trained_samples:,.0f} samples in {format_duration(self.training_seconds)}{cost}."
        )

    def json_document(self) -> JsonDocument:
        rows = [
            {
                "system": each.system.name, "gpus": each.gpus, "serving_gpus": each.serving_gpus,
                "training_gpus": each.training_gpus, "strategy": each.serving_layout or None,
                "samples": each.trained_samples,
                "cost": each.rent_usd, "problem": each.problem,
            }
            for each in self.splits
        ]  # fmt: skip
        first = self.splits[0]
        return {
            "model": self.network,
            "amount": f"{format_duration(self.training_seconds)} at {self.request_rate:g} requests/s",
            "samples": first.trained_samples, "best": {}, "not_certain": [], "verdict": self.headline, "systems": rows,
        }  # fmt: skip

    def table(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        from paleo.report.columns import empty_table, wrapped_text

        facts = empty_table("Two uses", ["system", "GPUs", "serve", "train", "samples", "USD", "replicas, or why not"])
        for each in self.splits:
            samples = f"{each.trained_samples:,.0f}" if each.trained_samples else "–"
            usd = "–" if each.rent_usd is None else f"{each.rent_usd:,.0f}"
            counts = (str(each.gpus), str(each.serving_gpus), str(each.training_gpus))
            facts.add_row(each.system.name, *counts, samples, usd, each.problem or each.serving_layout)
        return Group(wrapped_text(Text(self.headline, style="bold")), Text(), facts)


def parse_training_and_serving(text: str) -> tuple[float, float]:
    """Parse a time of training and a rate of serving from the value of option ``--for``.

    Parameters
    ----------
    text : str
        Such as "train:7d,serve:20/s".

    Returns
    -------
    tuple of (float, float)
        Time of training [s] and rate to serve [requests/s].

    Raises
    ------
    SpecError
        If either part is missing or not a number above zero.

    Examples
    --------
    >>> parse_training_and_serving("train:7d,serve:20/s")
    (604800.0, 20.0)
    """
    from paleo.services import parse_positive_number

    parts = dict(part.strip().partition(":")[::2] for part in text.split(","))
    if set(parts) != {"train", "serve"}:
        raise SpecError(f"--for {text!r:.60}: expected train:TIME,serve:RATE, such as train:7d,serve:20/s")
    stated = parts["train"].strip()
    try:
        days = float(stated.removesuffix("d")) if stated.endswith("d") else parse_quantity(stated, "time") / DAY
    except ValueError:
        days = 0.0
    if not 0 < days < 2.0**20:
        raise SpecError(f"--for {text!r:.60}: expected a time above zero, such as train:7d")
    seconds = days * DAY
    return seconds, parse_positive_number("for", parts["serve"])


def split_serving_and_training(
    model: str | ModelSpec, systems: SystemChoice | Sequence[SystemChoice], purposes: str, *, run: Run, **tariff: Any
) -> ServeTrainSplits:
    """Find which of several systems serves a rate and trains most with its remaining GPUs.

    Parameters
    ----------
    model : str or ModelSpec
        The network of both uses.
    systems : str or sequence
        Systems, each with its GPUs: ``dgx-h100:16,dgx-b200:8``.
    purposes : str
        ``train:7d,serve:20/s``.
    run : Run
        The training; its GPUs are those that do not serve.
    **tariff
        ``price``, ``term``, ``buy``, ``electricity``, ``pue``, ``host_power``.

    Returns
    -------
    ServeTrainSplits
        The systems, the most training for the money first.
    """
    from paleo.questions import parse_systems_with_gpu_counts

    seconds, rate = parse_training_and_serving(purposes)
    prices = {name: value for name, value in tariff.items() if name in _TARIFF}
    offers = [
        _uses_of(model, system, count, rate, seconds, run, prices)
        for system, count in parse_systems_with_gpu_counts(systems, run.gpus)
    ]
    offers.sort(key=lambda each: (bool(each.problem), -each.trained_samples / (each.rent_usd or 1.0)))
    name = model if isinstance(model, str) else model.title
    return ServeTrainSplits(name, rate, seconds, tuple(offers))


def _uses_of(
    model: str | ModelSpec, system: System, gpus: int, rate: float, seconds: float, run: Run, prices: dict[str, Any]
) -> ServeTrainSplit:
    from paleo.questions import compare
    from paleo.services import serve, token_service_of_result

    offer = ServeTrainSplit(system, gpus)
    service = token_service_of_result(serve(model, system, gpus=gpus, **_DEFAULT_LATENCY_LIMITS, **prices))
    if service.best is None:
        return replace(offer, problem=service.verdict)
    candidate = service.best.layout
    each = candidate.sharding.gpus
    replicas = math.ceil(rate * candidate.replicas / service.best.requests_per_s)
    serving, usd = replicas * each, service.usd_per_s
    offer = replace(offer, serving_gpus=serving, serving_layout=f"{replicas} x {candidate.sharding.text}")
    others = gpus - serving
    node = max(system.devices_per_node, 1)
    training = others // node * node if others >= node else 2 ** (others.bit_length() - 1) if others > 0 else 0
    if training < 1:
        serve_all = f"{serving} GPUs serve {rate:g} requests/s"
        return replace(offer, problem=f"{serve_all}, so none of the {gpus} is left to train")
    try:
        trained = compare(model, [(system, training)], run=run.model_copy(update={"gpus": training}))
    except PaleoError as error:
        return replace(offer, problem=str(error))
    first = trained.comparison.candidates[0]
    if not first.fits or first.samples_per_s is None:
        return replace(offer, problem=first.problem or f"the training does not fit into memory on {training} GPUs")
    cost = None if usd is None else usd * seconds
    return replace(offer, training_gpus=training, trained_samples=seconds * first.samples_per_s, rent_usd=cost)
