"""What a runner is made of: its spec, the step contract, attention, loading, sampling."""
