"""Placements: which dims of which layers are split over which mesh axes. A strategy is a preset that fills them in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from paleo.errors import PlanError, near
from paleo.graph import Graph, Node
from paleo.parallel.mesh import AXES
from paleo.registry import Registry

#: dim -> mesh axes that divide it.
Split = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Rule:
    """Layers whose type is ``layer`` (any when None) and whose name matches ``name`` place these dims; later rules win."""

    split: Split
    layer: str | None = None
    name: str = "*"

    def matches(self, node: Node) -> bool:
        return (self.layer is None or self.layer == node.type) and fnmatchcase(node.name, self.name)


@dataclass(frozen=True, slots=True)
class Placement:
    """An ordered set of rules: for each layer the last rule that matches it decides."""

    rules: tuple[Rule, ...]

    def of(self, node: Node) -> Split:
        return next((rule.split for rule in reversed(self.rules) if rule.matches(node)), {})


Preset = Callable[[Graph], Placement]
STRATEGIES: Registry[Preset] = Registry("strategy", "paleo.parallel")


def parse_degrees(text: str) -> tuple[str, dict[str, int]]:
    """A strategy as people write it: a preset's name, degrees, or both.

    >>> parse_degrees("dp"), parse_degrees("tp=8,dp=4")
    (('dp', {}), ('dp', {'tp': 8, 'dp': 4}))

    Raises PlanError with the near names for an unknown preset or axis, and for degrees that are no whole numbers.
    """
    preset, degrees = "", dict[str, int]()
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        axis, equals, value = part.partition("=")
        if not equals:
            if preset or part not in STRATEGIES:
                problem = "names two presets" if preset else f"unknown strategy {part!r}; {near(part, [*STRATEGIES, *AXES])}"
                raise PlanError(f"strategy {text!r}: {problem}")
            preset = part
        elif axis not in AXES:
            raise PlanError(f"strategy {text!r}: unknown axis {axis!r}; {near(axis, AXES)}")
        elif not value.isdecimal() or not 1 <= int(value) <= 10**7 or axis in degrees:
            raise PlanError(f"strategy {text!r}: {part!r} is not one degree of 1 or more, such as {axis}=8")
        else:
            degrees[axis] = int(value)
    return preset or "dp", degrees
