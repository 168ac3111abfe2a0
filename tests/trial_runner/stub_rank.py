"""A rank played by a small program: behaves as the file beside its order says."""

from __future__ import annotations

import json
import os
from pathlib import Path
import subprocess
import sys
import time


order = json.loads(Path(sys.argv[1]).read_text())
rank = int(os.environ["RANK"])
behaviour = order["header"].get("behaviour", "sleep")
if behaviour == "grandchild":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(order["folder"], f"grandchild{rank}").write_text(str(child.pid))
if behaviour == "fail" and rank == 1:
    sys.exit(3)
if behaviour == "quick":
    print("rank", rank, "of", os.environ["WORLD_SIZE"], os.environ.get("CANDIDATE_ENV", ""))
    sys.exit(0)
if behaviour == "stubborn":
    import signal

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(600)
