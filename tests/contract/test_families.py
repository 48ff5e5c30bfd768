"""Every family of base models keeps the contract: one tiny model each, one process for all."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import _ecosystem
import pytest
import torch
import transformers
from _tiny import NUM, OWN, TINY, V, make_base, make_causal
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from causal_qwen import CausalQwenForCausalLM
from causal_qwen.analysis.counterfactual import ChangedToken, counterfactual
from causal_qwen.backbones import base_class, classes_of
from causal_qwen.conversion.checkpoint_io import load_base, quiet
from causal_qwen.conversion.convert import convert
from causal_qwen.conversion.opening import open_model
from causal_qwen.families import BY_BASE, FAMILIES, Family, family_of
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.processor import CausalQwenProcessor
from causal_qwen.modeling.thresholds import over_bar
from causal_qwen.numpy_engine import Engine
from causal_qwen.numpy_engine.calibration import BAR_SUM
from causal_qwen.training.evaluation import open_checkpoint
from causal_qwen.training.run import with_lora

NOISELESS = {"sampling": {"temperature": 0.0}, "causal": {"temperature": 0.0}}
PROMPT = [5, 17, 3, 44, 8, 60, 2]


@pytest.fixture(scope="module", params=FAMILIES, ids=[family.base for family in FAMILIES])
def pair(request: Any) -> tuple[Any, Any]:
    """(a base model, the causal model made from it)"""
    base = make_base(request.param.base)
    with quiet():
        return base, classes_of(request.param)[2].from_qwen(base)


@pytest.fixture
def model(pair: Any) -> Any:
    """The causal model with <NUM>, every causal parameter moved, ready to be changed."""
    model = copy.deepcopy(pair[1])
    model.config.num_token_id = NUM
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(("abduction", "action", "decision")):
                noise = torch.randn(parameter.shape, generator=generator)
                parameter += 0.02 * noise * parameter.abs().mean().clamp_min(0.1)
    return model


def tokens(rows: int = 3, length: int = 20, most: int = NUM) -> Tensor:
    return torch.randint(most, (rows, length), generator=torch.Generator().manual_seed(7))


def test_every_family_of_the_table_is_tested() -> None:
    assert set(OWN) == set(BY_BASE)


@pytest.mark.ecosystem("convert each of twelve families: logits bit for bit, four modes", "works")
@torch.no_grad()
def test_before_training_logits_and_choices_are_the_bases(pair: Any) -> None:
    base, model = pair
    ids = tokens(most=V)
    expected, output = base(ids).logits, model(ids)
    assert torch.equal(output.logits, expected)
    assert torch.equal(model.decision.choose(output.s_dist), expected.argmax(-1))
    assert output.scale_S.amax() / output.scale_S.amin() < 1 + 1e-5
    greedy = base.generate(ids[:, :7], max_new_tokens=6, do_sample=False)
    for mode in ("standard", "sampling", "causal", "compatible"):
        found = model.generate(
            ids[:, :7], max_new_tokens=6, causal_mode=mode, **NOISELESS.get(mode, {})
        )
        assert torch.equal(found, greedy), mode


@torch.no_grad()
def test_calibration_makes_the_probabilities_sum_to_one(pair: Any) -> None:
    _, model = pair
    sums = model.decision(model(tokens(8, 40, V)).s_dist).sum(-1)
    assert 0.3 < sums.median() < 3
    assert model.calibration.sum_p_median == pytest.approx(BAR_SUM, abs=0.01)


@torch.no_grad()
def test_pruned_choice_is_the_choice_by_definition(model: Any) -> None:
    """`generate` prunes by row norms of W, without the family's divisor: the same argmax."""
    ids = tokens(4, 9)
    values = torch.zeros(ids.shape)
    output = model(ids, numeric_values=values)
    by_definition = model.decision(output.s_dist).argmax(-1)[:, -1]
    found = model.generate(ids, numeric_values=values, max_new_tokens=1, causal_mode="standard")
    assert torch.equal(found[:, -1], by_definition)


