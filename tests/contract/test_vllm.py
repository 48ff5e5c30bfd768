"""vLLM with the plugin says what `generate` says, token for token in float32.

`make test-vllm` runs it: texts of `generate` are computed here, those of vLLM in an environment of
its own, whose Python CAUSAL_QWEN_VLLM names.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from causal_qwen.conversion.calibration import set_decision_noise
from causal_qwen.modeling.configuration import NOT_INHERITED
from causal_qwen.options import CONTINUES, OPEN

PYTHON = os.environ.get("CAUSAL_QWEN_VLLM", "")
DRIVER = Path(__file__).parents[1] / "_vllm_driver.py"
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "vllm_throughput.py"
LIMIT = 3600  # seconds: an engine that hangs, also on a busy machine
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="needs vLLM's environment: make test-vllm"),
]

SHAPE: dict[str, Any] = {  # distinct sizes, and heads that vLLM's kernels can do
    "vocab_size": 1003,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
}
TWO_DEVICES = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
KINDS: dict[str, dict[str, Any]] = {
    "converted": {},  # constant scales: the noise of an individual is multiplied with W once
    "trained": {"threshold_context": "competition", "num_token_id": 1000},
    "wider": {"causal_size": 128, "head_bias": True},
    "shared": {**TWO_DEVICES, "threshold_context": "competition"},
    "shared-wider": {**TWO_DEVICES, "causal_size": 160, "head_bias": True},
}
ON_TWO_DEVICES = ("shared", "shared-wider")  # W tied to the embedding, and not
RUNNERS: dict[str, dict[str, str]] = {  # vLLM's two model runners
    "first": {"VLLM_USE_V2_MODEL_RUNNER": "0"},
    "second": {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"},  # kernels, without a GPU
}
CALLS: list[dict[str, Any]] = [
    {"causal_mode": "standard"},
    {"causal_mode": "compatible", "do_sample": False},
    {"individual": 7},
    {"individual": 8},
    {"individual": 7, "persistence": 0.5},
    {"individual": 9, "temperature": 1.5},
    {"individual": 3, "persistence": 0.0},
    {"causal_mode": "sampling", "individual": 5},
    {"causal_mode": "sampling", "individual": 6, "avoid_repeats": 3},
    {"individual": 11, "min_p": 0.3, "whole_words": False, "avoid_repeats": 0},
    {"individual": 12, "top_k": 5},
    {"individual": 13, "top_p": 0.7},
    {"individual": 14, "repetition_penalty": 1.3},
    {"causal_mode": "standard", "repetition_penalty": 1.2},
    {"individual": 15, "min_density": 0.05, "persistence": 0.7},
    {"individual": 16, "exogenous": 4},
    {"causal_mode": "compatible", "normalization": "ovr", "do_sample": False},
]
TOKENS = 20
DTYPES = ("float32", "bfloat16")
ENGINE: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 64}


def environment() -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**own, "VLLM_CPU_KVCACHE_SPACE": "1"}


Make = Callable[..., Any]  # of a model
Job = dict[str, Any]


def make_tiny(
    kind: str, fresh_model: Make, make_model: Make, directory: Path, **fields: Any
) -> Any:
    """A tiny model, saved in a directory."""
    make = fresh_model if kind == "converted" else make_model
    model = make(**{**SHAPE, **KINDS[kind], **fields})
    if kind == "converted":
        set_decision_noise(model)  # so that `standard` is the base model's choice
    saved = model.generation_config
    saved.noise_gain = 30.0 if kind == "converted" else 1.0
    saved.causal_min_p, saved.avoid_repeats = 0.05, 2
    saved.whole_words = True
    model.decision.word_edges[::3] = CONTINUES | OPEN
    model.save_pretrained(directory)
    return model


def request_of(
    model: Any,
    ids: torch.Tensor,
    call: dict[str, Any],
    **more: Any,
) -> dict[str, Any]:
    """A request, with the tokens that `generate` chooses alone."""
    number = model.config.num_token_id
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=TOKENS,
        suppress_tokens=None if number is None else [number],
        pad_token_id=0,
        **call,
    )
    wanted = found[0, ids.shape[1] :].tolist()
    return {"prompt": ids[0].tolist(), "options": call, "tokens": TOKENS, "wanted": wanted, **more}


def requests_of(model: Any, lengths: tuple[int, ...]) -> list[dict[str, Any]]:
    """Requests of all kinds."""
    generator = torch.Generator().manual_seed(5)
    return [
        request_of(model, torch.randint(0, 1000, (1, length), generator=generator), call)
        for call in CALLS
        for length in lengths
    ]


def job(directory: Path, requests: list[dict[str, Any]], **engine: Any) -> Job:
    return {"model": str(directory), "engine": {**ENGINE, **engine}, "requests": requests}


def on_two_devices(one: Job) -> Job:
    """The same job with tensor parallelism, a core for each of two processes."""
    cores = sorted(os.sched_getaffinity(0))
    return {
        **one,
        "engine": {**one["engine"], "tensor_parallel_size": 2},
        "environment": {"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"},
    }


def jobs_of_the_tiny_models(models: dict[str, Any], root: Path) -> dict[str, Job]:
    jobs = {
        f"modes-{kind}": job(root / kind, requests_of(models[kind], (3, 40, 90))) for kind in KINDS
    }
    for kind in ON_TWO_DEVICES:
        jobs[f"devices-{kind}"] = on_two_devices(jobs[f"modes-{kind}"])
    crowd = requests_of(models["trained"], (17, 90))
    for place, one in enumerate(crowd):
        one["after"] = 2 * (place % 9)
    jobs["crowd"] = job(
        root / "trained",
        crowd,
        max_num_batched_tokens=48,  # prompts in chunks
        max_num_seqs=16,
        block_size=32,
        num_gpu_blocks_override=24,  # of 32 tokens: too few for 16 rows
    )
    prompt = torch.randint(0, 1000, (1, 90), generator=torch.Generator().manual_seed(8))
    arrivals = ((0, 1), (4, 2), (8, 3), (12, 1))
    shared = [
        request_of(models["converted"], prompt, {"individual": who}, after=after)
        for after, who in arrivals
    ]
    jobs["prefix"] = job(root / "converted", shared, enable_prefix_caching=True, block_size=32)
    options = [{"individual": 7, "n": 2}, {"individual": 7}, {"individual": 8}, {}, {}, {"n": 2}]
    several = [{"prompt": list(range(20)), "options": one, "tokens": TOKENS} for one in options]
    jobs["several"] = job(root / "converted", several)
    alike = [
        one for one in jobs["modes-trained"]["requests"] if "causal_mode" not in one["options"]
    ]
    jobs["causal"] = job(root / "trained", alike)
    return jobs


def jobs_of_the_base_model(model: Any, root: Path) -> dict[str, Job]:
    """Greedy texts: of plain Qwen2 with the same weights, and of ours."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    known = set(Qwen2Config().to_dict()) - set(NOT_INHERITED)
    fields = {name: value for name, value in model.config.to_dict().items() if name in known}
    base = Qwen2ForCausalLM(Qwen2Config(**fields))
    assert not base.load_state_dict(model.state_dict(), strict=False).missing_keys
    base.save_pretrained(root / "base")
    prompts = torch.randint(0, 1000, (12, 30), generator=torch.Generator().manual_seed(9)).tolist()

    def greedy(name: str, dtype: str, *calls: dict[str, Any]) -> Job:
        requests = [
            {"prompt": prompt, "options": call, "tokens": TOKENS}
            for call in calls
            for prompt in prompts
        ]
        return job(root / name, requests, dtype=dtype)

    jobs = {}
    for dtype in DTYPES:
        jobs[f"base-{dtype}"] = greedy("base", dtype, {"temperature": 0})
        jobs[f"standard-{dtype}"] = greedy("converted", dtype, {"causal_mode": "standard"})
        jobs[f"zero-{dtype}"] = greedy("converted", dtype, {"temperature": 0})
    return jobs


