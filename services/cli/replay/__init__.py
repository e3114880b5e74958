"""`ei replay`: recorded agents against a running cluster, and what they saw."""
