"""WebShop's search against what Lucene answered, as JSON.

    python benchmarks/webshop_oracle.py --data-dir DIR [--oracle DIR/lucene_search_oracle.jsonl.xz]

The file of recorded answers holds one JSON object a line: "query", "tokens" (Lucene's analysis), "top50" (ASINs in
order) and "scores", of the catalogue in DIR. Counts queries with the same tokens, the same first hit, first ten and first fifty
in the same order, and scores within 0.001; compiled and in NumPy alone. Without the file it prints {"left_out": the reason}.
"""

from __future__ import annotations

import argparse
import json
import lzma
import tempfile
import time
from pathlib import Path

import numpy as np

from divopd_gym.envs.webshop import search
from divopd_gym.envs.webshop.analysis import analyse
from divopd_gym.envs.webshop.prepare import get_store
from divopd_gym.envs.webshop.search import SearchEngine

NAME = "lucene_search_oracle.jsonl.xz"


def compare(engine: SearchEngine, asins: list[str], cases: list[dict]) -> dict:
    """Ask every recorded query; counts of agreement, and milliseconds a query."""
    same = dict.fromkeys(("first", "ten", "fifty", "scores"), 0)
    seconds = []
    engine.search(cases[0]["query"], 50)
    for case in cases:
        began = time.perf_counter()
        found = engine.search(case["query"], 50)
        seconds.append(time.perf_counter() - began)
        names, scores = [asins[row] for row, _ in found], [score for _, score in found]
        for name, count in (("first", 1), ("ten", 10), ("fifty", 50)):
            same[name] += names[:count] == case["top50"][:count]
        same["scores"] += len(scores) == len(case["scores"]) and bool(
            np.all(np.abs(np.array(scores) - np.array(case["scores"])) < 1e-3)
        )
    middle, late = np.quantile(np.array(seconds) * 1e3, [0.5, 0.99])
    return {"same": same, "median_ms": round(float(middle), 3), "p99_ms": round(float(late), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data-dir", type=Path, help="folder of the benchmark's files")
    parser.add_argument("--oracle", type=Path, help=f"recorded answers; default {NAME} in that folder")
    parser.add_argument("--queries", type=int, help="only the first so many")
    args = parser.parse_args()
    result: dict = {"benchmark": "webshop_oracle"}
    oracle = args.oracle or (args.data_dir and args.data_dir / NAME)
    if not args.data_dir or not oracle.is_file():
        reason = f"it needs --data-dir with the benchmark's catalogue and Lucene's recorded answers ({NAME})"
        print(json.dumps(result | {"left_out": reason}))
        return
    with lzma.open(oracle, "rt", encoding="utf-8") as file:
        cases = [json.loads(line) for line in file][: args.queries]
    with tempfile.TemporaryDirectory() as folder:
        store = get_store(args.data_dir, size="small", index_dir=Path(folder) / "index")
        asins = [store.catalogue.product(row).asin for row in range(len(store.catalogue))]
        result |= {"documents": len(asins), "queries": len(cases)}
        result["same_tokens"] = sum(analyse(case["query"]) == case["tokens"] for case in cases)
        # The compiled search is for large catalogues; here it is asked to answer for a small one too.
        for name, few in (("numpy", len(asins)), ("compiled", 0)):
            search._FEW = few
            engine = SearchEngine(store.postings, store.catalogue.term_number)
            result[name] = compare(engine, asins, cases)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
