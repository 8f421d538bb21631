"""GRPO-family training of reasoning models on Slurm, without Ray."""

__version__ = "0.1.0"
