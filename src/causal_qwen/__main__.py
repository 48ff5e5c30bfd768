"""`python -m causal_qwen`: the command line."""

from causal_qwen.cli import main

if __name__ == "__main__":
    main()
