"""guidellm: a benchmark of a few synthetic requests."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

URL = os.environ["TOKENMESH_URL"]

with tempfile.TemporaryDirectory() as folder:
    report = Path(folder) / "report.json"
    command = [
        *(str(Path(sys.executable).parent / "guidellm"), "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={URL},model={os.environ['CHAT_MODEL']}"),
        *("--tokenizer", f"kind=huggingface_auto,model={os.environ['CHAT_TOKENIZER']}"),
        *("--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8"),
        *("--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=4"),
        *("--output", f"kind=json,path={report}"),
    ]
    environment = {**os.environ, "GUIDELLM__MAX_WORKER_PROCESSES": "1"}
    subprocess.run(command, check=True, env=environment)
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    assert len(benchmark["requests"]["successful"]) == 4
