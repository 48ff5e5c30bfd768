"""Playground: one page in the browser, offline, to try every feature.

    launch()                                # what `causal-qwen app` does
    launch(url="http://127.0.0.1:8000")     # with the model of a server, without torch

In:   a model directory or a server, and what a visitor types, clicks and drags.
Out:  a page of five tabs on 127.0.0.1: Generate, Individuals, Counterfactual, Numbers, Tokens.

    page             the tabs, their components and handlers
    server           a model -> the page on 127.0.0.1
    uploads          uploaded files -> within a total size, then deleted
    provider         what the page asks of a model, here or on a server
    state            a model here, which all visitors share: its worker, the predictors
    remote           a model on a server, through its routes
    worker           the thread that runs the model, and the queue in front of it
    modes            the four decoding modes, side by side
    individuals      the individuals of one visitor
    counterfactuals  the fields of an edit -> the two texts of one individual
    predictors       a text -> a number with its uncertainty
    token_view       one token -> the scores and the U that chose it
    text_edits       prompts, numbers and drags are checked
    rendering        all of these -> HTML and SVG

Open `page` first, then `provider`. Only `page` and `server` import Gradio; `state` and what only it
imports (`counterfactuals`, `predictors`, `token_view`) need torch. Which requests are answered
(Host, Origin, password, length) is decided in `serving.security`.
"""

from causal_qwen.playground.server import launch

__all__ = ["launch"]
