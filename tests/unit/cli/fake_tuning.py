"""Stands in for the tuning process: does what its request says."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
events = int(sys.argv[2])


def report(event: object) -> None:
    os.write(events, (json.dumps(event) + "\n").encode())


report({"progress": request.get("progress", 0.5), "text": "8 tokens: 12 rows tried"})
print("vLLM said something")
if "refused" in request:
    report({"refused": request["refused"], "hint": None, "exit_code": request["exit_code"]})
    sys.exit(request["exit_code"])
if "pid_file" in request:
    # There at once and whole: it is what the test waits for.
    new = Path(request["pid_file"]).with_suffix(".new")
    new.write_text(str(os.getpid()), encoding="utf-8")
    new.rename(request["pid_file"])
    time.sleep(600)
if "dies" in request:
    os.write(events, b'{"result": [')
    sys.exit("an illegal memory access was encountered")
report({"result": request["verdicts"]})
