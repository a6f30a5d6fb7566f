"""Options of a run that is long enough to fail: failures, checkpoints, restarts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paleo.cli.options import packs

if TYPE_CHECKING:
    from paleo.studies.long_run import LongRunOptions


def _option(help_: str, name: str | None = None, **more: Any) -> Any:
    return typer.Option(*filter(None, [name]), help=help_, rich_help_panel="A long run", **more)


@dataclass(frozen=True, kw_only=True)
class LongRunFlags:
    """What fails, where checkpoints go and what a restart takes; any of them counts failures in."""

    goodput: Annotated[bool, _option("Count failures, checkpoints and restarts in.", "--goodput")] = False
    failures: Annotated[str | None, _option("Of a node: '4/knodeday'. [the system's]", metavar="RATE")] = None
    checkpoint: Annotated[str | None, _option("auto, 30min or 250steps. [auto]", metavar="EVERY")] = None
    checkpointing: Annotated[str | None, _option("sync, async or memory (and storage behind it). [sync]")] = None
    storage: Annotated[str | None, _option("What it takes in: '2 GB/s'. [100 GB/s]", metavar="RATE")] = None
    storage_size: Annotated[str | None, _option("What it holds: '10 TB'. [enough]", metavar="BYTES")] = None
    restart: Annotated[str | None, _option("From a failure to the next step. [3 min + load]", metavar="TIME")] = None
    spares: Annotated[int | None, _option("Spare nodes, paid for. [as many as it takes]", min=0, max=10**6)] = None
    repair: Annotated[str | None, _option("How long a failed node is away. [24 h]", metavar="TIME")] = None
    elastic: Annotated[bool, _option("Go on without the replica that failed.", "--elastic")] = False

    def keywords(self) -> dict[str, Any]:
        """The options as keywords of a question."""
        return asdict(self)

    def stated(self) -> LongRunOptions | None:
        """The options of the run; None where failures are not counted."""
        from paleo.studies.long_run import stated_long_run

        return stated_long_run(**self.keywords())


#: Those options, in the argument ``long_run``.
takes_long_run = packs("long_run", LongRunFlags)
