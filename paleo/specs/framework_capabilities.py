"""Capabilities of training frameworks (such as Megatron-LM): what a release can run, and the plans that it refuses.

Each entry of `hardware_specs/frameworks` lists axes, ZeRO stages, schedules, formats and so on, with sources. An entry
also has conditions on the quantities of a plan (`CONDITION_QUANTITIES`) under which the framework refuses to start.
`paleo.parallel.framework_checks` checks a plan against these entries.
"""

from __future__ import annotations

import ast
import csv
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, BeforeValidator, Field

from paleo.errors import SpecError, suggest_names
from paleo.specs.catalog import load_entry
from paleo.specs.loading import COMPARISONS, NonEmptyText, Spec, cache_by_files

Mask = npt.NDArray[np.bool_] | np.bool_ | bool

#: Quantities of a plan, a network and a device that a condition may use, with their meaning. A count that does not
#: apply is 0 and a degree that does not apply is 1, so that conditions need no special cases.
with (Path(__file__).parent / "quantities.csv").open(encoding="utf-8", newline="") as _file:
    CONDITION_QUANTITIES = {row["name"]: row["meaning"] for row in csv.DictReader(_file)}
_OFFLOADED = ("optimizer", "gradients", "parameters", "activations")
_LONGEST = 300

_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda left, right: np.floor_divide(left, _divisor(right)),
    ast.Mod: lambda left, right: np.remainder(left, _divisor(right)),
}
_COMPARE: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    **COMPARISONS,
    ast.In: lambda left, right: _is_one_of(left, right),
    ast.NotIn: lambda left, right: np.logical_not(_is_one_of(left, right)),
}


def _divisor(number: Any) -> Any:
    """Replace 0 by 1 in a divisor: a count that does not apply is 0, and everything shall divide by such a count."""
    return np.where(np.asarray(number) == 0, 1, number)


def _is_one_of(value: Any, words: Sequence[Any]) -> Any:
    """Return True where a value equals one of several words or numbers.

    Comparing one by one is faster than sorting long arrays of text.
    """
    return functools.reduce(np.logical_or, (np.asarray(value) == word for word in words), np.asarray(False))


