"""What-if studies: copies of a system with one hardware property changed (memory, links, compute peak, power).

A property is named by its path in the system file (`change_system`), or is one of `HARDWARE_SCALERS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, get_args

from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from paleo.errors import SpecError, suggest_names
from paleo.specs.device import Device, Memory
from paleo.specs.loading import Spec
from paleo.units import Quantity

if TYPE_CHECKING:
    from paleo.specs.system import System


_FACTOR = re.compile(r"x(\d+(?:\.\d*)?|\.\d+)\Z")
_STEP = re.compile(r"([a-z_0-9]+)(?:\[(\d{1,6}|\*)\])?\Z")


def change_system(system: System, path: str, value: Any) -> System:
    """Return a copy of a system with one property of its file replaced or multiplied, for a what-if study.

    Parameters
    ----------
    system : System
        Machine: its devices, nodes and links.
    path : str
        Path in the system file, such as ``levels[*].link.bandwidth``.
    value : Any
        Value with unit, or a factor such as ``x0.8``.

    Returns
    -------
    System
        The changed system.

    Raises
    ------
    SpecError
        If there is no such property, or the new value makes no valid system.

    Examples
    --------
    >>> from paleo.specs.system import load_system
    >>> slow = change_system(load_system("dgx-h100"), "levels[*].link.bandwidth", "x0.5")
    >>> load_system("dgx-h100").levels[1].link.bandwidth / slow.levels[1].link.bandwidth
    2.0
    """
    try:
        result: System = _changed(system, path.split("."), value)
    except SpecError as error:
        raise SpecError(f"axes.system.{path[:200]}: {error}") from None
    return result


def _changed(owner: Any, steps: list[str], value: Any) -> Any:
    match = _STEP.match(steps[0])
    fields = list(type(owner).model_fields) if isinstance(owner, Spec) else list(owner)
    if match is None or match[1] not in fields:
        raise SpecError(f"{steps[0][:80]!r} is not there; {suggest_names(steps[0], fields)}")
    name, index = match[1], match[2]
    old = getattr(owner, name) if isinstance(owner, Spec) else owner[name]
    if index is not None:
        new: Any = _items(old, index, lambda item: _inside(item, steps[1:], value))
    elif len(steps) > 1:
        new = _inside(old, steps[1:], value, name)
    else:
        new = _replaced(owner, name, old, value)
    return _checked(_with_figure(owner, name, new)) if isinstance(owner, Spec) else {**owner, name: new}


def _with_figure(owner: Spec, name: str, new: Any) -> Spec:
    """Copy a part of a system with one field set to ``new``; a new memory capacity scales the usable memory, too."""
    if isinstance(owner, Memory) and name == "capacity":
        return owner.with_capacity(new)
    return owner.model_copy(update={name: new})


def _inside(part: Any, steps: list[str], value: Any, name: str = "it") -> Any:
    if not steps:
        raise SpecError("expected a figure of the item, such as [0].link.bandwidth")
    if not isinstance(part, Spec | Mapping):
        raise SpecError(f"{name} has no parts ({type(part).__name__})")
    return _changed(part, steps, value)


def _checked(owner: Spec) -> Spec:
    """Run the consistency checks (pydantic validators) of a changed part of a system, and return the part."""
    for name in type(owner).__pydantic_decorators__.model_validators:
        getattr(owner, name)()
    return owner


def _items(old: Any, index: str, change: Callable[[Any], Any]) -> tuple[Any, ...]:
    if not isinstance(old, tuple) or (index != "*" and int(index) >= len(old)):
        raise SpecError(f"there is no [{index}] in {len(old) if isinstance(old, tuple) else 0} items")
    return tuple(change(item) if index in ("*", str(number)) else item for number, item in enumerate(old))


def _replaced(owner: Any, name: str, old: Any, value: Any) -> Any:
    field = type(owner).model_fields[name] if isinstance(owner, Spec) else None
    factor = _FACTOR.match(value) if isinstance(value, str) else None
    if factor is not None:
        return _multiplied(field, old, float(factor[1]), value)
    if field is None:
        raise SpecError(f"{value!r:.80}: expected a factor such as 'x0.8'")
    try:
        return _adapter(field).validate_python(value)
    except ValueError as error:
        reason = str(error).splitlines()
        raise SpecError(f"{value!r:.80}: {reason[min(1, len(reason) - 1)].strip()}") from None


def _multiplied(field: FieldInfo | None, old: Any, factor: float, text: str) -> Any:
    """Multiply a system property, or each entry of a table of properties, by a factor; None stays None."""
    if old is None:
        return None
    if isinstance(old, Mapping) and old:
        return {key: _multiplied(field, figure, factor, text) for key, figure in old.items()}
    if not isinstance(old, int | float) or isinstance(old, bool):
        raise SpecError(f"{text!r:.80} is a factor, and {old!r:.80} is no number")
    new = old * factor
    quantity = _quantity(field.metadata, field.annotation) if field is not None else None
    if quantity is not None:
        return quantity.check_range(new, text)
    if isinstance(old, int) and not new.is_integer():
        raise SpecError(f"{text!r:.80} times {old} is {new:g}, not a whole number")
    try:
        return new if field is None else _adapter(field).validate_python(int(new) if isinstance(old, int) else new)
    except ValueError:
        raise SpecError(f"{text!r:.80} times {old:g} is {new:g}, which it cannot be") from None


def _adapter(field: FieldInfo) -> TypeAdapter[Any]:
    kind: Any = field.annotation
    return TypeAdapter(Annotated[(kind, *field.metadata)] if field.metadata else kind)


def _quantity(metadata: Any, annotation: Any) -> Quantity | None:
    """Return the physical unit that a spec field's type carries; None if the type has no unit.

    Types with a unit are such as ``Bytes``, ``Bytes | None`` and ``dict[Dtype, FlopsPerSecond]``.
    """
    nested = [part for argument in get_args(annotation) for part in (argument, *getattr(argument, "__metadata__", ()))]
    quantities = [part for part in (*metadata, *nested) if isinstance(part, Quantity)]
    return quantities[0] if quantities else None


def _with_device_fields(system: System, **figures: Any) -> System:
    return system.model_copy(update={"device": system.device.model_copy(update=figures)})


def _arithmetic(system: System, factor: float) -> System:
    device = system.device
    scaled = {name: {k: v * factor for k, v in getattr(device, name).items()} for name in ("peak", "vector_peak")}
    return _with_device_fields(system, **scaled)


def _memory_scaler(field: str) -> Callable[[System, float], System]:
    def changed(system: System, factor: float) -> System:
        memory = system.device.memory
        return _with_device_fields(system, memory=_with_figure(memory, field, getattr(memory, field) * factor))

    return changed


def _link_scaler(field: str) -> Callable[[System, float], System]:
    def changed(system: System, factor: float) -> System:
        levels = []
        for level in system.levels:
            value = getattr(level.link, field)
            link = level.link if value is None else level.link.model_copy(update={field: value * factor})
            levels.append(level.model_copy(update={"link": link}))
        return system.model_copy(update={"levels": tuple(levels)})

    return changed


def _design_power(system: System, factor: float) -> System:
    device: Device = system.device
    return system if device.tdp is None else _with_device_fields(system, tdp=device.tdp * factor)


#: Figure of the hardware -> the system with that figure multiplied.
HARDWARE_SCALERS: dict[str, Callable[[System, float], System]] = {
    "arithmetic (FLOP/s)": _arithmetic,
    "memory bandwidth": _memory_scaler("bandwidth"),
    "memory capacity": _memory_scaler("capacity"),
    "link bandwidth": _link_scaler("bandwidth"),
    "link latency": _link_scaler("latency"),
    "design power": _design_power,
}
