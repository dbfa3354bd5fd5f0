"""The environment for SkyRL: a `BaseTextEnv` of skyrl-gym. With this folder on PYTHONPATH:

    import skyrl_gym
    skyrl_gym.register(id="sqltrain", entry_point="sqltrain_env:SqltrainEnv")

Each row of the dataset has, beside SkyRL's `prompt`, the fields that `example_of` reads; `env_config.recipe` names the
recipe.
"""

from collections.abc import Mapping
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from pipelines.environment.core import ChatMessages, Session, StepResult, example_of, shared


class SqltrainEnv(BaseTextEnv):  # type: ignore[misc]
    """One episode; all episodes of a process that name the same recipe share one pool of SQL workers.

    Args:
        env_config: `recipe`, and `overrides` where there are any.
        extras: the dataset's row.
    """

    def __init__(self, env_config: Mapping[str, Any], extras: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._environment = shared(str(env_config["recipe"]), tuple(env_config.get("overrides", ())))
        self._example = example_of(extras or {})
        self._session: Session | None = None
        self._last: StepResult | None = None

    def init(self, prompt: ChatMessages) -> tuple[ChatMessages, dict[str, Any]]:
        """The recipe's prompt for the row's question; the dataset's own prompt is replaced by it."""
        self._session = self._environment.reset(self._example)
        return self._session.messages, {"stop": list(self._session.stop)}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Take the agent's turn; the last one has the reward."""
        assert self._session is not None, "init comes first"
        self._last = last = self._session.step(action)
        self.turns += 1
        if last.done and last.reward is None:
            raise RuntimeError(f"the episode is broken ({last.info['failure']}); leave it out of its group")
        observations = [] if last.observation is None else [{"role": "user", "content": last.observation}]
        return BaseTextEnvStepOutput(
            observations=observations, reward=last.reward or 0.0, done=last.done, metadata=dict(last.info)
        )

    def get_metrics(self) -> dict[str, Any]:
        """Whether the answer was right, and how many turns it took."""
        if self._last is None or not self._last.done:
            return {}
        return {"correct": float(self._last.info["correct"]), "turns": self._last.info["turns"]}