def job_of_the_embedded_model() -> Job:
    from causal_qwen.conversion.convert import default_model
    from causal_qwen.conversion.opening import open_model

    processor, model = open_model(str(default_model()))
    prompts = ("Once upon a time", "The best way to cook rice is", "Dear diary, today", "In 1969,")
    calls: list[dict[str, Any]] = [
        {"individual": 7},
        {"individual": 8},
        {"causal_mode": "standard"},
        {"causal_mode": "compatible", "do_sample": False},
        {"causal_mode": "sampling", "individual": 3},
        {"causal_mode": "sampling", "individual": 4, "temperature": 0.5},
        {"individual": 9, "persistence": 0.5},
        {"individual": 10, "min_p": 0.3},
        {"individual": 11, "causal_min_p": 0.0, "top_k": 40},
        {"individual": 12, "repetition_penalty": 1.2},
    ]
    read = [processor(prompt, return_tensors="pt")["input_ids"] for prompt in prompts]
    return job(default_model(), [request_of(model, ids, call) for ids in read for call in calls])


def answer(jobs: dict[str, Job], directory: Path, **more: str) -> dict[str, Job]:
    """Jobs with the answers of vLLM, all of them in one environment."""
    directory.mkdir()
    for name, one in jobs.items():
        (directory / f"{name}.job.json").write_text(json.dumps(one), "utf-8")
    done = subprocess.run(
        [PYTHON, str(DRIVER), str(directory)],
        env={**environment(), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **more},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return {
        name: {**one, **json.loads((directory / f"{name}.json").read_text("utf-8"))}
        for name, one in jobs.items()
    }


@pytest.fixture(scope="module")
def asked(
    fresh_model: Make, make_model: Make, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Job]]:
    """All jobs, with the answers of vLLM, by its model runner."""
    root = tmp_path_factory.mktemp("vllm")
    models = {kind: make_tiny(kind, fresh_model, make_model, root / kind) for kind in KINDS}
    jobs = jobs_of_the_tiny_models(models, root)
    jobs["embedded"] = job_of_the_embedded_model()
    jobs |= jobs_of_the_base_model(models["converted"], root)
    return {runner: answer(jobs, root / runner, **own) for runner, own in RUNNERS.items()}


