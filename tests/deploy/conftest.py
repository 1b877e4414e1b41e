"""Makes the helper modules beside the tests importable: there are no packages among the tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
