"""The typer application with its groups of commands and exit codes, and the output that commands share.

Commands print one JSON document or tables, warnings, and pictures.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from copy import copy
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperArgument, TyperCommand, TyperOption

from paleo.docstrings import split_parameters_section
from paleo.errors import SpecError
from paleo.files import PICTURE_SUFFIXES, check_output_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

    from paleo.predict import Prediction

_DEFAULT_PATTERN = re.compile(r"\s*\[([^\]]+)\]\Z")


class Command(TyperCommand):
    """Typer command whose help shows the default of every option.

    The shown default is the option's default value, or the words in brackets at the end of the option's help text.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for parameter in self.params:
            if isinstance(parameter, TyperOption | TyperArgument) and not parameter.required:
                # Show the words in brackets at the end of a help text as the default; hide those of flags and other
                # options.
                text = parameter.help or ""
                stated = _DEFAULT_PATTERN.search(text)
                if stated is not None:
                    parameter.help, parameter.show_default = text[: stated.start()], stated.group(1)
                elif parameter.default is False:
                    parameter.show_default = "off"
                elif parameter.default is None:
                    parameter.show_default = "none"

    def make_parser(self, ctx: Any) -> Any:
        """Make the parser of a command line; it refuses an option of one value that occurs twice.

        Parameters
        ----------
        ctx : Any
            Context of click.

        Returns
        -------
        Any
            The parser.
        """
        parser: Any = super().make_parser(ctx)
        parse = parser.parse_args

        def parsed(args: list[str]) -> tuple[dict[str, Any], list[str], list[Any]]:
            options, others, parameters = parse(args=args)
            if not ctx.resilient_parsing:
                _check_single_values(parameters)
            return options, others, parameters

        parser.parse_args = parsed
        return parser


def _check_single_values(parameters: Sequence[Any]) -> None:
    """Raise SpecError if an option of one value occurs twice; ``parameters`` has one entry per occurrence."""
    options = (each for each in parameters if isinstance(each, TyperOption))
    times = Counter(option for option in options if not (option.multiple or option.is_flag))
    for option, count in times.items():
        if count > 1:
            raise SpecError(f"{max(option.opts, key=len)} occurs {count} times; it takes one value")


Function = TypeVar("Function", bound=Callable[..., Any])


def _parameters_with_docstring_help(
    parameters: Iterable[inspect.Parameter], docstring: str | None, panel: str | None = None
) -> list[inspect.Parameter]:
    """Return parameters of a command with the help texts of a docstring's section ``Parameters``.

    An entry ``name : METAVAR`` also sets the metavar. Parameters without an entry stay as they are.

    Parameters
    ----------
    parameters : iterable of inspect.Parameter
        Parameters of a command.
    docstring : str, optional
        Docstring of the command, or of a dataclass whose fields are options.
    panel : str, optional
        Heading in the help under which the options of the docstring are listed.

    Returns
    -------
    list of inspect.Parameter
        The parameters.
    """
    meanings = split_parameters_section(docstring)[1]
    described = []
    for parameter in parameters:
        if parameter.name in meanings:
            metavar, text = meanings[parameter.name]
            annotated = get_origin(parameter.annotation) is Annotated
            kind, option = get_args(parameter.annotation) if annotated else (parameter.annotation, typer.Option())
            option = copy(option)
            option.help, option.metavar = text, metavar or option.metavar
            option.rich_help_panel = panel
            if not option.param_decls and (kind in (bool, bool | None) or parameter.name.endswith("_")):
                option.param_decls = (f"--{parameter.name.rstrip('_').replace('_', '-')}",)  # no flag --no-NAME
            parameter = parameter.replace(annotation=Annotated[kind, option])
        described.append(parameter)
    return described


