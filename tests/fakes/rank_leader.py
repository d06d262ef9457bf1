"""A process that leads two ranks, without a mesh: prints what it is at, and computes until killed.

python -m tests.fakes.rank_leader DIRECTORY SILENCE_S PHASE [STAGES]
"""

import sys
import threading
from pathlib import Path

from tokenmesh.engine.api.sampling import SamplingParams
from tokenmesh.engine.llm import LLM


def followers() -> list[int]:
    """Children of this process."""
    folders = Path("/proc/self/task").iterdir()
    texts = ((folder / "children").read_text() for folder in folders)
    return [int(word) for text in texts for word in text.split()]


def announce() -> None:
    """Print the follower's process as soon as there is one."""
    while not (found := followers()):
        threading.Event().wait(0.01)
    print("follower", found[0], flush=True)


def main() -> None:
    _, directory, silence_s, phase, *stages = sys.argv
    sizes = {"pipeline_parallel_size": 2} if stages else {"tensor_parallel_size": 2}
    threading.Thread(target=announce, daemon=True).start()
    llm = LLM(
        directory,
        **sizes,
        rank_silence_s=float(silence_s),
        device="cpu",
        dtype="float32",
        num_gpu_blocks_override=64,
        max_num_batched_tokens=8,
    )
    print("loaded", flush=True)
    length = 200 if phase == "prefill" else 5
    if phase == "idle":
        threading.Event().wait()
    while True:
        sampling = SamplingParams(seed=0, max_tokens=30, temperature=0.0, ignore_eos=True)
        (made,) = llm.generate([[3 + n % 90 for n in range(length)]], sampling)
        print("tokens", *made.token_ids, flush=True)


if __name__ == "__main__":
    main()
