"""Break one core line at a time, and see a test of the default tier fail.

    make mutants                                     # all of them, some minutes
    python scripts/mutants.py 3 17                   # by number
    python scripts/mutants.py decoding/step.py # by file

Works on a copy of src/. Exit 1 if a mutant survives, or if its line is no longer found once.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = "causal_qwen"
FAILED = 1  # pytest's exit code; others mean that no test has judged the mutant


class Mutant(NamedTuple):
    file: str  # of the package
    old: str
    new: str
    tests: str  # node ids below tests/, separated by spaces


MUTANTS = (
    # the loss
    Mutant(
        "modeling/loss.py",
        "gate = config.gate_alpha + (1 - config.gate_alpha) * p_number",
        "gate = config.gate_alpha - (1 - config.gate_alpha) * p_number",
        "unit/test_loss.py::test_loss_equals_the_brute_force_reference",
    ),
    Mutant(
        "modeling/loss.py",
        "gate = gate if config.gate_grad else gate.detach()",
        "gate = gate",
        "unit/test_loss.py::test_gate_passes_no_gradient_by_default",
    ),
    Mutant(
        "modeling/loss.py",
        "- log_yes - log_not.sum(-1, keepdim=True)",
        "- log_yes + log_not.sum(-1, keepdim=True)",
        "unit/test_loss.py::test_a_head_in_parts_has_the_same_bar",
    ),
    Mutant(
        "modeling/loss.py",
        "F.pad(values, (0, 1), value=fill)[..., 1:]",
        "F.pad(values, (1, 0), value=fill)[..., :-1]",
        "unit/test_loss.py::test_labels_are_shifted_to_the_next_token",
    ),
    Mutant(
        "modeling/one_vs_rest.py",
        "factor = -self.settings.cls_weight / math.pi",
        "factor = self.settings.cls_weight / math.pi",
        "unit/test_one_vs_rest.py::test_value_and_gradients_match_the_formula_in_float64",
    ),
    Mutant(
        "modeling/one_vs_rest.py",
        "by_score.addcmul_(softmax[rows], total, value=-1)",
        "by_score.addcmul_(softmax[rows], total, value=1)",
        "unit/test_one_vs_rest.py::test_value_and_gradients_match_the_formula_in_float64",
    ),
    Mutant(
        "modeling/cauchy.py",
        "return torch.atan2(self.scale, threshold - self.loc) / math.pi",
        "return torch.atan2(self.scale, self.loc - threshold) / math.pi",
        "unit/test_cauchy.py::test_sf_is_scipys",
    ),
    Mutant(
        "modeling/thresholds.py",
        "Cauchy(s.loc - bar, s.scale)",
        "Cauchy(s.loc + bar, s.scale)",
        "unit/test_decision.py::test_the_bar_is_the_level_of_all_scores",
    ),
    # numbers
    Mutant(
        "modeling/value_space.py",
        "value.sign() * value.abs().expm1()",
        "value.sign() * value.abs().exp()",
        "unit/test_value.py::test_symexp_inverts_symlog",
    ),
    Mutant(
        "modeling/value_space.py",
        "    spread = high - low\n",
        "    spread = (high - low) / 2\n",
        "unit/test_value.py::test_field_is_fitted_by_median_and_interquartile_range",
    ),
    Mutant(
        "modeling/value_space.py",
        "symlog(values).float()",
        "values.float()",
        "unit/test_chain.py::test_log_encoding_adds_the_signed_logarithm_along_the_direction",
    ),
    Mutant(
        "generation/logits.py",
        "y = y + outputs.shift_Y[:, -1]",
        "y = y - outputs.shift_Y[:, -1]",
        "unit/test_number_channel.py::"
        "test_generated_number_has_the_value_of_its_mode_and_is_fed_back",
    ),
    Mutant(
        "generation/logits.py",
        "self.values = self.values[(is_parent.int().argmax(-1) + offset).flatten()]",
        "self.values = self.values[is_parent.int().argmax(-1).flatten()]",
        "unit/test_number_channel.py::test_beams_have_their_own_values",
    ),
    # decisions and candidates
    Mutant(
        "decoding/decision.py",
        "return xp.argmax(xp.where(is_equal, over, -math.inf), axis=-1)",
        "return best[..., 0]",
        "unit/test_decision.py::test_scales_equal_up_to_rounding_leave_the_choice_to_the_scores",
    ),
    Mutant(
        "decoding/decision.py",
        'scale = scale + head.b_noise if mode == "standard" else scale',
        'scale = scale + head.b_noise if mode == "sampling" else scale',
        "unit/test_generation.py::test_each_mode_generates_the_choices_of_its_rule",
    ),
    Mutant(
        "decoding/decision.py",
        "worst = over / xp.where(is_positive, high, low)",
        "worst = over / xp.where(is_positive, low, high)",
        "unit/test_decision.py::test_the_pruned_choice_is_the_full_one_in_random_cases",
    ),
    Mutant(
        "decoding/step.py",
        "where(scores < _least_kept(scores, p), -math.inf, scores)",
        "where(scores <= _least_kept(scores, p), -math.inf, scores)",
        "unit/test_candidates.py::test_a_token_at_exactly_min_p_is_kept",
    ),
    Mutant(
        "decoding/step.py",
        "in_any_row(scores >= _least_kept(scores, p))",
        "in_any_row(scores > _least_kept(scores, p))",
        "unit/test_candidates.py::test_a_token_at_exactly_min_p_is_kept "
        "unit/test_candidates.py::test_few_candidates_are_those_of_any_row",
    ),
    Mutant(
        "decoding/step.py",
        "is_left = xp.max(others, axis=-1, keepdims=True) > -math.inf",
        "is_left = xp.max(others, axis=-1, keepdims=True) >= -math.inf",
        "unit/test_candidates.py::"
        "test_a_token_is_said_twice_in_a_row_only_where_it_is_the_likeliest",
    ),
    Mutant(
        "decoding/step.py",
        "np.asarray(text[-REACH:])",
        "np.asarray(text[-REACH - 1 :])",
        "unit/test_candidates.py::test_what_was_said_long_ago_may_be_said_again",
    ),
    # noise
    Mutant(
        "individuals.py",
        "key=[np.uint64(seed), np.uint64(position)]",
        "key=[np.uint64(position), np.uint64(seed)]",
        "unit/test_individual.py::test_noise_is_philox_keyed_by_seed_and_position",
    ),
    Mutant(
        "decoding/noise.py",
        "individual.coin(position) < individual.persistence",
        "individual.coin(position) > individual.persistence",
        "unit/test_persistence.py::"
        "test_a_mixture_is_the_individual_at_a_share_p_of_positions_and_chance_at_the_others",
    ),
    Mutant(
        "decoding/noise.py",
        "self.shared if own is None else own",
        "self.shared",
        "unit/test_generation.py::test_fresh_noise_has_a_gain_of_its_own",
    ),
    Mutant(
        "individuals.py",
        "SEEDS = 2**53",
        "SEEDS = 2**64",
        "unit/test_serving_requests.py::test_what_is_left_to_chance_is_drawn_and_reported",
    ),
    Mutant(
        "decoding/settings.py",
        "first_given(call.get(name), config.get(name))",
        "first_given(config.get(name), call.get(name))",
        "contract/test_settings.py::"
        "test_a_call_ranks_before_its_config_and_its_config_before_the_saved_one",
    ),
    # the NumPy engine
    Mutant(
        "numpy_engine/qwen2.py",
        "np.concatenate((-x[..., half:], x[..., :half]), axis=-1)",
        "np.concatenate((x[..., half:], -x[..., :half]), axis=-1)",
        "unit/test_engine_parts.py::test_the_documented_names_compute_what_transformers_computes",
    ),
    Mutant(
        "numpy_engine/qwen2.py",
        "np.repeat(hidden_states, n_rep, axis=1)",
        "np.tile(hidden_states, (1, n_rep, 1, 1))",
        "unit/test_engine_parts.py::test_attention_in_blocks_is_attention_as_defined",
    ),
    Mutant(
        "numpy_engine/qwen2.py",
        "wider[..., : self.length] = old[..., : self.length]",
        "wider[..., 1 : self.length] = old[..., 1 : self.length]",
        "unit/test_engine_model.py::test_cached_is_uncached_and_the_cache_grows",
    ),
    Mutant(
        "numpy_engine/generation.py",
        "self.noise.at([len(self.ids) - 1])",
        "self.noise.at([len(self.ids)])",
        "unit/test_engine_model.py::test_every_mode_generates_the_text_of_torch",
    ),
    Mutant(
        "numpy_engine/engine.py",
        'default_mode=self.fields.get("inference_mode", "standard")',
        'default_mode="standard"',
        "contract/test_settings.py::test_both_engines_take_the_default_mode_of_the_config",
    ),
    Mutant(
        "decoding/noise.py",
        "return float(individual.coin(position) < individual.persistence)",
        "return float(individual.coin(position) > individual.persistence)",
        "unit/test_persistence.py::"
        "test_a_mixture_is_the_individual_at_a_share_p_of_positions_and_chance_at_the_others",
    ),
    # regression
    Mutant(
        "regression/conformal.py",
        "rank = math.ceil((total + 1) * level - ROUNDING)",
        "rank = math.ceil(total * level - ROUNDING)",
        "unit/test_conformal.py::test_the_radius_is_the_ranked_score",
    ),
    # training
    Mutant(
        "training/trainer.py",
        "for path in map(Path, reversed(sort_checkpoints(str(run)))):",
        "for path in map(Path, sort_checkpoints(str(run))):",
        "contract/test_training.py::test_a_run_resumes_from_the_newest_whole_checkpoint",
    ),
    Mutant(
        "training/run.py",
        "    if made < steps:",
        "    if made <= steps:",
        "contract/test_training.py::"
        "test_a_run_killed_before_its_last_save_is_finished_as_if_it_had_not_been",
    ),
    Mutant(
        "training/run.py",
        "return rows[count:], rows[:count]",
        "return rows, rows[:count]",
        "contract/test_training.py::test_held_out_rows_are_not_learned",
    ),
    # the server
    Mutant(
        "serving/security.py",
        "given.strip().encode(), key.strip().encode()",
        "given.strip().encode(), key[: len(given)].encode()",
        "unit/test_security.py::test_a_part_of_the_key_admits_nobody",
    ),
    Mutant(
        "session.py",
        "elif len(self.row.new.ids) >= self.row.max_new_tokens:",
        "elif len(self.row.new.ids) > self.row.max_new_tokens:",
        "unit/test_serving.py::test_a_text_ends_at_its_length",
    ),
    Mutant(
        "engines/torch.py",
        "layer.values[row] = layer.values[last].clone()",
        "pass",
        "unit/test_serving.py::test_rows_that_join_and_leave_are_those_of_generate",
    ),
    Mutant(
        "engines/torch.py",
        "torch.tensor([[row.length - 1] for row in rows])",
        "torch.tensor([[row.length] for row in rows])",
        "unit/test_serving.py::test_rows_that_join_and_leave_are_those_of_generate",
    ),
    # the model
    Mutant(
        "model.py",
        "usual = (norms[:old] + noise.detach().abs()[:size]).median()",
        "usual = (norms[:old] + noise.detach().abs()[:size]).max()",
        "unit/test_chain.py::test_new_tokens_start_with_the_mean_threshold_and_scale",
    ),
)


def misplaced(mutant: Mutant) -> str:
    """Why a mutant cannot be applied; empty if its line is found once."""
    count = (ROOT / "src" / PACKAGE / mutant.file).read_text("utf-8").count(mutant.old)
    return "" if count == 1 else f"{mutant.file} has {count} times: {mutant.old}"


def write(path: Path, text: str) -> None:
    """A source file, without bytecode of the former text: their sizes and seconds may be equal."""
    path.write_text(text, "utf-8")
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def run_tests(source: Path, tests: list[str]) -> int:
    """pytest's exit code on the package in `source`, which is imported before an installed one."""
    options = ["-x", "-q", "-p", "no:cacheprovider"]
    variables = {"PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": ""}
    variables |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(f"tests/{test}" for test in tests)],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode > FAILED:
        print(done.stdout[-2000:], done.stderr[-2000:])
    return done.returncode


