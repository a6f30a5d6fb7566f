"""File formats of settings: YAML and JSON with nested keys, TOML, Python assignments, and shell scripts with flags."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paleo.launch._base import LaunchError

if TYPE_CHECKING:
    from paleo.launch._base import JobPlan, Settings, SettingsTranslator

#: Comment at the head of a written file, with the fields of the plan for which the framework has no key.
_HEADER = re.compile(r"#\s*paleo:\s*(.*)")
_DEEPEST = 20


def nest_keys(settings: Settings) -> dict[str, Any]:
    """Convert settings with dots in their keys to nested mappings.

    >>> nest_keys({"a.b": 1, "a.c": 2, "d": 3})
    {'a': {'b': 1, 'c': 2}, 'd': 3}
    """
    result: dict[str, Any] = {}
    for key, value in settings.items():
        *parents, last = key.split(".")
        place = result
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return result


def flatten_keys(data: Mapping[str, Any], before: str = "", depth: int = 0) -> dict[str, Any]:
    """Convert nested mappings to settings with dots in their keys.

    >>> flatten_keys({"a": {"b": 1, "c": []}, "d": None})
    {'a.b': 1, 'a.c': [], 'd': None}
    """
    if depth > _DEEPEST:
        raise LaunchError(f"{before}: nested deeper than {_DEEPEST} levels")
    result: dict[str, Any] = {}
    for key, value in data.items():
        name = f"{before}{key}"
        result |= flatten_keys(value, f"{name}.", depth + 1) if isinstance(value, Mapping) and value else {name: value}
    return result


def _to_plain_types(value: Any) -> Any:
    """Convert a value to types that YAML, JSON and TOML can hold: tuples become lists."""
    return [_to_plain_types(part) for part in value] if isinstance(value, tuple | list) else value


def _header(plan: JobPlan, launcher: SettingsTranslator) -> str:
    """Return the comment at the head of a launch file: the framework's release, and fields for which it has no key."""
    known = {"model": plan.model, "gpus": plan.gpus, "software": launcher.software}
    before = launcher.preparation_text(plan)
    remark = f"# {before[:1].upper()}{before[1:]}.\n" if before else ""
    return f"# {launcher.name} {launcher.release}\n{remark}# paleo: {json.dumps(known)}\n"


def parse_header_comment(text: str) -> dict[str, Any]:
    """Return the fields that Paleo wrote in the comment at the head of a launch file; an empty dict for other files.

    >>> parse_header_comment('# paleo: {"model": "gpt2", "gpus": 8}')
    {'model': 'gpt2', 'gpus': 8}
    """
    for line in text.splitlines()[:5]:
        if (match := _HEADER.match(line)) is not None:
            try:
                data = json.loads(match[1])
            except (ValueError, RecursionError):
                return {}
            return data if isinstance(data, dict) else {}
    return {}


def _parsed(parse: Callable[[str], Any], text: str, no_text: str, no_mapping: str) -> dict[str, Any]:
    """Return the settings in a text by dotted key; LaunchError with one of the messages if it holds no mapping."""
    from yaml import YAMLError

    try:
        data = parse(text)
    except (YAMLError, ValueError, RecursionError) as error:
        raise LaunchError(f"{no_text} ({str(error).splitlines()[0]:.100})") from None
    if not isinstance(data, Mapping):
        raise LaunchError(no_mapping)
    return flatten_keys(data)


@dataclass(frozen=True, slots=True)
class YamlFile:
    """YAML file with nested keys."""

    def settings_to_text(self, settings: Settings, plan: JobPlan, launcher: SettingsTranslator) -> str:
        """Return the text of a YAML file with the settings, and with the plan's other fields in a comment on top."""
        import yaml

        data = nest_keys({key: _to_plain_types(value) for key, value in settings.items()})
        return _header(plan, launcher) + yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=100)

    def settings_from_text(self, text: str, where: str) -> dict[str, Any]:
        """Return the settings in a YAML text, by dotted key, with OmegaConf variables (``${a.b}``) replaced."""
        import yaml

        settings = _parsed(yaml.safe_load, text, f"{where}: is not YAML", f"{where}: expected keys with values")
        return {key: _interpolated(value, settings) for key, value in settings.items()}


def _interpolated(value: Any, settings: Settings, depth: int = 0) -> Any:
    """Replace a value that is an OmegaConf variable, ``${key}``, by the value of that key in the settings."""
    if not isinstance(value, str) or "${" not in value or depth > _DEEPEST:
        return value
    whole = re.fullmatch(r"\$\{([\w.]+)\}", value)
    if whole is not None and whole[1] in settings:
        return _interpolated(settings[whole[1]], settings, depth + 1)
    return value