@torch.no_grad()
def test_scores_of_a_moved_individual_are_linear_in_the_move(model: Any) -> None:
    """S = g(W loc_U / d) + W (u - loc_U) / d, with the base's cap g and divisor d."""
    from causal_qwen.decoding.noise import UNoise

    u = model.abduct(torch.randn(2, 1, 32, generator=torch.Generator().manual_seed(2)))
    noise = UNoise(torch.randn(2, 32, generator=torch.Generator().manual_seed(3)), "scale")
    loc, shift = model.score_moved(u, model.displace(u, noise)[0])
    weight = model.lm_head.weight.double() / model.config.logit_divisor
    moved = model.action.displacement(Cauchy(u.loc[:, -1], u.scale[:, -1]), noise).double()
    assert shift[:, 0].double() == pytest.approx((moved @ weight.T).numpy(), rel=1e-4, abs=1e-6)
    centre = u.loc[:, 0].double() @ weight.T
    if (cap := model.config.logit_softcap) is not None:
        assert centre.abs().max() > cap / 2, "the cap must matter"
        centre = cap * torch.tanh(centre / cap)
    assert loc[:, 0].double() == pytest.approx(centre.numpy(), rel=1e-4, abs=1e-4)
    widened = model.action.widen(u)
    scale = model.action.score_scale(widened.scale, model.lm_head)
    own = model.action.decision_noise.abs().double() / model.config.logit_divisor
    expected = widened.scale.double() @ weight.abs().T + own * widened.scale.double().mean(-1, True)
    assert scale.double() == pytest.approx(expected.numpy(), rel=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("mode", ["causal", "sampling"])
def test_noise_of_few_candidates_is_that_of_the_whole_product(
    mode: str, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from causal_qwen.decoding import step

    def scores() -> torch.Tensor:
        said = model.generate(
            torch.tensor([[4, 9, 5], [6, 7, 8]]),
            attention_mask=torch.ones(2, 3, dtype=torch.long),
            causal_mode=mode,
            individual=[3, 4],
            min_p=0.3,
            max_new_tokens=4,
            return_dict_in_generate=True,
            output_scores=True,
        )
        return torch.stack(said.scores)

    few = scores()
    assert 0 < few.isfinite().sum() < few.numel() / 2
    monkeypatch.setattr(step, "FEW", 0)
    assert few.numpy() == pytest.approx(scores().numpy(), rel=1e-4, abs=1e-5)


@pytest.mark.ecosystem("numbers as values in each family", "works")
@torch.no_grad()
def test_numbers_are_embedded_on_the_scale_of_the_family(model: Any) -> None:
    ids = torch.tensor([[4, NUM, 9, NUM]])
    values = torch.tensor([[0.0, 3.0, 0.0, -50.0]])
    embedded = model.model.embed(ids, values) - model.model.embed_tokens(ids)
    length = embedded.norm(dim=-1)[0] / float(getattr(model.model.embed_tokens, "embed_scale", 1))
    logs = torch.tensor([0.0, 4.0, 0.0, 51.0]).clamp_min(1).log()
    assert length == pytest.approx(logs.numpy(), rel=1e-5)
    one, other = model(ids, numeric_values=values), model(ids, numeric_values=2 * values)
    assert not torch.equal(one.logits, other.logits)
    assert one.loc_Y.isfinite().all()
    assert torch.equal(
        model(ids[:, :1], numeric_values=values[:, :1]).logits, model(ids[:, :1]).logits
    )
    with pytest.raises(ValueError, match="has no value"):
        model(ids)


@pytest.mark.ecosystem("a training step of each family, load-balancing loss included", "works")
def test_a_training_step_moves_every_part_of_the_model(model: Any) -> None:
    model.config.compat_loss_weight = 1.0
    ids = tokens()
    ids[:, 5] = NUM
    values = torch.where(ids == NUM, 12.5, 0.0)
    model.train()
    batch = {"input_ids": ids, "labels": ids, "numeric_values": values}
    first = model(**batch)
    first.loss.backward()
    unused = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.grad is None
    ]
    assert unused == []
    terms = first.classification_loss + first.regression_loss + first.compatibility_loss
    if first.aux_loss is not None:
        terms = terms + model.config.router_aux_loss_coef * first.aux_loss
        base = base_class(model.config.family)(model.config)
        base.load_state_dict(model.state_dict(), strict=False)
        base.train()
        assert first.aux_loss.item() == pytest.approx(base(ids).aux_loss.item(), rel=0.1)
    assert first.loss.item() == pytest.approx(terms.item(), rel=1e-5)
    length = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad]).norm()
    torch.optim.SGD(model.parameters(), lr=1e-3 / length.item()).step()
    assert model(**batch).loss < first.loss


