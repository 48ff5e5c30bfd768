"""`python -m causal_qwen`: the command line, also for torchrun and accelerate."""

from causal_qwen.cli import main

if __name__ == "__main__":
    main()
