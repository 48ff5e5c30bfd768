"""Version 0.3.0: what it saved loads with the same results. So do directories of 0.4.0.dev1, which
have a persistence and no noise law."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from causal_qwen.conversion.convert import open_model
from causal_qwen.engine import Engine
from causal_qwen.individuals.individual import Individual
from causal_qwen.options import NOISY_MODES
from causal_qwen.outputs import file_sha256, write_manifest
from causal_qwen.regression.regressor import CausalTextRegressor

FIXTURES = Path(__file__).parents[1] / "fixtures" / "v0.3.0"
EXPECTED: dict[str, Any] = json.loads((FIXTURES / "expected.json").read_text(encoding="utf-8"))
TEXT = "It costs 12 or 3.5 euro"

# What 0.4.0.dev1, whose only law was the sum, says with persistence 0.5, by noise gain.
TEXTS_OF_THE_SUM = {
    3.0: [255, 17, 169, 43, 129, 255, 204, 140, 169, 25, 229, 214],
    30.0: [255, 17, 24, 184, 145, 154, 255, 232, 230, 134, 101, 160],
}


@pytest.fixture(scope="module")
def model_and_processor() -> tuple[Any, Any]:
    processor, model = open_model(FIXTURES / "model")
    return model, processor


# ---------------------------------------------------------------- saved files


def test_processor_reads_the_same_ids_and_values(model_and_processor: tuple[Any, Any]) -> None:
    _, processor = model_and_processor
    batch = processor(TEXT, return_tensors="pt", encode_numbers="value")
    assert batch["input_ids"].tolist() == EXPECTED["input_ids"]
    assert batch["numeric_values"].tolist() == EXPECTED["numeric_values"]


@pytest.mark.parametrize("mode", EXPECTED["tokens"])
def test_model_generates_the_same_tokens(model_and_processor: tuple[Any, Any], mode: str) -> None:
    model, _ = model_and_processor
    out = model.generate(
        torch.tensor(EXPECTED["input_ids"]),
        numeric_values=torch.tensor(EXPECTED["numeric_values"], dtype=torch.float64),
        causal_mode=mode,
        individual=3 if mode in NOISY_MODES else None,
        max_new_tokens=12,
    )
    assert out[0].tolist() == EXPECTED["tokens"][mode]


@pytest.mark.parametrize(("gain", "expected"), TEXTS_OF_THE_SUM.items())
def test_persistence_saved_without_a_noise_law_keeps_its_texts_in_both_engines(
    gain: float, expected: list[int], tmp_path: Path
) -> None:
    path = shutil.copytree(FIXTURES / "model", tmp_path / "model")
    file = path / "generation_config.json"
    saved = json.loads(file.read_text(encoding="utf-8"))
    saved |= {"persistence": 0.5, "causal_min_p": 0.1, "noise_gain": gain, "min_density": 0.0}
    file.write_text(json.dumps(saved), encoding="utf-8")
    processor, model = open_model(path)
    ids = processor(TEXT, return_tensors="pt")["input_ids"]
    options = {"individual": 3, "max_new_tokens": len(expected)}
    said = model.generate(ids, causal_mode="causal", **options)[0]
    assert said[ids.shape[1] :].tolist() == expected
    found = Engine.from_pretrained(path).generate(ids[0].tolist(), mode="causal", **options)
    assert found.ids[0, found.new].tolist() == expected


def test_regressor_predicts_the_same_medians_and_intervals() -> None:
    regressor = CausalTextRegressor.load(FIXTURES / "regressor", model=FIXTURES / "model")
    expected = EXPECTED["regressor"]
    rows = pd.DataFrame(expected["rows"])
    np.testing.assert_allclose(regressor.predict(rows), expected["median"], rtol=1e-5)
    np.testing.assert_allclose(
        regressor.predict_interval(rows, 0.5), expected["interval"], rtol=1e-5
    )


def test_a_regressor_of_format_1_stays_the_same_when_it_is_saved_again(tmp_path: Path) -> None:
    old = CausalTextRegressor.load(FIXTURES / "regressor", model=FIXTURES / "model")
    assert (old.sources, old.support, old.cv, old.seed_) == (["model"], "real", None, 0)
    old.save(tmp_path / "again")
    new = CausalTextRegressor.load(tmp_path / "again")
    rows = pd.DataFrame(EXPECTED["regressor"]["rows"])
    assert np.array_equal(new.predict(rows), old.predict(rows))
    assert np.array_equal(new.predict_interval(rows, 0.5), old.predict_interval(rows, 0.5))
    middle = old.predict_quantiles(rows, [0.5])[:, 0]  # 0.3.0 did not calibrate the median
    assert not np.allclose(middle, old.predict(rows))
    assert np.array_equal(new.predict_quantiles(rows, [0.5])[:, 0], middle)


def test_a_regressor_of_format_1_with_hashes_loads(tmp_path: Path) -> None:
    """As versions after 0.3.0 wrote them."""
    copied = Path(shutil.copytree(FIXTURES / "regressor", tmp_path / "copied"))
    settings = json.loads((copied / "regressor.json").read_text("utf-8"))
    settings |= {"format": 1, "tensors_sha256": file_sha256(copied / "regressor.safetensors")}
    (copied / "regressor.json").write_text(json.dumps(settings), "utf-8")
    write_manifest(copied)
    regressor = CausalTextRegressor.load(copied, model=FIXTURES / "model")
    rows = pd.DataFrame(EXPECTED["regressor"]["rows"])
    np.testing.assert_allclose(regressor.predict(rows), EXPECTED["regressor"]["median"], rtol=1e-5)


def test_regressor_trained_from_scratch_predicts_the_same() -> None:
    regressor = CausalTextRegressor.load(FIXTURES / "scratch_regressor")
    rows = pd.DataFrame(EXPECTED["regressor"]["rows"])
    np.testing.assert_allclose(regressor.predict(rows), EXPECTED["scratch"], rtol=1e-5)


def test_individual_loads_with_its_noise_and_fields() -> None:
    loaded = Individual.load(FIXTURES / "individual.safetensors")
    assert loaded == Individual.draw(24, seed=7, min_density=0.05, temperature=2.0)
    assert (loaded.name, loaded.seed, loaded.offset) == ("ada", 7, 0)
