"""The `paleo estimate` command of a plan, and the part of a search space that a framework can run."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING

from paleo.parallel.framework_checks import framework_abilities
from paleo.schedules.base import SCHEDULES
from paleo.specs.run import InputOptions, Run, field_paths, shortest_field_name
from paleo.specs.software import load_software

if TYPE_CHECKING:
    from paleo.search.space import SearchSpace
    from paleo.specs.model import ModelSpec
    from paleo.specs.system import System


def supported_search_space(space: SearchSpace, software: str) -> SearchSpace:
    """Limit a search space to the pipeline schedules and ZeRO stages that the framework can run.

    Parameters
    ----------
    space : SearchSpace
        Values that the search varies.
    software : str
        Name of the software profile.

    Returns
    -------
    SearchSpace
        The smaller space. The whole space is returned if nothing is recorded about the framework, or if the space asks
        for pipeline stages that the framework lacks; evaluating the plan then reports that.
    """
    has, framework = load_software(software).parallelism, framework_abilities(software)
    if framework is not None:
        # The part of a space that a framework's lists allow; the search checks the rest by the framework's name.
        zero = tuple(stage for stage in space.zero if stage in framework.zero.values) or space.zero
        schedules = tuple(name for name in space.schedules if name in framework.schedules.values)
        # the user states a schedule that the framework lacks: the search reports it
        if not schedules and space.schedules != tuple(SCHEDULES):
            schedules = space.schedules
        shards = space.zero3_pipelines or framework.uses_zero3_pipelines
        return replace(space, zero=zero, schedules=schedules, zero3_pipelines=shards, framework=framework.name)
    if has.zero_stages is not None and len(space.zero) > 1:
        space = replace(space, zero=tuple(stage for stage in space.zero if stage in has.zero_stages))
    if has.schedules is None or (not has.schedules and space.degrees.get("pp", 1) > 1):
        return space
    return replace(space, schedules=has.schedules)


def estimate_command(model: ModelSpec, system: System, run: Run) -> str:
    """Return the ``paleo estimate`` command that predicts a run, quoted for a shell.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    system : System
        Machine: its devices, nodes and links.
    run : Run
        The run; fields at their defaults are left out.

    Returns
    -------
    str
        The command.
    """
    words = ["paleo", "estimate", model.catalog_name_or_path, "--system", system.catalog_name_or_path]
    values = {path: attrgetter(path)(run) for path in field_paths()}
    stated = {
        shortest_field_name(path): value for path, value in values.items() if value != attrgetter(path)(_DEFAULTS)
    }
    stated |= {"strategy": run.strategy} if run.gpus > 1 else {}  # an estimate chooses it if it is not stated
    noise = [stated.pop(name, 0.0) for name in ("jitter", "variation.slow_ranks")]
    if any(noise):
        words += ["--jitter", ",".join(map(repr, noise))]
    for name in [name for name in _OPTIONS if name in stated]:
        words += _option(name, stated.pop(name))
    sizes = stated.pop("model", {})
    for name, value in [*stated.items(), *((f"model.{size}", value) for size, value in sizes.items())]:
        words += ["--set", f"{name}={_yaml(_with_units(name, value))}"]
    return shlex.join(words)


_DEFAULTS = Run()

#: Fields of a run that are command-line options, in the order in which they are written.
_OPTIONS = (
    "gpus", "global_batch", "batch", "microbatch", "dtype", "optimizer", "strategy", "schedule", "recompute",
    "recompute_layers", "compress", "lora", "qlora", "freeze", "nodes", "background", "neighbour", "consistency",
    "servers", "software", "calibration",
)  # fmt: skip


def _option(name: str, value: object) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if value is True:
        return [flag]
    return [flag, ",".join(value) if isinstance(value, tuple) else str(value)]


#: Units of the fields of a run and of its input that are quantities.
_UNITS = {"exchange.bucket": "B", "sample": "B", "storage": "B/s", "decode": "s", "copied": "B"}


def _with_units(name: str, value: object) -> object:
    """Convert a value of a run to the form that ``--set`` takes; quantities become text with a unit.

    >>> _with_units("exchange.bucket", 25e6), _with_units("input", InputOptions(decode="10 ms"))
    ('25000000.0 B', {'decode': '0.01 s'})
    """
    if isinstance(value, InputOptions):
        return {key: _with_units(key, part) for key, part in value.model_dump().items() if part is not None}
    return f"{value!r} {_UNITS[name]}" if name in _UNITS else value


def _yaml(value: object) -> str:
    """Convert a value to text for ``--set key=``: JSON, which is also YAML, without quotes around plain words.

    >>> _yaml((17, 15)), _yaml("after"), _yaml({"block.*": "full"}), _yaml(True)
    ('[17, 15]', 'after', '{"block.*": "full"}', 'true')
    """
    return value if isinstance(value, str) else json.dumps(value)