@dataclass(frozen=True, slots=True)
class JsonFile:
    """JSON file with nested keys; it cannot hold a comment."""

    def settings_to_text(self, settings: Settings, plan: JobPlan, launcher: SettingsTranslator) -> str:
        """Return the text of a JSON file with the settings."""
        return json.dumps(nest_keys({key: _to_plain_types(value) for key, value in settings.items()}), indent=2) + "\n"

    def settings_from_text(self, text: str, where: str) -> dict[str, Any]:
        """Return the settings in a JSON text, by dotted key."""
        return _parsed(json.loads, text, f"{where}: is not JSON", f"{where}: expected one JSON mapping")


@dataclass(frozen=True, slots=True)
class TomlFile:
    """TOML file with one table for each prefix of the keys."""

    def settings_to_text(self, settings: Settings, plan: JobPlan, launcher: SettingsTranslator) -> str:
        """Return the text of a TOML file with the settings."""
        tables: dict[str, list[str]] = {}
        for key, value in settings.items():
            table, _, name = key.rpartition(".")
            tables.setdefault(table, []).append(f"{name} = {json.dumps(_to_plain_types(value))}")
        parts = [f"[{table}]\n" + "\n".join(lines) + "\n" for table, lines in tables.items()]
        return _header(plan, launcher) + "\n" + "\n".join(parts)

    def settings_from_text(self, text: str, where: str) -> dict[str, Any]:
        """Return the settings in a JSON or TOML text, by dotted key."""
        import tomllib

        return _parsed(tomllib.loads, text, f"{where}: is not TOML", "")


@dataclass(frozen=True, slots=True)
class ShellScriptFile:
    """Shell script that starts a job with flags; ``program`` is the program that gets them."""

    program: str

    def settings_to_text(self, settings: Settings, plan: JobPlan, launcher: SettingsTranslator) -> str:
        """Return the text of a shell script that starts the job with these settings as flags."""
        nodes, ranks = max(1, -(-plan.gpus // plan.node)), min(plan.gpus, plan.node) or 1
        started = f"torchrun --nproc-per-node {ranks} --nnodes {nodes} {self.program}"
        flags = " \\\n  ".join(command_line_flags(settings))
        return f"#!/usr/bin/env bash\n{_header(plan, launcher)}{started} \\\n  {flags}\n"

    def settings_from_text(self, text: str, where: str) -> dict[str, Any]:
        """Return the flags of a shell script with their values, after expansion of its variables and arrays."""
        return parse_script_flags(text)


def command_line_flags(settings: Settings) -> list[str]:
    """Return one word of a command line for each flag; True gives a flag without a value, False gives none.

    >>> command_line_flags({"--bf16": True, "--modules": ("a", "b"), "--sp": False, "--tp": 8})
    ['--bf16', '--modules a b', '--tp 8']
    """
    words = []
    for key, value in settings.items():
        if value is False or value is None:
            continue
        parts = [] if value is True else value if isinstance(value, tuple | list) else [value]
        words.append(" ".join([key, *(shlex.quote(str(part)) for part in parts)]))
    return words


_ASSIGNED = re.compile(r"^\s*(?:export\s+|local\s+|declare\s+-\w+\s+)*([A-Za-z_]\w*)=(.*)$", re.DOTALL)
_VARIABLE = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?::?[-=]([^}]*))?\}|\$(\w+)|\$\(\(([^)]*)\)\)")


def parse_script_flags(text: str) -> dict[str, Any]:
    """Parse the command-line flags in a shell script, with their values.

    Parameters
    ----------
    text : str
        The script. Variables, arrays and whole-number arithmetic are expanded; no command runs.

    Returns
    -------
    dict
        A flag with its value, several as a tuple, True without one. The last of equal flags counts.

    >>> parse_script_flags('TP=4\\nARGS=(--tp $TP --sp)\\nrun "${ARGS[@]}" --gpus $((TP * 2))')
    {'--tp': '4', '--sp': True, '--gpus': '8'}
    """
    variables: dict[str, str] = {}
    words: list[str] = []
    for statement in _statements(re.sub(r'"(\$\{\w+\[[@*]\]\})"', r"\1", text)):
        assigned = _ASSIGNED.match(statement)
        if assigned is not None and not re.match(r"\S*\s+\S", _unquoted(assigned[2])):
            variables[assigned[1]] = _expanded(_inside(assigned[2]), variables)
        else:
            words += _words(_expanded(statement, variables))
    settings: dict[str, Any] = {}
    for word, values in _flags(words or _words(" ".join(variables.values()))):
        settings[word] = True if not values else values[0] if len(values) == 1 else tuple(values)
    return settings


