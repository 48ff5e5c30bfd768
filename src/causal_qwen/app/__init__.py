"""Playground: one page in the browser, offline, to try every feature. A client of the server.

    launch()                                # what `causal-qwen app` does: server and page
    launch(url="http://127.0.0.1:8000")     # the page of another server's model, without torch

In:   a model directory or a server, and what a visitor types and clicks.
Out:  a page on 127.0.0.1: Generate, Individuals, Panel, Counterfactual, Numbers, Tokens.

    server     the page on an address of this machine
    page       the tabs, their components and handlers (page.css, tokens.js)
    served     what a visitor writes, and what the page asks of the routes of `causal-qwen serve`
    rendering  texts, comparisons, forecasts and token views -> HTML and SVG
    local      without `--url`: a server in this process, its regressors

Open `page` first, then `served`. `local` imports torch; `page` and `server` import Gradio.
"""

from causal_qwen.app.server import launch

__all__ = ["launch"]
