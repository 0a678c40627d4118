"""What interpreters with this folder in their PYTHONPATH begin with, those that Ray starts too.

Searches for garbage are a quarter of the time in which verl and all beneath it are imported: they
are rarer, and never cease.
"""

import gc

gc.set_threshold(100_000)
