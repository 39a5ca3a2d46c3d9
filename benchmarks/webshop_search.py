"""Search in a WebShop catalogue of any size: building, and querying compiled and in NumPy, in one run.

Documents are mixed from those of a base catalogue (generated, or real files by --data-dir) with rare words added.
Prints JSON. Example: python benchmarks/webshop_search.py --documents 10000 100000 1180000
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from divopd_gym.envs.webshop import search
from divopd_gym.envs.webshop.analysis import analyse
from divopd_gym.envs.webshop.catalogue import Catalogue, CatalogueWriter
from divopd_gym.envs.webshop.generated import generate_products
from divopd_gym.envs.webshop.goals import Goals
from divopd_gym.envs.webshop.postings import Postings, PostingsBuilder
from divopd_gym.envs.webshop.prepare import generated_store, get_store
from divopd_gym.envs.webshop.search import SearchEngine

_BLOCK = 20_000
_RARE_WORDS = 120_000
_RARE_SHARE = 0.08


def base(data_dir: str | None) -> tuple[list[str], list[str]]:
    """Texts of the base catalogue's documents, and of its goals as queries."""
    if data_dir is None:
        texts = [product.search_text for product in generate_products(2000)]
        goals = generated_store(2000, 0).goals("human")
        return texts, [goal.text for goal in goals]
    store = get_store(data_dir, size="small")
    texts = [store.catalogue.product(row).search_text for row in range(len(store.catalogue))]
    goals_file = Path(data_dir) / "human_goals_12087.json"
    if goals_file.is_file():
        return texts, json.loads(goals_file.read_text(encoding="utf-8"))
    return texts, [goal.text for goal in Goals(store.catalogue, "synthetic")]


def mix(texts: list[str], documents: int, folder: Path) -> dict:
    """Build an index of `documents` mixed documents in a folder; returns times."""
    builder = PostingsBuilder(folder)
    terms = builder.terms
    ids = [
        np.array([terms.setdefault(t, len(terms)) for t in analyse(text)], dtype=np.int64) for text in texts
    ]
    ids = [one for one in ids if len(one) > 3]
    flat, ends = np.concatenate(ids), np.cumsum([len(one) for one in ids])
    starts, lengths = ends - np.array([len(one) for one in ids]), np.array([len(one) for one in ids])
    common = len(terms)
    for number in range(_RARE_WORDS):
        terms[f"rare{number}"] = common + number
    rng = np.random.default_rng(0)
    began = time.perf_counter()
    for first in range(0, documents, _BLOCK):
        count = min(_BLOCK, documents - first)
        one, two = rng.integers(0, len(ids), size=(2, count))
        # The head of one document and the tail of another.
        heads = np.maximum(1, (lengths[one] * rng.random(count)).astype(np.int64))
        tails = np.maximum(1, (lengths[two] * rng.random(count)).astype(np.int64))
        places, rows = _ranges(
            np.stack([starts[one], ends[two] - tails], 1).ravel(), np.stack([heads, tails], 1).ravel()
        )
        token, row = flat[places], rows // 2
        rare = rng.random(len(token)) < _RARE_SHARE
        token[rare] = common + (_RARE_WORDS ** rng.random(int(rare.sum()))).astype(np.int64) - 1
        key, tf = np.unique(row << 32 | token, return_counts=True)
        builder.add_block(key & 0xFFFFFFFF, (key >> 32) + first, tf, (heads + tails).tolist())
    mixed = time.perf_counter()
    postings = builder.finish([f"B{number:09d}" for number in rng.permutation(documents)])
    postings.save(folder)
    inverted = time.perf_counter()
    CatalogueWriter(folder / "terms.sqlite").finish(terms).close()
    return {
        "mixing_s": round(mixed - began, 1),
        "inverting_s": round(inverted - mixed, 1),
        "terms_s": round(time.perf_counter() - inverted, 1),
        "tokens": int(postings.totals[1]),
        "postings": len(postings.docs),
        "terms": len(terms),
        "index_mb": round(sum(p.stat().st_size for p in folder.iterdir()) / 2**20),
    }


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All numbers of many ranges, one after the other, and the range of each."""
    which = np.repeat(np.arange(len(lengths)), lengths)
    offset = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return starts[which] + offset, which


def ask(queries: list[str], folder: Path, few: int) -> dict:
    """Time queries; then compare a few of them with NumPy alone."""
    engine = SearchEngine(Postings.load(folder), Catalogue(folder / "terms.sqlite").term_number)
    for query in queries[:5]:
        engine.search(query)
    wall, cpu, results = _timed(engine, queries)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    search._compiled = lambda: None
    plain_wall, plain_cpu, plain = _timed(engine, queries[:few])
    return {
        "queries": len(queries),
        "ms": _quantiles(wall),
        "cpu_ms": _quantiles(cpu),
        "numpy_ms": _quantiles(plain_wall),
        "numpy_cpu_ms": _quantiles(plain_cpu),
        "equal_results": f"{sum(a == b for a, b in zip(results, plain, strict=False))}/{len(plain)}",
        "serve_peak_rss_mb": round(resident),
    }


def _timed(engine: SearchEngine, queries: list[str]) -> tuple[list[float], list[float], list]:
    wall, cpu, results = [], [], []
    for query in queries:
        began, used = time.perf_counter(), time.process_time()
        results.append(engine.search(query))
        wall.append(time.perf_counter() - began)
        cpu.append(time.process_time() - used)
    return wall, cpu, results


def _quantiles(seconds: list[float]) -> dict[str, float]:
    found = np.quantile(np.array(seconds) * 1e3, [0.5, 0.95, 0.99])
    return {"median": round(found[0], 2), "p95": round(found[1], 2), "p99": round(found[2], 2)}


def measure(documents: int) -> dict:
    """Build and query one size; each in a process of its own, so that its memory is its own."""
    result: dict = {"documents": documents}
    with tempfile.TemporaryDirectory() as folder:
        for stage in ("build", "serve"):
            given = ["--documents", str(documents), "--stage", stage, "--folder", folder]
            command = [sys.executable, __file__, *sys.argv[1:], *given]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=7200)
            if done.returncode:
                raise SystemExit(
                    f"--stage {stage} of {documents} documents ended with status {done.returncode}."
                )
            result[stage] = json.loads(done.stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, nargs="+", default=[100_000])
    parser.add_argument("--queries", type=int, default=400)
    parser.add_argument("--data-dir", help="folder of real files to mix from")
    parser.add_argument("--stage", choices=["build", "serve"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stage is None:
        rows = [measure(documents) for documents in args.documents]
        print(json.dumps({"benchmark": "webshop_search", "rows": rows}, indent=1))
        return
    if args.stage == "build":
        texts, queries = base(args.data_dir)
        rng = np.random.default_rng(1)
        chosen = [queries[i] for i in rng.permutation(len(queries))[: args.queries]]
        (args.folder / "queries.json").write_text(json.dumps(chosen), encoding="utf-8")
        found = mix(texts, args.documents[-1], args.folder)
        found["peak_rss_mb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    else:
        queries = json.loads((args.folder / "queries.json").read_text(encoding="utf-8"))
        found = ask(queries, args.folder, 100)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
