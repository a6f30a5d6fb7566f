"""The answer to a purchase: which system, how many of its GPUs and which layout train so much, by when, for how much.

Every system is searched at every count, all at one global batch; the best plans of each are priced. Intervals and power
are those of the best plan of a system and count, taken over by its other plans in proportion to their steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

from paleo.errors import PaleoError, PlanError, SpecError
from paleo.predict import HEADROOM, predict
from paleo.search.plans import search, unbeaten, with_room
from paleo.search.ranking import Ranking
from paleo.specs.loading import MOST_COUNT
from paleo.studies.cost import Tariff
from paleo.studies.launch import estimate_command, launch_flags
from paleo.studies.training import side_by_side, training
from paleo.units import DAY, duration, parse

if TYPE_CHECKING:
    from paleo.predict import Prediction
    from paleo.search.plans import Search
    from paleo.search.ranking import PlanRow
    from paleo.search.space import Space
    from paleo.specs.model import ModelSpec
    from paleo.specs.run import Run
    from paleo.specs.system import System
    from paleo.studies.long_run import LongRunOptions
    from paleo.studies.training import Amount, Training

#: The largest count that is tried to find one that fits, or that is in time.
MOST_GPUS = 16_384
OBJECTIVES = ("time", "cost", "energy", "gpus")
#: A system, and the counts of its GPUs that are searched.
Offer: TypeAlias = "tuple[System, Sequence[int]]"


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked: how much training (None: a step alone), within how many seconds and USD, best by what; with
    failures where a ``long_run`` is stated."""

    amount: Amount | None = None
    deadline: float | None = None
    budget: float | None = None
    objective: str = "time"
    tariff: Tariff = field(default_factory=Tariff)
    long_run: LongRunOptions | None = None


def stated_wish(
    amount: Amount | None, deadline: str | None, budget: str | float | None, objective: str, tariff: Tariff
) -> Wish:
    """A wish in words: ``deadline`` as ``60d`` or ``12h``, ``budget`` in USD as ``5M``; SpecError where they are not.

    >>> stated_wish(None, "1.5d", "20k USD", "cost", Tariff()).deadline
    129600.0
    """
    seconds = None if deadline is None else _seconds(str(deadline))
    dollars = None
    if budget is not None:
        try:
            dollars = parse(str(budget).removesuffix("USD").strip(), "count")
        except SpecError:
            dollars = 0.0
        if not 0 < dollars <= MOST_COUNT:
            raise SpecError(f"--budget {str(budget)!r}: expected USD above zero, such as 20000 or 5M")
    if seconds is not None and seconds <= 0:
        raise SpecError(f"--deadline {deadline!r}: expected a time above zero, such as 60d or 12h")
    return Wish(amount, seconds, dollars, objective, tariff)


def _seconds(deadline: str) -> float:
    """A time in days, or in a smaller unit."""
    days = deadline.strip().removesuffix("d")
    if deadline.strip().endswith("d") and days.replace(".", "", 1).isdigit():
        return float(days) * DAY
    try:
        return parse(deadline, "time")
    except SpecError:
        raise SpecError(f"--deadline {deadline!r}: expected a time with its unit, such as 60d or 12h") from None


