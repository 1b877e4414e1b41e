"""`python -m services.param_server`: the parameter server alone."""

import sys

from services.param_server.service import ParamServer
from shared.entry import main

if __name__ == "__main__":
    sys.exit(
        main(
            "param_server",
            "Keeps versions of weights, leases, specs, checkpoints and the run's state; broadcasts weights. "
            "Start it first: every other service asks it which run this is.",
            lambda config, run_dir, options: ParamServer(config, run_dir, options.instance),
        )
    )
