"""`python -m causal_qwen.cli`, as torchrun and accelerate start it."""

from causal_qwen.cli.program import main

if __name__ == "__main__":
    main()
