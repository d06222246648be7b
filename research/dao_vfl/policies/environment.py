"""A vertical federation as a gymnasium environment: an agent decides E_{t,k} and is rewarded by eq.

19.
"""

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from edge_node.extensions.vfl.policies.policy import Policy
from research.dao_vfl.policies.compare import Round, Trajectory, closed, episode
from research.dao_vfl.policies.problem import Game

State = NDArray[np.float32]


class LineEnv(gymnasium.Env):  # type: ignore[misc]
    """An episode is T rounds: a function of (seed, episode) and the decisions.

    The state is `Game.state`, the action E_k - 1 of every sensor. `info` has the round's parts.
    """

    def __init__(self, game: Game, seed: int = 0):
        self._game, self._seed, self._episode = game, seed, -1
        sensors = game.source.sensors
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (3 * sensors + 1,), np.float32)
        self.action_space = gymnasium.spaces.MultiDiscrete([game.iterations] * sensors)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[State, dict[str, Any]]:
        """The next episode; with a seed, the first of that seed."""
        super().reset(seed=seed, options=options)
        if seed is not None:
            self._seed, self._episode = seed, -1
        self._episode += 1
        self._timings = self._game.source.sample(self._game.rounds, self._seed, self._episode)
        self._learner, self._round = self._game.learner(), 0
        return self._state(), {}

    def step(self, action: NDArray[np.int64]) -> tuple[State, float, bool, bool, dict[str, Any]]:
        """Play a round; the last one ends the episode: P1 sums over T rounds."""
        timings, self._round = self._timings[self._round], self._round + 1
        done: Round = closed(self._game, timings, np.asarray(action, np.int64) + 1, self._learner)
        over = self._round == self._game.rounds
        return self._state(), done.reward, over, False, done._asdict()

    def played(self, policy: Policy) -> Trajectory:
        """What another policy makes of this episode."""
        return episode(self._game, policy, self._timings)

    def _state(self) -> State:
        last = min(self._round, self._game.rounds - 1)
        return self._game.state(self._timings[last], last + 1)
