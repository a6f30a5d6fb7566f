"""Options of a run that is long enough to fail: failures, checkpoints, restarts."""

from __future__ import annotations

from typing import Annotated, Any

import typer


def _option(help_: str, name: str | None = None, **more: Any) -> Any:
    return typer.Option(*filter(None, [name]), help=help_, rich_help_panel="A long run", **more)


WithFailures = Annotated[bool, _option("Count failures, checkpoints and restarts in.", "--goodput")]
Failures = Annotated[str | None, _option("Of a node: '4/knodeday'. [4 per thousand days]", metavar="RATE")]
Checkpoint = Annotated[str | None, _option("auto, 30min or 250steps. [auto]", metavar="EVERY")]
Checkpointing = Annotated[str | None, _option("sync, async or memory. [sync]")]
Storage = Annotated[str | None, _option("What it takes in: '2 GB/s'. [100 GB/s]", metavar="RATE")]
Restart = Annotated[str | None, _option("From a failure to the next step: '10min'. [4 min]", metavar="TIME")]
Spares = Annotated[int | None, _option("Spare nodes that stand in at once. [0]")]