@dataclass(frozen=True, slots=True)
class Condition:
    """Boolean expression over the quantities of a plan, such as ``tp > 1 and heads % tp != 0``.

    Expressions may use comparisons, ``and``, ``or``, ``not``, ``in (…)``, + - * // %, ``min`` and ``max`` over names of
    `CONDITION_QUANTITIES`, whole numbers and words. Quantities may be arrays with one entry for each plan.
    """

    text: str
    syntax_tree: ast.expr
    variable_names: frozenset[str]

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Parse a condition and check that it uses allowed operators and names only.

        Parameters
        ----------
        text : str
            Condition as written in a YAML file.

        Returns
        -------
        Condition
            Condition that can be evaluated for plans.

        Raises
        ------
        SpecError
            If a name is no known quantity, or an operation is not allowed.
        """
        if not isinstance(text, str) or len(text) > _LONGEST:
            raise SpecError(f"{text!r:.80}: expected a condition of at most {_LONGEST} characters")
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise SpecError(f"{text!r} is not a condition, such as 'tp > 1 and heads % tp != 0'") from None
        _check(tree)
        names = frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name)) - _FUNCTIONS.keys()
        return cls(text, tree, names)

    def holds(self, quantities: Mapping[str, Any]) -> Mask:
        """Evaluate the condition for one or several plans; False if a quantity that it names is unknown.

        Parameters
        ----------
        quantities : dict of str to Any
            Numbers, words or arrays of them by the names of `CONDITION_QUANTITIES`; absent ones are unknown.

        Returns
        -------
        Mask
            True where the condition holds, broadcast over arrays.

        Examples
        --------
        >>> bool(Condition.parse("tp > 1 and heads % tp != 0").holds({"tp": 3, "heads": 32}))
        True
        """
        if not self.variable_names <= quantities.keys():
            return False
        return np.asarray(_value(self.syntax_tree, quantities), dtype=bool)


_FUNCTIONS: Mapping[str, Callable[[Any, Any], Any]] = {"min": np.minimum, "max": np.maximum}


def _check(node: ast.expr) -> None:
    """Raise SpecError if a condition's syntax tree has a node (operator, name, call) that is not allowed."""
    match node:
        case ast.Constant(value=int() | str()):
            return
        case ast.Name(id=name):
            if name not in CONDITION_QUANTITIES:
                nearest = suggest_names(name, CONDITION_QUANTITIES)
                raise SpecError(f"unknown quantity {name!r} in a condition; {nearest}")
            return
        case ast.Tuple(elts=parts) | ast.BoolOp(values=parts):
            children = parts
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            children = [operand]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            children = [left, right]
        case ast.Compare(left=left, ops=ops, comparators=others) if all(type(op) in _COMPARE for op in ops):
            children = [left, *others]
        case ast.Call(func=ast.Name(id=name), args=[_, _] as arguments, keywords=[]) if name in _FUNCTIONS:
            children = arguments
        case _:
            allowed = "comparisons, and, or, not, in (…), + - * // %, min, max"
            raise SpecError(f"{ast.unparse(node)!r} is not allowed in a condition; use {allowed}")
    for child in children:
        _check(child)


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Evaluate a node of a condition's syntax tree for given quantities; `_check` has validated the node."""
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return names[node.id]
        case ast.Tuple():
            return [_value(part, names) for part in node.elts]
        case ast.BoolOp():
            join = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
            return functools.reduce(join, (_value(part, names) for part in node.values))
        case ast.UnaryOp():
            value = _value(node.operand, names)
            return np.logical_not(value) if isinstance(node.op, ast.Not) else -value
        case ast.BinOp():
            return _BINARY[type(node.op)](_value(node.left, names), _value(node.right, names))
        case ast.Compare():
            sides = [_value(side, names) for side in (node.left, *node.comparators)]
            pairs = zip(sides, node.ops, sides[1:], strict=False)
            return functools.reduce(np.logical_and, (_COMPARE[type(op)](left, right) for left, op, right in pairs))
        case ast.Call(func=ast.Name(id=name)):
            return _FUNCTIONS[name](*(_value(argument, names) for argument in node.args))
    raise SpecError(f"{ast.unparse(node)!r} is not allowed in a condition")


def _parsed(text: str) -> str:
    """Return the text of a condition unchanged after checking that it parses (validator of a schema)."""
    Condition.parse(text)
    return text


class FrameworkRestriction(Spec):
    """Restriction of a framework: the framework does not run plans for which the condition ``when`` holds.

    ``fact`` is the reason in words, ``source`` the line of the framework's source that says so.
    """

    when: Annotated[str, AfterValidator(_parsed)]
    fact: NonEmptyText
    source: NonEmptyText

    @functools.cached_property
    def condition(self) -> Condition:
        """Condition of the restriction as a parsed expression."""
        return Condition.parse(self.when)


class SupportedValues(Spec):
    """Values that a framework supports (such as dtypes), with the source file that lists them."""

    values: tuple[Any, ...]
    source: NonEmptyText
    fact: NonEmptyText | None = None


class FrameworkRemark(Spec):
    """Remark on how a framework works that excludes no plan, such as what it calls a microbatch."""

    fact: NonEmptyText
    source: NonEmptyText