@dataclass(frozen=True, slots=True)
class PricedPlan:
    """A plan with what it takes; None where no amount of training or no price is known. ``lead`` is the prediction of
    the best plan of its system and count."""

    system: System
    row: PlanRow
    lead: Prediction
    lead_training: Training | None

    @property
    def ratio(self) -> float:
        """The plan's step time over the leading plan's."""
        return self.row.step_time / self.lead.step_time

    @property
    def interval(self) -> tuple[float, float]:
        """Ends of the 90 % interval of its step [s]."""
        low, high = self.lead.interval
        return low * self.ratio, high * self.ratio

    @property
    def mfu(self) -> float:
        return self.lead.mfu / self.ratio

    @property
    def samples_per_s(self) -> float:
        return self.lead.samples_per_s / self.ratio

    @property
    def tokens_per_s(self) -> float | None:
        tokens = self.lead.tokens_per_s
        return None if tokens is None else tokens / self.ratio

    @property
    def seconds(self) -> float | None:
        """Seconds of the whole training."""
        return None if self.lead_training is None else self.lead_training.time * self.ratio

    @property
    def usd(self) -> float | None:
        cost = None if self.lead_training is None else self.lead_training.cost
        return None if cost is None else cost * self.ratio

    @property
    def joules(self) -> float | None:
        energy = None if self.lead_training is None else self.lead_training.energy
        return None if energy is None else energy * self.ratio

    @property
    def goodput(self) -> float | None:
        """Share of the time that makes new steps; None where failures are not counted."""
        failing = None if self.lead_training is None else self.lead_training.goodput
        return None if failing is None else failing.share

    @property
    def command(self) -> str:
        """The `paleo estimate` command that shows the plan again."""
        return estimate_command(self.lead.model, self.system, self.row.run)

    def score(self, objective: str) -> float:
        """The figure that the objective minimises; infinite where it is unknown."""
        figures = {
            "time": self.row.step_time if self.seconds is None else self.seconds,
            "cost": self.usd,
            "energy": self.joules,
            "gpus": float(self.row.gpus),
        }
        value = figures[objective]
        return math.inf if value is None else value

    @property
    def roomy(self) -> bool:
        """Whether the plan leaves memory free for fragmentation."""
        return self.row.memory <= (1.0 - HEADROOM) * self.system.device.memory.usable

    def meets(self, wish: Wish) -> bool:
        """Whether the plan fits the memory, the deadline and the budget."""
        in_time = wish.deadline is None or (self.seconds is not None and self.seconds <= wish.deadline)
        affordable = wish.budget is None or (self.usd is not None and self.usd <= wish.budget)
        return self.row.fits and in_time and affordable


@dataclass(frozen=True, slots=True)
class Remedy:
    """What would meet a wish that nothing meets, and the ``command`` that shows it."""

    words: str
    command: str


@dataclass(frozen=True, slots=True)
class Answer:
    """Plans of all systems and counts, those that meet the wish first, each part by the objective; ``searches`` by
    system; ``reasons`` why a system or count has none; ``remedies``: what would meet the wish where nothing does."""

    model: ModelSpec
    wish: Wish
    global_batch: int
    plans: tuple[PricedPlan, ...]
    searches: tuple[tuple[System, Search], ...]
    reasons: tuple[str, ...]
    remedies: tuple[Remedy, ...] = ()

    @property
    def best(self) -> PricedPlan | None:
        """The first plan, where it meets the wish."""
        return self.plans[0] if self.plans and self.plans[0].meets(self.wish) else None

    @property
    def search(self) -> Search:
        """All plans on the first system at this global batch as one search, whose first plans are the answer's."""
        system, batch = self.searches[0][0], self.global_batch
        results = [result for each, result in self.searches if each is system and result.global_batch == batch]
        rankings = [result.ranking for result in results if result.ranking is not None]
        ranking = Ranking.joined(rankings, system, results[0].objective)
        rows = tuple(plan.row for plan in self.plans if plan.system is system)
        front = unbeaten([row for result in results for row in result.front])
        sums = {name: sum(getattr(result, name) for result in results) for name in ("configurations", "fitting")}
        return replace(results[0], plans=rows, front=front, ranking=ranking, objective=self.wish.objective, **sums)

    @property
    def flags(self) -> str:
        """How the framework is started with the first plan."""
        if not self.plans:
            return ""
        first = self.plans[0]
        unchanged = first.row.run == first.lead.run
        return launch_flags(first.lead if unchanged else predict(self.model, first.system, first.row.run))


