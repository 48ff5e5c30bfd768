"""Version 0.3.0: what it saved loads with the same results, and its import paths still work. So do
directories of 0.4.0.dev1, which have a persistence and no noise law."""

from __future__ import annotations

import importlib
import json
import pickle
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import causal_qwen
from causal_qwen._aliases import MOVED
from causal_qwen.analysis.counterfactual import counterfactual
from causal_qwen.conversion.convert import open_model
from causal_qwen.engine import Engine
from causal_qwen.engine.heads import CausalHeads
from causal_qwen.individuals.individual import Individual, resolve_individuals
from causal_qwen.modeling.abduction import AbductionNetwork
from causal_qwen.modeling.one_vs_rest import HeadParams, LossSettings
from causal_qwen.modeling.value_space import ValueSpace
from causal_qwen.options import NOISY_MODES
from causal_qwen.outputs import file_sha256, write_manifest
from causal_qwen.regression.regressor import CausalTextRegressor, Target
from causal_qwen.text import numerals
from causal_qwen.training.trainer import CausalTrainingArguments

FIXTURES = Path(__file__).parents[1] / "fixtures" / "v0.3.0"
EXPECTED: dict[str, Any] = json.loads((FIXTURES / "expected.json").read_text(encoding="utf-8"))
TEXT = "It costs 12 or 3.5 euro"

# What 0.4.0.dev1, whose only law was the sum, says with persistence 0.5, by noise gain.
TEXTS_OF_THE_SUM = {
    3.0: [255, 17, 169, 43, 129, 255, 204, 140, 169, 25, 229, 214],
    30.0: [255, 17, 24, 184, 145, 154, 255, 232, 230, 134, 101, 160],
}

# Top-level classes and functions of the modules in the API reference of 0.3.0, by old path.
PUBLIC_NAMES = {
    "config": "CausalQwen2Config",
    "cauchy": "Cauchy",
    "embedding": "check_values embed_values",
    "value": "symlog symexp ValueSpace warn_if_clamped fit_field field_space position_space",
    "abduction": (
        "Float32Module float32_linear LocationNetwork ScaleNetwork AbductionNetwork activate "
        "inverse_activation"
    ),
    "action": "ActionHead ValueHead ActionNetwork row_norms score_pair",
    "decision": "Decision choose HeadBounds block_edges choose_pruned",
    "one_vs_rest": "Law Plan one_vs_rest",
    "loss": "LossTerms shift_left shift_fields causal_loss",
    "generation": (
        "Speaker Ledger ModeProcessor CausalGenerationMixin resolve_mode adopt_generation_config"
    ),
    "model": (
        "CausalQwenOutput CausalInitMixin initial_direction CausalQwenModel CausalQwenForCausalLM"
    ),
    "numerals": "Encoded encode decode canonical render",
    "processor": "CausalQwenProcessor install_number_token",
    "prediction": "NumberPrediction predict",
    "pipeline": "CausalTextGenerationPipeline",
    "calibrate": (
        "Calibration calibrate set_decision_noise sample_scores sum_p solve_gamma "
        "calibrate_noise find_gain own_samples "
        "random_prompts pad_left end_ids"
    ),
    "convert": (
        "Report convert_model convert default_model open_model load load_base load_gguf "
        "load_tokenizer as_qwen2 graft resize_latent assemble initialize encode compare "
        "head_error check_finite new_directory damaged_files_named quiet"
    ),
    "individual": (
        "draw_noise to_cauchy from_cauchy noise_bound check_noise row_seeds Individual gather "
        "called Gains latent_size as_seeds first_given"
    ),
    "counterfactual": (
        "ChangedPrompt ChangedToken ChangedNumber OtherModel parse_edit World Stability "
        "Counterfactual counterfactual stability_violations"
    ),
    "posterior": (
        "Posterior UnreachableError Observation infer_individual Polytope draw_cauchy "
        "draw_product CauchyProduct least_distance nonnegative_least_squares "
        "effective_sample_sizes"
    ),
    "gumbel": "GumbelIndividual GumbelProcessor generate infer_gumbel",
    "regressor": "Target OpenModel CausalTextRegressor",
    "tables": (
        "to_sentences used_columns empty_columns require_columns ask_for join_sentences "
        "read_texts read_targets is_table name_rows"
    ),
    "features": "encode_texts too_long hidden_at_end batches_by_length features fingerprint",
    "fit": (
        "Output Basis LinearHead principal_basis fit_head fit_chain cooled location_loss "
        "scale_loss Chain to_chain Lesson start_from_chain start_from_nothing teach number_of"
    ),
    "conformal": "TooFewRows Conformal rows_needed",
    "data": "read_rows Example Examples encode_rows encode_row pack Collator",
    "metrics": "Tally",
    "trainer": "CausalTrainingArguments CausalTrainer",
    "train": "Run train evaluate fit_fields",
    "engine": (
        "Engine Generation KeyValueCache Qwen2 Qwen2Config Step apply_rotary_pos_emb "
        "attention_forward greedy_decode read_tensors repeat_kv rms_norm"
    ),
    "engine.qwen2": (
        "Qwen2Config rms_norm rotate_half apply_rotary_pos_emb inverse_frequencies "
        "RotaryEmbedding repeat_kv softmax_in_place attention_forward causal_mask attend "
        "swiglu KeyValueCache Layer expected_tensors Qwen2 greedy_decode"
    ),
    "engine.causal": (
        "Cauchy ValueSpace symlog symexp warn_if_clamped expected_tensors CausalHeads choose"
    ),
    "engine.generation": "Options Moment Speaker Generator",
    "engine.sampling": "softmax keep_top_k keep_top_p penalize_repetition draw",
    "engine.matrix": "Matrix tiles project",
    "engine.threads": "run shares scratch blas_alone",
    "verify": "Difference Row Check Verification verify table live plot",
}
EXPORTED_NAMES = [
    "Cauchy",
    "CausalQwen2Config",
    "CausalQwenForCausalLM",
    "CausalQwenModel",
    "CausalQwenOutput",
    "CausalQwenProcessor",
    "CausalTextGenerationPipeline",
    "CausalTextRegressor",
    "ChangedNumber",
    "ChangedPrompt",
    "ChangedToken",
    "GumbelIndividual",
    "Individual",
    "NumberPrediction",
    "OpenModel",
    "OtherModel",
    "__version__",
    "infer_individual",
    "stability_violations",
]
OLD_PATHS = r"ignore:causal_qwen\.[\w.]+ is now causal_qwen\.:DeprecationWarning"