def test_loss_is_that_of_the_scores(model: Any) -> None:
    """The fused loss, which never sees S, against P of the scores of `forward`."""
    ids = tokens(2, 9)
    output = model(ids, labels=ids)
    s = Cauchy(output.logits[:, :-1].double(), output.scale_S[:, :-1].double())
    s = over_bar(s, model.decision.bar(s.loc))
    threshold = model.decision.threshold.double()
    log_no = s.log_cdf(threshold)
    label = ids[:, 1:, None]
    log_yes = s.log_sf(threshold).gather(-1, label)
    expected = (log_no.gather(-1, label) - log_yes).squeeze(-1) - log_no.sum(-1)
    assert output.classification_loss.item() == pytest.approx(expected.mean().item(), rel=1e-4)


@pytest.mark.ecosystem(
    "save and load each family: own class, Auto classes, the base's class", "works"
)
@torch.no_grad()
def test_saved_model_is_loaded_by_every_door(pair: Any, tmp_path: Path) -> None:
    base, model = pair
    ids, family = tokens(most=V), model.config.family
    expected = base(ids).logits
    with quiet():
        model.save_pretrained(tmp_path / "own")
        base.save_pretrained(tmp_path / "plain")
        loaded = [
            CausalQwenForCausalLM.from_pretrained(tmp_path / "own"),
            CausalQwenForCausalLM.from_pretrained(tmp_path / "plain"),
            AutoModelForCausalLM.from_pretrained(tmp_path / "own"),
        ]
        backbone = AutoModel.from_pretrained(tmp_path / "own")
        as_plain = base_class(family).from_pretrained(tmp_path / "own")
    for one in loaded:
        assert type(one) is classes_of(family)[2]
        assert torch.equal(one(ids).logits, expected)
    assert type(backbone) is classes_of(family)[1]
    assert torch.equal(backbone(ids).last_hidden_state, base.model(ids).last_hidden_state)
    assert torch.equal(as_plain(ids).logits, expected)
    assert {*base.state_dict()} < {*model.state_dict()}
    config = AutoConfig.from_pretrained(tmp_path / "own")
    assert type(config) is classes_of(family)[0]
    assert config.model_type == f"causal_{base.config.model_type}"
    assert config.auto_map["AutoModelForCausalLM"].endswith(family.names[2])
    assert family.names[0] in (tmp_path / "own" / "causal_qwen_auto.py").read_text("utf-8")


PROJECTIONS = {  # what `--lora` adapts, by family; the others have Llama's names
    "qwen3_moe": "q_proj k_proj v_proj o_proj experts.gate_up_proj experts.down_proj",
    "qwen3_5_text": "q_proj k_proj v_proj o_proj in_proj_qkv in_proj_z out_proj gate_proj up_proj "
    "down_proj",
    "phi3": "qkv_proj o_proj gate_up_proj down_proj",
}
LLAMAS = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"


