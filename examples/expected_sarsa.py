"""An algorithm of one's own, as short as it gets: DQN that knows that it explores.

Train with it: rookery train --set learner.algorithm=examples.expected_sarsa:ExpectedSarsa
"""

from torch import Tensor

from services.learner.algorithms.dqn import DQN


class ExpectedSarsa(DQN):
    """Expects that the next action is the best one, except for an epsilon of random ones."""

    def bootstrap(self, target_values: Tensor, next_observation: Tensor) -> Tensor:  # [batch]
        epsilon = self.config.options.get("epsilon", 0.1)
        best = super().bootstrap(target_values, next_observation)
        return (1 - epsilon) * best + epsilon * target_values.mean(1)
