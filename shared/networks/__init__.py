"""The networks that agents act and learn with, built from a spec and a config wherever they run."""

from shared.networks.base import Chosen, PolicyNetwork, flat_input, stack_networks
from shared.networks.hybrid import HybridNetwork
from shared.networks.layers import Linear
from shared.networks.q import QNetwork

__all__ = ["Chosen", "HybridNetwork", "Linear", "PolicyNetwork", "QNetwork", "flat_input", "stack_networks"]
