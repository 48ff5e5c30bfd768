"""Training: rows of text and numbers -> a trained model, its metrics and its curves.

In:   JSONL, CSV, text or a dataset's name, and a converted model.
Out:  a model directory, metrics.json and the log of the run.

    data        files -> rows -> padded batches
    authors     every author's texts -> one learned individual
    metrics     what is measured on held-out text, with intervals
    evaluation  models and checkpoints, side by side; the page of a run's curves
    trainer     `CausalTrainer`: Hugging Face's Trainer with our loss terms and metrics;
                the run in the terminal, and its checkpoints
    run         a whole run, as `causal-qwen train` starts it

Open `run` first.
"""