def is_caught(mutant: Mutant, source: Path) -> bool:
    path = source / PACKAGE / mutant.file
    text = path.read_text("utf-8")
    write(path, text.replace(mutant.old, mutant.new))
    try:
        return run_tests(source, mutant.tests.split()) == FAILED
    finally:
        write(path, text)


def main(names: list[str]) -> int:
    numbered = enumerate(MUTANTS, start=1)
    chosen = [(i, one) for i, one in numbered if not names or {str(i), one.file} & set(names)]
    if lost := [reason for _, one in chosen if (reason := misplaced(one))]:
        print("\n".join(lost))
        return 1
    if not chosen:
        print(f"No mutant is called {', '.join(names)}; there are 1 to {len(MUTANTS)}.")
        return 1
    survivors = 0
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory, "src")
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        every = sorted({test for _, one in chosen for test in one.tests.split()})
        if run_tests(source, every):
            print("A test fails without a mutant: see `make test`.")
            return 1
        for number, mutant in chosen:
            begun = time.monotonic()
            said = "caught" if is_caught(mutant, source) else "SURVIVED"
            survivors += said == "SURVIVED"
            seconds = time.monotonic() - begun
            line = mutant.new.strip().splitlines()
            print(f"{number:3} {said:8} {seconds:5.1f} s  {mutant.file}: {(line or ['-'])[0]}")
            sys.stdout.flush()
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants are caught.")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
