"""Benchmarks of a model or of a run's checkpoints: sampled with vLLM or in process, graded, with their uncertainty."""