@pytest.fixture(params=RUNNERS)
def found(asked: dict[str, dict[str, Job]], request: pytest.FixtureRequest) -> dict[str, Job]:
    """The jobs of one model runner."""
    return asked[request.param]


def check(job: Job) -> None:
    """Every answer begins with what `generate` said until the end of its text."""
    wrong = []
    for request, (answer,) in zip(job["requests"], job["answers"], strict=True):
        if answer[: len(request["wanted"])] != request["wanted"]:
            wrong.append((request["options"], answer, request["wanted"]))
    assert not wrong


@pytest.mark.parametrize(
    "name", [f"modes-{kind}" for kind in KINDS] + [f"devices-{kind}" for kind in ON_TWO_DEVICES]
)
def test_all_modes_in_one_batch_say_what_generate_says(found: dict[str, Job], name: str) -> None:
    requests = found[name]["requests"]
    texts = {tuple(one["wanted"]) for one in requests}
    assert len(texts) == len(requests) == 3 * len(CALLS)
    check(found[name])


def test_arrivals_chunks_and_preemption_change_nothing(found: dict[str, Job]) -> None:
    check(found["crowd"])
    assert found["crowd"]["counts"]["vllm:num_preemptions"] > 0


def test_individuals_share_the_cache_of_a_prompt(found: dict[str, Job]) -> None:
    shared = found["prefix"]
    assert len({tuple(one["wanted"]) for one in shared["requests"]}) == 3
    check(shared)
    assert shared["counts"]["vllm:prefix_cache_hits"] >= 3 * 64


