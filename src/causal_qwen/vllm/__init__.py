"""vLLM: a converted model in vLLM, every request with its own individual and mode.

    python -m vllm.entrypoints.openai.api_server --model DIRECTORY \\
           --middleware causal_qwen.vllm.middleware.CausalFields

In:   requests to vLLM, in the fields of `causal_qwen.serving.requests`.
Out:  the choice of every row, decided by the code that decides in `generate`.

    plugin      what vLLM loads: the names of the models, and what they refuse to start with
    model       Qwen2 of vLLM with an individual U before the scores
    admission   the fields of a request -> its settings and its individual, before it is queued
    rows        the requests of a step: rows with equal rules are decided together
    processor   the logits processors that vLLM's two runners call: which requests are in which rows
    middleware  lets HTTP requests name our fields beside OpenAI's

    HTTP -> middleware -> vLLM -> admission -> vLLM's scheduler -> model -> processor -> rows

The model keeps U of the rows of a step; the processor turns loc_S into the choice and leaves only
that token finite. Runs with the older transformers of vLLM: uses no Hugging Face model.

Open `rows` first, then `processor`.
"""
