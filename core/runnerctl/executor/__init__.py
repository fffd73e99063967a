"""Executors: how an engine reaches its runner, in this process or in others."""
