"""The section of embeddings over HTTP."""

from collections.abc import Iterator
from typing import Final

from benchmarks.bench_embeddings import EmbeddingsResult
from benchmarks.page.table import number, origin, table

_BAR: Final = 1.5
"""Times the texts a second of sentence-transformers in its own process."""
_LENGTHS: Final = {"short": "short", "long": "256 tokens"}


def embeddings_section(result: EmbeddingsResult) -> Iterator[str]:
    """Texts a second compared with sentence-transformers and Infinity."""
    config = result.config
    names = ("sentence-transformers", "infinity-emb", "torch", "torch of Infinity", "transformers")
    versions = ", ".join(f"{name} {config[name]}" for name in names if name in config)
    yield "## Embeddings over HTTP"
    yield ""
    yield origin(result.environment, result.load_average_end, f"; {versions}")
    yield (
        "all-MiniLM-L6-v2 in float32, one request of 32 or 256 texts, texts/s; all have "
        f"{config['threads']} threads and take turns, the best of {config['rounds']} rounds. "
        "`python -m benchmarks.bench_embeddings`."
    )
    yield ""
    rows = []
    for case in result.cases:
        times = (case.mesh_s, case.sentence_transformers_s, case.infinity_s)
        speeds = [number(case.texts / seconds if seconds else None) for seconds in times]
        ratio, distance = f"{case.ratio:.2f}x", f"{case.distance:.1e}"
        rows.append([f"{case.texts}, {_LENGTHS[case.kind]}", *speeds, ratio, distance])
    heads = ["texts", "TokenMesh over HTTP", "sentence-transformers in-process"]
    heads += ["Infinity over HTTP", "ratio of the first two", "cosine distance"]
    yield from table(heads, rows)
    yield ""
    ratios = [case.ratio for case in result.cases if case.sentence_transformers_s]
    if not ratios:
        yield f"The bar is {_BAR}x for all of them; sentence-transformers was not measured."
        return
    holds = "holds" if min(ratios) >= _BAR else "**does not hold**"
    yield f"The bar is {_BAR}x for all of them; it {holds} (at least {min(ratios):.2f}x)."
