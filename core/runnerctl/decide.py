"""`decide_config` under its former name, for imports not changed yet."""

from runnerctl.deciding import decide_config

__all__ = ["decide_config"]
