"""Filter that keeps only the configurations of a search that a chosen framework (such as Megatron-LM) can run.

Layouts are checked before their times are predicted, all other choices after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from paleo.lowering.stages_and_recompute import RECOMPUTE_POLICIES
from paleo.parallel.framework_checks import network_quantities, run_quantities, violated_restrictions
from paleo.parallel.placement import AXES
from paleo.schedules.base import SCHEDULES
from paleo.specs.framework_capabilities import FrameworkAbilities, load_framework

if TYPE_CHECKING:
    from paleo.network.graph import Graph
    from paleo.search.configurations import ConfigurationResults
    from paleo.search.space import Layout, SearchSpace
    from paleo.specs.framework_capabilities import FrameworkRestriction
    from paleo.specs.run import Run
    from paleo.specs.software import SoftwareProfile
    from paleo.specs.system import System


@dataclass(frozen=True, slots=True)
class FrameworkFilter:
    """Filter of a search that drops configurations which the chosen framework cannot run.

    ``exclusion_counts`` counts the configurations that each documented limit of the framework excludes.
    """

    framework: FrameworkAbilities | None
    run_and_network_quantities: dict[str, Any]
    exclusion_counts: Counter[str] = field(default_factory=Counter)

    @classmethod
    def for_search(
        cls, space: SearchSpace, graph: Graph, run: Run, system: System, software: SoftwareProfile, dtype: str
    ) -> FrameworkFilter:
        """Load the framework's documented limits, and the quantities of network and run that these limits refer to.

        Parameters
        ----------
        space : SearchSpace
            Space of the search, which names the framework; without one, the filter keeps everything.
        graph : Graph
            Network as a graph of layers.
        run : Run
            Options of the run: GPUs, batch, parallelism, number format and so on.
        system : System
            Machine: its devices, nodes and links.
        software : SoftwareProfile
            Software profile: how a framework runs kernels and communication.
        dtype : str
            Number format of the operands of matrix products.

        Returns
        -------
        FrameworkFilter
            Object that filters configurations by what the framework can run.
        """
        if space.framework is None:
            return cls(None, {})
        fixed = {**network_quantities(graph), **run_quantities(run, system, software, dtype)}
        return cls(load_framework(space.framework), fixed | {"gpus": run.gpus, "global_batch": run.global_batch})

    def supported_layouts(self, layouts: Sequence[Layout]) -> list[Layout]:
        """Return the layouts that the framework can run, judged by their degrees of parallelism.

        Parameters
        ----------
        layouts : sequence of Layout
            Layouts of the search.

        Returns
        -------
        list of Layout
            Layouts that no documented limit excludes.
        """
        if self.framework is None or not layouts:
            return list(layouts)
        allowed = self._allowed(
            {**self.run_and_network_quantities, **_of_layouts(layouts)}, len(layouts), self.framework.restrictions
        )
        return [layout for layout, runs in zip(layouts, allowed, strict=True) if runs]

    def supported_results(self, results: ConfigurationResults, layouts: Sequence[Layout]) -> ConfigurationResults:
        """Return the evaluated configurations that the framework can run.

        Parameters
        ----------
        results : ConfigurationResults
            Evaluated configurations.
        layouts : sequence of Layout
            Layouts to which the configurations refer.

        Returns
        -------
        ConfigurationResults
            The configurations that remain.
        """
        if self.framework is None or not len(results):
            return results
        by_layout = _of_layouts(layouts)
        left = [r for r in self.framework.restrictions if not r.condition.variable_names <= by_layout.keys()]
        named = {"pp"}.union(*(refusal.condition.variable_names for refusal in left))
        degrees = {name: column[results.layout_index] for name, column in by_layout.items() if name in named}
        local = np.array([layout.local_batch for layout in layouts])[results.layout_index]
        orders = np.where(degrees["pp"] == 1, -1, results.choice_field("schedule"))
        known = {
            **self.run_and_network_quantities,
            **degrees,
            "microbatch": results.microbatch,
            "microbatches": local // results.microbatch,
            "recompute": np.array(RECOMPUTE_POLICIES)[results.recompute_index],
            "partial": 0,
            "schedule": np.array([*SCHEDULES, "none"])[orders],
            "vp": results.choice_field("chunks"),
            "zero": results.choice_field("zero"),
            "overlapped": results.choice_field("overlaps_gradient_exchange").astype(np.intp),
            "cut": np.array([int(cut is not None) for cut in results.layers_per_piece_by_batch])[results.batch_index],
        }
        allowed = self._allowed(known, len(results), left)
        columns = {n: getattr(results, n)[allowed] for n in ("case_index", "batch_index", "step_time", "memory")}
        return replace(results, **columns)

    def _allowed(
        self, known: dict[str, Any], size: int, refusals: Sequence[FrameworkRestriction]
    ) -> np.ndarray[Any, np.dtype[np.bool_]]:
        allowed = np.ones(size, dtype=bool)
        for refusal in refusals:
            mask = np.broadcast_to(np.asarray(refusal.condition.holds(known), dtype=bool), (size,))
            self.exclusion_counts[f"{refusal.fact} ({refusal.source})"] += int((mask & allowed).sum())
            allowed &= ~mask
        return allowed

    @property
    def exclusion_message(self) -> str:
        """Error text on why no configuration is left: the two limits of the framework that exclude most."""
        facts = [fact for fact, count in self.exclusion_counts.most_common(2) if count]
        if self.framework is None or not facts:
            return ""
        runs = f"none of the remaining configurations is run by {self.framework.name_and_release}"
        return f": {runs}: {'; '.join(facts)}; --software any lifts this limit"


def can_recompute_some_layers(space: SearchSpace) -> bool:
    """Return True if the framework can limit full recomputation to some layers of a stage.

    Parameters
    ----------
    space : SearchSpace
        Space of the search, which names the framework.

    Returns
    -------
    bool
        True if it can, or if no framework is named.
    """
    return space.framework is None or not any(violated_restrictions(load_framework(space.framework), {"partial": 1}))


def _of_layouts(layouts: Sequence[Layout]) -> dict[str, Any]:
    """Return the degrees and flags of layouts that a framework's limits refer to, by name, one entry per layout."""
    rows = [
        {
            **{axis: layout.mesh.degree(axis) for axis in AXES},
            "dp": layout.mesh.replicas,
            "sp": int(layout.sequence_parallel),
            "ulysses": int(layout.context_parallel_method == "all_to_all" and layout.mesh.degree("cp") > 1),
            "ep": layout.expert_ranks,
            "etp": (layout.etp or 0) if layout.expert_ranks > 1 else 0,
        }
        for layout in layouts
    ]
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}
