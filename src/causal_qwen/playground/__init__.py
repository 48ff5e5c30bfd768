"""Playground: one page in the browser, offline, on which everything can be tried.

    launch()                # what `causal-qwen app` does

The file names are the data flow here, too; only `page` and `server` know Gradio:

    limits     what a visitor may ask for
    worker     one thread that does the model's work, one step at a time
    wording    a word or a number of a text, changed
    voices     prompts -> texts that grow word by word
    people     the individuals of one visitor
    worlds     the same individual, with and without an edit
    oracles    a text -> a number with its uncertainty
    inside     one token -> the scores and the U behind it
    studio     the open model, and what its visitors share
    pictures   all of these -> HTML and SVG
    page       five tabs
    server     a model -> the page on 127.0.0.1
"""

from causal_qwen.playground.server import launch

__all__ = ["launch"]
