"""A placement policy that is loaded by its path: it draws, lets requests wait, and refuses some."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from g2sim.actors.router.policy import Candidate, Place, Policy, Queue, Refuse, Release, RoutedRequest, Verdict


class Hesitant(Policy):
    """Places by chance, few at a time.

    Args:
        at_most: requests that it has under way; others wait.
        refuses: every so-manieth request is refused, 0 for none.
    """

    name = "hesitant"

    def __init__(self, *, at_most: int = 2, refuses: int = 0) -> None:
        self._at_most = at_most
        self._refuses = refuses
        self._asked = 0
        self._under_way: set[int] = set()
        self._waiting: dict[int, RoutedRequest] = {}

    def score(self, request: RoutedRequest, candidate: Candidate) -> dict[str, float]:
        return {"chance": self.pool.stream("hesitant").unit(), "cached": -float(candidate.device_blocks)}

    def place(self, request: RoutedRequest, now_ms: float) -> Verdict:
        self._asked += 1
        if self._refuses and self._asked % self._refuses == 0:
            return Refuse("that was one too many")
        if len(self._under_way) < self._at_most:
            return self._placed(request, now_ms)
        self._waiting[request.request] = request
        return Queue()

    def request_terminal(self, request: int, now_ms: float) -> Iterator[Release]:
        self._under_way.discard(request)
        while self._waiting and len(self._under_way) < self._at_most:
            number = next(iter(self._waiting))
            verdict = self._placed(self._waiting.pop(number), now_ms)
            if isinstance(verdict, Place | Refuse):
                yield Release(number, verdict)

    def withdraw(self, request: int, now_ms: float) -> Sequence[Release]:
        del self._waiting[request]
        return ()

    def pending(self) -> Sequence[int]:
        return list(self._waiting)

    def _placed(self, request: RoutedRequest, now_ms: float) -> Verdict:
        verdict = super().place(request, now_ms)
        if isinstance(verdict, Place):
            self._under_way.add(request.request)
        return verdict