def answer(
    model: ModelSpec,
    offers: Sequence[Offer],
    run: Run,
    wish: Wish,
    *,
    space: Space | None = None,
    top: int = 10,
) -> Answer:
    """Search every system at each of its counts of GPUs, price the plans, order them by the wish."""
    if wish.objective not in OBJECTIVES:
        raise SpecError(f"objective {wish.objective!r}; expected one of {', '.join(OBJECTIVES)}")
    if wish.amount is None and (wish.deadline is not None or wish.budget is not None):
        raise SpecError(
            "--deadline and --budget need an amount of training: state --tokens, --epochs, --samples or --target"
        )
    wish = replace(wish, tariff=side_by_side(wish.tariff, (system for system, _ in offers)))
    largest = max(count for _, counts in offers for count in counts)
    sized = run if run.global_batch is not None else run.model_copy(update={"gpus": largest})
    runs = _of_all_batches(sized, wish)
    priced: list[PricedPlan] = []
    searches: list[tuple[System, Search]] = []
    reasons: list[str] = []
    pairs = [(system, count) for system, counts in offers for count in counts]
    for (system, gpus), tried in itertools.product(pairs, runs):
        try:
            result = _search(model, system, gpus, tried, space, top)
            priced += _priced(model, system, result, wish)
        except PaleoError as error:
            reasons.append(f"{system.share(gpus)}: {error}")
            continue
        searches.append((system, result))
    if not searches:
        raise PlanError("; ".join(dict.fromkeys(reasons)))
    priced.sort(key=lambda plan: (not plan.meets(wish), not plan.row.fits, not plan.roomy, plan.score(wish.objective)))
    batch = priced[0].lead.plan.global_batch
    reply = Answer(model, wish, batch, tuple(_shown(priced, top)), tuple(searches), tuple(reasons))
    if reply.best is not None:
        return reply
    kept = sized.model_copy(update={"global_batch": batch, "batch": None})
    remedies = _remedies(model, offers, kept, wish, space, any(plan.row.fits for plan in priced))
    return replace(reply, remedies=tuple(remedies))


def _shown(priced: Sequence[PricedPlan], top: int) -> list[PricedPlan]:
    """The first plans, the best of each system and count among them, in their order."""
    first: dict[tuple[str, int], int] = {}
    for number, plan in enumerate(priced):
        first.setdefault((plan.system.name, plan.row.gpus), number)
    leading = list(first.values())[:top]
    others = (number for number in range(len(priced)) if number not in leading)
    return [priced[number] for number in sorted([*leading, *itertools.islice(others, top - len(leading))])]


def _of_all_batches(run: Run, wish: Wish) -> list[Run]:
    """The run at each global batch that is worth trying, where it states none and the amount depends on it."""
    free = run.global_batch is None and run.batch is None and wish.amount is not None
    batches = wish.amount.batches if free and wish.amount is not None else ()
    return [run.model_copy(update={"global_batch": batch}) for batch in batches] or [run]


def _search(model: ModelSpec, system: System, gpus: int, run: Run, space: Space | None, top: int) -> Search:
    """The plans of one count of GPUs, the fastest first: they take the least money and energy, too."""
    result = search(model, system, run, counts=(gpus,), space=space, objective="time", top=top)
    return replace(result, plans=with_room(result, system, top))


def _priced(model: ModelSpec, system: System, result: Search, wish: Wish) -> list[PricedPlan]:
    first = result.plans[0]
    lead = predict(model, system, first.run)
    whole = None if wish.amount is None else training(lead, wish.amount, wish.tariff, long_run=wish.long_run)
    return [PricedPlan(system, row, lead, whole) for row in result.plans]


def _remedies(
    model: ModelSpec, offers: Sequence[Offer], run: Run, wish: Wish, space: Space | None, fits: bool
) -> Iterator[Remedy]:
    """The smallest doubled count that meets the wish, of the first system that has one, and where nothing ``fits`` the
    offload that does."""
    more = _more_gpus(model, offers, run, wish, space)
    offload = None if fits else _offload(model, offers, run)
    yield from (remedy for remedy in (more, offload) if remedy is not None)