class FrameworkAbilities(Spec):
    """Capabilities and restrictions of one release of a framework, each with its source.

    Attributes
    ----------
    axes : SupportedValues
        Axes of the mesh, among dp, shard, tp, sp, cp, ulysses, ep, etp, pp and vp.
    zero, schedules, recompute, dtypes, optimizers, offload : SupportedValues
        ZeRO stages, pipeline schedules, recompute policies, number formats of matrix products, optimizers, and what
        may be offloaded to host memory, by the names of the run file.
    refused : dict of str to FrameworkRestriction
        Conditions under which the framework refuses a plan although its lists allow it.
    habits : dict of str to FrameworkRemark
        Remarks on batch rules, number formats of communication and defaults.
    """

    name: NonEmptyText
    title: NonEmptyText
    release: Annotated[str, BeforeValidator(str)]
    date: Annotated[str, BeforeValidator(str)]
    notes: str | None = None
    axes: SupportedValues
    zero: SupportedValues
    schedules: SupportedValues
    recompute: SupportedValues
    dtypes: SupportedValues
    optimizers: SupportedValues
    offload: SupportedValues
    refused: dict[NonEmptyText, FrameworkRestriction] = Field(default_factory=dict)
    habits: dict[NonEmptyText, FrameworkRemark] = Field(default_factory=dict)

    @functools.cached_property
    def restrictions(self) -> tuple[FrameworkRestriction, ...]:
        """All restrictions: those implied by the lists of supported values, then the conditions of the file."""
        of_axes = [
            self._refusal(f"{axis} > {0 if axis in ('sp', 'ulysses', 'etp') else 1}", f"no {noun}", self.axes)
            for axis, noun in _AXIS_NOUNS.items()
            if axis not in self.axes.values
        ]
        return (*of_axes, *self._of_lists(), *self.refused.values())

    @property
    def name_and_release(self) -> str:
        """Name of the framework and the release whose source was read, as one text."""
        return f"{self.name} {self.release}"

    @property
    def uses_zero3_pipelines(self) -> bool:
        """True if ZeRO-3 is the framework's only sharding, so that pipeline stages run with sharded parameters."""
        return "pp" in self.axes.values and 3 in self.zero.values and 1 not in self.zero.values

    def _of_lists(self) -> list[FrameworkRestriction]:
        """Return restrictions that exclude all values missing from the lists (ZeRO stages, dtypes and so on)."""
        lists = [
            ("zero", "ZeRO", self.zero),
            ("recompute", "recomputation", self.recompute),
            ("dtype", "formats", self.dtypes),
            ("optimizer", "optimizers", self.optimizers),
            ("schedule", "pipeline schedules", self.schedules),
        ]
        refusals = []
        for name, noun, listed in lists if "pp" in self.axes.values else lists[:-1]:
            when = f"{name} not in ({''.join(f'{value!r}, ' for value in listed.values)})"
            when = f"pp > 1 and {when}" if name == "schedule" else when
            refusals.append(self._refusal(when, _supported_values(noun, listed.values), listed))
        kept = [part for part in _OFFLOADED if part not in self.offload.values]
        refusals += [self._refusal(f"offload_{part} == 1", f"no offload of {part}", self.offload) for part in kept]
        return refusals

    def _refusal(self, when: str, says: str, listed: SupportedValues) -> FrameworkRestriction:
        fact = f"{says}; {listed.fact}" if listed.fact else says
        return FrameworkRestriction(when=when, fact=fact, source=listed.source)


#: Axes of the mesh beside dp, in words.
_AXIS_NOUNS = {
    "shard": "groups of shards",
    "tp": "tensor parallelism (tp)",
    "sp": "sequence parallelism over tp (sp)",
    "cp": "context parallelism (cp)",
    "ulysses": "exchange of heads for the sequence (ulysses)",
    "ep": "expert parallelism (ep)",
    "etp": "folding of experts over tp (etp)",
    "pp": "pipeline parallelism (pp)",
    "vp": "virtual pipeline stages (vp)",
}


def _supported_values(noun: str, values: tuple[Any, ...]) -> str:
    """Format a list of supported values for an error message.

    >>> _supported_values("ZeRO", (0, 3)), _supported_values("pipeline schedules", ())
    ('ZeRO: 0, 3', 'pipeline schedules: none')
    """
    return f"{noun}: {', '.join(map(str, values)) or 'none'}"


@cache_by_files
def load_framework(name_or_path: str | Path) -> FrameworkAbilities:
    """Load the capabilities and restrictions of a framework.

    Parameters
    ----------
    name_or_path : str | Path
        Entry of `hardware_specs/frameworks`, or a YAML file.

    Returns
    -------
    FrameworkAbilities
        Axes, ZeRO stages, schedules, formats and refused plans, each with its source.

    Raises
    ------
    SpecError
        If there is no such entry or the file is not valid.

    Examples
    --------
    >>> load_framework("torchtitan").zero.values
    (0, 3)
    """
    return load_entry(FrameworkAbilities, "frameworks", name_or_path)