@pytest.mark.ecosystem("LoRA on each family's attention", "works")
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.base)
def test_a_lora_checkpoint_of_every_family_moves_all_projections_and_is_evaluated(
    family: Family, byte_tokenizer: Any, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    base, checkpoint = tmp_path / "base", tmp_path / "checkpoint-1"
    processor = CausalQwenProcessor(byte_tokenizer())
    make_causal(family.base, vocab_size=300, num_token_id=processor.num_token_id).save_pretrained(
        base
    )
    processor.save_pretrained(base)
    _, model = open_model(base)
    before = {name: p.clone() for name, p in model.model.named_parameters()}
    with torch.random.fork_rng(devices=[]):  # PEFT draws its matrices from the global state
        torch.manual_seed(6)
        adapted = with_lora(model, 2)
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    adapted.save_pretrained(checkpoint)
    model.config.encode_numbers = "value"
    model.config.save_pretrained(checkpoint)
    processor.save_pretrained(checkpoint)
    ids = tokens(2, 9)
    with torch.no_grad():
        expected = adapted.eval()(ids).logits
        opened = open_checkpoint(str(checkpoint))[1]
        assert opened.config.encode_numbers == "value"
        assert opened(ids).logits == pytest.approx(expected.numpy(), abs=2e-4)
    moved = [n for n, p in opened.model.named_parameters() if not torch.equal(p, before[n])]
    names = PROJECTIONS.get(family.base, LLAMAS).split()
    of = {
        n: next((x for x in names if n.removesuffix(".weight").endswith(x)), None) for n in before
    }
    assert sorted(moved) == sorted(n for n, projection in of.items() if projection)
    assert {of[n] for n in moved} == set(names)


@pytest.mark.ecosystem("counterfactuals in each family", "works")
def test_counterfactual_replays_and_changes(model: Any) -> None:
    options = {"max_new_tokens": 6, "noise_gain": 0.6, "pad_token_id": 0, "min_p": 0.0}
    found = counterfactual(model, PROMPT, 5, ChangedToken(3, 45), **options)
    again = model.generate(
        torch.tensor([PROMPT]),
        causal_mode="causal",
        individual=5,
        numeric_values=torch.zeros(1, 7),
        **options,
    )
    assert list(found.factual.new_ids) == again[0, 7:].tolist()
    same = counterfactual(model, PROMPT, 5, ChangedToken(3, PROMPT[3]), **options)
    assert list(same.factual.new_ids) == list(same.counterfactual.new_ids)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=[family.base for family in FAMILIES])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_promise_in_half_precision(family: Family, dtype: torch.dtype) -> None:
    base = make_base(family.base, dtype)
    with quiet():
        model = CausalQwenForCausalLM.from_qwen(base)
    ids = tokens(8, 60, V)
    expected, output = base(ids).logits, model(ids)
    assert torch.equal(output.logits, expected)
    assert torch.equal(model.decision.choose(output.s_dist), expected.argmax(-1))


# ---------------------------------------------------------------- one family, or none


def test_llama_is_qwen2_where_that_is_exact_and_itself_elsewhere() -> None:
    plain = LlamaForCausalLM(LlamaConfig(**TINY)).eval()
    biased = LlamaForCausalLM(LlamaConfig(**TINY, attention_bias=True)).eval()
    llama = classes_of(BY_BASE["llama"])[2]
    with quiet():
        assert CausalQwenForCausalLM.from_qwen(plain).config.model_type == "causal_qwen2"
        assert CausalQwenForCausalLM.from_qwen(biased).config.model_type == "causal_llama"
        assert llama.from_qwen(plain).config.model_type == "causal_llama"


