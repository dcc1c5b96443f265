"""Classes that derive from lm-evaluation-harness, an optional dependency."""
