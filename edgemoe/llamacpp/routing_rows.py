"""What the routers of a resident model choose, token by token: the hub's taps for engines that are observed."""

import numpy as np

from edgemoe.errors import UserError
from edgemoe.llamacpp.graph import Reading, Router, find_routers
from edgemoe.llamacpp.hub import Hub, Tap
from edgemoe.llamacpp.session import Session


class RoutingRows(Hub):
    """The hub of a session whose choices and, where the graph ranks any, scores are wanted. `find` comes first."""

    def find(self, session: Session) -> None:
        """Look at the graph of one decode and tap its routers; the session is empty afterwards.

        Raises `UserError` for a model without routers.
        """
        with self.survey():
            session.decode([0])
        found = find_routers(self.nodes())
        session.clear()
        if not found:
            raise UserError(f"{session.path}: its graph routes to no experts: there is nothing to trace")
        self._routers: list[Router] = [found[layer] for layer in sorted(found)]
        scored = all(isinstance(router.scores, Reading) for router in self._routers)
        self._top_k = max(router.top_k for router in self._routers)
        taps = [Tap(router.topk) for router in self._routers]
        self._scores: list[int] = []
        self._masks: list[int | None] = []
        for router in self._routers if scored else []:
            assert isinstance(router.scores, Reading)
            self._scores.append(len(taps))
            taps.append(Tap(router.scores))
            self._masks.append(len(taps) if router.mask else None)
            taps += [Tap(router.mask)] if router.mask else []
        self.install(taps, session.n_batch)

    def of(self, count: int) -> dict[str, np.ndarray]:
        """Of the last capture's `count` tokens: executed [L, T, k] and, if known, scores [L, T, E] (copies)."""
        executed = np.full((len(self._routers), count, self._top_k), -1, np.int32)
        for layer, router in enumerate(self._routers):
            executed[layer, :, : router.top_k] = self.rows(layer)[:count]
        found = {"executed": executed}
        if self._scores:
            found["scores"] = np.stack([self._scored(layer, count) for layer in range(len(self._routers))])
        return found

    def _scored(self, layer: int, count: int) -> np.ndarray:
        scores, mask = self.rows(self._scores[layer])[:count], self._masks[layer]
        return scores if mask is None else np.where(np.isneginf(self.rows(mask)[:count]), -np.inf, scores)