@pytest.mark.parametrize("dtype", DTYPES)
def test_standard_is_the_greedy_choice_of_the_base_model_in_vllm(
    found: dict[str, Job], dtype: str
) -> None:
    greedy = found[f"base-{dtype}"]["answers"]
    assert found[f"standard-{dtype}"]["answers"] == greedy
    assert found[f"zero-{dtype}"]["answers"] == greedy


def test_further_texts_are_those_of_the_successors(found: dict[str, Job]) -> None:
    pair, first, second, *drawn = found["several"]["answers"]
    assert pair == [*first, *second]
    texts = {tuple(text) for answer in drawn for text in answer}
    assert len(texts) == 4  # nobody was named: four different ones


def test_the_embedded_model_says_what_generate_says(found: dict[str, Job]) -> None:
    assert len(found["embedded"]["requests"]) == 40
    check(found["embedded"])


def test_the_bar_is_computed_where_a_row_needs_it(found: dict[str, Job]) -> None:
    check(found["causal"])
    assert found["causal"]["counts"]["bars"] == 0
    assert found["modes-trained"]["counts"]["bars"] >= TOKENS


def test_the_benchmark_compares_with_stock_vllm_and_with_generate(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARK), "--quick", "--python", PYTHON]
    page = tmp_path / "vllm.md"
    done = subprocess.run(
        [*command, "--output", str(page)],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "|---|" in page.read_text("utf-8")
    rows = json.loads(page.with_suffix(".json").read_text("utf-8"))
    assert [row["mode"] for row in rows] == ["standard", "causal", "sampling"]
    assert all(row["equal"] == row["batch"] == 2 for row in rows)
    assert rows[0]["greedy"] == 2
    assert all(low > 0 for row in rows for low in (row["to_stock"][1], row["to_generate"][1]))


# ---------------------------------------------------------------- over HTTP


@contextlib.contextmanager
def started(command: list[str], log: Path, variables: dict[str, str]) -> Iterator[str]:
    """A server that takes --host and --port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*command, "--port", str(port), "--host", "127.0.0.1"]
    with (
        log.open("w") as out,
        subprocess.Popen(command, env=variables, stdout=out, stderr=subprocess.STDOUT) as process,
    ):
        try:
            url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + LIMIT
            while not is_up(url):
                assert process.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < deadline, log.read_text()[-3000:]
                time.sleep(1)
            yield url
        finally:
            process.terminate()
            process.wait(60)


def server(directory: Path, log: Path, *options: str) -> Any:
    """vLLM's own server with our middleware."""
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(directory)]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512"]
    command += ["--served-model-name", "m", *options]
    command += ["--middleware", "causal_qwen.vllm.middleware.CausalFields"]
    return started(command, log, environment())


def is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health") as reply:
            return reply.status == 200
    except OSError:
        return False


