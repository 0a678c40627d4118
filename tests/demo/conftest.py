"""The demo's modules are importable by the names its scripts use."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "trainer_examples"
sys.path.insert(0, str(EXAMPLES))