def _unquoted(text: str) -> str:
    """Return the text after an assignment without quoted and bracketed parts."""
    return re.sub(r"\"[^\"]*\"|'[^']*'|\([^()]*\)|\$\(\([^)]*\)\)", "", text.strip(), flags=re.DOTALL)


def _inside(text: str) -> str:
    """Return the value of an assignment without its quotes or array brackets."""
    stripped = text.strip()
    if stripped.startswith("(") and stripped.endswith(")"):
        return stripped[1:-1]
    return stripped[1:-1] if len(stripped) > 1 and stripped[0] == stripped[-1] and stripped[0] in "\"'" else stripped


def _statements(text: str) -> Iterator[str]:
    """Yield the statements of a shell script; lines are joined after a backslash and in quotes or brackets."""
    lines = [re.sub(r"(^|\s)#.*$", r"\1", line) for line in text.replace("\\\n", " ").splitlines()]
    open_text = ""
    for line in lines:
        open_text = f"{open_text} {line}" if open_text else line
        if _balanced(open_text):
            yield open_text
            open_text = ""
    if open_text:
        yield open_text


def _balanced(text: str) -> bool:
    unquoted = re.sub(r"'[^']*'", "", text)
    outside = re.sub(r'"[^"]*"', "", unquoted)
    return outside.count('"') % 2 == 0 and outside.count("(") <= outside.count(")")


def _expanded(text: str, variables: Mapping[str, str], depth: int = 0) -> str:
    """Return a text with its shell variables replaced by their values; unknown ones become empty."""
    if depth > _DEEPEST or "$" not in text:
        return text

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        if name is not None:
            return variables.get(name) or match[2] or ""
        text = _expanded(match[4], variables, depth + 1)  # arithmetic, in which names need no dollar sign
        return _arithmetic(re.sub(r"[A-Za-z_]\w*", lambda word: variables.get(word[0], "0"), text))

    return _expanded(_VARIABLE.sub(value, text), variables, depth + 1) if _VARIABLE.search(text) else text


def _arithmetic(text: str) -> str:
    """Return the result of integer arithmetic as text; empty if the text is no such arithmetic."""
    from paleo.specs.loading import evaluate_model_expression

    try:
        return str(int(evaluate_model_expression("=" + text.replace("/", "//"), {})))
    except (ValueError, ArithmeticError, TypeError):
        return ""


def _words(text: str) -> list[str]:
    """Split a command into words without quotes."""
    try:
        return shlex.split(text, comments=False)
    except ValueError:
        return text.split()


def _flags(words: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag of a command line with the list of words that follow it."""
    name, values = "", list[str]()
    for word in words:
        if word.startswith("--"):
            if name:
                yield name, values
            name, equals, value = word.partition("=")
            values = [value] if equals else []
        elif name and word not in ("&", "|", ";", "&&", "2>&1"):
            values.append(word)
        elif name:
            yield name, values
            name, values = "", []
    if name:
        yield name, values


@dataclass(frozen=True, slots=True)
class PythonFile:
    """Python module with one function that assigns to a configuration. It is parsed, never run."""

    header_template: str

    def settings_to_text(self, settings: Settings, plan: JobPlan, launcher: SettingsTranslator) -> str:
        """Return the text of a Python module that assigns the settings.

        ``header_template`` may use the keys ``module`` and ``config``.
        """
        stated = {key: value for key, value in settings.items() if key not in ("module", "config")}
        lines = "".join(f"    config.{key} = {value!r}\n" for key, value in stated.items())
        names = {name: settings.get(name, "") for name in ("module", "config")}
        return _header(plan, launcher) + self.header_template.format(**names) + lines + "    return config\n"

    def settings_from_text(self, text: str, where: str) -> dict[str, Any]:
        """Return the literal values that a module assigns to ``config.…``, and the module and function it builds on."""
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise LaunchError(f"{where}: is not Python") from None
        settings: dict[str, Any] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (
                match := re.fullmatch(r"torchtitan\.models\.(\w+)\.\w+", node.module or "")
            ):
                settings |= {"module": match[1], "config": node.names[0].name}
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
                key = ast.unparse(node.targets[0]).partition(".")[2]
                settings[key] = _literal(node.value)
        return settings


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal, or the source text of any other expression."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)
