"""Patterns of calls that are one layer: norms and activations in elementary steps, attention, feed-forward blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paleo.importers.patterns._attention import attention_layers, feed_forward_blocks, find_written_out_attention
from paleo.importers.patterns._elementary_steps import (
    collapse_modules,
    find_elementary_step_functions,
    products_with_weights,
    replace_groups,
)

if TYPE_CHECKING:
    from paleo.importers._trace import Trace

_STEPS = (
    find_elementary_step_functions,
    products_with_weights,
    find_written_out_attention,
    attention_layers,
    feed_forward_blocks,
)


def recognise_patterns(trace: Trace) -> Trace:
    """Replace groups of calls by single calls of kinds ``rms_norm``, ``activation``, ``attention`` and ``mlp``.

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
        replace_groups(trace, step(trace))
        trace.remove_dead_calls()
    return trace