@pytest.mark.ecosystem(
    "a family that is not in the table",
    "refused: it knows ..., and another family is added in causal_qwen/families.py",
)
def test_an_unknown_family_is_refused_with_the_known_ones_and_the_file(tmp_path: Path) -> None:
    sentence = r"'gpt_neox'.*qwen2, qwen3, .*granite.*causal_qwen/families.py"
    with pytest.raises(ValueError, match=sentence):
        family_of("gpt_neox")
    config = transformers.GPTNeoXConfig(
        vocab_size=7, hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8
    )
    base = transformers.GPTNeoXForCausalLM(config)
    with pytest.raises(ValueError, match=sentence):
        CausalQwenForCausalLM.from_qwen(base)
    with quiet():
        base.save_pretrained(tmp_path)
    for load in (CausalQwenForCausalLM.from_pretrained, CausalQwenForCausalLM.from_qwen):
        with pytest.raises(ValueError, match=sentence):
            load(tmp_path)


@pytest.mark.ecosystem("Qwen3 in the NumPy engine", "works")
@pytest.mark.parametrize("is_causal", [False, True])
@torch.no_grad()
def test_numpy_engine_runs_qwen3(is_causal: bool, tmp_path: Path) -> None:
    base = make_base("qwen3")
    with quiet():
        model = CausalQwenForCausalLM.from_qwen(base) if is_causal else base
        model.save_pretrained(tmp_path)
    ids = tokens(1, 30, V)
    found = Engine.from_pretrained(tmp_path).logits(ids[0].tolist())
    exact = base.double()(ids).logits[0].numpy()
    assert found == pytest.approx(exact, abs=2e-4)


def test_the_page_of_the_ecosystem_has_the_table_of_the_tests() -> None:
    text = _ecosystem.PAGE.read_text("utf-8")
    assert text == _ecosystem.page(text), "run python tests/_ecosystem.py"


def seeing_model(kind: str) -> Any:
    """A tiny model that sees and reads, as published."""
    sizes = {
        "vocab_size": 96,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    eye = {"hidden_size": 8, "intermediate_size": 8, "patch_size": 14}
    torch.manual_seed(0)
    if kind == "gemma3":
        sizes |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
        eye |= {"num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 28}
        tokens = {"image_token_index": 90, "boi_token_index": 91, "eoi_token_index": 92}
        config: Any = transformers.Gemma3Config(
            text_config=sizes, vision_config=eye, mm_tokens_per_image=4, **tokens
        )
        return transformers.Gemma3ForConditionalGeneration(config)
    sizes |= {"layer_types": ["linear_attention", "full_attention"]}
    sizes |= {f"linear_num_{part}_heads": 2 for part in ("key", "value")}
    sizes |= {f"linear_{part}_head_dim": 8 for part in ("key", "value")}
    eye |= {"depth": 1, "num_heads": 2, "out_hidden_size": 16, "num_position_embeddings": 16}
    config = transformers.Qwen3_5Config(
        text_config=sizes, vision_config={**eye, "deepstack_visual_indexes": []}
    )
    return transformers.Qwen3_5ForConditionalGeneration(config)


@pytest.mark.parametrize("kind", ["qwen3_5", "gemma3"])
def test_the_part_that_reads_is_taken_from_a_model_that_also_sees(
    kind: str, tmp_path: Path
) -> None:
    whole = seeing_model(kind).eval()
    whole.save_pretrained(tmp_path / "whole")
    ids = torch.tensor([[3, 5, 7, 11, 13]])
    with torch.no_grad():
        expected = whole(input_ids=ids).logits
        base = load_base(tmp_path / "whole")
        assert base.config.model_type == f"{kind}_text"
        torch.testing.assert_close(base(ids).logits, expected, rtol=1e-5, atol=1e-6)
        report = convert(tmp_path / "whole", tmp_path / "own")
        assert (report.max_logit_difference, report.standard_agreement) == (0, 1)
        own = CausalQwenForCausalLM.from_pretrained(tmp_path / "own").eval()
        assert own.config.model_type == f"causal_{kind}_text"
        assert torch.equal(own(ids).logits, base(ids).logits)
    with pytest.raises(ValueError, match="also sees; `causal-qwen convert"):
        CausalQwenForCausalLM.from_pretrained(tmp_path / "whole")
