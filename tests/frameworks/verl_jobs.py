"""Jobs of verl's one after the other in one process, for they import for most of their time.

python verl_jobs.py '[[SCRIPT, ARGUMENT, ...], ...]'

Each prints what it prints by itself; one that fails, its traceback, and the next begins.
"""

import json
import os
import runpy
import sys
import traceback
from pathlib import Path

os.environ["VERL_USE_EXTERNAL_MODULES"] = "rollout.integrations.verl"
os.environ.update(RANK="0", RAY_USAGE_STATS_ENABLED="0", RAY_DISABLE_DASHBOARD="1")

for script, *arguments in json.loads(sys.argv[1]):
    sys.argv = [script, *arguments]
    try:
        runpy.run_path(str(Path(__file__).with_name(script)), run_name="__main__")
    except Exception:
        print(json.dumps({"traceback": traceback.format_exc()}), flush=True)