def _replace_parameters(command: Function, parameters: Sequence[inspect.Parameter]) -> Function:
    """Replace the signature of a command function, from which typer builds the command-line options.

    Parameters
    ----------
    command : Function
        Function of the command.
    parameters : sequence of inspect.Parameter
        Its parameters.

    Returns
    -------
    Function
        The same function.
    """
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _with_fields_as_options(command: Callable[..., None], argument: str, group: type[Any]) -> Callable[..., None]:
    """Give a command the fields of a dataclass as options, packed into one argument; its own options come first."""
    stated = inspect.signature(command, eval_str=True).parameters
    hints = get_type_hints(group, include_extras=True)
    defaults = {field.name: field.default for field in fields(group) if field.name not in stated}
    keyword = inspect.Parameter.KEYWORD_ONLY
    packed = [inspect.Parameter(name, keyword, default=defaults[name], annotation=hints[name]) for name in defaults]
    for part in group.__mro__:
        packed = _parameters_with_docstring_help(packed, part.__doc__, getattr(part, "panel", None))
    parameters = list[inspect.Parameter]()
    for name, parameter in stated.items():
        parameters += packed if name == argument else [parameter.replace(kind=keyword)]

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        options = group(**{name: values.pop(name) for name in defaults})
        command(**{argument: options}, **values)

    return _replace_parameters(wrapper, parameters)


class Application(typer.Typer):
    """Typer application whose commands take the help texts of their options from their docstrings.

    A parameter of a command whose type is a dataclass stands for the fields of the dataclass, each an option. The help
    of a command shows the default of every option.
    """

    def command(self, name: str | None = None, **options: Any) -> Callable[[Function], Function]:
        """Return a decorator that registers a command.

        Parameters
        ----------
        name : str, optional
            Name of the command; by default that of the function.
        **options : Any
            Options of typer.

        Returns
        -------
        Callable[[Function], Function]
            The decorator.
        """

        def decorate(command: Any) -> Any:
            for parameter in inspect.signature(command, eval_str=True).parameters.values():
                if isinstance(parameter.annotation, type) and is_dataclass(parameter.annotation):
                    command = _with_fields_as_options(command, parameter.name, parameter.annotation)
            parameters = inspect.signature(command, eval_str=True).parameters.values()
            described = _replace_parameters(command, _parameters_with_docstring_help(parameters, command.__doc__))
            help_, _ = split_parameters_section(command.__doc__)
            return super(Application, self).command(name, cls=Command, help=help_, **options)(described)

        return decorate