def post(url: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    request = urllib.request.Request(
        f"{url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_the_server_takes_the_fields_of_causal_qwen_serve(tmp_path: Path) -> None:
    from causal_qwen.conversion.convert import default_model
    from causal_qwen.conversion.opening import open_model
    from causal_qwen.engines.torch import chat_inputs
    from causal_qwen.individuals import seed_of

    processor, model = open_model(str(default_model()))

    def text(inputs: Any, **call: Any) -> str:
        ids = torch.as_tensor(inputs["input_ids"])
        found = model.generate(ids, max_new_tokens=12, **call)[0, ids.shape[1] :]
        return processor.decode(found, skip_special_tokens=True)

    prompt, messages = "Once upon a time", [{"role": "user", "content": "Name a colour."}]
    read, chat = processor(prompt, return_tensors="pt"), chat_inputs(processor, messages)
    body = {"model": "m", "prompt": prompt, "max_tokens": 12}
    with server(default_model(), tmp_path / "log") as url:

        def complete(**fields: Any) -> Any:
            status, reply = post(url, "/v1/completions", {**body, **fields})
            assert status == 200, reply
            return [choice["text"] for choice in reply["choices"]]

        assert complete() == [text(read, causal_mode="standard")]
        assert complete(individual=7, n=2) == [text(read, individual=7), text(read, individual=8)]
        assert complete(vllm_xargs={"individual": 7}) == [text(read, individual=7)]
        assert complete(individual=7, whole_words=False) == [
            text(read, individual=7, whole_words=False)
        ]
        assert complete(temperature=0.5, seed=4) == [
            text(read, causal_mode="sampling", individual=4, temperature=0.5)
        ]
        talk = {"model": "m", "messages": messages, "max_tokens": 12, "user": "ada"}
        status, reply = post(url, "/v1/chat/completions", talk)
        assert status == 200, reply
        assert reply["choices"][0]["message"]["content"] == text(chat, individual=seed_of("ada"))
        assert complete(individual="Ada") == [text(read, individual="ada")]


def fifty_requests() -> list[tuple[str, dict[str, Any]]]:
    """Requests whose answers are not left to chance."""
    prompts = ("Once upon a time", "The best way to cook rice is", "Dear diary, today")
    completions: list[dict[str, Any]] = [
        {},
        {"causal_mode": "standard"},
        {"temperature": 0},
        {"causal_mode": "compatible", "temperature": 0},
        {"individual": 7},
        {"individual": 8, "n": 2},
        {"user": "ada"},
        {"user": "bo", "persistence": 0.5},
        {"causal_mode": "causal", "seed": 5, "temperature": 1.5},
        {"temperature": 0.7, "seed": 4},
        {"causal_mode": "sampling", "individual": 3, "n": 2},
        {"individual": 9, "min_p": 0.3, "top_k": 20},
        {"individual": 10, "top_p": 0.8, "whole_words": False, "avoid_repeats": 0},
        {"individual": 11, "stop": [" the", ","]},
    ]
    messages = [
        [{"role": "user", "content": "Name a colour."}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}],
    ]
    chats: list[dict[str, Any]] = [
        {},
        {"user": "ada"},
        {"individual": 7, "n": 2, "stop": "."},
        {"temperature": 0.5, "seed": 2, "repetition_penalty": 1.2},
    ]
    requests = [
        ("/v1/completions", {"prompt": prompt, "max_tokens": 12, **fields})
        for prompt in prompts
        for fields in completions
    ]
    requests += [
        ("/v1/chat/completions", {"messages": talk, "max_tokens": 12, **fields})
        for talk in messages
        for fields in chats
    ]
    assert len(requests) == 50
    return requests


def test_both_servers_answer_fifty_requests_alike(tmp_path: Path) -> None:
    from causal_qwen.conversion.convert import default_model

    def answers(url: str) -> list[Any]:
        found = []
        for path, body in fifty_requests():
            status, reply = post(url, path, {"model": "m", **body})
            assert status == 200, (body, reply)
            said = [
                (
                    one["message"]["content"] if "message" in one else one["text"],
                    one["finish_reason"],
                )
                for one in reply["choices"]
            ]
            found.append((body, said, reply["usage"]["completion_tokens"]))
        return found

    ours = [sys.executable, "-m", "causal_qwen", "serve", "--model", str(default_model())]
    ours += ["--name", "m"]
    with started(ours, tmp_path / "ours.log", dict(os.environ)) as url:
        wanted = answers(url)
    assert len({text for _, said, _ in wanted for text, _ in said}) > 40
    with server(default_model(), tmp_path / "log") as url:
        found = answers(url)
    assert [pair for pair in zip(found, wanted, strict=True) if pair[0] != pair[1]] == []