def _more_gpus(model: ModelSpec, offers: Sequence[Offer], run: Run, wish: Wish, space: Space | None) -> Remedy | None:
    for system, counts in offers:
        gpus = max(counts) * 2
        while gpus <= min(MOST_GPUS, system.capacity or MOST_GPUS):
            try:
                plans = _priced(model, system, _search(model, system, gpus, run, space, 1), wish)
            except PaleoError:
                plans = []
            if plans and plans[0].meets(wish):
                return Remedy(f"{system.share(gpus)} would do", plans[0].command)
            gpus *= 2
    return None


def _offload(model: ModelSpec, offers: Sequence[Offer], run: Run) -> Remedy | None:
    """Full recomputation, sharded parameters and the optimizer in host memory, where that fits."""
    for system, counts in offers:
        for parts in ("optimizer", "optimizer,gradients,parameters"):
            offloaded = {
                "gpus": max(counts),
                "strategy": "zero=3",
                "recompute": "full",
                "microbatch": 1,
                "offload": parts,
            }
            chosen = run.model_copy(update=offloaded)
            try:
                fits = predict(model, system, chosen).memory.fits
            except PaleoError:
                continue
            if fits:
                words = f"with {parts} in host memory it fits"
                return Remedy(words, estimate_command(model, system, chosen))
    return None


def verdict(reply: Answer) -> str:
    """The answer in a sentence, with the commands of what would do instead."""
    remedies = "; or ".join(f"{remedy.words}: {remedy.command}" for remedy in reply.remedies)
    return f"{finding(reply)}; {remedies}." if remedies else f"{finding(reply)}."


def finding(reply: Answer) -> str:
    """The result of a purchase in a sentence without its full stop and without remedies."""
    wish, best = reply.wish, reply.best
    limits = _limits(wish)
    if best is not None:
        title = {"time": "Fastest", "cost": "Cheapest", "energy": "Least energy", "gpus": "Fewest GPUs"}[wish.objective]
        return f"{title}{limits}: {_summary(best)}{_late(wish, best)}"
    fitting = [plan for plan in reply.plans if plan.row.fits]
    if not fitting:
        nothing = "Nothing fits into memory"
        return nothing if reply.remedies else f"{nothing}, and no larger count or offload that was tried does"
    return f"Nothing is done{limits}. Nearest: {_summary(fitting[0])}"


def _limits(wish: Wish) -> str:
    parts = []
    if wish.deadline is not None:
        parts.append(long(wish.deadline))
    if wish.budget is not None:
        parts.append(f"{wish.budget:,.0f} USD")
    return " within " + " and ".join(parts) if parts else ""


def _late(wish: Wish, plan: PricedPlan) -> str:
    """A sentence where the slow end of a plan's interval is beyond the deadline."""
    if wish.deadline is None or plan.seconds is None:
        return ""
    slow = plan.seconds * plan.interval[1] / plan.row.step_time
    return ". The slow end of its interval is beyond the deadline" if slow > wish.deadline else ""


def _summary(plan: PricedPlan) -> str:
    sentence = f"{plan.system.share(plan.row.gpus)} with {plan.row.strategy or 'dp'}"
    if plan.seconds is not None:
        low, high = (end / plan.row.step_time for end in plan.interval)
        sentence += f", {long(plan.seconds)} (90 %: {long(low * plan.seconds)} to {long(high * plan.seconds)})"
    if plan.usd is not None:
        sentence += f", {plan.usd:,.0f} USD" if plan.usd >= 100 else f", {plan.usd:.3g} USD"
    return sentence


def long(seconds: float) -> str:
    """A time in days where it is a day or longer, else in hours and less."""
    return duration(seconds) if seconds < DAY else f"{seconds / DAY:.3g} days"
