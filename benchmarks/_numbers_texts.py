"""The time of many texts: 5,000 distinct tweets, the first 20 words of each, to their retweets.

The feature cache is empty at first. Time is that of the clock, with as many threads as there are
cores: run it alone on the machine.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import torch
from _numbers_tables import load

from causal_qwen import CausalTextRegressor
from causal_qwen.regression.features import MIDDLE
from causal_qwen.regression.regressor import MANY_TEXTS, SAMPLE

ROWS, WORDS, NEW = 5000, 20, 500
QUICK_ROWS = 200
LIMIT = 180.0  # seconds
TARGET = "retweet_count"


def read_tweets(count: int) -> Any:
    """Distinct texts of WORDS words, without links."""
    table = load("dslabs", "trump_tweets")
    words = table["text"].astype(str).str.split()
    words = words.map(lambda own: [word for word in own if not word.startswith("http")])
    texts = words[words.str.len() >= WORDS].map(lambda own: " ".join(own[:WORDS]))
    frame = pd.DataFrame({"text": texts, TARGET: table[TARGET]}).dropna()
    return frame.drop_duplicates("text").sample(count, random_state=0).reset_index(drop=True)


def many_texts(options: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    count = QUICK_ROWS if options.quick else ROWS
    tweets = read_tweets(count + NEW)
    train, new = tweets[:count], tweets[count:]
    place = "causal_qwen.regression.regressor.cache_directory"
    with tempfile.TemporaryDirectory() as empty, mock.patch(place, return_value=Path(empty)):
        start = time.perf_counter()
        regressor: Any = CausalTextRegressor(verbose=False, model=options.model)
        regressor.fit(train, TARGET)
        seconds = time.perf_counter() - start
        start = time.perf_counter()
        medians = regressor.predict(new)
        each = (time.perf_counter() - start) / NEW
    reading = regressor.source_.targets[TARGET].reading
    read = "nothing" if reading is None else f"{MIDDLE[reading.pooling]} of the layers"
    record = {
        "rows": count,
        "seconds": round(seconds, 1),
        "milliseconds_of_a_prediction": round(1e3 * each, 1),
        "threads": torch.get_num_threads(),
        "read": read,
        "mdae": float(np.median(np.abs(medians - new[TARGET]))),
        "is_met": seconds <= LIMIT,
    }
    met = "met" if record["is_met"] else "missed"
    is_sampled = count >= MANY_TEXTS
    how = f"A sample of {SAMPLE:,} rows chose what is read of the others" if is_sampled else "Read"
    page = [
        "## Many texts",
        "",
        f"{count:,} distinct tweets of {WORDS} words, with an empty cache and {record['threads']} "
        f"threads: `fit` took {seconds:.0f} s (limit {LIMIT:.0f} s: **{met}**), a prediction "
        f"{1e3 * each:.0f} ms. {how}: {read}.",
        "",
    ]
    print(page[2], flush=True)
    return page, record
