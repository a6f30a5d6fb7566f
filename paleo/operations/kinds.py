"""Kinds of passes over memory, with the traits that strategies, fusion and prices go by.

A pass names its kind (``MemoryPass.operation``); a name that is not registered is an error. A layer with a kind of its
own registers that beside its code, with `add_kind`.
"""

from __future__ import annotations

from dataclasses import dataclass

from paleo.registry import Registry


@dataclass(frozen=True, slots=True)
class Kind:
    """What all passes of one name have in common.

    ``price`` is the family of the calibration that prices it. ``pointwise``: it touches each element on its own, so
    that a compiler may merge it with its neighbours. ``moves``: it only moves elements, so that sums which are not
    complete yet go through. ``routes``: it may send tokens to the ranks of their experts and back. ``merges_dims``:
    dims of its input that its output lacks lie inside others and cannot be divided. ``norm``: it subtracts a mean and
    divides by a deviation; where its rows are divided it exchanges statistics backward, too. ``row_statistics``:
    numbers for each row that ranks exchange where rows are divided. ``two_sweeps``: one over its input for statistics,
    then one over everything, which passes after it may join. ``reduces``: it sums dims up. ``inference`` is the kind
    that stands in for it where nothing is trained. ``free_in_paleo``: the original Paleo takes its time for zero (Qi et
    al., ICLR 2017).
    """

    name: str
    meaning: str
    price: str = "memory.elementwise"
    pointwise: bool = False
    moves: bool = False
    routes: bool = False
    merges_dims: bool = False
    norm: bool = False
    row_statistics: int = 2
    two_sweeps: bool = False
    reduces: bool = False
    inference: str | None = None
    free_in_paleo: bool = False


KINDS: Registry[Kind] = Registry("kind of pass")


def add_kind(kind: Kind) -> Kind:
    """Register a kind under its own name."""
    return KINDS.register(kind.name)(kind)


add_kind(Kind("elementwise", "a function of each element", pointwise=True, free_in_paleo=True))
add_kind(Kind("eager", "a function of each element in a kernel of its own, whatever compilers do"))
add_kind(Kind("dropout", "zeroes a share of the elements at random", pointwise=True))
add_kind(Kind("copy", "the same elements elsewhere", moves=True, merges_dims=True, free_in_paleo=True))
add_kind(Kind("gather", "rows of a table, or tokens on their way to experts", moves=True, routes=True))
add_kind(Kind("scatter", "tokens on their way back from experts", moves=True, routes=True))
add_kind(Kind("reduce", "sums, means or maxima along dims", reduces=True, free_in_paleo=True))
add_kind(Kind("pool", "one number for each position of a sliding window"))
add_kind(Kind("softmax", "softmax along rows", price="memory.softmax", row_statistics=3, free_in_paleo=True))
add_kind(Kind("norm", "normalisation of rows", price="memory.layernorm", norm=True, free_in_paleo=True))
add_kind(
    Kind(
        "batch_norm",
        "normalisation of channels by the statistics of a batch",
        norm=True,
        two_sweeps=True,
        inference="elementwise",
        free_in_paleo=True,
    )
)
add_kind(Kind("rope", "rotary position embedding", price="memory.rope", free_in_paleo=True))
add_kind(Kind("optimizer", "the update of parameters"))
