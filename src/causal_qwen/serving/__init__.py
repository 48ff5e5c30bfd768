"""Serving: a model behind OpenAI's protocol, every request with its own individual and mode.

    causal-qwen serve                       # `cli.serving`
    curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
         -d '{"messages": [{"role": "user", "content": "Hello"}], "user": "ada"}'

    requests       the fields of a request, their limits, and the call of `generate`; no web
    batching       the thread that decodes, and the queue in front of it
    replies        texts -> the objects of OpenAI's API
    service        all of these together: one loaded model
    analyses       shares, panels, counterfactuals, numbers and tokens
    app            the routes, and figures for Prometheus
    security       which requests are answered: Host, Origin, key, length; the playground's, too
    connections    an app on an address, until a signal; the playground's, too
    client         the other side: requests of `chat --url` and `app --url`; no torch

    HTTP -> security -> app -> requests -> service -> batching -> engines
                         ^------ replies <--------------'

Open `requests` first, then `batching`.
"""
