"""Queue of timed events, shared by all discrete-event simulations (requests, trials, jobs of a cluster)."""

from __future__ import annotations

import heapq


class EventQueue:
    """Events ordered by time, each identified by a number; events of equal time are ordered by their numbers.

    A cancelled or moved event stays in the heap until it comes up, and is then dropped.

    >>> queue = EventQueue()
    >>> queue.push(2.0, 1), queue.push(1.0, 7), queue.push(1.0, 3), queue.cancel(7)
    (None, None, None, 1.0)
    >>> queue.pop(), queue.next_event_time, len(queue)
    ((1.0, 3), 2.0, 1)
    """

    __slots__ = ("_due", "_heap")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self._due: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._due)

    def push(self, time: float, event: int) -> None:
        """Add an event, or move it to another time.

        Parameters
        ----------
        time : float
            When it happens [s].
        event : int
            Number of the event.
        """
        self._due[event] = time
        heapq.heappush(self._heap, (time, event))

    def cancel(self, event: int) -> float:
        """Remove an event from the queue.

        Parameters
        ----------
        event : int
            Number of the event.

        Returns
        -------
        float
            When it would have happened [s].
        """
        return self._due.pop(event)

    @property
    def next_event_time(self) -> float:
        """Time of the next event; inf if the queue is empty."""
        heap, due = self._heap, self._due
        while heap and due.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else float("inf")

    @property
    def newest_event(self) -> int:
        """Number of the event that was added last."""
        return next(reversed(self._due))

    def pop(self) -> tuple[float, int]:
        """Remove the earliest event and return its time and the number with which it was pushed."""
        while True:
            time, event = heapq.heappop(self._heap)
            if self._due.get(event) == time:
                del self._due[event]
                return time, event
