"""Serving: a model behind OpenAI's protocol, every request with its own individual and mode.

    causal-qwen serve                       # what `server.launch` does
    curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
         -d '{"messages": [{"role": "user", "content": "Hello"}], "user": "ada"}'

In:   HTTP requests.
Out:  texts (whole or as events), individuals, counterfactuals, numbers, metrics.

    schemas        the fields of every request, as pydantic models; errors of one sentence
    requests       fields of a request -> the call of `generate`; no torch, no web
    limits         how much may be asked for
    rows           one text as it grows; what a backend offers
    batching       the thread that decodes, and the queue in front of it
    replies        texts -> the objects of OpenAI's API
    service        all of these together: one loaded model
    individuals    those that the server keeps on disk
    analyses       counterfactuals, numbers and tokens
    app            the routes
    security       which requests are answered: Host, Origin, key, length; the playground's, too
    connections    an app on a socket, slow clients closed; the playground's, too
    metrics        counters for Prometheus
    sockets        the address to listen on
    server         loads a model and serves it until a signal
    client         the other side: requests of `chat --url` and `app --url`; no torch, no web

    HTTP -> security -> app (schemas) -> requests -> service -> batching -> engines
                                   ^---- replies <---------------'

Open `requests` first, then `batching`.
"""
