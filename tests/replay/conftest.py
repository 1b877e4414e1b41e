"""Makes the helper module beside the tests importable, and gives each test a buffer of its own."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
