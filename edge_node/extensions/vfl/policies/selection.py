"""Policy of a live head by its name: a rule, or a trained agent's file. No policy stops a run."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime

from broker_config.protocol.errors import UsageError, suggest
from edge_node.extensions.vfl.policies.iteration_rules import RULES, ones
from edge_node.extensions.vfl.policies.latency import Ints
from edge_node.extensions.vfl.policies.policy import SHORTEST, Policy, Timing

Warn = Callable[[str], None]


def make_policy(name: str, iterations: int, sensors: int, warn: Warn) -> Policy:
    """The rule of that name, or the agent in that .onnx file, for K sensors and E_max.

    What it decides is clamped to [1, E_max]; if it fails or decides nonsense, all take E_max, and
    `warn` is told once.

    Raises:
        UsageError: there is no such rule or file, or the agent was trained for other settings.
    """
    if name in RULES:
        return GuardedPolicy(RULES[name](iterations), iterations, warn)
    if not name.endswith(".onnx"):
        raise UsageError(
            f"there is no policy {name!r}", f"{suggest(name, RULES)}; or name an agent's .onnx file"
        )
    agent = OnnxAgent(Path(name))
    if (agent.sensors, agent.iterations) != (sensors, iterations):
        raise UsageError(
            f"the agent {name} decides for {agent.sensors} sensors and up to {agent.iterations} "
            "iterations",
            f"train another: python -m research agent --sensors {sensors} --iterations "
            f"{iterations}",
        )
    return GuardedPolicy(agent, iterations, warn)


def check_policy(name: str, iterations: int, sensors: int) -> None:
    """Raise UsageError as `make` does."""
    make_policy(name, iterations, sensors, lambda _: None)


class OnnxAgent:
    """What `python -m research agent` has written, on measured timings.

    UsageError for a file that is no agent.
    """

    def __init__(self, path: Path):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        try:
            self._session = onnxruntime.InferenceSession(
                path, options, providers=["CPUExecutionProvider"]
            )
            facts = self._session.get_modelmeta().custom_metadata_map
            self.sensors, self.iterations = (
                int(json.loads(facts[name])) for name in ("sensors", "iterations")
            )
        except Exception as error:
            raise UsageError(
                f"the agent {path} cannot be used: {error}",
                "name a file that python -m research agent has written",
            ) from error

    def __call__(self, timing: Timing, round_: int) -> Ints:
        """Decide."""
        known = {
            "timing": np.stack(timing).astype(np.float64),
            "round": np.array([round_], np.int64),
        }
        return np.asarray(self._session.run(None, known)[0], np.int64)


class GuardedPolicy:
    """A policy that always decides something possible."""

    def __init__(self, policy: Policy, iterations: int, warn: Warn):
        self._policy = policy
        self._iterations = iterations
        self._warn = warn
        self._warned = False

    def __call__(self, timing: Timing, round_: int) -> Ints:
        """Decide; never raises."""
        most = self._iterations * ones(len(timing.iteration))
        try:
            times = np.array(timing)
            if not (np.isfinite(times).all() and times.min() >= 0):
                raise ValueError("a timing is negative or no number")
            known = Timing(*np.maximum(times, SHORTEST))
            decision = np.asarray(self._policy(known, round_))
            if decision.shape != most.shape or not np.isfinite(decision).all():
                raise ValueError(f"it decided {decision!r}")
        except Exception as error:
            self._warn_once(
                f"the policy failed in round {round_}: {error}; all sensors take "
                f"{self._iterations} iterations"
            )
            return most
        possible = np.clip(decision, 1, most).astype(np.int64)
        if (possible != decision).any():
            self._warn_once(
                f"the policy decided {decision.tolist()} in round {round_}: cut to "
                f"1..{self._iterations}"
            )
        return possible

    def _warn_once(self, text: str) -> None:
        if not self._warned:
            self._warn(text)
        self._warned = True