app = Application(
    name="paleo",
    help="Predict how fast neural networks train on a system, how they scale, and what that costs.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


#: Headings of the groups of commands in --help.
HELP_GROUPS = ("Predict", "Decide", "Catalog and networks", "Measure")
PREDICT_HELP_GROUP, DECIDE_HELP_GROUP, CATALOG_HELP_GROUP, MEASURE_HELP_GROUP = HELP_GROUPS
#: Exit codes: the answer is no; the input is wrong; an error in this program; interrupted from the keyboard; the reader
#: of the output has closed it.
EXIT_NO, EXIT_WRONG_INPUT, EXIT_INTERNAL_ERROR, EXIT_INTERRUPTED, EXIT_PIPE_CLOSED = 1, 2, 3, 130, 141


def _version(requested: bool) -> None:
    if requested:
        from paleo import __version__

        sys.stdout.write(f"paleo {__version__}\n")
        raise typer.Exit


_VersionOption = Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")]


@app.callback()
def _main(version: _VersionOption = False) -> None:
    pass


#: Name of the running command, which its JSON document states.
RUNNING_COMMAND_NAME: ContextVar[str] = ContextVar("command", default="unknown")


def print_result(
    document: Callable[[], Mapping[str, Any]],
    table: Callable[[], RenderableType],
    as_json: bool,
    warnings: Sequence[str] = (),
) -> None:
    """Print a result as one JSON document or as tables.

    Parameters
    ----------
    document : Callable[[], Mapping[str, Any]]
        Returns the document.
    table : Callable[[], RenderableType]
        Returns the tables.
    as_json : bool
        True to print the document, False to print the tables.
    warnings : sequence of str, optional
        Sentences for stderr.
    """
    from paleo.report import columns

    if as_json:
        document_with_schema = columns.with_schema(RUNNING_COMMAND_NAME.get(), document())
        sys.stdout.write(columns.json_text(document_with_schema) + "\n")
    else:
        columns.console().print(table(), crop=False)  # lines are not wrapped, so that commands can be pasted
    print_warnings(warnings)


def print_warnings(warnings: Sequence[str]) -> None:
    """Print each warning as a line of stderr.

    Parameters
    ----------
    warnings : sequence of str
        Sentences.
    """
    for warning in warnings:
        sys.stderr.write(f"warning: {warning}\n")


def checked_plot_path(plot: str | None) -> str | None:
    """Check the file of option ``--plot`` when the command line is parsed, before anything is computed.

    Parameters
    ----------
    plot : str, optional
        Path; None for no plot.

    Returns
    -------
    str, optional
        The same path.

    Raises
    ------
    SpecError
        If the suffix is unknown or the file cannot be written.
    """
    if plot is not None:
        check_output_path(plot, PICTURE_SUFFIXES, option="--plot")
    return plot


def save_plot(path: str | None, figure: Callable[[ModuleType], Figure], module: str = "plots") -> None:
    """Save a plot if the user asked for one, and report the file on stderr.

    Parameters
    ----------
    path : str, optional
        File; None for no plot.
    figure : Callable[[ModuleType], Figure]
        Makes the plot with functions of a module, which is imported only then.
    module : str, optional
        Name of the module in ``paleo.report``.
    """
    if path is not None:
        from paleo.report.plots import save_figure

        save_figure(figure(import_module(f"paleo.report.{module}")), Path(path))
        sys.stderr.write(f"wrote {path}\n")


def checked_page_path(explore: str | None) -> str | None:
    """Check the file of option ``--explore``, an HTML page, when the command line is parsed.

    Parameters
    ----------
    explore : str, optional
        Path; None for no page.

    Returns
    -------
    str, optional
        The same path.

    Raises
    ------
    SpecError
        If the suffix is not .html or the file cannot be written.
    """
    if explore is not None:
        check_output_path(explore, (".html",), option="--explore")
    return explore


def write_page(path: str | None, page: Callable[[ModuleType, str], str]) -> None:
    """Save an HTML page if the user asked for one, and report the file on stderr.

    Parameters
    ----------
    path : str, optional
        File; None for no page.
    page : Callable[[ModuleType, str], str]
        Returns the HTML of the page, made with `paleo.report.service_pages`, for a date (ISO 8601).
    """
    if path is not None:
        import datetime

        from paleo.files import write_text
        from paleo.report import service_pages

        write_text(path, page(service_pages, datetime.date.today().isoformat()))
        sys.stderr.write(f"wrote {path}\n")


def check_launch_option(file: str | None, software: str | None) -> None:
    """Check the file of option ``--launch`` before anything is computed.

    Parameters
    ----------
    file : str, optional
        Name; None for no files.
    software : str, optional
        Software profile that the user chose.

    Raises
    ------
    SpecError
        If no framework has files of that name, or it cannot be written.
    """
    if file is not None:
        from paleo.launch import jobs

        jobs.check_launch_file_name(file, software)


def write_launch_files(file: str | None, plan: Callable[[], Prediction]) -> None:
    """Write the launch files of a plan if the user asked for them.

    Parameters
    ----------
    file : str, optional
        File or folder; None for no files.
    plan : Callable[[], Prediction]
        Makes the prediction of the plan.
    """
    if file is not None:
        from paleo.launch.jobs import launch_preparation_text, write_launch_files

        prediction = plan()
        sys.stderr.write(f"wrote {', '.join(write_launch_files(prediction, file))}\n")
        print_warnings([remark for remark in [launch_preparation_text(prediction, file)] if remark])


def exit_unless(positive: bool) -> None:
    """End a command with `EXIT_NO` if its answer is no.

    Parameters
    ----------
    positive : bool
        True if the answer is yes.
    """
    exit_with_code(0 if positive else EXIT_NO)


def exit_with_code(code: int) -> None:
    """End a command with an exit code; do nothing if the code is 0.

    Parameters
    ----------
    code : int
        Exit code; 0 returns.
    """
    if code:
        raise typer.Exit(code)
