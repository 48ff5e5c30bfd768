"""`python -m causal_qwen.cli`, for torchrun and accelerate."""

from causal_qwen.cli.program import main

if __name__ == "__main__":
    main()
