"""What an estimate says beside the step where it was asked for: consistency, compression, placement."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from paleo.report import compression, consistency, documents, placement
from paleo.studies import compression as compression_study
from paleo.studies import consistency as consistency_study
from paleo.studies import placement as placement_study

if TYPE_CHECKING:
    from paleo.predict import Prediction
    from paleo.report.documents import Document


class Blocks:
    """The studies that a run asks for, each computed once."""

    def __init__(self, prediction: Prediction) -> None:
        self.consistency = consistency_study.studied(prediction)
        self._compression = compression_study.studied(prediction)
        self._placement = placement_study.studied(prediction)

    def documents(self) -> Document:
        """Keys that are added to an estimate's document."""
        keys: Document = {}
        if self.consistency is not None:
            keys["consistency"] = documents.consistency(self.consistency)
        if self._compression is not None:
            keys["compression"] = compression.document(self._compression)
        if self._placement is not None:
            keys["placement"] = placement.document(self._placement)
        return keys

    def below(self, table: RenderableType) -> RenderableType:
        """A table with these blocks below it."""
        parts: list[RenderableType] = [table]
        if self.consistency is not None:
            parts += [Text(), consistency.table(self.consistency)]
        if self._compression is not None:
            parts += [Text(), compression.table(self._compression)]
        if self._placement is not None:
            parts += [Text(), placement.table(self._placement)]
        return Group(*parts) if len(parts) > 1 else table
