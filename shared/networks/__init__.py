"""The networks that agents act and learn with, built from a spec and a config wherever they run."""

from shared.networks.base import Chosen, PolicyNetwork, flat_input, stack_networks
from shared.networks.hybrid import HybridNetwork
from shared.networks.iqn import IQNetwork
from shared.networks.layers import Body, Linear, NoisyLinear, draw_noise_from, output_layer
from shared.networks.q import QNetwork

__all__ = [
    "Body",
    "Chosen",
    "HybridNetwork",
    "IQNetwork",
    "Linear",
    "NoisyLinear",
    "PolicyNetwork",
    "QNetwork",
    "draw_noise_from",
    "flat_input",
    "output_layer",
    "stack_networks",
]
