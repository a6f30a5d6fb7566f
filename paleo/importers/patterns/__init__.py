"""Recognition of traced calls that form one layer: norms, activations, attention, feed-forward blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paleo.importers.patterns._attention import find_attention_layers, find_feed_forward_blocks, find_unfused_attention
from paleo.importers.patterns._elementary_steps import (
    collapse_modules,
    find_elementary_step_functions,
    find_weight_products,
    replace_matched_subgraphs,
)

if TYPE_CHECKING:
    from paleo.importers._network_trace import Trace

_STEPS = (
    find_elementary_step_functions,
    find_weight_products,
    find_unfused_attention,
    find_attention_layers,
    find_feed_forward_blocks,
)


def recognise_patterns(trace: Trace) -> Trace:
    """Replace groups of calls by single calls of kinds ``add_rms_norm``, ``activation``, ``attention`` and ``mlp``.

    Parameters
    ----------
    trace : Trace
        Calls of a network.

    Returns
    -------
    Trace
        The changed trace.
    """
    collapse_modules(trace)
    trace.remove_dead_calls()
    for step in _STEPS:
        replace_matched_subgraphs(trace, step(trace))
        trace.remove_dead_calls()
    return trace