@pytest.fixture(autouse=True)
def forget_old_paths() -> Iterator[None]:
    """Importing an old path warns once per process; every test here starts anew."""

    def forget() -> None:
        for old in MOVED:
            sys.modules.pop(f"causal_qwen.{old}", None)

    forget()
    yield
    forget()


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


@pytest.mark.filterwarnings(OLD_PATHS)
def test_training_arguments_unpickle_from_their_old_module() -> None:
    arguments = torch.load(FIXTURES / "training_args.bin", weights_only=False)
    assert type(arguments) is CausalTrainingArguments
    assert (arguments.head_learning_rate, arguments.train) == (0.01, "heads")


@pytest.mark.filterwarnings(OLD_PATHS)
def test_regression_targets_unpickle_from_their_old_modules() -> None:
    with (FIXTURES / "targets.pickle").open("rb") as file:
        target = pickle.load(file)["price"]
    assert type(target) is Target
    assert type(target.chain.abduction) is AbductionNetwork
    assert target.space == ValueSpace("linear", 10.385000000000002, 3.2699999999999996)
    assert target.chain.action.value.in_features == 24
    assert len(target.conformal.scores) == 12


# ---------------------------------------------------------------- import paths


@pytest.mark.parametrize("old", MOVED)
def test_old_module_path_imports_with_a_warning_that_names_the_new_path(old: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"^causal_qwen\.{old} is ") as caught:
        module = importlib.import_module(f"causal_qwen.{old}")
    assert [f"is now causal_qwen.{MOVED[old]};" in str(w.message) for w in caught] == [True]
    assert dir(module) == dir(importlib.import_module(f"causal_qwen.{MOVED[old]}"))


@pytest.mark.filterwarnings(OLD_PATHS)
@pytest.mark.parametrize("path", PUBLIC_NAMES)
def test_public_names_resolve_through_the_old_path(path: str) -> None:
    module = importlib.import_module(f"causal_qwen.{path}")
    missing = [name for name in PUBLIC_NAMES[path].split() if not hasattr(module, name)]
    assert not missing, f"causal_qwen.{path} lacks {missing}; see _aliases.RENAMED."


def test_exported_names_resolve() -> None:
    assert set(EXPORTED_NAMES) <= set(causal_qwen.__all__)
    assert all(hasattr(causal_qwen, name) for name in EXPORTED_NAMES)


@pytest.mark.filterwarnings(OLD_PATHS)
@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("convert", "open_model", open_model),
        ("counterfactual", "counterfactual", counterfactual),
        ("engine.causal", "CausalHeads", CausalHeads),
        ("individual", "gather", resolve_individuals),
        ("numerals", "encode", numerals.encode),
        ("one_vs_rest", "Law", HeadParams),
        ("one_vs_rest", "Plan", LossSettings),
        ("trainer", "CausalTrainingArguments", CausalTrainingArguments),
    ],
)
def test_name_on_an_old_path_is_the_new_object(path: str, old: str, new: object) -> None:
    assert getattr(importlib.import_module(f"causal_qwen.{path}"), old) is new


@pytest.mark.filterwarnings(OLD_PATHS)
def test_unknown_name_on_an_old_path_raises_attribute_error() -> None:
    module = importlib.import_module("causal_qwen.numerals")
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = module.no_such_name
