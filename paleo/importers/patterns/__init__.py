"""Groups of calls that are one layer: norms and activations written out, attention, feed-forward blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paleo.importers.patterns.attention import attention_layers, written_out_scores
from paleo.importers.patterns.feed_forward import feed_forward_blocks
from paleo.importers.patterns.group import replace
from paleo.importers.patterns.written_out import collapse_modules, products_with_weights, written_out_functions

if TYPE_CHECKING:
    from paleo.importers.trace import Trace

_STEPS = (written_out_functions, products_with_weights, written_out_scores, attention_layers, feed_forward_blocks)


def recognise(trace: Trace) -> Trace:
    """The trace with groups replaced by single calls of kinds ``rms_norm``, ``activation``, ``attention``, ``mlp``."""
    collapse_modules(trace)
    trace.without_dead_calls()
    for step in _STEPS:
        replace(trace, step(trace))
        trace.without_dead_calls()
    return trace
