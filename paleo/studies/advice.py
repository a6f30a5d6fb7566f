"""Suggestions for a run that does not fit in memory; each suggested change is predicted first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paleo.errors import PaleoError, PlanError
from paleo.lowering.stages_and_recompute import RECOMPUTE_POLICIES, has_mixed_recompute
from paleo.predict import Prediction, predict
from paleo.specs.run import Run, replace_fields

#: How much deeper a pipeline is tried than it is.
_DEEPER = 8
_OFFLOADS = ("optimizer", "activations", "optimizer,gradients,parameters")


@dataclass(frozen=True, slots=True)
class Advice:
    """Suggested change to a run that saves memory, as command-line options, with the prediction of the changed run."""

    change: str
    prediction: Prediction

    @property
    def fits(self) -> bool:
        return self.prediction.memory.fits


def suggest_memory_savings(prediction: Prediction) -> tuple[Advice, ...]:
    """Suggest changes that save memory for a run that does not fit, each with its prediction.

    All changes keep the number of GPUs and the global batch. Single changes and some pairs are tried first. If none of
    them fits, the strongest changes of more and more kinds are combined.

    Parameters
    ----------
    prediction : Prediction
        Prediction of the run.

    Returns
    -------
    tuple of Advice
        Changes that fit, the fastest first, then others by memory; empty if the run fits.
    """
    if prediction.memory.fits:
        return ()
    stated = {"global_batch": prediction.plan.global_batch, "batch": None, "microbatch": prediction.plan.microbatch}
    base = prediction.run.model_copy(update=stated)
    kinds = [list(kind) for kind in _kinds(prediction)]
    tried = _tried(prediction, base, [[change] for kind in kinds for change in kind] + _pairs(kinds))
    if not any(advice.fits for advice in tried):
        strongest = [kind[-1] for kind in kinds[:-1] if kind]
        tried += _tried(prediction, base, [strongest[:count] for count in range(2, len(strongest) + 1)])
    distinct = {advice.change: advice for advice in tried}  # the strongest together may be a pair that was tried
    return tuple(sorted(distinct.values(), key=_order))


def _order(advice: Advice) -> tuple[bool, float]:
    return not advice.fits, advice.prediction.step_time if advice.fits else advice.prediction.memory.total


#: Fields of a run that change.
_Change = dict[str, object]


def _kinds(prediction: Prediction) -> Iterator[Iterator[_Change]]:
    """Yield groups of changes that save memory, each group from the weakest to the strongest change.

    The groups are microbatch, sharding, recomputation, tensor parallelism, offload and pipeline.
    """
    size = prediction.plan.microbatch
    yield ({"microbatch": size >> halvings} for halvings in range(1, size.bit_length()))
    yield _strategies(prediction, "zero")
    training = not prediction.run.forward_only
    yield _recomputations(prediction) if training else iter(())
    yield _strategies(prediction, "tp")
    yield ({"offload": parts} for parts in _OFFLOADS if training and prediction.run.offload.states == "none")
    yield _strategies(prediction, "pp")


def _recomputations(prediction: Prediction) -> Iterator[_Change]:
    """Yield changes to stronger activation recomputation, first of some layers, then of all.

    None are yielded if the run recomputes its layers under different policies.
    """
    if has_mixed_recompute(prediction.run) or prediction.run.recompute.policy == "full":
        return
    for more in RECOMPUTE_POLICIES[RECOMPUTE_POLICIES.index(prediction.run.recompute.policy) + 1 : -1]:
        yield {"recompute": more}
    from paleo.search.partial_recompute import fit_by_partial_recompute

    partial = fit_by_partial_recompute(prediction)
    if partial is not None:
        yield {"recompute": "full", "recompute_layers": partial.run.recompute.layers}
    yield {"recompute": "full"}


def _strategies(prediction: Prediction, axis: str) -> Iterator[_Change]:
    """Yield changes of the strategy to a larger degree of one mesh axis, or to a higher ZeRO stage."""
    plan = prediction.plan
    if plan.strategy.preset != "dp":
        return
    if axis == "zero":
        for stage in range(plan.strategy.zero + 1, 4 if plan.zero_shards > 1 else 0):
            yield {"zero": stage}
        return
    present = plan.mesh.degree(axis)
    degree, most = 2 * present, prediction.system.devices_per_node if axis == "tp" else _DEEPER * present
    while degree <= most and plan.dp * present % degree == 0:
        yield {axis: degree}
        degree *= 2


def _pairs(kinds: list[list[_Change]]) -> list[list[_Change]]:
    """Return pairs of changes: each ZeRO stage with the smallest microbatch, and with each full recomputation."""
    microbatches, stages, recompute = kinds[:3]
    recompute = [change for change in recompute if "recompute_layers" not in change]
    return [[stage, other] for stage in stages for other in (*microbatches[-1:], *recompute)]


def _tried(prediction: Prediction, base: Run, tries: list[list[_Change]]) -> list[Advice]:
    advice = []
    for changes in tries:
        merged = {key: value for change in changes for key, value in change.items()}
        try:
            # Predict the changed run; raise SpecError or PlanError if it cannot be changed so, or its framework
            # cannot run that.
            plan = prediction.plan
            degrees: _Change = {key: merged[key] for key in ("tp", "pp", "zero") if key in merged}
            fields = {key: value for key, value in merged.items() if key not in degrees}
            words = [_word(key, value) for key, value in fields.items()]
            if degrees:
                has: _Change = {axis: degree for axis, degree in plan.mesh.degrees if axis != "dp" and degree > 1}
                has |= {"zero": plan.strategy.zero} if plan.strategy.zero else {}
                parts = [f"{axis}={degree}" for axis, degree in {**has, **degrees}.items()]
                parts += [f"vp={plan.strategy.chunks}"] if plan.strategy.chunks > 1 else []
                parts += ["sp"] if plan.strategy.sequence_parallel or "tp" in degrees else []
                fields["strategy"] = ",".join(parts)
                words.insert(0, f"--strategy {fields['strategy']}")
            changed = predict(prediction.model, prediction.system, replace_fields(base, fields))
            if len(changed.framework_violations) > len(prediction.framework_violations):
                raise PlanError(changed.framework_violations[0])
            advice.append(Advice(" ".join(words), changed))
        except PaleoError:
            continue
    return advice


def _word(key: str, value: object) -> str:
    return f"--set offload={value}" if key == "offload" else f"--{key.replace('_', '-')} {value}"
